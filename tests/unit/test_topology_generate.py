"""Generated fabrics: names, shapes, addresses."""

from __future__ import annotations

import ipaddress

import pytest

from topology import files
from topology.addresses import AddressPlan
from topology.generate import clos3, leaf_spine, rail_optimised
from topology.model import Topology

ALL = [
    leaf_spine(2, 3, 2, 2),
    leaf_spine(3, 2, 1, 1, parallel=3, family=6),
    clos3(2, 2, 2, 4, 2, 1, family=6),
    clos3(3, 1, 2, 2, 1, 2, parallel=2),
    rail_optimised(2, 2, 2, 4),
    leaf_spine(1, 1, 1, 1, cluster="tiny"),
]


def addresses(t: Topology) -> list[str]:
    found = [s.loopback for s in t.switches.values()]
    found += [a for k in t.links for a in (k.a_address, k.b_address)]
    found += [a for r in t.rnics.values() for leg in r.legs for a in (leg.address, leg.switch_address)]
    return [a for a in found if a is not None]


def test_leaf_spine_names_and_addresses() -> None:
    t = leaf_spine(2, 2, 2, 1)
    assert list(t.switches) == ["leaf1", "leaf2", "spine1", "spine2"]
    assert [t.switches[s].tier for s in t.switches] == [1, 1, 2, 2]
    assert {r.name: r.legs[0].switch for r in t.rnics.values()} == {
        "h1/rnic0": "leaf1",
        "h2/rnic0": "leaf1",
        "h3/rnic0": "leaf2",
        "h4/rnic0": "leaf2",
    }
    leg = t.rnics["h4/rnic0"].legs[0]
    assert (leg.port, leg.address, leg.switch_address) == ("h4-rnic0", "10.2.0.3", "10.2.0.2")
    assert [k.name for k in t.links] == ["leaf1--spine1", "leaf1--spine2", "leaf2--spine1", "leaf2--spine2"]
    assert (t.links[1].a_port, t.links[1].b_port) == ("spine2", "leaf1")
    assert (t.links[1].a_address, t.links[1].b_address) == ("172.16.0.2", "172.16.0.3")
    assert t.switches["spine2"].loopback == "10.255.0.4"


def test_clos3_planes() -> None:
    t = clos3(2, 2, 2, 4, 1, 1)
    up = {d.name for s in ("p1-agg1", "p1-agg2") for d in t.out_links[s] if d.target.startswith("core")}
    assert up == {"p1-agg1->core1", "p1-agg1->core2", "p1-agg2->core3", "p1-agg2->core4"}
    assert len(t.links) == 2 * (2 * 2 + 4)
    assert [t.switches[s].tier for s in ("p2-leaf2", "p2-agg1", "core4")] == [1, 2, 3]
    assert [r.legs[0].switch for r in t.rnics.values()] == ["p1-leaf1", "p1-leaf2", "p2-leaf1", "p2-leaf2"]


def test_rails() -> None:
    t = rail_optimised(2, 1, 2, 2)
    assert {r.name: (r.legs[0].switch, r.rail) for r in t.rnics.values()} == {
        "h1/rnic0": ("leaf1", 0),
        "h1/rnic1": ("leaf2", 1),
        "h2/rnic0": ("leaf1", 0),
        "h2/rnic1": ("leaf2", 1),
        "h3/rnic0": ("leaf3", 0),
        "h3/rnic1": ("leaf4", 1),
        "h4/rnic0": ("leaf3", 0),
        "h4/rnic1": ("leaf4", 1),
    }


def test_parallel_cables_have_their_own_ports_and_names() -> None:
    t = leaf_spine(1, 1, 1, 1, parallel=2)
    assert [k.name for k in t.links] == ["leaf1:spine1-1--spine1:leaf1-1", "leaf1:spine1-2--spine1:leaf1-2"]
    assert t.links[1].reverse.name == "spine1:leaf1-2->leaf1:spine1-2"


@pytest.mark.parametrize("t", ALL, ids=lambda t: f"{len(t.switches)}-{len(t.links)}")
def test_every_address_is_unique_and_every_cable_its_own_subnet(t: Topology) -> None:
    found = addresses(t)
    assert len(found) == len(set(found)) == len(t.switches) + 2 * (len(t.links) + len(t.rnics))
    pairs = [(k.a_address, k.b_address) for k in t.links]
    pairs += [(leg.address, leg.switch_address) for r in t.rnics.values() for leg in r.legs]
    for one, other in pairs:
        assert one is not None
        assert other is not None
        length = 31 if "." in one else 127
        assert ipaddress.ip_address(other) in ipaddress.ip_interface(f"{one}/{length}").network
    assert all(found[0].count(":") == 0 or ":" in a for a in found), "one family"
    assert len(t.fabrics) == 1


@pytest.mark.parametrize("t", ALL, ids=lambda t: f"{len(t.switches)}-{len(t.links)}")
def test_a_generated_fabric_survives_its_file(t: Topology) -> None:
    assert files.parse(files.dump(t)) == t


def test_many_tors_still_fit_into_ipv4() -> None:
    plan = AddressPlan(4, 3000, 64)
    top = ipaddress.ip_address(plan.rnic(3000, 63)[0])
    assert top < ipaddress.ip_address("10.254.0.0")
    assert top >= ipaddress.ip_address("10.0.0.0")
    assert ipaddress.ip_address(plan.rnic(1, 63)[0]) < ipaddress.ip_address(plan.rnic(2, 0)[1])


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: leaf_spine(0, 1, 1, 1), "leaves must be at least 1, not 0"),
        (lambda: leaf_spine(1, 1, -1, 1), "hosts per leaf must be at least 1, not -1"),
        (lambda: leaf_spine(1, 1, 1, 1, parallel=0), "parallel must be at least 1"),
        (lambda: leaf_spine(1, 1, 1, 1, family=5), "family 5 does not exist: use 4 or 6"),
        (lambda: clos3(1, 1, 2, 3, 1, 1), "3 cores cannot be shared out evenly to 2"),
        (lambda: rail_optimised(1, 1, 1, 0), "rnics per host must be at least 1"),
        (lambda: AddressPlan(4, 60_000, 500), "do not fit into 10.0.0.0/8: use IPv6"),
    ],
)
def test_impossible_fabrics_say_why(make: object, says: str) -> None:
    assert callable(make)
    with pytest.raises(ValueError, match=says.replace("(", r"\(")):
        make()
