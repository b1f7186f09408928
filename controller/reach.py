"""What of the fabric probe lists depend on: units of alike RNICs, which of them meet, and over which links."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from topology.model import Path, Rnic, Topology
from topology.paths import link_shares, path_from_hops, rnic_paths, trace_ttls

EXACT_PAIRS = 40_000
"""Up to this many pairs of units all are looked at; above, `SAMPLED_PEERS` random partners of each unit."""
SAMPLED_PEERS = 24


@dataclass(frozen=True, slots=True)
class Unit:
    """RNICs that the network cannot tell apart: same legs' ToRs, address family and group."""

    tors: tuple[str, ...]
    addressed: tuple[str, ...]
    """The ToRs whose leg has the address that probes go to."""
    family: int
    group: str | None


@dataclass(frozen=True, slots=True)
class Walk:
    """The directed switch links that a traced tuple certainly takes; `complete` when every choice was answered."""

    links: tuple[str, ...]
    complete: bool


def _unit(r: Rnic) -> Unit:
    addressed = tuple(sorted({leg.switch for leg in r.legs if leg.address == r.address}))
    family = 6 if r.address and ":" in r.address else 4
    return Unit(tuple(sorted({leg.switch for leg in r.legs})), addressed, family, r.group)


class Reach:
    """Pairs of units with their ECMP link shares and trace masks, worked out once per pair; immutable otherwise."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self.unit_of: dict[str, Unit] = {name: _unit(r) for name, r in topology.rnics.items()}
        members: dict[Unit, list[str]] = {}
        for name, unit in self.unit_of.items():
            members.setdefault(unit, []).append(name)
        self.members: dict[Unit, tuple[str, ...]] = {u: tuple(ns) for u, ns in members.items()}
        self._classes: dict[tuple[int, int, str | None], list[Unit]] = {}
        for unit in self.members:
            self._classes.setdefault(self._class(unit), []).append(unit)
        self._shares: dict[tuple[Unit, Unit], Mapping[str, float]] = {}
        self._masks: dict[tuple[Unit, Unit], int] = {}
        self._hits: dict[tuple[Unit, Unit], dict[str, float]] = {}
        self._standing: dict[Unit, Unit] = {}
        alike: dict[object, Unit] = {}
        for unit in self.members:
            self._standing[unit] = alike.setdefault(self._likeness(unit), unit)
        self._first_pair: dict[Unit, tuple[Unit, Unit]] = {}
        self._renames: dict[tuple[Unit, Unit, int], dict[str, str]] = {}
        self._counts: dict[tuple[Unit, Unit], int] = {}

    def _class(self, u: Unit) -> tuple[int, int, str | None]:
        return self.topology.fabric_of.get(u.tors[0], -1), u.family, u.group

    def _likeness(self, unit: Unit) -> object:
        """Equal for units whose ToRs hang on the same switches above: they have the same ways to anywhere else.

        Only the first and last links' names differ, so that numbers of paths and trace masks are worked out once.
        """
        tiers = self.topology.switches
        above = []
        for tor in unit.tors:
            ups = self.topology.out_links[tor]
            if any(tiers[d.target].tier <= tiers[tor].tier for d in ups):
                return unit
            above.append((tuple(sorted(d.target for d in ups)), tor in unit.addressed))
        return self._class(unit), tuple(above)

    def _alike(self, a: Unit, b: Unit) -> tuple[Unit, Unit]:
        """A pair with as many ways as this one, the same for as many pairs as possible."""
        one, other = self._standing[a], self._standing[b]
        if one is not other:
            return (one, other) if set(one.tors).isdisjoint(other.tors) else (a, b)
        # Both hang on the same switches: any two of them do.
        return self._first_pair.setdefault(one, (a, b)) if set(a.tors).isdisjoint(b.tors) else (a, b)

    def _count(self, a: Unit, b: Unit) -> int:
        pair = self._alike(a, b)
        known = self._counts.get(pair)
        if known is None:
            known = self._counts[pair] = len(self._paths(*pair))
        return known

    def partners(self, unit: Unit) -> Sequence[Unit]:
        """Units of its fabric, family and group; those that share a ToR with it (itself too) are among them."""
        return self._classes[self._class(unit)]

    def meets(self, a: Unit, b: Unit) -> bool:
        """Whether inter-ToR probes from `a` to `b` make sense: no ToR in common, a way, and not one host only."""
        if not set(a.tors).isdisjoint(b.tors) or self._class(a) != self._class(b):
            return False
        hosts = {self.topology.rnics[n].host for u in (a, b) for n in self.members[u][:2]}
        return len(hosts) > 1 and self._count(a, b) > 0

    def shares(self, a: Unit, b: Unit) -> Mapping[str, float]:
        """By directed link, the share of `a`'s tuples to `b` that takes it, if every router splits evenly."""
        pair = self._alike(a, b)
        known = self._shares.get(pair)
        if known is None:
            known = self._shares[pair] = {d.name: p for d, p in link_shares(self._paths(*pair)).items()}
        if pair == (a, b):
            return known
        names = self._renamed(pair[0], a, 0) | self._renamed(pair[1], b, 1)
        return {names.get(link, link): share for link, share in known.items()}

    def _renamed(self, unit: Unit, to: Unit, way: int) -> dict[str, str]:
        """The links up from (way 0) or down to (1) the ToRs of a unit by name -> those of one that stands alike."""
        known = self._renames.get((unit, to, way))
        if known is None:
            ends = [self._up_names(tor, way) for u in (unit, to) for tor in u.tors]
            half = len(ends) // 2
            pairs = zip(ends[:half], ends[half:], strict=True)
            known = self._renames[unit, to, way] = {x: y for old, new in pairs for x, y in zip(old, new, strict=True)}
        return known

    def _up_names(self, tor: str, way: int) -> list[str]:
        ups = sorted(self.topology.out_links[tor], key=lambda d: d.target)  # stable: parallel links in their order
        if way == 0:
            return [d.name for d in ups]
        return [(d.link.reverse if d.is_forward else d.link.forward).name for d in ups]

    def parallel(self, unit: Unit, rng: random.Random) -> int:
        """N of Eq. (1): the largest ECMP set from here, over a few partners where there are many."""
        others = [u for u in self.partners(unit) if u is not unit]
        if len(others) > SAMPLED_PEERS:
            others = rng.sample(others, 6)
        return max((self._count(unit, u) for u in others if self.meets(unit, u)), default=0)

    def mask(self, source: str, target: str) -> int:
        """`Flow.trace_mask` of a pair of RNICs."""
        pair = self._alike(self.unit_of[source], self.unit_of[target])
        known = self._masks.get(pair)
        if known is None:
            known = self._masks[pair] = self._mask(*pair)
        return known

    def _mask(self, a: Unit, b: Unit) -> int:
        if len(a.tors) == len(b.addressed) == 1:
            return sum(1 << (ttl - 1) for ttl in trace_ttls(self.topology, a.tors[0], b.addressed[0]))
        paths = self._paths(a, b)
        nodes = [(p[0].source if p else "", *(d.name for d in p)) for p in paths]
        return sum(
            1 << at
            for at in range(max(map(len, nodes), default=0))
            if len({n[: at + 1] for n in nodes}) > len({n[:at] for n in nodes})
        )

    def walk(self, source: str, target: str, hops: Sequence[tuple[int, str | None]] = ()) -> Walk:
        """What a trace says: the links that every fitting path has (over IPv6, parallel links look alike)."""
        a, b = self.unit_of[source], self.unit_of[target]
        if len(a.tors) == len(b.addressed) == 1:
            fitting = set(path_from_hops(self.topology, a.tors[0], b.addressed[0], hops))
        else:
            allowed = frozenset(self._paths(a, b))
            fitting = {
                path
                for start in a.tors
                for end in b.addressed
                for path in path_from_hops(self.topology, start, end, hops)
                if path in allowed
            }
        if not fitting:
            return Walk((), False)
        first, *rest = fitting
        certain = tuple(d.name for d in first if all(d in path for path in rest))
        answered = sum(1 << (ttl - 1) for ttl, address in hops if address is not None)
        mask = self.mask(source, target)
        return Walk(certain, mask & ~answered == 0)

    def trace_hits(self, a: Unit, b: Unit) -> Mapping[str, float]:
        """TTL-limited packets that reach each switch when one tuple from `a` to `b` is traced once."""
        pair = self._alike(a, b)
        known = self._hits.get(pair)
        if known is None:
            known = self._hits[pair] = self._count_hits(*pair)
        if known.keys().isdisjoint(pair[0].tors + pair[1].tors):
            return known
        names = dict(zip(pair[0].tors + pair[1].tors, a.tors + b.tors, strict=True))
        return {names.get(switch, switch): n for switch, n in known.items()}

    def _count_hits(self, a: Unit, b: Unit) -> dict[str, float]:
        mask = self._mask(a, b)
        known: dict[str, float] = {}
        if mask & 1:
            known.update((tor, 1 / len(a.tors)) for tor in a.tors)
        at = {d.name: (i, d.target) for path in self._paths(a, b) for i, d in enumerate(path)}
        for link, share in self.shares(a, b).items():
            i, switch = at[link]
            if mask >> (i + 1) & 1:
                known[switch] = known.get(switch, 0.0) + share
        return known

    def _paths(self, a: Unit, b: Unit) -> tuple[Path, ...]:
        return rnic_paths(self.topology, self._sample(a), self._sample(b))

    def _sample(self, unit: Unit) -> Rnic:
        return self.topology.rnics[self.members[unit][0]]

    @cached_property
    def _small(self) -> bool:
        return sum(len(us) ** 2 for us in self._classes.values()) <= EXACT_PAIRS

    @cached_property
    def pairs_over(self) -> Mapping[str, Sequence[tuple[Unit, Unit]]]:
        """For each directed link the unit pairs whose tuples may take it (all of them, or a sample in large fabrics).

        Its keys are the links that some allowed pair can cross: what coverage is a share of.
        """
        rng = random.Random(0)
        over: dict[str, list[tuple[Unit, Unit]]] = {}
        for units in self._classes.values():
            for a in units:
                others = units if self._small or len(units) <= SAMPLED_PEERS else rng.sample(units, SAMPLED_PEERS)
                for b in others:
                    if self.meets(a, b):
                        for link in self.shares(a, b):
                            over.setdefault(link, []).append((a, b))
        return over
