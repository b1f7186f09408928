"""Whatever the broker hands out and whatever a handler does with it, the session goes on and the refusal is counted."""

from __future__ import annotations

import asyncio
from typing import Any

from fuzzing import anything, fuzz, words
from hypothesis import given
from hypothesis import strategies as st

from pingmesh import topics
from pingmesh.bus import UNHANDLED, Bus
from pingmesh.config import BrokerSettings
from pingmesh.messages import MAX_MESSAGE, BadMessageError, Message, decode

GOOD = "pingmesh/v1/lab/h1/report"
errors = st.sampled_from(
    [BadMessageError("Report", "is odd"), topics.BadTopicError("x"), ConnectionError("gone"), None]
    + [kind("oh") for kind in (ValueError, KeyError, IndexError, OverflowError, RecursionError, MemoryError)]
    + [TimeoutError(), OSError(5, "no"), AssertionError(), ZeroDivisionError()]
)


def dispatch(handler: Any, topic: str, payloads: list[object]) -> Bus:
    bus = Bus(BrokerSettings(), "test", [], handler)

    async def run() -> None:
        for payload in payloads:
            await bus._dispatch(topic, payload, False)

    asyncio.run(run())
    return bus


@fuzz(200)
@given(st.lists(anything, max_size=5), st.just(GOOD) | st.text(max_size=20) | st.lists(words).map("/".join))
def test_what_is_no_bytes_or_has_no_topic_of_ours_is_counted(payloads: list[object], topic: str) -> None:
    taken: list[bytes] = []
    bus = dispatch(lambda t, payload: taken.append(payload), topic, payloads)
    assert sum(bus.rejected.values()) + len(taken) == len(payloads)
    assert all(isinstance(t, bytes) for t in taken)


@fuzz(200)
@given(st.lists(errors, min_size=1, max_size=6), st.booleans())
def test_whatever_a_handler_raises_ends_nothing(raised: list[Exception | None], later: bool) -> None:
    pending = iter(raised)

    def at_once(topic: topics.Topic, payload: bytes) -> None:
        if (error := next(pending)) is not None:
            raise error

    async def awaited(topic: topics.Topic, payload: bytes) -> None:
        await asyncio.sleep(0)
        at_once(topic, payload)

    bus = dispatch(awaited if later else at_once, GOOD, [b""] * len(raised))
    gone = sum(e is None or isinstance(e, ConnectionError) for e in raised)
    bad = sum(isinstance(e, BadMessageError) for e in raised)
    unfit = sum(isinstance(e, topics.BadTopicError) for e in raised)
    assert (bus.rejected["Report"], bus.rejected["topic"]) == (bad, unfit)
    assert bus.rejected[UNHANDLED] == len(raised) - gone - bad - unfit
    assert next(pending, "all were given") == "all were given"


def test_a_huge_payload_is_counted() -> None:
    def take(topic: topics.Topic, payload: bytes) -> None:
        decode(payload, Message)

    assert dispatch(take, GOOD, [bytes(MAX_MESSAGE + 1)]).rejected == {"Message": 1}
