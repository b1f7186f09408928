"""Episodes: since when evidence counts, and when one is over."""

from __future__ import annotations

import pytest

from pingmesh.analyzer.flows import Flow
from pingmesh.analyzer.suspicion import Episode
from pingmesh.messages import LOST, Event

S = 10**9
T = 1000 * S


def episode(*lost_at_s: float) -> Episode:
    """One new doubt at each of these times after it began."""
    e = Episode(T)
    for i, at in enumerate(lost_at_s):
        flow = Flow((1, 1, i), "h1/rnic0", "h2/rnic0", 50_000 + i, 0, "default", 1, 10**6)
        e.add(flow, Event(LOST, 1, 1, i, 0, 0, 0, 0), T + int(at * S))
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
