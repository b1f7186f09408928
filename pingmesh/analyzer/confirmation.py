"""When to confirm: a suspicion starts an episode of rounds, which goes on until more of them would tell nothing new."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from pingmesh.analyzer.flows import Flow
from pingmesh.analyzer.rounds import Begun, RoundResult, Rounds
from pingmesh.analyzer.suspicion import Episode
from pingmesh.messages import Event

log = logging.getLogger(__name__)

JOIN_S = 0.03
"""So long after the first exception those of other hosts may join the first round."""
ROUND_GAP_S = 0.1
"""From the last probe of a round to the first of the next."""
JUDGED_S = 0.2
"""So long after a round what it brought has been judged."""


class Confirmations:
    """The episode that goes on, if any, and its rounds."""

    def __init__(
        self,
        rounds: Rounds,
        is_connected: Callable[[], bool],
        take: Callable[[RoundResult], None],
        is_incident_open: Callable[[], bool],
    ) -> None:
        """`take` is handed what each round brought."""
        self._rounds = rounds
        self._is_connected = is_connected
        self._take = take
        self._is_incident_open = is_incident_open
        self.episode: Episode | None = None
        self._suspicion = asyncio.Event()
        self._news = asyncio.Event()
        """Set when it is no use to wait for the round that is under way."""

    def doubt(self, flow: Flow, event: Event, sent: int) -> None:
        """An agent says that a probe, `sent` in our clock, was lost or slow."""
        if self.episode is None:
            self.episode = Episode(sent)
            log.info("suspicion", extra={"flow": str(flow), "kind": event.kind})
        if self.episode.add(flow, event, sent):
            log.info("suspicion, a new one", extra={"flow": str(flow), "kind": event.kind})
            self._news.set()
        self._suspicion.set()

    async def run(self) -> None:
        """Confirm what is doubted, until cancelled."""
        # A round ends by itself, also after its episode: what it sent is counted, and nobody waits for it.
        async with asyncio.TaskGroup() as rounds:
            while True:
                await self._suspicion.wait()
                self._suspicion.clear()
                await asyncio.sleep(JOIN_S)
                while (episode := self.episode) is not None:
                    await self._confirm(episode, rounds)

    async def _confirm(self, episode: Episode, rounds: asyncio.TaskGroup) -> None:
        """Rounds until the episode is over: first quick ones, of which two may be under way, then one after another."""
        last: asyncio.Task[None] | None = None
        self._news.clear()
        while self.episode is episode:
            if not self._is_connected():
                self.episode = None
                break
            try:
                begun = self._rounds.begin(episode)
            except Exception:
                log.exception("a confirmation failed")
                self.episode = None
                break
            this = rounds.create_task(self._finish(begun, episode), name="round")
            await asyncio.sleep(begun.sending_s + ROUND_GAP_S)
            if last is not None:
                await self._is_over(last)
            last = this
            if not episode.is_quick and not await self._is_over(this):
                last = None

    async def _is_over(self, this: asyncio.Task[None]) -> bool:
        """Wait for a round; False if there is no use in it any more, as another had better be sent at once."""
        news = asyncio.create_task(self._news.wait())
        try:
            await asyncio.wait({this, news}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            news.cancel()
        self._news.clear()
        return this.done()

    async def _finish(self, begun: Begun, episode: Episode) -> None:
        try:
            result = await self._rounds.finish(begun, episode)
            self._take(result)
        except Exception:
            log.exception("a confirmation failed")
            self._end(episode)
            return
        episode.confirmed(result.lost, begun.noted)
        log.info(
            "confirmation",
            extra={
                "round": begun.number,
                "packets": sum(s.sent for s in result.samples),
                "lost": result.lost,
                "silent": sorted(result.silent),
                "elements": result.elements[:6],
            },
        )
        await asyncio.sleep(JUDGED_S)
        episode.rounds_open += self._is_incident_open()
        if episode.is_over:
            self._end(episode)

    def _end(self, episode: Episode) -> None:
        if self.episode is episode:
            self.episode = None
            self._news.set()
