"""Samples turned into what the localiser takes: one-way packet counts over sets of elements."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable

from pingmesh.analyzer.flows import ACK, PROBE, Flow, FlowBook, PathSet
from pingmesh.analyzer.localise import Observation
from pingmesh.analyzer.samples import ROUND_TRIP, Sample

_ALTERNATIVES = 16


def paths_of(book: FlowBook, flow: Flow, role: int, when: int) -> PathSet:
    """What the packets of a sample crossed, by what was confirmed before `when`."""
    if role != ROUND_TRIP:
        return book.paths_at(flow, role, when)
    there = book.paths_at(flow, PROBE, when)
    back = book.paths_at(flow, ACK, when)
    return tuple(a + b for a in there for b in back)[:_ALTERNATIVES]


def totals(samples: Iterable[Sample], keep: Callable[[Sample], bool]) -> dict[tuple[Flow, int, str], tuple[int, int]]:
    """(sent, lost) by (flow, role, class) over the samples kept."""
    sums: dict[tuple[Flow, int, str], list[int]] = defaultdict(lambda: [0, 0])
    for s in samples:
        if keep(s):
            t = sums[s.flow, s.role, s.cls]
            t[0] += s.sent
            t[1] += s.lost
    return {k: (sent, min(sent, max(0, lost))) for k, (sent, lost) in sums.items() if sent > 0}


def loss_observations(
    book: FlowBook, sums: dict[tuple[Flow, int, str], tuple[int, int]], when: int, cls: str | None = None
) -> list[Observation]:
    """One observation a flow, direction and class (or of one class only)."""
    out = []
    for (flow, role, name), (sent, lost) in sums.items():
        if cls is None or name == cls:
            paths = paths_of(book, flow, role, when)
            if paths:
                out.append(Observation(sent, lost, paths))
    return out


def delay_observations(book: FlowBook, samples: Iterable[Sample], when: int, threshold_ns: int) -> list[Observation]:
    """Round trips over both ways: all packets of a flow count as delayed if its mean RTT is over the threshold."""
    sums: dict[Flow, list[int]] = defaultdict(lambda: [0, 0])
    for s in samples:
        if s.rtts:
            t = sums[s.flow]
            t[0] += s.rtts
            t[1] += s.rtt_ns * s.rtts
    out = []
    for flow, (n, total) in sums.items():
        paths = paths_of(book, flow, ROUND_TRIP, when)
        if paths:
            out.append(Observation(n, n if total / n > threshold_ns else 0, paths))
    return out
