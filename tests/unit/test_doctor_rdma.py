from __future__ import annotations

import dataclasses
import resource
from pathlib import Path
from typing import Any

import pytest

from agent.transport.verbs import library
from agent.transport.verbs.edge import Capabilities, Port
from pingmesh.cli import checks_rdma, pcie, rdma
from pingmesh.cli.check import Check
from pingmesh.cli.checks_rdma import Machine
from pingmesh.config import AgentSettings


def write(path: Path, text: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def function(path: Path, now: tuple[str, int], most: tuple[str, int]) -> None:
    for name, (speed, width) in (("current", now), ("max", most)):
        write(path / f"{name}_link_speed", f"{speed} GT/s PCIe")
        write(path / f"{name}_link_width", width)


def device(
    sys: Path,
    name: str = "mlx5_0",
    *,
    gids: dict[int, tuple[str, str]],
    state: str = "4: ACTIVE",
    driver: str = "mlx5_core",
    mtu: int = 4200,
) -> Path:
    at = sys / "class/infiniband" / name
    port = at / "ports/1"
    write(port / "state", state)
    write(port / "link_layer", "Ethernet")
    write(port / "rate", "100 Gb/sec (4X EDR)")
    for index in range(8):
        gid, kind = gids.get(index, ("0000:0000:0000:0000:0000:0000:0000:0000", ""))
        write(port / "gids" / str(index), gid)
        if kind:
            write(port / "gid_attrs/types" / str(index), kind)
            write(port / "gid_attrs/ndevs" / str(index), "eth1")
    write(sys / "class/net/eth1/mtu", mtu)
    slot = sys / f"devices/pci0000:00/0000:00:01.0/{name}.pci"
    slot.mkdir(parents=True)
    (sys / "bus/pci/drivers" / driver).mkdir(parents=True, exist_ok=True)
    (slot / "driver").symlink_to(sys / "bus/pci/drivers" / driver)
    (at / "device").symlink_to(slot)
    return slot


USUAL = {
    0: ("fe80:0000:0000:0000:0ac0:ebff:fe11:2233", "IB/RoCE v1"),
    1: ("fe80:0000:0000:0000:0ac0:ebff:fe11:2233", "RoCE v2"),
    2: ("0000:0000:0000:0000:0000:ffff:0a14:010b", "IB/RoCE v1"),
    3: ("0000:0000:0000:0000:0000:ffff:0a14:010b", "RoCE v2"),
}


class Opened:
    def __init__(self, capabilities: Capabilities) -> None:
        self._capabilities = capabilities
        self.closed = False

    def port(self, number: int) -> Port:
        return Port(number, True, True, 4096, 8)

    def capabilities(self) -> Capabilities:
        return self._capabilities

    def close(self) -> None:
        self.closed = True


class Edge:
    def __init__(self, answer: Capabilities | OSError) -> None:
        self.answer = answer
        self.opened: list[Opened] = []

    def devices(self) -> list[str]:
        return []

    def open(self, name: str) -> Any:
        if isinstance(self.answer, OSError):
            raise self.answer
        self.opened.append(Opened(self.answer))
        return self.opened[-1]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """A healthy machine without any RDMA device yet."""
    write(tmp_path / "dev/uverbs0", "")
    edge = Edge(Capabilities(0x2C9, 1, (1 << 63) - 1, 1_000_000))
    return Machine(
        sys=tmp_path / "sys",
        character_devices=tmp_path / "dev",
        memlock=lambda: resource.RLIM_INFINITY,
        capabilities=lambda: 1 << 13 | 1 << 14,
        find_pyverbs=lambda path: None,
        edge=lambda: edge,
    )


def look(m: Machine, agent: AgentSettings | None = None) -> dict[str, Check]:
    found = checks_rdma.checks(agent or AgentSettings(transport="verbs"), "failed", m)
    assert all(c.remedy for c in found if c.state != "ok"), found
    return {c.name: c for c in found}


def test_a_healthy_device(machine: Machine) -> None:
    slot = device(machine.sys, gids=USUAL)
    function(slot, ("16.0", 8), ("32.0", 16))
    function(slot.parent, ("16.0", 8), ("16.0", 8))
    found = look(machine)
    assert {c.state for c in found.values()} == {"ok"}
    assert found["mlx5_0 port 1 GID"].seen == "3 (10.20.1.11): RoCE v2, IPv4; of 4 entries"
    assert found["mlx5_0 port 1 MTU"].seen == "active 4096 (MTU of eth1: 4200)"
    assert "honoured by mlx5_core" in found["mlx5_0 port 1 flow label"].seen
    assert found["mlx5_0 port 1 clock"].seen.startswith("hardware")
    assert found["mlx5_0 PCIe"].seen == "mlx5_0.pci: 16.0 GT/s x8"  # a Gen5 card in a Gen4 x8 slot is fine


def test_no_rdma_at_all(machine: Machine) -> None:
    bare = dataclasses.replace(machine, character_devices=machine.sys / "none")
    found = look(bare)
    assert found["RDMA devices"].state == "failed"
    assert found["RDMA devices"].seen == "none: this machine has no RDMA"
    assert "ib_uverbs" in found["RDMA devices"].remedy
    warned = checks_rdma.checks(AgentSettings(), "warning", bare)
    assert [c.state for c in warned] == ["warning", "ok"]


def test_no_pyverbs(machine: Machine) -> None:
    def missing(path: Path) -> object:
        raise library.NoVerbsError("the verbs transport needs pyverbs: apt install python3-pyverbs")

    device(machine.sys, gids=USUAL)
    found = look(dataclasses.replace(machine, find_pyverbs=missing))
    assert (found["pyverbs"].state, found["pyverbs"].remedy) == ("failed", "apt install python3-pyverbs")
    # What sysfs tells is told all the same.
    assert found["mlx5_0 port 1 GID"].state == "ok"
    assert found["mlx5_0 port 1 MTU"].seen == "expected 4096 (MTU of eth1: 4200)"
    assert found["mlx5_0 port 1 clock"].state == "warning"


def test_memlock(machine: Machine) -> None:
    device(machine.sys, gids=USUAL)
    short = dataclasses.replace(machine, memlock=lambda: 64 << 10, capabilities=lambda: 1 << 13)
    found = look(short)["memlock limit"]
    assert (found.state, found.seen) == ("failed", "64 KiB, but 1 ports may need 1024 KiB")
    assert "LimitMEMLOCK=infinity" in found.remedy
    assert look(dataclasses.replace(short, memlock=lambda: 8 << 20))["memlock limit"].state == "ok"
    assert look(dataclasses.replace(short, capabilities=machine.capabilities))["memlock limit"].state == "ok"


def test_capabilities_and_character_devices(machine: Machine, tmp_path: Path) -> None:
    device(machine.sys, gids=USUAL)
    found = look(dataclasses.replace(machine, capabilities=lambda: 0, character_devices=tmp_path / "empty"))
    assert found["CAP_NET_RAW"].state == "failed"
    assert found["CAP_IPC_LOCK"].state == "ok"
    assert "modprobe ib_uverbs" in found[str(tmp_path / "empty")].remedy


def test_capabilities_are_read_from_the_status(tmp_path: Path) -> None:
    write(tmp_path / "status", "Name:\tx\nCapEff:\t0000000000002000")
    assert checks_rdma._effective(tmp_path / "status") == 1 << 13
    assert checks_rdma._effective(tmp_path / "none") == 0


@pytest.mark.parametrize(
    ("gids", "chosen"),
    [
        (USUAL, "3 (10.20.1.11)"),
        ({0: ("fe80::690:81ff:fe37:a9e8", "RoCE v2"), 1: ("::ffff:10.20.9.101", "RoCE v2")}, "1 (10.20.9.101)"),
        ({4: ("fd00::5", "RoCE v2")}, "4 (fd00::5)"),
        ({1: ("::ffff:169.254.7.9", "RoCE v2")}, None),
        ({1: ("febf::1", "RoCE v2")}, None),
        ({}, None),
    ],
)
def test_the_gid_and_why(machine: Machine, gids: dict[int, tuple[str, str]], chosen: str | None) -> None:
    device(machine.sys, gids=gids)
    found = look(machine)["mlx5_0 port 1 GID"]
    if chosen is None:
        assert found.state == "failed"
        assert "no usable RoCE v2 GID" in found.seen
        assert "address" in found.remedy
    else:
        assert (found.state, found.seen.partition(":" if "::" not in chosen else "):")[0]) == (
            "ok",
            chosen.rstrip(")") if "::" in chosen else chosen,
        )


def test_a_forced_index(machine: Machine) -> None:
    device(machine.sys, gids=USUAL)
    found = look(machine, AgentSettings(transport="verbs", gid_index=9))["mlx5_0 port 1 GID"]
    assert found.state == "failed"
    assert "index 9" in found.seen.replace("gid_index", "index")
    found = look(machine, AgentSettings(transport="verbs", gid_index=3))["mlx5_0 port 1 GID"]
    assert "as agent.gid_index says" in found.seen


def test_a_device_that_refuses(machine: Machine) -> None:
    device(machine.sys, gids=USUAL)
    edge = Edge(OSError(13, "Permission denied"))
    found = look(dataclasses.replace(machine, edge=lambda: edge))["mlx5_0 port 1 verbs"]
    assert (found.state, found.seen) == ("failed", "cannot be opened: Permission denied")


def test_a_down_port_says_what_to_do(machine: Machine) -> None:
    device(machine.sys, gids=USUAL, state="1: DOWN")
    found = look(machine)["mlx5_0 port 1"]
    assert (found.state, found.seen) == ("failed", "DOWN")
    assert "ip link set eth1 up" in found.remedy


def test_a_forced_traffic_class(machine: Machine) -> None:
    device(machine.sys, gids=USUAL)
    write(machine.sys / "class/infiniband/mlx5_0/tc/1/traffic_class", "Global tclass=236")
    found = look(machine)["mlx5_0 port 1 traffic class"]
    assert found.state == "warning"
    assert found.seen.startswith("236 (DSCP 59) is forced")


def test_pcie_below_what_both_ends_can(machine: Machine) -> None:
    slot = device(machine.sys, gids=USUAL)
    function(slot, ("8.0", 8), ("32.0", 16))
    function(slot.parent, ("8.0", 8), ("16.0", 16))
    found = look(machine)["mlx5_0 PCIe"]
    assert (found.state, found.seen) == ("warning", "mlx5_0.pci: 8.0 GT/s x8 of 16.0 GT/s x16")
    assert "under load" in found.remedy


def test_pcie_hops_go_over_switches_and_missing_attributes_are_unknown(tmp_path: Path) -> None:
    root = tmp_path / "pci0000:00/0000:00:01.0"
    upstream = root / "0000:01:00.0"
    downstream = upstream / "0000:02:00.0"
    card = downstream / "0000:03:00.0"
    card.mkdir(parents=True)
    function(card, ("16.0", 16), ("16.0", 16))
    function(downstream, ("16.0", 16), ("16.0", 16))
    function(upstream, ("8.0", 16), ("16.0", 16))
    function(root, ("8.0", 16), ("16.0", 16))
    assert [(h.function, h.slow) for h in pcie.hops(card)] == [("0000:03:00.0", False), ("0000:01:00.0", True)]
    (upstream / "current_link_width").unlink()
    write(upstream / "current_link_speed", "Unknown")
    assert [h.slow for h in pcie.hops(card)] == [False, False]
    assert pcie.hops(tmp_path / "none") == []


@pytest.mark.parametrize(
    ("driver", "state", "text"),
    [("hns-roce-hw", "ok", "honoured"), ("bnxt_re", "warning", "not known of bnxt_re")],
)
def test_flow_label_by_provider(machine: Machine, driver: str, state: str, text: str) -> None:
    device(machine.sys, gids=USUAL, driver=driver)
    found = look(machine)["mlx5_0 port 1 flow label"]
    assert found.state == state
    assert text in found.seen


def test_soft_roce(machine: Machine) -> None:
    slot = device(machine.sys, "rxe0", gids=USUAL)
    (machine.sys / "class/infiniband/rxe0/device").unlink()
    write(machine.sys / "class/infiniband/rxe0/parent", "eth1")
    assert slot.exists()
    edge = Edge(Capabilities(0xFFFFFF, 1))
    found = look(dataclasses.replace(machine, edge=lambda: edge))
    assert "not honoured by rxe" in found["rxe0 port 1 flow label"].seen
    assert found["rxe0 port 1 clock"].seen.startswith("software (the device stamps no completions)")
    assert all(o.closed for o in edge.opened)


def test_an_interface_with_a_small_mtu(machine: Machine) -> None:
    device(machine.sys, gids=USUAL, mtu=1000)

    def missing(path: Path) -> object:
        raise library.NoVerbsError("the verbs transport needs pyverbs: apt install python3-pyverbs")

    found = look(dataclasses.replace(machine, find_pyverbs=missing))["mlx5_0 port 1 MTU"]
    assert (found.state, found.seen) == ("warning", "expected 512 (MTU of eth1: 1000)")


def test_empty_slots_that_raise(tmp_path: Path) -> None:
    device(tmp_path, gids=USUAL)
    slot = tmp_path / "class/infiniband/mlx5_0/ports/1/gids/5"
    slot.unlink()
    slot.mkdir()  # reading it raises, as an empty slot does with some drivers
    (d,) = rdma.devices(tmp_path)
    assert [g.index for g in d.gids] == [0, 1, 2, 3]
