"""The whole loop on Soft-RoCE: verbs agents on every host, faults named, restarts and moving GIDs blamed on nobody."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Iterator
from typing import Any

import aiomqtt
import pytest
import vm_lab

from pingmesh import topics
from pingmesh.lab.client import Lab
from pingmesh.lab.fabric import MANAGEMENT_ADDRESS
from pingmesh.lab.supervisor import BROKER_PORT
from pingmesh.messages import ProbeList, decode

pytestmark = pytest.mark.timeout(1200)

READY_S = 600.0
NAMED_S = 300.0
CLOSED_S = 300.0
MET_S = 120.0
SEEN = "inet pmseen"


@pytest.fixture(scope="module")
def running() -> Iterator[Lab]:
    before = vm_lab.machine_state()
    with vm_lab.start(agents=True) as lab:
        yield lab
    vm_lab.until(lambda: vm_lab.machine_state()["rdma"] == before["rdma"], 60)
    assert vm_lab.machine_state() == before


@pytest.fixture
def lab(running: Lab) -> Iterator[Lab]:
    """The lab, with everything covered and nothing open."""
    assert running.wait_ready(READY_S), f"{running.status()}\n{vm_lab.tails(running)}"
    vm_lab.until(lambda: not opened(running), CLOSED_S, lambda: opened(running))
    yield running
    vm_lab.keep_logs(running)


def opened(lab: Lab) -> list[str]:
    return [f"{i['component']} {i['direction']} {i['symptom']}" for i in vm_lab.fabric_incidents(lab, "open")]


def ids(lab: Lab) -> set[str]:
    return {i["id"] for i in lab.incidents()}


def rnics(lab: Lab) -> dict[str, dict[str, Any]]:
    from controller import client

    found: Any = client.get(lab.controller, "/rnics", timeout=10.0)
    return {r["name"]: r for r in found}


async def probe_lists(lab: Lab) -> dict[str, ProbeList]:
    """What each RNIC's agent is told to probe, by RNIC."""
    lists: dict[str, ProbeList] = {}
    async with aiomqtt.Client(MANAGEMENT_ADDRESS, BROKER_PORT) as client, asyncio.timeout(30):
        await client.subscribe(f"{topics.ROOT}/{lab.topology.cluster}/+/list/+", qos=1)
        async for message in client.messages:
            topic = topics.parse(str(message.topic))
            assert isinstance(message.payload, bytes)
            lists[f"{topic.host}/{topic.device}"] = decode(message.payload, ProbeList)
            if lists.keys() >= lab.topology.rnics.keys():
                break
    return lists


def seen_tuples(seconds: float) -> set[tuple[str, str, int]]:
    """(source, destination, UDP source port) of the RoCE packets that reach hosts, path tracing left out."""
    rule = "udp dport 4791 ip ttl > 32 add @tuples { ip saddr . ip daddr . udp sport }"
    vm_lab.sh("nft", f"add table {SEEN}")
    try:
        typed = "type ipv4_addr . ipv4_addr . inet_service; size 65535; flags dynamic;"
        vm_lab.sh("nft", f"add set {SEEN} tuples {{ {typed} }}")
        vm_lab.sh("nft", f"add chain {SEEN} c {{ type filter hook prerouting priority 0; }}")
        vm_lab.sh("nft", f"add rule {SEEN} c {rule}")
        time.sleep(seconds)
        shown = json.loads(vm_lab.sh("nft", "-j", "list", "set", *SEEN.split(), "tuples"))
    finally:
        vm_lab.sh("nft", f"delete table {SEEN}")
    elements = next(row["set"] for row in shown["nftables"] if "set" in row).get("elem", [])
    return {tuple(e["concat"]) for e in elements}


async def test_every_pair_is_probed_over_tuples_of_its_own(lab: Lab) -> None:
    lists = await probe_lists(lab)
    names = {r["number"]: name for name, r in rnics(lab).items()}
    listed = {(source, names[f.peer]) for source, wanted in lists.items() for f in wanted.flows}
    pairs = list(itertools.combinations(lab.topology.rnics, 2))
    assert [p for p in pairs if p not in listed and p[::-1] not in listed] == []
    by_address = {r.address: name for name, r in lab.topology.rnics.items()}
    seen: set[tuple[str, str, int]] = set()

    def missing() -> set[tuple[str, str]]:
        met = {(by_address[a], by_address[b]) for a, b, _ in seen}
        return {p for pair in pairs for p in (pair, pair[::-1])} - met

    def all_met() -> bool:
        seen.update(seen_tuples(10))
        return not missing()

    vm_lab.until(all_met, MET_S, missing)
    across = {sport for a, b, sport in seen if (a, b) == _addresses(lab, "h1/rnic0", "h3/rnic0")}
    assert across
    assert all(sport >= 0xC000 for *_, sport in seen)
    assert len({sport for a, _, sport in seen if a == lab.topology.rnics["h1/rnic0"].address}) > 1


def _addresses(lab: Lab, *names: str) -> tuple[str | None, ...]:
    return tuple(lab.topology.rnics[n].address for n in names)


# With two leaves, whatever crosses a spine crosses both of its links: no count can tell one from the other.
@pytest.mark.parametrize(
    ("fault", "equals"),
    [
        ("link leaf1 spine1 --loss 50% --direction forward", {"leaf2--spine1": "spine1->leaf2"}),
        ("link leaf2 spine2 --loss 100%", {"leaf1--spine2": "both", "spine2": None}),
        ("rnic h3/rnic0 --loss 100% --direction rx", {}),
        ("rnic h2/rnic0 --down", {}),
        ("link leaf1 spine1 --delay 600 --direction forward", {"leaf2--spine1": "spine1->leaf2"}),
    ],
)
def test_a_fault_is_named_and_nothing_else_blamed(lab: Lab, fault: str, equals: dict[str, str | None]) -> None:
    before = ids(lab)
    truth = lab.fault_add(fault.split())
    try:
        incident, blamed = vm_lab.named(lab, truth, before, NAMED_S, equals)
        print(f"{fault}: {incident['component']} {incident['direction']} {incident['symptom']}", flush=True)
        assert blamed == []
    finally:
        lab.fault_clear()
    vm_lab.until(lambda: not opened(lab), CLOSED_S, lambda: opened(lab))
    since = [i for i in vm_lab.fabric_incidents(lab) if i["id"] not in before]
    assert [i for i in since if i["component"] not in (truth["component"], *equals)] == []


def test_a_restarted_agent_has_new_queue_pairs_and_nobody_is_blamed(lab: Lab) -> None:
    before, old = ids(lab), rnics(lab)["h1/rnic0"]
    lab.process("restart", "agent:h1")
    vm_lab.until(lambda: rnics(lab)["h1/rnic0"]["epoch"] != old["epoch"], 180, lambda: rnics(lab)["h1/rnic0"])
    assert rnics(lab)["h1/rnic0"]["qpn"] != old["qpn"]
    time.sleep(20)
    assert [i for i in vm_lab.fabric_incidents(lab) if i["id"] not in before] == []
    vm_lab.until(lambda: lab.topology.rnics["h1/rnic0"].address in {a for a, *_ in seen_tuples(5)}, 60)


def test_a_port_that_flaps_while_its_gid_moves_is_blamed_on_nobody_else(lab: Lab) -> None:
    """The address is away for a moment and comes back at another index of the GID table."""
    before, device = ids(lab), "h4-rnic0"
    rnic = lab.topology.rnics["h4/rnic0"]
    gateway = rnic.legs[0].switch_address
    (table,) = (r["table"] for r in json.loads(vm_lab.sh("ip", "-j", "rule", "show")) if r.get("src") == rnic.address)
    index = vm_lab.gid_index(device, str(rnic.address))
    default = ["default", "via", str(gateway), "dev", device, "src", str(rnic.address), "table", str(table)]
    others: list[str] = []

    def moved() -> bool:
        """The kernel frees and gives indexes some time after the addresses change: the old one may be given again."""
        others.append(f"10.99.0.{len(others) + 9}")
        vm_lab.sh("ip", "link", "set", device, "down")
        vm_lab.sh("ip", "addr", "del", f"{rnic.address}/31", "dev", device)
        vm_lab.sh("ip", "addr", "add", f"{others[-1]}/32", "dev", device)
        vm_lab.sh("ip", "link", "set", device, "up")
        vm_lab.sh("ip", "addr", "add", f"{rnic.address}/31", "dev", device)
        vm_lab.sh("ip", "route", "replace", *default)
        vm_lab.until(lambda: vm_lab.gid_index(device, str(rnic.address)) is not None, 60)
        time.sleep(3)
        return vm_lab.gid_index(device, str(rnic.address)) not in (None, index)

    try:
        vm_lab.until(moved, 60)
        vm_lab.until(lambda: not opened(lab) and rnics(lab)["h4/rnic0"]["up"], CLOSED_S, lambda: opened(lab))
        time.sleep(20)
        blamed = [i for i in vm_lab.fabric_incidents(lab) if i["id"] not in before]
        assert [i for i in blamed if i["component"] != "h4/rnic0"] == []
        assert {i["symptom"] for i in blamed} <= {"flap", "rnic_down"}
        assert opened(lab) == []
        vm_lab.until(lambda: rnic.address in {a for a, *_ in seen_tuples(5)}, 60)
    finally:
        for other in others:
            vm_lab.sh("ip", "addr", "del", f"{other}/32", "dev", device)
