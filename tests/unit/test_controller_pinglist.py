"""Probe lists as pure functions, on fabrics small enough to check by hand and on random ones."""

from __future__ import annotations

import doctest
from collections import Counter

import pytest
from controller_fakes import EcmpFabric
from hypothesis import given, settings
from hypothesis import strategies as st

from controller import coverage, pinglist, rates, sampling, views
from controller.coverage import measure
from controller.pinglist import INTER_TOR, MESH_MATES, Draft, Entry, start, top_up, tor_mesh, twins
from controller.rates import RatePlan, intervals, trace_rates
from controller.reach import Reach
from controller.rotation import surplus
from controller.sampling import tuples_needed
from pingmesh.messages import TOR_MESH
from topology.build import assemble, cable
from topology.generate import clos3, leaf_spine, rail_optimised
from topology.model import Leg, Rnic, Switch, Topology
from topology.paths import link_shares, rnic_paths, trace_ttls


@pytest.mark.parametrize("module", [sampling, rates, views, pinglist, coverage])
def test_doctests(module: object) -> None:
    assert doctest.testmod(module).failed == 0  # type: ignore[arg-type]


@pytest.mark.parametrize(("paths", "tuples"), [(0, 0), (1, 1), (4, 21), (8, 51), (16, 115), (32, 255), (64, 557)])
def test_eq1_as_published(paths: int, tuples: int) -> None:
    assert tuples_needed(paths) == tuples


def test_eq1_large_numbers_continue_the_exact_ones() -> None:
    values = [tuples_needed(n) for n in (255, 256, 257, 258, 1000)]
    assert values == sorted(values)
    assert values[2] - values[1] <= 2 * (values[1] - values[0]) + 1


# ---------------------------------------------------------------- ToR-mesh


def test_mesh_of_a_small_tor_is_complete() -> None:
    t = leaf_spine(1, 1, 3, 1)
    pairs = {(e.source, e.target) for e in tor_mesh(Reach(t), set(t.rnics))}
    names = ["h1/rnic0", "h2/rnic0", "h3/rnic0"]
    assert pairs == {(a, b) for a in names for b in names if a != b}


def test_mesh_of_a_large_tor_probes_each_equally_often() -> None:
    t = leaf_spine(1, 1, 40, 1)
    mesh = tor_mesh(Reach(t), set(t.rnics))
    assert set(Counter(e.source for e in mesh).values()) == {MESH_MATES}
    assert set(Counter(e.target for e in mesh).values()) == {MESH_MATES}


def test_mesh_changes_only_for_neighbours_of_the_one_that_left() -> None:
    t = leaf_spine(1, 1, 40, 1)
    reach = Reach(t)
    before, after = set(tor_mesh(reach, set(t.rnics))), set(tor_mesh(reach, set(t.rnics) - {"h20/rnic0"}))
    assert before - after == {e for e in before if "h20/rnic0" in (e.source, e.target)}
    assert len(after - before) == MESH_MATES


def test_mesh_leaves_out_the_own_host_and_keeps_directions_on_distinct_ports() -> None:
    t = leaf_spine(1, 1, 2, 2)
    mesh = tor_mesh(Reach(t), set(t.rnics))
    assert {(e.source.split("/")[0], e.target.split("/")[0]) for e in mesh} == {("h1", "h2"), ("h2", "h1")}
    assert len({(*sorted((e.source, e.target)), e.sport) for e in mesh}) == len(mesh) == 8


def test_mesh_rate_is_shared_over_mates() -> None:
    t = leaf_spine(1, 1, 5, 1)
    mine = [e for e in tor_mesh(Reach(t), set(t.rnics)) if e.source == "h1/rnic0"]
    out, factor = intervals(mine, RatePlan())
    assert (set(out.values()), factor) == ({400_000}, 1.0)


# ---------------------------------------------------------------- inter-ToR


def _fabrics() -> dict[str, Topology]:
    return {
        "two ToRs": leaf_spine(2, 2, 2, 1),
        "one host a leaf": leaf_spine(4, 4, 1, 1),
        "4x4x16": leaf_spine(4, 4, 4, 1),
        "three tiers": clos3(2, 2, 2, 4, 2, 1),
        "rails": rail_optimised(2, 2, 2, 2),
        "IPv6": leaf_spine(2, 2, 2, 1, family=6),
        "parallel": leaf_spine(2, 2, 2, 1, parallel=2),
    }


@pytest.mark.parametrize("name", _fabrics())
def test_start_fills_eq1_balanced_over_rnics(name: str) -> None:
    t = _fabrics()[name]
    reach = Reach(t)
    new = start(Draft.of(reach, set(t.rnics), 1))
    for unit, members in reach.members.items():
        sent = Counter(e.source for e in new if e.source in members)
        assert sent.total() >= tuples_needed(max(len(reach._paths(unit, u)) for u in reach.members if u != unit))
        assert max(sent.values()) - min(sent[m] for m in members) <= 2
    for e in new:
        assert t.may_probe(t.rnics[e.source], t.rnics[e.target])
        assert 0xC000 <= e.sport <= 0xFFFF
    assert len({(*sorted((e.source, e.target)), e.sport) for e in new}) == len(new)
    assert start(Draft.of(reach, set(t.rnics), 2, new)) == []


def test_start_probes_inside_and_across_pods() -> None:
    t = clos3(2, 2, 2, 4, 2, 1)
    kinds = Counter(
        e.source_pod == e.target_pod for e in (_Pods.of(t, e) for e in start(Draft.of(Reach(t), set(t.rnics), 1)))
    )
    assert kinds[True] > 0
    assert kinds[False] > 0


class _Pods:
    def __init__(self, source_pod: str, target_pod: str) -> None:
        self.source_pod = source_pod
        self.target_pod = target_pod

    @classmethod
    def of(cls, t: Topology, e: Entry) -> _Pods:
        pods = [t.rnics[n].legs[0].switch.split("-")[0] for n in (e.source, e.target)]
        return cls(*pods)


def _islands() -> Topology:
    """Two fabrics; in the first an IPv6 RNIC pair and two groups beside the plain ones."""

    def rnic(host: str, tor: str, address: str, group: str | None = None) -> Rnic:
        return Rnic(host, "r", (Leg(tor, host, address),), group=group)

    switches = [Switch(n, 2 if n.startswith("s") else 1) for n in ("a1", "a2", "s1", "b1", "b2", "s2")]
    links = [cable(a, b, b, a) for a, b in (("a1", "s1"), ("a2", "s1"), ("b1", "s2"), ("b2", "s2"))]
    rnics = [
        rnic("x1", "a1", "10.0.0.1"),
        rnic("x2", "a2", "10.0.0.2"),
        rnic("x3", "a2", "10.0.0.3", "tenant"),
        rnic("x4", "a1", "10.0.0.4", "tenant"),
        rnic("x5", "a1", "fd00::5"),
        rnic("x6", "a2", "fd00::6"),
        rnic("y1", "b1", "10.0.1.1"),
        rnic("y2", "b2", "10.0.1.2"),
        rnic("z", "a1", "10.0.0.9", "alone"),
    ]
    return assemble("c", switches, rnics, links)


def test_fabrics_groups_and_families_are_kept_apart() -> None:
    t = _islands()
    new = start(Draft.of(Reach(t), set(t.rnics), 1))
    pairs = {frozenset((e.source[:2], e.target[:2])) for e in new}
    assert pairs == {frozenset(p) for p in (("x1", "x2"), ("x3", "x4"), ("x5", "x6"), ("y1", "y2"))}


def test_top_up_gives_missing_times_choices() -> None:
    t = leaf_spine(2, 4, 1, 1)
    reach = Reach(t)
    need = {d.name: 3.0 for d in t.directed_links if d.source == "leaf1"}
    new = top_up(Draft.of(reach, set(t.rnics), 1), need)
    assert len(new) == 3 * 4
    assert {e.source for e in new} == {"h1/rnic0"}


def test_top_up_without_anybody_to_probe_ends() -> None:
    t = leaf_spine(2, 2, 1, 1)
    reach = Reach(t)
    assert top_up(Draft.of(reach, {"h1/rnic0"}, 1), dict.fromkeys(reach.pairs_over, 16.0)) == []


def test_twins_share_the_tuple_and_reach_the_wanted_number() -> None:
    t = leaf_spine(2, 2, 2, 1)
    reach, fabric = Reach(t), EcmpFabric(t)
    entries = top_up(Draft.of(reach, set(t.rnics), 1), dict.fromkeys(reach.pairs_over, 16.0))
    paths = {e.tuple5: tuple(d.name for d in fabric.path(*e.tuple5)) for e in entries}
    new = twins(entries, paths, {1: 4})
    assert {e.tuple5 for e in new} <= {e.tuple5 for e in entries}
    count = Counter(link for e in new for link in paths[e.tuple5])
    assert min(count[d.name] for d in t.directed_links) >= 4
    assert twins([*entries, *new], paths, {1: 4}) == []


def test_surplus_keeps_what_each_link_needs() -> None:
    entries = [Entry("a/r", "b/r", 50_000 + i) for i in range(5)]
    paths = {e.tuple5: ("x->y", "y->z") for e in entries}
    paths[entries[0].tuple5] = ("x->y", "y->w")
    count = Counter(link for p in paths.values() for link in p)
    gone = surplus(entries, paths, count, 3)
    assert gone == [entries[1]]  # y->w has one only; x->y may give two, y->z one
    assert count == {"x->y": 4, "y->z": 3, "y->w": 1}


# ---------------------------------------------------------------- rates and budgets


@given(st.integers(0, 600), st.integers(0, 16), st.floats(5, 500))
@settings(max_examples=60, deadline=None)
def test_the_cap_holds(inter: int, mates: int, max_rate: float) -> None:
    plan = RatePlan(max_rate=max_rate)
    entries = [Entry("a/r", f"b{i}/r", 49_152, TOR_MESH) for i in range(mates)]
    entries += [Entry("a/r", f"c{i}/r", 49_152) for i in range(inter)]
    out, factor = intervals(entries, plan)
    total = sum(1e6 / us for us in out.values())
    assert total <= max_rate
    wanted = (plan.tor_mesh_rate if mates else 0) + inter * plan.flow_rate
    assert factor == 1.0 if wanted <= max_rate * rates.PLANNED_SHARE else factor < 1
    if factor == 1:
        assert total == pytest.approx(wanted, rel=1e-3)


def test_trace_budget_of_the_lab() -> None:
    t = leaf_spine(4, 4, 4, 1)
    reach = Reach(t)
    entries = start(Draft.of(reach, set(t.rnics), 1))
    quiet, suspicion = trace_rates(reach, entries)
    # 16 RNICs, a quarter of their packets to each spine of 100/s: 16 * rate / 4 <= 0.7 * 10
    assert quiet == pytest.approx(1.75, abs=0.06)
    assert suspicion == pytest.approx(5 * quiet, rel=0.05)


def test_trace_budget_counts_all_tiers() -> None:
    t = clos3(2, 2, 2, 4, 2, 1)
    reach = Reach(t)
    entries = start(Draft.of(reach, set(t.rnics), 1))
    rate, _ = trace_rates(reach, entries)
    load: Counter[str] = Counter()
    for name in t.rnics:
        hits: Counter[str] = Counter()
        for e in entries:
            if name in (e.source, e.target):
                ends = (e.source, e.target) if e.source == name else (e.target, e.source)
                hits.update(reach.trace_hits(reach.unit_of[ends[0]], reach.unit_of[ends[1]]))
        for switch, n in hits.items():
            load[switch] += rate * n / hits.total()  # type: ignore[assignment]
    assert max(load.values()) <= 0.7 * 10 * 1.04
    assert max(load.values()) >= 0.6 * 10


# ---------------------------------------------------------------- coverage


def test_coverage_by_hand() -> None:
    a, b, c = (Entry("h1/r", "h2/r", 50_000 + i) for i in range(3))
    report = measure(
        {a: 1_000_000, b: 500_000, c: 1_000_000, Entry("h1/r", "h2/r", 50_000, INTER_TOR, 1): 1000},
        {a.tuple5: ("x->s", "s->y"), b.tuple5: ("x->s", "s->y")},
        ["x->s", "s->y", "y->s"],
        link_rate=3,
        link_tuples=2,
        rnics=["h1/r", "h2/r"],
    )
    assert [(w.link, w.flows, w.rate, w.covered) for w in report.links] == [
        ("s->y", 2, 3.0, True),
        ("x->s", 2, 3.0, True),
        ("y->s", 0, 0.0, False),
    ]
    assert report.share == pytest.approx(2 / 3)
    assert (report.untraced, report.tuples) == (1, 3)
    assert report.uncovered_rnics == ("h1/r",)
    assert report.reasons == {
        "y->s": "0 of 2 tuples take it; 1 tuples are not traced yet",
        "h1/r": "nobody probes it",
    }


def test_coverage_without_switch_links_is_null() -> None:
    assert measure({}, {}, [], link_rate=10, link_tuples=16).share is None


@st.composite
def _small_fabrics(draw: st.DrawFn) -> Topology:
    if draw(st.booleans()):
        size = draw(st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.integers(1, 2)))
        return leaf_spine(*size, parallel=draw(st.integers(1, 2)))
    return clos3(draw(st.integers(1, 2)), draw(st.integers(1, 2)), 2, 2 * draw(st.integers(1, 2)), 1, 1)


@given(_small_fabrics(), st.integers(0, 5), st.data())
@settings(max_examples=40, deadline=None)
def test_lists_on_random_fabrics(t: Topology, seed: int, data: st.DataObject) -> None:
    """Deterministic; allowed pairs only; coverage never claims a link that no tuple walks."""
    reach, fabric = Reach(t), EcmpFabric(t, seed)
    eligible = data.draw(st.sets(st.sampled_from(sorted(t.rnics))))

    def make() -> list[Entry]:
        draft = Draft.of(reach, eligible, seed)
        first = start(draft)
        return [*tor_mesh(reach, eligible), *first, *top_up(draft, dict.fromkeys(reach.pairs_over, 4.0))]

    entries = make()
    assert entries == make()
    assert len(set(entries)) == len(entries)
    for e in entries:
        assert {e.source, e.target} <= eligible
        assert t.may_probe(t.rnics[e.source], t.rnics[e.target])
    traced = {e for e in entries if data.draw(st.booleans())} if len(entries) < 20 else set(entries[::2])
    walked: Counter[str] = Counter()
    paths = {}
    for e in traced:
        if e.kind == INTER_TOR:
            hops = fabric.hops(e.source, e.target, e.sport, reach.mask(e.source, e.target))
            links = tuple(d.name for d in fabric.path(*e.tuple5))
            walk = reach.walk(e.source, e.target, hops)
            assert (walk.links, walk.complete) == (links, True)
            paths[e.tuple5] = walk.links
            walked.update(links)
    report = measure(dict.fromkeys(entries, 1_600_000), paths, reach.pairs_over, link_rate=10, link_tuples=16)
    for w in report.links:
        assert w.flows <= walked[w.link]
        assert not w.covered or walked[w.link] >= 16


@pytest.mark.parametrize("t", [*_fabrics().values(), clos3(3, 3, 2, 4, 1, 1, parallel=2)])
def test_pairs_that_stand_alike_get_what_they_would_get_alone(t: Topology) -> None:
    reach = Reach(t)
    for a in t.rnics:
        for b in t.rnics:
            ua, ub = reach.unit_of[a], reach.unit_of[b]
            if set(ua.tors) & set(ub.tors):
                continue
            own = {d.name: p for d, p in link_shares(rnic_paths(t, t.rnics[a], t.rnics[b])).items()}
            assert reach.shares(ua, ub) == pytest.approx(own)
            assert reach.mask(a, b) == sum(1 << (x - 1) for x in trace_ttls(t, ua.tors[0], ub.tors[0]))
            assert reach.trace_hits(ua, ub) == pytest.approx(reach._count_hits(ua, ub))


def test_bonded_rnics_trace_the_tor_too() -> None:
    switches = [Switch("l1", 1, "10.9.0.1"), Switch("l2", 1, "10.9.0.2"), Switch("l3", 1), Switch("s1", 2)]
    links = [cable(x, "s1", "s1", x, f"10.8.{i}.0", f"10.8.{i}.1") for i, x in enumerate(("l1", "l2", "l3"))]
    bond = Rnic("a", "bond0", (Leg("l1", "a", "10.0.0.1", "10.0.1.1"), Leg("l2", "a", "10.0.0.1", "10.0.1.2")))
    plain = Rnic("b", "r", (Leg("l3", "b", "10.0.0.2", "10.0.2.1"),))
    t = assemble("c", switches, [bond, plain], links)
    reach = Reach(t)
    assert reach.mask("a/bond0", "b/r") & 1  # which ToR it left by is a choice of the host
    assert reach.walk("a/bond0", "b/r", [(1, "10.0.1.2")]).links == ("l2->s1", "s1->l3")
    back = reach.walk("b/r", "a/bond0", [(3, "10.9.0.1")])
    assert (back.links, back.complete) == (("l3->s1", "s1->l1"), True)
    assert reach.walk("b/r", "a/bond0", []).links == ("l3->s1",)
