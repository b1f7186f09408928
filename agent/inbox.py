"""What others send to this agent: probe lists, peers, and questions."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Protocol

from agent import checks
from agent.publisher import Sender
from pingmesh import topics
from pingmesh.messages import (
    AgentState,
    Answer,
    Ask,
    BadMessageError,
    Confirm,
    ConfirmResult,
    Health,
    Message,
    Peer,
    PeerUpdate,
    ProbeList,
    Retrace,
    WhoAreYou,
    decode,
)

log = logging.getLogger(__name__)

MAX_CONFIRMS = 32
MAX_ANSWERS = 64


class DataPlane(Protocol):
    """What the inbox needs of the engine."""

    def apply_list(self, message: ProbeList) -> bool:
        """See Engine."""

    def apply_peers(self, peers: list[Peer]) -> None:
        """See Engine."""

    async def confirm(self, message: Confirm) -> tuple[int, bytes]:
        """See Engine."""

    def responder_totals(self, windows: list[tuple[int, int, int, int]]) -> bytes:
        """See Engine."""


class PathTracer(Protocol):
    """What the inbox needs of the tracing."""

    def set_budget(self, device: str, quiet: float, suspicion: float) -> None:
        """See Tracing."""

    def ask(self, keys: list[tuple[int, int, int, int]]) -> int:
        """See Tracing."""


class Inbox:
    """Takes messages apart; `handle` raises BadMessageError for what cannot be used, and changes nothing then.

    Questions are answered by tasks of their own, so that a slow confirmation or a congested broker delays no other
    answer; there are at most 32 confirmations and 64 answers at once. `lists` keeps the last list of every device,
    also of those that are not there yet.
    """

    def __init__(
        self,
        sender: Sender,
        engine: DataPlane,
        tracing: PathTracer,
        health: Callable[[], Health],
        register_again: Callable[[], None],
    ) -> None:
        self._sender = sender
        self._engine = engine
        self._tracing = tracing
        self._health = health
        self._register_again = register_again
        self.lists: dict[str, ProbeList] = {}
        self._confirms: dict[tuple[int, int], asyncio.Task[None]] = {}
        self._answers: set[asyncio.Task[None]] = set()

    def subscriptions(self) -> list[str]:
        """Topic filters."""
        own = [topics.Topic(self._sender.cluster, self._sender.host, k) for k in (topics.PEERS, topics.ASK)]
        state = topics.Topic(self._sender.cluster, self._sender.host, topics.STATE)
        lists = topics.Topic(self._sender.cluster, self._sender.host, topics.LIST, "+")
        return [str(t) for t in (lists, *own, state)]

    def handle(self, topic: topics.Topic, payload: bytes) -> None:
        """Take in one message."""
        if (topic.cluster, topic.host) != (self._sender.cluster, self._sender.host):
            raise BadMessageError(topic.kind, f"is for {topic.host!r} of cluster {topic.cluster!r}")
        m = decode(payload, Message, topic.host, topic.cluster)
        if topic.kind == topics.LIST and isinstance(m, ProbeList):
            if m.device != topic.device:
                raise BadMessageError("ProbeList", f"names device {m.device!r} on the topic of {topic.device!r}")
            checks.check_list(m)
            self.lists[m.device] = m
            self._apply(m)
        elif topic.kind == topics.PEERS and isinstance(m, PeerUpdate):
            checks.check_peers("PeerUpdate", m.peers)
            self._engine.apply_peers(m.peers)
        elif topic.kind == topics.ASK and isinstance(m, Ask):
            checks.check_ask(m)
            self._answer(m)
        elif topic.kind == topics.ASK and isinstance(m, Confirm):
            checks.check_confirm(m)
            self._confirm(m)
        elif topic.kind == topics.ASK and isinstance(m, Retrace):
            checks.check_retrace(m)
            known = self._tracing.ask(m.flows)
            log.debug("asked to retrace", extra={"flows": len(m.flows), "known": known})
        elif topic.kind == topics.ASK and isinstance(m, WhoAreYou):
            self._register_again()
        elif topic.kind == topics.STATE and isinstance(m, AgentState):
            self._state(m)
        else:
            raise BadMessageError(topic.kind, f"is a {type(m).__name__}")

    def apply_kept(self, device: str) -> None:
        """A device came: give it the list it has."""
        kept = self.lists.get(device)
        if kept is not None:
            self._apply(kept)

    async def close(self) -> None:
        """Cancel what is under way."""
        tasks = [*self._confirms.values(), *self._answers]
        for t in tasks:
            t.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _apply(self, m: ProbeList) -> None:
        if not self._engine.apply_list(m):
            log.info("probe list kept for a device that is not there", extra={"device": m.device})
            return
        self._tracing.set_budget(m.device, m.trace_rate, m.trace_rate_suspicion)
        log.info("probe list applied", extra={"device": m.device, "version": m.list_version, "flows": len(m.flows)})

    def _state(self, m: AgentState) -> None:
        if m.state != "online":
            # The will of an earlier session or process, come after we said that we are here.
            self._register_again()
        elif m.boot != self._sender.boot:
            log.warning("another agent uses this host's name", extra={"host": m.host, "boot": m.boot})

    def _answer(self, m: Ask) -> None:
        if len(self._answers) >= MAX_ANSWERS:
            raise BadMessageError("Ask", "too many at once")
        s = self._sender
        answer = Answer(
            cluster=s.cluster,
            host=s.host,
            boot=s.boot,
            id=m.id,
            now_ns=s.now_ns(),
            responder=self._engine.responder_totals(m.windows),
            health=self._health(),
        )
        task = asyncio.create_task(self._quietly(lambda: s.publish(topics.ANSWER, answer)), name="answer")
        self._answers.add(task)
        task.add_done_callback(self._answers.discard)

    def _confirm(self, m: Confirm) -> None:
        key = (m.id, m.rnic)
        if key in self._confirms:
            raise BadMessageError("Confirm", f"{m.id} is under way already")
        if len(self._confirms) >= MAX_CONFIRMS:
            raise BadMessageError("Confirm", "too many at once")
        task = asyncio.create_task(self._quietly(lambda: self._run_confirm(m)), name=f"confirm {m.id}")
        self._confirms[key] = task
        task.add_done_callback(lambda _: self._confirms.pop(key, None))

    async def _run_confirm(self, m: Confirm) -> None:
        epoch, columns = await self._engine.confirm(m)
        s = self._sender
        result = ConfirmResult(
            cluster=s.cluster,
            host=s.host,
            boot=s.boot,
            id=m.id,
            now_ns=s.now_ns(),
            rnic=m.rnic,
            epoch=epoch,
            list_version=m.list_version,
            columns=columns,
            health=self._health(),
        )
        await s.publish(topics.ANSWER, result)

    async def _quietly(self, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except ConnectionError:
            log.info("answer not sent, broker gone")
        except Exception:
            log.exception("question not answered")
