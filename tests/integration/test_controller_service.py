"""The controller as a process's worth of service: a real broker, agents that register and trace, restarts."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

from controller_fakes import EcmpFabric, FakeAgent

from controller import client, service
from pingmesh import topics
from pingmesh.bus import Bus
from pingmesh.config import BrokerSettings, ControllerSettings, Settings
from pingmesh.messages import Coverage, OpenIncidents, Registry, Verdict, Verdicts, decode, encode
from topology import files
from topology.generate import leaf_spine
from topology.model import Topology

pytestmark = pytest.mark.skipif(shutil.which("mosquitto") is None, reason="mosquitto is not installed")

T = leaf_spine(2, 2, 2, 1)


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[BrokerSettings]:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    conf = tmp_path / "mosquitto.conf"
    conf.write_text(f"listener {port} 127.0.0.1\nallow_anonymous true\npersistence false\n")
    process = subprocess.Popen(["mosquitto", "-c", str(conf)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    yield BrokerSettings(port=port, reconnect_max_s=0.5)
    process.terminate()
    process.wait(10)


class Rig:
    """A controller, agents and an ear on what the controller publishes for the analyzer."""

    def __init__(self, broker: BrokerSettings, home: Path, t: Topology) -> None:
        self.t = t
        self.broker = broker
        self.listen = f"unix:{home}/c.sock"
        (home / "topology.yaml").write_text(files.dump(t))
        self.settings = Settings(
            cluster=t.cluster,
            topology=str(home / "topology.yaml"),
            broker=broker,
            controller=ControllerSettings(database=str(home / "c.db"), listen=self.listen),
        )
        self.fabric = EcmpFabric(t)
        self.agents = {h: FakeAgent(broker, self.fabric, h) for h in t.hosts}
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.heard: dict[str, bytes] = {}
        self.ear = Bus(broker, "ear", [f"{topics.ROOT}/{t.cluster}/{topics.CONTROLLER}/#"], self._hear)

    def _hear(self, topic: topics.Topic, payload: bytes) -> None:
        self.heard[topic.kind] = payload

    def start(self, *names: str) -> None:
        for name in names:
            if name == "controller":
                self.tasks[name] = asyncio.create_task(service.run(self.settings), name=name)
            elif name == "ear":
                self.tasks[name] = asyncio.create_task(self.ear.run(), name=name)
            else:
                self.tasks[name] = self.agents[name].start()

    async def stop(self, *names: str) -> None:
        gone = [self.tasks.pop(n) for n in names]
        for task in gone:
            task.cancel()
        await asyncio.gather(*gone, return_exceptions=True)

    async def until(self, what: Callable[[], object], seconds: float = 15) -> None:
        async with asyncio.timeout(seconds):
            while not what():
                for task in self.tasks.values():
                    if task.done():
                        task.result()
                await asyncio.sleep(0.05)

    async def get(self, path: str, **params: str) -> object:
        return await asyncio.to_thread(client.get, self.listen, path, **params)

    async def shows(self, path: str, what: Callable[[Any], object], seconds: float = 5) -> None:
        async with asyncio.timeout(seconds):
            while True:
                with contextlib.suppress(client.ControllerUnreachableError):
                    if what(await self.get(path)):
                        return
                await asyncio.sleep(0.05)

    async def covered(self, seconds: float = 25) -> None:
        await self.shows("/status", lambda s: s["coverage"] == 1.0 and s["lists"]["phase"] == "steady", seconds)

    def versions(self) -> dict[str, int]:
        return {h: a.lists["rnic0"].list_version for h, a in self.agents.items()}

    async def tell(self, *verdicts: Verdict) -> None:
        m = Verdicts(cluster=self.t.cluster, host="_analyzer", now_ns=1, open=list(verdicts))
        await self.ear.publish(topics.Topic(self.t.cluster, topics.ANALYZER, topics.VERDICTS), encode(m), qos=1)


@pytest.fixture
async def rig(broker: BrokerSettings, tmp_path: Path) -> AsyncIterator[Rig]:
    rig = Rig(broker, tmp_path, T)
    rig.start("ear", "controller", *T.hosts)
    await rig.covered()
    yield rig
    await rig.stop(*rig.tasks)


async def test_from_registration_to_full_coverage(rig: Rig) -> None:
    await rig.until(lambda: decode(rig.heard["coverage"], Coverage).share == 1.0)
    registry = decode(rig.heard["registry"], Registry)
    assert {e.name for e in registry.rnics} == set(T.rnics)
    assert all(e.in_topology for e in registry.rnics)
    numbers = {e.name: e.number for e in registry.rnics}
    assert decode(rig.heard["incidents"], OpenIncidents).open == []
    for host, agent in rig.agents.items():
        m = agent.lists["rnic0"]
        assert m.number == numbers[f"{host}/rnic0"]
        assert {f.peer for f in m.flows} <= {p.number for p in m.peers}
        assert {f.cls for f in m.flows} <= set(range(len(m.classes)))
        assert len({f.index for f in m.flows}) == len(m.flows)
        assert 0 < m.trace_rate <= m.trace_rate_suspicion
        versions = [v for _, v in agent.received]
        assert versions == sorted(versions)


async def test_a_new_epoch_reaches_the_probers_at_once_and_lists_stay(rig: Rig) -> None:
    before = rig.versions()
    flows = {h: a.lists["rnic0"].flows for h, a in rig.agents.items()}
    rig.agents["h1"].epoch = 42
    rig.agents["h1"].boot = 2
    began = asyncio.get_running_loop().time()
    await rig.agents["h1"].register()
    number = rig.agents["h1"].lists["rnic0"].number
    probers = [h for h, m in flows.items() if any(f.peer == number for f in m)]
    await rig.until(lambda: all(any(p.epoch == 42 for u in rig.agents[h].updates for p in u.peers) for h in probers), 5)
    assert asyncio.get_running_loop().time() - began < 1.0
    await rig.until(
        lambda: all(p.epoch == 42 for h in probers for p in rig.agents[h].lists["rnic0"].peers if p.number == number),
        5,
    )
    assert asyncio.get_running_loop().time() - began < 3.0
    assert rig.versions() == before
    assert {h: a.lists["rnic0"].flows for h, a in rig.agents.items()} == flows


async def test_restart_of_the_controller_reshuffles_nothing(rig: Rig) -> None:
    before, numbers = rig.versions(), {h: a.lists["rnic0"].number for h, a in rig.agents.items()}
    flows = {h: a.lists["rnic0"].flows for h, a in rig.agents.items()}
    drop = Verdict(component="leaf1--spine1", component_type="link", symptom="drop", direction="leaf1->spine1")
    await rig.tell(drop)
    await rig.until(lambda: decode(rig.heard["incidents"], OpenIncidents).open)
    (incident,) = await rig.get("/incidents")  # type: ignore[misc]
    await rig.stop("controller")
    rig.heard.clear()
    rig.start("controller")
    await rig.covered()
    await asyncio.sleep(2)
    for agent in rig.agents.values():
        await agent.register()
    await asyncio.sleep(1)
    assert rig.versions() == before
    assert {h: a.lists["rnic0"].flows for h, a in rig.agents.items()} == flows
    assert {h: a.lists["rnic0"].number for h, a in rig.agents.items()} == numbers
    (again,) = await rig.get("/incidents")  # type: ignore[misc]
    assert again["id"] == incident["id"]
    assert decode(rig.heard["incidents"], OpenIncidents).open[0].component == "leaf1--spine1"


async def test_registrations_made_while_no_controller_listened_are_asked_for(
    broker: BrokerSettings, tmp_path: Path
) -> None:
    rig = Rig(broker, tmp_path, T)
    rig.start("ear", *T.hosts)
    await rig.until(lambda: all(a.bus.connected.is_set() for a in rig.agents.values()))
    rig.start("controller")
    await rig.covered()
    agent = rig.agents["h1"]
    await rig.stop("controller")
    agent.epoch = 42
    await agent.hello()
    rig.start("controller")
    others = [a for h, a in rig.agents.items() if h != "h1"]
    await rig.until(lambda: all(p.epoch == 42 for a in others for u in a.updates for p in u.peers), 5)
    await rig.until(lambda: any(a.updates for a in others), 5)
    await rig.stop(*rig.tasks)


async def test_an_agent_that_cannot_be_registered_is_not_asked_all_the_time(
    broker: BrokerSettings, tmp_path: Path
) -> None:
    rig = Rig(broker, tmp_path, T)
    agent = rig.agents["h1"]
    agent.refused = True
    rig.start("ear", "controller", "h1")
    await rig.until(lambda: agent.asked)
    await asyncio.sleep(1.5)
    assert agent.asked == 1
    await rig.stop(*rig.tasks)


async def test_goodbye_and_return(rig: Rig) -> None:
    flows = {h: a.lists["rnic0"].flows for h, a in rig.agents.items()}
    number = rig.agents["h1"].lists["rnic0"].number
    await rig.agents["h1"].goodbye()
    others = [a for h, a in rig.agents.items() if h != "h1"]
    await rig.until(lambda: all(f.peer != number for a in others for f in a.lists["rnic0"].flows), 6)
    await rig.agents["h1"].register()
    await rig.until(lambda: {h: a.lists["rnic0"].flows for h, a in rig.agents.items()} == flows, 6)


async def test_an_agent_that_dies_stays_in_the_lists(rig: Rig) -> None:
    before = rig.versions()
    # The will is the broker's word for us: say it ourselves, as the broker would.
    await rig.agents["h1"].bus.publish(
        topics.Topic(T.cluster, "h1", topics.STATE), encode(rig.agents["h1"]._say("died")), qos=1, retain=True
    )
    await rig.shows("/status", lambda status: status["agents"]["died"] == ["h1"])
    await asyncio.sleep(3)
    assert rig.versions() == before


async def test_bad_messages_are_counted_and_change_nothing(rig: Rig) -> None:
    before = rig.versions()
    for kind in (topics.REGISTER, topics.STATE, topics.PATHS):
        for payload in (b"\x00" * 50, b"{}", b"\xff" * 200):
            await rig.ear.publish(topics.Topic(T.cluster, "h1", kind), payload, qos=1)
    await rig.shows("/status", lambda status: status["probes"]["rejected_messages"] >= 9)
    assert rig.versions() == before


async def test_a_broker_that_lost_its_memory_gets_everything_again(broker: BrokerSettings, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    rig = Rig(broker, home, T)
    rig.start("ear", "controller", *T.hosts)
    await rig.covered()
    topic = topics.Topic(T.cluster, "h1", topics.LIST, "rnic0")
    for agent in rig.agents.values():
        agent.lists.clear()
    for name in ("registry", "coverage", "incidents"):
        await rig.ear.publish(topics.Topic(T.cluster, topics.CONTROLLER, name), b"", retain=True)
    await rig.ear.publish(topic, b"", retain=True)
    await asyncio.sleep(0.2)
    rig.heard.clear()
    await rig.stop("controller")
    rig.start("controller")
    await rig.until(lambda: {"registry", "coverage", "incidents"} <= {k for k, v in rig.heard.items() if v})
    await rig.until(lambda: "rnic0" in rig.agents["h1"].lists)
    await rig.stop(*rig.tasks)
