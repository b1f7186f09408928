"""From samples to the watch over delays: which slot a round trip belongs to, and which round trips are no evidence."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pingmesh.analyzer.delay_baselines import CELLS, window_of
from pingmesh.analyzer.delay_watch import CLOCKS, SOFTWARE, DelayWatch, Slow
from pingmesh.analyzer.flows import ACK, PROBE, FlowBook
from pingmesh.analyzer.hosts import HostBook
from pingmesh.analyzer.samples import Sample
from pingmesh.messages import WINDOW_NS
from topology.model import Topology

RECENT_NS = 15_000_000_000
"""Round trips that ended so long ago still say how it is now."""


class DelayFeed:
    """Feeds one watch. A slot is a 5-tuple in a class, on its paths, between two processes of agents."""

    def __init__(self, topology: Topology, book: FlowBook, hosts: HostBook, watch: DelayWatch) -> None:
        self._book, self._hosts, self._watch = book, hosts, watch
        self._rnics = {name: i for i, name in enumerate(topology.rnics)}
        numbers = {h: i for i, h in enumerate(topology.hosts)}
        self._host_numbers = numbers
        self._host_of = np.array([numbers[r.host] for r in topology.rnics.values()], np.int64)
        self._taken: dict[int, Sample] = {}
        """By identity; held, so that no other sample gets it."""
        self._excused: set[tuple[str, int, int]] = set()
        self._clocks = -1

    def take(self, samples: Sequence[Sample]) -> None:
        """Take in the windows of the lists' own probes. Those of confirmations are chosen because something was slow,
        and come faster than usual: they say nothing of what is usual. O(samples); known ones cost a look-up.
        """
        self._take_clocks()
        new = [s for s in samples if s.rtts and not s.confirmed and id(s) not in self._taken]
        self._taken = {id(s): s for s in samples}
        windows: dict[int, tuple[list[int], list[int]]] = {}
        for s in new:
            slot = self._slot(s)
            if slot is not None:
                slots, means = windows.setdefault(window_of(s.start), ([], []))
                slots.append(slot)
                means.append(s.rtt_ns)
        for window in sorted(windows):
            slots, means = windows[window]
            self._watch.book.put(np.array(slots, np.int64), window, np.array(means, np.float64))
        self._drop_excused()

    def quick(self, samples: Sequence[Sample], since: int, now: int) -> list[Slow]:
        """What delays the last round trips by milliseconds, those of confirmations too."""
        last: dict[int, list[tuple[int, int]]] = {}
        for s in samples:
            if s.rtts and s.end >= now - RECENT_NS and (slot := self._slot(s)) is not None:
                last.setdefault(slot, []).append((s.end, s.rtt_ns))
        if not last:
            return []
        slots = np.fromiter(last, np.int64, len(last))
        # What was slow once and then quick again is not slow.
        rtts = np.array([min(rtt for _, rtt in sorted(v)[-2:]) for v in last.values()], np.float64)
        heard = np.array([max(end for end, _ in v) for v in last.values()], np.int64)
        return self._watch.quick(slots, rtts, heard, since, now)

    def _slot(self, s: Sample) -> int | None:
        f = s.flow
        src, dst = self._rnics.get(f.src), self._rnics.get(f.dst)
        if src is None or dst is None:
            return None
        there, back = self._book.paths_at(f, PROBE, s.start), self._book.paths_at(f, ACK, s.start)
        if not there or not back:
            return None
        hosts = self._hosts
        boots = hosts.get(f.src_host).boot, hosts.get(f.dst_host).boot
        return self._watch.book.slot((src, dst, f.sport, s.cls, boots), src, dst, there, back)

    def _take_clocks(self) -> None:
        if self._clocks != self._hosts.clock_changes:
            self._clocks = self._hosts.clock_changes
            for name, clock in self._hosts.clocks.items():
                if name in self._rnics:
                    self._watch.clocks[self._rnics[name]] = CLOCKS.get(clock, SOFTWARE)

    def _drop_excused(self) -> None:
        """Take back what was taken in before it was known that a host was silent, stalled, gone or new then."""
        book = self._watch.book
        oldest = (book.newest - CELLS) * WINDOW_NS
        spans = {(h.name, a, b) for h in self._hosts.hosts.values() for a, b in h.excused if b > oldest}
        for name, start, end in spans - self._excused:
            number = self._host_numbers.get(name)
            if number is not None:
                of_host = self._host_of == number
                book.drop(of_host[book.prober] | of_host[book.responder], start // WINDOW_NS, end // WINDOW_NS + 1)
        self._excused = spans
