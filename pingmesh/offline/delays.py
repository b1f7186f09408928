"""Slow components in a recording: every window through the analyzer's watch over delays."""

from __future__ import annotations

import numpy as np

from pingmesh.analyzer.components import compile_components
from pingmesh.analyzer.delay_watch import CLOCKS, DelayWatch, verdict_of
from pingmesh.analyzer.delays import delay_candidates
from pingmesh.analyzer.flows import PathSet
from pingmesh.analyzer.table import Ints
from pingmesh.analyzer.waits import USUAL
from pingmesh.messages import Verdict
from pingmesh.offline.evidence import Evidence
from pingmesh.records.model import ACK, ROUND_TRIP
from topology.model import Topology
from topology.paths import ecmp_paths, path_elements

MOST_FLOWS = 200_000
"""Of more flows with round trips an even choice is watched."""


class RecordedDelays:
    """The watch over one recording, window after window; `clock` is what stamped all round trips in it.

    A slot for each flow that has round trips: O(flows x hops) once, then what the watch costs a window.
    """

    def __init__(self, topology: Topology, evidence: Evidence, window_ns: int, clock: str) -> None:
        self._topology = topology
        self._evidence = evidence
        components = compile_components(delay_candidates(topology))
        self._watch = DelayWatch(components, len(topology.rnics), USUAL.slow_ns, window_ns)
        self._watch.clocks[:] = CLOCKS[clock]
        self._sets: dict[tuple[str, str], PathSet] = {}
        self._slots = self._make_slots()

    def window(self, w: int) -> list[Verdict]:
        """What is slow after a window; windows come in order."""
        sums = self._evidence.sums(w, w)
        keys = np.flatnonzero((sums.rtts > 0) & (self._slots >= 0))
        self._watch.book.put(self._slots[keys], w, sums.rtt_sum_ns[keys] / sums.rtts[keys])
        return [verdict_of(s, []) for s in self._watch.merged(self._watch.fine(), [])]

    def _make_slots(self) -> Ints:
        k, rnics = self._evidence.keys, self._evidence.recording.names.rnics
        back_of = self._evidence.ways_back
        timed = np.flatnonzero(self._evidence.timed() & (k.role != ACK))
        timed = timed[:: max(1, -(-len(timed) // MOST_FLOWS))]
        slots = np.full(len(k), -1, np.int64)
        for i in timed.tolist():
            a, b = int(k.prober[i]), int(k.target[i])
            there, back = self._path(i), self._path(int(back_of[i])) if back_of[i] >= 0 else ()
            if k.role[i] == ROUND_TRIP and there:
                # The way there ends where the target's side is crossed for the first time.
                ends = next((n for n, e in enumerate(there, 1) if e.endswith(" rx")), len(there))
                there, back = there[:ends], there[ends:]
            ways = (
                (there,) if there else self._set(rnics[a], rnics[b]),
                (back,) if back else self._set(rnics[b], rnics[a]),
            )
            if all(ways):
                # Of a tuple that moved each path is a key of its own.
                slots[i] = self._watch.book.slot(i, a, b, *ways)
        return slots

    def _path(self, key: int) -> tuple[str, ...]:
        k, names = self._evidence.keys, self._evidence.names
        return tuple(names[e] for e in k.path_elements[k.path_ptr[key] : k.path_ptr[key + 1]].tolist())

    def _set(self, src: str, dst: str) -> PathSet:
        known = self._sets.get((src, dst))
        if known is None:
            t = self._topology
            found = ecmp_paths(t, t.rnics[src].legs[0].switch, t.rnics[dst].legs[0].switch)
            known = self._sets[src, dst] = tuple(path_elements(t, src, dst, p) for p in found)
        return known
