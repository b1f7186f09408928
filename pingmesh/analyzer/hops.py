"""What traced hops say of a path, without looking at every path that ECMP may choose."""

from __future__ import annotations

from collections.abc import Sequence

from topology.model import DirectedLink, Path, Topology
from topology.paths import ecmp_paths, path_from_hops


class HopReader:
    """Reads hops in one fabric: O(hops) where they are the first ones, all upwards, and leave no choice further on."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._tier = {name: s.tier for name, s in topology.switches.items()}
        # A link between switches of one tier may be crossed on the way: then only the whole ECMP set tells.
        self._level = any(self._tier[k.a] == self._tier[k.b] for k in topology.links)
        self._above: dict[str, list[frozenset[str]]] = {}

    def paths(self, src_switch: str, dst_switch: str, hops: Sequence[tuple[int, str | None]]) -> tuple[Path, ...]:
        """The same as `topology.paths.path_from_hops`, sooner."""
        start = None if self._level else self._climb(src_switch, hops)
        if start:
            rest = ecmp_paths(self._topology, start[-1].target, dst_switch)
            if len(rest) == 1 and len(start) + len(rest[0]) == self._length(src_switch, dst_switch):
                return (start + rest[0],)
        return path_from_hops(self._topology, src_switch, dst_switch, hops)

    def _climb(self, switch: str, hops: Sequence[tuple[int, str | None]]) -> tuple[DirectedLink, ...]:
        """The links upwards that the hops name one after the other from a ToR; empty if they are anything else."""
        links: list[DirectedLink] = []
        by_address = self._topology.by_address
        for ttl, address in hops:
            link = by_address.get(address) if address and ":" not in address else None
            if link is None or ttl != len(links) + 2 or link.source != switch:
                return ()
            if self._tier[link.target] <= self._tier[switch]:
                return ()
            links.append(link)
            switch = link.target
        return tuple(links)

    def _length(self, a: str, b: str) -> int:
        """Links of the shortest valley-free paths; 0 without one."""
        above_a, above_b = self._levels(a), self._levels(b)
        lengths = [
            i + j for i, x in enumerate(above_a) for j, y in enumerate(above_b) if not x.isdisjoint(y)
        ]  # fmt: skip
        return min(lengths, default=0)

    def _levels(self, switch: str) -> list[frozenset[str]]:
        """The switches that are so many links above a switch (first: itself)."""
        known = self._above.get(switch)
        if known is None:
            known = [frozenset((switch,))]
            seen = {switch}
            while edge := frozenset(
                d.target
                for s in known[-1]
                for d in self._topology.out_links[s]
                if self._tier[d.target] > self._tier[s] and d.target not in seen
            ):
                known.append(edge)
                seen |= edge
            self._above[switch] = known
        return known
