"""A congested direction of a link: a slow queue at its sending port that competing traffic keeps filled."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, field

from pingmesh.lab import namespaces
from pingmesh.lab.faults import competitor
from pingmesh.lab.faults.drops import PRIORITY, TABLE
from pingmesh.lab.faults.errors import FaultError
from pingmesh.lab.faults.lab_port import FabricPort
from pingmesh.lab.faults.places import port_at
from topology.model import DirectedLink

QUEUE_DELAY = 0.020
"""Seconds that the competing traffic alone keeps a packet waiting at most, and half of that at least."""
HEADROOM = 1_000_000
"""Bytes of queue for everyone else, so that congestion delays and never drops."""
BURST = 8_000
"""Bytes that may leave at once: more than the largest packet, else the queue drops it."""


@dataclass(slots=True)
class Congestion:
    """One congested directed link. All methods block."""

    key: str
    link: DirectedLink
    rate_bps: int
    _sender: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    def install(self, fabric: FabricPort) -> None:
        """Put the queue in place and start the traffic. Raises FaultError when the link has no addresses."""
        link = self.link
        if link.target_address is None:
            raise FaultError(f"{link.name} cannot be congested: its port at {link.target} has no address.")
        depth = round(self.rate_bps / 8 * QUEUE_DELAY)
        interface = fabric.interface(link.source, port_at(link, link.source))
        # The far end swallows the traffic before its own stack answers each packet with an ICMP error.
        sink = fabric.interface(link.target, port_at(link, link.target))
        fabric.nft(
            link.target,
            f"add table {TABLE}\n"
            f"add counter {TABLE} {self.key}_dropped\n"
            f"add chain {TABLE} {self.key}_hook {{ type filter hook prerouting priority {PRIORITY}; }}\n"
            f'add rule {TABLE} {self.key}_hook iifname "{sink}" udp dport {competitor.DISCARD_PORT} '
            f"counter name {self.key}_dropped drop\n",
        )
        qdisc = f"tbf rate {self.rate_bps}bit burst {BURST} limit {2 * depth + HEADROOM}"
        fabric.run(link.source, "tc", "qdisc", "add", "dev", interface, "root", *qdisc.split())
        self._sender = subprocess.Popen(
            namespaces.entering(
                fabric.namespace(link.source) or link.source,
                [sys.executable, "-I", competitor.__file__, link.target_address, str(depth)],
            ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )

    def remove(self, fabric: FabricPort, last: bool) -> None:
        """Stop the traffic, take the queue and the sink away; `last`: the sink's whole table goes."""
        if self._sender is not None:
            self._sender.kill()
            self._sender.wait()
            self._sender = None
        link = self.link
        interface = fabric.interface(link.source, port_at(link, link.source))
        fabric.run(link.source, "tc", "qdisc", "del", "dev", interface, "root")
        if last:
            fabric.nft(link.target, f"delete table {TABLE}\n")
        else:
            fabric.nft(
                link.target, f"delete chain {TABLE} {self.key}_hook\ndelete counter {TABLE} {self.key}_dropped\n"
            )
