"""Simulated fabrics: paths are ECMP paths, rates are what lists ask for, faults and noise show as they should."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pingmesh.simulate.fabric import Fabric, NoPathError, distances, draw_paths, names_of
from pingmesh.simulate.faults import KINDS, Fault, FaultError, Placed, Places
from pingmesh.simulate.probes import INTER_TOR, TOR_MESH, Lists, draw_probes, link_load
from pingmesh.simulate.tables import Sums, Tables
from pingmesh.simulate.troubles import QUIET, Noise, Spans, draw_troubles
from pingmesh.simulate.world import BACK, THERE, Counts, World
from topology.build import assemble
from topology.generate import clos3, leaf_spine, rail_optimised
from topology.model import Leg, Rnic, Topology
from topology.paths import path_elements, rnic_paths

SMALL = clos3(3, 2, 2, 4, 3, 1)


def world(
    *faults: Fault,
    topology: Topology = SMALL,
    noise: Noise = QUIET,
    lists: Lists | None = None,
    seed: int = 1,
    **more: bool,
) -> World:
    rng = np.random.default_rng(seed)
    fabric = Fabric(topology)
    places = Places(fabric)
    flows = draw_probes(fabric, rng, lists)
    placed = [places.place(f) for f in faults]
    return World(fabric, flows, placed, draw_troubles(fabric, noise, 120.0, rng), rng, **more)


def crosses(w: World, element: str, role: int) -> np.ndarray:
    return (w.now[role] == w.fabric.element_index[element]).any(axis=1)


@pytest.mark.parametrize(
    "topology",
    [leaf_spine(4, 4, 2, 1), SMALL, leaf_spine(3, 2, 2, 1, parallel=2), rail_optimised(2, 3, 2, 4)],
    ids=["leaf-spine", "clos3", "parallel", "rail"],
)
def test_paths_drawn_are_all_the_ecmp_paths(topology: Topology) -> None:
    fabric = Fabric(topology)
    rng = np.random.default_rng(2)
    n = 6000
    src, dst = rng.integers(len(fabric.rnics), size=(2, n))
    src, dst = src[src != dst], dst[src != dst]
    paths = draw_paths(fabric, fabric.legs(src, rng.random(len(src))), fabric.legs(dst, rng.random(len(src))), rng)
    drawn: dict[tuple[str, str], set[tuple[str, ...]]] = {}
    for a, b, path in zip(src.tolist(), dst.tolist(), paths.tolist(), strict=True):
        drawn.setdefault((fabric.rnics[a], fabric.rnics[b]), set()).add(names_of(fabric, path))
    possible = {
        pair: {path_elements(topology, *pair, p) for p in rnic_paths(topology, *(topology.rnics[n] for n in pair))}
        for pair in drawn
    }
    assert all(drawn[pair] <= possible[pair] for pair in drawn)
    assert sum(map(len, drawn.values())) > 0.9 * sum(map(len, possible.values()))


def test_ecmp_splits_evenly() -> None:
    fabric = Fabric(leaf_spine(2, 4, 1, 1))
    paths = draw_paths(fabric, np.zeros(4000, int), np.ones(4000, int), np.random.default_rng(3))
    counts = np.unique(paths[:, 1], return_counts=True)[1]
    assert len(counts) == 4
    assert counts.min() > 900


def test_no_path_is_said() -> None:
    fabric = Fabric(leaf_spine(2, 1, 1, 1))
    ways = distances(fabric, np.ones(4, bool))
    with pytest.raises(NoPathError, match="no path leads from h1/rnic0 to h2/rnic0"):
        draw_paths(fabric, np.array([0]), np.array([1]), np.random.default_rng(), ways)


def test_every_directed_link_carries_its_rate() -> None:
    w = world(topology=leaf_spine(8, 4, 4, 1))
    load = link_load(w.fabric, w.flows)
    assert load.min() > 9.9
    assert load.max() < 10.1
    mesh = (w.flows.kind == TOR_MESH) & (w.flows.cls == 0)
    assert np.allclose(np.bincount(w.flows.src[mesh], w.flows.rate[mesh]), 10.0)


def test_rail_mates_are_of_other_hosts() -> None:
    w = world(topology=rail_optimised(2, 2, 3, 4))
    f = w.flows
    assert np.all(w.fabric.host_of[f.src] != w.fabric.host_of[f.dst])


def test_a_quiet_fabric_loses_nothing_and_sends_at_its_rate() -> None:
    w = world()
    counts = [w.step(t, t + 5.0) for t in range(0, 50, 5)]
    sent = sum(int(c.sent.sum()) for c in counts)
    assert sent == pytest.approx(50 * w.flows.rate.sum(), rel=0.01)
    assert all(np.array_equal(c.sent, c.answered) and np.all(c.acks_back == 2 * c.sent) for c in counts)
    assert all(c.valid.all() and c.both.all() for c in counts)


def test_loss_is_on_the_element_and_at_the_rate() -> None:
    link = "p1-agg1->p1-leaf2"
    w = world(Fault(kind="loss", component="p1-agg1--p1-leaf2", direction=link, rate=0.3, start_s=10.0))
    before, after = w.step(0.0, 10.0), w.step(10.0, 110.0)
    assert np.array_equal(before.sent, before.received)
    there, back = crosses(w, link, THERE), crosses(w, link, BACK)
    lost = after.sent - after.received
    assert lost[~there].sum() == 0
    assert lost[there].sum() / after.sent[there].sum() == pytest.approx(0.3, abs=0.04)
    acks_lost = after.acks_sent - after.acks_back
    assert acks_lost[~back].sum() == 0
    assert acks_lost[back].sum() / after.acks_sent[back].sum() == pytest.approx(0.3, abs=0.04)
    # Both ACKs of a probe must be lost for it to stay unanswered.
    unanswered = (after.received - after.answered)[back]
    assert unanswered.sum() / after.received[back].sum() == pytest.approx(0.09, abs=0.03)


def test_half_a_window_of_a_fault_is_half_its_loss() -> None:
    w = world(Fault(kind="blackhole", component="h1/rnic0", direction="rx", start_s=50.0))
    c = w.step(0.0, 100.0)
    mine = w.flows.dst == 0
    assert (c.sent - c.received)[mine].sum() / c.sent[mine].sum() == pytest.approx(0.5, abs=0.05)


def test_bursts_come_together_and_keep_the_mean() -> None:
    w = world(Fault(kind="bursty_loss", component="h1/rnic0", direction="rx", rate=0.1))
    mine = w.flows.dst == 0
    shares = np.array(
        [((c.sent - c.received)[mine].sum() / c.sent[mine].sum()) for c in (w.step(t, t + 1.0) for t in range(400))]
    )
    assert shares.mean() == pytest.approx(0.1, abs=0.03)
    probes = w.flows.rate[mine].sum()
    assert shares.var() > 3 * 0.1 * 0.9 / probes  # binomial loss would have this variance


@pytest.mark.parametrize(("kind", "hit"), [("pfc_deadlock", {0, 1}), ("large_packet_drop", {1}), ("class_drop", {2})])
def test_faults_of_classes(kind: str, hit: set[int]) -> None:
    link = "core1->p1-agg1"
    w = world(
        Fault(kind=kind, component="core1--p1-agg1", direction=link), lists=Lists(large_share=0.5, other_share=0.5)
    )
    c = w.step(0.0, 20.0)
    there = crosses(w, link, THERE)
    for cls in range(3):
        rows = there & (w.flows.cls == cls)
        assert (c.received[rows].sum() == 0) == (cls in hit)
        assert c.sent[rows].sum() > 0


def test_an_acl_hits_whole_tuples_in_all_classes() -> None:
    w = world(Fault(kind="acl", component="core1", share=0.4), lists=Lists(large_share=1.0))
    c = w.step(0.0, 60.0)
    switch = w.faults[0].elements
    there = np.isin(w.now[THERE], switch).any(axis=1)
    dead = there & (c.received == 0)
    assert np.all((c.received == c.sent) | dead)
    assert dead.sum() / there.sum() == pytest.approx(0.4, abs=0.12)
    half = len(w.flows) // 2
    assert np.array_equal(dead[:half], dead[half:])  # the second half are the same tuples as large packets


def test_misroute_spares_the_tor() -> None:
    w = world(Fault(kind="misroute", component="h1/rnic0", direction="tx"))
    c = w.step(0.0, 60.0)
    mine = w.flows.src == 0
    far = w.flows.kind == INTER_TOR
    assert c.received[mine & far].sum() == 0
    assert np.array_equal(c.received[mine & ~far], c.sent[mine & ~far])
    assert c.acks_back[(w.flows.dst == 0) & far].sum() == 0


@pytest.mark.parametrize("kind", ["gid_missing", "host_down"])
def test_what_cannot_send_sends_nothing(kind: str) -> None:
    w = world(Fault(kind=kind, component="h1" if kind == "host_down" else "h1/rnic0"))
    c = w.step(0.0, 20.0)
    assert c.sent[w.flows.src == 0].sum() == 0
    assert c.answered[w.flows.dst == 0].sum() == 0
    assert c.sent[w.flows.dst == 0].sum() > 0
    if kind == "host_down":
        assert not c.both[w.flows.dst == 0].any()
        assert not c.valid[w.flows.dst == 0].any()


def test_flapping_is_half_of_the_time() -> None:
    w = world(Fault(kind="flap", component="h1/rnic0", start_s=10.0))
    (fault,) = w.faults
    assert fault.active(0.0, 10.0) == 0.0
    assert fault.active(10.0, 12.0) == 1.0
    assert fault.active(12.0, 14.0) == 0.0
    assert fault.active(10.0, 50.0) == pytest.approx(0.5)


def test_delay_shows_in_round_trips_only() -> None:
    link = "p1-leaf1->p1-agg1"
    w = world(Fault(kind="hash_collision", component="p1-agg1--p1-leaf1", direction=link, delay_us=5000.0))
    c = w.step(0.0, 20.0)
    hit = crosses(w, link, THERE) | crosses(w, link, BACK)
    mean = c.rtt_sum_ns / np.maximum(c.answered, 1)
    assert np.array_equal(c.sent, c.answered)
    assert mean[~hit].max() < 50_000
    assert mean[hit].mean() == pytest.approx(5e6, rel=0.1)


def test_a_link_that_is_down_is_left_and_traces_say_so_later() -> None:
    w = world(Fault(kind="link_down", component="p1-agg1--p1-leaf1", start_s=10.0, end_s=100.0))
    cable = w.faults[0].elements
    before = [w.now[role].copy() for role in (THERE, BACK)]
    w.step(0.0, 10.0)
    first = w.step(10.0, 10.5)
    c = w.step(11.0, 12.0)
    assert (first.sent - first.received).sum() > 0
    assert np.array_equal(c.sent, c.received)
    assert not any(np.isin(w.now[role], cable).any() for role in (THERE, BACK))
    assert np.isin(w.told[THERE], cable).any()
    w.step(80.0, 81.0)
    assert not np.isin(w.told[THERE], cable).any()
    moved = (w.now[THERE] != before[THERE]).any(axis=1)
    assert not w.step(81.0, 82.0).known_there[moved].all()
    w.step(101.0, 102.0)
    assert all(np.array_equal(w.now[role], before[role]) for role in (THERE, BACK))


def test_stalls_are_set_aside_when_agents_tell() -> None:
    w = world(noise=replace(QUIET, stall_rate=1 / 30, stall_s=1.0))
    counts = [w.step(t, t + 1.0) for t in range(100)]
    lost = sum(int((c.sent - c.answered).sum()) for c in counts)
    counted = sum(int(((c.sent - c.answered) * c.valid).sum()) for c in counts)
    assert lost > 50
    assert counted == 0


def test_missing_reports_become_round_trips() -> None:
    w = world(noise=replace(QUIET, missing_report=0.5))
    c = w.step(0.0, 5.0)
    sums = Sums.of(len(w.flows), [c])
    assert 0 < sums.trips.sum() < c.sent.sum()
    assert sums.trips.sum() + sums.sent.sum() == c.sent.sum()


def test_spray_spreads_the_loss() -> None:
    fault = Fault(kind="blackhole", component="core1--p1-agg1", direction="p1-agg1->core1")
    w = world(fault, spray=True)
    c = w.step(0.0, 60.0)
    climbs = crosses(w, "p1-agg1->core1", THERE) | crosses(w, "p1-agg1->core2", THERE)
    climbs |= crosses(w, "p1-agg2->core3", THERE) | crosses(w, "p1-agg2->core4", THERE)
    lost = (c.sent - c.received)[climbs].sum() / c.sent[climbs].sum()
    assert lost == pytest.approx(0.25, abs=0.04)
    assert np.all(c.received[climbs & (c.sent > 20)] > 0)
    assert not c.known_there.any()


def test_tables_name_the_elements() -> None:
    w = world(Fault(kind="blackhole", component="h1/rnic0", direction="rx"))
    tables = Tables(w, {})
    sums = Sums.of(len(w.flows), [w.step(0.0, 30.0)])
    t = tables.losses(sums)
    names = list(tables.index)
    rx = tables.index["h1/rnic0 rx"]
    for row in range(t.rows):
        first, last = t.set_ptr[t.row_set[row]], t.set_ptr[t.row_set[row] + 1]
        assert last == first + 1
        path = t.path_elements[t.path_ptr[first] : t.path_ptr[first + 1]]
        assert names[path[0]].endswith(" tx")
        assert names[path[-1]].endswith(" rx")
        assert t.lost[row] == (t.sent[row] if rx in path else 0)
    hidden = tables.losses(sums, hidden=True)
    assert hidden.rows == t.rows
    assert hidden.lost.sum() == t.lost.sum()
    assert np.diff(hidden.set_ptr).max() == 4


def test_confirmation_probes_may_be_of_another_class() -> None:
    w = world(Fault(kind="large_packet_drop", component="h1/rnic0", direction="rx"))
    rows = np.flatnonzero((w.flows.dst == 0) & (w.flows.cls == 0))[:2]
    twice = np.concatenate((rows, rows))
    c = w.probe(twice, np.full(4, 20), 0.0, 1.0, np.array([0, 0, 1, 1]))
    assert c.received.tolist() == [20, 20, 0, 0]
    sums = Sums.of(len(w.flows), [c])
    mine = np.isin(sums.flows, rows) & (sums.sent > 0)
    assert (
        sorted(zip(sums.sent[mine].tolist(), sums.received[mine].tolist(), strict=True))
        == [(20, 0)] * 2 + [(20, 20)] * 2
    )


def dual_tor() -> Topology:
    base = leaf_spine(4, 2, 1, 1)
    leaves = [s for s in base.switches if s.startswith("leaf")]
    rnics = [
        Rnic(f"h{i}", "bond0", tuple(Leg(leaves[2 * (i % 2) + k], f"h{i}", f"10.9.0.{i + 1}") for k in range(2)))
        for i in range(6)
    ]
    return assemble("dual", base.switches.values(), rnics, base.links)


def test_dual_tor_paths_name_their_leg() -> None:
    w = world(topology=dual_tor())
    names = {w.fabric.element_names[e] for e in np.unique(w.flows.there[:, 0])}
    assert "h0/bond0@leaf1 tx" in names
    assert "h0/bond0@leaf2 tx" in names
    c: Counts = w.step(0.0, 5.0)
    assert np.array_equal(c.sent, c.received)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (Fault(kind="los", component="h1"), "kind 'los' is unknown; did you mean `loss`"),
        (Fault(kind="loss", component="core9"), "component 'core9' is not in the topology; did you mean `core"),
        (Fault(kind="rnic_down", component="core1"), "rnic_down does not happen to a switch"),
        (
            Fault(kind="loss", component="h1/rnic0", direction="up"),
            "direction 'up' of h1/rnic0 does not exist; allowed: ",
        ),
    ],
)
def test_faults_that_cannot_be(fault: Fault, message: str) -> None:
    with pytest.raises(FaultError, match=message):
        Places(Fabric(SMALL)).place(fault)


def test_every_kind_can_be_drawn_and_the_paper_is_covered() -> None:
    places = Places(Fabric(leaf_spine(2, 2, 2, 2)))
    rng = np.random.default_rng(5)
    for name, kind in KINDS.items():
        placed: Placed = places.place(places.draw(name, rng))
        truth = placed.truth()
        assert truth["component_type"] in kind.places
        assert truth["symptom"] == kind.symptom
        assert len(placed.elements)
    assert {c for k in KINDS.values() for c in k.causes} == set(range(1, 15))


def test_spans() -> None:
    spans = Spans(np.array([0, 0, 2]), np.array([1.0, 3.0, 9.0]), np.array([2.0, 5.0, 11.0]))
    assert spans.overlap(0.0, 4.0, 3).tolist() == [0.5, 0.0, 0.0]
    assert spans.longest(0.0, 10.0, 3).tolist() == [2.0, 0.0, 0.0]
