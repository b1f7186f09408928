"""`pingmesh doctor` on a live Soft-RoCE device, and what is said where the kernel refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import vm_lab

DEVICE, ADDRESS = "rxe_doc", "10.77.0.1"
PINGMESH = [sys.executable, "-m", "pingmesh"]
SMALL_KIB = 16
SHORT = ["prlimit", f"--memlock={SMALL_KIB << 10}", "setpriv", "--bounding-set=-ipc_lock,-net_raw"]
"""Little memory may be locked, and neither CAP_IPC_LOCK nor CAP_NET_RAW is held."""


@pytest.fixture(scope="module")
def device() -> Iterator[str]:
    vm_lab.sh("ip", "link", "add", "doc0", "type", "veth", "peer", "name", "doc1")
    try:
        vm_lab.sh("ip", "addr", "add", f"{ADDRESS}/24", "dev", "doc0")
        vm_lab.sh("ip", "link", "set", "doc0", "up")
        vm_lab.sh("ip", "link", "set", "doc1", "up")
        vm_lab.sh("rdma", "link", "add", DEVICE, "type", "rxe", "netdev", "doc0")
        yield DEVICE
    finally:
        vm_lab.sh("ip", "link", "del", "doc0")
    vm_lab.until(lambda: DEVICE not in vm_lab.sh("rdma", "link"), 10)


def doctor(*prefix: str) -> dict[str, dict[str, Any]]:
    """Checks by name."""
    config = ["env", "PINGMESH_AGENT__TRANSPORT=verbs", f"PINGMESH_AGENT__DEVICES=[{DEVICE}]"]
    argv = [*prefix, *config, *PINGMESH, "doctor", "--role", "agent", "--json"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr
    return {c["name"]: c for c in json.loads(done.stdout)["checks"]}


def test_without_a_device_it_says_so() -> None:
    assert vm_lab.sh("rdma", "-j", "link").strip() in ("", "[]")
    found = doctor()["RDMA devices"]
    assert (found["state"], found["seen"]) == ("failed", "none: this machine has no RDMA")
    assert "load the NIC's RDMA driver" in found["remedy"]


def test_a_live_device(device: str) -> None:
    found = doctor()
    assert {n: c for n, c in found.items() if c["state"] == "failed" and "broker" not in n} == {}
    port = f"{device} port 1"
    assert found["RDMA devices"]["seen"] == device
    assert found["pyverbs"]["state"] == found["memlock limit"]["state"] == "ok"
    assert "uverbs0" in found["/dev/infiniband"]["seen"]
    assert found[port]["seen"].startswith("ACTIVE")
    assert found[port]["seen"].endswith("doc0")
    assert f"({ADDRESS}): RoCE v2, IPv4" in found[f"{port} GID"]["seen"]
    assert found[f"{port} MTU"]["seen"] == "active 1024 (MTU of doc0: 1500)"
    assert found[f"{port} flow label"]["seen"].startswith("not honoured by rxe")
    assert found[f"{port} clock"]["seen"].startswith("software (the device stamps no completions)")


def test_a_live_device_that_may_lock_no_memory(device: str) -> None:
    found = doctor(*SHORT)
    memlock = found["memlock limit"]
    assert (memlock["state"], memlock["seen"]) == ("failed", f"{SMALL_KIB} KiB, but 1 ports may need 1024 KiB")
    assert "LimitMEMLOCK=infinity" in memlock["remedy"]
    assert found["CAP_NET_RAW"]["state"] == "failed"
    assert "not held: paths cannot be traced" in found["CAP_NET_RAW"]["seen"]


def test_the_kernel_refuses_to_lock_memory_and_the_remedy_is_said(device: str) -> None:
    serve = [*PINGMESH, "ping", "--serve", "--transport", "verbs", "--device", device]
    only_memory = [*SHORT[:-1], "--bounding-set=-ipc_lock"]
    done = subprocess.run([*only_memory, *serve], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2, (done.stdout, done.stderr)
    assert "KiB cannot be locked in memory: raise the limit (LimitMEMLOCK=infinity" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_agent_without_the_capability_ends_in_one_sentence(device: str) -> None:
    agent = [*PINGMESH, "agent", "--host", "h", "--transport", "verbs", "--devices", device]
    bounded = ["setpriv", "--bounding-set=-net_raw"]
    done = subprocess.run([*bounded, *agent], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2, (done.stdout, done.stderr)
    assert "CAP_NET_RAW" in done.stderr
    assert "Traceback" not in done.stderr
