"""Names that the kernel accepts for what the topology calls otherwise."""

from __future__ import annotations

import hashlib
import re

from pingmesh.lab.namespaces import LabError
from topology.model import Topology

_PLAIN = re.compile(r"[A-Za-z0-9_.+-]{1,15}")
_NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]{0,63}")
MAX_HOSTS = 1000
"""Each has a port of the management network's bridge, and the kernel's bridge has 1024."""
RESERVED = frozenset({"lo", "mgmt0", "mgmt", "all", "default", ".", ".."})


def interface_name(port: str) -> str:
    """The port's name itself if a device can be called so, else its beginning and a hash: the same on every run."""
    if _PLAIN.fullmatch(port) and port not in RESERVED:
        return port
    head = re.sub(r"[^A-Za-z0-9_.+-]", "-", port)[:8]
    return f"{head}-{hashlib.blake2b(port.encode(), digest_size=3).hexdigest()}"


def switch_interfaces(topology: Topology) -> dict[tuple[str, str], str]:
    """The device name of every switch port, by (switch, port)."""
    ports = [(k.a, k.a_port) for k in topology.links] + [(k.b, k.b_port) for k in topology.links]
    ports += [(leg.switch, leg.port) for r in topology.rnics.values() for leg in r.legs]
    return {port: interface_name(port[1]) for port in ports}


def check(topology: Topology) -> None:
    """Refuse, in one sentence, a topology that cannot become a lab."""
    if len(topology.hosts) > MAX_HOSTS:
        raise LabError(f"{len(topology.hosts)} hosts are too many for a lab on one machine: {MAX_HOSTS} at most")
    for node in (*topology.switches, *topology.hosts):
        if not _NODE.fullmatch(node):
            raise LabError(f"{node!r} cannot be the name of a namespace: use letters, digits and any of _ . + -")
    for rnic in topology.rnics.values():
        if not _PLAIN.fullmatch(rnic.device) or rnic.device in RESERVED:
            raise LabError(f"{rnic.name}: a device's name in a lab has 1 to 15 letters, digits or any of _ . + -")
        if len(rnic.legs) != 1:
            raise LabError(f"{rnic.name} has {len(rnic.legs)} legs: the lab builds RNICs with one leg only")
        if not (rnic.legs[0].address and rnic.legs[0].switch_address):
            raise LabError(f"{rnic.name} needs `address` and `switch_address` in the topology to be built in a lab")
    for link in topology.links:
        if not (link.a_address and link.b_address):
            raise LabError(f"link {link.name} needs `a_address` and `b_address` in the topology to be built in a lab")
