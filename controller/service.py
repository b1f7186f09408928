"""The controller as a running service: what comes in by MQTT, what is published, and the HTTP API beside it."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections import Counter

import topology.files
from controller import database
from controller.book import Book
from controller.clock import now_ns
from controller.planner import Planner
from controller.publishing import Publisher
from controller.rates import RatePlan
from controller.reach import Reach
from controller.registry import Registry
from controller.store import Store
from pingmesh import topics
from pingmesh.bus import Bus
from pingmesh.config import Settings
from pingmesh.messages import (
    AgentState,
    BadMessageError,
    FindingReport,
    Paths,
    ProbeClass,
    Register,
    Summary,
    Verdicts,
    decode,
)
from topology.model import Topology

log = logging.getLogger(__name__)

TICK_S = 0.25
HEARD_NS = 90_000_000_000
"""An online agent registers once a minute; unheard for longer it is not counted as online."""
FRESH_NS = 20_000_000_000
"""The analyzer speaks every few seconds; what is older says nothing about now."""
FROM_AGENTS = (topics.REGISTER, topics.STATE, topics.PATHS)
FROM_ANALYZER = (topics.VERDICTS, topics.SUMMARY)


class NoTopologyError(ValueError):
    """The settings name no topology."""


class Controller:
    """All of the controller's state and the handlers that change it; `run` in this module keeps it going."""

    def __init__(self, settings: Settings, fabric: Topology, db: sqlite3.Connection) -> None:
        s = settings.controller
        self.settings = settings
        self.topology = fabric
        self.db = db
        self.reach = Reach(fabric)
        self.registry = Registry(db)
        self.registry.back(now_ns())
        self.store = Store(db, settings.cluster)
        self.classes = probe_classes(settings)
        self.book = Book(db, self.reach, [c.name for c, _ in self.classes])
        self.planner = Planner(
            self.reach,
            self.book,
            RatePlan(s.tor_mesh_rate, s.link_rate, s.link_tuples, s.max_rate),
            {i: max(2, round(share * s.link_tuples)) for i, (_, share) in enumerate(self.classes) if i},
            round(s.rotation_s * 1e9),
            s.rotation_share,
            seed=database.seed(db),
        )
        self.planner.registered(now_ns())  # a start too waits for registrations to settle
        self.summary: Summary | None = None
        self.summary_ns = 0
        self.verdicts_ns = 0
        self.enough_data = False
        self.unsupported: dict[str, FindingReport] = {}
        self.received: Counter[str] = Counter()
        t = f"{topics.ROOT}/{settings.cluster}"
        self.bus = Bus(
            settings.broker,
            f"controller-{settings.cluster}",
            [*(f"{t}/+/{kind}" for kind in FROM_AGENTS), *(f"{t}/{topics.ANALYZER}/{kind}" for kind in FROM_ANALYZER)],
            self.handle,
            on_connect=self._connected,
        )
        self.publisher = Publisher(self)
        self.wake = asyncio.Event()

    async def _connected(self) -> None:
        self.publisher.refresh_all()
        self.wake.set()

    # ------------------------------------------------------------ what comes in

    def handle(self, topic: topics.Topic, payload: bytes) -> None:
        """One message. Raises BadMessageError for one that cannot be used."""
        if topic.kind not in (FROM_ANALYZER if topic.host == topics.ANALYZER else FROM_AGENTS):
            raise BadMessageError("topic", f"kind {topic.kind!r} from {topic.host!r} is not for a controller")
        self.received[topic.kind] += 1
        if topic.host == topics.ANALYZER:
            self._from_analyzer(topic, payload)
            return
        if not payload:
            return  # a retained state that somebody cleared
        try:
            self._from_agent(topic, payload)
        except BadMessageError as error:
            if "protocol version" in error.reason and topic.kind in (topics.REGISTER, topics.STATE):
                text = f"{topic.host}: {error.reason}; its probes are no evidence: install one major version everywhere"
                self.unsupported[topic.host] = FindingReport(
                    kind="version_unsupported", subject=topic.host, since_ns=now_ns(), text=text
                )
            raise

    def _from_agent(self, topic: topics.Topic, payload: bytes) -> None:
        now = now_ns()
        cluster = self.settings.cluster
        if topic.kind == topics.REGISTER:
            m = decode(payload, Register, topic.host, cluster)
            if len({r.device for r in m.rnics}) != len(m.rnics):
                raise BadMessageError("Register", "names a device twice")
            if any("/" in r.device or not r.device for r in m.rnics):
                raise BadMessageError("Register", "names a device with a slash or without a name")
            self.unsupported.pop(topic.host, None)
            change = self.registry.register(m, now)
            if any(n in self.topology.rnics for n in change.added):
                self.planner.registered(now)
            self.publisher.peers_changed(change.moved)
            if change:
                self.publisher.registry_changed()
                self.wake.set()
        elif topic.kind == topics.STATE:
            state = decode(payload, AgentState, topic.host, cluster)
            if self.registry.agent_state(state, now):
                self.wake.set()
            if self.registry.missed(state):
                self.publisher.ask_who(topic.host)
                self.wake.set()
        elif topic.kind == topics.PATHS:
            paths = decode(payload, Paths, topic.host, cluster)
            for p in paths.paths:
                record = self.registry.by_number.get(p.rnic)
                if p.role == 0 and record is not None and record.host == topic.host:
                    self.planner.stale |= self.book.traced(record.name, p)

    def _from_analyzer(self, topic: topics.Topic, payload: bytes) -> None:
        now = now_ns()
        if topic.kind == topics.VERDICTS:
            m = decode(payload, Verdicts, None, self.settings.cluster)
            for incident in self.store.apply(m, now):
                log.info(
                    "incident %s: %s %s",
                    incident.state,
                    incident.component,
                    incident.symptom,
                    extra={"id": incident.id, "direction": incident.direction, "alternatives": incident.alternatives},
                )
            self.store.set_findings("analyzer", m.findings)
            self.verdicts_ns, self.enough_data = now, m.enough_data
            self.publisher.incidents_changed()
            self.wake.set()
        elif topic.kind == topics.SUMMARY:
            self.summary = decode(payload, Summary, None, self.settings.cluster)
            self.summary_ns = now

    # ------------------------------------------------------------ what is done

    async def loop(self) -> None:
        """Plan and publish, a few times a second and when something came in."""
        while True:
            self.tick(now_ns())
            try:
                await self.publisher.flush(now_ns())
            except ConnectionError as error:
                log.info("not published, broker gone: %s", error)
            self.wake.clear()
            try:
                async with asyncio.timeout(TICK_S):
                    await self.wake.wait()
            except TimeoutError:
                pass

    def tick(self, now: int) -> None:
        """One round of planning; changes lists and findings, publishes nothing."""
        self.planner.tick(now, self.registry.listed(now), self.registry.walking())
        self.store.set_findings("controller", self._findings(now))

    def _findings(self, now: int) -> list[FindingReport]:
        out = list(self.unsupported.values())
        listed = self.registry.listed(now)
        for name, record in self.registry.rnics.items():
            place = self.topology.rnics.get(name)
            if place is None and name in listed:
                text = (
                    f"{name} has registered but is not in the topology: it is not probed; add it to the topology file"
                )
                out.append(FindingReport(kind="not_in_topology", subject=name, since_ns=record.since_ns, text=text))
            elif place is not None and name in listed and place.address and place.address != record.info.address:
                text = (
                    f"{name} registered with {record.info.address}, the topology says {place.address}: "
                    "its paths may be taken for others; correct one of them"
                )
                out.append(FindingReport(kind="address_mismatch", subject=name, since_ns=record.since_ns, text=text))
        for host, since in self.registry.duplicates(now):
            text = f"two agents run under the name {host}: give each node its own name (agent.host)"
            out.append(FindingReport(kind="duplicate_node", subject=host, since_ns=since, text=text))
        return out

    def agents(self, now: int) -> dict[str, object]:
        """Counts of agents for `status`, and the names of those not online."""
        online: list[str] = []
        stopped: list[str] = []
        died: list[str] = []
        silent: list[str] = []
        for host, a in sorted(self.registry.agents.items()):
            if a.presence == "online":
                (online if now - a.seen_ns < HEARD_NS else silent).append(host)
            else:
                (stopped if a.presence == "stopped" else died).append(host)
        missing = sorted(set(self.topology.hosts) - self.registry.agents.keys())
        return {
            "expected": len(self.topology.hosts),
            "known": len(self.registry.agents),
            "online": len(online),
            "stopped": stopped,
            "died": died,
            "silent": silent,
            "missing": missing,
        }

    def analyzer_alive(self, now: int) -> bool:
        """Whether the analyzer has spoken of late."""
        return now - max(self.verdicts_ns, self.summary_ns) < FRESH_NS

    def fresh_summary(self, now: int) -> Summary | None:
        """The analyzer's last totals, if they are about now."""
        return self.summary if self.summary and now - self.summary_ns < FRESH_NS else None


def probe_classes(settings: Settings) -> list[tuple[ProbeClass, float]]:
    """The classes of every list with the share of tuples they get: small, large, then what the settings add.

    A class named `small` or `large` in the settings replaces that one; `share` 0 turns a further one off.
    """
    found = {"small": (ProbeClass(), 1.0), "large": (ProbeClass(name="large", size=LARGE), FURTHER_SHARE)}
    for c in settings.controller.classes:
        name = c["name"]
        found[name] = ProbeClass(name=name, dscp=c["dscp"], size=c.get("size", 0)), c.get("share", FURTHER_SHARE)
    return [(c, share) for c, share in found.values() if share > 0 or c.name == "small"]


LARGE = 4096
"""Payload bytes of the large class; agents bound it by the smaller MTU of each pair."""
FURTHER_SHARE = 0.25
"""Of the tuples of each link are probed in a further class too, unless the settings say otherwise."""


def load_topology(settings: Settings) -> Topology:
    """The topology of the settings. Raises topology.files.TopologyError, or NoTopologyError without one."""
    if not settings.topology:
        raise NoTopologyError("no topology: name its file with --topology FILE or `topology:` in the configuration")
    return topology.files.load(settings.topology)


async def run(settings: Settings) -> None:
    """Run the controller until cancelled: MQTT session, planning and HTTP API."""
    from controller.api import bind, serve

    fabric = load_topology(settings)
    db = database.connect(settings.controller.database)
    listening = bind(settings.controller.listen)
    controller = Controller(settings, fabric, db)
    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(controller.bus.run(), name="bus")
            tasks.create_task(controller.loop(), name="planning")
            tasks.create_task(serve(controller, listening), name="api")
    finally:
        controller.book.save()
        db.close()
