"""What the controller publishes: lists, peers, registry, incidents, coverage; only what changed, retained refreshed."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from pingmesh import topics
from pingmesh.messages import (
    Coverage,
    LinkCoverage,
    OpenIncidents,
    Peer,
    PeerUpdate,
    ProbeList,
    Registry,
    WhoAreYou,
    encode,
)

if TYPE_CHECKING:
    from controller.service import Controller

LAZY_NS = 1_500_000_000
"""Retained lists are refreshed so long after a peer moved: a rolling restart moves many."""
COVERAGE_EVERY_NS = 1_000_000_000
INCIDENTS_EVERY_NS = 5_000_000_000
ASK_EVERY_NS = 10_000_000_000
"""An agent whose registration we must refuse is not asked for it again and again."""
TRACE_EVERY_NS = 5_000_000_000
TRACE_CHANGE = 0.1
"""Relative change of the tracing budget from which lists are refreshed for it."""


class Publisher:
    """Remembers what the broker has and sends the difference. Nothing is lost while there is no broker."""

    def __init__(self, controller: Controller) -> None:
        self._c = controller
        self._lists: set[str] = set()
        self._lazy: dict[str, int] = {}
        self._moved: set[str] = set()
        self._who: set[str] = set()
        self._asked_ns: dict[str, int] = {}
        self._registry = True
        self._coverage: bytes = b""
        self._coverage_ns = 0
        self._incidents: bytes = b""
        self._incidents_ns = 0
        self._incidents_dirty = True
        self._sent: frozenset[tuple[str, str]] | None = None
        self._trace_ns = 0
        self._trace_published: tuple[float, float] | None = None

    def refresh_all(self) -> None:
        """A new session: the broker may have lost what it retained."""
        self._lists.update(self._c.book.sheets)
        self._registry = self._incidents_dirty = True
        self._coverage = self._incidents = b""
        self._coverage_ns = self._incidents_ns = 0

    def peers_changed(self, names: Iterable[str]) -> None:
        """These RNICs have a new QPN, epoch or GID."""
        self._moved.update(names)

    def registry_changed(self) -> None:
        """Readers of the registry must know."""
        self._registry = True

    def ask_who(self, host: str) -> None:
        """We have missed the registration of this host's agent."""
        self._who.add(host)

    def incidents_changed(self) -> None:
        """The set of open incidents may differ."""
        self._incidents_dirty = True

    async def flush(self, now_ns: int) -> None:
        """Publish what is due. Raises ConnectionError without a broker; what was not sent stays due."""
        if not self._c.bus.connected.is_set():
            self._compose()
            return
        if self._who:
            await self._send_who(now_ns)
        if self._moved:
            await self._send_peers(now_ns)
        if self._registry:
            await self._send_registry()
        self._compose()
        self._budget(now_ns)
        due = {n for n, at in self._lazy.items() if now_ns >= at}
        for name in sorted(self._lists | due):
            await self._send_list(name)
        await self._send_incidents(now_ns)
        await self._send_coverage(now_ns)

    def _compose(self) -> None:
        c = self._c
        dirty = c.book.dirty
        for name in sorted(dirty):
            if c.book.compose(name, self._number, c.planner.flows(name)):
                self._lists.add(name)
        c.book.save()

    def _number(self, name: str) -> int | None:
        record = self._c.registry.rnics.get(name)
        return record.number if record else None

    def _budget(self, now_ns: int) -> None:
        if now_ns - self._trace_ns < TRACE_EVERY_NS and not (self._lists and self._trace_published is None):
            return
        began = time.perf_counter_ns()
        rates = self._c.planner.trace_budget()
        self._trace_ns = now_ns + 20 * (time.perf_counter_ns() - began)
        old = self._trace_published
        if old is None or any(abs(a - b) > TRACE_CHANGE * b for a, b in zip(rates, old, strict=True)):
            self._trace_published = rates
            self._lists.update(self._c.book.sheets)

    def topic(self, host: str, kind: str, device: str | None = None) -> topics.Topic:
        """A topic of our cluster."""
        return topics.Topic(self._c.settings.cluster, host, kind, device)

    def probe_list(self, name: str) -> ProbeList | None:
        """The list of an RNIC as it is now."""
        c = self._c
        record = c.registry.rnics.get(name)
        sheet = c.book.sheets.get(name)
        if record is None or sheet is None or name not in c.book.versions:
            return None
        by_number = c.registry.by_number
        peers = [by_number[n].peer() for n in sorted({f.peer for f in sheet.flows}) if n in by_number]
        quiet, suspicion = self._trace_published or c.planner.trace
        return ProbeList(
            cluster=c.settings.cluster,
            host=record.host,
            device=record.info.device,
            number=record.number,
            list_version=c.book.versions[name],
            classes=[k for k, _ in c.classes],
            flows=sheet.flows,
            peers=peers,
            max_rate=c.settings.controller.max_rate,
            trace_rate=quiet,
            trace_rate_suspicion=suspicion,
        )

    async def _send_list(self, name: str) -> None:
        m = self.probe_list(name)
        if m is not None:
            topic = self.topic(m.host, topics.LIST, m.device)
            await self._c.bus.publish(topic, encode(m), qos=1, retain=True)
        self._lists.discard(name)
        self._lazy.pop(name, None)

    async def _send_who(self, now_ns: int) -> None:
        self._asked_ns = {h: at for h, at in self._asked_ns.items() if now_ns - at < ASK_EVERY_NS}
        while self._who:
            host = self._who.pop()
            if host not in self._asked_ns:
                m = WhoAreYou(cluster=self._c.settings.cluster, host=host)
                await self._c.bus.publish(self.topic(host, topics.ASK), encode(m), qos=1)
                self._asked_ns[host] = now_ns

    async def _send_peers(self, now_ns: int) -> None:
        c = self._c
        # What moves while we send is for the next time: it must not be forgotten with what was sent.
        moved, self._moved = self._moved, set()
        hosts: dict[str, dict[str, Peer]] = {}
        for name in moved:
            for source in c.book.probers.get(name, ()):
                hosts.setdefault(source.split("/")[0], {})[name] = c.registry.rnics[name].peer()
                self._lazy.setdefault(source, now_ns + LAZY_NS)
        try:
            for host, peers in sorted(hosts.items()):
                m = PeerUpdate(cluster=c.settings.cluster, host=host, peers=list(peers.values()))
                await c.bus.publish(self.topic(host, topics.PEERS), encode(m), qos=1)
        except ConnectionError:
            self._moved |= moved
            raise

    async def _send_registry(self) -> None:
        c = self._c
        m = Registry(cluster=c.settings.cluster, host=topics.CONTROLLER, rnics=c.registry.entries(c.topology.rnics))
        self._registry = False
        try:
            await c.bus.publish(self.topic(topics.CONTROLLER, topics.REGISTRY), encode(m), qos=1, retain=True)
        except ConnectionError:
            self._registry = True
            raise

    async def _send_incidents(self, now_ns: int) -> None:
        c = self._c
        hurry = self._identity() != self._sent
        if not self._incidents_dirty or (now_ns - self._incidents_ns < INCIDENTS_EVERY_NS and not hurry):
            return
        payload = encode(OpenIncidents(cluster=c.settings.cluster, host=topics.CONTROLLER, open=c.store.verdicts()))
        self._incidents_dirty, identity = False, self._identity()
        if payload != self._incidents:
            try:
                await c.bus.publish(self.topic(topics.CONTROLLER, topics.INCIDENTS), payload, qos=1, retain=True)
            except ConnectionError:
                self._incidents_dirty = True
                raise
        self._incidents, self._incidents_ns, self._sent = payload, now_ns, identity

    def _identity(self) -> frozenset[tuple[str, str]]:
        return frozenset((i.id, i.component) for i in self._c.store.open.values())

    async def _send_coverage(self, now_ns: int) -> None:
        if now_ns - self._coverage_ns < COVERAGE_EVERY_NS:
            return
        r = self._c.planner.coverage
        m = Coverage(
            cluster=self._c.settings.cluster,
            host=topics.CONTROLLER,
            share=r.share,
            links=[LinkCoverage(w.link, w.flows, w.rate) for w in r.links],
            uncovered_rnics=list(r.uncovered_rnics),
            reasons=dict(r.reasons),
        )
        payload = encode(m)
        self._coverage_ns = now_ns
        if payload != self._coverage:
            await self._c.bus.publish(self.topic(topics.CONTROLLER, topics.COVERAGE), payload, qos=1, retain=True)
            self._coverage = payload
