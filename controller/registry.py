"""Who is there: RNICs with the numbers that last as long as their names, and the agents that run them."""

from __future__ import annotations

import enum
import sqlite3
from collections.abc import Iterable

import msgspec

from pingmesh.messages import AgentState, Peer, Register, RegistryEntry, RnicInfo

GONE_AFTER_NS = 600_000_000_000
"""An agent unheard for this long (or dead) leaves the probe lists."""
GRACE_NS = 2_000_000_000
"""An agent that said goodbye leaves the lists after this; a restart within it changes nothing."""
DUPLICATE_MEMORY_NS = 150_000_000_000
"""Two boots of one host that register in turn within this time are two nodes under one name."""


class Presence(enum.StrEnum):
    """Where an agent is in its life."""

    ONLINE = "online"
    STOPPED = "stopped"
    DIED = "died"


class Record(msgspec.Struct, kw_only=True):
    """An RNIC as last registered. `since_ns`: when this epoch registered; `removed_ns`: its agent left it out since."""

    number: int = 0
    host: str
    info: RnicInfo
    since_ns: int
    removed_ns: int = 0

    @property
    def name(self) -> str:
        """`host/device`."""
        return f"{self.host}/{self.info.device}"

    def peer(self) -> Peer:
        """How others reach it."""
        i = self.info
        return Peer(self.number, self.name, i.gid, i.qpn, i.qkey, i.epoch, i.mtu)


class Agent(msgspec.Struct, kw_only=True):
    """An agent. `seen_ns`: last registration or state; `changed_ns`: when `presence` became what it is."""

    boot: int
    presence: Presence = Presence.ONLINE
    changed_ns: int = 0
    seen_ns: int = 0
    version: str = ""
    software: str = ""
    earlier: dict[int, int] = {}
    """Earlier boots and when each registered last."""
    duplicate_ns: int = 0
    """When two boots last registered in turn; 0: never."""


class Change(msgspec.Struct):
    """What a registration changed, by RNIC name."""

    added: list[str] = []
    moved: list[str] = []
    """QPN, Q_Key, epoch, GID or MTU differ: those who probe it must know."""
    other: bool = False
    """Anything else that readers of the registry see."""

    def __bool__(self) -> bool:
        return bool(self.added or self.moved or self.other)


_encode = msgspec.msgpack.Encoder().encode
_rnic = msgspec.msgpack.Decoder(Record)
_agent = msgspec.msgpack.Decoder(Agent)


class Registry:
    """The one place that knows RNICs and agents; every change is in the database before it is seen by anyone."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        self.rnics: dict[str, Record] = {}
        self.agents: dict[str, Agent] = {}
        self.by_number: dict[int, Record] = {}
        for number, blob in db.execute("SELECT number, record FROM rnics ORDER BY number"):
            record = _rnic.decode(blob)
            record.number = number
            self._keep(record)
        for host, blob in db.execute("SELECT host, record FROM agents"):
            self.agents[host] = _agent.decode(blob)

    def back(self, now_ns: int) -> None:
        """The controller has started: agents could not be heard while it was away, and must not age by that."""
        for agent in self.agents.values():
            agent.seen_ns = now_ns
            if agent.presence is Presence.DIED:
                agent.changed_ns = now_ns

    def register(self, m: Register, now_ns: int) -> Change:
        """Take a registration in; the numbers of known names stay."""
        change = Change()
        with self._db:
            self._register_agent(m, now_ns, change)
            mentioned = set()
            for info in m.rnics:
                name = f"{m.host}/{info.device}"
                mentioned.add(name)
                self._register_rnic(name, m.host, info, now_ns, change)
            for record in self.rnics.values():
                if record.host == m.host and record.name not in mentioned and not record.removed_ns:
                    record.removed_ns = now_ns
                    self._save(record)
                    change.other = True
        return change

    def _register_agent(self, m: Register, now_ns: int, change: Change) -> None:
        agent = self.agents.get(m.host)
        if agent is None:
            agent = self.agents[m.host] = Agent(boot=m.boot, changed_ns=now_ns)
            change.other = True
        agent.earlier = {b: at for b, at in agent.earlier.items() if now_ns - at < DUPLICATE_MEMORY_NS}
        if m.boot != agent.boot:
            if m.boot in agent.earlier:
                agent.duplicate_ns = now_ns
            agent.earlier[agent.boot] = agent.seen_ns
            agent.boot = m.boot
        if agent.presence is not Presence.ONLINE:
            agent.presence, agent.changed_ns, change.other = Presence.ONLINE, now_ns, True
        agent.seen_ns = now_ns
        agent.version, agent.software = m.version, m.software
        self._save_agent(m.host)

    def _register_rnic(self, name: str, host: str, info: RnicInfo, now_ns: int, change: Change) -> None:
        record = self.rnics.get(name)
        if record is None:
            record = Record(host=host, info=info, since_ns=now_ns)
            cursor = self._db.execute("INSERT INTO rnics (name, record) VALUES (?, ?)", (name, _encode(record)))
            assert cursor.lastrowid is not None
            record.number = cursor.lastrowid
            self._keep(record)
            change.added.append(name)
            return
        if record.info == info and not record.removed_ns:
            return
        old, before = record.info, record.peer()
        record.info = info
        if info.epoch != old.epoch:
            record.since_ns = now_ns
        if record.removed_ns:
            record.removed_ns = 0
            change.other = True
        if record.peer() != before:
            change.moved.append(name)
        elif info != old:
            change.other = True
        self._save(record)

    def agent_state(self, m: AgentState, now_ns: int) -> bool:
        """Take a goodbye, a last will or a hello in; True where it changed something.

        The will of an earlier process may come after the next one's registration: it is not about that one.
        """
        agent = self.agents.get(m.host)
        if agent is None or m.boot != agent.boot:
            return False
        presence = Presence(m.state)
        if presence is Presence.ONLINE:
            agent.seen_ns = now_ns
        if presence is agent.presence:
            return False
        agent.presence, agent.changed_ns = presence, now_ns
        with self._db:
            self._save_agent(m.host)
        return True

    def missed(self, m: AgentState) -> bool:
        """Whether an agent that says it is online has registered with somebody else, or while we were away."""
        if m.state != "online":
            return False
        agent = self.agents.get(m.host)
        if agent is None or agent.boot != m.boot:
            return True
        known = {d: self.rnics.get(f"{m.host}/{d}") for d in m.epochs}
        return any(r is None or r.removed_ns or r.info.epoch != m.epochs[d] for d, r in known.items())

    def listed(self, now_ns: int) -> set[str]:
        """The RNICs that belong in probe lists: registered, and neither said goodbye nor gone for ten minutes.

        One that is down or whose agent died stays: the analyzer must see it fail.
        """
        out = set()
        for record in self.rnics.values():
            agent = self.agents.get(record.host)
            if agent is None:
                continue
            gone_ns = 0
            if record.removed_ns:
                gone_ns = record.removed_ns + GRACE_NS
            elif agent.presence is Presence.STOPPED:
                gone_ns = agent.changed_ns + GRACE_NS
            elif agent.presence is Presence.DIED:
                gone_ns = agent.changed_ns + GONE_AFTER_NS
            else:
                gone_ns = agent.seen_ns + GONE_AFTER_NS
            if now_ns < gone_ns:
                out.add(record.name)
        return out

    def walking(self) -> set[str]:
        """Hosts whose agents run, as far as anyone can tell: only their flows cover links."""
        return {h for h, a in self.agents.items() if a.presence is Presence.ONLINE}

    def duplicates(self, now_ns: int) -> list[tuple[str, int]]:
        """Hosts under whose name two agents live, and since when it was noticed."""
        return [
            (h, a.duplicate_ns)
            for h, a in self.agents.items()
            if a.duplicate_ns and now_ns - a.duplicate_ns < DUPLICATE_MEMORY_NS
        ]

    def entries(self, in_topology: Iterable[str]) -> list[RegistryEntry]:
        """What the analyzer reads: every RNIC ever registered, by number."""
        known = frozenset(in_topology)
        return [
            RegistryEntry(r.number, r.name, r.info.address, r.info.epoch, r.since_ns, r.name in known)
            for r in sorted(self.rnics.values(), key=lambda r: r.number)
        ]

    def _keep(self, record: Record) -> None:
        self.rnics[record.name] = record
        self.by_number[record.number] = record

    def _save(self, record: Record) -> None:
        self._db.execute("UPDATE rnics SET record = ? WHERE number = ?", (_encode(record), record.number))

    def _save_agent(self, host: str) -> None:
        self._db.execute("INSERT OR REPLACE INTO agents VALUES (?, ?)", (host, _encode(self.agents[host])))
