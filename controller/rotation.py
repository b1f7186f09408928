"""Which tuples to replace: old ones go bit by bit, those that no link needs go altogether. Pure functions.

Liu et al. 2024, §4.2 replaces 20 % of the tuples each hour, so that no flow of the job stays unwatched for long.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from controller.pinglist import MIN_PER_RNIC, Draft, Entry
from controller.sampling import tuples_needed
from pingmesh.messages import INTER_TOR

SPARE_SHARE = 0.05
"""At most this share of the tuples is given up at once."""

Paths = Mapping[tuple[str, str, int], tuple[str, ...]]


@dataclass(frozen=True)
class Slice:
    """One part of a rotation: `spare` can go at once, `old` when the `new` ones are traced."""

    spare: list[Entry]
    old: list[Entry]
    new: list[Entry]


def rotate(draft: Draft, paths: Paths, count: Counter[str], *, keep: int, share: float) -> Slice:
    """Choose a slice of the inter-ToR tuples between RNICs that are there.

    Args:
        draft: all entries; the new tuples are added to it.
        paths: traced links by tuple.
        count: tuples by link; lowered by what is given up.
        keep: tuples that every link keeps above what is spare.
        share: of the tuples that are replaced.
    """
    pool = sorted(
        e
        for e in draft.entries
        if e.kind == INTER_TOR and e.cls == 0 and e.source in draft.eligible and e.target in draft.eligible
    )
    draft.rng.shuffle(pool)
    spare = _above_minimum(draft, surplus(pool, paths, count, keep))[: max(round(len(pool) * SPARE_SHARE), 1)]
    left = set(spare)
    old = [e for e in pool if e not in left][: round(len(pool) * share)]
    unit_of = draft.reach.unit_of
    new = [draft.add(unit_of[e.source], unit_of[e.target]) for e in old]
    return Slice(spare, old, [e for e in new if e])


def _above_minimum(draft: Draft, spare: list[Entry]) -> list[Entry]:
    """Those that Eq. (1) and the minimum per RNIC do not ask for."""
    sent, received = draft.sent.copy(), draft.received.copy()
    unit_of = draft.reach.unit_of
    of_unit: Counter[object] = Counter()
    for name, n in sent.items():
        of_unit[unit_of[name]] += n
    out = []
    for e in spare:
        unit = unit_of[e.source]
        wanted = tuples_needed(draft.reach.parallel(unit, draft.rng))
        if of_unit[unit] > wanted and sent[e.source] > MIN_PER_RNIC and received[e.target] > MIN_PER_RNIC:
            of_unit[unit] -= 1
            sent[e.source] -= 1
            received[e.target] -= 1
            out.append(e)
    return out


def surplus(entries: Iterable[Entry], paths: Paths, count: Counter[str], keep: int) -> list[Entry]:
    """Class 0 entries that can go while every link of theirs keeps more than `keep` tuples, in the order given.

    `count` (tuples by link) is lowered by what is given away.
    """
    out: list[Entry] = []
    for e in entries:
        links = paths.get(e.tuple5, ())
        if e.cls == 0 and e.kind == INTER_TOR and links and all(count[link] > keep for link in links):
            count.subtract(links)
            out.append(e)
    return out
