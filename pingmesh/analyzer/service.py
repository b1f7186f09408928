"""The analyzer as a process: messages in, questions out, verdicts to the controller's store."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from typing import get_args

from pingmesh import topics
from pingmesh.analyzer.clock import Clock
from pingmesh.analyzer.confirmation import Confirmations
from pingmesh.analyzer.evidence import walked
from pingmesh.analyzer.findings import Findings
from pingmesh.analyzer.flows import Flow, FlowBook
from pingmesh.analyzer.host_rules import SECOND
from pingmesh.analyzer.hosts import HostBook
from pingmesh.analyzer.judge import Judge, Judgement
from pingmesh.analyzer.localise import Localiser, localise
from pingmesh.analyzer.moves import Moves
from pingmesh.analyzer.observe import crosses, paths_of
from pingmesh.analyzer.questions import Questions
from pingmesh.analyzer.report_columns import read_report
from pingmesh.analyzer.rounds import RoundResult, Rounds
from pingmesh.analyzer.samples import ROUND_TRIP, Joined, Sample, SampleStore
from pingmesh.analyzer.summary import SPAN_S, summarise_evidence
from pingmesh.analyzer.suspicion import DOUBTFUL, WITHDRAWS
from pingmesh.analyzer.tracker import HOST_SYMPTOMS, Track, Tracker
from pingmesh.analyzer.waits import waits_for
from pingmesh.bus import Bus
from pingmesh.config import Settings
from pingmesh.incidents import ComponentType, Symptom
from pingmesh.messages import (
    AgentState,
    Answer,
    BadMessageError,
    ConfirmResult,
    Exceptions,
    Message,
    OpenIncidents,
    Paths,
    ProbeList,
    Register,
    Report,
    Verdicts,
    decode,
    encode,
)
from topology.model import Topology

log = logging.getLogger(__name__)

GRACE_NS = 3 * SECOND
"""After our own (re)connection or stall: agents come back and retained lists arrive."""
TICK_S = 1.0
STALL_S = 2.5
JUDGE_PAUSE_S = 0.1
REPUBLISH_NS = 5 * SECOND
CLOSE_PACKETS = 30
QUIET_WALK_NS = 45 * SECOND
"""Without a sign of change, tuples traced over this long show how the links are walked."""
QUIET_NS = 60 * SECOND
"""Without suspicion, evidence of this long is judged together: slow leaks add up."""
WATCH_TRIES = 12
DESERTED = frozenset({"link_down", "switch_down", "flap"})
RETRACE_TUPLES = 24


KINDS: dict[str, type[Message]] = {
    topics.STATE: AgentState,
    topics.REGISTER: Register,
    topics.REPORT: Report,
    topics.EXCEPTION: Exceptions,
    topics.PATHS: Paths,
    topics.LIST: ProbeList,
    topics.INCIDENTS: OpenIncidents,
}


class Analyzer:
    """One analyzer of one cluster."""

    def __init__(self, settings: Settings, topology: Topology, localiser: Localiser = localise) -> None:
        self._cluster = settings.cluster
        self._clock = Clock()
        self._book = FlowBook(topology)
        waits = self._waits = waits_for(settings.agent.timeout_ms)
        self._hosts = HostBook(waits)
        self._store = SampleStore(self._book, waits)
        self._findings = Findings()
        self._topology = topology
        a = settings.analyzer
        self._judge = Judge(
            topology, self._book, self._hosts, self._store, localiser, a.noise, lambda: frozenset(self._large), waits
        )
        self._tracker = Tracker(a.open_confidence, int(a.close_after_s * SECOND))
        base = f"{topics.ROOT}/{self._cluster}"
        kinds = (topics.STATE, topics.REGISTER, topics.REPORT, topics.EXCEPTION, topics.PATHS, topics.ANSWER)
        self._bus = Bus(
            settings.broker,
            f"analyzer-{self._cluster}",
            [f"{base}/+/{k}" for k in kinds]
            + [f"{base}/+/{topics.LIST}/+", f"{base}/{topics.CONTROLLER}/{topics.INCIDENTS}"],
            self._on_message,
            on_connect=self._on_connect,
        )
        self._questions = Questions(self._cluster, self._bus, waits)
        self._rounds = Rounds(self._book, self._hosts, self._questions, self._clock, int(a.confirm_interval_ms * 1000))
        self._moves = Moves()
        self._large: set[str] = set()
        self._confirmations = Confirmations(
            self._rounds, self._bus.connected.is_set, self._take_round, lambda: bool(self._tracker.open)
        )
        self._quiet_until = 0
        self._judged_from = 0
        self._covered: dict[str, int] = {}
        self._watched: set[str] = set()
        self._look = asyncio.Event()
        self._new_evidence = False
        self._published = b""
        self._published_at = 0
        self._judgement = Judgement()
        self._tasks: asyncio.TaskGroup | None = None

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            tasks.create_task(self._bus.run(), name="bus")
            tasks.create_task(self._ticks(), name="ticks")
            tasks.create_task(self._looks(), name="looks")
            tasks.create_task(self._confirmations.run(), name="confirmations")

    async def listen(self, heard: Callable[[list[Sample], int], None]) -> None:
        """Only listen, until cancelled: hand on, about once a second, the samples of windows that both ends have
        reported, with the time. Nothing is asked, judged or published. What comes late follows as samples that sent 0.
        """
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._bus.run(), name="bus")
            while True:
                await asyncio.sleep(TICK_S)
                now = self._clock.now()
                joined = self._store.take_in(now, lambda h: self._covered.get(h, 0))
                heard(self._store.take_samples(joined), now)

    @property
    def book(self) -> FlowBook:
        """The flows and paths heard of."""
        return self._book

    @property
    def hosts(self) -> HostBook:
        """The agents heard of."""
        return self._hosts

    # ------------------------------------------------------------ messages

    async def _on_connect(self) -> None:
        now = self._clock.now()
        self._hosts.session_started(now)
        self._quiet_until = now + GRACE_NS
        self._store.not_before = now
        self._published = b""

    def _on_message(self, topic: topics.Topic, payload: bytes) -> None:
        now = self._clock.now()
        kind = KINDS.get(topic.kind)
        if topic.kind == topics.ANSWER:
            self._on_answer(topic, payload, now)
            return
        if kind is None:
            raise BadMessageError("topic", f"kind {topic.kind!r} is not for an analyzer")
        if not payload:
            return  # a retained message was cleared
        try:
            message: Message = decode(payload, kind, topic.host, topic.cluster)
        except BadMessageError as error:
            self._findings.version(topic.host, error, now)
            raise
        match message:
            case AgentState():
                self._hosts.on_state(message, now, topic.retained)
                self._look.set()
            case Register():
                self._on_register(message, now, topic.retained)
            case Report():
                self._on_report(message, now)
            case Exceptions():
                self._on_exceptions(message, now)
            case Paths():
                self._on_paths(message, now)
            case ProbeList():
                self._on_list(message)
            case OpenIncidents():
                # Also a live one: the controller may not have heard that we closed it, nor we of it.
                self._on_open_incidents(message, now)
            case _:
                pass

    def _on_register(self, message: Register, now: int, retained: bool) -> None:
        self._hosts.on_message(message.host, message.boot, now, 0, retained)
        if retained:
            return
        host = self._hosts.get(message.host)
        for r in message.rnics:
            host.set_link(r.device, r.up, now)
            self._hosts.set_clock(f"{message.host}/{r.device}", r.clock)
        self._look.set()

    def _on_report(self, message: Report, now: int) -> None:
        prober, responder = read_report(message)
        self._hosts.on_message(message.host, message.boot, now, message.now_ns)
        self._hosts.on_health(message.host, message.health, now)
        host = self._hosts.get(message.host)
        if message.seq in host.seqs:
            return
        host.seqs.append(message.seq)
        offset = host.offset
        self._findings.clock(message.host, offset, message.health.clock_steps, now)
        self._store.add_report(message.prober, prober, responder, offset, now)
        self._covered[message.host] = message.until_ns + offset

    def _on_exceptions(self, message: Exceptions, now: int) -> None:
        self._hosts.on_message(message.host, message.boot, now, message.now_ns)
        if message.health is not None:
            self._hosts.on_health(message.host, message.health, now)
        host = self._hosts.get(message.host)
        if now < self._quiet_until or host.starved(now - 2 * SECOND):
            return
        offset = host.offset
        for event in message.events:
            flow = self._book.flows.get((event.rnic, event.list_version, event.index))
            if flow is None or flow.src_host != message.host:
                continue
            if event.kind in WITHDRAWS and self._confirmations.episode is not None:
                self._confirmations.episode.withdraw(flow)
            if event.kind not in DOUBTFUL or self._explained(flow):
                continue
            self._confirmations.doubt(flow, event, event.sent_ns + offset)
            self._watch(flow.dst_host)

    def _on_paths(self, message: Paths, now: int) -> None:
        self._hosts.on_message(message.host, message.boot, now, message.now_ns)
        for p in message.paths:
            at = now - max(0, message.now_ns - p.at_ns)
            left = self._book.add_path(p, at)
            if left:
                self._moves.note(left, at, now)
                self._look.set()

    def _on_list(self, message: ProbeList) -> None:
        self._book.add_list(message)
        sizes = {c.name: c.size for c in message.classes}
        small = min(sizes.values(), default=0)
        self._large |= {name for name, size in sizes.items() if size > max(512, 2 * small)}

    def _on_open_incidents(self, message: OpenIncidents, now: int) -> None:
        for v in message.open:
            if v.component_type not in get_args(ComponentType) or v.symptom not in get_args(Symptom):
                raise BadMessageError(
                    "OpenIncidents", f"names no known type or symptom: {v.component_type}, {v.symptom}"
                )
        for v in message.open:
            elements = self._judge.elements_of.get((v.component, v.component_type), frozenset())
            if elements or v.component in self._topology.hosts:
                self._tracker.adopt(v, elements, now)
            else:
                self._tracker.dismiss(v.component, now)  # the topology has changed since

    def _on_answer(self, topic: topics.Topic, payload: bytes, now: int) -> None:
        message: Answer | ConfirmResult
        try:
            message = decode(payload, Answer, topic.host, topic.cluster)
        except BadMessageError:
            message = decode(payload, ConfirmResult, topic.host, topic.cluster)
        self._hosts.on_message(message.host, message.boot, now, message.now_ns)
        self._hosts.on_health(message.host, message.health, now)
        self._questions.resolve(message)

    def _explained(self, flow: Flow) -> bool:
        """Whether an open incident already accounts for losses of this flow."""
        for t in self._tracker.open:
            v = t.verdict
            if v.symptom in HOST_SYMPTOMS and v.component in (flow.src_host, flow.dst_host):
                return True
            if any(not t.elements.isdisjoint(p) for p in paths_of(self._book, flow, ROUND_TRIP, self._clock.now())):
                episode = self._confirmations.episode
                return episode is None or episode.is_told
        return False

    # ------------------------------------------------------------ tasks

    async def _ticks(self) -> None:
        loop = asyncio.get_running_loop()
        beat = 0
        while True:
            before = loop.time()
            await asyncio.sleep(TICK_S)
            if loop.time() - before > STALL_S:
                # We were stalled ourselves: what the others did not say meanwhile means nothing.
                log.warning("the analyzer itself was stalled", extra={"seconds": round(loop.time() - before, 1)})
                self._hosts.session_started(self._clock.now())
                self._quiet_until = self._clock.now() + GRACE_NS
                self._confirmations.episode = None
            self._look.set()
            beat += 1
            if beat % 2 == 0:
                await self._retrace_deserted()
            if beat % 5 == 0:
                await self._publish_summary()

    async def _looks(self) -> None:
        while True:
            await self._look.wait()
            self._look.clear()
            try:
                await self._look_once()
            except ConnectionError:
                log.info("verdicts not sent: no broker")
            except Exception:
                # One look that fails must not end the watch over the fabric; the next has other evidence.
                log.exception("a look at the evidence failed")
            await asyncio.sleep(JUDGE_PAUSE_S)

    async def _look_once(self) -> None:
        now = self._clock.now()
        new = self._store.take_in(now, lambda h: self._covered.get(h, 0))
        self._note(self._remarkable(new))
        if now < self._quiet_until or not self._bus.connected.is_set():
            return
        fresh = self._new_evidence or new.has_loss
        self._new_evidence = False
        since = self._since(now)
        j = self._judgement = self._judge.judge(now, since, self._traced_since(now))
        for host in j.view.undecided:
            self._watch(host)
        opened = self._tracker.update(j.verdicts, j.elements, j.unsettled, now, fresh)
        for v in opened:
            log.warning("incident", extra={"component": v.component, "symptom": v.symptom, "direction": v.direction})
        for name in self._tracker.close(lambda t: self._is_clean(t, now), now):
            log.info("incident over", extra={"component": name})
            # Its losses are history: they must not open it again.
            self._judged_from = now
        await self._publish_verdicts(now, j)
        await self._retrace_moved(now)

    def _since(self, now: int) -> int:
        """From when on evidence is judged: an episode goes on after an incident is over, whose losses are history."""
        episode = self._confirmations.episode
        return max(episode.onset(), self._judged_from) if episode else self._quiet_since(now)

    def _quiet_since(self, now: int) -> int:
        """Without suspicion: the last minute, but not what was before the open incidents began."""
        since = max(now - QUIET_NS, self._judged_from)
        began = [t.verdict.since_ns for t in self._tracker.open if t.verdict.since_ns]
        return max(since, min(began)) if began else since

    def _traced_since(self, now: int) -> int:
        if self._confirmations.episode is not None:
            return self._confirmations.episode.began
        return self._moves.since(now) or now - QUIET_WALK_NS

    async def _retrace_moved(self, now: int) -> None:
        """Where some tuples were seen to move, the others are traced too: a link may be deserted."""
        links = self._moves.to_trace(now)
        if links and self._confirmations.episode is None:
            await self._rounds.retrace(links, self._moves.since(now) or now)

    async def _retrace_deserted(self) -> None:
        """Links that nobody walks come back unseen unless somebody looks."""
        deserted = [t for t in self._tracker.open if t.verdict.symptom in DESERTED]
        if deserted and self._bus.connected.is_set():
            links = sorted(e for t in deserted for e in t.elements if "->" in e)
            await self._rounds.retrace(links, self._clock.now(), RETRACE_TUPLES)

    def _take_round(self, result: RoundResult) -> None:
        self._store.add(result.samples)
        self._note(result.samples)
        self._new_evidence = True
        self._look.set()

    def _watch(self, host: str) -> None:
        """Ask a host until it answers or it is clear that it does not."""
        if host in self._watched or self._tasks is None or self._hosts.get(host).state != "online":
            return
        self._watched.add(host)
        self._tasks.create_task(self._watching(host), name=f"watch {host}")

    async def _watching(self, host: str) -> None:
        try:
            for _ in range(WATCH_TRIES):
                asked = self._clock.now()
                if await self._questions.ask(host) is not None or not self._bus.connected.is_set():
                    break
                self._hosts.on_unanswered(host, asked)
                self._look.set()
            self._look.set()
        finally:
            await asyncio.sleep(JUDGE_PAUSE_S)
            self._watched.discard(host)

    # ------------------------------------------------------------ after a look

    def _remarkable(self, new: Joined) -> list[Sample]:
        """The samples that may be about an open incident: with losses, or slow."""
        if not self._tracker.tracks:
            return []
        slow = ((clean, rows[clean.rtt_ns[rows] > self._waits.slow_ns]) for clean, rows in new.clean)
        return [*new.single, *(s for clean, rows in slow for s in self._store.samples_of(clean, rows))]

    def _note(self, samples: list[Sample]) -> None:
        """Losses, or delays, across an open incident's component keep it open."""
        excluded = self._judgement.view.excluded
        limits = [(t, self._slow_limit(t)) for t in self._tracker.tracks.values()]
        for s in samples:
            is_well = s.lost <= 0 and s.rtt_ns <= self._waits.slow_ns
            if is_well or s.flow.src_host in excluded or s.flow.dst_host in excluded:
                continue
            for t, limit in limits:
                of_delay = t.verdict.symptom == "high_rtt"
                if t.elements and (s.rtt_ns > limit if of_delay else s.lost > 0):
                    paths = paths_of(self._book, s.flow, ROUND_TRIP if of_delay else s.role, s.start)
                    if crosses(paths, t.elements):
                        self._tracker.bad(t, s.start, s.end)

    def _slow_limit(self, track: Track) -> int:
        """Round trip (ns) from which on a component that is known to be slow still is: half of what it was longer by.

        Where everything takes long now and then, an incident would else never be over.
        """
        usual, excess = (track.verdict.evidence.get(k) for k in ("usual_us", "excess_us"))
        if not isinstance(usual, int | float) or not isinstance(excess, int | float):
            return self._waits.slow_ns
        return max(self._waits.slow_ns, int(1000 * (usual + excess / 2)))

    def _is_clean(self, track: Track, now: int) -> bool:
        """Whether evidence since the last bad moment says that the component is well."""
        v = track.verdict
        if v.symptom in HOST_SYMPTOMS:
            host = self._hosts.get(v.component)
            if host.state == "stopped":
                return True
            return host.state == "online" and host.heard > track.last_bad and not host.unanswered
        if v.component_type == "rnic":
            name, _, device = v.component.partition("/")
            if device in self._hosts.get(name).down:
                return False
        seen = walked(self._store, track.last_bad, track.elements, self._slow_limit(track))
        if seen.last_lost:
            # Lost on what was not known to be this component's path then: bad all the same, but no more than once.
            track.last_bad = seen.last_lost
            return False
        return seen.sent >= CLOSE_PACKETS and (v.symptom != "high_rtt" or not seen.delayed)

    async def _publish_verdicts(self, now: int, j: Judgement) -> None:
        self._findings.from_judgement(j.findings, self._store, self._book, now)
        message = Verdicts(
            cluster=self._cluster,
            host=topics.ANALYZER,
            now_ns=0,
            open=[t.verdict for t in self._tracker.open],
            closed=self._tracker.closed(now),
            findings=self._findings.current(now),
            enough_data=self._store.has_any(now - 20 * SECOND),
        )
        payload = encode(message)
        if payload == self._published and now - self._published_at < REPUBLISH_NS:
            return
        self._published, self._published_at = payload, now
        message.now_ns = now
        await self._bus.publish(topics.Topic(self._cluster, topics.ANALYZER, topics.VERDICTS), encode(message), qos=1)

    async def _publish_summary(self) -> None:
        now = self._clock.now()
        rejected = sum(Counter(self._bus.rejected).values())
        evidence = self._judge.evidence(now - int(SPAN_S * SECOND), self._judgement.view.dark)
        broken = [t.elements for t in self._tracker.open]
        message = summarise_evidence(self._cluster, evidence, self._hosts, now, rejected, broken)
        try:
            await self._bus.publish(topics.Topic(self._cluster, topics.ANALYZER, topics.SUMMARY), encode(message))
        except ConnectionError:
            log.info("summary not sent: no broker")


async def run(settings: Settings, topology: Topology) -> None:
    """Run an analyzer until cancelled."""
    await Analyzer(settings, topology).run()
