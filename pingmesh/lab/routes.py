"""The lab's routing: ECMP next hops of every switch, and what a routing protocol would change when a cable dies."""

from __future__ import annotations

import ipaddress
import math
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from pingmesh.lab import namespaces
from topology.model import DirectedLink, Link, Topology

Prefix = str
NextHops = tuple[DirectedLink, ...]
Table = dict[Prefix, NextHops]
"""What one switch does with each destination."""

BUCKETS = 24
"""Buckets of the nft hash: divisible by 1, 2, 3, 4, 6, 8 and 12 next hops."""
BUCKET_TABLE = 1000
"""Routing table of bucket 1 is BUCKET_TABLE + 1."""


def next_hops(topology: Topology, tor: str, withdrawn: frozenset[str] = frozenset()) -> dict[str, NextHops]:
    """The next hops of every switch towards a ToR on shortest up-down paths, without the withdrawn cables (by name).

    A switch from which the ToR can be reached going only down goes down; any other goes up, so that no packet turns
    up again (valley-free, as the BGP designs of RFC 7938 arrange). Switches without a path are absent.
    O(switches + links).
    """
    tier = {name: s.tier for name, s in topology.switches.items()}
    down: dict[str, int] = {tor: 0}
    order = [tor]
    for node in order:  # breadth first, upwards from the ToR: `down` is the length of the way down
        for out in topology.out_links[node]:
            if tier[out.target] > tier[node] and out.link.name not in withdrawn and out.target not in down:
                down[out.target] = down[node] + 1
                order.append(out.target)
    length = dict(down)
    for node in sorted(tier, key=lambda n: -tier[n]):
        if node not in length:
            ups = [
                length[o.target] + 1
                for o in topology.out_links[node]
                if tier[o.target] > tier[node] and o.link.name not in withdrawn and o.target in length
            ]
            level = [
                down[o.target] + 1
                for o in topology.out_links[node]
                if tier[o.target] == tier[node] and o.link.name not in withdrawn and o.target in down
            ]
            if ups or level:
                length[node] = min(ups + level)
    hops: dict[str, NextHops] = {}
    for node, distance in length.items():
        if node == tor:
            continue
        chosen = tuple(
            o
            for o in topology.out_links[node]
            if o.link.name not in withdrawn
            and (
                (tier[o.target] < tier[node] and down.get(o.target, math.inf) + 1 == distance)
                if node in down
                else (tier[o.target] > tier[node] and length.get(o.target, math.inf) + 1 == distance)
                or (tier[o.target] == tier[node] and down.get(o.target, math.inf) + 1 == distance)
            )
        )
        if chosen:
            hops[node] = chosen
    return hops


def tor_prefixes(topology: Topology) -> dict[str, tuple[Prefix, ...]]:
    """The prefixes that hold each ToR's RNICs and ports: one aggregate where no other address lies in it."""
    spans: dict[str, list[ipaddress.IPv4Address | ipaddress.IPv6Address]] = {}
    foreign: list[tuple[str | None, ipaddress.IPv4Address | ipaddress.IPv6Address]] = []
    for rnic in topology.rnics.values():
        for leg in rnic.legs:
            for text in (leg.address, leg.switch_address):
                if text:
                    address = ipaddress.ip_address(text)
                    spans.setdefault(leg.switch, []).append(address)
                    foreign.append((leg.switch, address))
    others = [a for k in topology.links for a in (k.a_address, k.b_address)]
    others += [s.loopback for s in topology.switches.values()]
    foreign += [(None, ipaddress.ip_address(a)) for a in others if a]
    result: dict[str, tuple[Prefix, ...]] = {}
    for tor, addresses in spans.items():
        covering = _covering(addresses)
        if covering is not None and all(owner == tor or address not in covering for owner, address in foreign):
            result[tor] = (str(covering),)
        else:
            four = [ipaddress.IPv4Network(a) for a in addresses if isinstance(a, ipaddress.IPv4Address)]
            six = [ipaddress.IPv6Network(a) for a in addresses if isinstance(a, ipaddress.IPv6Address)]
            both = (*ipaddress.collapse_addresses(four), *ipaddress.collapse_addresses(six))
            result[tor] = tuple(str(p) for p in both)
    return result


def _covering(
    addresses: Sequence[ipaddress.IPv4Address | ipaddress.IPv6Address],
) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
    """The longest prefix that holds all of them; None when families are mixed."""
    if len({a.version for a in addresses}) != 1:
        return None
    low, high = int(min(addresses, key=int)), int(max(addresses, key=int))
    length = addresses[0].max_prefixlen - max(1, (low ^ high).bit_length())
    return ipaddress.ip_network((addresses[0], length), strict=False)


class RouteManager:
    """Routes of all switches, changed only where a withdrawal changes them. All methods block; thread-safe."""

    def __init__(self, topology: Topology, interfaces: Mapping[tuple[str, str], str], *, buckets: int = 0) -> None:
        """`interfaces` maps (switch, port) to the network device; `buckets` > 0: a table for each bucket of a hash."""
        self.topology = topology
        self._interfaces = interfaces
        self._buckets = buckets
        self._prefixes = tor_prefixes(topology)
        self._withdrawn: frozenset[str] = frozenset()
        self._down: frozenset[tuple[str, str]] = frozenset()
        self._tables: dict[str, Table] = {s: {} for s in topology.switches}
        self._lock = threading.Lock()

    @property
    def withdrawn(self) -> frozenset[str]:
        """Names of the cables that routing avoids."""
        return self._withdrawn

    def tables(self) -> Mapping[str, Mapping[Prefix, NextHops]]:
        """What is wanted: switch -> prefix -> next hops. The kernel leaves out hops over devices that are down."""
        return self._tables

    def first_install(self, switch: str) -> list[str]:
        """`ip -batch` lines that install all routes of a switch that has none; remembered as installed."""
        if not any(self._tables.values()):
            self._tables = self._compute(self._withdrawn)
        return [line for prefix, hops in self._tables[switch].items() for line in self._lines(switch, prefix, hops)]

    def withdraw(self, *links: Link | DirectedLink) -> None:
        """Make all switches avoid these cables, as BGP would when their sessions end. Idempotent."""
        with self._lock:
            self._withdrawn |= _names(links)
            self._apply(self._compute(self._withdrawn))

    def restore(self, *links: Link | DirectedLink) -> None:
        """Use these cables again. Idempotent."""
        with self._lock:
            self._withdrawn -= _names(links)
            self._apply(self._compute(self._withdrawn))

    def device_changed(self, switch: str, device: str, *, up: bool) -> None:
        """A device of a switch was set up or down: the kernel dropped its routes and does not bring them back."""
        with self._lock:
            if not up:
                self._down |= {(switch, device)}
                return
            self._down -= {(switch, device)}
            self._apply(self._tables, refresh=(switch, device))

    def _compute(self, withdrawn: frozenset[str]) -> dict[str, Table]:
        tables: dict[str, Table] = {s: {} for s in self.topology.switches}
        for tor, prefixes in self._prefixes.items():
            for switch, hops in next_hops(self.topology, tor, withdrawn).items():
                for prefix in prefixes:
                    tables[switch][prefix] = hops
        return tables

    def _apply(self, wanted: dict[str, Table], refresh: tuple[str, str] | None = None) -> None:
        """Install differences, and every route over the device `refresh`, whatever was installed."""
        batches: dict[str, list[str]] = {}
        for switch, table in wanted.items():
            old = self._tables[switch]
            lines: list[str] = []
            for prefix, hops in table.items():
                stale = any((switch, self._device(h)) == refresh for h in hops)
                if old.get(prefix) != hops or stale:
                    lines += self._lines(switch, prefix, hops, replacing=prefix in old)
            for prefix in old.keys() - table.keys():
                lines += self._lines(switch, prefix, (), replacing=True)
            if lines:
                batches[switch] = lines
        self._tables = wanted
        with ThreadPoolExecutor(max_workers=4) as pool:
            list(pool.map(lambda item: namespaces.ip_batch(item[1], item[0], force=True), batches.items()))

    def _device(self, hop: DirectedLink) -> str:
        return self._interfaces[hop.source, hop.link.a_port if hop.is_forward else hop.link.b_port]

    def _lines(self, switch: str, prefix: Prefix, hops: NextHops, *, replacing: bool = False) -> list[str]:
        family = "-6 " if ":" in prefix else ""
        live = [h for h in hops if (switch, self._device(h)) not in self._down]
        lines = []
        for table in (0, *range(BUCKET_TABLE + 1, BUCKET_TABLE + 1 + self._buckets)):
            where = f" table {table}" if table else ""
            if replacing and not live:
                lines.append(f"{family}route del {prefix}{where}")
            if not live:
                continue
            chosen = [live[(table - BUCKET_TABLE - 1) % len(live)]] if table else live
            # IPv6 finds no way to check a gateway by in a table of buckets, nor while the cable has no carrier.
            how = " onlink" if family else ""
            nexthops = " ".join(f"nexthop via {h.target_address} dev {self._device(h)}{how}" for h in chosen)
            lines.append(f"{family}route replace {prefix}{where} {nexthops}")
        return lines


def _names(links: Iterable[Link | DirectedLink]) -> frozenset[str]:
    return frozenset((k.link if isinstance(k, DirectedLink) else k).name for k in links)
