from __future__ import annotations

import pytest

from pingmesh.analyzer.flows import ACK, PROBE
from pingmesh.analyzer.flows import Flow as Walked
from pingmesh.analyzer.host_rules import SECOND
from pingmesh.analyzer.samples import Sample
from pingmesh.analyzer.service import QUIET_NS, Analyzer
from pingmesh.analyzer.suspicion import Episode
from pingmesh.config import Settings
from pingmesh.messages import (
    PROBER_COLUMNS,
    RESPONDER_COLUMNS,
    WINDOW_NS,
    Flow,
    Peer,
    ProbeClass,
    ProbeList,
    ProberRows,
    Verdict,
    pack_columns,
)
from topology.generate import leaf_spine

T = 1_800_000_000 * SECOND


@pytest.fixture
async def analyzer() -> Analyzer:
    return Analyzer(Settings(cluster="lab"), leaf_spine(2, 2, 1, 1))


async def test_evidence_is_judged_from_the_beginning_of_an_episode(analyzer: Analyzer) -> None:
    analyzer._confirmations.episode = Episode(T)
    assert analyzer._since(T + 90 * SECOND) == T


async def test_losses_of_an_incident_that_is_over_are_not_judged_again(analyzer: Analyzer) -> None:
    over = T + 20 * SECOND
    analyzer._judged_from = over
    analyzer._confirmations.episode = Episode(T)
    assert analyzer._since(T + 30 * SECOND) == over
    analyzer._confirmations.episode = Episode(over + SECOND)
    assert analyzer._since(T + 30 * SECOND) == over + SECOND
    analyzer._confirmations.episode = None
    assert analyzer._since(T + 30 * SECOND) == over
    assert analyzer._since(over + QUIET_NS + SECOND) == over + SECOND


@pytest.mark.parametrize(("rtt_ms", "is_bad"), [(100, False), (400, True)])
async def test_what_is_slow_beside_an_incident_of_delay_is_less_than_half_of_it(
    analyzer: Analyzer, rtt_ms: int, is_bad: bool
) -> None:
    """On a busy machine everything takes long now and then: the incident must come to an end all the same."""
    slow = Verdict(component="h1/rnic0", component_type="rnic", symptom="high_rtt", confidence=0.99)
    slow.evidence = {"usual_us": 5_000.0, "excess_us": 600_000.0}
    analyzer._tracker.adopt(slow, frozenset({"h1/rnic0 tx"}), T)
    flow = Walked((1, 1, 0), "h1/rnic0", "h2/rnic0", 50_000, 0, "default", 1, 100_000)
    at = T + 60 * SECOND
    analyzer._note([Sample(at, at + SECOND, flow, "default", PROBE, 10, 0, rtt_ms * 1_000_000, 10)])
    (track,) = analyzer._tracker.open
    assert track.last_bad == (at + SECOND if is_bad else T)


@pytest.mark.parametrize("is_open", [True, False])
async def test_with_an_open_incident_losses_and_slow_round_trips_are_noted(analyzer: Analyzer, is_open: bool) -> None:
    link = Verdict(component="leaf1--spine1", component_type="link", symptom="drop", confidence=0.99)
    if is_open:
        analyzer._tracker.adopt(link, frozenset({"leaf1->spine1"}), T)
    flows = [Flow(i, 2, 50000 + i, 0, 1, 100_000, 2) for i in range(3)]
    peers = [Peer(2, "h2/rnic0", "::ffff:10.0.0.1", 20, 1, 1, 4096)]
    message = ProbeList(
        cluster="lab",
        host="h1",
        device="rnic0",
        number=1,
        list_version=7,
        classes=[ProbeClass()],
        flows=flows,
        peers=peers,
    )
    analyzer.book.add_list(message)
    window = T // WINDOW_NS
    end = (window + 1) * WINDOW_NS
    # The second flow lost five probes; the third is slow, the first is neither.
    sent, back = [50, 50, 50], [50, 45, 50]
    rtt = [n * us * 10 for n, us in zip(back, (20, 20, 90_000), strict=True)]
    zero = [0, 0, 0]
    columns = pack_columns(PROBER_COLUMNS, [[0, 1, 2], sent, back, back, back, [0, 5, 0], zero, zero, zero, rtt, rtt])
    store = analyzer._store
    store.add_prober(ProberRows(rnic=1, epoch=5, list_version=7, window=window, columns=columns), 0, end)
    three = [[n] * 3 for n in (1, 5, 7, window)]
    store.add_responder(pack_columns(RESPONDER_COLUMNS, [*three, [0, 1, 2], back, back, back, zero]), end)
    found = analyzer._remarkable(store.take_in(end, lambda host: end + WINDOW_NS))
    seen = {(s.flow.sport - 50000, s.role, s.lost, s.rtt_ns) for s in found}
    wanted = {(1, PROBE, 5, 20_000), (1, ACK, 0, 0), (2, PROBE, 0, 90_000_000), (2, ACK, 0, 0)}
    assert seen == (wanted if is_open else set())
