"""The MQTT session that every part keeps: reconnects with spread back-off, a last will, counted rejections."""

from __future__ import annotations

import asyncio
import logging
import random
import ssl
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import cast

from pingmesh import topics
from pingmesh.config import BrokerSettings
from pingmesh.lean_aiomqtt import aiomqtt
from pingmesh.messages import BadMessageError
from pingmesh.read_ahead import ReadAheadSocket

log = logging.getLogger(__name__)

Handler = Callable[[topics.Topic, bytes], Awaitable[None] | None]

UNHANDLED = "unhandled"
"""Messages in `Bus.rejected` that a handler failed at, a fault of ours: the log has the traceback."""


TOGETHER = 100
"""Messages handled before others of the process have their turn."""


@dataclass
class Will:
    """What the broker says for us when we vanish."""

    topic: str
    payload: bytes
    retain: bool = True


@contextmanager
def cancellable() -> Iterator[None]:
    """Raises CancelledError at the end of a block in which a cancellation of this task was lost.

    aiomqtt waits with `asyncio.wait_for`, which in Python 3.11 loses a cancellation that comes as the wait ends; the
    task would then run for ever.
    """
    task = asyncio.current_task()
    assert task is not None
    before = task.cancelling()
    yield
    if task.cancelling() > before:
        raise asyncio.CancelledError


@dataclass
class Bus:
    """One MQTT session, kept alive until `stop`.

    `subscriptions` are topic filters; each message goes to `handler` with its topic split. A handler that raises
    BadMessageError has the message counted in `rejected` and dropped; the session goes on, also when a handler fails
    in any other way. `on_connect` runs after each (re)connection, with subscriptions in place. Publishing while
    disconnected raises ConnectionError.
    """

    settings: BrokerSettings
    name: str
    subscriptions: list[str]
    handler: Handler
    on_connect: Callable[[], Awaitable[None]] | None = None
    on_disconnect: Callable[[], None] | None = None
    will: Will | None = None
    rejected: Counter[str] = field(default_factory=Counter)
    connected: asyncio.Event = field(default_factory=asyncio.Event)
    connections: int = 0
    _client: aiomqtt.Client | None = None
    _inbox: asyncio.Queue[aiomqtt.Message] = field(default_factory=asyncio.Queue)

    async def publish(self, topic: topics.Topic | str, payload: bytes, *, qos: int = 0, retain: bool = False) -> None:
        """Publish now. Raises ConnectionError while there is no broker."""
        if self._client is None:
            raise ConnectionError("no connection to the broker")
        try:
            with cancellable():
                await self._client.publish(str(topic), payload, qos=qos, retain=retain, timeout=5)
        except aiomqtt.MqttError as error:
            raise ConnectionError(str(error)) from error

    async def run(self) -> None:
        """Keep the session until cancelled; never raises for a broker's outage."""
        backoff = 0.2
        while True:
            before = self.connections
            with cancellable():
                try:
                    async with self._session():
                        backoff = 0.2
                        assert self._client is not None
                        async for message in self._client.messages:
                            await self._take(message)
                            # Waiting costs more than most messages do: take those that came together, together.
                            for _ in range(min(self._inbox.qsize(), TOGETHER)):
                                await self._take(self._inbox.get_nowait())
                except (aiomqtt.MqttError, OSError) as error:
                    what = "cannot be reached" if self.connections == before else "connection lost"
                    s = self.settings
                    log.warning("broker %s:%d: %s, trying again: %s", s.host, s.port, what, error)
            # Spread over the interval: a thousand agents must not come back in one instant.
            await asyncio.sleep(backoff * random.uniform(0.5, 1.5))
            backoff = min(backoff * 2, self.settings.reconnect_max_s)

    async def _take(self, message: aiomqtt.Message) -> None:
        await self._dispatch(str(message.topic), message.payload, bool(message.retain))

    @asynccontextmanager
    async def _session(self) -> AsyncIterator[None]:
        s = self.settings
        w = self.will
        will = aiomqtt.Will(w.topic, w.payload, qos=1, retain=w.retain) if w else None
        context = ssl.create_default_context(cafile=s.ca_file) if s.tls else None
        if context is not None and s.cert_file:
            context.load_cert_chain(s.cert_file, s.key_file)
        inbox = self._inbox = asyncio.Queue[aiomqtt.Message](s.max_queued)
        client = aiomqtt.Client(
            s.host,
            s.port,
            identifier=f"pm-{self.name}-{uuid.uuid4().hex[:10]}",
            username=s.username,
            password=s.read_password(),
            tls_context=context,
            keepalive=s.keepalive_s,
            will=will,
            timeout=5,
            queue_type=cast("type[asyncio.Queue[aiomqtt.Message]]", lambda maxsize: inbox),
            max_queued_outgoing_messages=s.max_queued,
        )
        client.pending_calls_threshold = s.max_queued  # a burst of questions is no reason for a warning each
        async with client:
            # It reads a packet in four calls, and one packet each time the loop has looked for more.
            client._client._sock = ReadAheadSocket(client._client._sock)
            self._client = client
            self.connections += 1
            try:
                with cancellable():
                    for topic in self.subscriptions:
                        await client.subscribe(topic, qos=1)
                self.connected.set()
                if self.on_connect:
                    await self.on_connect()
                yield
            except ConnectionError as error:
                raise aiomqtt.MqttError(str(error)) from error
            finally:
                self._client = None
                self.connected.clear()
                if self.on_disconnect:
                    self.on_disconnect()

    async def _dispatch(self, topic: str, payload: object, retained: bool) -> None:
        try:
            if not isinstance(payload, bytes):
                raise BadMessageError("payload", "is not bytes")
            result = self.handler(topics.parse(topic, retained), payload)
            if result is not None:
                await result
        except (BadMessageError, topics.BadTopicError) as error:
            kind = error.kind if isinstance(error, BadMessageError) else "topic"
            if self._count(kind):
                log.warning("message rejected: %s", error, extra={"topic": topic, "count": self.rejected[kind]})
        except ConnectionError:
            # An answer that could not be sent; the session's own loop notices the loss.
            log.info("answer not sent, broker gone", extra={"topic": topic})
        except Exception:
            # One message, however odd, must not end the session that all others need.
            if self._count(UNHANDLED):
                log.exception("message not handled", extra={"topic": topic, "count": self.rejected[UNHANDLED]})

    def _count(self, kind: str) -> bool:
        """Count a rejection; whether to say so (a flood of them must not fill the log)."""
        n = self.rejected[kind] = self.rejected[kind] + 1
        return n in (1, 10, 100) or n % 1000 == 0
