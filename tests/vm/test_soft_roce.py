"""What the machine itself gives: Soft-RoCE devices, without anything of pingmesh."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest


def sh(command: str) -> str:
    return subprocess.run(command.split(), check=True, capture_output=True, text=True).stdout


def rdma_links() -> dict[str, dict[str, str]]:
    return {link["ifname"]: link for link in json.loads(sh("rdma -j link show"))}


@pytest.fixture
def cable() -> Iterator[tuple[str, str]]:
    sh("ip link add vma type veth peer name vmb")
    try:
        for name in ("vma", "vmb"):
            sh(f"ip link set {name} up")
            sh(f"rdma link add rxe_{name} type rxe netdev {name}")
        yield "rxe_vma", "rxe_vmb"
    finally:
        sh("ip link del vma")


def test_devices_follow_their_interfaces(cable: tuple[str, str]) -> None:
    deadline = time.monotonic() + 20
    while any(rdma_links()[d]["state"] != "ACTIVE" for d in cable):
        assert time.monotonic() < deadline, rdma_links()
        time.sleep(0.2)
    sh("ip link set vmb down")
    assert rdma_links()[cable[1]]["state"] != "ACTIVE"
    assert list(Path("/dev/infiniband").glob("uverbs*"))
    sh("ip link del vma")
    while rdma_links().keys() & set(cable):
        assert time.monotonic() < deadline, "devices outlive their interfaces"
        time.sleep(0.2)
    sh("ip link add vma type veth peer name vmb")
