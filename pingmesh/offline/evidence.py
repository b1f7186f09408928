"""The table of a span of windows of a recording, and which of its flows cross a component."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pingmesh.analyzer.flows import Flow
from pingmesh.analyzer.symptoms import Crossing
from pingmesh.analyzer.table import Bools, Ints, Table, expand, pointer
from pingmesh.offline.pathsets import Alternatives, PathSets, mixed_table
from pingmesh.offline.recording import Keys, Recording
from pingmesh.records.model import ACK, PROBE, ROUND_TRIP

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

    def __init__(self, recording: Recording, index: dict[str, int]) -> None:
        self.recording = recording
        self.keys: Keys = recording.keys()
        cells = recording.cells()
        order = np.argsort(cells.window, kind="stable")
        self._cells = [c[order] for c in (cells.key, cells.sent, cells.lost, cells.rtts, cells.rtt_sum_ns)]
        self._window = cells.window[order]
        self.windows: Ints = np.unique(self._window)
        self._index = index
        self._sets = PathSets(recording.topology, index)
        self._set_numbers: dict[tuple[int, int, int], int] = {}
        self._alternatives: list[Alternatives] = []
        self._set_of = self._assign_sets()
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

    def timed(self) -> Bools:
        """The keys that have round trips in any window, (keys,)."""
        return np.bincount(self._cells[0], weights=self._cells[3], minlength=len(self.keys)) > 0

    def losses(self, s: Sums) -> Table:
        """Packets of every flow, over its path or its ECMP set."""
        return self._table(s.sent, s.lost, s.sent > 0, self.keys.known)

    def slow(self, s: Sums, threshold_ns: float) -> Table:
        """Round trips over both ways: all of a flow count as slow if their mean is over the threshold."""
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
        return mixed_table(
            len(self._index),
            pointer(np.bincount(row, minlength=len(there))),
            elements[order],
            (s.rtts[there].astype(np.float64), slow[there].astype(np.float64)),
            (),
            np.empty(0, np.int64),
            (np.empty(0), np.empty(0)),
        )

    def crossing(self, elements: frozenset[str]) -> Bools:
        """The keys of which every possible path crosses one of the elements, (keys,)."""
        flag = np.zeros(len(self._index), bool)
        flag[[self._index[e] for e in elements if e in self._index]] = True
        k = self.keys
        hits = np.concatenate((np.zeros(1, np.int64), np.cumsum(flag[k.path_elements])))
        out: Bools = (hits[k.path_ptr[1:]] - hits[k.path_ptr[:-1]]) > 0
        of_set = np.array([all(flag[p].any() for p in s) for s in self._alternatives] + [False])
        return np.where(k.known, out, of_set[self._set_of])

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
        used, set_of = np.unique(self._set_of[rest], return_inverse=True)
        return mixed_table(
            len(self._index),
            pointer(np.diff(k.path_ptr)[rows]),
            k.path_elements[flat],
            (sent[rows].astype(np.float64), lost[rows].astype(np.float64)),
            [self._alternatives[u] for u in used.tolist()],
            set_of.ravel(),
            (sent[rest].astype(np.float64), lost[rest].astype(np.float64)),
        )

    def _assign_sets(self) -> Ints:
        """The path set of each key without a path; -1 where it has one, or where nothing joins its ends."""
        k = self.keys
        out = np.full(len(k), -1, np.int64)
        rows = np.flatnonzero(~k.known)
        triples, at = np.unique(np.stack((k.role[rows], k.prober[rows], k.target[rows])), axis=1, return_inverse=True)
        numbers = np.array([self._set(*t) for t in triples.T.tolist()] or [0], np.int64)
        out[rows] = numbers[at.ravel()] if len(rows) else out[rows]
        self.recording.counted.no_path = int((out[rows] < 0).sum())
        return out

    def _set(self, role: int, prober: int, target: int) -> int:
        rnics = self.recording.names.rnics
        a, b = rnics[prober], rnics[target]
        if role == ROUND_TRIP:
            found = self._sets.round_trip(a, b)
        else:
            found = self._sets.one_way(a, b) if role == PROBE else self._sets.one_way(b, a)
        if not found:
            return -1
        self._alternatives.append(found)
        return len(self._alternatives) - 1

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
