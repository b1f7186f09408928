"""Samples turned into what the localiser takes: one-way packet counts over sets of elements."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from pingmesh.analyzer.flows import ACK, PROBE, Flow, FlowBook, PathSet
from pingmesh.analyzer.localise import Observation
from pingmesh.analyzer.samples import ROUND_TRIP, Sample
from pingmesh.analyzer.waits import USUAL

_ALTERNATIVES = 16

Sums = dict[tuple[Flow, int, str, PathSet], tuple[int, int]]
"""(sent, lost) by flow, role, class and the paths possible when the packets were sent."""


def paths_of(book: FlowBook, flow: Flow, role: int, when: int) -> PathSet:
    """What the packets of a sample crossed, by what was confirmed before `when`."""
    if role != ROUND_TRIP:
        return book.paths_at(flow, role, when)
    there = book.paths_at(flow, PROBE, when)
    back = book.paths_at(flow, ACK, when)
    return tuple(a + b for a in there for b in back)[:_ALTERNATIVES]


def crosses(paths: PathSet, elements: frozenset[str]) -> bool:
    """Whether every possible path crosses one of the elements."""
    return bool(paths) and all(not elements.isdisjoint(p) for p in paths)


@dataclass(frozen=True, slots=True)
class Walked:
    """What crossed a component. `last_lost`: end of the last sample (ns) with a loss, 0 without one."""

    sent: int
    last_lost: int
    delayed: int


def walked_since(
    book: FlowBook, samples: Iterable[Sample], elements: frozenset[str], slow_ns: int = USUAL.slow_ns
) -> Walked:
    """Sums of the one-way samples whose tuples, as last seen, cross one of the elements.

    Tuples that have come back to a component speak for it at once.
    """
    sent = last_lost = delayed = 0
    for s in samples:
        if s.role != ROUND_TRIP and crosses(book.last_seen_paths(s.flow, s.role, s.start), elements):
            sent += s.sent
            delayed += s.rtt_ns > slow_ns
            if s.lost > 0:
                last_lost = max(last_lost, s.end)
    return Walked(sent, last_lost, delayed)


def totals(book: FlowBook, samples: Iterable[Sample]) -> Sums:
    """Add samples up."""
    sums: dict[tuple[Flow, int, str, PathSet], list[int]] = defaultdict(lambda: [0, 0])
    for s in samples:
        t = sums[s.flow, s.role, s.cls, paths_of(book, s.flow, s.role, s.start)]
        t[0] += s.sent
        t[1] += s.lost
    return {k: (sent, min(sent, max(0, lost))) for k, (sent, lost) in sums.items() if sent > 0 and k[3]}


def loss_observations(sums: Sums) -> list[Observation]:
    """One observation a flow, direction, class and path set."""
    return [Observation(sent, lost, paths) for (_, _, _, paths), (sent, lost) in sums.items()]
