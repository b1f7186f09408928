"""Whatever arrives over MQTT: the analyzer counts what it cannot use, keeps what it has, and goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from fuzzing import damaged, fuzz, messages
from hypothesis import given
from hypothesis import strategies as st

from pingmesh import topics
from pingmesh.analyzer.flows import ACK, PROBE
from pingmesh.analyzer.rounds import RoundResult
from pingmesh.analyzer.samples import ROUND_TRIP
from pingmesh.analyzer.service import Analyzer
from pingmesh.bus import UNHANDLED
from pingmesh.config import Settings
from pingmesh.messages import (
    LOST,
    PROBER_COLUMNS,
    RESPONDER_COLUMNS,
    WINDOW_NS,
    AgentState,
    Answer,
    Ask,
    Confirm,
    ConfirmResult,
    Event,
    Exceptions,
    Flow,
    Health,
    Message,
    OpenIncidents,
    Paths,
    Peer,
    ProbeClass,
    ProbeList,
    ProberRows,
    Register,
    Report,
    RnicHealth,
    TracedPath,
    Verdict,
    decode,
    encode,
    pack_columns,
)
from topology.generate import leaf_spine

T = leaf_spine(2, 2, 2, 1)
KINDS: dict[type[Message], str] = {
    AgentState: topics.STATE,
    Register: topics.REGISTER,
    Report: topics.REPORT,
    Exceptions: topics.EXCEPTION,
    Paths: topics.PATHS,
    Answer: topics.ANSWER,
    ConfirmResult: topics.ANSWER,
    ProbeList: topics.LIST,
    OpenIncidents: topics.INCIDENTS,
}
kinds = st.sampled_from(sorted({*KINDS.values(), "list/rnic0"}))
U32 = st.integers(0, 2**32 - 1)
SMALL = st.integers(0, 3)
I64 = st.integers(-(2**63), 2**63 - 1)
HOST = st.sampled_from(["h1", "h2", "h9", "_x"])
COMMON = {"cluster": st.just("lab"), "host": HOST}
I16 = st.integers(-(2**15), 2**15 - 1)


def columns(types: str) -> st.SearchStrategy[bytes]:
    """Packed columns: good ones of small or of any numbers, and others."""
    bounds = {"H": st.integers(0, 2**16 - 1), "h": I16, "I": U32}
    rows = st.lists(st.tuples(*(SMALL | bounds[t] for t in types)), max_size=3)
    packed = rows.map(lambda rows: pack_columns(types, list(zip(*rows, strict=True)) or [[]] * len(types)))
    return packed | damaged(packed) | st.binary(max_size=40)


prober, responder = columns(PROBER_COLUMNS), columns(RESPONDER_COLUMNS)
health = st.builds(
    Health,
    loop_lag_max=st.floats(),
    rnics=st.lists(st.builds(RnicHealth, device=st.text() | st.just("rnic0"), up=st.booleans()), max_size=2),
)
times = I64 | st.just(0) | st.integers(-10, 10).map(lambda s: now() + s * 1_000_000_000)
addresses = st.sampled_from([*(i.a_address for i in T.links), *(i.b_address for i in T.links), "x", "", "172.16.0.1"])
MESSAGES: st.SearchStrategy[Message] = st.one_of(
    st.builds(
        Report,
        **COMMON,
        boot=SMALL,
        seq=U32,
        now_ns=times,
        until_ns=times,
        prober=st.lists(
            st.builds(
                ProberRows,
                rnic=SMALL,
                epoch=SMALL,
                list_version=SMALL,
                window=U32 | st.integers(-2, 2).map(lambda w: max(0, now() // WINDOW_NS + w)),
                columns=prober,
            ),
            max_size=2,
        ),
        responder=responder,
        health=health,
    ),
    st.builds(
        Exceptions,
        **COMMON,
        boot=SMALL,
        now_ns=times,
        events=st.lists(st.builds(Event, st.integers(-1, 99), SMALL, SMALL, SMALL, U32, times, U32, U32), max_size=4),
        health=health | st.none(),
    ),
    st.builds(
        Paths,
        **COMMON,
        boot=SMALL,
        now_ns=times,
        paths=st.lists(
            st.builds(
                TracedPath,
                st.integers(-1, 3),
                SMALL,
                SMALL,
                SMALL,
                U32,
                st.lists(st.tuples(st.integers(-5, 300) | st.just(2), st.none() | addresses), max_size=3),
                times,
            ),
            max_size=3,
        ),
    ),
    st.builds(Answer, **COMMON, boot=U32, id=U32, now_ns=I64, responder=responder),
    st.builds(
        ConfirmResult,
        **COMMON,
        boot=U32,
        id=U32,
        now_ns=I64,
        rnic=U32,
        epoch=U32,
        list_version=U32,
        columns=prober,
    ),
    st.builds(
        ProbeList,
        **COMMON,
        device=st.sampled_from(["rnic0", "", "ä", "a/b"]),
        number=SMALL,
        list_version=st.integers(0, 5),
        classes=st.lists(st.builds(ProbeClass), max_size=2),
        flows=st.lists(
            st.builds(Flow, SMALL, st.integers(0, 4), U32, st.integers(-1, 3), U32, st.integers(-9, 10**9), U32),
            max_size=4,
        ),
        peers=st.lists(
            st.builds(Peer, SMALL, st.sampled_from(["h2/rnic0", "nowhere", "", "/"]), st.text(), U32, U32, U32, U32),
            max_size=3,
        ),
    ),
    st.builds(
        Register,
        **COMMON,
        boot=SMALL,
        started_ns=I64,
        rnics=st.just([]),
    ),
    st.builds(AgentState, **COMMON, boot=SMALL, state=st.sampled_from(["online", "stopped", "died"]), at_ns=times),
    st.builds(
        OpenIncidents,
        cluster=st.just("lab"),
        host=st.just(topics.CONTROLLER),
        open=st.lists(
            st.builds(
                Verdict,
                component=st.sampled_from(["h1/rnic0", "h1", "leaf1->spine1", "leaf1", "rnic", ""]),
                component_type=st.sampled_from(["rnic", "host", "link", "switch", "x"]),
                symptom=st.sampled_from(["drop", "link_down", "switch_down", "host_down", "high_rtt", "flap", "x"]),
                ends=st.lists(st.sampled_from(["h1/rnic0", "leaf1", ""]), max_size=2),
                confidence=st.floats(),
                alternatives=st.lists(st.sampled_from(["h1/rnic0", "leaf1"]), max_size=2),
                since_ns=times,
            ),
            max_size=3,
        ),
    ),
)


def now() -> int:
    return _CLOCK.now()


_CLOCK = Analyzer(Settings(cluster="lab"), T)._clock
GOOD_PEERS = [Peer(i, f"h{i}/rnic0", f"::ffff:10.0.0.{i}", 5, 5, 5, 4096) for i in (1, 2, 3)]


class Rig:
    """An analyzer that knows three RNICs and their flows, behind its bus; what it publishes is kept."""

    def __init__(self) -> None:
        self.a = Analyzer(Settings(cluster="lab"), T)
        self.bus = self.a._bus
        self.published: list[tuple[str, bytes]] = []
        self.answer: Callable[[topics.Topic, Message], Message | None] = lambda topic, question: None

        async def publish(topic: topics.Topic, payload: bytes, *, qos: int = 0, retain: bool = False) -> None:
            self.published.append((str(topic), payload))
            if topic.kind == topics.ASK:
                reply = self.answer(topic, decode(payload, Message))
                if reply is not None:
                    await self.give(topics.ANSWER, encode(reply), topic.host)

        self.bus.publish = publish  # type: ignore[method-assign]
        self.bus.connected.set()

    async def start(self) -> None:
        for i in (1, 2, 3):
            others = [p for p in GOOD_PEERS if p.number != i]
            flows = [Flow(n, p.number, 50000 + n, 0, 1, 10_000, 2) for n, p in enumerate(others)]
            message = ProbeList(
                cluster="lab",
                host=f"h{i}",
                device="rnic0",
                number=i,
                list_version=1,
                classes=[ProbeClass(), ProbeClass(name="large", size=4096)],
                flows=flows,
                peers=others,
            )
            await self.give("list/rnic0", encode(message), f"h{i}")
            online = AgentState(cluster="lab", host=f"h{i}", boot=1, state="online", at_ns=now())
            await self.give(topics.STATE, encode(online), f"h{i}")
        assert not self.bus.rejected
        assert len(self.a._book.flows) == 6

    def state(self) -> str:
        a, book, store = self.a, self.a._book, self.a._store
        return repr(
            (
                (
                    book.flows,
                    book.rnic_names,
                    book.classes,
                    book.latest,
                    book._records,
                    book._versions,
                    book.rows.traced.sum(),
                    book.rows.confirmed.sum(),
                ),
                (a._hosts.hosts, a._tracker.tracks, a._confirmations.episode, a._covered),
                store.state(),
            )
        )

    async def give(self, kind: str, payload: object, host: str, retained: bool = False) -> None:
        before, refused = self.state(), sum(self.bus.rejected.values())
        await self.bus._dispatch(f"pingmesh/v1/lab/{host}/{kind}", payload, retained)
        assert self.bus.rejected[UNHANDLED] == 0
        if sum(self.bus.rejected.values()) > refused:
            assert self.state() == before

    async def look(self) -> None:
        """Judgements now and when open incidents may close, and what is said in between."""
        await self.a._look_once()
        moment = self.a._clock.now
        self.a._clock.now = lambda: moment() + 25_000_000_000  # type: ignore[method-assign]
        await self.a._look_once()
        await self.a._retrace_deserted()
        await self.a._publish_summary()
        assert self.published


async def session(steps: list[tuple[str, object, str, bool]]) -> Rig:
    rig = Rig()
    await rig.start()
    for kind, payload, host, retained in steps:
        await rig.give(kind, payload, host, retained)
    await rig.look()
    return rig


@fuzz(150)
@given(kinds, st.lists(st.binary(min_size=1, max_size=200) | st.integers() | st.text(), min_size=1, max_size=5))
def test_raw_bytes_are_counted_and_dropped(kind: str, payloads: list[object]) -> None:
    rig = asyncio.run(session([(kind, p, "h1", False) for p in payloads]))
    assert sum(rig.bus.rejected.values()) == len(payloads)
    assert len(rig.a._book.flows) == 6


def step(m: Message, retained: bool) -> tuple[str, object, str, bool]:
    return KINDS[type(m)], encode(m), m.host, retained


@fuzz(200)
@given(st.lists(st.builds(step, MESSAGES, st.booleans()), min_size=1, max_size=6))
def test_likely_messages(steps: list[tuple[str, object, str, bool]]) -> None:
    asyncio.run(session(steps))


@fuzz(100)
@given(st.lists(st.tuples(kinds, damaged(MESSAGES.map(encode)), HOST, st.booleans()), min_size=1, max_size=6))
def test_damaged_messages(steps: list[tuple[str, object, str, bool]]) -> None:
    asyncio.run(session(steps))


@fuzz(150)
@given(
    st.lists(
        st.sampled_from(list(KINDS)).flatmap(
            lambda kind: st.tuples(st.just(KINDS[kind]), messages(kind, "h1"), st.just("h1"), st.booleans())
        ),
        min_size=1,
        max_size=6,
    )
)
def test_well_formed_nonsense(steps: list[tuple[str, object, str, bool]]) -> None:
    asyncio.run(session(steps))


async def confirmation(
    rig: Rig, confirmed: bytes, counted: bytes, meanwhile: list[tuple[str, object, str, bool]]
) -> RoundResult:
    """A whole round of questions, answered with these columns while other messages come in."""
    lost = Event(LOST, 1, 1, 0, 7, now(), 0, 0)
    found = Exceptions(cluster="lab", host="h1", boot=1, now_ns=now(), events=[lost])
    rig.a._quiet_until = 0
    await rig.give(topics.EXCEPTION, encode(found), "h1")
    episode = rig.a._confirmations.episode
    assert episode is not None

    def answer(topic: topics.Topic, question: Message) -> Message | None:
        common = {"cluster": "lab", "host": topic.host, "boot": 1, "now_ns": now()}
        match question:
            case Ask():
                return Answer(**common, id=question.id, responder=counted)
            case Confirm():
                return ConfirmResult(
                    **common, id=question.id, rnic=question.rnic, epoch=1, list_version=1, columns=confirmed
                )
        return None

    rig.answer = answer
    running = asyncio.create_task(rig.a._rounds.finish(rig.a._rounds.begin(episode), episode))
    await asyncio.sleep(0)
    for kind, payload, host, retained in meanwhile:
        await rig.give(kind, payload, host, retained)
    async with asyncio.timeout(5):
        return await running


@fuzz(100)
@given(prober, responder, st.lists(st.builds(step, MESSAGES, st.booleans()), max_size=3))
def test_answers_to_a_confirmation(
    confirmed: bytes, counted: bytes, meanwhile: list[tuple[str, object, str, bool]]
) -> None:
    async def run() -> None:
        rig = Rig()
        await rig.start()
        result = await confirmation(rig, confirmed, counted, meanwhile)
        rig.a._store.add(result.samples)
        rig.a._note(result.samples)
        await rig.look()

    asyncio.run(run())


def test_a_report_that_is_bad_in_part_is_not_taken_in_part() -> None:
    good = pack_columns(PROBER_COLUMNS, [[0], [50], [50], [50], [50], [0], [0], [0], [0], [0], [0]])
    rows = [ProberRows(rnic=1, epoch=1, list_version=1, window=now() // WINDOW_NS, columns=c) for c in (good, b"x")]

    async def run() -> None:
        rig = Rig()
        await rig.start()
        report = Report(cluster="lab", host="h1", boot=1, seq=1, now_ns=now(), until_ns=now(), prober=rows)
        await rig.give(topics.REPORT, encode(report), "h1")
        assert rig.bus.rejected == {"columns": 1}
        report.prober = rows[:1]
        await rig.give(topics.REPORT, encode(report), "h1")
        assert len(rig.a._store._probers[0]) == 1, "the same sequence number, sent well, counts"

    asyncio.run(run())


@pytest.mark.parametrize("counted", [b"x", None], ids=["unreadable", "zero"])
def test_an_unreadable_count_is_not_a_count_of_zero(counted: bytes | None) -> None:
    lost = pack_columns(PROBER_COLUMNS, [[0], [10], [0], [0], [0], [10], [0], [0], [0], [0], [0]])
    readable = counted is None

    async def run() -> None:
        rig = Rig()
        await rig.start()
        result = await confirmation(rig, lost, counted or b"", [])
        assert {s.role for s in result.samples} == ({PROBE, ACK} if readable else {ROUND_TRIP})
        assert bool(rig.bus.rejected["columns"]) is not readable

    asyncio.run(run())


@pytest.mark.parametrize(("component", "known"), [("h1/rnic0", True), ("rnic0", False), ("", False)])
def test_an_incident_of_an_rnic_that_names_no_ends(component: str, known: bool) -> None:
    verdict = Verdict(component=component, component_type="rnic", symptom="drop")
    message = OpenIncidents(cluster="lab", host=topics.CONTROLLER, open=[verdict])
    rig = asyncio.run(session([step(message, True)]))
    assert [t.verdict.component for t in rig.a._tracker.open] == ([component] if known else [])


def test_incidents_of_unknown_kind_are_refused() -> None:
    verdict = Verdict(component="h1", component_type="cat", symptom="drop")
    message = OpenIncidents(cluster="lab", host=topics.CONTROLLER, open=[verdict])
    rig = asyncio.run(session([step(message, True)]))
    assert rig.bus.rejected == {"OpenIncidents": 1}
    assert rig.a._tracker.open == []


@pytest.mark.parametrize("topic", ["pingmesh/v1/lab", "pingmesh/v2/lab/h1/report", "x", "pingmesh/v1/lab/h1/unknown"])
def test_topics_that_are_not_ours(topic: str) -> None:
    rig = Rig()
    asyncio.run(rig.bus._dispatch(topic, b"x", False))
    assert sum(rig.bus.rejected.values()) == 1
