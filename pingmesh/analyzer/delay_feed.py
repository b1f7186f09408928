"""From evidence to the watch over delays: which slot a round trip belongs to, and which round trips are no evidence."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pingmesh.analyzer.delay_baselines import CELLS, window_of
from pingmesh.analyzer.delay_watch import CLOCKS, LEAST_FLOWS, SOFTWARE, DelayWatch, Slow
from pingmesh.analyzer.evidence import Evidence, Span
from pingmesh.analyzer.flows import ACK, PROBE, FlowBook, PathSet
from pingmesh.analyzer.hosts import HostBook
from pingmesh.analyzer.samples import Sample
from pingmesh.analyzer.table import Floats, Ints
from pingmesh.analyzer.windows import Clean
from pingmesh.messages import WINDOW_NS
from topology.model import Topology

RECENT_NS = 15_000_000_000
"""Round trips that ended so long ago still say how it is now."""
ALL_WATCHED = 20_000
"""Flows that are watched whatever they cross."""
MOST_WATCHED = 50_000
"""Of more flows those are watched that cross an element with fewer than `ENOUGH` watched ones, up to so many: a look
must stay cheap. In very large fabrics that covers links before RNICs."""
ENOUGH = 12
NEW_A_LOOK = 500
"""Flows that a look begins to watch: each costs some ten microseconds."""
MOST_QUICK = 6_000
"""Flows of a window that a quick look takes: the slow ones, and others that cross the same."""
NOTHING = -2
"""No fact about a flow."""

Shorts = npt.NDArray[np.uint16]


class DelayFeed:
    """Feeds one watch. A slot is a 5-tuple in a class, on its paths, between two processes of agents.

    Rows of the flow book whose paths are settled keep their slot as long as nothing of it changes: what windows bring
    of them is taken in as columns.
    """

    def __init__(self, topology: Topology, book: FlowBook, hosts: HostBook, watch: DelayWatch) -> None:
        self._book, self._hosts, self._watch = book, hosts, watch
        self._rnics = {name: i for i, name in enumerate(topology.rnics)}
        self._host_numbers = {h: i for i, h in enumerate(topology.hosts)}
        numbers = [self._host_numbers[r.host] for r in topology.rnics.values()]
        self._host_of = np.array(numbers, np.int64)
        self._place = np.empty(0, np.int32)
        """Row -> its place in the two below, -1: it is not watched."""
        self._slots = np.empty(0, np.int64)
        """Place -> slot."""
        self._known = np.empty((0, 0), np.int64)
        """Place -> what the slot was given for."""
        self._taken: dict[int, tuple[Clean, Shorts]] = {}
        """Windows by identity, and how many round trips of each row were taken in."""
        self._single: dict[int, Sample] = {}
        """The same of samples; held, so that no other gets the identity."""
        self._excused: set[tuple[str, int, int]] = set()
        self._clocks = -1
        self._boots: dict[str, int] = {}
        self._renumbered = 0

    def take(self, evidence: Evidence) -> None:
        """Take in the windows of the lists' own probes. Those of confirmations are chosen because something was slow,
        and come faster than usual: they say nothing of what is usual. O(rows that are new x hops).
        """
        self._take_clocks()
        self._give_up_gone()
        taken: dict[int, tuple[Clean, Shorts]] = {}
        spans = sorted(evidence.spans, key=lambda s: s.clean.first)
        if spans:
            self._admit(np.flatnonzero(spans[-1].clean.rtts))
        watched = np.flatnonzero(self._place >= 0)
        for span in spans:
            c = span.clean
            have = np.zeros(len(c.rtts), np.uint16)
            if id(c) in self._taken:
                before = self._taken[id(c)][1]
                have[: len(before)] = before
            there = watched[: np.searchsorted(watched, len(c.rtts))]
            rows = span.keep(there[c.rtts[there] > have[there]])
            have[rows] = c.rtts[rows]
            taken[id(c)] = c, have
            windows = window_of(c.start[self._book.rows.slot[rows]])
            for window in np.unique(windows).tolist():
                at = rows[windows == window]
                slots = self._slots_of(at, int(c.last))
                self._watch.book.put(slots[slots >= 0], window, c.rtt_ns[at[slots >= 0]])
        self._taken = taken
        self._take_single(evidence.single)
        self._drop_excused()

    def _take_single(self, samples: list[Sample]) -> None:
        for s in samples:
            if s.rtts and not s.confirmed and id(s) not in self._single and (slot := self._slot(s)) is not None:
                self._watch.book.put(np.array([slot]), int(window_of(np.array(s.start))), np.array([s.rtt_ns]))
        self._single = {id(s): s for s in samples}

    def _admit(self, rows: Ints) -> None:
        """Begin to watch some of these rows, as long as there is room. O(rows)."""
        r = self._book.rows
        self._fit()
        watched = np.flatnonzero((self._place >= 0) & r.used)
        new = rows[self._place[rows] < 0]
        room = min(NEW_A_LOOK, MOST_WATCHED - len(watched))
        if not len(new) or room <= 0:
            return
        if len(watched) + len(new) > ALL_WATCHED:
            new = self._lacking(new[:: max(1, len(new) // (20 * room))], watched)
        new = new[:room]
        places = self._place[watched]
        self._place[:] = -1  # what is no flow any more loses its place
        self._place[watched] = np.arange(len(watched))
        self._place[new] = len(watched) + np.arange(len(new))
        self._slots = np.append(self._slots[places], np.full(len(new), -1))
        self._known = np.concatenate((self._known[places], np.full((len(new), self._known.shape[1]), NOTHING)))

    def _fit(self) -> None:
        more = len(self._book.rows.used) - len(self._place)
        if more > 0:
            self._place = np.concatenate((self._place, np.full(more, -1, np.int32)))

    def _lacking(self, rows: Ints, watched: Ints) -> Ints:
        """Those of some rows that cross an element that too few watched ones do, in no particular order."""
        path = self._book.rows.path
        there = path[:, watched].ravel()
        load = np.bincount(there[there >= 0], minlength=len(self._book.elements))
        mine = np.concatenate((path[PROBE, rows], path[ACK, rows]), axis=1)
        lack = (mine >= 0) & (load[mine] < ENOUGH)
        return np.random.default_rng(len(rows)).permutation(rows[lack.any(axis=1)])

    def quick(self, evidence: Evidence, since: int, now: int) -> list[Slow]:
        """What delays the last round trips by milliseconds, those of confirmations too. O(rows of the last windows)."""
        heard: list[tuple[int, Ints, Floats]] = []
        spans = [s for s in evidence.spans if s.clean.last + WINDOW_NS >= now - RECENT_NS]
        slow = sum(int(np.count_nonzero(s.clean.rtt_ns > self._watch.slow_ns)) for s in spans)
        if slow + sum(s.rtt_ns > self._watch.slow_ns for s in evidence.single) >= LEAST_FLOWS:
            heard = self._heard(spans, evidence.single, now)
        return self._watch.quick_latest(heard, since, now)

    def _heard(self, spans: list[Span], single: list[Sample], now: int) -> list[tuple[int, Ints, Floats]]:
        """(when, slots, round trips) of the last windows and confirmations, oldest first."""
        heard: list[tuple[int, Ints, Floats]] = []
        for span in spans:
            c = span.clean
            rows = self._some(span.keep(np.flatnonzero(c.rtts)), c)
            slots = self._slots_of(rows, int(c.last))
            rows, slots = rows[slots >= 0], slots[slots >= 0]
            heard.append((int(c.last) + WINDOW_NS, slots, c.rtt_ns[rows].astype(np.float64)))
        for s in single:
            if s.rtts and s.end >= now - RECENT_NS and (slot := self._slot(s)) is not None:
                heard.append((s.end, np.array([slot]), np.array([float(s.rtt_ns)])))
        return sorted(heard, key=lambda h: h[0])

    def _some(self, rows: Ints, c: Clean) -> Ints:
        """Of very many rows the slow ones, and others that cross what they do. O(rows x hops)."""
        if len(rows) <= MOST_QUICK:
            return rows
        path, elements = self._book.rows.path, len(self._book.elements)
        slow = rows[c.rtt_ns[rows] > self._watch.slow_ns]
        slow = slow[:: max(1, 3 * len(slow) // MOST_QUICK)]
        touched = np.zeros(elements + 1, bool)  # one more, for the -1 of padding
        for role in (PROBE, ACK):
            touched[path[role, slow]] = True
        touched[-1] = False
        near = rows[touched[path[PROBE, rows]].any(axis=1)]
        near = near[~np.isin(near, slow)]
        return np.concatenate((slow, near[:: max(1, 2 * len(near) // MOST_QUICK)]))

    # ------------------------------------------------------------ slots

    def _slots_of(self, rows: Ints, when: int) -> Ints:
        """The slots of rows, -1 for what is in no topology. O(rows x hops), and a look-up for those that changed."""
        r, facts = self._book.rows, self._facts(rows)
        if self._renumbered != self._watch.book.renumbered or facts.shape[1] != self._known.shape[1]:
            self._renumbered = self._watch.book.renumbered
            self._known = np.full((len(self._slots), facts.shape[1]), NOTHING)
        settled = r.plain[PROBE, rows] & r.plain[ACK, rows]
        self._fit()
        place = self._place[rows]
        same = settled & (place >= 0)
        same[same] = (self._known[place[same]] == facts[same]).all(axis=1)
        out = np.full(len(rows), -1, np.int64)
        out[same] = self._slots[place[same]]
        for i in np.flatnonzero(~same).tolist():
            out[i] = self._row_slot(int(rows[i]), when)
        keep = ~same & settled & (place >= 0)
        self._slots[place[keep]], self._known[place[keep]] = out[keep], facts[keep]
        return out

    def _facts(self, rows: Ints) -> Ints:
        """What a row's slot depends on, (rows, facts)."""
        r = self._book.rows
        boots = np.array([self._hosts.get(h).boot & (1 << 62) - 1 for h in self._book.hosts.names], np.int64)
        plain = (r.src, r.dst, r.sport, r.cls)
        columns = [c[rows].astype(np.int64) for c in plain] + [boots[h[rows]] for h in (r.src_host, r.dst_host)]
        return np.concatenate((np.stack(columns, axis=1), r.path[PROBE, rows], r.path[ACK, rows]), axis=1)

    def _row_slot(self, row: int, when: int) -> int:
        r, names = self._book.rows, self._book.rnics.names
        src, dst = names[r.src[row]], names[r.dst[row]]
        there, back = (self._book.row_paths_at(row, role, when) for role in (PROBE, ACK))
        return self._make(src, dst, int(r.sport[row]), int(r.cls[row]), there, back)

    def _slot(self, s: Sample) -> int | None:
        f = s.flow
        there, back = (self._book.paths_at(f, role, s.start) for role in (PROBE, ACK))
        slot = self._make(f.src, f.dst, f.sport, f.cls, there, back)
        return slot if slot >= 0 else None

    def _make(self, src: str, dst: str, sport: int, cls: int, there: PathSet, back: PathSet) -> int:
        a, b = self._rnics.get(src), self._rnics.get(dst)
        if a is None or b is None or not there or not back:
            return -1
        boots = tuple(self._hosts.get(name.split("/")[0]).boot for name in (src, dst))
        return self._watch.book.slot((a, b, sport, cls, boots), a, b, there, back)

    # ------------------------------------------------------------ what is known of hosts

    def _take_clocks(self) -> None:
        if self._clocks != self._hosts.clock_changes:
            self._clocks = self._hosts.clock_changes
            for name, clock in self._hosts.clocks.items():
                if name in self._rnics:
                    self._watch.clocks[self._rnics[name]] = CLOCKS.get(clock, SOFTWARE)

    def _give_up_gone(self) -> None:
        """An agent's process is another: what was usual with the one before is not looked up again."""
        boots = {h.name: h.boot for h in self._hosts.hosts.values()}
        if boots == self._boots:
            return
        new = [name for name, boot in boots.items() if self._boots.get(name, boot) != boot]
        self._boots = boots
        numbers = [n for name in new if (n := self._host_numbers.get(name)) is not None]
        if numbers:
            book = self._watch.book
            gone = np.isin(self._host_of, numbers)
            book.give_up(gone[book.prober] | gone[book.responder])

    def _drop_excused(self) -> None:
        """Take back what was taken in before it was known that a host was silent, stalled, gone or new then."""
        book = self._watch.book
        oldest = (book.newest - CELLS) * WINDOW_NS
        spans = {(h.name, a, b) for h in self._hosts.hosts.values() for a, b in h.excused if b > oldest}
        hosts_in: dict[tuple[int, int], list[int]] = {}
        for name, start, end in spans - self._excused:
            if (number := self._host_numbers.get(name)) is not None:
                hosts_in.setdefault((start // WINDOW_NS, end // WINDOW_NS + 1), []).append(number)
        for (first, last), numbers in hosts_in.items():
            excused = np.zeros(len(self._host_numbers), bool)
            excused[numbers] = True
            of_rnic = excused[self._host_of]
            book.drop(of_rnic[book.prober] | of_rnic[book.responder], first, last)
        self._excused = spans
