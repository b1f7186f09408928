"""Episodes: since when evidence counts, and when one is over."""

from __future__ import annotations

import pytest

from pingmesh.analyzer.flows import Flow
from pingmesh.analyzer.suspicion import Episode
from pingmesh.messages import LOST, SLOW, Event

S = 10**9
T = 1000 * S


def doubt(e: Episode, number: int, at_s: float, kind: int = LOST) -> Episode:
    """Add one about flow `number`; the episode that follows."""
    flow = Flow((1, 1, number), "h1/rnic0", "h2/rnic0", 50_000 + number, 0, "default", 1, 10**6)
    event, sent = Event(kind, 1, 1, number, 0, 0, 0, 0), T + int(at_s * S)
    e.add(flow, event, sent)
    return e.renewed(event, sent)


def episode(*lost_at_s: float) -> Episode:
    """One new doubt at each of these times after it began; no round was confirmed."""
    e = Episode(T)
    for i, at in enumerate(lost_at_s):
        assert doubt(e, i, at) is e
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


@pytest.mark.parametrize("number", [0, 7])
def test_the_first_loss_after_mere_slowness_is_another_fault(number: int) -> None:
    e = doubt(doubt(Episode(T), 0, 0.0, SLOW), 1, 0.5, SLOW)
    e.rounds = 3
    other = doubt(e, number, 2.0)
    assert other is not e
    assert (other.began, other.rounds, other.noted) == (T + 2 * S, 0, 1)
    assert [(d.flow.key[2], d.losses, d.slow) for d in other.doubts.values()] == [(number, 1, 0)]
    assert doubt(other, 3, 2.1, SLOW) is other
    assert doubt(other, 4, 2.2) is other, "more losses are the same fault"


def test_many_losses_after_a_stray_one_that_no_round_has_shown_again_are_another_fault() -> None:
    e = episode(0.0)
    e.confirmed(0, e.noted)
    now = e
    for i in range(1, 13):
        now = doubt(now, i, 8.0 + i / 100)
    assert now is not e
    assert now.began == now.onset() == T + int(8.01 * S)
    assert sorted(d.flow.key[2] for d in now.doubts.values()) == list(range(1, 13))


@pytest.mark.parametrize("lost", [[], [1, 0]], ids=["no round yet", "a lossy round"])
def test_losses_that_may_be_of_the_fault_already_sought_go_on_with_its_episode(lost: list[int]) -> None:
    e = episode(0.0)
    for n in lost:
        e.confirmed(n, e.noted)
    for i in range(1, 13):
        assert doubt(e, i, 8.0 + i / 100) is e
