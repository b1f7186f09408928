"""What changes while the controller is sending: the broker's answer is waited for, and messages come in meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from controller_fakes import register

from controller import database
from controller.clock import now_ns
from controller.publishing import LAZY_NS
from controller.service import Controller
from pingmesh import topics
from pingmesh.config import Settings
from pingmesh.messages import Message, OpenIncidents, PeerUpdate, ProbeList, Verdict, Verdicts, decode, encode
from topology.generate import leaf_spine

T = leaf_spine(2, 2, 2, 1)
SECOND = 1_000_000_000


class Wire:
    """Stands in for the broker: keeps what is published, and lets something happen during the first of a kind."""

    def __init__(self, c: Controller, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sent: list[tuple[topics.Topic, bytes]] = []
        self.during: dict[str, Callable[[], None]] = {}
        monkeypatch.setattr(c.bus, "publish", self.publish)
        c.bus.connected.set()

    async def publish(self, topic: topics.Topic, payload: bytes, *, qos: int = 0, retain: bool = False) -> None:
        if happens := self.during.pop(topic.kind, None):
            happens()
        self.sent.append((topic, payload))

    def of(self, kind: str, cls: type[Message]) -> list[tuple[str, Message]]:
        return [(t.host, decode(p, cls)) for t, p in self.sent if t.kind == kind]


@pytest.fixture
def c() -> Controller:
    controller = Controller(Settings(cluster="lab"), T, database.connect(":memory:"))
    for host in T.hosts:
        come(controller, host)
    start = now_ns()
    for step in range(20):
        controller.tick(start + step * SECOND // 2)
    return controller


def come(c: Controller, host: str, epoch: int = 1) -> None:
    m = register(T, host, ["rnic0"], boot=epoch, epoch=epoch)
    c.handle(topics.Topic("lab", host, topics.REGISTER), encode(m))


def refuse() -> None:
    raise ConnectionError("no connection to the broker")


async def test_a_peer_that_moves_while_others_are_told_of_is_told_of_too(
    c: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    wire = Wire(c, monkeypatch)
    now = now_ns()
    await c.publisher.flush(now)
    come(c, "h1", epoch=2)
    wire.during[topics.PEERS] = lambda: come(c, "h2", epoch=2)
    await c.publisher.flush(now)
    await c.publisher.flush(now)
    updates = wire.of(topics.PEERS, PeerUpdate)
    told = {p.name for _, m in updates if isinstance(m, PeerUpdate) for p in m.peers if p.epoch == 2}
    assert told == {"h1/rnic0", "h2/rnic0"}
    wire.sent.clear()
    await c.publisher.flush(now + LAZY_NS)
    lists = wire.of(topics.LIST, ProbeList)
    assert lists
    epochs = {p.name: p.epoch for _, m in lists if isinstance(m, ProbeList) for p in m.peers}
    assert (epochs["h1/rnic0"], epochs["h2/rnic0"]) == (2, 2)


async def test_a_peer_that_could_not_be_told_of_is_told_of_later(
    c: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    wire = Wire(c, monkeypatch)
    now = now_ns()
    await c.publisher.flush(now)
    come(c, "h1", epoch=2)
    wire.during[topics.PEERS] = refuse
    with pytest.raises(ConnectionError):
        await c.publisher.flush(now)
    assert not wire.of(topics.PEERS, PeerUpdate)
    await c.publisher.flush(now)
    assert wire.of(topics.PEERS, PeerUpdate)


async def test_an_incident_that_opens_while_others_are_told_of_is_told_of_too(
    c: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    wire = Wire(c, monkeypatch)
    now = now_ns()

    def opened(*components: str) -> None:
        verdicts = [Verdict(component=n, component_type="link", symptom="drop") for n in components]
        m = Verdicts(cluster="lab", host=topics.ANALYZER, now_ns=now, open=verdicts)
        c.handle(topics.Topic("lab", topics.ANALYZER, topics.VERDICTS), encode(m))

    opened("leaf1--spine1")
    wire.during[topics.INCIDENTS] = lambda: opened("leaf1--spine1", "leaf2--spine2")
    await c.publisher.flush(now)
    await c.publisher.flush(now)
    _, last = wire.of(topics.INCIDENTS, OpenIncidents)[-1]
    assert isinstance(last, OpenIncidents)
    assert sorted(v.component for v in last.open) == ["leaf1--spine1", "leaf2--spine2"]


async def test_a_wall_clock_that_is_stepped_empties_no_list(c: Controller, monkeypatch: pytest.MonkeyPatch) -> None:
    wire = Wire(c, monkeypatch)
    await c.publisher.flush(now_ns())
    before = {n: s.flows for n, s in c.book.sheets.items()}
    assert all(before.values())
    wall = time.time_ns()
    for step in (3600 * SECOND, -3600 * SECOND):
        monkeypatch.setattr(time, "time_ns", lambda step=step: wall + step)
        wire.sent.clear()
        c.tick(now_ns())
        await c.publisher.flush(now_ns())
        assert {n: s.flows for n, s in c.book.sheets.items()} == before
        assert not wire.of(topics.LIST, ProbeList)
