"""Finds in the topology what a fault names."""

from __future__ import annotations

from pingmesh.lab.faults.errors import FaultError, UnknownNameError
from topology.model import DirectedLink, Rnic, Topology


def find_switch(topology: Topology, name: str) -> str:
    """The switch's name. Raises UnknownNameError, or FaultError for a host."""
    if name in topology.switches:
        return name
    if name in topology.hosts:
        rnic = topology.hosts[name][0].name
        raise FaultError(f"{name} is a host, not a switch; its cables belong to its RNICs: use `rnic {rnic}`.")
    raise UnknownNameError("switch", name, topology.switches)


def find_host(topology: Topology, name: str) -> str:
    """The host's name. Raises UnknownNameError."""
    if name not in topology.hosts:
        raise UnknownNameError("host", name, topology.hosts)
    return name


def find_rnic(topology: Topology, name: str) -> Rnic:
    """The RNIC `host/device`; a host with one RNIC may go by its name alone. Raises UnknownNameError."""
    if name in topology.rnics:
        return topology.rnics[name]
    if len(topology.hosts.get(name, ())) == 1:
        return topology.hosts[name][0]
    raise UnknownNameError("RNIC", name, topology.rnics)


def find_link(topology: Topology, first: str, second: str) -> DirectedLink:
    """The link between two ends (`switch` or `switch:port`), directed from the first to the second.

    Raises UnknownNameError or FaultError; parallel cables need a port at one end at least.
    """
    a, _, a_port = first.partition(":")
    b, _, b_port = second.partition(":")
    between = [d for d in topology.out_links[find_switch(topology, a)] if d.target == find_switch(topology, b)]
    if not between:
        neighbours = ", ".join(sorted({d.target for d in topology.out_links[a]}))
        raise FaultError(f"No link joins {a} and {b}; {a} has links to {neighbours or 'no switch'}.")
    found = [d for d in between if a_port in ("", _port(d, a)) and b_port in ("", _port(d, b))]
    choices = ", ".join(f"{a}:{_port(d, a)} {b}:{_port(d, b)}" for d in between)
    if not found:
        raise FaultError(f"No link joins {first} and {second}; there is {choices}.")
    if len(found) > 1:
        raise FaultError(f"{len(found)} parallel links join {a} and {b}; name a port: {choices}.")
    return found[0]


def _port(d: DirectedLink, switch: str) -> str:
    return d.link.a_port if d.link.a == switch else d.link.b_port


def port_at(d: DirectedLink, switch: str) -> str:
    """The port of a link at one of its ends."""
    if switch not in (d.source, d.target):
        raise FaultError(f"{switch} is no end of {d.name}.")
    return _port(d, switch)
