"""Questions to agents and their answers: Ask, Confirm, Retrace over the bus, matched by id."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Iterable

from pingmesh.analyzer.suspicion import Request
from pingmesh.analyzer.waits import USUAL, Waits
from pingmesh.bus import Bus
from pingmesh.messages import Answer, Ask, BadMessageError, Confirm, ConfirmResult, Message, Retrace, encode
from pingmesh.topics import ASK, Topic

log = logging.getLogger(__name__)


class Questions:
    """Sends questions and waits for answers; an id is used once."""

    def __init__(self, cluster: str, bus: Bus, waits: Waits = USUAL) -> None:
        self.waits = waits
        self._cluster = cluster
        self._bus = bus
        self._id = random.randrange(1 << 30)
        self._waiting: dict[int, tuple[str, asyncio.Future[Message]]] = {}

    def next_id(self) -> int:
        """An id below 2^31, unlike any in use."""
        self._id = (self._id + 1) % (1 << 31)
        return self._id

    async def ask(self, host: str, windows: list[tuple[int, int, int, int]] | None = None) -> Answer | None:
        """Is the agent there, and what did its responder count? None without an answer in time; counts take longer."""
        within = self.waits.answer_s * (2 if windows else 1)
        ask = Ask(cluster=self._cluster, host=host, id=self.next_id(), windows=windows or [])
        answer = await self._exchange(host, ask.id, ask, within)
        return answer if isinstance(answer, Answer) else None

    def start_confirm(
        self, host: str, request: Request, count: int, interval_us: int
    ) -> tuple[int, asyncio.Task[ConfirmResult | None]]:
        """Have one RNIC probe some flows harder; the task ends with its result or None."""
        confirm = Confirm(
            cluster=self._cluster,
            host=host,
            id=self.next_id(),
            rnic=request.rnic,
            list_version=request.list_version,
            indexes=list(request.indexes),
            count=count,
            interval_us=interval_us,
            cls=request.cls,
        )
        return confirm.id, asyncio.create_task(self._confirmed(host, confirm), name=f"confirm {host}")

    async def _confirmed(self, host: str, confirm: Confirm) -> ConfirmResult | None:
        seconds = confirm.count * confirm.interval_us / 1e6 + self.waits.confirm_s
        result = await self._exchange(host, confirm.id, confirm, seconds)
        return result if isinstance(result, ConfirmResult) else None

    async def retrace(self, by_host: dict[str, list[tuple[int, int, int, int]]]) -> None:
        """Have agents trace these (role, RNIC, list version, index) first."""
        for host, flows in by_host.items():
            message = Retrace(cluster=self._cluster, host=host, id=self.next_id(), flows=flows)
            await self._send(host, message)

    def resolve(self, message: Answer | ConfirmResult) -> None:
        """An answer came; one that nobody waits for any more is let go."""
        waiting = self._waiting.get(message.id)
        if waiting is not None and waiting[0] == message.host and not waiting[1].done():
            waiting[1].set_result(message)

    def reject(self, answer: Answer | ConfirmResult, error: BadMessageError) -> None:
        """What an answer counts cannot be read: it shows that the agent is there, and no more."""
        self._bus.rejected[error.kind] += 1
        log.warning("answer unusable: %s", error, extra={"host": answer.host})

    async def _exchange(self, host: str, ident: int, message: Message, within: float) -> Message | None:
        future: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._waiting[ident] = (host, future)
        try:
            if not await self._send(host, message):
                return None
            async with asyncio.timeout(within):
                return await future
        except TimeoutError:
            return None
        finally:
            del self._waiting[ident]

    async def _send(self, host: str, message: Message) -> bool:
        try:
            await self._bus.publish(Topic(self._cluster, host, ASK), encode(message))
        except ConnectionError:
            return False
        return True


async def ask_all(questions: Questions, hosts: Iterable[str]) -> dict[str, Answer | None]:
    """Ask many hosts at once whether they are there."""
    names = list(hosts)
    answers = await asyncio.gather(*(questions.ask(h) for h in names))
    return dict(zip(names, answers, strict=True))
