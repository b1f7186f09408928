"""A congested link in a real lab: named in its direction, nothing else blamed, over when the queue is gone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from loop_rig import Since, prove, ready, running

from pingmesh.lab.client import Lab
from topology.generate import leaf_spine

pytestmark = pytest.mark.lab

QUIET_S = 30.0


@pytest.fixture(scope="module")
def congestible() -> Iterator[Lab]:
    with running(leaf_spine(3, 3, 2, 1)) as lab:
        yield ready(lab)


def test_a_congested_link_is_named_in_its_direction_and_is_over_when_the_queue_is_gone(congestible: Lab) -> None:
    named = prove(congestible, "link", "leaf1", "spine2", "--congest", "20mbit")
    assert named["evidence"]["excess_us"] > 2_000
    assert named["evidence"]["usual_us"] < 2_000


def test_what_comes_down_to_a_leaf_may_be_congested_too(congestible: Lab) -> None:
    prove(congestible, "link", "spine3", "leaf2", "--congest", "20mbit")


def test_nothing_is_late_in_a_quiet_lab(congestible: Lab) -> None:
    since = Since(ready(congestible))
    since.watch(QUIET_S, lambda: since.check_fabric("nothing was broken"))
