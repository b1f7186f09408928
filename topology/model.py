"""The fabric as plain data: switches, hosts, RNICs with their legs, and links.

Every part of pingmesh speaks of the fabric in the names made here: an RNIC is `host/device`, a cable is
`a--b` with its ends sorted by code point, one direction of it `a->b`; parallel cables carry their ports
(`a:port--b:port`, `a:port->b:port`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property


@dataclass(frozen=True, slots=True)
class Switch:
    """A switch. `tier` is 1 for a ToR (leaf), 2 for the layer above it, and so on."""

    name: str
    tier: int
    loopback: str | None = None
    icmp_limit: int = 100
    """ICMP answers per second that the switch gives (time exceeded), all requesters together."""
    fabric: str | None = None
    """The fabric that the operator says it belongs to, to be checked against the cables; None: no claim."""


@dataclass(frozen=True, slots=True)
class Leg:
    """One cable of an RNIC: the switch port it goes to and the addresses at both ends."""

    switch: str
    port: str
    address: str | None = None
    switch_address: str | None = None


@dataclass(frozen=True, slots=True)
class Rnic:
    """An RNIC of a host; a bonded one has two legs. RNICs of different `group`s never probe each other."""

    host: str
    device: str
    legs: tuple[Leg, ...]
    rail: int | None = None
    group: str | None = None

    @property
    def name(self) -> str:
        """`host/device`."""
        return f"{self.host}/{self.device}"

    @property
    def address(self) -> str | None:
        """The address of the first leg: where probes go."""
        return self.legs[0].address


@dataclass(frozen=True, slots=True)
class Link:
    """A cable between two switches; `a` sorts before `b` by code point."""

    a: str
    a_port: str
    b: str
    b_port: str
    a_address: str | None = None
    b_address: str | None = None
    parallel: bool = False
    """Whether another cable joins the same two switches, so that names carry ports."""

    @property
    def name(self) -> str:
        """`a--b`, or `a:port--b:port` where cables are parallel."""
        if self.parallel:
            return f"{self.a}:{self.a_port}--{self.b}:{self.b_port}"
        return f"{self.a}--{self.b}"

    @property
    def forward(self) -> DirectedLink:
        """The direction from `a` to `b`."""
        return DirectedLink(self, True)

    @property
    def reverse(self) -> DirectedLink:
        """The direction from `b` to `a`."""
        return DirectedLink(self, False)


@dataclass(frozen=True, slots=True)
class DirectedLink:
    """One direction of a cable between two switches."""

    link: Link
    is_forward: bool

    @property
    def source(self) -> str:
        """The switch it leaves."""
        return self.link.a if self.is_forward else self.link.b

    @property
    def target(self) -> str:
        """The switch it enters."""
        return self.link.b if self.is_forward else self.link.a

    @property
    def target_address(self) -> str | None:
        """The address of the port it enters: what a traced hop answers with."""
        return self.link.b_address if self.is_forward else self.link.a_address

    @property
    def name(self) -> str:
        """`a->b`, or `a:port->b:port` where cables are parallel."""
        k = self.link
        ends = [(k.a, k.a_port), (k.b, k.b_port)]
        if not self.is_forward:
            ends.reverse()
        return "->".join(f"{n}:{p}" if k.parallel else n for n, p in ends)


Path = tuple[DirectedLink, ...]
"""The switch links a packet walks between two ToRs, in order; empty inside one ToR."""


@dataclass(frozen=True)
class Topology:
    """A whole fabric (or several that are not joined). Immutable; built by `topology.files` or `topology.generate`."""

    cluster: str
    switches: Mapping[str, Switch]
    rnics: Mapping[str, Rnic]
    """By name `host/device`."""
    links: tuple[Link, ...]
    _memo: dict[str, object] = field(default_factory=dict, repr=False, compare=False)
    """What `topology.paths` has worked out about this fabric; no part of its value."""

    @cached_property
    def hosts(self) -> Mapping[str, tuple[Rnic, ...]]:
        """The RNICs of each host, in order of the file."""
        out: dict[str, list[Rnic]] = {}
        for r in self.rnics.values():
            out.setdefault(r.host, []).append(r)
        return {h: tuple(rs) for h, rs in out.items()}

    @cached_property
    def directed_links(self) -> tuple[DirectedLink, ...]:
        """Both directions of every switch link."""
        return tuple(d for k in self.links for d in (k.forward, k.reverse))

    @cached_property
    def out_links(self) -> Mapping[str, tuple[DirectedLink, ...]]:
        """The directed links that leave each switch."""
        out: dict[str, list[DirectedLink]] = {s: [] for s in self.switches}
        for d in self.directed_links:
            out[d.source].append(d)
        return {s: tuple(ds) for s, ds in out.items()}

    @cached_property
    def by_address(self) -> Mapping[str, DirectedLink]:
        """The directed link that enters the port with an address: maps traced hops to links."""
        return {d.target_address: d for d in self.directed_links if d.target_address}

    @cached_property
    def owner_of(self) -> Mapping[str, str]:
        """The switch that owns an address: its loopback, its link ports, its ports towards RNICs."""
        out = {s.loopback: s.name for s in self.switches.values() if s.loopback}
        out.update((address, d.target) for address, d in self.by_address.items())
        for rnic in self.rnics.values():
            out.update((leg.switch_address, leg.switch) for leg in rnic.legs if leg.switch_address)
        return out

    @cached_property
    def fabrics(self) -> tuple[frozenset[str], ...]:
        """The switches of each connected fabric, by their first switch. RNICs join nothing: they do not forward."""
        out: list[frozenset[str]] = []
        seen: set[str] = set()
        for start in self.switches:
            if start in seen:
                continue
            part, queue = {start}, [start]
            while queue:
                new = {d.target for d in self.out_links[queue.pop()]} - part
                part |= new
                queue.extend(new)
            seen |= part
            out.append(frozenset(part))
        return tuple(out)

    @cached_property
    def fabric_of(self) -> Mapping[str, int]:
        """The index in `fabrics` of each switch."""
        return {switch: i for i, part in enumerate(self.fabrics) for switch in part}

    def may_probe(self, a: Rnic, b: Rnic) -> bool:
        """Whether `a` and `b` may probe each other: other hosts, one group, one address family, one fabric."""
        if a.host == b.host or a.group != b.group:
            return False
        if a.address and b.address and (":" in a.address) != (":" in b.address):
            return False
        fabric_of = self.fabric_of
        return any(fabric_of[x.switch] == fabric_of[y.switch] for x in a.legs for y in b.legs)

    @cached_property
    def _by_switch(self) -> Mapping[str, tuple[Rnic, ...]]:
        out: dict[str, dict[str, Rnic]] = {}
        for rnic in self.rnics.values():
            for leg in rnic.legs:
                out.setdefault(leg.switch, {})[rnic.name] = rnic
        return {switch: tuple(rnics.values()) for switch, rnics in out.items()}

    def rnics_under(self, switch: str) -> Iterator[Rnic]:
        """RNICs with a leg on a ToR."""
        return iter(self._by_switch.get(switch, ()))
