"""Soft-RoCE (rxe) devices: RDMA over an ordinary network device, by the kernel."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence

from pingmesh.lab import namespaces
from pingmesh.lab.namespaces import CommandError, LabError

MODULES = ("rdma_rxe", "ib_uverbs")
ACTIVE_PATIENCE_S = 30.0
_WHERE = "`make test-vm` shows how to have a machine that can"


def device_name(interface: str) -> str:
    """What the RDMA device on a network device is called."""
    return f"rxe_{interface}"


def load_modules() -> None:
    """Load what Soft-RoCE needs. Raises LabError where the kernel lacks it."""
    try:
        namespaces.execute(["modprobe", "-a", *MODULES])
    except CommandError as error:
        raise LabError(f"this kernel has no Soft-RoCE ({error.stderr.splitlines()[-1]}): {_WHERE}") from None


def add(interfaces: Sequence[str], patience: float = ACTIVE_PATIENCE_S) -> None:
    """Make a device on each network device and wait until all are active. Raises LabError when they are not."""
    for interface in interfaces:
        namespaces.execute(["rdma", "link", "add", device_name(interface), "type", "rxe", "netdev", interface])
    deadline = time.monotonic() + patience
    while waiting := {device_name(i) for i in interfaces} - active():
        if time.monotonic() > deadline:
            raise LabError(
                f"{len(waiting)} Soft-RoCE devices ({min(waiting)} ...) are not active after {patience:.0f} s: the "
                f"kernel has them in its first network namespace only, and the lab must run there; {_WHERE}"
            )
        time.sleep(0.2)


def active() -> set[str]:
    """The RDMA devices of this namespace whose port is active."""
    links = json.loads(namespaces.execute(["rdma", "-j", "link", "show"]) or "[]")
    return {link["ifname"] for link in links if link.get("state") == "ACTIVE"}
