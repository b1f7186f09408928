"""Hosts that share the machine's first network namespace: names, what is refused, and giving the network back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pingmesh.lab import isolation, namespaces, soft_roce
from pingmesh.lab.fabric import Fabric
from pingmesh.lab.hosts import NamespaceHosts, SharedHosts
from pingmesh.lab.namespaces import CommandError, LabError
from pingmesh.lab.shared_network import Borrowed, SharedNetwork
from topology.generate import leaf_spine


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SharedHosts:
    monkeypatch.setattr("os.geteuid", lambda: 0)
    return SharedHosts(SharedNetwork(tmp_path / "network.json"))


def test_each_rnic_has_a_name_of_its_own(hosts: SharedHosts) -> None:
    topology = leaf_spine(2, 2, 1, 2)
    fabric = Fabric(topology, hosts)
    assert hosts.devices(topology.hosts["h2"]) == ["rnic0=rxe_h2-rnic0", "rnic1=rxe_h2-rnic1"]
    assert fabric.interface("h2", "rnic1") == "h2-rnic1"
    assert fabric.namespace("h2") is None
    assert fabric.command("h2", ["id"])[-1] == "id"
    assert (fabric.broker_address("h2"), fabric.broker_listens) == ("10.254.1.3", "0.0.0.0")


def test_hosts_with_namespaces_find_the_broker_on_the_bridge() -> None:
    fabric = Fabric(leaf_spine(2, 2, 1, 2), NamespaceHosts())
    assert (fabric.broker_address("h2"), fabric.broker_listens) == ("10.254.0.1", "10.254.0.1")


def test_what_cannot_be_built_is_refused_in_a_sentence(hosts: SharedHosts, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LabError, match="91 RNICs are too many for `lab up --transport verbs`: 90 at most"):
        hosts.check(leaf_spine(7, 1, 13, 1))
    hosts.check(leaf_spine(9, 1, 10, 1))
    with pytest.raises(LabError, match="IPv4 fabrics only: leave out --family 6"):
        hosts.check(leaf_spine(2, 2, 1, 1, family=6))
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(LabError, match="run it as root"):
        hosts.check(leaf_spine(2, 2, 1, 1))


def test_a_kernel_without_soft_roce_is_told_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(argv: list[str], **_: Any) -> str:
        raise CommandError(None, argv, "modprobe: FATAL: Module rdma_rxe not found in directory /lib/modules/6.1")

    monkeypatch.setattr(namespaces, "execute", refuse)
    with pytest.raises(LabError, match=r"no Soft-RoCE \(modprobe: .* not found .*\): `make test-vm` shows how"):
        soft_roce.load_modules()


def test_devices_that_stay_away_are_told_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    links = [{"ifname": "rxe_a", "state": "ACTIVE"}, {"ifname": "rxe_b", "state": "DOWN"}]
    monkeypatch.setattr(namespaces, "execute", lambda argv: json.dumps(links) if "show" in argv else "")
    soft_roce.add(["a"], 0)
    with pytest.raises(LabError, match=r"1 Soft-RoCE devices \(rxe_b ...\) are not active after 0 s"):
        soft_roce.add(["a", "b"], 0)


def test_the_supervisor_stays_in_the_network_that_its_hosts_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 0)
    assert "--net" in isolation.isolated_command(["x"])
    assert "--net" not in isolation.isolated_command(["x"], shares_network=True)


def test_what_was_borrowed_is_given_back_in_an_order_that_keeps_the_machine_reachable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = tmp_path / "network.json"
    record.write_bytes(msgspec.json.encode(Borrowed(devices=["h1-rnic0", "mgmt"], rules=[101, 201, 300], sysctls={})))
    ran: list[str] = []

    def execute(argv: list[str], **_: Any) -> str:
        ran.append(" ".join(argv))
        if argv[2:] == ["rule", "show"]:
            return json.dumps([{"priority": p} for p in (101, 300, 32766)])
        return json.dumps([{"ifname": n} for n in ("lo", "mgmt")])

    monkeypatch.setattr(namespaces, "execute", execute)
    SharedNetwork(record).give_back()
    assert [line for line in ran if "show" not in line] == [
        "ip rule add pref 0 lookup local",
        "ip rule del pref 101",
        "ip rule del pref 300",
        "ip link del mgmt",
        "nft delete table inet pmmgmt",
    ]
    assert not record.exists()
    ran.clear()
    SharedNetwork(record).give_back()
    assert ran == []
