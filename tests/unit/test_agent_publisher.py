from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TypeVar

from agent.publisher import EXCEPTION_EVENTS, PATHS_BATCH, Publisher, ReportSpool, Sender
from pingmesh import topics
from pingmesh.messages import LOST, Event, Exceptions, Health, Message, Paths, Report, TracedPath, decode

M = TypeVar("M", bound=Message)


class Broker:
    """Remembers what was published; refuses while `away`."""

    def __init__(self) -> None:
        self.away = False
        self.got: list[tuple[float, topics.Topic, bytes, int]] = []

    async def send(self, topic: topics.Topic, payload: bytes, qos: int) -> None:
        await asyncio.sleep(0)
        if self.away:
            raise ConnectionError("away")
        self.got.append((time.monotonic(), topic, payload, qos))

    def messages(self, kind: type[M]) -> list[M]:
        names = {Exceptions: topics.EXCEPTION, Report: topics.REPORT, Paths: topics.PATHS}
        return [decode(p, kind, "h1", "lab") for _, t, p, _ in self.got if t.kind == names[kind]]


@asynccontextmanager
async def running(broker: Broker, spool: int = 10) -> AsyncIterator[Publisher]:
    sender = Sender("lab", "h1", 7, broker.send, lambda: 5)
    publisher = Publisher(sender, spool, lambda: Health(cpu_share=0.5))
    if not broker.away:
        publisher.connected()
    task = asyncio.create_task(publisher.run())
    try:
        yield publisher
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def event(seq: int) -> Event:
    return Event(LOST, 1, 1, 0, seq, 0, 0, 0)


def report(publisher: Publisher) -> Report:
    return Report(cluster="lab", host="h1", boot=7, seq=publisher.spool.next_seq(), now_ns=0, until_ns=0)


def path(index: int, hop: str = "10.0.0.1") -> TracedPath:
    return TracedPath(0, 1, 1, index, 50000, [(2, hop)], 0)


async def test_the_first_event_leaves_at_once_and_the_next_ones_together() -> None:
    broker = Broker()
    async with running(broker) as publisher:
        began = time.monotonic()
        publisher.event(event(0))
        await asyncio.sleep(0.02)
        assert [len(m.events) for m in broker.messages(Exceptions)] == [1]
        for i in range(1, 6):
            publisher.event(event(i))
        await asyncio.sleep(0.2)
    first, second = broker.messages(Exceptions)
    assert [e.seq for e in first.events + second.events] == [0, 1, 2, 3, 4, 5]
    assert broker.got[0][0] - began < 0.05
    assert broker.got[1][0] - broker.got[0][0] >= 0.09


async def test_a_storm_stays_within_ten_messages_a_second_and_counts_what_it_leaves_out() -> None:
    broker = Broker()
    async with running(broker) as publisher:
        for i in range(EXCEPTION_EVENTS + 30):
            publisher.event(event(i))
        await asyncio.sleep(0.02)
        until = time.monotonic() + 0.5
        while time.monotonic() < until:
            publisher.event(event(1))
            await asyncio.sleep(0.005)
    first, *more = broker.messages(Exceptions)
    assert (len(first.events), first.more) == (EXCEPTION_EVENTS, 30)
    assert first.events[-1].seq == EXCEPTION_EVENTS + 29
    assert 3 <= len(more) <= 6


async def test_events_wait_for_the_broker_and_stay_bounded() -> None:
    broker = Broker()
    broker.away = True
    async with running(broker) as publisher:
        publisher.connected()  # the session has not noticed yet: sends fail
        for i in range(EXCEPTION_EVENTS * 2):
            publisher.event(event(i))
        await asyncio.sleep(0.15)
        broker.away = False
        await asyncio.sleep(0.15)
    (message,) = broker.messages(Exceptions)
    assert len(message.events) + message.more == EXCEPTION_EVENTS * 2
    assert message.events[-1].seq == EXCEPTION_EVENTS * 2 - 1


async def test_health_leaves_at_once_when_asked_for() -> None:
    broker = Broker()
    async with running(broker) as publisher:
        publisher.tell_health()
        await asyncio.sleep(0.02)
    (message,) = broker.messages(Exceptions)
    assert message.health == Health(cpu_share=0.5)
    assert message.events == []


async def test_reports_come_in_order_after_an_outage_and_the_gap_shows() -> None:
    broker = Broker()
    broker.away = True
    async with running(broker, spool=3) as publisher:
        for _ in range(5):
            publisher.report(report(publisher))
        await asyncio.sleep(0.02)
        assert broker.got == []
        assert (len(publisher.spool), publisher.spool.dropped) == (3, 2)
        broker.away = False
        publisher.connected()
        await asyncio.sleep(1.3)
        assert [r.seq for r in broker.messages(Report)] == [2, 3, 4]
        publisher.report(report(publisher))
        await asyncio.sleep(0.05)
    assert [r.seq for r in broker.messages(Report)] == [2, 3, 4, 5]
    assert {qos for _, t, _, qos in broker.got if t.kind == topics.REPORT} == {1}
    assert len(publisher.spool) == 0


async def test_a_report_that_could_not_be_sent_is_sent_again() -> None:
    broker = Broker()
    async with running(broker) as publisher:
        broker.away = True
        publisher.report(report(publisher))
        await asyncio.sleep(0.05)
        broker.away = False
        await asyncio.sleep(0.6)
    assert [r.seq for r in broker.messages(Report)] == [0]


def test_a_dropped_report_is_not_acknowledged_in_place_of_its_successor() -> None:
    spool = ReportSpool(1)
    spool.add(b"a")
    head = spool.head()
    spool.add(b"b")
    assert head is not None
    spool.done(head)
    assert spool.head() == b"b"


async def test_paths_go_in_batches_and_a_newer_one_replaces_an_older() -> None:
    broker = Broker()
    async with running(broker) as publisher:
        for i in range(PATHS_BATCH + 10):
            publisher.path(path(i, "10.0.0.1"))
        publisher.path(path(PATHS_BATCH, "10.0.0.9"))
        await asyncio.sleep(0.7)
    first, second = broker.messages(Paths)
    assert len(first.paths) == PATHS_BATCH
    assert {p.index: p.hops for p in second.paths}[PATHS_BATCH] == [(2, "10.0.0.9")]
    assert len(second.paths) == 10


async def test_paths_that_are_as_they_were_wait_for_others() -> None:
    broker = Broker()
    async with running(broker) as publisher:
        publisher.path(path(1), urgent=False)
        await asyncio.sleep(0.1)
        assert broker.got == []
        publisher.path(path(2))
        await asyncio.sleep(0.1)
        (message,) = broker.messages(Paths)
        assert [p.index for p in message.paths] == [1, 2]
        await asyncio.sleep(0.5)
        for i in range(PATHS_BATCH):
            publisher.path(path(i), urgent=False)
        await asyncio.sleep(0.1)
    assert len(broker.messages(Paths)) == 2


async def test_the_first_exceptions_of_each_second_carry_health() -> None:
    broker = Broker()
    async with running(broker) as publisher:
        for i in range(3):
            publisher.event(event(i))
            await asyncio.sleep(0.15)
    assert [m.health is not None for m in broker.messages(Exceptions)] == [True, False, False]
