from __future__ import annotations

import asyncio
from collections import Counter

import msgspec
import pytest

from agent.inbox import MAX_CONFIRMS, Inbox
from agent.publisher import Sender
from pingmesh import topics
from pingmesh.messages import (
    AgentState,
    Answer,
    Ask,
    BadMessageError,
    Confirm,
    ConfirmResult,
    Flow,
    Health,
    Message,
    Peer,
    PeerUpdate,
    ProbeClass,
    ProbeList,
    Retrace,
    WhoAreYou,
    decode,
    encode,
)


class Engine:
    def __init__(self) -> None:
        self.devices = {"rnic0"}
        self.applied: list[ProbeList] = []
        self.peers: list[Peer] = []
        self.hold = asyncio.Event()

    def apply_list(self, message: ProbeList) -> bool:
        if message.device not in self.devices:
            return False
        self.applied.append(message)
        return True

    def apply_peers(self, peers: list[Peer]) -> None:
        self.peers += peers

    async def confirm(self, message: Confirm) -> tuple[int, bytes]:
        await self.hold.wait()
        return 4, b"columns"

    def responder_totals(self, windows: list[tuple[int, int, int, int]]) -> bytes:
        return bytes(len(windows))


class Tracing:
    def __init__(self) -> None:
        self.budgets: dict[str, tuple[float, float]] = {}
        self.asked: list[tuple[int, int, int, int]] = []

    def set_budget(self, device: str, quiet: float, suspicion: float) -> None:
        self.budgets[device] = (quiet, suspicion)

    def ask(self, keys: list[tuple[int, int, int, int]]) -> int:
        self.asked += keys
        return len(keys)


class Rig:
    def __init__(self) -> None:
        self.engine, self.tracing = Engine(), Tracing()
        self.sent: list[Message] = []
        self.state_lost = 0
        sender = Sender("lab", "h1", 7, self.send, lambda: 5)
        self.inbox = Inbox(sender, self.engine, self.tracing, Health, self.lost)

    async def send(self, topic: topics.Topic, payload: bytes, qos: int) -> None:
        assert str(topic) == "pingmesh/v1/lab/h1/answer"
        self.sent.append(decode(payload, Message, "h1", "lab"))

    def lost(self) -> None:
        self.state_lost += 1

    def give(self, kind: str, message: Message, device: str | None = None) -> None:
        self.inbox.handle(topics.Topic("lab", "h1", kind, device), encode(message))


WHO = {"cluster": "lab", "host": "h1"}
PEER = Peer(2, "h2/rnic0", "::ffff:10.0.0.2", 99, 1, 5, 4096)
FLOW = Flow(0, 2, 50000, 0, 0, 100_000, 2)


def probe_list(device: str = "rnic0", **changes: object) -> ProbeList:
    fields: dict[str, object] = {
        "device": device,
        "number": 1,
        "list_version": 3,
        "classes": [ProbeClass()],
        "flows": [FLOW],
        "peers": [PEER],
        "trace_rate": 2.0,
        "trace_rate_suspicion": 8.0,
    }
    return ProbeList(**(WHO | fields | changes))  # type: ignore[arg-type]


async def test_a_list_goes_to_the_engine_and_its_budget_to_the_tracer() -> None:
    rig = Rig()
    rig.give("list", probe_list(), "rnic0")
    assert rig.engine.applied == [probe_list()]
    assert rig.tracing.budgets == {"rnic0": (2.0, 8.0)}


async def test_a_list_waits_for_its_device() -> None:
    rig = Rig()
    rig.give("list", probe_list("rnic1"), "rnic1")
    assert rig.engine.applied == []
    rig.engine.devices.add("rnic1")
    rig.inbox.apply_kept("rnic1")
    assert [m.device for m in rig.engine.applied] == ["rnic1"]
    rig.inbox.apply_kept("rnic2")
    assert len(rig.engine.applied) == 1


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"device": "rnic9"}, "names device"),
        ({"number": -1}, "number -1"),
        ({"number": 0}, "number 0"),
        ({"list_version": 1 << 32}, "list version"),
        ({"flows": [FLOW, FLOW]}, "comes twice"),
        ({"flows": [msgspec.structs.replace(FLOW, index=1 << 16)]}, "flow index"),
        ({"flows": [msgspec.structs.replace(FLOW, sport=0)]}, "source port"),
        ({"flows": [msgspec.structs.replace(FLOW, cls=1)]}, "class 1"),
        ({"flows": [msgspec.structs.replace(FLOW, interval_us=0)]}, "interval"),
        ({"flows": [msgspec.structs.replace(FLOW, trace_mask=256)]}, "trace mask"),
        ({"classes": [ProbeClass(dscp=64)]}, "DSCP"),
        ({"classes": [ProbeClass(size=-4)]}, "size"),
        ({"classes": [], "flows": [FLOW]}, "class 0"),
        ({"peers": [msgspec.structs.replace(PEER, gid="nonsense")]}, "is no IP address"),
        ({"peers": [msgspec.structs.replace(PEER, qpn=1 << 24)]}, "peer QPN"),
        ({"max_rate": float("nan")}, "max_rate"),
        ({"trace_rate": -1.0}, "trace_rate"),
        ({"trace_rate_suspicion": float("inf")}, "trace_rate_suspicion"),
        ({"host": "h2"}, "names host"),
        ({"cluster": "other"}, "names cluster"),
        ({"version": "2.0"}, "protocol version"),
    ],
)
async def test_a_list_with_a_mistake_changes_nothing(changes: dict[str, object], reason: str) -> None:
    rig = Rig()
    with pytest.raises(BadMessageError, match=reason):
        rig.give("list", probe_list(**changes), "rnic0")
    assert rig.engine.applied == []
    assert rig.inbox.lists == {}


async def test_peers_are_taken_over_or_refused_as_a_whole() -> None:
    rig = Rig()
    rig.give("peers", PeerUpdate(**WHO, peers=[PEER]))
    assert rig.engine.peers == [PEER]
    with pytest.raises(BadMessageError, match="peer epoch"):
        rig.give("peers", PeerUpdate(**WHO, peers=[PEER, msgspec.structs.replace(PEER, epoch=-2)]))
    assert rig.engine.peers == [PEER]


async def test_an_ask_is_answered_while_confirmations_run() -> None:
    rig = Rig()
    for i in (1, 2):
        rig.give("ask", Confirm(**WHO, id=i, rnic=1, list_version=3, indexes=[0], count=20, interval_us=20_000))
    rig.give("ask", Ask(**WHO, id=9, windows=[(1, 2, 3, 4)]))
    await asyncio.sleep(0.02)
    assert rig.sent == [Answer(**WHO, boot=7, id=9, now_ns=5, responder=b"\0")]
    rig.engine.hold.set()
    await asyncio.sleep(0.02)
    results = [m for m in rig.sent if isinstance(m, ConfirmResult)]
    assert [(r.id, r.epoch, r.columns) for r in results] == [(1, 4, b"columns"), (2, 4, b"columns")]
    await rig.inbox.close()


async def test_confirmations_are_bounded_and_not_doubled() -> None:
    rig = Rig()

    def confirm(i: int) -> None:
        rig.give("ask", Confirm(**WHO, id=i, rnic=1, list_version=3, indexes=[0], count=20, interval_us=20_000))

    for i in range(MAX_CONFIRMS):
        confirm(i)
    with pytest.raises(BadMessageError, match="too many"):
        confirm(MAX_CONFIRMS)
    with pytest.raises(BadMessageError, match="under way"):
        confirm(0)
    rig.engine.hold.set()
    await asyncio.sleep(0.02)
    confirm(0)
    await asyncio.sleep(0.02)
    assert Counter(type(m).__name__ for m in rig.sent) == {"ConfirmResult": MAX_CONFIRMS + 1}


async def test_a_retrace_reaches_the_tracer() -> None:
    rig = Rig()
    rig.give("ask", Retrace(**WHO, id=1, flows=[(0, 1, 3, 0), (1, 4, 3, 2)]))
    assert rig.tracing.asked == [(0, 1, 3, 0), (1, 4, 3, 2)]


async def test_a_late_will_makes_us_say_again_that_we_are_here() -> None:
    rig = Rig()
    rig.give("state", AgentState(**WHO, boot=7, state="online"))
    rig.give("state", AgentState(**WHO, boot=8, state="online"))
    assert rig.state_lost == 0, "two agents of one name must not answer each other for ever"
    rig.give("state", AgentState(**WHO, boot=6, state="died"))
    assert rig.state_lost == 1


async def test_a_controller_that_does_not_know_us_is_told() -> None:
    rig = Rig()
    rig.give("ask", WhoAreYou(**WHO))
    assert rig.state_lost == 1


async def test_messages_on_foreign_or_unfit_topics_are_refused() -> None:
    rig = Rig()
    ask = encode(Ask(cluster="lab", host="h2", id=1))
    for topic in (topics.Topic("lab", "h2", "ask"), topics.Topic("other", "h1", "ask")):
        with pytest.raises(BadMessageError, match="is for"):
            rig.inbox.handle(topic, ask)
    with pytest.raises(BadMessageError, match="is a Ask"):
        rig.give("peers", Ask(**WHO, id=1))
