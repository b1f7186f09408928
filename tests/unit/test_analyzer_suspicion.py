"""Episodes: since when evidence counts, and when one is over."""

from __future__ import annotations

import pytest

from pingmesh.analyzer.flows import Flow, FlowBook
from pingmesh.analyzer.suspicion import Episode, suspicious_elements
from pingmesh.messages import LOST, OVERDUE, SLOW, Event
from topology.generate import leaf_spine

S = 10**9
T = 1000 * S


def doubt(e: Episode, i: int, at_s: float, kind: int = LOST) -> bool:
    """One more doubt about the i-th flow, so long after the episode began."""
    return e.add(flow(i), Event(kind, 1, 1, i, 0, 0, 0, 0), T + int(at_s * S))


def flow(i: int) -> Flow:
    return Flow((1, 1, i), "h1/rnic0", "h2/rnic0", 50_000 + i, 0, "default", 1, 10**6)


def episode(*lost_at_s: float) -> Episode:
    """One new doubt at each of these times after it began."""
    e = Episode(T)
    for i, at in enumerate(lost_at_s):
        doubt(e, i, at)
    return e


@pytest.mark.parametrize("strays", [[0.0], [0.0, 3.0, 5.5]])
def test_a_fault_in_the_middle_of_an_episode_is_judged_by_what_came_since(strays: list[float]) -> None:
    at_once = [8.0 + i / 100 for i in range(12)]
    e = episode(*strays, *at_once)
    assert e.onset() == T + 8 * S


@pytest.mark.parametrize(
    "times",
    [
        [0.0],
        [0.0, 0.01, 0.02, 0.05],  # all at once
        [i / 2 for i in range(16)],  # a faint loss, again and again
        [0.0, 7.9],  # two strays
        [0.0, *(i / 100 for i in range(10)), 7.0, 7.5],  # most of them at first
    ],
)
def test_where_the_rate_of_doubts_did_not_rise_everything_counts(times: list[float]) -> None:
    assert episode(*times).onset() == T


def test_an_episode_without_doubts_or_time_has_its_beginning() -> None:
    assert episode().onset() == T
    assert episode(0.0, 0.0).onset() == T


def test_rounds_are_clean_where_nothing_was_lost_and_nothing_new_was_doubted() -> None:
    e = episode(0.0)
    e.confirmed(0, 0)
    assert e.clean_rounds == 0, "there are doubts that no round has looked at"
    e.confirmed(0, e.noted)
    e.confirmed(0, e.noted)
    assert e.clean_rounds == 2
    e.confirmed(1, e.noted)
    assert e.clean_rounds == 0


def test_losses_after_slow_round_trips_are_judged_by_what_came_since_the_first() -> None:
    e = Episode(T)
    for i in range(40):
        doubt(e, i, i / 4, SLOW)
    assert e.onset() == T
    doubt(e, 3, 6.0)
    assert e.onset() == T + 6 * S
    for i in range(12):
        doubt(e, 20 + i, 9.0 + i / 100)
    assert e.onset() == T + 9 * S


def test_what_is_lost_where_it_was_only_slow_or_well_is_looked_at_at_once() -> None:
    e = Episode(T)
    assert not doubt(e, 0, 0.0, SLOW)
    e.rounds = 7
    assert not e.is_quick
    assert not doubt(e, 1, 1.0, SLOW)
    assert doubt(e, 1, 1.1)
    assert e.is_quick
    assert not doubt(e, 2, 1.2), "it is being looked at"
    e.rounds = 10
    e.confirmed(0, e.noted)
    assert not e.is_quick
    assert doubt(e, 3, 2.0)
    assert (e.is_quick, e.clean_rounds) == (True, 0)


def test_the_first_loss_of_an_episode_is_no_news_in_it() -> None:
    e = Episode(T)
    assert not doubt(e, 0, 0.0)


def test_a_probe_that_came_back_late_leaves_no_loss_behind() -> None:
    e = Episode(T)
    doubt(e, 0, 0.0, SLOW)
    doubt(e, 0, 1.0, OVERDUE)
    e.withdraw(flow(0))
    assert e.doubts[flow(0).key].losses == 0
    doubt(e, 0, 2.0)
    assert e.doubts[flow(0).key].losses == 1


def test_a_loss_weighs_more_than_many_slow_round_trips() -> None:
    e = Episode(T)
    pairs = [("h1/rnic0", "h3/rnic0")] * 5 + [("h2/rnic0", "h4/rnic0")]
    for i, (src, dst) in enumerate(pairs):
        kind = SLOW if i < 5 else LOST
        e.add(Flow((i, 1, 0), src, dst, 50_000 + i, 0, "default", 1, 10**6), Event(kind, i, 1, 0, 0, 0, 0, 0), T)
    weights = suspicious_elements(FlowBook(leaf_spine(2, 2, 2, 1)), e.doubts.values(), T)
    assert weights["h2/rnic0 tx"] > weights["h1/rnic0 tx"] > 0
