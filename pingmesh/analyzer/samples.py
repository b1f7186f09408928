"""Counts of both ends joined to one-way samples.

Forward: probes sent against probes received. Reverse: ACKs sent against ACKs received. Without the responder's
count the direction is unknown and the sample is a round trip; it never means "not received".
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

from pingmesh.analyzer.flows import ACK, PROBE, Flow, FlowBook
from pingmesh.analyzer.waits import USUAL, Waits
from pingmesh.messages import (
    PROBER_COLUMNS,
    RESPONDER_COLUMNS,
    WINDOW_NS,
    ProberRows,
    Report,
    unpack_columns,
    unpack_raw,
)

ROUND_TRIP = 2
KEEP_NS = 120 * 1_000_000_000
GIVE_UP_NS = 12 * 1_000_000_000


@dataclass(frozen=True, slots=True)
class Sample:
    """Packets of one flow in one direction over [start, end) of the analyzer's clock.

    `role` is PROBE, ACK or ROUND_TRIP (direction unknown). `rtt_ns` is the mean network RTT over `rtts` probes.
    `confirmed`: from an active confirmation, not from the list's own probes.
    """

    start: int
    end: int
    flow: Flow
    cls: str
    role: int
    sent: int
    lost: int
    rtt_ns: int = 0
    rtts: int = 0
    confirmed: bool = False


@dataclass(slots=True)
class ProberCounts:
    """One flow and window as the prober counted it."""

    sent: int = 0
    arrived: int = 0
    ack1: int = 0
    ack2: int = 0
    lost: int = 0
    late: int = 0
    excluded: int = 0
    send_error: int = 0
    rtt_sum: int = 0
    rtt_max: int = 0

    def add(self, more: ProberCounts) -> None:
        """Add a later report's increments."""
        self.sent += more.sent
        self.arrived += more.arrived
        self.ack1 += more.ack1
        self.ack2 += more.ack2
        self.lost += more.lost
        self.late += more.late
        self.excluded += more.excluded
        self.send_error += more.send_error
        self.rtt_sum += more.rtt_sum
        self.rtt_max = max(self.rtt_max, more.rtt_max)


@dataclass(slots=True)
class ResponderCounts:
    """One flow and window as the responder counted it."""

    received: int = 0
    ack1: int = 0
    ack2: int = 0
    mismatched: int = 0


def prober_rows(columns: bytes) -> Iterator[tuple[int, ProberCounts]]:
    """(index, counts) of each row. Raises BadMessageError."""
    cols = unpack_columns(PROBER_COLUMNS, columns)
    for row in zip(*cols, strict=True):
        yield row[0], ProberCounts(*row[1:])


WindowKey = tuple[int, int, int, int]
"""(source RNIC, source epoch, list version, window)."""


def responder_rows(columns: bytes) -> Iterator[tuple[WindowKey, int, ResponderCounts]]:
    """(window key, index, counts) of each row. Raises BadMessageError."""
    cols = unpack_columns(RESPONDER_COLUMNS, columns)
    for row in zip(*cols, strict=True):
        yield (row[0], row[1], row[2], row[3]), row[4], ResponderCounts(*row[5:])


def check_columns(report: Report) -> None:
    """Raises BadMessageError if a report's columns cannot be read: it is taken in as a whole or not at all."""
    for rows in report.prober:
        unpack_raw(PROBER_COLUMNS, rows.columns)
    unpack_raw(RESPONDER_COLUMNS, report.responder)


def one_way(
    flow: Flow, cls: str, p: ProberCounts, r: ResponderCounts | None, start: int, end: int, confirmed: bool
) -> list[Sample]:
    """The samples of one flow and window. `r` None: the responder's count is not known."""
    rtts = p.ack2 if p.rtt_sum else 0
    rtt = p.rtt_sum * 100 // rtts if rtts > 0 else 0
    if r is None or r.received < p.arrived:
        # An ACK proves that its probe arrived: a responder that counted fewer has forgotten some (it restarted, had
        # no room, or its report was lost), and what it says is no count.
        return [Sample(start, end, flow, cls, ROUND_TRIP, p.sent, max(0, p.sent - p.arrived), rtt, rtts, confirmed)]
    acks = p.ack1 + p.ack2
    # Probes that are no evidence were answered too, and the prober leaves those ACKs out of its count.
    acks_sent = max(r.ack1 + r.ack2 - 2 * p.excluded, acks)
    return [
        Sample(start, end, flow, cls, PROBE, p.sent, max(0, p.sent - r.received), rtt, rtts, confirmed),
        Sample(start, end, flow, cls, ACK, acks_sent, acks_sent - acks, 0, 0, confirmed),
    ]


def _amend(samples: list[Sample], late: ProberCounts) -> Iterator[Sample]:
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


class SampleStore:
    """Samples of the last two minutes, and the windows that wait for the other end's report."""

    def __init__(self, flows: FlowBook, waits: Waits = USUAL) -> None:
        self._flows = flows
        self._settle_ns = waits.settle_ns
        self.samples: deque[Sample] = deque()
        self.not_before = 0
        """Windows that began earlier are left out: whose paths we did not know then, we cannot judge now."""
        self._windows: dict[WindowKey, _Window] = {}
        self._responders: dict[WindowKey, dict[int, ResponderCounts]] = {}
        self._responder_seen: dict[WindowKey, int] = {}
        self.mismatched: dict[str, int] = {}
        """Probes that arrived in another class than they left in, by source RNIC."""

    def add_prober(self, rows: ProberRows, offset: int, now: int) -> None:
        """The prober's rows of one window; `offset` turns its clock into ours. Raises BadMessageError."""
        key = (rows.rnic, rows.epoch, rows.list_version, rows.window)
        start = rows.window * WINDOW_NS + offset
        window = self._windows.get(key)
        if window is None:
            if start < max(self.not_before, now - KEEP_NS) or start > now + WINDOW_NS:
                return  # from before an outage: history, not evidence for now
            window = self._windows[key] = _Window(start, start + WINDOW_NS)
        for index, counts in prober_rows(rows.columns):
            if index in window.joined:
                self.samples.extend(_amend(window.joined[index], counts))
            elif index in window.flows:
                window.flows[index].add(counts)
            elif counts.sent > 0 or counts.excluded > 0:
                window.flows[index] = counts  # an amendment to what is joined and forgotten would stand alone

    def add_responder(self, columns: bytes, now: int) -> None:
        """A responder's increments. Raises BadMessageError."""
        for key, index, counts in responder_rows(columns):
            have = self._responders.setdefault(key, {}).setdefault(index, ResponderCounts())
            have.received += counts.received
            have.ack1 += counts.ack1
            have.ack2 += counts.ack2
            self._responder_seen[key] = now
            if counts.mismatched > 0 and key[0] in self._flows.rnic_names:
                name = self._flows.rnic_names[key[0]]
                self.mismatched[name] = self.mismatched.get(name, 0) + counts.mismatched

    def add(self, samples: Iterable[Sample]) -> None:
        """Samples made elsewhere, by a confirmation."""
        self.samples.extend(samples)

    def join(self, now: int, covered_until: Callable[[str], int]) -> list[Sample]:
        """Turn windows that both ends have reported into samples; returns the new ones.

        `covered_until(host)`: until when (our clock) a host's responder reports are complete.
        """
        new: list[Sample] = []
        for key, window in list(self._windows.items()):
            new += self._join_window(key, window, now, covered_until)
            if now - window.end > GIVE_UP_NS + WINDOW_NS:
                del self._windows[key]
        for key, seen in list(self._responder_seen.items()):
            if now - seen > 2 * GIVE_UP_NS:
                del self._responder_seen[key]
                self._responders.pop(key, None)
        new = [s for s in new if s.sent]
        self.samples.extend(new)
        while self.samples and self.samples[0].end < now - KEEP_NS:
            self.samples.popleft()
        return new

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

    def since(self, start: int) -> list[Sample]:
        """Samples that began at or after a time."""
        return [s for s in self.samples if s.start >= start]
