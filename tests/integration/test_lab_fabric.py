"""The lab's fabric, judged by packets: ECMP, seeds, tracing, limits, rerouting."""

from __future__ import annotations

import time
from collections import Counter
from itertools import permutations

import pytest
from lab_rig import answered, echo, eventually, fabric, trace, unlimited

from pingmesh.lab.client import Lab
from topology.generate import clos3, leaf_spine, rail_optimised
from topology.model import Rnic, Topology

pytestmark = pytest.mark.lab


def _rnic(lab_or_topology: Lab | Topology, name: str) -> Rnic:
    t = lab_or_topology.topology if isinstance(lab_or_topology, Lab) else lab_or_topology
    return t.rnics[f"{name}/rnic0"]


@pytest.mark.parametrize(("family", "hashing"), [(4, None), (4, "nft"), (6, None)])
def test_flows_spread_over_all_spines_and_most_answers_take_another_one(family: int, hashing: str | None) -> None:
    t = unlimited(leaf_spine(2, 4, 1, 1, family=family))
    with fabric(t, seed=7, hashing=hashing) as lab:
        one, two = _rnic(t, "h1"), _rnic(t, "h2")
        # The first packet may be lost while neighbours are still found, and the next try is a second later.
        assert eventually(lambda: trace(lab, one, two, 2, count=1) and trace(lab, two, one, 2, count=1), 10)
        forward = trace(lab, one, two, 2, count=200)
        # An ACK goes back to port 4791 from the source port of its probe.
        reverse = trace(lab, two, one, 2, count=200)
    assert len(forward) == len(reverse) == 200
    up = {port: t.owner_of[address] for port, address in forward.items()}
    back = {port: t.owner_of[address] for port, address in reverse.items()}
    assert all(Counter(up.values())[f"spine{i}"] >= 25 for i in range(1, 5)), Counter(up.values())
    assert all(Counter(back.values())[f"spine{i}"] >= 25 for i in range(1, 5)), Counter(back.values())
    retraced = sum(up[port] == back[port] for port in up)
    assert retraced <= 100, f"{retraced} of 200 answers retrace their probe"


@pytest.mark.parametrize("hashing", ["kernel", "nft"])
def test_a_flow_keeps_its_path_and_another_seed_gives_others(hashing: str) -> None:
    t = unlimited(leaf_spine(2, 4, 1, 1))
    paths = []
    for seed in (7, 7, 8):
        with fabric(t, seed=seed, hashing=hashing) as lab:
            paths.append(trace(lab, _rnic(t, "h1"), _rnic(t, "h2"), 2, count=64))
            assert trace(lab, _rnic(t, "h1"), _rnic(t, "h2"), 2, count=64) == paths[-1]
    assert paths[0] == paths[1]
    assert paths[0] != paths[2]


def test_each_hop_answers_from_its_inbound_port() -> None:
    t = unlimited(leaf_spine(2, 2, 1, 1, parallel=2))
    with fabric(t) as lab:
        one, two = _rnic(t, "h1"), _rnic(t, "h2")
        first, second, third = (trace(lab, one, two, ttl) for ttl in (1, 2, 3))
    assert set(first.values()) == {one.legs[0].switch_address}
    entered = {t.by_address[a].name for a in second.values()}
    assert entered == {f"leaf1:spine{s}-{n}->spine{s}:leaf1-{n}" for s in (1, 2) for n in (1, 2)}
    assert {t.by_address[a].target for a in third.values()} == {"leaf2"}
    # Hop by hop, one packet's path hangs together.
    assert all(t.by_address[second[p]].target == t.by_address[third[p]].source for p in second)


@pytest.mark.parametrize("hashing", ["kernel", "nft"])
def test_three_tiers_use_every_link_in_both_directions(hashing: str) -> None:
    t = unlimited(clos3(2, 2, 2, 4, 1, 1))
    with fabric(t, hashing=hashing) as lab:
        walked = set()
        for one, two in permutations(t.rnics.values(), 2):
            for ttl in (2, 3, 4, 5):
                walked |= {t.by_address[a].name for a in trace(lab, one, two, ttl, count=48).values()}
    assert walked == {d.name for d in t.directed_links}


def test_time_exceeded_is_limited_to_what_the_topology_says() -> None:
    t = leaf_spine(2, 1, 1, 1)
    with fabric(t) as lab:
        began = time.monotonic()
        answers = trace(lab, _rnic(t, "h1"), _rnic(t, "h2"), 1, count=400, gap=0.001)
        elapsed = time.monotonic() - began
    assert 25 <= len(answers) <= 30 + 100 * elapsed


def test_each_rnic_of_a_host_uses_its_own_cable_even_to_its_neighbour() -> None:
    t = unlimited(rail_optimised(1, 2, 2, 2))
    with fabric(t) as lab:
        for source in t.rnics.values():
            for target in t.rnics.values():
                if source is not target:
                    answers = set(trace(lab, source, target, 1, count=4).values())
                    assert answers == {source.legs[0].switch_address}, (source.name, target.name)
        one, two = t.rnics["h1/rnic0"], t.rnics["h1/rnic1"]
        with echo(lab, two):
            assert answered(lab, one, two, 16) == 16


@pytest.mark.parametrize(("family", "hashing"), [(4, "kernel"), (4, "nft"), (6, "kernel"), (6, "nft")])
def test_a_withdrawn_link_loses_nobody_and_comes_back(family: int, hashing: str) -> None:
    t = unlimited(leaf_spine(3, 2, 1, 1, family=family))
    link = next(k for k in t.links if k.name == "leaf1--spine1")
    with fabric(t, hashing=hashing) as lab, echo(lab, _rnic(t, "h1")):
        assert answered(lab, _rnic(t, "h2"), _rnic(t, "h1")) == 64
        began = time.monotonic()
        lab.fault_add(["link", "leaf1", "spine1", "--down", "--reroute", "0"])
        assert eventually(lambda: answered(lab, _rnic(t, "h2"), _rnic(t, "h1")) == 64, 5)
        assert time.monotonic() - began < 1.5
        assert lab.lab_status()["withdrawn"] == [link.name]
        assert {t.owner_of[a] for a in trace(lab, _rnic(t, "h2"), _rnic(t, "h1"), 2).values()} == {"spine2"}
        assert {t.owner_of[a] for a in trace(lab, _rnic(t, "h2"), _rnic(t, "h3"), 2).values()} == {"spine1", "spine2"}
        lab.fault_clear()
        assert lab.lab_status()["withdrawn"] == []
        for one, two in (("h1", "h2"), ("h2", "h1")):
            answers = trace(lab, _rnic(t, one), _rnic(t, two), 2, count=64)
            assert len(answers) == 64
            assert {t.owner_of[a] for a in answers.values()} == {"spine1", "spine2"}


def test_without_withdrawal_far_leaves_keep_sending_into_the_dead_end() -> None:
    t = leaf_spine(3, 2, 1, 1)
    with fabric(t) as lab, echo(lab, _rnic(t, "h1")):
        lab.fault_add(["link", "leaf1", "spine1", "--down", "--no-reroute"])
        time.sleep(1.2)
        assert 0 < answered(lab, _rnic(t, "h2"), _rnic(t, "h1")) < 64
        lab.fault_clear()
        assert eventually(lambda: answered(lab, _rnic(t, "h2"), _rnic(t, "h1")) == 64, 5)


def test_a_large_fabric_is_up_at_once() -> None:
    began = time.monotonic()
    with fabric(leaf_spine(4, 4, 4, 1)) as lab:
        assert time.monotonic() - began < 5
        assert lab.lab_status()["hosts"] == 16
