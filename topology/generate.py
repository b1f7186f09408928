"""Generators of regular fabrics: leaf-spine, three-tier Clos with pods, rail-optimised.

The same arguments always give the same names and addresses. RNIC devices are `rnic0..`; hosts are `h1..`, over
the ToRs in order. Where two switches are joined by `parallel` > 1 cables, ports are `PEER-1..`, else `PEER`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from topology.addresses import AddressPlan
from topology.build import assemble, cable
from topology.model import Leg, Link, Rnic, Switch, Topology


def leaf_spine(
    leaves: int,
    spines: int,
    hosts_per_leaf: int,
    rnics_per_host: int,
    *,
    family: int = 4,
    cluster: str = "lab",
    parallel: int = 1,
) -> Topology:
    """Two tiers: every leaf joined to every spine, all RNICs of a host on one leaf.

    Raises:
        ValueError: a count is not positive, or the fabric does not fit into the address plan.
    """
    _positive(
        leaves=leaves, spines=spines, hosts_per_leaf=hosts_per_leaf, rnics_per_host=rnics_per_host, parallel=parallel
    )
    plan = AddressPlan(family, leaves, hosts_per_leaf * rnics_per_host)
    tors = [f"leaf{i}" for i in range(1, leaves + 1)]
    tops = [f"spine{i}" for i in range(1, spines + 1)]
    switches = [*_switches(tors, 1, plan), *_switches(tops, 2, plan)]
    links = _mesh(tors, tops, parallel, plan)
    return assemble(cluster, switches, _hosts_on_one_tor(tors, hosts_per_leaf, rnics_per_host, plan), links)


def clos3(
    pods: int,
    leaves: int,
    aggs: int,
    cores: int,
    hosts_per_leaf: int,
    rnics_per_host: int,
    *,
    family: int = 4,
    cluster: str = "lab",
    parallel: int = 1,
) -> Topology:
    """Three tiers: in each pod every leaf is joined to every aggregation switch; the cores come in planes.

    Aggregation switch j of every pod is joined to plane j, which is `cores / aggs` cores, so a core fixes the way down.

    Args:
        pods: number of pods.
        leaves: leaves in a pod (`p1-leaf1`).
        aggs: aggregation switches in a pod (`p1-agg1`).
        cores: core switches in all (`core1`), a multiple of `aggs`.
        hosts_per_leaf: hosts on a leaf.
        rnics_per_host: RNICs of a host, all on its leaf.
        family: 4 or 6.
        cluster: name of the cluster.
        parallel: cables between two joined switches.

    Raises:
        ValueError: a count is not positive, `cores` is no multiple of `aggs`, or the fabric does not fit the addresses.
    """
    _positive(
        pods=pods,
        leaves=leaves,
        aggs=aggs,
        cores=cores,
        hosts_per_leaf=hosts_per_leaf,
        rnics_per_host=rnics_per_host,
        parallel=parallel,
    )
    if cores % aggs:
        raise ValueError(f"{cores} cores cannot be shared out evenly to {aggs} aggregation switches: use a multiple")
    plan = AddressPlan(family, pods * leaves, hosts_per_leaf * rnics_per_host)
    pod_tors = [[f"p{p}-leaf{i}" for i in range(1, leaves + 1)] for p in range(1, pods + 1)]
    pod_aggs = [[f"p{p}-agg{i}" for i in range(1, aggs + 1)] for p in range(1, pods + 1)]
    tops = [f"core{i}" for i in range(1, cores + 1)]
    tors = [tor for pod in pod_tors for tor in pod]
    switches = [
        *_switches(tors, 1, plan),
        *_switches((agg for pod in pod_aggs for agg in pod), 2, plan),
        *_switches(tops, 3, plan),
    ]
    links: list[Link] = []
    for tor_names, agg_names in zip(pod_tors, pod_aggs, strict=True):
        links += _mesh(tor_names, agg_names, parallel, plan)
    width = cores // aggs
    for agg_names in pod_aggs:
        for j, agg in enumerate(agg_names):
            links += _mesh([agg], tops[j * width : (j + 1) * width], parallel, plan)
    return assemble(cluster, switches, _hosts_on_one_tor(tors, hosts_per_leaf, rnics_per_host, plan), links)


def rail_optimised(
    groups: int,
    spines: int,
    hosts_per_group: int,
    rnics_per_host: int,
    *,
    family: int = 4,
    cluster: str = "lab",
    parallel: int = 1,
) -> Topology:
    """Rails: RNIC i of every host of a group hangs on the group's leaf for rail i; every leaf is joined to every spine.

    Leaf numbering: group 1 has `leaf1..leafR` for R = `rnics_per_host`, group 2 the next R, and so on.

    Raises:
        ValueError: a count is not positive, or the fabric does not fit into the address plan.
    """
    _positive(
        groups=groups, spines=spines, hosts_per_group=hosts_per_group, rnics_per_host=rnics_per_host, parallel=parallel
    )
    rails = rnics_per_host
    plan = AddressPlan(family, groups * rails, hosts_per_group)
    tors = [f"leaf{i}" for i in range(1, groups * rails + 1)]
    tops = [f"spine{i}" for i in range(1, spines + 1)]
    switches = [*_switches(tors, 1, plan), *_switches(tops, 2, plan)]
    links = _mesh(tors, tops, parallel, plan)
    rnics = [
        _rnic(f"h{group * hosts_per_group + n + 1}", rail, tors, group * rails + rail, n, plan, rail=rail)
        for group in range(groups)
        for n in range(hosts_per_group)
        for rail in range(rails)
    ]
    return assemble(cluster, switches, rnics, links)


def _positive(**counts: int) -> None:
    for name, value in counts.items():
        if value < 1:
            raise ValueError(f"{name.replace('_', ' ')} must be at least 1, not {value}")


def _switches(names: Iterable[str], tier: int, plan: AddressPlan) -> Iterator[Switch]:
    return (Switch(name, tier, plan.loopback()) for name in names)


def _mesh(lower: Sequence[str], upper: Sequence[str], parallel: int, plan: AddressPlan) -> list[Link]:
    links: list[Link] = []
    for a in lower:
        for b in upper:
            for n in range(1, parallel + 1):
                suffix = f"-{n}" if parallel > 1 else ""
                a_address, b_address = plan.link()
                links.append(cable(a, b + suffix, b, a + suffix, a_address, b_address))
    return links


def _hosts_on_one_tor(tors: Sequence[str], hosts_per_leaf: int, rnics: int, plan: AddressPlan) -> list[Rnic]:
    return [
        _rnic(f"h{tor * hosts_per_leaf + n + 1}", device, tors, tor, n * rnics + device, plan)
        for tor in range(len(tors))
        for n in range(hosts_per_leaf)
        for device in range(rnics)
    ]


def _rnic(
    host: str, device: int, tors: Sequence[str], tor: int, number: int, plan: AddressPlan, rail: int | None = None
) -> Rnic:
    address, switch_address = plan.rnic(tor + 1, number)
    leg = Leg(tors[tor], f"{host}-rnic{device}", address, switch_address)
    return Rnic(host, f"rnic{device}", (leg,), rail=rail)
