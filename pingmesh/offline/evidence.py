"""The table of a span of windows of a recording, and which of its flows cross a component."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pingmesh.analyzer.flows import Flow
from pingmesh.analyzer.symptoms import Crossing
from pingmesh.analyzer.table import Bools, Ints, Table, expand, pointer
from pingmesh.offline.pathsets import MOST_ALTERNATIVES, Alternatives, Parts, PathSets, mixed_table, stacked
from pingmesh.offline.recording import Keys, Recording
from pingmesh.records.model import ACK, PROBE, ROUND_TRIP

MOST_PATHS = 60_000
"""Possible paths of flows of unknown path that are weighed one by one in a table, as in the running analyzer. Of more,
clean flows tell by their parts (`Parts`), and those with losses are a choice that has no more."""
_GOLDEN = 0.6180339887498949
_TOLD_EVERY = 10_000
"""Pairs between two words of progress."""
_SHOWN_CROSSINGS = 20_000
"""Flows of a component whose counts tell its symptom; more of them tell no more."""


@dataclass(frozen=True, slots=True, eq=False)
class Sums:
    """Counts of each key over a span of windows, (keys,)."""

    sent: Ints
    lost: Ints
    rtts: Ints
    rtt_sum_ns: Ints


class Evidence:
    """All keys of a recording, their windows sorted, and tables of any span."""

    def __init__(
        self,
        recording: Recording,
        index: dict[str, int],
        progress: Callable[[int, int], None] = lambda done, of: None,
    ) -> None:
        """`progress` is told how many pairs of unknown path have been looked up, and of how many."""
        self.recording = recording
        self._progress = progress
        self.keys: Keys = recording.keys()
        cells = recording.cells()
        order = np.argsort(cells.window, kind="stable")
        self._cells = [c[order] for c in (cells.key, cells.sent, cells.lost, cells.rtts, cells.rtt_sum_ns)]
        self._window = cells.window[order]
        self.windows: Ints = np.unique(self._window)
        self._index = index
        self._sets = PathSets(recording.topology, index)
        self._known_sets: dict[int, Alternatives] = {}
        self._triples: Ints = np.empty((3, 0), np.int64)
        """(role, prober, target) of each set."""
        self._counts: Ints = np.empty(0, np.int64)
        """Paths of each set."""
        self._set_of = self._assign_sets()
        self.said: list[str] = []
        """What of the evidence was too much for the usual way, for the user."""
        self.ways_back = self._ack_keys()
        """Probe key -> the latest ACK key of its tuple and class with a known path, -1: none."""
        self.names: list[str] = list(index)
        """Of elements, by number."""

    def sums(self, first: int, last: int) -> Sums:
        """Counts of the windows from `first` to `last`, both included. O(cells of the span + keys)."""
        span = slice(*np.searchsorted(self._window, [first, last + 1]).tolist())
        key = self._cells[0][span]
        out = []
        for column in self._cells[1:]:
            total = np.zeros(len(self.keys), np.int64)
            np.add.at(total, key, column[span])
            out.append(total)
        return Sums(*out)

    def moments(self, elements: frozenset[str]) -> dict[str, int]:
        """Packets of flows that surely cross: of all windows, and of that in which most were lost (see `sum_up`)."""
        crossed = self.crossing(elements)[self._cells[0]]
        _, at = np.unique(self._window[crossed], return_inverse=True)
        sent, lost = (np.bincount(at, weights=c[crossed]).astype(np.int64) for c in self._cells[1:3])
        if not len(lost):
            return {"sent": 0, "lost": 0, "worst_sent": 0, "worst_lost": 0}
        worst = int(np.argmax(lost))
        all_sent, all_lost = int(sent.sum()), int(lost.sum())
        return {"sent": all_sent, "lost": all_lost, "worst_sent": int(sent[worst]), "worst_lost": int(lost[worst])}

    def timed(self) -> Bools:
        """The keys that have round trips in any window, (keys,)."""
        return np.bincount(self._cells[0], weights=self._cells[3], minlength=len(self.keys)) > 0

    def losses(self, s: Sums) -> Table:
        """Packets of every flow, over its path or its ECMP set."""
        return self._table(s.sent, s.lost, s.sent > 0, self.keys.known)

    def slow(self, s: Sums, threshold_ns: float) -> Table:
        """Round trips over both ways: all of a flow count as slow if their mean is over the threshold.

        Of rows that are round trips the ECMP set is enough, where the path is not known.
        """
        timed = s.rtts > 0
        slow = np.where(timed & (s.rtt_sum_ns > threshold_ns * np.maximum(s.rtts, 1)), s.rtts, 0)
        k = self.keys
        there = np.flatnonzero(timed & k.known)
        back = np.where(k.role[there] == ROUND_TRIP, -1, self.ways_back[there])
        whole = (k.role[there] == ROUND_TRIP) | (back >= 0)
        there, back = there[whole], back[whole]
        flat, owner = expand(k.path_ptr, there)
        more, back_owner = expand(k.path_ptr, np.where(back >= 0, back, 0))
        keep = back[back_owner] >= 0
        elements = np.concatenate((k.path_elements[flat], k.path_elements[more[keep]]))
        row = np.concatenate((owner, back_owner[keep]))
        order = np.argsort(row, kind="stable")
        known = mixed_table(
            len(self._index),
            pointer(np.bincount(row, minlength=len(there))),
            elements[order],
            (s.rtts[there].astype(np.float64), slow[there].astype(np.float64)),
            (),
            np.empty(0, np.int64),
            (np.empty(0), np.empty(0)),
        )
        hidden = timed & ~k.known & (k.role == ROUND_TRIP)
        return stacked(known, self._table(s.rtts, slow, hidden, k.known)) if hidden.any() else known

    def crossing(self, elements: frozenset[str]) -> Bools:
        """The keys of which every possible path crosses one of the elements, (keys,)."""
        flag = np.zeros(len(self._index), bool)
        flag[[self._index[e] for e in elements if e in self._index]] = True
        k = self.keys
        hits = np.concatenate((np.zeros(1, np.int64), np.cumsum(flag[k.path_elements])))
        out: Bools = (hits[k.path_ptr[1:]] - hits[k.path_ptr[:-1]]) > 0
        return np.where(k.known, out, np.append(self._sets_within(flag), False)[self._set_of])

    def _sets_within(self, flag: Bools) -> Bools:
        """Of which sets every path crosses an element that is flagged."""
        if int(self._counts.sum()) <= MOST_PATHS:
            sets = map(self._alternatives, range(len(self._counts)))
            return np.array([all(flag[p].any() for p in s) for s in sets], bool)
        parts, of_set = self._parts
        return np.asarray(np.append(parts.within(flag), False)[of_set].any(axis=0))

    def crossings(self, s: Sums, elements: frozenset[str]) -> list[Crossing]:
        """The same with their counts, as the analyzer's symptoms take them; of very many those that lost most."""
        rows = np.flatnonzero(self.crossing(elements) & (s.sent > 0))
        if len(rows) > _SHOWN_CROSSINGS:
            rows = rows[np.argsort(-s.lost[rows], kind="stable")[:_SHOWN_CROSSINGS]]
        k, names, rnics = self.keys, list(self._index), self.recording.names.rnics
        out = []
        for i in rows.tolist():
            cls = self.recording.classes[k.cls[i]]
            key = (int(k.prober[i]), int(k.target[i]), int(k.source_port[i]))
            flow = Flow(key, rnics[key[0]], rnics[key[1]], key[2], int(k.cls[i]), cls, 0, 0)
            path = tuple(names[e] for e in k.path_elements[k.path_ptr[i] : k.path_ptr[i + 1]])
            # Without a path nothing is shown, and the count is all that matters.
            out.append(Crossing(flow, int(k.role[i]), cls, (path,) if path else (), int(s.sent[i]), int(s.lost[i])))
        return out

    # ------------------------------------------------------------ paths

    def _table(self, sent: Ints, lost: Ints, wanted: Bools, known: Bools) -> Table:
        k = self.keys
        rows = np.flatnonzero(wanted & known)
        flat, _ = expand(k.path_ptr, rows)
        rest = np.flatnonzero(wanted & ~known & (self._set_of >= 0))
        clean = rest[:0]
        if int(self._counts[self._set_of[rest]].sum()) > MOST_PATHS:
            self._say(
                "clean flows of unknown path have too many possible paths for one by one: they speak by their parts"
            )
            rest = self._some(rest, lost)
            rest, clean = rest[lost[rest] > 0], rest[lost[rest] == 0]
        used, set_of = np.unique(self._set_of[rest], return_inverse=True)
        sets = [self._alternatives(u) for u in used.tolist()]
        table = mixed_table(
            len(self._index),
            pointer(np.diff(k.path_ptr)[rows]),
            k.path_elements[flat],
            (sent[rows].astype(np.float64), lost[rows].astype(np.float64)),
            sets,
            set_of.ravel(),
            (sent[rest].astype(np.float64), lost[rest].astype(np.float64)),
        )
        if not len(clean):
            return table
        parts, of_set = self._parts
        part = of_set[:, self._set_of[clean]]
        there = part >= 0
        packets = np.broadcast_to(sent[clean].astype(np.float64), part.shape)
        return stacked(table, parts.table(part[there], packets[there]))

    def _some(self, rows: Ints, lost: Ints) -> Ints:
        """As large a share of the keys as has few enough paths where something was lost: the same of clean ones, or
        rates were wrong."""
        paths = int(self._counts[self._set_of[rows[lost[rows] > 0]]].sum())
        if paths <= MOST_PATHS:
            return rows
        self._say(
            "flows of unknown path that lost packets have too many possible paths: an even choice of flows is used"
        )
        return rows[(rows * _GOLDEN) % 1.0 < MOST_PATHS / paths]

    def _say(self, what: str) -> None:
        if what not in self.said:
            self.said.append(what)

    def _assign_sets(self) -> Ints:
        """The path set of each key without a path; -1 where it has one, or where nothing joins its ends. The paths
        themselves are listed when a table needs them."""
        k = self.keys
        out = np.full(len(k), -1, np.int64)
        rows = np.flatnonzero(~k.known)
        triples, at = np.unique(np.stack((k.role[rows], k.prober[rows], k.target[rows])), axis=1, return_inverse=True)
        counts = np.fromiter((self._count(*t) for t in self._told(triples)), np.int64, triples.shape[1])
        joined = counts > 0
        number = np.where(joined, np.cumsum(joined) - 1, -1)
        out[rows] = number[at.ravel()]
        self._triples, self._counts = triples[:, joined], counts[joined]
        self.recording.counted.no_path = int((out[rows] < 0).sum())
        return out

    def _told(self, triples: Ints) -> Iterator[tuple[int, int, int]]:
        """Triples one by one, with progress: of a million pairs the look-up takes half a minute."""
        number = triples.shape[1]
        for done, (role, prober, target) in enumerate(triples.T.tolist(), 1):
            yield role, prober, target
            if done % _TOLD_EVERY == 0:
                self._progress(done, number)

    def _count(self, role: int, prober: int, target: int) -> int:
        a, b = self.recording.names.rnics[prober], self.recording.names.rnics[target]
        ways = [self._sets.ways(*ends).count for ends, other in (((a, b), ACK), ((b, a), PROBE)) if role != other]
        return min(max(ways), MOST_ALTERNATIVES) if all(ways) else 0

    def _alternatives(self, number: int) -> Alternatives:
        known = self._known_sets.get(number)
        if known is None:
            role, prober, target = self._triples[:, number].tolist()
            a, b = self.recording.names.rnics[prober], self.recording.names.rnics[target]
            if role == ROUND_TRIP:
                known = self._sets.round_trip(a, b)
            else:
                known = self._sets.one_way(a, b) if role == PROBE else self._sets.one_way(b, a)
            self._known_sets[number] = known
        return known

    @cached_property
    def _parts(self) -> tuple[Parts, Ints]:
        """The parts of all sets, and which of them each has, (6, sets), -1: none. O(sets), once."""
        parts, rnics = Parts(self._sets, self._index), self.recording.names.rnics
        of = [
            parts.of(rnics[prober], rnics[target], role != ACK, role != PROBE)
            for role, prober, target in self._told(self._triples)
        ]
        return parts, np.array(of, np.int64).reshape(-1, 6).T

    def _ack_keys(self) -> Ints:
        """For each probe key the latest ACK key of the same tuple and class with a known path; -1: none."""
        k = self.keys
        tuples = np.stack((k.prober, k.target, k.source_port, k.cls))
        _, at = np.unique(tuples, axis=1, return_inverse=True)
        at = at.ravel()
        latest = np.full(int(at.max(initial=-1)) + 1, -1, np.int64)
        acks = np.flatnonzero((k.role == ACK) & k.known)
        latest[at[acks]] = acks
        return latest[at] if len(at) else np.empty(0, np.int64)
