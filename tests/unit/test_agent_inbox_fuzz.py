"""Whatever arrives over MQTT, the agent goes on probing: by what it was told last if the message is refused."""

from __future__ import annotations

import asyncio

import msgspec
from fuzzing import damaged, fuzz, messages
from hypothesis import given
from hypothesis import strategies as st
from plane_fakes import MS, Fabric, FakeTransport, make_list

from agent.engine import Engine
from agent.inbox import Inbox
from agent.publisher import Sender
from agent.tracing import Tracing
from pingmesh import topics
from pingmesh.bus import UNHANDLED, Bus
from pingmesh.config import AgentSettings, BrokerSettings
from pingmesh.messages import (
    AgentState,
    Ask,
    Confirm,
    Flow,
    Health,
    Message,
    Peer,
    PeerUpdate,
    ProbeClass,
    ProbeList,
    Retrace,
    decode,
    encode,
)

LIST = f"{topics.LIST}/rnic1"
WHO = {"cluster": "lab", "host": "h1"}


class Rig:
    """An agent's engine, tracing and inbox behind its bus; RNIC 1 is its own, RNIC 2 the peer."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.fabric = Fabric()
        ours, theirs = (FakeTransport(self.fabric, f"rnic{i}", f"10.0.0.{i}") for i in (1, 2))
        FakeTransport(self.fabric, "far", "10.9.9.9")  # nobody answers there
        settings = AgentSettings()
        clock = self.fabric.clock
        self.engine = Engine(settings, "lab", "h1", [ours, theirs], on_event=lambda _: None, loop=loop, clock=clock)
        for rnic in self.engine._rnics.values():
            rnic.transport.start(loop, rnic)
        self.fabric.rnics = list(self.engine._rnics.values())
        self.prober = self.fabric.rnics[0].prober
        self.answers: list[Message] = []
        self.tracing = Tracing(self._flows, lambda path, urgent: None, lambda: 0)
        sender = Sender("lab", "h1", 7, self._send, lambda: 5)
        self.inbox = Inbox(sender, self.engine, self.tracing, Health, lambda: None)
        self.bus = Bus(BrokerSettings(), "test", [], self.inbox.handle)
        info = self.engine.infos()[1]
        self.peer = Peer(2, "h2/rnic2", info.gid, info.qpn, info.qkey, info.epoch, 4096)

    def _flows(self) -> list[object]:
        return [*self.engine.own_flows(), *self.engine.incoming_flows()]

    async def _send(self, topic: topics.Topic, payload: bytes, qos: int) -> None:
        self.answers.append(decode(payload, Message, "h1", "lab"))

    def list(self, version: int) -> bytes:
        good = make_list(1, [self.peer], flows=3, version=version, max_rate=150.0)
        good.cluster, good.host = "lab", "h1"
        return encode(good)

    def state(self) -> str:
        probers = [r.prober for r in self.engine._rnics.values()]
        lists = [(p.number, p.list_version, p._peers, {i: f.flow for i, f in p._flows.items()}) for p in probers]
        return repr((self.inbox.lists, lists))

    async def give(self, kind: str, payload: object) -> None:
        before, refused = self.state(), sum(self.bus.rejected.values())
        await self.bus._dispatch(f"pingmesh/v1/lab/h1/{kind}", payload, False)
        assert self.bus.rejected[UNHANDLED] == 0
        if sum(self.bus.rejected.values()) > refused:
            assert self.state() == before

    def goes_on(self) -> None:
        """Time passes without harm, and counts can be reported."""
        self.fabric.run(30 * MS)
        self.engine.take_report()
        self.tracing.refresh()


async def session(given: list[tuple[str, object]]) -> Rig:
    rig = Rig(asyncio.get_running_loop())
    await rig.give(LIST, rig.list(1))
    assert (rig.prober.number, rig.prober.list_version) == (1, 1)
    for kind, payload in given:
        await rig.give(kind, payload)
        await asyncio.sleep(0)
        rig.goes_on()
    return rig


async def finish(rig: Rig) -> None:
    """The next good list is probed, whatever was before."""
    version = (rig.prober.list_version + 1) % (1 << 32)
    rig.fabric.rnics = list(rig.engine._rnics.values())
    await rig.give(LIST, rig.list(version))
    before = rig.engine.probes_sent()["rnic1"]
    rig.fabric.run(100 * MS)
    prober = rig.engine._rnics["rnic1"].prober
    assert (prober.number, prober.list_version) == (1, version)
    assert rig.engine.probes_sent()["rnic1"] > before or prober._stretch > 1 or prober._tokens < 1
    await rig.inbox.close()
    rig.engine.close()


odd = st.integers(-2, 5) | st.integers(0, 2**16) | st.integers(0, 2**32 - 1) | st.integers(-(2**63), 2**63 - 1)
small = st.integers(0, 4)
gids = st.sampled_from(["::ffff:10.0.0.2", "10.0.0.2", "fd00::1", "::ffff:10.9.9.9", "", "x", "fe80::1%eth0"])
peers = st.builds(Peer, odd, st.text(max_size=5), gids, odd, odd, odd, odd) | st.builds(
    Peer, small, st.just("h2/rnic2"), gids, small, small, small, st.integers(0, 9000)
)
flows = st.builds(Flow, odd, odd, odd, odd, odd, odd, odd) | st.builds(
    Flow, small, small, st.integers(1, 65535), st.integers(0, 1), small, st.integers(100, 10**6), st.integers(0, 255)
)
classes = st.builds(ProbeClass, dscp=st.integers(0, 63), size=st.integers(0, 9000)) | st.builds(
    ProbeClass, name=st.text(max_size=4), dscp=odd, size=odd
)
likely: st.SearchStrategy[Message] = st.one_of(
    st.builds(
        ProbeList,
        cluster=st.just("lab"),
        host=st.just("h1"),
        device=st.sampled_from(["rnic1", "rnic1", "rnic2", "rnic9"]),
        number=small | odd,
        list_version=small | odd,
        classes=st.lists(classes, max_size=3),
        flows=st.lists(flows, max_size=4),
        peers=st.lists(peers, max_size=3),
        max_rate=st.floats() | st.floats(0, 200),
        trace_rate=st.floats(0, 10),
    ),
    st.builds(PeerUpdate, **{k: st.just(v) for k, v in WHO.items()}, peers=st.lists(peers, max_size=3)),
    st.builds(Ask, **{k: st.just(v) for k, v in WHO.items()}, id=odd, windows=st.lists(st.tuples(*[small | odd] * 4))),
    st.builds(
        Confirm,
        **{k: st.just(v) for k, v in WHO.items()},
        id=odd,
        rnic=small | odd,
        list_version=small | odd,
        indexes=st.lists(small | odd, max_size=4),
        count=st.integers(1, 30) | odd,
        interval_us=st.integers(0, 10_000) | odd,
        cls=st.integers(-1, 2) | odd,
    ),
    st.builds(
        Retrace, **{k: st.just(v) for k, v in WHO.items()}, id=odd, flows=st.lists(st.tuples(*[small | odd] * 4))
    ),
    st.builds(
        AgentState,
        **{k: st.just(v) for k, v in WHO.items()},
        boot=odd,
        state=st.sampled_from(["online", "stopped", "died"]),
    ),
)
KINDS = {ProbeList: LIST, PeerUpdate: topics.PEERS, AgentState: topics.STATE}
kinds = st.sampled_from([LIST, "list", f"{topics.LIST}/rnic2", topics.PEERS, topics.ASK, topics.STATE, "x", "a/b"])


def on_its_topic(m: Message) -> tuple[str, bytes]:
    return (f"{topics.LIST}/{m.device}" if isinstance(m, ProbeList) else KINDS.get(type(m), topics.ASK)), encode(m)


@fuzz(200)
@given(st.lists(st.tuples(kinds, st.binary(max_size=200) | st.integers() | st.none()), min_size=1, max_size=5))
def test_raw_bytes_change_nothing(given: list[tuple[str, object]]) -> None:
    async def run() -> None:
        rig = await session(given)
        assert sum(rig.bus.rejected.values()) == len(given)
        assert rig.prober.list_version == 1
        await finish(rig)

    asyncio.run(run())


@fuzz(200)
@given(st.lists(st.tuples(kinds, damaged(likely.map(encode))), min_size=1, max_size=5))
def test_damaged_messages(given: list[tuple[str, object]]) -> None:
    async def run() -> None:
        await finish(await session(given))

    asyncio.run(run())


@fuzz(200)
@given(st.lists(likely.map(on_its_topic), min_size=1, max_size=6))
def test_likely_messages(given: list[tuple[str, object]]) -> None:
    async def run() -> None:
        await finish(await session(list(given)))

    asyncio.run(run())


@fuzz(200)
@given(
    st.lists(
        st.sampled_from([ProbeList, PeerUpdate, Ask, Confirm, Retrace, AgentState]).flatmap(
            lambda kind: st.tuples(st.just(KINDS.get(kind, topics.ASK)), messages(kind, "h1"))
        ),
        min_size=1,
        max_size=5,
    )
)
def test_well_formed_nonsense(given: list[tuple[str, bytes]]) -> None:
    async def run() -> None:
        await finish(await session(list(given)))

    asyncio.run(run())


def test_the_rig_takes_lists_at_all() -> None:
    """Else the tests above would see refusals only."""

    async def run() -> None:
        rig = await session([])
        await rig.give(
            topics.ASK, encode(Confirm(**WHO, id=1, rnic=1, list_version=1, indexes=[0], count=3, interval_us=100))
        )
        await rig.give(topics.ASK, msgspec.msgpack.encode({"type": "ask"}))
        await asyncio.sleep(0)
        rig.fabric.run(200 * MS)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert sum(rig.bus.rejected.values()) == 1
        assert rig.engine.probes_sent()["rnic1"] > 10
        assert [type(m).__name__ for m in rig.answers] == ["ConfirmResult"]
        await finish(rig)

    asyncio.run(run())
