"""ECMP sets, traced hops and element names on fabrics small enough to check by hand."""

from __future__ import annotations

import doctest
import time
from collections import Counter
from itertools import product

import pytest

import topology.paths
from topology import files
from topology.generate import clos3, leaf_spine, rail_optimised
from topology.model import Path, Topology
from topology.paths import (
    ecmp_halves,
    ecmp_paths,
    link_shares,
    path_elements,
    path_from_hops,
    rnic_paths,
    tops,
    trace_ttls,
)

POD = "p1-leaf1", "p2-leaf1"


def named(paths: tuple[Path, ...]) -> set[tuple[str, ...]]:
    return {tuple(d.name for d in path) for path in paths}


def of(*links: str, tiers: dict[str, int]) -> Topology:
    """A topology from `a-b` strings, one host under each tier-1 switch."""
    switches = "".join(f"  {name}: {{tier: {tier}}}\n" for name, tier in tiers.items())
    hosts = "".join(f"  h{n}: {{rnics: {{r: {{switch: {n}}}}}}}\n" for n, tier in tiers.items() if tier == 1)
    ends = [link.split("-") for link in links]
    cables = "".join(f"  - {{a: {a}, b: {b}}}\n" for a, b in ends)
    return files.parse(f"version: 1\ncluster: c\nswitches:\n{switches}hosts:\n{hosts}links:\n{cables}")


def test_leaf_spine_has_one_path_per_spine() -> None:
    t = leaf_spine(3, 2, 1, 1)
    assert named(ecmp_paths(t, "leaf1", "leaf3")) == {
        ("leaf1->spine1", "spine1->leaf3"),
        ("leaf1->spine2", "spine2->leaf3"),
    }
    assert trace_ttls(t, "leaf1", "leaf3") == (2,)


def test_one_switch_is_an_empty_path_and_needs_no_trace() -> None:
    t = leaf_spine(2, 2, 2, 1)
    assert ecmp_paths(t, "leaf1", "leaf1") == ((),)
    assert trace_ttls(t, "leaf1", "leaf1") == ()


def test_three_tiers_inside_a_pod_do_not_go_over_the_core() -> None:
    t = clos3(2, 2, 2, 4, 1, 1)
    assert named(ecmp_paths(t, "p1-leaf1", "p1-leaf2")) == {
        ("p1-leaf1->p1-agg1", "p1-agg1->p1-leaf2"),
        ("p1-leaf1->p1-agg2", "p1-agg2->p1-leaf2"),
    }
    assert trace_ttls(t, "p1-leaf1", "p1-leaf2") == (2,)


def test_three_tiers_across_pods() -> None:
    t = clos3(2, 2, 2, 4, 1, 1)
    assert named(ecmp_paths(t, *POD)) == {
        ("p1-leaf1->p1-agg1", "p1-agg1->core1", "core1->p2-agg1", "p2-agg1->p2-leaf1"),
        ("p1-leaf1->p1-agg1", "p1-agg1->core2", "core2->p2-agg1", "p2-agg1->p2-leaf1"),
        ("p1-leaf1->p1-agg2", "p1-agg2->core3", "core3->p2-agg2", "p2-agg2->p2-leaf1"),
        ("p1-leaf1->p1-agg2", "p1-agg2->core4", "core4->p2-agg2", "p2-agg2->p2-leaf1"),
    }
    assert trace_ttls(t, *POD) == (2, 3)


def test_one_core_per_plane_leaves_no_choice_at_the_core() -> None:
    assert trace_ttls(clos3(2, 2, 2, 2, 1, 1), *POD) == (2,)


def test_parallel_cables_multiply_paths_and_must_be_traced_on_the_way_down_too() -> None:
    t = leaf_spine(2, 1, 1, 1, parallel=2)
    assert named(ecmp_paths(t, "leaf1", "leaf2")) == {
        (f"leaf1:spine1-{i}->spine1:leaf1-{i}", f"spine1:leaf2-{j}->leaf2:spine1-{j}") for i in (1, 2) for j in (1, 2)
    }
    assert trace_ttls(t, "leaf1", "leaf2") == (2, 3)


def test_a_valley_is_no_path() -> None:
    # a and c share no spine: a-s-b-u-c would go down to b and up again.
    t = of("a-s", "b-s", "b-u", "c-u", tiers={"a": 1, "b": 1, "c": 1, "s": 2, "u": 2})
    assert ecmp_paths(t, "a", "c") == ()
    assert trace_ttls(t, "a", "c") == ()
    assert not tops(t, "a") & tops(t, "c")
    assert named(ecmp_paths(t, "a", "b")) == {("a->s", "s->b")}


def test_shorter_ways_win_over_higher_ones() -> None:
    # a reaches the top x both over s (two hops) and by a cable that skips a tier.
    t = of("a-s", "b-s", "s-x", "a-x", "b-x", tiers={"a": 1, "b": 1, "s": 2, "x": 3})
    assert named(ecmp_paths(t, "a", "b")) == {("a->s", "s->b"), ("a->x", "x->b")}
    t = of("a-s", "b-u", "s-x", "u-x", "a-x", tiers={"a": 1, "b": 1, "s": 2, "u": 2, "x": 3})
    assert named(ecmp_paths(t, "a", "b")) == {("a->x", "x->u", "u->b")}


def test_one_level_link_may_be_crossed_at_the_top_but_not_two() -> None:
    t = of("a-s", "b-u", "s-u", tiers={"a": 1, "b": 1, "s": 2, "u": 2})
    assert named(ecmp_paths(t, "a", "b")) == {("a->s", "s->u", "u->b")}
    assert named(ecmp_paths(t, "b", "a")) == {("b->u", "u->s", "s->a")}
    assert tops(t, "a") & tops(t, "b")
    t = of("a-s", "b-v", "s-u", "u-v", tiers={"a": 1, "b": 1, "s": 2, "u": 2, "v": 2})
    assert ecmp_paths(t, "a", "b") == ()


def test_separate_fabrics_have_no_path() -> None:
    t = of("a-s", "b-u", tiers={"a": 1, "b": 1, "s": 2, "u": 2})
    assert ecmp_paths(t, "a", "b") == ()


@pytest.mark.parametrize(
    "t",
    [
        leaf_spine(3, 2, 1, 1),
        clos3(2, 2, 2, 4, 1, 1),
        clos3(2, 3, 2, 4, 1, 1, parallel=2),
        rail_optimised(2, 2, 2, 2),
        of("a-s", "a-u", "s-x", "s-y", "u-x", "x-w", "y-w", "w-b",
           tiers={"b": 1, "a": 1, "s": 2, "u": 2, "w": 2, "x": 3, "y": 3}),
        of("a-s", "b-u", "s-u", "c-u", "c-v", "v-x", "s-x",
           tiers={"a": 1, "b": 1, "c": 1, "s": 2, "u": 2, "v": 2, "x": 3}),
        of("a-s", "b-u", tiers={"a": 1, "b": 1, "s": 2, "u": 2}),
    ],
)  # fmt: skip
def test_halves_hold_what_the_whole_paths_hold_and_as_often(t: Topology) -> None:
    for a, b in product(t.switches, repeat=2):
        paths, halves = ecmp_paths(t, a, b), ecmp_halves(t, a, b)
        assert halves.count == len(paths)
        assert halves.hops == len(paths[0] if paths else ())
        whole = Counter(d for p in paths for d in p)
        up, down = (Counter(d for w in half.ways for d in w) for half in (halves.up, halves.down))
        assert not up.keys() & down.keys()
        for half, links in ((halves.up, up), (halves.down, down)):
            assert all(n * len(paths) == whole[d] * len(half.ways) for d, n in links.items())
        assert up.keys() | down.keys() == whole.keys()


def test_pairs_of_two_pods_share_their_halves() -> None:
    t = clos3(3, 2, 2, 4, 1, 1)
    here = ecmp_halves(t, "p1-leaf1", "p2-leaf1")
    assert ecmp_halves(t, "p1-leaf1", "p3-leaf2").up is here.up
    assert ecmp_halves(t, "p3-leaf2", "p2-leaf1").down is here.down
    assert ecmp_halves(t, "p1-leaf1", "p1-leaf2").up is not here.up


def test_unknown_switch() -> None:
    with pytest.raises(KeyError):
        ecmp_paths(leaf_spine(2, 1, 1, 1), "leaf1", "leaf9")


def test_paths_are_cached_and_the_cache_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topology.paths, "CACHED_PATHS", 4)
    t = leaf_spine(4, 2, 1, 1)
    first = ecmp_paths(t, "leaf1", "leaf2")
    assert ecmp_paths(t, "leaf1", "leaf2") is first
    ecmp_paths(t, "leaf1", "leaf3")
    ecmp_paths(t, "leaf1", "leaf4")
    again = ecmp_paths(t, "leaf1", "leaf2")
    assert again is not first
    assert again == first


def test_answers_of_inbound_ports_decide_the_path() -> None:
    t = clos3(2, 1, 2, 4, 1, 1)
    for path in ecmp_paths(t, *POD):
        hops = [(i, d.target_address) for i, d in enumerate(path, 2)]
        assert path_from_hops(t, *POD, hops) == (path,)
        assert path_from_hops(t, *POD, hops[1:2]) == (path,), "the core's port tells the aggregation switch too"
        assert path in path_from_hops(t, *POD, [hops[0], (3, None)])


def test_silent_hops_leave_the_choice_open() -> None:
    t = leaf_spine(2, 2, 1, 1)
    assert path_from_hops(t, "leaf1", "leaf2", [(2, None)]) == ecmp_paths(t, "leaf1", "leaf2")
    assert path_from_hops(t, "leaf1", "leaf2", []) == ecmp_paths(t, "leaf1", "leaf2")


def test_an_ipv4_inbound_port_picks_one_of_parallel_cables_but_a_loopback_does_not() -> None:
    t = leaf_spine(2, 2, 1, 1, parallel=2)
    cable = next(d for d in t.out_links["leaf1"] if d.name == "leaf1:spine2-2->spine2:leaf1-2")
    found = path_from_hops(t, "leaf1", "leaf2", [(2, cable.target_address)])
    assert {path[0] for path in found} == {cable}
    found = path_from_hops(t, "leaf1", "leaf2", [(2, t.switches["spine2"].loopback)])
    assert {path[0].name for path in found} == {f"leaf1:spine2-{i}->spine2:leaf1-{i}" for i in (1, 2)}


def test_an_ipv6_answer_only_tells_the_switch() -> None:
    t = leaf_spine(2, 2, 1, 1, parallel=2, family=6)
    cable = next(d for d in t.out_links["leaf1"] if d.name == "leaf1:spine2-2->spine2:leaf1-2")
    found = path_from_hops(t, "leaf1", "leaf2", [(2, cable.target_address)])
    assert {path[0].name for path in found} == {f"leaf1:spine2-{i}->spine2:leaf1-{i}" for i in (1, 2)}


def test_an_answer_from_the_port_of_another_link_tells_the_switch() -> None:
    t = leaf_spine(3, 2, 1, 1)
    towards_leaf3 = next(d for d in t.out_links["leaf3"] if d.target == "spine2")
    found = path_from_hops(t, "leaf1", "leaf2", [(2, towards_leaf3.target_address)])
    assert named(found) == {("leaf1->spine2", "spine2->leaf2")}


@pytest.mark.parametrize(
    "hops",
    [
        [(2, "192.0.2.1")],
        [(1, "10.2.0.0")],  # a port of leaf2
        [(3, "10.255.0.4")],  # a spine where only leaf2 can be
        [(2, "10.255.0.3"), (2, "10.255.0.4")],  # both spines
        [(4, "10.255.0.3")],  # behind leaf2
        [(4, "10.1.0.1")],  # an RNIC, but not one of leaf2
    ],
)
def test_answers_that_fit_no_path(hops: list[tuple[int, str | None]]) -> None:
    assert path_from_hops(leaf_spine(2, 2, 1, 1), "leaf1", "leaf2", hops) == ()


def test_source_tor_and_target_may_answer_for_themselves() -> None:
    t = leaf_spine(2, 2, 1, 1)
    assert len(path_from_hops(t, "leaf1", "leaf2", [(1, "10.1.0.0"), (4, "10.2.0.1")])) == 2


def test_path_elements() -> None:
    t = leaf_spine(2, 1, 2, 1)
    (path,) = ecmp_paths(t, "leaf1", "leaf2")
    expected = ("h1/rnic0 tx", "leaf1->spine1", "spine1->leaf2", "h3/rnic0 rx")
    assert path_elements(t, "h1/rnic0", "h3/rnic0", path) == expected
    assert path_elements(t, "h1/rnic0", "h2/rnic0", ()) == ("h1/rnic0 tx", "h2/rnic0 rx")
    with pytest.raises(KeyError):
        path_elements(t, "h9/rnic0", "h2/rnic0", ())


BOND = """
version: 1
cluster: c
switches: {a: {tier: 1}, b: {tier: 1}, c: {tier: 1}, s: {tier: 2}}
hosts:
  h1: {rnics: {bond0: {legs: [{switch: a, address: 10.0.0.1}, {switch: b, address: 10.0.0.1}]}}}
  h2: {rnics: {r0: {switch: c, address: 10.0.0.3}}}
  h3: {rnics: {r0: {switch: b, address: 10.0.0.5}}}
links: [{a: a, b: s}, {a: b, b: s}, {a: c, b: s}]
"""


def test_legs_are_separate_ways_and_separate_elements() -> None:
    t = files.parse(BOND)
    bond, h2, h3 = t.rnics["h1/bond0"], t.rnics["h2/r0"], t.rnics["h3/r0"]
    assert named(rnic_paths(t, bond, h2)) == {("a->s", "s->c"), ("b->s", "s->c")}
    assert named(rnic_paths(t, h3, bond)) == {()}, "leg b is in the same ToR, so nothing goes over the spine"
    over_b = next(p for p in rnic_paths(t, h2, bond) if p[-1].target == "b")
    assert path_elements(t, "h2/r0", "h1/bond0", over_b) == ("h2/r0 tx", "c->s", "s->b", "h1/bond0@b rx")
    assert path_elements(t, "h1/bond0", "h3/r0", ()) == ("h1/bond0@b tx", "h3/r0 rx")


def test_a_leg_with_its_own_address_is_not_where_probes_go() -> None:
    t = files.parse(BOND.replace("switch: b, address: 10.0.0.1", "switch: b, address: 10.0.0.7"))
    assert named(rnic_paths(t, t.rnics["h3/r0"], t.rnics["h1/bond0"])) == {("b->s", "s->a")}


def test_shares_split_at_every_router() -> None:
    t = of("a-s", "a-u", "s-x", "s-y", "u-x", "x-w", "y-w", "w-b",
           tiers={"b": 1, "a": 1, "s": 2, "u": 2, "w": 2, "x": 3, "y": 3})  # fmt: skip
    shares = {d.name: share for d, share in link_shares(ecmp_paths(t, "a", "b")).items()}
    assert shares == {
        "a->s": 0.5, "a->u": 0.5, "s->x": 0.25, "s->y": 0.25, "u->x": 0.5, "x->w": 0.75, "y->w": 0.25, "w->b": 1.0,
    }  # fmt: skip
    assert link_shares(((),)) == {}


def test_rails_meet_only_over_spines() -> None:
    t = rail_optimised(1, 2, 2, 2)
    assert named(rnic_paths(t, t.rnics["h1/rnic0"], t.rnics["h2/rnic0"])) == {()}
    assert named(rnic_paths(t, t.rnics["h1/rnic0"], t.rnics["h2/rnic1"])) == {
        ("leaf1->spine1", "spine1->leaf2"),
        ("leaf1->spine2", "spine2->leaf2"),
    }


def test_a_pair_of_a_large_fabric_costs_only_its_own_paths() -> None:
    # 960 ToRs and 61,440 links; one pair has 256 paths. Generous: a slow machine, but not the whole fabric per pair.
    t = clos3(60, 16, 32, 256, 1, 1)
    ecmp_paths(t, "p1-leaf1", "p2-leaf1")
    began = time.process_time()
    for pod in range(3, 23):
        assert len(ecmp_paths(t, "p1-leaf1", f"p{pod}-leaf1")) == 256
    assert time.process_time() - began < 1.0


def test_doctests() -> None:
    result = doctest.testmod(topology.paths)
    assert result.attempted >= 3
    assert result.failed == 0
