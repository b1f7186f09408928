"""The fabric of namespaces: a namespace per switch and host, a veth pair per cable, routed like a data centre."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from pingmesh.lab import hashing, names, namespaces, sysctls
from pingmesh.lab.hashing import HashKind
from pingmesh.lab.hosts import HostKind
from pingmesh.lab.routes import RouteManager
from pingmesh.lab.shared_network import LOCAL_PREFERENCE, MANAGEMENT_TABLE
from topology.model import Link, Rnic, Topology

MTU = 4200
BRIDGE = "mgmt"
MANAGEMENT_PORT = "mgmt0"
MANAGEMENT_ADDRESS = "10.254.0.1"
ICMP_TABLE = "pmicmp"
_BUILDERS = 4


class Fabric:
    """A topology as namespaces of this (isolated) process. Everything blocks; call it from a thread in async code.

    Nodes are called as in the topology; `build` must have run before anything else is asked.
    """

    def __init__(
        self, topology: Topology, hosts: HostKind, *, seed: int = 1, hash_kind: HashKind | None = None
    ) -> None:
        """`seed` makes the routers' hash seeds; `hash_kind` defaults to what the kernel can do.

        Raises LabError, before anything is built, for a topology that no lab can be made of.
        """
        names.check(topology)
        hosts.check(topology)
        self.topology = topology
        self.hosts = hosts
        self.seed = seed
        self._families = {6 if ":" in a else 4 for r in topology.rnics.values() for a in [r.address] if a}
        self.hash_kind = hash_kind or HashKind.available(self._families)
        self.interfaces = names.switch_interfaces(topology)
        self.routes = RouteManager(topology, self.interfaces, buckets=self.hash_kind.buckets)
        self._numbers = _numbers(topology, hosts)

    # What faults and tests use

    def run(self, node: str, *argv: str, check: bool = True) -> str:
        """Run a command on a switch or host and return its output; raises CommandError if it fails and `check`."""
        return namespaces.execute(self.command(node, argv), node=node, check=check, shown=argv)

    def command(self, node: str, argv: Sequence[str]) -> list[str]:
        """The command line that runs `argv` on a switch or host. Raises LabError for a node that is not there."""
        if node in self.topology.hosts:
            return self.hosts.command(node, argv)
        if node in self.topology.switches:
            return namespaces.entering(node, argv)
        raise namespaces.LabError(f"the lab has no node {node!r}: see `pingmesh topology show` for its names")

    def nft(self, node: str, script: str) -> None:
        """Load an nft script in a node's namespace (atomic: all or nothing)."""
        argv = ["nft", "-f", "-"]
        name = self.namespace(node)
        if name is None:
            namespaces.execute(argv, node=node, text=script)
        else:
            namespaces.run(name, argv, text=script)

    def namespace(self, node: str) -> str | None:
        """The network namespace that holds a node's devices; None: the lab's own."""
        return self.hosts.namespace(node) if node in self.topology.hosts else node

    def interface(self, node: str, port: str) -> str:
        """The network device of a switch's port, or of a host's RNIC (by its device). Raises KeyError."""
        if node in self.topology.hosts:
            return self.hosts.interface(self.topology.rnics[f"{node}/{port}"])
        return self.interfaces[node, port]

    def link_ends(self, link: Link) -> tuple[tuple[str, str], tuple[str, str]]:
        """(node, network device) of both ends of a cable: of `a`, of `b`."""
        return (link.a, self.interface(link.a, link.a_port)), (link.b, self.interface(link.b, link.b_port))

    def rnic_ends(self, rnic: Rnic) -> tuple[tuple[str, str], tuple[str, str]]:
        """(node, network device) of both ends of an RNIC's cable: of the host, of the ToR."""
        leg = rnic.legs[0]
        return (rnic.host, self.interface(rnic.host, rnic.device)), (leg.switch, self.interface(leg.switch, leg.port))

    def management_address(self, host: str) -> str:
        """The host's address on the management network."""
        number = list(self.topology.hosts).index(host) + 1
        return f"10.254.{number // 250 + 1}.{number % 250 + 1}"

    def broker_address(self, host: str) -> str:
        """Where a host's agent finds the broker.

        Hosts that share the lab's namespace have an address each, by which one can be cut off from the broker.
        """
        return self.management_address(host) if self.hosts.namespace(host) is None else MANAGEMENT_ADDRESS

    @property
    def broker_listens(self) -> str:
        """The address that the broker has to listen on so that all find it."""
        return "0.0.0.0" if self._shared() else MANAGEMENT_ADDRESS  # noqa: S104 - the addresses of all hosts

    def set_management(self, host: str, *, up: bool) -> None:
        """Cut a host off from the management network, without a sign to either side, or connect it again."""
        port = self._management_port(host)
        if self.hosts.namespace(host) is not None:
            namespaces.ip_batch([f"link set {port} {'up' if up else 'down'}"])
            return
        chain = f"{MANAGEMENT_TABLE} {port}"
        hook = "{ type filter hook output priority 0; }"
        drop = f"add table {MANAGEMENT_TABLE}\nadd chain {chain} {hook}\nflush chain {chain}\n"
        drop += f"add rule {chain} ip daddr {self.management_address(host)} drop\n"
        self.nft(host, f"delete chain {chain}\n" if up else drop)

    def set_device(self, node: str, device: str, *, up: bool) -> None:
        """Set a network device of a node up or down, and bring back what the kernel removes.

        The kernel forgets routes over a device that is set down; set up, the device gets them again.
        """
        lines = [f"link set {device} {'up' if up else 'down'}"]
        if up and node in self.topology.hosts:
            ends = {self.rnic_ends(r)[0][1]: r for r in self.topology.hosts[node]}
            lines += self._host_routes(ends[device]) if device in ends else []
        namespaces.ip_batch(lines, self.namespace(node))
        if node in self.topology.switches:
            self.routes.device_changed(node, device, up=up)

    # Building

    def build(self, progress: Callable[[str], None] = lambda _: None) -> None:
        """Make everything, about 40 ms a node. Not to be called twice."""
        nodes = [*self.topology.switches, *self._host_namespaces()]
        progress(
            f"{len(self.topology.switches)} switches, {len(self.topology.hosts)} hosts, {len(self._cables())} cables"
        )
        namespaces.ip_batch(f"netns add {n}" for n in nodes)
        # Before any device exists: a device takes what is the default when it is made.
        self._each(nodes, self._write_sysctls)
        shared = self._shared()
        devices = [self.hosts.interface(r) for r in shared]
        if shared:
            rules = [p + self._numbers[r.name] for r in shared for p in (100, 200)]
            self.hosts.prepare([*devices, BRIDGE], [*rules, LOCAL_PREFERENCE])
        namespaces.ip_batch(self._cable_lines())
        namespaces.ip_batch(self._management_lines())
        self._each(nodes, lambda n: namespaces.inside(n, sysctls.keep_neighbours))
        self._each(nodes, lambda n: namespaces.ip_batch(self._node_lines(n), n))
        self._each(list(self.topology.switches), self._load_nft)
        if shared:
            for device in devices:
                sysctls.keep_neighbours(device)
            namespaces.ip_batch(self._host_lines(shared))
            self.hosts.attach(shared)
        self.resolve_neighbours()

    def close(self) -> None:
        """Take back what would outlive the lab's processes. Idempotent."""
        self.hosts.close()

    def resolve_neighbours(self) -> None:
        """Make every node look up its neighbours, so that no first probe waits for an answer or is dropped."""
        targets: dict[str | None, list[tuple[str | None, str]]] = {}
        for k in self.topology.links:
            targets.setdefault(k.a, []).append((None, str(k.b_address)))
            targets.setdefault(k.b, []).append((None, str(k.a_address)))
        for r in self.topology.rnics.values():
            targets.setdefault(r.legs[0].switch, []).append((None, str(r.address)))
            targets.setdefault(self.hosts.namespace(r.host), []).append((r.address, str(r.legs[0].switch_address)))
        for node, pairs in targets.items():
            if node is None:
                _knock(pairs)
            else:
                namespaces.inside(node, lambda p=pairs: _knock(p))  # type: ignore[misc]

    def _shared(self) -> list[Rnic]:
        """The RNICs of hosts that have no namespace of their own."""
        return [r for r in self.topology.rnics.values() if self.hosts.namespace(r.host) is None]

    def _each(self, nodes: Sequence[str], work: Callable[[str], None]) -> None:
        with ThreadPoolExecutor(max_workers=_BUILDERS) as pool:
            list(pool.map(work, nodes))

    def _host_namespaces(self) -> list[str]:
        return list(dict.fromkeys(n for h in self.topology.hosts if (n := self.hosts.namespace(h)) is not None))

    def _cables(self) -> list[tuple[tuple[str | None, str], tuple[str | None, str]]]:
        """(namespace, device) of both ends of every cable."""
        cables: list[tuple[tuple[str | None, str], tuple[str | None, str]]] = []
        cables += (self.link_ends(k) for k in self.topology.links)
        for r in self.topology.rnics.values():
            (host, device), tor = self.rnic_ends(r)
            cables.append(((self.hosts.namespace(host), device), tor))
        return cables

    def _cable_lines(self) -> list[str]:
        def at(end: tuple[str | None, str]) -> str:
            return f"{end[1]} mtu {MTU}" + (f" netns {end[0]}" if end[0] else "")

        return [f"link add {at(a)} type veth peer name {at(b)}" for a, b in self._cables()]

    def _management_lines(self) -> list[str]:
        lines = [
            "link set lo up",
            f"link add {BRIDGE} type bridge",
            f"addr add {MANAGEMENT_ADDRESS}/16 dev {BRIDGE}",
            f"link set {BRIDGE} up",
        ]
        for host in self.topology.hosts:
            name = self.hosts.namespace(host)
            if name is None:
                lines.append(f"addr add {self.management_address(host)}/32 dev {BRIDGE}")
            else:
                port = self._management_port(host)
                lines.append(f"link add {port} type veth peer name {MANAGEMENT_PORT} netns {name}")
                lines.append(f"link set {port} master {BRIDGE} up")
        return lines

    def _management_port(self, host: str) -> str:
        """The device of the management bridge to which a host is plugged."""
        return f"m{list(self.topology.hosts).index(host) + 1}"

    def _write_sysctls(self, node: str) -> None:
        is_switch = node in self.topology.switches
        seeded = is_switch and self.hash_kind is HashKind.KERNEL
        seed = hashing.router_seed(self.seed, node) if seeded else None
        namespaces.inside(node, lambda: sysctls.write(is_switch=is_switch, seed=seed, with_ipv6=6 in self._families))

    def _node_lines(self, node: str) -> list[str]:
        if node in self.topology.switches:
            return self._switch_lines(node)
        lines = ["link set lo up"]
        for host, rnics in self.topology.hosts.items():
            if self.hosts.namespace(host) == node:
                lines += [f"addr add {self.management_address(host)}/16 dev {MANAGEMENT_PORT}"]
                lines += [f"link set {MANAGEMENT_PORT} up"]
                lines += self._host_lines(rnics)
        return lines

    def _switch_lines(self, switch: str) -> list[str]:
        lines = ["link set lo up"]
        loopback = self.topology.switches[switch].loopback
        if loopback:
            lines.append(_address(loopback, None, "lo"))
        for k in self.topology.links:
            a, b = self.link_ends(k)
            if a[0] == switch:
                lines += [_address(str(k.a_address), k.b_address, a[1]), f"link set {a[1]} up"]
            if b[0] == switch:
                lines += [_address(str(k.b_address), k.a_address, b[1]), f"link set {b[1]} up"]
        for r in self.topology.rnics_under(switch):
            device = self.rnic_ends(r)[1][1]
            lines += [_address(str(r.legs[0].switch_address), r.address, device), f"link set {device} up"]
        if self.hash_kind is HashKind.NFT:
            for family in sorted(self._families):
                lines += hashing.bucket_rules(family)
        return lines + self.routes.first_install(switch)

    def _host_lines(self, rnics: Sequence[Rnic]) -> list[str]:
        """Each RNIC's traffic, by source address or device, leaves by its own cable.

        With several RNICs, packets from one to another of the same namespace take the fabric too: the `local` table
        is asked after the rules of the RNICs, which see only what the host itself sends.
        """
        lines = []
        for r in rnics:
            number, device = self._numbers[r.name], self.rnic_ends(r)[0][1]
            flag = _flag(str(r.address))
            lines += [_address(str(r.address), r.legs[0].switch_address, device), f"link set {device} up"]
            lines.append(f"{flag}rule add pref {100 + number} iif lo from {r.address} lookup {100 + number}")
            lines.append(f"{flag}rule add pref {200 + number} iif lo oif {device} lookup {100 + number}")
        for flag in sorted({_flag(str(r.address)) for r in rnics}) if len(rnics) > 1 else []:
            lines += [f"{flag}rule add pref {LOCAL_PREFERENCE} lookup local", f"{flag}rule del pref 0"]
        for r in rnics:
            lines += self._host_routes(r)
        return lines

    def _host_routes(self, rnic: Rnic) -> list[str]:
        """The routes of one RNIC: its own table, and its host's main table, where the first RNIC is preferred."""
        device = self.rnic_ends(rnic)[0][1]
        number = self._numbers[rnic.name]
        via = f"default via {rnic.legs[0].switch_address} dev {device}"
        flag = _flag(str(rnic.address))
        lines = [f"{flag}route replace {via} src {rnic.address} table {100 + number}"]
        if self.hosts.namespace(rnic.host) is not None:
            lines.append(f"{flag}route replace {via} src {rnic.address} metric {number}")
        return lines

    def _load_nft(self, switch: str) -> None:
        limit = self.topology.switches[switch].icmp_limit
        script = _ICMP_LIMIT.format(table=ICMP_TABLE, limit=limit, burst=max(5, limit // 4))
        if self.hash_kind is HashKind.NFT:
            script += hashing.nft_hash(hashing.router_seed(self.seed, switch))
        self.nft(switch, script)


def _numbers(topology: Topology, hosts: HostKind) -> dict[str, int]:
    """The number of each RNIC, 1 .., among those of its namespace."""
    counts: dict[str | None, int] = {}
    numbers: dict[str, int] = {}
    for r in topology.rnics.values():
        name = hosts.namespace(r.host)
        numbers[r.name] = counts[name] = counts.get(name, 0) + 1
    return numbers


def _flag(address: str) -> str:
    return "-6 " if ":" in address else ""


def _address(address: str, peer: str | None, device: str) -> str:
    """The line that gives a device its address; ends of a cable that do not share a /31 or /127 are point to point."""
    mine = ipaddress.ip_address(address)
    flag, how = ("-6 ", " nodad") if mine.version == 6 else ("", "")
    if peer is None:
        prefix = f"{address}/{mine.max_prefixlen}"
    elif int(mine) ^ int(ipaddress.ip_address(peer)) == 1:
        prefix = f"{address}/{mine.max_prefixlen - 1}"
    else:
        prefix = f"{address} peer {peer}/{mine.max_prefixlen}"
    return f"{flag}addr add {prefix} dev {device}{how}"


def _knock(pairs: Sequence[tuple[str | None, str]]) -> None:
    """Send a datagram to the discard port of each (source, target); that it may be refused does not matter."""
    for source, target in pairs:
        with socket.socket(socket.AF_INET6 if ":" in target else socket.AF_INET, socket.SOCK_DGRAM) as s:
            try:
                if source:
                    s.bind((source, 0))
                s.sendto(b"", (target, 9))
            except OSError:
                continue  # a device that is not up yet: the first probe resolves it


_ICMP_LIMIT = """\
table inet {table} {{
  chain output {{
    type filter hook output priority filter; policy accept;
    icmp type time-exceeded limit rate over {limit}/second burst {burst} packets counter drop
    icmpv6 type time-exceeded limit rate over {limit}/second burst {burst} packets counter drop
  }}
}}
"""
