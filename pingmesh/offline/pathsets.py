"""The ECMP sets of RNIC pairs as element numbers, for flows whose path nobody traced."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from typing import Literal, TypeVar

import numpy as np

from pingmesh.analyzer.candidates import rnic_element
from pingmesh.analyzer.table import Bools, Floats, Ints, Table, pointer
from topology.model import Rnic, Topology
from topology.paths import Half, ecmp_halves, ecmp_paths, path_elements, rnic_paths

MOST_ALTERNATIVES = 256
"""Of larger sets as many paths, evenly chosen, stand for all."""

Alternatives = tuple[Ints, ...]
T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class Ways:
    """All that pairs of RNICs at the same switches have in common: how many paths, and the halves they are made of."""

    count: int
    up: tuple[Half, ...]
    down: tuple[Half, ...]


class PathSets:
    """Sets by RNIC names, each worked out once; `index` numbers the elements and grows by those it lacks.

    What lies between two ToRs is shared by all RNICs below them.
    """

    def __init__(self, topology: Topology, index: dict[str, int]) -> None:
        self._topology = topology
        self._index = index
        self._one_way: dict[tuple[str, str], Alternatives] = {}
        self._round_trip: dict[tuple[str, str], Alternatives] = {}
        self._between: dict[tuple[str, str], Alternatives] = {}
        self._ways: dict[tuple[tuple[str, ...], tuple[str, ...]], Ways] = {}
        self._starts = {r.name: tuple(dict.fromkeys(leg.switch for leg in r.legs)) for r in topology.rnics.values()}
        self._ends = {
            r.name: tuple(dict.fromkeys(leg.switch for leg in r.legs if leg.address == r.address))
            for r in topology.rnics.values()
        }

    def one_way(self, src: str, dst: str) -> Alternatives:
        """Every path between two RNICs that ECMP may choose; none if they are not joined.

        Raises:
            KeyError: an RNIC is not in the topology.
        """
        known = self._one_way.get((src, dst))
        if known is None:
            a, b = self._topology.rnics[src], self._topology.rnics[dst]
            if len(a.legs) == len(b.legs) == 1:
                start, end = a.legs[0].switch, b.legs[0].switch
                tx, rx = self._number(rnic_element(a, start, "tx")), self._number(rnic_element(b, end, "rx"))
                known = tuple(np.array([tx, *p, rx], np.int64) for p in self._middle(start, end))
            else:
                known = self._bonded(a, b)
            self._one_way[src, dst] = known
        return known

    def _middle(self, start: str, end: str) -> Alternatives:
        """The links between two ToRs: what all pairs of RNICs below them share."""
        known = self._between.get((start, end))
        if known is None:
            paths = _thinned(ecmp_paths(self._topology, start, end))
            known = tuple(np.array([self._number(d.name) for d in p], np.int64) for p in paths)
            self._between[start, end] = known
        return known

    def _bonded(self, a: Rnic, b: Rnic) -> Alternatives:
        t = self._topology
        names = _thinned([path_elements(t, a.name, b.name, p) for p in rnic_paths(t, a, b)])
        return tuple(np.array([self._number(e) for e in p], np.int64) for p in names)

    def _number(self, element: str) -> int:
        return self._index.setdefault(element, len(self._index))

    def ways(self, src: str, dst: str) -> Ways:
        """How many paths `one_way` has (before some stand for all), and their halves; O(1) for most pairs."""
        key = self._starts[src], self._ends[dst]
        known = self._ways.get(key)
        if known is None:
            count, up, down = 0, dict[Half, None](), dict[Half, None]()
            for start in key[0]:
                found = [h for end in key[1] if (h := ecmp_halves(self._topology, start, end)).count]
                best = min((h.hops for h in found), default=0)
                for h in found:
                    if h.hops == best:
                        count, up[h.up], down[h.down] = count + h.count, None, None
            known = self._ways[key] = Ways(count, tuple(up), tuple(down))
        return known

    def sides(self, rnic: str, side: Literal["tx", "rx"]) -> tuple[str, ...]:
        """The elements of which a packet that the RNIC sends, or is sent, crosses one."""
        switches = self._starts[rnic] if side == "tx" else self._ends[rnic]
        return tuple(rnic_element(self._topology.rnics[rnic], s, side) for s in switches)

    def round_trip(self, src: str, dst: str) -> Alternatives:
        """Ways there and back. Not all combinations, which would be their product: each way there with one of those
        back in turn, so that every link has the share of the alternatives that it has of the paths."""
        known = self._round_trip.get((src, dst))
        if known is None:
            there, back = self.one_way(src, dst), self.one_way(dst, src)
            n = max(len(there), len(back)) if there and back else 0
            known = tuple(np.concatenate(p) for p in islice(zip(cycle(there), cycle(back), strict=False), n))
            self._round_trip[src, dst] = known
        return known


class Parts:
    """What the flows of a large fabric have in common: the sides of RNICs, and the halves of ECMP sets.

    A packet crosses one path of each of its flow's parts. That the halves of one path meet at its top is lost, and with
    it little; a fabric has few parts, however many pairs probe.
    """

    def __init__(self, sets: PathSets, index: dict[str, int]) -> None:
        self._sets = sets
        self._index = index
        self._numbers: dict[Hashable, int] = {}
        self._paths: list[Alternatives] = []
        self._made: Table | None = None

    def of(self, a: str, b: str, there: bool, back: bool) -> tuple[int, ...]:
        """The numbers of the six parts of packets from `a` to `b`, back, or both; -1 for what they do not cross.

        Of round trips the links of both ways near one end are one part, in turn as in `PathSets.round_trip`: flows with
        losses have them so, and rates were wrong if clean flows had not.
        """
        to, fro = self._sets.ways(a, b), self._sets.ways(b, a)
        return (
            self._side(a, "tx") if there else -1,
            self._side(b, "rx") if there else -1,
            self._side(b, "tx") if back else -1,
            self._side(a, "rx") if back else -1,
            self._half(to.up if there else (), fro.down if back else ()),
            self._half(to.down if there else (), fro.up if back else ()),
        )

    def _side(self, rnic: str, side: Literal["tx", "rx"]) -> int:
        known = self._numbers.get((rnic, side))
        if known is None:
            known = self._add((rnic, side), tuple((e,) for e in self._sets.sides(rnic, side)))
        return known

    def _half(self, there: tuple[Half, ...], back: tuple[Half, ...]) -> int:
        known = self._numbers.get((there, back))
        if known is None:
            ways = [[tuple(d.name for d in way) for half in halves for way in half.ways] for halves in (there, back)]
            one, other = (w or [()] for w in ways)
            n = max(len(one), len(other))
            paths = [x + y for x, y in islice(zip(cycle(one), cycle(other), strict=False), n)]
            # Within one switch there is nothing to cross.
            key = there, back
            known = self._add(key, paths) if any(paths) else self._numbers.setdefault(key, -1)
        return known

    def _add(self, key: Hashable, paths: Sequence[tuple[str, ...]]) -> int:
        index = self._index
        self._paths.append(
            tuple(np.array([index.setdefault(e, len(index)) for e in p], np.int64) for p in _thinned(paths))
        )
        return self._numbers.setdefault(key, len(self._paths) - 1)

    def table(self, part: Ints, sent: Floats) -> Table:
        """Clean rows of parts. O(rows + paths of all parts x hops)."""
        return replace(self._whole(), row_set=part, sent=sent, lost=np.zeros(len(sent)))

    def within(self, flag: Bools) -> Bools:
        """Of which parts every path crosses an element that is flagged. O(paths of all parts x hops)."""
        t = self._whole()
        hits = np.concatenate((np.zeros(1, np.int64), np.cumsum(flag[t.path_elements])))
        hit: Bools = np.diff(hits[t.path_ptr]) > 0
        return np.logical_and.reduceat(hit, t.set_ptr[:-1]) if len(hit) else np.empty(0, bool)

    def _whole(self) -> Table:
        """All parts, without rows; made anew when there are more."""
        if self._made is None or len(self._made.set_ptr) - 1 < len(self._paths):
            none = np.zeros(1, np.int64), np.empty(0, np.int64), (np.empty(0), np.empty(0))
            empty = np.empty(0, np.int64), (np.empty(0), np.empty(0))
            self._made = mixed_table(len(self._index), *none, self._paths, *empty)
        return self._made


def _thinned(paths: Sequence[T]) -> Sequence[T]:
    """As many as `MOST_ALTERNATIVES`, evenly chosen."""
    if len(paths) <= MOST_ALTERNATIVES:
        return paths
    return [paths[i * len(paths) // MOST_ALTERNATIVES] for i in range(MOST_ALTERNATIVES)]


def stacked(a: Table, b: Table) -> Table:
    """The rows of two tables over the same elements. O(both)."""
    paths, sets = len(a.path_ptr) - 1, len(a.set_ptr) - 1
    return Table(
        elements=max(a.elements, b.elements),
        path_ptr=np.concatenate((a.path_ptr, a.path_ptr[-1] + b.path_ptr[1:])),
        path_elements=np.concatenate((a.path_elements, b.path_elements)),
        set_ptr=np.concatenate((a.set_ptr, paths + b.set_ptr[1:])),
        row_set=np.concatenate((a.row_set, sets + b.row_set)),
        sent=np.concatenate((a.sent, b.sent)),
        lost=np.concatenate((a.lost, b.lost)),
    )


def mixed_table(
    elements: int,
    known_ptr: Ints,
    known_elements: Ints,
    known: tuple[Floats, Floats],
    sets: Sequence[Alternatives],
    set_of: Ints,
    unknown: tuple[Floats, Floats],
) -> Table:
    """A table of flows with known paths (CSR) followed by flows of which only the set is known.

    Args:
        elements: how many there are.
        known_ptr: row -> positions in `known_elements`.
        known_elements: the paths of the rows with known paths.
        known: their (sent, lost).
        sets: distinct path sets.
        set_of: of each further row, its place in `sets`.
        unknown: their (sent, lost).

    O(rows x hops + set paths x hops).
    """
    rows = len(known_ptr) - 1
    flat = [p for s in sets for p in s]
    lengths = np.fromiter((len(p) for p in flat), np.int64, len(flat))
    sizes = np.fromiter((len(s) for s in sets), np.int64, len(sets))
    sent = np.concatenate((known[0], unknown[0])).astype(np.float64)
    lost = np.concatenate((known[1], unknown[1])).astype(np.float64)
    return Table(
        elements=elements,
        path_ptr=np.concatenate((known_ptr, known_ptr[-1] + pointer(lengths)[1:])),
        path_elements=np.concatenate((known_elements, *flat)) if flat else known_elements,
        set_ptr=np.concatenate((np.arange(rows + 1), rows + pointer(sizes)[1:])),
        row_set=np.concatenate((np.arange(rows), rows + set_of)),
        sent=sent,
        lost=np.clip(lost, 0, sent),
    )
