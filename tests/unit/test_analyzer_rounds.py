"""The first rounds of confirmation overlap, later ones follow one another."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from pingmesh.analyzer import confirmation
from pingmesh.analyzer.confirmation import Confirmations
from pingmesh.analyzer.flows import Flow
from pingmesh.analyzer.host_rules import SECOND
from pingmesh.analyzer.rounds import Begun, RoundResult
from pingmesh.analyzer.service import Analyzer
from pingmesh.analyzer.suspicion import CLEAN_ROUNDS, QUICK_ROUNDS, Episode, Request
from pingmesh.config import Settings
from pingmesh.messages import LOST, SLOW, Event, Peer, ProbeClass, ProbeList
from pingmesh.messages import Flow as Entry
from topology.generate import leaf_spine

T = 1_800_000_000 * SECOND
FLOW = Flow((1, 1, 0), "h1/rnic0", "h2/rnic0", 50_000, 0, "default", 1, 100_000)
DOUBT = Event(LOST, *FLOW.key, 0, T, 0, 0)


class Rounds:
    """Stands in for the product's: rounds are sent at once, and end when they are told to."""

    def __init__(self) -> None:
        self.ends: list[asyncio.Future[RoundResult]] = []
        self.taken: list[RoundResult] = []

    def begin(self, episode: Episode) -> Begun:
        episode.rounds += 1
        self.ends.append(asyncio.get_running_loop().create_future())
        return Begun(T + len(self.ends), episode.rounds, episode.noted, [], [], [], 0.0)

    async def finish(self, begun: Begun, episode: Episode) -> RoundResult:
        return await self.ends[begun.began - T - 1]

    def end(self, number: int) -> None:
        self.ends[number - 1].set_result(RoundResult(T + number))

    async def begun(self, number: int) -> bool:
        """Whether so many rounds begin soon, and no more."""
        for _ in range(20):
            await asyncio.sleep(0)
        await asyncio.sleep(0.01)
        return len(self.ends) == number


async def suspect(c: Confirmations, kind: int = LOST) -> None:
    """A probe is lost, or slow; a moment later the first round begins."""
    c.doubt(FLOW, Event(kind, *FLOW.key, 0, T, 0, 0), T)
    await asyncio.sleep(0.04)


@asynccontextmanager
async def confirming(monkeypatch: pytest.MonkeyPatch, kind: int = LOST) -> AsyncIterator[tuple[Confirmations, Rounds]]:
    monkeypatch.setattr(confirmation, "ROUND_GAP_S", 0.0)
    monkeypatch.setattr(confirmation, "JUDGED_S", 0.0)
    rounds = Rounds()
    c = Confirmations(rounds, lambda: True, rounds.taken.append, lambda: False)  # type: ignore[arg-type]
    task = asyncio.create_task(c.run())
    await suspect(c, kind)
    yield c, rounds
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_quick_rounds_are_sent_while_another_waits_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    async with confirming(monkeypatch) as (_, rounds):
        assert await rounds.begun(2)
        rounds.end(2)
        assert await rounds.begun(2), "the first still waits"
        rounds.end(1)
        for number in range(QUICK_ROUNDS, CLEAN_ROUNDS + 1):
            assert await rounds.begun(number), "one after another"
            rounds.end(number)


async def test_what_is_doubted_while_a_round_waits_keeps_the_episode_from_being_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with confirming(monkeypatch) as (c, rounds):
        assert await rounds.begun(2)
        episode = c.episode
        assert episode is not None
        episode.add(FLOW, DOUBT, T)
        rounds.end(1)
        rounds.end(2)
        assert await rounds.begun(3)
        assert episode.clean_rounds == 0, "both were planned before"
        for number in range(3, 3 + CLEAN_ROUNDS):
            assert c.episode is episode
            rounds.end(number)
            await rounds.begun(0)
        assert c.episode is None


async def test_a_new_episode_does_not_wait_for_the_last_ones_round(monkeypatch: pytest.MonkeyPatch) -> None:
    async with confirming(monkeypatch) as (c, rounds):
        assert await rounds.begun(2)
        assert c.episode is not None
        c.episode.doubts.clear()
        rounds.end(1)
        assert await rounds.begun(2)
        assert c.episode is None
        await suspect(c)
        assert await rounds.begun(4)
        rounds.end(2)
        assert await rounds.begun(4)
        assert [r.began - T for r in rounds.taken] == [1, 2], "what it had sent is counted, if late"


async def test_a_loss_amid_slow_round_trips_is_not_kept_waiting_by_their_round(monkeypatch: pytest.MonkeyPatch) -> None:
    async with confirming(monkeypatch, SLOW) as (c, rounds):
        episode = c.episode
        assert episode is not None
        for number in range(1, QUICK_ROUNDS + 1):
            rounds.end(number)
            await rounds.begun(0)
        assert await rounds.begun(QUICK_ROUNDS + 1)
        c.doubt(FLOW, Event(SLOW, *FLOW.key, 0, T, 0, 0), T)
        assert await rounds.begun(QUICK_ROUNDS + 1), "slow as before"
        c.doubt(FLOW, DOUBT, T)
        assert await rounds.begun(QUICK_ROUNDS + 3), "two of its own, beside the one that still waits"
        c.doubt(FLOW, DOUBT, T)
        assert await rounds.begun(QUICK_ROUNDS + 3), "that there are more is no news"
        rounds.end(QUICK_ROUNDS + 2)
        rounds.end(QUICK_ROUNDS + 3)
        assert await rounds.begun(QUICK_ROUNDS + 4)
        assert c.episode is episode


async def test_an_episode_that_an_earlier_round_ends_is_over_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async with confirming(monkeypatch, SLOW) as (c, rounds):
        episode = c.episode
        assert episode is not None
        for number in range(1, QUICK_ROUNDS + 1):
            rounds.end(number)
            await rounds.begun(0)
        c.doubt(FLOW, DOUBT, T)
        assert await rounds.begun(QUICK_ROUNDS + 3)
        episode.doubts.clear()
        rounds.end(QUICK_ROUNDS + 1)
        assert await rounds.begun(QUICK_ROUNDS + 3)
        assert c.episode is None
        await suspect(c)
        assert await rounds.begun(QUICK_ROUNDS + 5), "those that still wait hold nothing up"


async def test_a_round_that_fails_ends_its_episode_and_not_the_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    async with confirming(monkeypatch) as (c, rounds):
        assert await rounds.begun(2)
        rounds.ends[0].set_exception(RuntimeError("unreadable"))
        assert await rounds.begun(2)
        assert c.episode is None
        await suspect(c)
        assert await rounds.begun(4)


@pytest.mark.parametrize(
    ("max_rate", "interval_us", "flows", "seconds"),
    [
        (150.0, 100_000, 1, 0.2),  # 10 probes each 20 ms
        (150.0, 20_000, 3, 0.3),  # 30 at 100/s
        (150.0, 20_000, 6, 0.4),  # agents give up at some time
        (50.0, 20_000, 1, 0.4),  # 10 at 15/s
    ],
)
def test_the_next_round_waits_until_the_rate_cap_let_this_one_out(
    max_rate: float, interval_us: int, flows: int, seconds: float
) -> None:
    a = Analyzer(Settings(cluster="lab"), leaf_spine(2, 2, 1, 1))
    peers = [Peer(2, "h2/rnic0", "::ffff:10.0.0.1", 20, 1, 1, 4096)]
    entry = Entry(0, 2, 50_000, 0, 1, interval_us, 2)
    a.book.add_list(
        ProbeList(
            cluster="lab", host="h1", device="rnic0", number=1, list_version=1, classes=[ProbeClass()],
            flows=[entry], peers=peers, max_rate=max_rate,
        )
    )  # fmt: skip
    request = Request(1, 1, tuple(range(flows)), -1)
    assert a._rounds._sending_s([request], 10) == pytest.approx(seconds)
