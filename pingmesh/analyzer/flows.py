"""Which flow is which, and which way it walks: probe lists and traced paths, mapped to elements of the fabric.

An *element* is what a packet crosses and what can be broken: a directed switch link by name, `h1/rnic0 tx` (the
cable from the RNIC to its ToR) and `h1/rnic0 rx` (the way back).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from pingmesh.messages import ProbeList, TracedPath
from topology.model import Topology
from topology.paths import ecmp_paths, path_elements, path_from_hops

FlowKey = tuple[int, int, int]
"""(prober's RNIC number, list version, index)."""

Elements = tuple[str, ...]
PathSet = tuple[Elements, ...]
"""Equally likely alternatives; one entry: the path is known."""

PROBE, ACK = 0, 1
_VERSIONS_KEPT = 3
_CHANGES_KEPT = 12
_MOST_HOPS = 32
_STAYED: frozenset[str] = frozenset()
UNSTABLE_NS = 60 * 1_000_000_000
"""For this long after a tuple was seen to move, its earlier paths are possible too."""


@dataclass(frozen=True, slots=True)
class Flow:
    """One entry of a probe list with names instead of numbers."""

    key: FlowKey
    src: str
    dst: str
    sport: int
    cls: int
    cls_name: str
    kind: int
    interval_us: int

    @property
    def src_host(self) -> str:
        """The host that probes."""
        return self.src.split("/")[0]

    @property
    def dst_host(self) -> str:
        """The host that answers."""
        return self.dst.split("/")[0]

    def __hash__(self) -> int:
        return hash(self.key)

    def __str__(self) -> str:
        return f"{self.src} -> {self.dst} (source port {self.sport}, {self.cls_name})"


@dataclass(slots=True)
class PathRecord:
    """How a tuple walked: (seen first at, path) of each change, oldest first. Times are the analyzer's nanoseconds."""

    history: list[tuple[int, PathSet]]
    confirmed: int
    _unions: dict[tuple[int, int], PathSet] = field(default_factory=dict)

    @property
    def paths(self) -> PathSet:
        """The path now."""
        return self.history[-1][1]

    @property
    def since(self) -> int:
        """When the path was first seen to be this one."""
        return self.history[-1][0]

    @property
    def before(self) -> PathSet | None:
        """The path before the last change."""
        return self.history[-2][1] if len(self.history) > 1 else None

    def move(self, at: int, paths: PathSet) -> None:
        """It walks another way now."""
        self.history.append((at, paths))
        del self.history[:-_CHANGES_KEPT]
        self._unions.clear()

    def at(self, when: int) -> PathSet:
        """The path confirmed before a time.

        A tuple that moved in the minute before may have moved back unseen, as they do when a link flaps: all its
        paths of that minute are possible.
        """
        last = 0
        while last + 1 < len(self.history) and self.history[last + 1][0] <= when:
            last += 1
        first = last
        while first > 0 and self.history[first][0] > when - UNSTABLE_NS:
            first -= 1
        if first == last:
            return self.history[last][1]
        union = self._unions.get((first, last))
        if union is None:
            # The same object each time: the localiser groups observations by it.
            union = tuple(dict.fromkeys(p for _, paths in self.history[first : last + 1] for p in paths))
            self._unions[first, last] = union
        return union


class FlowBook:
    """All flows known and their paths in both directions."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self.flows: dict[FlowKey, Flow] = {}
        self.rnic_names: dict[int, str] = {}
        self.classes: dict[int, list[str]] = {}
        self.latest: dict[int, int] = {}
        self.mismatches: dict[FlowKey, str] = {}
        self._versions: dict[int, list[int]] = defaultdict(list)
        self._paths: dict[tuple[int, FlowKey], PathRecord] = {}
        self._sets: dict[tuple[str, str], PathSet] = {}
        self._index: dict[str, list[FlowKey]] | None = None

    # ------------------------------------------------------------ lists

    def add_list(self, message: ProbeList) -> None:
        """Take over a probe list; the two versions before it stay known for reports under way."""
        number, version = message.number, message.list_version
        source = f"{message.host}/{message.device}"
        self.rnic_names[number] = source
        names = {p.number: p.name for p in message.peers}
        self.rnic_names |= names
        self.classes[number] = [c.name for c in message.classes]
        self.latest[number] = version
        for f in message.flows:
            if f.peer not in names or not 0 <= f.cls < len(message.classes):
                continue
            key = (number, version, f.index)
            self.flows[key] = Flow(
                key,
                source,
                names[f.peer],
                f.sport,
                f.cls,
                message.classes[f.cls].name,
                f.kind,
                f.interval_us,
            )
        kept = self._versions[number]
        if version not in kept:
            kept.append(version)
        self._inherit_paths(number, version)
        while len(kept) > _VERSIONS_KEPT:
            self._forget(number, kept.pop(0))
        self._index = None

    def _inherit_paths(self, number: int, version: int) -> None:
        """A tuple that stays in a new version keeps its traced path under its new key."""
        by_tuple = {(f.dst, f.sport): key for key, f in self.flows.items() if key[0] == number and key[1] != version}
        for key, f in [(k, f) for k, f in self.flows.items() if k[0] == number and k[1] == version]:
            old = by_tuple.get((f.dst, f.sport))
            for role in (PROBE, ACK):
                if old and (role, key) not in self._paths and (role, old) in self._paths:
                    self._paths[role, key] = self._paths[role, old]

    def _forget(self, number: int, version: int) -> None:
        for key in [k for k in self.flows if k[0] == number and k[1] == version]:
            del self.flows[key]
            self.mismatches.pop(key, None)
            for role in (PROBE, ACK):
                self._paths.pop((role, key), None)

    def current(self) -> Iterator[Flow]:
        """Flows of the newest list of each RNIC."""
        return (f for f in self.flows.values() if f.key[1] == self.latest.get(f.key[0]))

    # ------------------------------------------------------------ paths

    def tor(self, rnic: str) -> str | None:
        """The ToR of an RNIC, None for one that is not in the topology."""
        r = self.topology.rnics.get(rnic)
        return r.legs[0].switch if r else None

    def add_path(self, traced: TracedPath, at: int) -> frozenset[str]:
        """Take over a path traced at a time; returns the elements that the tuple has left since its last trace."""
        key = (traced.rnic, traced.list_version, traced.index)
        flow = self.flows.get(key)
        hops = [(ttl, address) for ttl, address in traced.hops if 1 <= ttl <= _MOST_HOPS]
        if flow is None or traced.role not in (PROBE, ACK) or all(a is None for _, a in hops):
            return _STAYED
        a, b = (flow.src, flow.dst) if traced.role == PROBE else (flow.dst, flow.src)
        ta, tb = self.tor(a), self.tor(b)
        if ta is None or tb is None:
            return _STAYED
        found = path_from_hops(self.topology, ta, tb, hops)
        if not found:
            self.mismatches[key] = ", ".join(f"TTL {t}: {addr}" for t, addr in hops)
            return _STAYED
        self.mismatches.pop(key, None)
        paths = tuple(path_elements(self.topology, a, b, p) for p in found)
        record = self._paths.get((traced.role, key))
        if record is None:
            self._paths[traced.role, key] = PathRecord([(at, paths)], at)
            self._index = None
            return _STAYED
        if record.confirmed > at:
            return _STAYED
        record.confirmed = at
        if paths == record.paths or (len(paths) > 1 and set(record.paths) <= set(paths)):
            return _STAYED
        left = frozenset(e for p in record.paths for e in p) - frozenset(e for p in paths for e in p)
        record.move(at, paths)
        self._index = None
        return left

    def path_set(self, src: str, dst: str) -> PathSet:
        """Every path that ECMP may choose between two RNICs; empty if one is not in the topology."""
        known = self._sets.get((src, dst))
        if known is None:
            ta, tb = self.tor(src), self.tor(dst)
            found = ecmp_paths(self.topology, ta, tb) if ta and tb else ()
            known = tuple(path_elements(self.topology, src, dst, p) for p in found)
            self._sets[src, dst] = known
        return known

    def paths_at(self, flow: Flow, role: int, when: int) -> PathSet:
        """The path that was confirmed before `when`, else the ECMP set."""
        record = self._paths.get((role, flow.key))
        if record is not None:
            return record.at(when)
        if role == PROBE:
            return self.path_set(flow.src, flow.dst)
        return self.path_set(flow.dst, flow.src)

    def last_seen_paths(self, flow: Flow, role: int, when: int) -> PathSet:
        """The path of the last trace where the packets left after it, without doubting that it lasts."""
        record = self._paths.get((role, flow.key))
        return record.paths if record is not None and when >= record.since else self.paths_at(flow, role, when)

    def record(self, flow: Flow, role: int) -> PathRecord | None:
        """What tracing knows of a tuple."""
        return self._paths.get((role, flow.key))

    def through(self, element: str) -> list[Flow]:
        """Current flows whose *probes* are known to cross an element."""
        if self._index is None:
            index: dict[str, list[FlowKey]] = defaultdict(list)
            for f in self.current():
                paths = self.paths_at(f, PROBE, _FOREVER)
                if len(paths) == 1:
                    for e in paths[0]:
                        index[e].append(f.key)
                else:
                    for e in _common(paths):
                        index[e].append(f.key)
            self._index = dict(index)
        return [self.flows[k] for k in self._index.get(element, ()) if k in self.flows]

    def traced_through(self, links: Collection[str]) -> list[tuple[int, Flow, set[str]]]:
        """(role, flow, links crossed) of every tuple known to cross one of these links, or that did before it moved."""
        out = []
        for (role, key), record in self._paths.items():
            flow = self.flows.get(key)
            if flow is None or key[1] != self.latest.get(key[0]):
                continue
            crossed = {e for p in record.paths + (record.before or ()) for e in p if e in links}
            if crossed:
                out.append((role, flow, crossed))
        return out

    def walk(self, since: int) -> dict[str, Walk]:
        """How the tuples traced since a time walk the directed links, against what chance would give.

        A tuple that walks as before says nothing about the links it never used: which tuples are traced anew is no
        random choice. Only those that moved drew again.
        """
        out: dict[str, Walk] = defaultdict(Walk)
        shares: dict[tuple[str, str], dict[str, float]] = {}
        for (role, key), record in self._paths.items():
            flow = self.flows.get(key)
            if flow is None or len(record.paths) != 1:
                continue
            if record.confirmed < since:
                if key[1] == self.latest.get(key[0]):
                    for e in record.paths[0][1:-1]:
                        out[e].unseen += 1
                continue
            for e in record.paths[0][1:-1]:
                out[e].walkers += 1
            if record.since < since or record.before is None or len(record.before) != 1:
                continue
            a, b = (flow.src, flow.dst) if role == PROBE else (flow.dst, flow.src)
            share = self._shares(a, b, shares)
            left = set(record.before[0]) - set(record.paths[0])
            for e, q in share.items():
                if e not in record.paths[0]:
                    out[e].left += e in left
                    out[e].log_chance += math.log1p(-min(q, 0.999))
        return out

    def _shares(self, a: str, b: str, known: dict[tuple[str, str], dict[str, float]]) -> dict[str, float]:
        ends = (self.tor(a) or "", self.tor(b) or "")
        if ends not in known:
            sets = self.path_set(a, b)
            share: dict[str, float] = defaultdict(float)
            for p in sets:
                for e in p[1:-1]:
                    share[e] += 1 / len(sets)
            known[ends] = share
        return known[ends]


@dataclass(slots=True)
class Walk:
    """Tuples traced on a link, those that left it, and the log probability that all who moved missed it by chance."""

    walkers: int = 0
    unseen: int = 0
    left: int = 0
    log_chance: float = 0.0


_FOREVER = 1 << 62


def _common(paths: PathSet) -> set[str]:
    """Elements on every alternative."""
    return set.intersection(*(set(p) for p in paths)) if paths else set()
