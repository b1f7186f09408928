"""What leaves the agent for the broker: exceptions at once, reports in order and through outages, paths in batches."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from pingmesh import topics
from pingmesh.messages import Event, Exceptions, Health, Message, Paths, Report, TracedPath, encode

log = logging.getLogger(__name__)

EXCEPTION_GAP_S = 0.1
EXCEPTION_EVENTS = 500
HEALTH_GAP_S = 1.0
"""Exceptions carry health once a second: whoever reads of lateness must see at once whether we were late ourselves."""
PATHS_GAP_S = 0.5
PATHS_PATIENCE_S = 5.0
"""Paths that are as they were may wait so long for others."""
PATHS_BATCH = 50
PATHS_KEPT = 2000
FLUSH_GAP_S = 0.02
"""Pause between two spooled reports: a thousand agents that come back must not drown the broker."""

Send = Callable[[topics.Topic, bytes, int], Awaitable[None]]
"""Publish a payload with a QoS; raises ConnectionError while there is no broker."""


@dataclass(frozen=True, slots=True)
class Sender:
    """Who we are in messages and topics, and how they leave."""

    cluster: str
    host: str
    boot: int
    send: Send
    now_ns: Callable[[], int]

    def topic(self, kind: str) -> topics.Topic:
        """Our own topic of a kind."""
        return topics.Topic(self.cluster, self.host, kind)

    async def publish(self, kind: str, message: Message, qos: int = 0) -> None:
        """Encode and send. Raises ConnectionError."""
        await self.send(self.topic(kind), encode(message), qos)


class ReportSpool:
    """Encoded reports that have not been acknowledged yet, oldest first, at most `limit`: the oldest goes first."""

    def __init__(self, limit: int) -> None:
        self._reports: deque[bytes] = deque()
        self._limit = max(1, limit)
        self._next_seq = 0
        self.dropped = 0

    def __len__(self) -> int:
        return len(self._reports)

    def next_seq(self) -> int:
        """The number of the next report; gaps at the receiver's are reports dropped here."""
        self._next_seq += 1
        return self._next_seq - 1

    def add(self, report: bytes) -> None:
        """Append one."""
        if len(self._reports) >= self._limit:
            self._reports.popleft()
            self.dropped += 1
            if self.dropped in (1, 10, 100) or self.dropped % 1000 == 0:
                log.warning("report spool full, oldest dropped", extra={"dropped": self.dropped})
        self._reports.append(report)

    def head(self) -> bytes | None:
        """The oldest."""
        return self._reports[0] if self._reports else None

    def done(self, report: bytes) -> None:
        """That one is with the broker (unless it was dropped meanwhile)."""
        if self._reports and self._reports[0] is report:
            self._reports.popleft()


class Publisher:
    """Three queues, each with its own task, so that a slow one delays no other."""

    def __init__(self, sender: Sender, spool_reports: int, health: Callable[[], Health]) -> None:
        self._sender = sender
        self._health = health
        self.spool = ReportSpool(spool_reports)
        self._events: deque[Event] = deque()
        self._left_out = 0
        self._with_health = False
        self._health_sent = -HEALTH_GAP_S
        self._paths: dict[tuple[int, int, int, int], TracedPath] = {}
        self._exception_ready = asyncio.Event()
        self._report_ready = asyncio.Event()
        self._path_ready = asyncio.Event()
        self._connected = asyncio.Event()

    # ---- filling

    def event(self, event: Event) -> None:
        """Queue an exception; the newest 500 are kept, the others counted."""
        self._events.append(event)
        if len(self._events) > EXCEPTION_EVENTS:
            self._events.popleft()
            self._left_out += 1
        self._exception_ready.set()

    def tell_health(self) -> None:
        """Send health at once, with or without events."""
        self._with_health = True
        self._exception_ready.set()

    def report(self, report: Report) -> None:
        """Queue a report. Its `seq` comes from `spool.next_seq()`."""
        self.spool.add(encode(report))
        self._report_ready.set()

    def path(self, path: TracedPath, urgent: bool = True) -> None:
        """Queue a traced path; a newer one of the same flow replaces it. Not `urgent`: it may wait for company."""
        key = (path.role, path.rnic, path.list_version, path.index)
        self._paths.pop(key, None)
        self._paths[key] = path
        while len(self._paths) > PATHS_KEPT:
            del self._paths[next(iter(self._paths))]
        if urgent or len(self._paths) >= PATHS_BATCH:
            self._path_ready.set()

    def connected(self) -> None:
        """There is a broker again."""
        self._connected.set()

    def disconnected(self) -> None:
        """The broker is gone."""
        self._connected.clear()

    # ---- emptying

    async def run(self) -> None:
        """Send until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._run_exceptions(), name="exceptions")
            group.create_task(self._run_reports(), name="reports")
            group.create_task(self._run_paths(), name="paths")

    async def _run_exceptions(self) -> None:
        while True:
            await self._exception_ready.wait()
            await self._connected.wait()
            began = time.monotonic()
            await self.send_exceptions()
            await asyncio.sleep(max(0.0, EXCEPTION_GAP_S - (time.monotonic() - began)))

    async def send_exceptions(self) -> bool:
        """Send what is queued, if anything; what cannot be sent stays queued. True if a message left."""
        self._exception_ready.clear()
        if not self._events and not self._with_health:
            return False
        health = self._with_health or time.monotonic() - self._health_sent >= HEALTH_GAP_S
        events, more = list(self._events), self._left_out
        self._events.clear()
        self._left_out, self._with_health = 0, False
        s = self._sender
        message = Exceptions(
            cluster=s.cluster,
            host=s.host,
            boot=s.boot,
            now_ns=s.now_ns(),
            events=events,
            more=more,
            health=self._health() if health else None,
        )
        try:
            await s.publish(topics.EXCEPTION, message)
        except ConnectionError:
            merged = [*events, *self._events]
            self._left_out += more + max(0, len(merged) - EXCEPTION_EVENTS)
            self._events = deque(merged[-EXCEPTION_EVENTS:])
            self._with_health |= health
            self._exception_ready.set()
            return False
        if health:
            self._health_sent = time.monotonic()
        return True

    async def _run_reports(self) -> None:
        while True:
            await self._report_ready.wait()
            await self._connected.wait()
            self._report_ready.clear()
            if len(self.spool) > 1:
                await asyncio.sleep(random.uniform(0, 1))
            await self._flush()

    async def _flush(self) -> None:
        while (report := self.spool.head()) is not None and self._connected.is_set():
            try:
                await self._sender.send(self._sender.topic(topics.REPORT), report, 1)
            except ConnectionError:
                # The session may take a moment to notice; no tight loop meanwhile.
                self._report_ready.set()
                await asyncio.sleep(0.5)
                return
            self.spool.done(report)
            if len(self.spool):
                await asyncio.sleep(FLUSH_GAP_S)
        if len(self.spool):
            self._report_ready.set()

    async def _run_paths(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PATHS_PATIENCE_S):
                    await self._path_ready.wait()
            await self._connected.wait()
            await self.send_paths()
            await asyncio.sleep(PATHS_GAP_S)

    async def send_paths(self) -> None:
        """Send the oldest batch of paths; it stays queued when it cannot be sent."""
        batch = list(self._paths.items())[:PATHS_BATCH]
        if batch:
            s = self._sender
            message = Paths(
                cluster=s.cluster, host=s.host, boot=s.boot, now_ns=s.now_ns(), paths=[path for _, path in batch]
            )
            try:
                await s.publish(topics.PATHS, message)
            except ConnectionError:
                return
        for key, path in batch:
            if self._paths.get(key) is path:
                del self._paths[key]
        if not self._paths:
            self._path_ready.clear()
