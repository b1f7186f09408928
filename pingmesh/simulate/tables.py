"""What a simulated fabric counted, as the tables that inference takes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from pingmesh.analyzer.table import Bools, Floats, Ints, Table, pointer
from pingmesh.offline.pathsets import Alternatives, PathSets, mixed_table
from pingmesh.simulate.fabric import Small
from pingmesh.simulate.probes import CLASSES
from pingmesh.simulate.world import BACK, THERE, Counts, World


@dataclass(frozen=True, slots=True, eq=False)
class Sums:
    """Counts added up; columns are (rows,). Round trips where the responder's counts were missing.

    `flows` is the flow of each row, `rtts` and `rtt_sum_ns` measured round trips.
    """

    flows: Ints
    sent: Ints
    received: Ints
    acks_sent: Ints
    acks_back: Ints
    trips: Ints
    trips_back: Ints
    rtts: Ints
    rtt_sum_ns: Ints

    @classmethod
    def of(cls, flows: int, counts: Iterable[Counts], *, all_round_trips: bool = False) -> Sums:
        """Add up what is valid, a row a flow; what confirmed it in another class than its own (`Counts.as_class`) has
        rows of its own. With `all_round_trips` as if no responder had reported. O(rows)."""
        sizes = flows * (1 + len(CLASSES))
        out = np.zeros((8, sizes), np.int64)
        for c in counts:
            row = c.flows if c.as_class is None else c.flows + flows * (1 + c.as_class)
            both = c.valid & c.both & (not all_round_trips)
            alone = c.valid & ~both
            one_way = (c.sent, c.received, c.acks_sent, c.acks_back)
            columns = [*(x * both for x in one_way), c.sent * alone, c.answered * alone]
            columns += [c.answered * c.valid, c.rtt_sum_ns * c.valid]
            for total, column in zip(out, columns, strict=True):
                total += np.bincount(row, weights=column, minlength=sizes).astype(np.int64)
        used = np.flatnonzero((np.arange(sizes) < flows) | out.any(axis=0))
        return cls(used % flows, *out[:, used])


class Tables:
    """Makes tables of one world; elements are numbered by `index`, which grows by those it lacks."""

    def __init__(self, world: World, index: dict[str, int]) -> None:
        self.world = world
        self.index = index
        self._number = np.array([index.setdefault(n, len(index)) for n in world.fabric.element_names], np.int64)
        self._sets = PathSets(world.fabric.topology, index)

    def losses(self, sums: Sums, *, hidden: bool = False) -> Table:
        """One-way packets, and round trips where only the prober counted. `hidden`: as if no path had been traced."""
        w = self.world
        none = np.zeros(len(sums.flows), bool)
        known = [none if hidden or w.spray else ~self._moving(role)[sums.flows] for role in (THERE, BACK)]
        parts = [
            _Part(THERE, known[THERE], sums.sent, sums.sent - sums.received),
            _Part(BACK, known[BACK], sums.acks_sent, sums.acks_sent - sums.acks_back),
            _Part(None, known[THERE] & known[BACK], sums.trips, sums.trips - sums.trips_back),
        ]
        return self._table(sums.flows, parts)

    def delays(self, sums: Sums, threshold_ns: float) -> Table:
        """Round trips: all of a flow count as slow if their mean is over the threshold."""
        slow = np.where(sums.rtt_sum_ns > threshold_ns * np.maximum(sums.rtts, 1), sums.rtts, 0)
        known = ~(self._moving(THERE) | self._moving(BACK))[sums.flows] & (not self.world.spray)
        return self._table(sums.flows, [_Part(None, known, sums.rtts, slow)])

    def _moving(self, role: int) -> Bools:
        moving: Bools = np.isfinite(self.world.moved_seen[role])
        return moving

    def _table(self, flows: Ints, parts: list[_Part]) -> Table:
        lengths, flat, known_counts = [], [], []
        sets: list[Alternatives] = []
        set_rows: list[int] = []
        unknown_counts: list[tuple[int, int]] = []
        numbers: dict[tuple[int | None, str, str], int] = {}
        for part in parts:
            rows = np.flatnonzero((part.sent > 0) & part.known)
            paths = self._paths(part.role, flows[rows])
            there = paths >= 0
            lengths.append(there.sum(axis=1))
            flat.append(self._number[paths[there]])
            known_counts.append(np.stack((part.sent[rows], part.lost[rows])))
            for row in np.flatnonzero((part.sent > 0) & ~part.known):
                found = self._set(part.role, int(flows[row]), numbers, sets)
                if found is not None:
                    set_rows.append(found)
                    unknown_counts.append((int(part.sent[row]), int(part.lost[row])))
        known = np.concatenate(known_counts, axis=1).astype(np.float64)
        unknown: Floats = np.array(unknown_counts, np.float64).reshape(-1, 2).T
        return mixed_table(
            len(self.index),
            pointer(np.concatenate(lengths)),
            np.concatenate(flat),
            (known[0], known[1]),
            sets,
            np.array(set_rows, np.int64),
            (unknown[0], unknown[1]),
        )

    def _paths(self, role: int | None, rows: Ints) -> Small:
        if role is not None:
            return self.world.told[role][rows]
        return np.concatenate([self.world.told[r][rows] for r in (THERE, BACK)], axis=1)

    def _set(
        self, role: int | None, flow: int, numbers: dict[tuple[int | None, str, str], int], sets: list[Alternatives]
    ) -> int | None:
        f, rnics = self.world.flows, self.world.fabric.rnics
        src, dst = rnics[f.src[flow]], rnics[f.dst[flow]]
        key = (role, src, dst)
        if key not in numbers:
            if role is None:
                found = self._sets.round_trip(src, dst)
            else:
                found = self._sets.one_way(src, dst) if role == THERE else self._sets.one_way(dst, src)
            if not found:
                return None
            numbers[key] = len(sets)
            sets.append(found)
        return numbers[key]


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """Rows of one role (None: round trips), (rows,)."""

    role: int | None
    known: Bools
    sent: Ints
    lost: Ints
