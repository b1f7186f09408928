"""Whatever arrives over MQTT: the analyzer counts what it cannot use, keeps what it has, and goes on."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pingmesh import topics
from pingmesh.analyzer.service import Analyzer
from pingmesh.config import Settings
from pingmesh.messages import (
    Answer,
    ConfirmResult,
    Event,
    Exceptions,
    Flow,
    Health,
    Message,
    Paths,
    Peer,
    ProbeClass,
    ProbeList,
    ProberRows,
    Register,
    Report,
    RnicHealth,
    TracedPath,
    encode,
)
from topology.generate import leaf_spine

KINDS = [topics.STATE, topics.REGISTER, topics.REPORT, topics.EXCEPTION, topics.PATHS, topics.ANSWER, topics.LIST]
U32 = st.integers(0, 2**32 - 1)
I64 = st.integers(-(2**63), 2**63 - 1)
HOST = st.sampled_from(["h1", "h2", "h9", "", "_x", "h1/rnic0"])
COMMON = {"cluster": st.just("lab"), "host": HOST}

MESSAGES: st.SearchStrategy[Message] = st.one_of(
    st.builds(
        Report,
        **COMMON,
        boot=U32,
        seq=U32,
        now_ns=I64,
        until_ns=I64,
        prober=st.lists(
            st.builds(ProberRows, rnic=U32, epoch=U32, list_version=U32, window=U32, columns=st.binary(max_size=40)),
            max_size=2,
        ),
        responder=st.binary(max_size=40),
        health=st.builds(Health, loop_lag_max=st.floats(), rnics=st.lists(st.builds(RnicHealth, device=st.text()))),
    ),
    st.builds(
        Exceptions,
        **COMMON,
        boot=U32,
        now_ns=I64,
        events=st.lists(
            st.builds(
                Event, st.integers(-1, 99), st.integers(0, 3), st.integers(0, 2), st.integers(0, 3), U32, I64, U32, U32
            ),
            max_size=4,
        ),
    ),
    st.builds(
        Paths,
        **COMMON,
        boot=U32,
        now_ns=I64,
        paths=st.lists(
            st.builds(
                TracedPath,
                st.integers(-1, 3),
                st.integers(0, 3),
                st.integers(0, 2),
                st.integers(0, 3),
                U32,
                st.lists(st.tuples(st.integers(-5, 300), st.none() | st.sampled_from(["172.16.0.1", "x", ""]))),
                I64,
            ),
            max_size=3,
        ),
    ),
    st.builds(Answer, **COMMON, boot=U32, id=U32, now_ns=I64, responder=st.binary(max_size=30)),
    st.builds(
        ConfirmResult,
        **COMMON,
        boot=U32,
        id=U32,
        now_ns=I64,
        rnic=U32,
        epoch=U32,
        list_version=U32,
        columns=st.binary(max_size=30),
    ),
    st.builds(
        ProbeList,
        **COMMON,
        device=st.sampled_from(["rnic0", "", "ä"]),
        number=st.integers(0, 3),
        list_version=st.integers(0, 5),
        classes=st.lists(st.builds(ProbeClass), max_size=2),
        flows=st.lists(
            st.builds(
                Flow, st.integers(0, 3), st.integers(0, 4), U32, st.integers(-1, 3), U32, st.integers(-9, 10**9), U32
            ),
            max_size=4,
        ),
        peers=st.lists(
            st.builds(
                Peer, st.integers(0, 4), st.sampled_from(["h2/rnic0", "nowhere", ""]), st.text(), U32, U32, U32, U32
            ),
            max_size=3,
        ),
    ),
    st.builds(Register, **COMMON, boot=U32, started_ns=I64, rnics=st.just([])),
)


def analyzer() -> Analyzer:
    return Analyzer(Settings(cluster="lab"), leaf_spine(2, 2, 2, 1))


async def _feed(a: Analyzer, topic: str, payloads: list[bytes]) -> None:
    for p in payloads:
        await a._bus._dispatch(topic, p, False)
    await _look(a)


async def _look(a: Analyzer) -> None:
    """A whole judgement; only its sending fails, for want of a broker."""
    a._bus.connected.set()
    with pytest.raises(ConnectionError):
        await a._look_once()


@given(st.sampled_from(KINDS), st.lists(st.binary(max_size=200), min_size=1, max_size=5))
@settings(max_examples=150, deadline=None)
def test_raw_bytes_are_counted_and_dropped(kind: str, payloads: list[bytes]) -> None:
    a = analyzer()
    asyncio.run(_feed(a, f"pingmesh/v1/lab/h1/{kind}", payloads))
    assert sum(a._bus.rejected.values()) == len([p for p in payloads if p or kind == topics.ANSWER])


@given(st.lists(MESSAGES, min_size=1, max_size=6))
@settings(max_examples=300, deadline=None)
def test_well_formed_nonsense_is_survived(messages: list[Message]) -> None:
    a = analyzer()

    async def run() -> None:
        for m in messages:
            kind = {ConfirmResult: topics.ANSWER, Answer: topics.ANSWER, ProbeList: topics.LIST}.get(type(m))
            kind = kind or next(
                k for k in KINDS if k == type(m).__struct_config__.tag or k in str(m.__struct_config__.tag)
            )
            await a._bus._dispatch(f"pingmesh/v1/lab/{m.host or 'h1'}/{kind}", encode(m), False)
        await _look(a)

    asyncio.run(run())


@pytest.mark.parametrize("topic", ["pingmesh/v1/lab", "pingmesh/v2/lab/h1/report", "x", "pingmesh/v1/lab/h1/unknown"])
def test_topics_that_are_not_ours(topic: str) -> None:
    a = analyzer()
    asyncio.run(_feed(a, topic, [b"x"]))
    assert sum(a._bus.rejected.values()) == 1
