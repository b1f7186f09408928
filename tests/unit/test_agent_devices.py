from __future__ import annotations

import argparse
import ipaddress
import socket

import pytest

from agent import main
from agent.devices import (
    DeviceNameError,
    NoAddressError,
    Opener,
    UnknownTransportError,
    found_devices,
    named_devices,
    open_transport,
)
from agent.interfaces import Interface, Prefix
from agent.links import LinkWatcher
from agent.transport.base import Transport
from agent.transport.verbs.library import NoVerbsError
from pingmesh.config import AgentSettings


class Netlink:
    """Interfaces with their prefixes; `lo` is loopback."""

    def __init__(self, **prefixes: list[str]) -> None:
        self._prefixes = prefixes

    def interface(self, name: str) -> Interface | None:
        return Interface(name, 1, True, 0, 4200, name == "lo") if name in self._prefixes else None

    def interfaces(self) -> list[Interface]:
        return [i for n in self._prefixes if (i := self.interface(n)) is not None]

    def prefixes(self, name: str) -> list[Prefix]:
        return [ipaddress.ip_interface(p) for p in self._prefixes.get(name, [])]


def test_devices_are_found_but_not_the_one_towards_the_broker() -> None:
    netlink = Netlink(lo=["10.9.9.9/32"], mgmt0=["10.254.1.1/16"], rnic0=["10.0.0.1/31"], rnic1=["fd00::1/127"], e=[])
    assert found_devices(netlink, "10.254.0.1") == ["rnic0", "rnic1"]
    assert found_devices(netlink, "broker.example") == ["mgmt0", "rnic0", "rnic1"]


def test_what_is_wrong_with_a_device_is_said() -> None:
    netlink = Netlink(rnic0=[])
    with pytest.raises(NoAddressError, match="rnic0 has no usable address; give it"):
        open_transport(AgentSettings(), netlink, "rnic0")
    with pytest.raises(NoAddressError, match="rnic1 does not exist"):
        open_transport(AgentSettings(), netlink, "rnic1")
    with pytest.raises(UnknownTransportError, match="use 'soft'"):
        open_transport(AgentSettings(transport="pigeon"), netlink, "rnic0")


def test_a_missing_device_delays_no_other_and_is_tried_again_with_back_off() -> None:
    tried: list[tuple[float, str]] = []
    there = {"rnic0"}
    now = 0.0

    def open_one(device: str) -> Transport:
        tried.append((now, device))
        if device not in there:
            raise NoAddressError(device, False)
        return device  # type: ignore[return-value]

    opener = Opener(["rnic1", "rnic0"], open_one)
    assert opener.attempt(now) == ["rnic0"]
    assert opener.missing == ["rnic1"]
    for second in range(1, 101):
        now = float(second)
        opener.attempt(now)
    assert [at for at, device in tried if device == "rnic1"] == [0, 1, 3, 7, 15, 31, 61, 91]
    there.add("rnic1")
    opener.hurry("rnic1")
    assert opener.attempt(now) == ["rnic1"]
    assert opener.missing == []


@pytest.mark.parametrize(
    ("entries", "what"),
    [
        (["mlx5_0", "mlx5_0=mlx5_1"], "two devices are called 'mlx5_0'"),
        (["=mlx5_0"], "'=mlx5_0' is neither DEVICE nor NAME=DEVICE"),
        (["rail0="], "'rail0=' is neither DEVICE nor NAME=DEVICE"),
    ],
)
def test_devices_need_distinct_names(entries: list[str], what: str) -> None:
    with pytest.raises(DeviceNameError, match=f"agent.devices: {what}"):
        named_devices(entries)


def test_a_device_under_another_name_is_looked_for_by_its_own() -> None:
    with pytest.raises(NoAddressError, match="eth3 does not exist"):
        open_transport(AgentSettings(), Netlink(rail0=[]), "rail0=eth3")


def test_a_missing_rdma_device_is_said_with_those_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = AgentSettings(transport="verbs")
    edge = "agent.transport.verbs.pyverbs_edge.PyverbsEdge.devices"
    monkeypatch.setattr(edge, lambda self: ["mlx5_0", "mlx5_1"])
    with pytest.raises(NoVerbsError, match="mlx5_7 is no RDMA device of this machine: there are mlx5_0, mlx5_1"):
        open_transport(settings, Netlink(), "rail0=mlx5_7")
    monkeypatch.setattr(edge, lambda self: [])
    with pytest.raises(NoVerbsError, match="load the NIC's RDMA driver"):
        open_transport(settings, Netlink(), "mlx5_7")


def test_a_device_that_failed_again_at_once_waits_a_little() -> None:
    tried: list[float] = []

    def open_one(device: str) -> Transport:
        tried.append(now)
        return device  # type: ignore[return-value]

    now = 0.0
    opener = Opener(["rnic0"], open_one)
    opener.attempt(now)
    opener.wait("rnic0", now)
    for now in (0.1, 0.9, 1.0, 1.1):
        opener.attempt(now)
    assert tried == [0.0, 1.0]


def test_a_setting_that_does_not_fit_ends_the_start_and_no_running_agent() -> None:
    fits = True

    def open_one(device: str) -> Transport:
        if not fits:
            raise ValueError("agent.gid_index 9 is not RoCE v2")
        return device  # type: ignore[return-value]

    running = Opener(["rnic0"], open_one)
    running.attempt(0.0)
    fits = False
    with pytest.raises(ValueError, match=r"agent.gid_index 9"):
        Opener(["rnic0"], open_one).attempt(0.0)
    running.hurry("rnic0")
    assert running.attempt(1.0) == []
    assert running.missing == ["rnic0"]


def test_a_link_is_that_of_the_interface_below_while_there_is_one() -> None:
    below = {"rail0": "eth3"}
    watcher = LinkWatcher(Netlink(eth3=[]), ["rail0"], lambda *_: None, lambda device: below.get(device, ""))
    assert watcher.up("rail0")
    below.clear()
    assert watcher.poll() == ["rail0"]
    assert not watcher.up("rail0")


def test_without_the_right_to_raw_sockets_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = socket.socket

    class NoRaw(real):  # type: ignore[misc, valid-type]
        def __init__(self, family: int = -1, type: int = -1, proto: int = -1, fileno: int | None = None) -> None:
            if type == socket.SOCK_RAW and family != socket.AF_NETLINK:
                raise PermissionError(1, "Operation not permitted")
            super().__init__(family, type, proto, fileno)

    monkeypatch.setattr(socket, "socket", NoRaw)
    monkeypatch.setattr("pingmesh.logs.set_up", lambda _: None)
    parser = argparse.ArgumentParser()
    main.add_arguments(parser)
    assert main.run(parser.parse_args(["--host", "h1", "--devices", "rnic0"])) == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        "pingmesh agent: raw sockets are not allowed here: run the agent as root or give it CAP_NET_RAW"
    )
