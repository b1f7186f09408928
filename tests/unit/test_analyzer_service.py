from __future__ import annotations

import pytest

from pingmesh.analyzer.host_rules import SECOND
from pingmesh.analyzer.service import QUIET_NS, Analyzer
from pingmesh.analyzer.suspicion import Episode
from pingmesh.config import Settings
from topology.generate import leaf_spine

T = 1_800_000_000 * SECOND


@pytest.fixture
async def analyzer() -> Analyzer:
    return Analyzer(Settings(cluster="lab"), leaf_spine(2, 2, 1, 1))


async def test_evidence_is_judged_from_the_beginning_of_an_episode(analyzer: Analyzer) -> None:
    analyzer._episode = Episode(T)
    assert analyzer._since(T + 90 * SECOND) == T


async def test_losses_of_an_incident_that_is_over_are_not_judged_again(analyzer: Analyzer) -> None:
    over = T + 20 * SECOND
    analyzer._judged_from = over
    analyzer._episode = Episode(T)
    assert analyzer._since(T + 30 * SECOND) == over
    analyzer._episode = Episode(over + SECOND)
    assert analyzer._since(T + 30 * SECOND) == over + SECOND
    analyzer._episode = None
    assert analyzer._since(T + 30 * SECOND) == over
    assert analyzer._since(over + QUIET_NS + SECOND) == over + SECOND
