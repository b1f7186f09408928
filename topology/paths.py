"""Which ways a packet can take: the ECMP sets of ToR pairs, and what traced hops say about them.

A path goes up, crosses at most one link between switches of one tier, and goes down (valley-free); of these, ECMP
uses the shortest. Sets are built from each switch's cone of ways up, so a pair costs its own
paths, not the fabric's size.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import gcd

from topology.model import DirectedLink, Path, Rnic, Topology

CACHED_PATHS = 1_000_000
"""Paths kept per topology (about 100 B each); the pairs used longest ago are forgotten first."""


@dataclass(frozen=True, slots=True, eq=False)
class Half:
    """The ways of an ECMP set from its switch up to where they turn, or from there down; likelier ones are repeated.

    Pairs whose ways are the same share one object.
    """

    ways: tuple[Path, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Halves:
    """An ECMP set as its two halves: `count` paths of `hops` links each; a link between equal tiers is in `up`."""

    count: int
    hops: int
    up: Half
    down: Half


@dataclass(frozen=True, slots=True, eq=False)
class _Turns:
    """Where the shortest paths of some pairs turn: (top, link across, top), and what their halves depend on."""

    hops: int
    at: tuple[tuple[str, Path, str], ...]
    count: int
    up: int
    down: int


class _Ways:
    """The up and down adjacency of a topology, its cones, and the ECMP sets asked for last."""

    def __init__(self, t: Topology) -> None:
        self.up: dict[str, list[tuple[str, DirectedLink, DirectedLink]]] = {s: [] for s in t.switches}
        self.level: list[DirectedLink] = []
        directed = t.directed_links
        for forward, reverse in zip(directed[::2], directed[1::2], strict=True):
            a, b = forward.source, forward.target
            rise = t.switches[b].tier - t.switches[a].tier
            if rise > 0:
                self.up[a].append((b, forward, reverse))
            elif rise < 0:
                self.up[b].append((a, reverse, forward))
            else:
                self.level += (forward, reverse)
        self.cones: dict[str, dict[str, list[tuple[Path, Path]]]] = {}
        self.pairs: OrderedDict[tuple[str, str], tuple[Path, ...]] = OrderedDict()
        self.size = 0
        self.choices: dict[tuple[str, str], tuple[int, ...]] = {}
        self.above: dict[str, int] = {}
        self.turned: dict[tuple[int, int], _Turns] = {}
        self.halved: dict[tuple[bool, str, int], Half] = {}
        self.numbers: dict[object, int] = {}

    def cone(self, switch: str) -> dict[str, list[tuple[Path, Path]]]:
        """Every switch above (and this one) with the shortest ways up to it and, mirrored, down from it."""
        known = self.cones.get(switch)
        if known is not None:
            return known
        cone: dict[str, list[tuple[Path, Path]]] = {switch: [((), ())]}
        edge = [switch]
        while edge:
            fresh: dict[str, list[tuple[Path, Path]]] = {}
            for at in edge:
                for above, rise, fall in self.up[at]:
                    if above not in cone:
                        ways = fresh.setdefault(above, [])
                        ways.extend(((*up, rise), (fall, *down)) for up, down in cone[at])
            cone |= fresh
            edge = list(fresh)
        self.cones[switch] = cone
        return cone

    def turns(self, src: str, dst: str) -> tuple[int, list[tuple[str, Path, str]]]:
        """How long the shortest valley-free paths are, and where they turn, in a fixed order."""
        rise, fall = self.cone(src), self.cone(dst)
        turns: list[tuple[int, str, Path, str]] = [
            (len(ways[0][0]) + len(fall[top][0][0]), top, (), top) for top, ways in rise.items() if top in fall
        ]
        turns += [
            (len(rise[d.source][0][0]) + 1 + len(fall[d.target][0][0]), d.source, (d,), d.target)
            for d in self.level
            if d.source in rise and d.target in fall
        ]
        best = min((turn[0] for turn in turns), default=0)
        return best, [turn[1:] for turn in turns if turn[0] == best]

    def shortest(self, src: str, dst: str) -> tuple[Path, ...]:
        """The shortest valley-free paths, in a fixed order."""
        rise, fall = self.cone(src), self.cone(dst)
        return tuple(
            up + across + down
            for left, across, right in self.turns(src, dst)[1]
            for up, _ in rise[left]
            for _, down in fall[right]
        )

    def halves(self, src: str, dst: str) -> Halves:
        """The same as halves; what pairs have in common is worked out once. O(1) for most pairs."""
        rise, fall = self.cone(src), self.cone(dst)
        # What is above decides, unless one end is itself where paths turn.
        shared = not self.level and src not in fall and dst not in rise
        key = (self._above(src), self._above(dst))
        turns = self.turned.get(key) if shared else None
        if turns is None:
            turns = self._turns(src, dst)
            if shared:
                self.turned[key] = turns
        up = self.halved.get((True, src, turns.up))
        if up is None:
            falls = _least([len(fall[right]) for _, _, right in turns.at])
            ways = (w + x for n, (top, x, _) in zip(falls, turns.at, strict=True) for w, _ in rise[top] * n)
            up = self.halved[True, src, turns.up] = Half(tuple(ways))
        down = self.halved.get((False, dst, turns.down))
        if down is None:
            rises = _least([len(rise[left]) for left, _, _ in turns.at])
            ways = (w for n, (_, _, top) in zip(rises, turns.at, strict=True) for _, w in fall[top] * n)
            down = self.halved[False, dst, turns.down] = Half(tuple(ways))
        return Halves(turns.count, turns.hops, up, down)

    def _turns(self, src: str, dst: str) -> _Turns:
        rise, fall = self.cone(src), self.cone(dst)
        hops, at = self.turns(src, dst)
        rises = [len(rise[left]) for left, _, _ in at]
        falls = [len(fall[right]) for _, _, right in at]
        up = tuple((n, left, across) for n, (left, across, _) in zip(_least(falls), at, strict=True))
        down = tuple((n, right) for n, (_, _, right) in zip(_least(rises), at, strict=True))
        count = sum(a * b for a, b in zip(rises, falls, strict=True))
        return _Turns(hops, tuple(at), count, self._number(up), self._number(down))

    def _above(self, switch: str) -> int:
        """A number that switches with the same switches above them, as far away and over as many ways, share."""
        if switch not in self.above:
            cone = self.cone(switch).items()
            self.above[switch] = self._number(
                frozenset((top, len(ways[0][0]), len(ways)) for top, ways in cone if top != switch)
            )
        return self.above[switch]

    def _number(self, what: object) -> int:
        return self.numbers.setdefault(what, len(self.numbers))


def _least(counts: list[int]) -> list[int]:
    """Numbers in the same proportions, as small as they can be."""
    divisor = gcd(*counts) or 1
    return [n // divisor for n in counts]


def _ways(t: Topology) -> _Ways:
    known = t._memo.get("paths")
    if not isinstance(known, _Ways):
        known = t._memo["paths"] = _Ways(t)
    return known


def ecmp_paths(t: Topology, src_switch: str, dst_switch: str) -> tuple[Path, ...]:
    """All shortest up-down paths between two switches, always in the same order.

    Returns:
        `((),)` inside one switch, `()` if there is no such path.

    Raises:
        KeyError: no such switch.

    Complexity: O(paths x hops) the first time, O(1) while cached (`CACHED_PATHS`).

    >>> from topology.generate import leaf_spine
    >>> [[d.name for d in path] for path in ecmp_paths(leaf_spine(2, 2, 1, 1), "leaf1", "leaf2")]
    [['leaf1->spine1', 'spine1->leaf2'], ['leaf1->spine2', 'spine2->leaf2']]
    """
    ways = _ways(t)
    key = (src_switch, dst_switch)
    paths = ways.pairs.get(key)
    if paths is not None:
        ways.pairs.move_to_end(key)
        return paths
    paths = ways.pairs[key] = ways.shortest(src_switch, dst_switch)
    ways.size += len(paths)
    while ways.size > CACHED_PATHS and len(ways.pairs) > 1:
        ways.size -= len(ways.pairs.popitem(last=False)[1])
    return paths


def ecmp_halves(t: Topology, src_switch: str, dst_switch: str) -> Halves:
    """`ecmp_paths` as halves, where each half by itself is enough: pairs of a large fabric share most of them.

    Raises:
        KeyError: no such switch.

    Complexity: O(1) once pairs with the same switches above them were asked for.

    >>> from topology.generate import leaf_spine
    >>> halves = ecmp_halves(leaf_spine(2, 2, 1, 1), "leaf1", "leaf2")
    >>> halves.count, [[d.name for d in way] for way in halves.up.ways]
    (2, [['leaf1->spine1'], ['leaf1->spine2']])
    """
    return _ways(t).halves(src_switch, dst_switch)


def tops(t: Topology, switch: str) -> frozenset[str]:
    """The switches at which a path from (or to) a switch may turn: itself, those above it, and their peers of one tier.

    Two switches have an ECMP path if and only if their sets meet.
    """
    ways = _ways(t)
    cone = ways.cone(switch)
    return frozenset(cone) | {d.link.name for d in ways.level if d.source in cone}


def trace_ttls(t: Topology, src_switch: str, dst_switch: str) -> tuple[int, ...]:
    """The TTLs whose answers decide which ECMP path a flow takes; 1 is the source ToR, which is never in doubt.

    A TTL is needed where, the hops before it known, more than one link could be next. Leaf-spine: `(2,)`;
    three tiers across pods: `(2, 3)`; one ToR or one path: `()`.
    """
    choices = _ways(t).choices
    known = choices.get((src_switch, dst_switch))
    if known is None:
        paths = ecmp_paths(t, src_switch, dst_switch)
        known = tuple(
            hop + 2
            for hop in range(max(map(len, paths), default=0))
            if len({path[: hop + 1] for path in paths}) > len({path[:hop] for path in paths})
        )
        choices[src_switch, dst_switch] = known
    return known


def path_from_hops(
    t: Topology, src_switch: str, dst_switch: str, hops: Sequence[tuple[int, str | None]]
) -> tuple[Path, ...]:
    """The ECMP paths that fit what the hops answered.

    Args:
        t: the fabric.
        src_switch: where the flow enters.
        dst_switch: where it leaves.
        hops: `(TTL, address that answered or None)`; TTL 1 is the source ToR. An IPv4 address that is the inbound port
            of a candidate link picks that link; any other address of a switch (loopback, other port; over IPv6
            every address, for there routers choose the answer's source by the way back) only tells the switch.

    Returns:
        All fitting paths: one if the answers decide, several if they leave a choice, `()` if they fit none.
    """
    paths = ecmp_paths(t, src_switch, dst_switch)
    for ttl, address in hops:
        if address is None:
            continue
        owner = t.owner_of.get(address)
        if ttl == 1:
            paths = paths if owner == src_switch else ()
            continue
        at = ttl - 2
        inbound = () if ":" in address else tuple(p for p in paths if _enters(p, at, address))
        if inbound:
            paths = inbound
        elif owner is None:  # no switch of ours: only the target itself, behind the last switch, may answer so
            paths = tuple(p for p in paths if at >= len(p) and _is_under(t, dst_switch, address))
        else:
            paths = tuple(p for p in paths if at < len(p) and p[at].target == owner)
    return paths


def _enters(path: Path, at: int, address: str) -> bool:
    return at < len(path) and path[at].target_address == address


def _is_under(t: Topology, switch: str, address: str) -> bool:
    return any(leg.address == address for rnic in t.rnics_under(switch) for leg in rnic.legs if leg.switch == switch)


def rnic_paths(t: Topology, src: Rnic, dst: Rnic) -> tuple[Path, ...]:
    """The ECMP paths between two RNICs, over every leg that traffic between their addresses may use.

    A source with several legs may send on each of them; each of its ToRs then takes the shortest way to a leg of `dst`
    that has the address probes go to.
    """
    ends = dict.fromkeys(leg.switch for leg in dst.legs if leg.address == dst.address)
    out: dict[Path, None] = {}
    for start in dict.fromkeys(leg.switch for leg in src.legs):
        sets = [paths for end in ends if (paths := ecmp_paths(t, start, end))]
        best = min((len(paths[0]) for paths in sets), default=0)
        out.update((path, None) for paths in sets if len(paths[0]) == best for path in paths)
    return tuple(out)


def path_elements(t: Topology, src_rnic: str, dst_rnic: str, path: Path) -> tuple[str, ...]:
    """The names of what a packet crosses: the sender's transmit side, the directed links, the receiver's receive side.

    An RNIC with several legs is named with the leg's ToR (`h1/rnic0@leaf1 tx`), for each leg can break alone.

    >>> from topology.generate import leaf_spine
    >>> t = leaf_spine(2, 1, 1, 1)
    >>> path_elements(t, "h1/rnic0", "h2/rnic0", ecmp_paths(t, "leaf1", "leaf2")[0])
    ('h1/rnic0 tx', 'leaf1->spine1', 'spine1->leaf2', 'h2/rnic0 rx')

    Raises:
        KeyError: no such RNIC.
    """
    src, dst = t.rnics[src_rnic], t.rnics[dst_rnic]
    if path:
        first, last = path[0].source, path[-1].target
    else:
        first = last = next((leg.switch for leg in src.legs if leg.switch in {k.switch for k in dst.legs}), "")
    return (f"{_side(src, first)} tx", *(d.name for d in path), f"{_side(dst, last)} rx")


def _side(rnic: Rnic, switch: str) -> str:
    return rnic.name if len(rnic.legs) == 1 else f"{rnic.name}@{switch}"


def link_shares(paths: Iterable[Path]) -> Mapping[DirectedLink, float]:
    """The share of flows that crosses each link of an ECMP set, if every router splits evenly over its next links.

    >>> from topology.generate import leaf_spine
    >>> shares = link_shares(ecmp_paths(leaf_spine(2, 4, 1, 1), "leaf1", "leaf2"))
    >>> {d.name: share for d, share in shares.items()}["leaf1->spine1"]
    0.25
    """
    shares: dict[DirectedLink, float] = {}

    def split(group: list[Path], hop: int, share: float) -> None:
        nexts: dict[DirectedLink, list[Path]] = {}
        for path in group:
            if hop < len(path):
                nexts.setdefault(path[hop], []).append(path)
        for link, rest in nexts.items():
            part = share / len(nexts)
            shares[link] = shares.get(link, 0.0) + part
            split(rest, hop + 1, part)

    split(list(paths), 0, 1.0)
    return shares
