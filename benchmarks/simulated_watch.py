"""The analyzer's loop on simulated counts, second by second: reports every 5 s, losses noticed at once, confirmation.

Everything that decides is the product's: the plan of a confirmation (`pingmesh.analyzer.suspicion.plan`), the
localiser, the host rules, the tracker. What is modelled is the time things take: a loss is noticed at the end of its
second, the quick first rounds of probes are sent two a second from then on, the later ones one a second, and counts of
a window come a second after it ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pingmesh.analyzer.components import Components
from pingmesh.analyzer.delay_watch import LEAST_FLOWS, DelayWatch, verdict_of
from pingmesh.analyzer.evidence import Moment
from pingmesh.analyzer.flows import ACK, PROBE, Flow, FlowBook
from pingmesh.analyzer.host_rules import SECOND
from pingmesh.analyzer.judge import MIN_LOST, Wholes, sum_up
from pingmesh.analyzer.localise import Suspect
from pingmesh.analyzer.rounds import COUNTS
from pingmesh.analyzer.suspicion import Episode, Request, plan
from pingmesh.analyzer.symptoms import Crossing, lossy_tuples, symptom_of
from pingmesh.analyzer.tracker import HOST_SYMPTOMS, Tracker
from pingmesh.analyzer.waits import USUAL
from pingmesh.messages import LOST, NO_RTT, SLOW, Event, Peer, ProbeClass, ProbeList, TracedPath, Verdict
from pingmesh.messages import Flow as Entry
from pingmesh.offline.hosts import HostHistory
from pingmesh.offline.spans import online
from pingmesh.simulate.fabric import Fabric
from pingmesh.simulate.output import RecordMaker
from pingmesh.simulate.probes import CLASSES, Flows
from pingmesh.simulate.tables import Sums, Tables
from pingmesh.simulate.world import BACK, THERE, Counts, World

WINDOW_S = 5
SETTLE_S = 1
QUIET_S = 60
ROUNDS_AT_S = (0.1, 0.55)
"""Of each second: the product's next round leaves when the last, of 0.2 to 0.4 s, and a pause of 0.1 s are over."""
TIMEOUT_S = 0.5
MARGIN_S = 0.25
RECENT_S = 15
OWN_CLASS = -1
SIZES = {"small": 0, "large": 4000, "other": 0}


class Book:
    """The analyzer's flow book of some simulated lists, made once; `rows` maps its flows to theirs."""

    def __init__(self, fabric: Fabric, flows: Flows) -> None:
        self.book = FlowBook(fabric.topology)
        self.rows: dict[tuple[int, int, int], int] = {}
        self.key_of: list[tuple[int, int, int]] = [(0, 0, 0)] * len(flows)
        peers = [Peer(i, name, "", 0, 0, 0, 4096) for i, name in enumerate(fabric.rnics)]
        classes = [ProbeClass(name=c, size=SIZES[c]) for c in CLASSES]
        for rnic in np.unique(flows.src).tolist():
            mine = np.flatnonzero(flows.src == rnic)
            entries = []
            for index, row in enumerate(mine.tolist()):
                key = (rnic, 1, index)
                self.rows[key], self.key_of[row] = row, key
                entries.append(
                    Entry(
                        index,
                        int(flows.dst[row]),
                        int(flows.sport[row]),
                        int(flows.cls[row]),
                        int(flows.kind[row]),
                        int(1e6 / flows.rate[row]),
                        0,
                    )
                )
            host, _, device = fabric.rnics[rnic].partition("/")
            self.book.add_list(
                ProbeList(
                    cluster="lab",
                    host=host,
                    device=device,
                    number=rnic,
                    list_version=1,
                    classes=classes,
                    flows=entries,
                    peers=peers,
                )
            )
        self._targets = [d.target_address for d in fabric.topology.directed_links]
        self._links = fabric.links
        self._sport = flows.sport
        for role, paths in ((PROBE, flows.there), (ACK, flows.back)):
            self.trace(role, np.arange(len(flows)), paths, 1)

    def trace(self, role: int, rows: np.ndarray, paths: np.ndarray, at_ns: int) -> None:
        """Tell the book the paths of some flows."""
        for row in rows.tolist():
            hops = [(ttl, self._targets[e]) for ttl, e in enumerate(paths[row, 1:].tolist(), 2) if 0 <= e < self._links]
            if hops:
                rnic, version, index = self.key_of[row]
                self.book.add_path(TracedPath(role, rnic, version, index, int(self._sport[row]), hops, at_ns), at_ns)


@dataclass(frozen=True)
class Opened:
    """An incident: when it opened, and what it said two seconds later."""

    at_s: float
    verdict: Verdict


class Watch:
    """Watches one world. Without `confirm` nothing is probed harder."""

    def __init__(
        self,
        world: World,
        components: Components,
        delay_components: Components,
        book: Book | None,
        *,
        confirm: bool = True,
        threshold: float | None = None,
    ) -> None:
        self.world = world
        self.components = components
        self.book = book
        self.confirm = confirm and book is not None
        self.tables = Tables(world, dict(components.index))
        self._delay_watch = DelayWatch(delay_components, len(world.fabric.rnics), USUAL.slow_ns)
        self.tracker = Tracker(0.95, 20 * SECOND)
        self._more = {} if threshold is None else {"threshold": threshold}
        self._lists: deque[Counts] = deque()
        self._rounds: deque[Counts] = deque()
        self._episode: Episode | None = None
        self._maker = RecordMaker(world, 0)
        self._reached: dict[tuple[str, int], tuple[int, int]] = {}
        self._hosts = HostHistory(world.fabric.topology, SECOND, lambda h, w: self._reached.get((h, w), (0, 0)))
        self._elements: dict[tuple[str, str], frozenset[str]] = {}
        for c in (*components.singles, *components.pairs.values()):
            key = (c.component, c.type)
            self._elements[key] = self._elements.get(key, frozenset()) | c.elements
        self._wholes = Wholes(self._elements)
        self._seen_moves = [0.0, 0.0]
        self.looks = 0

    def run(self, seconds: int, is_enough: Callable[[list[Opened]], bool] = lambda found: False) -> list[Opened]:
        """Incidents of the first `seconds`; ends 2 s after those opened that are enough."""
        first: dict[str, float] = {}
        found: dict[str, Opened] = {}
        enough_at: float | None = None
        for second in range(seconds):
            now = second + 1.0
            for v in self._second(second):
                first.setdefault(v.component, now)
            for name, at in first.items():
                # An incident is judged 2 s after it opened: until then it may be refined.
                track = self.tracker.tracks.get(name)
                if now <= at + 2:
                    if track is not None:
                        found[name] = Opened(at, track.verdict)
                    else:
                        found.pop(name, None)  # a larger component took its place
            if enough_at is None and is_enough(list(found.values())):
                enough_at = now
            if enough_at is not None and now >= enough_at + 2:
                break
        return list(found.values())

    # ------------------------------------------------------------ one second

    def _second(self, second: int) -> list[Verdict]:
        counts = self.world.step(float(second), second + 1.0)
        rounds = [self._confirm(second + ROUNDS_AT_S[0])]
        if self._episode is not None and self._episode.is_quick:
            rounds.append(self._confirm(second + ROUNDS_AT_S[1]))
        fresh = any(c.end_s + TIMEOUT_S > second for c in self._known_rounds(second + 1))
        self._lists.append(counts)
        while self._lists[0].start_s < second - QUIET_S - WINDOW_S:
            self._lists.popleft()
        while self._rounds and self._rounds[0].start_s < second - QUIET_S - WINDOW_S:
            self._rounds.popleft()
        self._notice(counts)
        self._tell_moves(second)
        view = self._hosts.judge(second, self._facts(counts, second))
        fresh |= (second + 1 - SETTLE_S) % WINDOW_S == 0
        verdicts = {v.component: v for v in view.verdicts}
        if fresh:
            for v in self._judge(second + 1):
                verdicts.setdefault(v.component, v)
        elements = {
            v.component: self._elements.get((v.component, v.component_type), frozenset()) for v in verdicts.values()
        }
        opened = self.tracker.update(
            verdicts.values(),
            elements,
            self._wholes.parts_at_once(verdicts.values(), elements),
            (second + 1) * SECOND,
            fresh or bool(view.verdicts),
        )
        if self.tracker.open and self._episode is not None:
            self._episode.rounds_open += sum(rounds)
        return opened

    def _known_rounds(self, now: float) -> list[Counts]:
        """Rounds whose probes have come back or timed out."""
        return [c for c in self._rounds if c.end_s + TIMEOUT_S <= now + 1e-9]

    def _judge(self, now: int) -> list[Verdict]:
        """Localise on what is known since the suspicion began, or else over the last minute."""
        since = now - QUIET_S if self._episode is None else self._episode.onset() / SECOND - MARGIN_S
        complete = (now - SETTLE_S) // WINDOW_S * WINDOW_S
        known = [c for c in self._lists if since <= c.start_s and c.end_s <= complete]
        known += [c for c in self._known_rounds(now) if since <= c.start_s]
        if not known:
            return []
        self.looks += 1
        sums = Sums.of(len(self.world.flows), known)
        suspects = online(self.tables.losses(sums), self.components, noise=1e-4, **self._more)
        found = [self._verdict(s, sums, known) for s in suspects if s.lost >= MIN_LOST]
        return found or self._delays(now, complete)

    def _over(self, s: Suspect) -> list[np.ndarray]:
        """Masks of the flows that surely cross a suspect, there and back."""
        w = self.world
        wanted = [i for i, name in enumerate(w.fabric.element_names) if name in s.candidate.elements]
        return [np.isin(w.told[side], wanted).any(axis=1) & ~np.isfinite(w.moved_seen[side]) for side in (THERE, BACK)]

    def _crossed(self, s: Suspect, sums: Sums) -> list[Crossing]:
        """What is surely known to have crossed a suspect; in whatever class, under the flow's own."""
        w, out = self.world, list[Crossing]()
        if w.spray:
            return out
        over = self._over(s)
        for role, sent, back in ((PROBE, sums.sent, sums.received), (ACK, sums.acks_sent, sums.acks_back)):
            rows = np.flatnonzero((sent > 0) & over[THERE if role == PROBE else BACK][sums.flows])
            for row in rows.tolist():
                flow = self._flow(int(sums.flows[row]))
                out.append(Crossing(flow, role, flow.cls_name, (), int(sent[row]), int(sent[row] - back[row])))
        return out

    def _moments(self, s: Suspect, known: list[Counts]) -> list[Moment]:
        """What crossed a suspect in each window and each round, as far as is surely known."""
        w, over = self.world, self._over(s)
        out: dict[tuple[float, bool], Moment] = {}
        rounds = {id(c) for c in self._rounds}
        for c in () if w.spray else known:
            confirmed = id(c) in rounds
            at = c.start_s if confirmed else c.start_s // WINDOW_S * WINDOW_S
            m = out.setdefault((at, confirmed), Moment(confirmed))
            for side, sent, arrived in ((THERE, c.sent, c.received), (BACK, c.acks_sent, c.acks_back)):
                rows = over[side][c.flows] & c.valid & c.both
                m.sent += int(sent[rows].sum())
                m.lost += int((sent - arrived)[rows].sum())
        return list(out.values())

    def _verdict(self, s: Suspect, sums: Sums, known: list[Counts]) -> Verdict:
        crossed = self._crossed(s, sums)
        return Verdict(
            component=s.candidate.component,
            component_type=s.candidate.type,
            direction=s.direction,
            symptom=symptom_of(s.candidate.type, s.rate, crossed, frozenset({"large"}))[0],
            rate=s.rate,
            rate_low=s.rate_low,
            rate_high=s.rate_high,
            confidence=s.confidence,
            alternatives=sorted({a.component for a in s.alternatives} - {s.candidate.component}),
            evidence={
                "sent": s.sent,
                "lost": s.lost,
                "lossy_tuples": lossy_tuples(crossed),
                "moments": sum_up(self._moments(s, known)),
            },
        )

    def _delays(self, now: int, complete: int) -> list[Verdict]:
        """What delays the last round trips, as `DelayFeed` gives them to the watch; baselines need more than a run."""
        n = len(self.world.flows)
        windows: dict[int, list[Counts]] = {}
        for c in self._lists:
            if now - RECENT_S <= c.end_s <= complete:
                windows.setdefault(int(c.start_s) // WINDOW_S, []).append(c)
        timed: list[tuple[float, np.ndarray, np.ndarray, np.ndarray]] = []
        for w, counts in windows.items():
            sums = Sums.of(n, counts)
            rows = np.flatnonzero(sums.rtts)
            means = sums.rtt_sum_ns[rows] / sums.rtts[rows]
            timed.append(((w + 1) * WINDOW_S, sums.flows[rows], np.full(len(rows), OWN_CLASS), means))
        for c in self._known_rounds(now):
            if c.end_s >= now - RECENT_S:
                rows = np.flatnonzero(c.valid & (c.answered > 0))
                classes = np.full(len(rows), OWN_CLASS) if c.as_class is None else c.as_class[rows]
                timed.append((c.end_s, c.flows[rows], classes, c.rtt_sum_ns[rows] / c.answered[rows]))
        heard = []
        if sum(np.count_nonzero(means > self._delay_watch.slow_ns) for *_, means in timed) >= LEAST_FLOWS:
            for end, flows, classes, means in sorted(timed, key=lambda t: t[0]):
                slots = [self._slot(f, c, now) for f, c in zip(flows.tolist(), classes.tolist(), strict=True)]
                heard.append((int(end * SECOND), np.array(slots, np.int64), means))
        since = self._episode.onset() if self._episode else (now - QUIET_S) * SECOND
        found = self._delay_watch.quick_latest(heard, since, now * SECOND)
        return [verdict_of(s, []) for s in self._delay_watch.merged([], found)]

    def _slot(self, row: int, cls: int, now: int) -> int:
        flow, flows = self._flow(row), self.world.flows
        there, back = (self.book.book.paths_at(flow, role, now * SECOND) for role in (PROBE, ACK))
        return self._delay_watch.book.slot((row, cls), int(flows.src[row]), int(flows.dst[row]), there, back)

    # ------------------------------------------------------------ confirmation

    def _notice(self, c: Counts) -> None:
        """Events that agents send at once: unanswered probes, missing ACKs, slow round trips."""
        if not self.confirm:
            return
        unanswered = c.sent - c.answered
        missing = 2 * c.answered - c.acks_back
        slow = (c.answered > 0) & (c.rtt_sum_ns > USUAL.slow_ns * np.maximum(c.answered, 1))
        rows = np.flatnonzero(((unanswered > 0) | (missing > 0) | slow) & c.valid)
        open_elements = frozenset[str]().union(*(t.elements for t in self.tracker.open))
        for row in rows.tolist():
            flow = self._flow(row)
            explained = open_elements and any(
                open_elements & set(p) for role in (PROBE, ACK) for p in self.book.book.paths_at(flow, role, 1 << 62)
            )
            if explained and (self._episode is None or self._episode.is_told):
                continue
            kind = LOST if unanswered[row] else NO_RTT if missing[row] else SLOW
            at = int(c.start_s * SECOND)
            if self._episode is None:
                self._episode = Episode(at)
            for _ in range(int(unanswered[row] + missing[row]) or 1):
                self._episode.add(flow, Event(kind, *flow.key, 0, at, 0, 0), at)

    def _flow(self, row: int) -> Flow:
        return self.book.book.flows[self.book.key_of[row]]

    def _confirm(self, at_s: float) -> bool:
        """Probe harder what the product's plan says, if there is a suspicion."""
        e = self._episode
        if e is None:
            return False
        usable = set(self.world.fabric.topology.hosts)
        requests, _ = plan(self.book.book, e, usable)
        count = COUNTS[min(e.rounds, len(COUNTS) - 1)]
        e.rounds += 1
        noted = e.noted
        lost = 0
        for own in (True, False):
            rows, classes = self._rows([r for r in requests if (r.cls < 0) == own])
            if not len(rows):
                continue
            c = self.world.probe(rows, np.full(len(rows), count), at_s, at_s + 0.02 * count, None if own else classes)
            self._rounds.append(c)
            lost += int(((c.sent - c.answered + 2 * c.answered - c.acks_back) * c.valid).sum())
        moved = (
            np.unique(np.concatenate([r.flows for r in list(self._rounds)[-2:]])) if self._rounds else np.empty(0, int)
        )
        self.world.retrace(moved, int(at_s) + 1.0)
        e.confirmed(lost, noted)
        if e.is_over:
            self._episode = None
        return True

    def _rows(self, requests: list[Request]) -> tuple[np.ndarray, np.ndarray]:
        rows, classes = [], []
        for r in requests:
            for index in r.indexes:
                rows.append(self.book.rows[r.rnic, r.list_version, index])
                classes.append(r.cls)
        return np.array(rows, np.int64), np.array(classes, np.int64)

    def _tell_moves(self, second: int) -> None:
        """Tell the flow book of tuples that tracing saw move."""
        if self.book is None:
            return
        for role, name in ((THERE, PROBE), (BACK, ACK)):
            moved = np.flatnonzero(self.world.moved_seen[role] >= second)
            if len(moved):
                self.book.trace(name, moved, self.world.told[role], (second + 1) * SECOND)

    # ------------------------------------------------------------ hosts

    def _facts(self, c: Counts, second: int) -> list:
        """Facts of hosts that have something to tell; the rest is well."""
        facts = self._maker.facts(float(second), second + 1.0)
        w = self.world
        for f in facts:
            if f.state == "died" or f.silent_since_ns:
                to_host = w.fabric.host_of[w.flows.dst[c.flows]] == list(w.fabric.topology.hosts).index(f.host)
                self._reached[f.host, second] = (int(c.sent[to_host].sum()), int((c.sent - c.answered)[to_host].sum()))
        return facts


__all__ = ["HOST_SYMPTOMS", "Book", "Opened", "Watch"]
