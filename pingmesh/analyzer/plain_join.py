"""Counts of both ends joined one by one: for the windows in which an RNIC's epoch changed, and as a test's oracle.

What arrives in order is joined as columns (`samples`); here is the same rule on plain objects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from pingmesh.analyzer.counts import ProberCounts, ResponderCounts, Sample, one_way
from pingmesh.analyzer.flows import FlowBook
from pingmesh.messages import WINDOW_NS

WindowKey = tuple[int, int, int, int]
"""(source RNIC, source epoch, list version, window)."""

KEEP_NS = 120 * 1_000_000_000
GIVE_UP_NS = 12 * 1_000_000_000


def amend(samples: list[Sample], late: ProberCounts) -> Iterator[Sample]:
    """Corrections for ACKs that came after their window was joined: what is late was not lost."""
    back_of = (late.arrived,) if len(samples) == 1 else (late.ack1 + late.ack2, late.arrived)
    for s, back in zip(reversed(samples), back_of, strict=True):
        if back > 0 and s.lost > 0:
            yield replace(s, sent=0, lost=-min(back, s.lost), rtt_ns=0, rtts=0)


@dataclass(slots=True)
class _Window:
    start: int
    end: int
    flows: dict[int, ProberCounts] = field(default_factory=dict)
    joined: dict[int, list[Sample]] = field(default_factory=dict)


class PlainJoin:
    """The windows that wait for the other end's report."""

    def __init__(self, flows: FlowBook, settle_ns: int) -> None:
        self._flows = flows
        self._settle_ns = settle_ns
        self.windows: dict[WindowKey, _Window] = {}
        self._responders: dict[WindowKey, dict[int, ResponderCounts]] = {}
        self._responder_seen: dict[WindowKey, int] = {}

    def add_prober(self, key: WindowKey, start: int, index: int, counts: ProberCounts) -> list[Sample]:
        """One flow's counts as the prober made them; returns the corrections that follow."""
        window = self.windows.get(key)
        if window is None:
            window = self.windows[key] = _Window(start, start + WINDOW_NS)
        if index in window.joined:
            return list(amend(window.joined[index], counts))
        if index in window.flows:
            window.flows[index].add(counts)
        elif counts.sent > 0 or counts.excluded > 0:
            window.flows[index] = counts  # an amendment to what is joined and forgotten would stand alone
        return []

    def add_responder(self, key: WindowKey, index: int, counts: ResponderCounts, now: int) -> None:
        """One flow's counts as the responder made them."""
        have = self._responders.setdefault(key, {}).setdefault(index, ResponderCounts())
        have.received += counts.received
        have.ack1 += counts.ack1
        have.ack2 += counts.ack2
        self._responder_seen[key] = now

    def join(self, now: int, covered_until: Callable[[str], int]) -> list[Sample]:
        """Turn windows that both ends have reported into samples; returns the new ones."""
        new: list[Sample] = []
        for key, window in list(self.windows.items()):
            new += self._join_window(key, window, now, covered_until)
            if now - window.end > GIVE_UP_NS + WINDOW_NS:
                del self.windows[key]
        for key, seen in list(self._responder_seen.items()):
            if now - seen > 2 * GIVE_UP_NS:
                del self._responder_seen[key]
                self._responders.pop(key, None)
        return [s for s in new if s.sent]

    def _join_window(
        self, key: WindowKey, window: _Window, now: int, covered_until: Callable[[str], int]
    ) -> Iterator[Sample]:
        remote = self._responders.get(key, {})
        for index, counts in list(window.flows.items()):
            flow = self._flows.flows.get((key[0], key[2], index))
            if flow is None:
                del window.flows[index]
                continue
            if covered_until(flow.dst_host) >= window.end + self._settle_ns:
                r: ResponderCounts | None = remote.get(index, ResponderCounts())
            elif now - window.end > GIVE_UP_NS:
                r = None
            else:
                continue
            del window.flows[index]
            window.joined[index] = one_way(flow, flow.cls_name, counts, r, window.start, window.end, False)
            yield from window.joined[index]
