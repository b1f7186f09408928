"""Ports that are down and cables that routing avoids, shared by faults that overlap."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable

from pingmesh.lab.faults.errors import FaultError
from pingmesh.lab.faults.lab_port import FabricPort
from topology.model import Link

Port = tuple[str, str]
"""(switch, port name)."""

CARRIER_PATIENCE = 3.0
"""Seconds until a port that was set up must have its carrier."""


class Carriers:
    """Takes ports down and withdraws cables for a fault, and gives back what no other fault still holds.

    All methods block and are idempotent; thread-safe.
    """

    def __init__(self, fabric: FabricPort) -> None:
        self._fabric = fabric
        self._down: dict[Port, set[str]] = {}
        self._withdrawn: dict[str, set[str]] = {}
        self._lock = threading.Lock()

    def down(self, holder: str, ports: Iterable[Port]) -> None:
        """Take ports down for a fault."""
        with self._lock:
            for port in ports:
                holders = self._down.setdefault(port, set())
                if not holders:
                    self._set(port, up=False)
                holders.add(holder)

    def withdraw(self, holder: str, links: Iterable[Link]) -> None:
        """Make routing avoid cables for a fault."""
        with self._lock:
            chosen = list(links)
            for link in chosen:
                self._withdrawn.setdefault(link.name, set()).add(holder)
            self._fabric.routes.withdraw(*chosen)

    def release(self, holder: str) -> None:
        """End a fault's part: its ports go up and its cables are used again, unless another fault holds them."""
        with self._lock:
            up = {p for p, holders in self._down.items() if holders == {holder}}
            for holders in (*self._down.values(), *self._withdrawn.values()):
                holders.discard(holder)
            self._down = {p: h for p, h in self._down.items() if h}
            self._withdrawn = {n: h for n, h in self._withdrawn.items() if h}
            for port in up:
                self._set(port, up=True)
            links = [k for k in self._fabric.topology.links if set(_ports(k)) & up]
            usable = [k for k in links if not (set(_ports(k)) & self._down.keys() or k.name in self._withdrawn)]
            self._await_carrier(p for k in usable for p in _ports(k))
            self._fabric.routes.restore(*usable)

    def _set(self, port: Port, *, up: bool) -> None:
        node, name = port
        self._fabric.set_device(node, self._fabric.interface(node, name), up=up)

    def _await_carrier(self, ports: Iterable[Port]) -> None:
        """Wait until the kernel has noticed: a route over a device without carrier may be refused."""
        deadline = time.monotonic() + CARRIER_PATIENCE
        for node, name in ports:
            interface = self._fabric.interface(node, name)
            while "LOWER_UP" not in self._fabric.run(node, "ip", "-o", "link", "show", interface):
                if time.monotonic() > deadline:
                    raise FaultError(f"The port {interface} of {node} did not get its carrier back.")
                time.sleep(0.05)


def _ports(link: Link) -> tuple[Port, Port]:
    return (link.a, link.a_port), (link.b, link.b_port)
