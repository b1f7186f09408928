"""A simulated ECMP fabric and agents that only register and trace, for the controller's tests."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Iterable

from pingmesh import topics
from pingmesh.bus import Bus, Will
from pingmesh.config import BrokerSettings
from pingmesh.messages import (
    AgentState,
    Paths,
    PeerUpdate,
    ProbeList,
    Register,
    RnicInfo,
    TracedPath,
    WhoAreYou,
    decode,
    encode,
)
from topology.model import DirectedLink, Path, Topology
from topology.paths import rnic_paths


class EcmpFabric:
    """Routers that each hash the tuple with a seed of their own over the next links of the shortest paths."""

    def __init__(self, t: Topology, seed: int = 1) -> None:
        self.t = t
        self.seed = seed
        self.broken: set[str] = set()
        """Directed links that routing avoids."""

    def path(self, source: str, target: str, sport: int) -> Path:
        paths = list(rnic_paths(self.t, self.t.rnics[source], self.t.rnics[target]))
        paths = [p for p in paths if not any(d.name in self.broken for d in p)] or paths
        hop = 0
        while any(len(p) > hop for p in paths):
            nexts: list[DirectedLink] = sorted({p[hop] for p in paths if len(p) > hop}, key=lambda d: d.name)
            key = f"{self.seed} {nexts[0].source} {source} {target} {sport}"
            chosen = nexts[zlib.crc32(key.encode()) // 7 % len(nexts)]
            paths = [p for p in paths if len(p) > hop and p[hop] == chosen]
            hop += 1
        return paths[0]

    def hops(self, source: str, target: str, sport: int, mask: int) -> list[tuple[int, str | None]]:
        """What tracing answers at the masked TTLs."""
        path = self.path(source, target, sport)
        first = path[0].source if path else ""
        tor = next((leg.switch_address for leg in self.t.rnics[source].legs if leg.switch == first), None)
        answers = [tor, *(d.target_address for d in path)]
        return [(ttl, answers[ttl - 1]) for ttl in range(1, len(answers) + 1) if mask >> (ttl - 1) & 1]


def rnic_info(t: Topology, name: str, epoch: int = 1, qpn: int = 17) -> RnicInfo:
    address = t.rnics[name].address if name in t.rnics else "192.0.2.1"
    assert address is not None
    gid = address if ":" in address else f"::ffff:{address}"
    return RnicInfo(device=name.split("/")[1], address=address, gid=gid, qpn=qpn, qkey=7, epoch=epoch)


def register(t: Topology, host: str, devices: Iterable[str], boot: int = 1, epoch: int = 1) -> Register:
    return Register(
        cluster=t.cluster,
        host=host,
        boot=boot,
        started_ns=1,
        rnics=[rnic_info(t, f"{host}/{d}", epoch) for d in devices],
    )


class FakeAgent:
    """Registers over MQTT, keeps the lists it gets and answers each with the traced paths of its own tuples."""

    def __init__(self, broker: BrokerSettings, fabric: EcmpFabric, host: str, boot: int = 1, epoch: int = 1) -> None:
        self.fabric = fabric
        self.host = host
        self.boot = boot
        self.epoch = epoch
        self.refused = False
        """Registers with a mistake."""
        self.asked = 0
        """How often the controller wanted to know who this is."""
        self.lists: dict[str, ProbeList] = {}
        self.updates: list[PeerUpdate] = []
        self.received: list[tuple[str, int]] = []
        self._traced: set[tuple[str, int, int]] = set()
        c = fabric.t.cluster
        self._state = topics.Topic(c, host, topics.STATE)
        self.bus = Bus(
            broker,
            f"fake-{host}",
            [f"{topics.ROOT}/{c}/{host}/{k}" for k in ("list/+", topics.PEERS, topics.ASK)],
            self._take,
            on_connect=self.hello,
            will=Will(str(self._state), encode(self._say("died"))),
        )

    def _say(self, state: str) -> AgentState:
        epochs = dict.fromkeys(self._devices(), self.epoch) if state == "online" else {}
        cluster = self.fabric.t.cluster
        return AgentState(cluster=cluster, host=self.host, boot=self.boot, state=state, epochs=epochs)  # type: ignore[arg-type]

    def _devices(self) -> list[str]:
        return [r.device for r in self.fabric.t.hosts.get(self.host, ())] or ["rnic0"]

    async def hello(self) -> None:
        await self.register()
        await self.bus.publish(self._state, encode(self._say("online")), qos=1, retain=True)

    async def register(self) -> None:
        m = register(self.fabric.t, self.host, self._devices() * (1 + self.refused), self.boot, self.epoch)
        await self.bus.publish(topics.Topic(m.cluster, self.host, topics.REGISTER), encode(m), qos=1)

    async def goodbye(self) -> None:
        await self.bus.publish(self._state, encode(self._say("stopped")), qos=1, retain=True)

    async def _take(self, topic: topics.Topic, payload: bytes) -> None:
        if topic.kind == topics.ASK:
            decode(payload, WhoAreYou, self.host)
            self.asked += 1
            await self.hello()
            return
        if topic.kind == topics.PEERS:
            self.updates.append(decode(payload, PeerUpdate, self.host))
            return
        if not payload:
            return  # a retained list that somebody cleared
        m = decode(payload, ProbeList, self.host)
        self.lists[m.device] = m
        self.received.append((m.device, m.list_version))
        names = {p.number: p.name for p in m.peers}
        source = f"{self.host}/{m.device}"
        out = []
        for f in m.flows:
            if f.trace_mask and (source, f.peer, f.sport) not in self._traced:
                self._traced.add((source, f.peer, f.sport))
                hops = self.fabric.hops(source, names[f.peer], f.sport, f.trace_mask)
                out.append(TracedPath(0, m.number, m.list_version, f.index, f.sport, hops, 1))
        if out:
            paths = Paths(cluster=m.cluster, host=self.host, boot=self.boot, now_ns=1, paths=out)
            await self.bus.publish(topics.Topic(m.cluster, self.host, topics.PATHS), encode(paths), qos=1)

    def start(self) -> asyncio.Task[None]:
        return asyncio.create_task(self.bus.run(), name=self.host)
