"""Turns a file that is right in form into a topology, and finds all that does not fit together on the way."""

from __future__ import annotations

import ipaddress
from collections import deque

from topology.build import assemble, cable
from topology.document import Document, Place, place_name
from topology.model import Leg, Link, Rnic, Switch, Topology
from topology.problems import did_you_mean
from topology.schema import FileLeg, FileLink, FileRnic, FileTopology


class Checker:
    """One pass over a file's content; every problem is noted in `document`.

    Names count as known when the file has an entry for them, even a wrong one: one mistake, one message.
    """

    def __init__(self, document: Document, content: FileTopology) -> None:
        self._document = document
        self._content = content
        self._switches = _entries(document, "switches")
        self._hosts = _entries(document, "hosts")
        self._ports: dict[tuple[str, str], Place] = {}
        self._addresses: dict[str, Place] = {}

    def topology(self) -> Topology:
        """The topology; only to be used if the document has no problems."""
        content = self._content
        switches = [
            Switch(name, s.tier, self._address(s.loopback, ("switches", name, "loopback")), s.icmp_limit, s.fabric)
            for name, s in content.switches.items()
        ]
        for name in self._hosts & self._switches:
            self._note(("hosts", name), "is also the name of a switch; rename one of them")
        rnics = [
            self._rnic(host, device, rnic, ("hosts", host, "rnics", device))
            for host, h in content.hosts.items()
            for device, rnic in h.rnics.items()
        ]
        links = [(i, self._link(k, ("links", i))) for i, k in enumerate(content.links) if k is not None]
        good = [(i, k) for i, k in links if k is not None]
        self._fabric_claims(content, good)
        return assemble(content.cluster, switches, rnics, (k for _, k in good))

    def _note(self, place: Place, text: str) -> None:
        self._document.note(place, text)

    def _rnic(self, host: str, device: str, rnic: FileRnic, place: Place) -> Rnic:
        single = [key for key in ("switch", "port", "address", "switch_address") if getattr(rnic, key) is not None]
        if rnic.legs is not None and single:
            self._note((*place, single[0]), f"`{single[0]}` and `legs` exclude each other; move it into a leg")
        elif rnic.legs is None and rnic.switch is None and not self._document.is_wrong(place, "switch", "legs"):
            self._note(place, "is joined to nothing; add `switch:` with its ToR (or `legs:` if it has several)")
        legs: list[tuple[Place, FileLeg]] = []
        if rnic.legs is not None:
            legs = [((*place, "legs", i), leg) for i, leg in enumerate(rnic.legs) if leg is not None]
        elif rnic.switch is not None:
            leg = FileLeg(switch=rnic.switch, port=rnic.port, address=rnic.address, switch_address=rnic.switch_address)
            legs = [(place, leg)]
        mine: set[str] = set()  # a bond has one address on all its legs
        made = tuple(self._leg(f"{host}-{device}", leg, at, mine) for at, leg in legs)
        return Rnic(host, device, made, rnic.rail, rnic.group)

    def _leg(self, default_port: str, leg: FileLeg, place: Place, mine: set[str]) -> Leg:
        port = leg.port or default_port
        if self._known_switch(leg.switch, (*place, "switch")):
            self._take_port(leg.switch, port, (*place, "port"), "port")
        address = self._address(leg.address, (*place, "address"), mine)
        if address:
            mine.add(address)
        switch_address = self._address(leg.switch_address, (*place, "switch_address"))
        self._same_family(address, switch_address, (*place, "switch_address"), "address")
        return Leg(leg.switch, port, address, switch_address)

    def _link(self, link: FileLink, place: Place) -> Link | None:
        known = [self._known_switch(name, (*place, end)) for end, name in (("a", link.a), ("b", link.b))]
        a_port, b_port = link.a_port or link.b, link.b_port or link.a
        a_address = self._address(link.a_address, (*place, "a_address"))
        b_address = self._address(link.b_address, (*place, "b_address"))
        self._same_family(a_address, b_address, (*place, "b_address"), "a_address")
        if link.a == link.b:
            self._note(place, f"joins {link.a} to itself; name two different switches")
            return None
        if known[0]:
            self._take_port(link.a, a_port, (*place, "a_port"), "a_port")
        if known[1]:
            self._take_port(link.b, b_port, (*place, "b_port"), "b_port")
        return cable(link.a, a_port, link.b, b_port, a_address, b_address) if all(known) else None

    def _known_switch(self, name: str, place: Place) -> bool:
        if name in self._switches:
            return True
        if name in self._hosts:
            self._note(place, f"`{name}` is a host; name a switch (hosts are joined by their RNICs' `switch:`)")
        else:
            hint = did_you_mean(name, self._switches) or "; add it under `switches:` or correct the name"
            self._note(place, f"no switch is called `{name}`{hint}")
        return False

    def _take_port(self, switch: str, port: str, place: Place, key: str) -> None:
        taken = self._ports.setdefault((switch, port), place)
        if taken is not place:
            self._note(
                place,
                f"port `{port}` of {switch} is already taken by {place_name(taken[:-1])} "
                f"(line {self._document.line(taken)}); give each cable its own `{key}:`",
            )

    def _address(self, text: str | None, place: Place, mine: set[str] | None = None) -> str | None:
        """The address in canonical form; problems noted. Addresses in `mine` may come again."""
        if text is None:
            return None
        try:
            address = ipaddress.ip_address(text)
        except ValueError:
            hint = "leave the prefix length out" if "/" in text else "write an IPv4 or IPv6 address"
            self._note(place, f"{text!r} is no address; {hint}")
            return None
        if address.is_unspecified or address.is_multicast or address.is_loopback or "%" in text:
            self._note(place, f"{text} is no address that a packet can be routed to; give the port's own address")
            return None
        canonical = str(address)
        if mine and canonical in mine:
            return canonical
        taken = self._addresses.setdefault(canonical, place)
        if taken is not place:
            self._note(
                place,
                f"address {canonical} is already that of {place_name(taken)} (line {self._document.line(taken)}); "
                "give each port its own",
            )
        return canonical

    def _same_family(self, one: str | None, other: str | None, place: Place, key: str) -> None:
        if one and other and (":" in one) != (":" in other):
            self._note(place, f"{other} and `{key}` {one} are of different families; use IPv4 or IPv6 at both ends")

    def _fabric_claims(self, content: FileTopology, links: list[tuple[int, Link]]) -> None:
        """Switches that claim one `fabric` must be joined, and those that claim different ones must not."""
        claims = {name: s.fabric for name, s in content.switches.items() if s.fabric}
        if not claims:
            return
        joined: dict[str, list[str]] = {name: [] for name in self._switches}
        for i, k in links:
            joined[k.a].append(k.b)
            joined[k.b].append(k.a)
            one, other = claims.get(k.a), claims.get(k.b)
            if one and other and one != other:
                text = f"joins {k.a} of fabric `{one}` to {k.b} of fabric `{other}`; remove it or correct a `fabric:`"
                self._note(("links", i), text)
        if self._document.problems:
            return  # a link may be missing only because it is wrong
        home: dict[str, str] = {}
        reached: dict[str, set[str]] = {}
        for name, fabric in claims.items():
            first = home.setdefault(fabric, name)
            if first not in reached:
                reached[first] = _reach(joined, first)
            if name not in reached[first]:
                self._note(
                    ("switches", name, "fabric"),
                    f"{name} claims fabric `{fabric}`, but no links lead from it to {first}; "
                    "add the missing link or name another fabric",
                )


def _reach(joined: dict[str, list[str]], start: str) -> set[str]:
    seen, queue = {start}, deque([start])
    while queue:
        for other in joined[queue.popleft()]:
            if other not in seen:
                seen.add(other)
                queue.append(other)
    return seen


def _entries(document: Document, section: str) -> set[str]:
    return {str(place[1]) for place in document.lines if len(place) == 2 and place[0] == section}
