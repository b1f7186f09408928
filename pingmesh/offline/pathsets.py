"""The ECMP sets of RNIC pairs as element numbers, for flows whose path nobody traced."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle, islice

import numpy as np

from pingmesh.analyzer.table import Floats, Ints, Table, pointer
from topology.model import Topology
from topology.paths import path_elements, rnic_paths

MOST_ALTERNATIVES = 256
"""Of larger sets as many paths, evenly chosen, stand for all."""

Alternatives = tuple[Ints, ...]


class PathSets:
    """Sets by RNIC names, each worked out once; `index` numbers the elements and grows by those it lacks."""

    def __init__(self, topology: Topology, index: dict[str, int]) -> None:
        self._topology = topology
        self._index = index
        self._one_way: dict[tuple[str, str], Alternatives] = {}
        self._round_trip: dict[tuple[str, str], Alternatives] = {}

    def one_way(self, src: str, dst: str) -> Alternatives:
        """Every path between two RNICs that ECMP may choose; none if they are not joined.

        Raises:
            KeyError: an RNIC is not in the topology.
        """
        known = self._one_way.get((src, dst))
        if known is None:
            t = self._topology
            names = [path_elements(t, src, dst, p) for p in rnic_paths(t, t.rnics[src], t.rnics[dst])]
            if len(names) > MOST_ALTERNATIVES:
                names = [names[i * len(names) // MOST_ALTERNATIVES] for i in range(MOST_ALTERNATIVES)]
            index = self._index
            known = tuple(np.array([index.setdefault(e, len(index)) for e in p], np.int64) for p in names)
            self._one_way[src, dst] = known
        return known

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
