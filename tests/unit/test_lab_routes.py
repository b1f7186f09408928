"""Next hops, prefixes and what a withdrawal changes, on fabrics small enough to check by hand."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable

import pytest

from pingmesh.lab import namespaces
from pingmesh.lab.names import switch_interfaces
from pingmesh.lab.routes import RouteManager, next_hops, tor_prefixes
from topology import files
from topology.generate import clos3, leaf_spine, rail_optimised
from topology.model import Path, Topology
from topology.paths import ecmp_paths

FABRICS: list[Callable[[], Topology]] = [
    lambda: leaf_spine(3, 2, 2, 1),
    lambda: leaf_spine(2, 3, 1, 2, parallel=2, family=6),
    lambda: clos3(3, 2, 2, 4, 1, 1),
    lambda: rail_optimised(2, 3, 2, 4),
]


def walks(t: Topology, hops: dict[str, tuple], source: str, target: str) -> set[Path]:  # type: ignore[type-arg]
    """Every way that packets can take, hop by hop."""
    found: set[Path] = set()
    edge: list[Path] = [(d,) for d in hops.get(source, ())]
    for _ in range(8):
        found |= {p for p in edge if p[-1].target == target}
        edge = [(*p, d) for p in edge if p[-1].target != target for d in hops.get(p[-1].target, ())]
    assert not edge, "a packet can circle"
    return found


@pytest.mark.parametrize("make", FABRICS)
def test_hop_by_hop_forwarding_takes_exactly_the_ecmp_paths_of_the_topology(make: Callable[[], Topology]) -> None:
    t = make()
    tors = sorted({leg.switch for r in t.rnics.values() for leg in r.legs})
    for target in tors:
        hops = next_hops(t, target)
        for source in tors:
            if source != target:
                assert walks(t, hops, source, target) == set(ecmp_paths(t, source, target))


def test_level_links_are_crossed_once_and_only_where_they_are_shorter() -> None:
    text = """
version: 1
cluster: x
switches: {a: {tier: 1}, b: {tier: 1}, c: {tier: 1}, s: {tier: 2}}
hosts:
  h1: {rnics: {r: {switch: a, address: 10.0.0.1, switch_address: 10.0.0.0}}}
  h2: {rnics: {r: {switch: b, address: 10.0.1.1, switch_address: 10.0.1.0}}}
  h3: {rnics: {r: {switch: c, address: 10.0.2.1, switch_address: 10.0.2.0}}}
links: [{a: a, b: b}, {a: a, b: s}, {a: b, b: s}, {a: c, b: s}]
"""
    t = files.parse(text)
    hops = next_hops(t, "a")
    assert [d.name for d in hops["b"]] == ["b->a"]
    assert [d.name for d in hops["c"]] == ["c->s"]
    assert walks(t, hops, "c", "a") == set(ecmp_paths(t, "c", "a"))


def test_a_withdrawn_cable_is_avoided_where_it_would_dead_end() -> None:
    t = leaf_spine(3, 2, 1, 1)
    hops = next_hops(t, "leaf1", frozenset({"leaf1--spine1"}))
    assert {n: [d.name for d in ds] for n, ds in hops.items()} == {
        "spine2": ["spine2->leaf1"],
        "leaf2": ["leaf2->spine2"],
        "leaf3": ["leaf3->spine2"],
    }
    # Towards another leaf only the near leaf changes.
    assert [d.name for d in next_hops(t, "leaf2", frozenset({"leaf1--spine1"}))["leaf3"]] == [
        "leaf3->spine1",
        "leaf3->spine2",
    ]


def test_in_three_tiers_the_other_pods_avoid_the_plane_that_lost_its_way_down() -> None:
    t = clos3(2, 2, 2, 4, 1, 1)
    hops = next_hops(t, "p1-leaf1", frozenset({"p1-agg1--p1-leaf1"}))
    assert {d.target for d in hops["p2-leaf1"]} == {"p2-agg2"}
    assert {d.target for d in hops["p1-leaf2"]} == {"p1-agg2"}
    assert "core1" not in hops
    assert not walks(t, hops, "p2-leaf1", "p1-leaf1") & {
        p for p in ecmp_paths(t, "p2-leaf1", "p1-leaf1") if any(d.link.name == "p1-agg1--p1-leaf1" for d in p)
    }


def test_a_switch_without_any_way_has_no_route() -> None:
    t = leaf_spine(2, 1, 1, 1)
    assert next_hops(t, "leaf1", frozenset({"leaf1--spine1"})) == {}


@pytest.mark.parametrize("make", FABRICS)
def test_a_prefix_holds_its_rnics_and_nobody_elses(make: Callable[[], Topology]) -> None:
    t = make()
    prefixes = tor_prefixes(t)
    assert all(len(p) == 1 for p in prefixes.values())
    for r in t.rnics.values():
        for tor, (prefix,) in prefixes.items():
            inside = ipaddress.ip_address(str(r.address)) in ipaddress.ip_network(prefix)
            assert inside == (tor == r.legs[0].switch)


def test_addresses_that_interleave_get_prefixes_of_their_own() -> None:
    text = """
version: 1
cluster: x
switches: {a: {tier: 1}, b: {tier: 1}, s: {tier: 2}}
hosts:
  h1: {rnics: {r: {switch: a, address: 10.0.0.1, switch_address: 10.0.0.0}}}
  h2: {rnics: {r: {switch: b, address: 10.0.0.3, switch_address: 10.0.0.2}}}
  h3: {rnics: {r: {switch: a, address: 10.0.0.6, switch_address: 10.0.0.9}}}
links: [{a: a, b: s}, {a: b, b: s}]
"""
    assert tor_prefixes(files.parse(text)) == {
        "a": ("10.0.0.0/31", "10.0.0.6/32", "10.0.0.9/32"),
        "b": ("10.0.0.2/31",),
    }


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """What would have been given to `ip -batch`, by switch."""
    seen: dict[str, list[str]] = {}

    def record(lines: list[str], name: str, *, force: bool) -> None:
        assert force
        seen.setdefault(name, []).extend(lines)

    monkeypatch.setattr(namespaces, "ip_batch", record)
    return seen


def installed(t: Topology, buckets: int = 0) -> RouteManager:
    routes = RouteManager(t, switch_interfaces(t), buckets=buckets)
    for switch in t.switches:
        assert routes.first_install(switch) or not routes.tables()[switch]
    return routes


def test_only_differences_are_installed_and_repeating_changes_nothing(batches: dict[str, list[str]]) -> None:
    t = leaf_spine(3, 2, 1, 1)
    link = next(k for k in t.links if k.name == "leaf1--spine1")
    routes = installed(t)
    routes.withdraw(link)
    assert batches == {
        "leaf1": [
            "route replace 10.2.0.0/31 nexthop via 172.16.0.3 dev spine2",
            "route replace 10.3.0.0/31 nexthop via 172.16.0.3 dev spine2",
        ],
        "leaf2": ["route replace 10.1.0.0/31 nexthop via 172.16.0.7 dev spine2"],
        "leaf3": ["route replace 10.1.0.0/31 nexthop via 172.16.0.11 dev spine2"],
        "spine1": ["route del 10.1.0.0/31"],
    }
    assert routes.withdrawn == {"leaf1--spine1"}
    batches.clear()
    routes.withdraw(link, link.forward)
    assert batches == {}
    routes.restore(link.reverse)
    assert set(batches) == {"leaf1", "leaf2", "leaf3", "spine1"}
    assert routes.withdrawn == frozenset()
    batches.clear()
    routes.restore(link)
    assert batches == {}


def test_hops_over_a_device_that_is_down_wait_for_it(batches: dict[str, list[str]]) -> None:
    t = leaf_spine(3, 3, 1, 1)
    one, two = (next(k for k in t.links if k.name == f"leaf1--spine{i}") for i in (1, 2))
    routes = installed(t)
    routes.device_changed("leaf1", "spine1", up=False)
    assert batches == {}
    # The kernel would refuse a route over the device that is down, and with it the whole change.
    routes.withdraw(two)
    assert all("dev spine3" in line and "spine1" not in line for line in batches["leaf1"])
    batches.clear()
    routes.device_changed("leaf1", "spine1", up=True)
    assert set(batches) == {"leaf1"}
    assert all("dev spine1" in line and "dev spine3" in line for line in batches["leaf1"])
    assert one.name not in routes.withdrawn


def test_each_bucket_has_one_hop_and_all_hops_have_equal_shares(batches: dict[str, list[str]]) -> None:
    t = leaf_spine(2, 4, 1, 1)
    lines = [n for n in installed(t, buckets=24).first_install("leaf1") if " table " in n]
    assert len(lines) == 24
    assert {f"spine{i}": sum(n.endswith(f"dev spine{i}") for n in lines) for i in range(1, 5)} == {
        f"spine{i}": 6 for i in range(1, 5)
    }
