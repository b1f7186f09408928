"""Which 5-tuples to probe: ToR-mesh, Eq. (1), top-up from traced paths, classes. Pure functions.

They add to a set of entries and never look at a clock; the same arguments (the random generator's state among them)
give the same entries. Liu et al. 2024, §4.2 describes ToR-mesh and inter-ToR lists; the top-up is ours: Eq. (1) makes
covering likely, traces make it certain.
"""

from __future__ import annotations

import heapq
import random
import zlib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from controller.reach import Reach, Unit
from controller.sampling import tuples_needed
from pingmesh.messages import INTER_TOR, TOR_MESH

FIRST_PORT, PORTS = 0xC000, 0x4000
MESH_MATES = 16
MIN_PER_RNIC = 2
"""Every RNIC sends and receives at least so many inter-ToR tuples."""
MANY_PARTNERS = 64
CANDIDATES = 8
MAX_FLOWS = 4096
"""Entries of one RNIC; far above what its rate allows, so that lists stay bounded in strange fabrics."""


@dataclass(frozen=True, slots=True, order=True)
class Entry:
    """One 5-tuple in one class. Two entries that differ in `cls` only walk the same path."""

    source: str
    target: str
    sport: int
    kind: int = INTER_TOR
    cls: int = 0

    @property
    def tuple5(self) -> tuple[str, str, int]:
        """What routers hash: (source, target, source port); the rest is the same for all."""
        return self.source, self.target, self.sport


@dataclass
class Draft:
    """The entries being worked on, with what must be known to add one: ports taken and loads.

    Loads count tuples, not classes. `eligible` are the RNICs that may be probed now.
    """

    reach: Reach
    eligible: Collection[str]
    rng: random.Random
    entries: dict[Entry, None] = field(default_factory=dict)
    sent: Counter[str] = field(default_factory=Counter)
    received: Counter[str] = field(default_factory=Counter)
    _ports: set[tuple[str, str, int]] = field(default_factory=set)
    _members: dict[Unit, tuple[str, ...]] = field(default_factory=dict)
    _heaps: dict[tuple[Unit, bool], list[tuple[int, float, str]]] = field(default_factory=dict)

    @classmethod
    def of(cls, reach: Reach, eligible: Collection[str], seed: object, entries: Iterable[Entry] = ()) -> Draft:
        """A draft that starts from existing entries."""
        draft = cls(reach, frozenset(eligible), random.Random(str(seed)))
        for e in entries:
            draft.keep(e)
        return draft

    def keep(self, e: Entry) -> None:
        """Add an entry as it is."""
        self.entries[e] = None
        self._ports.add(_pair(e.source, e.target, e.sport))
        if e.kind == INTER_TOR and e.cls == 0:
            self.sent[e.source] += 1
            self.received[e.target] += 1

    def members(self, unit: Unit) -> tuple[str, ...]:
        """The unit's RNICs that may be probed now, in the topology's order."""
        known = self._members.get(unit)
        if known is None:
            known = self._members[unit] = tuple(n for n in self.reach.members[unit] if n in self.eligible)
        return known

    def add(self, a: Unit, b: Unit) -> Entry | None:
        """A new tuple between the least loaded RNICs of two units; None where no pair may probe."""
        source = self._least(a, self.sent, None)
        return self.add_from(source, b) if source else None

    def add_from(self, source: str, b: Unit) -> Entry | None:
        """A new tuple from an RNIC to the least loaded of a unit."""
        target = self._least(b, self.received, source)
        return self._enter(source, target) if target and self.sent[source] < MAX_FLOWS else None

    def add_to(self, a: Unit, target: str) -> Entry | None:
        """A new tuple from the least loaded of a unit to an RNIC."""
        source = self._least(a, self.sent, target)
        return self._enter(source, target) if source else None

    def _least(self, unit: Unit, load: Counter[str], other: str | None) -> str | None:
        """The member with the least load, ties by chance, that is on another host than `other`; O(log n) amortised."""
        key = (unit, load is self.sent)
        heap = self._heaps.get(key)
        if heap is None:
            heap = self._heaps[key] = [(load[n], self.rng.random(), n) for n in self.members(unit)]
            heapq.heapify(heap)
        rnics = self.reach.topology.rnics
        aside = []
        found = None
        while heap:
            n, _, name = heapq.heappop(heap)
            fresh = (load[name], self.rng.random(), name)
            if n < load[name]:
                heapq.heappush(heap, fresh)
                continue
            aside.append(fresh)
            if other is None or rnics[name].host != rnics[other].host:
                found = name
                break
        for item in aside:
            heapq.heappush(heap, item)
        return found

    def _enter(self, source: str, target: str) -> Entry:
        while _pair(source, target, sport := FIRST_PORT + self.rng.randrange(PORTS)) in self._ports:
            pass
        entry = Entry(source, target, sport)
        self.keep(entry)
        return entry


def _pair(a: str, b: str, sport: int) -> tuple[str, str, int]:
    """Both directions in one: an ACK goes back from the probe's source port, so it shares the port with a probe."""
    return (a, b, sport) if a < b else (b, a, sport)


def tor_mesh(reach: Reach, eligible: Collection[str]) -> list[Entry]:
    """ToR-mesh entries: each RNIC probes the next `MESH_MATES` mates in a ring around its ToR.

    So each is probed by as many as it probes, and one RNIC more or less changes its neighbours' lists only. The
    port is a hash of the pair, even in one direction and odd in the other.
    """
    out: dict[Entry, None] = {}
    for tor in sorted({t for name in eligible for t in reach.unit_of[name].tors}):
        rings: dict[tuple[int, str | None], list[str]] = {}
        for r in reach.topology.rnics_under(tor):
            if r.name in eligible:
                rings.setdefault((reach.unit_of[r.name].family, r.group), []).append(r.name)
        for ring in rings.values():
            for i, source in enumerate(ring):
                mates = 0
                for step in range(1, len(ring)):
                    target = ring[(i + step) % len(ring)]
                    if reach.topology.rnics[source].host == reach.topology.rnics[target].host:
                        continue
                    half = zlib.crc32(f"{source} {target}".encode()) % (PORTS // 2)
                    out[Entry(source, target, FIRST_PORT + 2 * half + (source > target), TOR_MESH)] = None
                    mates += 1
                    if mates == MESH_MATES:
                        break
    return list(out)


def start(draft: Draft) -> list[Entry]:
    """Inter-ToR entries up to Eq. (1) for every unit, to random others; existing entries count.

    Balanced over a unit's RNICs at both ends. Complexity: O(tuples x RNICs per ToR).
    """
    new: list[Entry] = []
    for a in draft.reach.members:
        if not draft.members(a):
            continue
        partners = [b for b in draft.reach.partners(a) if b is not a and draft.members(b)]
        need = tuples_needed(draft.reach.parallel(a, draft.rng)) - sum(draft.sent[n] for n in draft.members(a))
        new += _to_random_partners(draft, a, partners, need)
        for name in draft.members(a):
            new += _minimum(draft, name, partners)
    return new


def _to_random_partners(draft: Draft, a: Unit, partners: list[Unit], need: int) -> list[Entry]:
    new: list[Entry] = []
    misses = 0
    order: list[Unit] = []
    while partners and len(new) < need and misses < 2 * len(partners) + 8:
        if len(partners) > MANY_PARTNERS:
            b = draft.rng.choice(partners)
        else:
            if not order:
                order = draft.rng.sample(partners, len(partners))
            b = order.pop()
        entry = draft.add(a, b) if draft.reach.meets(a, b) else None
        if entry is None:
            misses += 1
        else:
            new.append(entry)
    return new


def _minimum(draft: Draft, name: str, partners: list[Unit]) -> list[Entry]:
    new: list[Entry] = []
    for _ in range(4 * MIN_PER_RNIC):
        out, back = draft.sent[name] < MIN_PER_RNIC, draft.received[name] < MIN_PER_RNIC
        if not partners or not (out or back):
            break
        a, b = draft.reach.unit_of[name], draft.rng.choice(partners)
        if not draft.reach.meets(a, b) or not draft.reach.meets(b, a):
            continue
        entry = draft.add_from(name, b) if out else draft.add_to(b, name)
        if entry is not None:
            new.append(entry)
    return new


def top_up(draft: Draft, need: Mapping[str, float], per_round: int = 20_000) -> list[Entry]:
    """New tuples for links that too few take: as many as will, on average, close each gap.

    `need` holds the missing tuples by directed link, those of tuples not yet traced already taken off. A link among
    n parallel choices so gets (missing x n) new tuples, but every tuple counts for all links it may take, so that
    the choices of one router share theirs. Links with the largest gap come first.
    """
    left = {link: n for link, n in need.items() if n > 0}
    new: list[Entry] = []
    for link in sorted(left, key=lambda k: (-left[k], k)):
        pairs = draft.reach.pairs_over.get(link, ())
        misses = 0
        while left[link] > 1e-9 and misses < 16 and pairs and len(new) < per_round:
            sample = pairs if len(pairs) <= CANDIDATES else draft.rng.sample(list(pairs), CANDIDATES)
            a, b = max(sample, key=lambda p: (_gain(draft, p, left), draft.rng.random()))
            entry = draft.add(a, b)
            if entry is None:
                misses += 1
                pairs = [p for p in pairs if p != (a, b)]
                continue
            new.append(entry)
            for other, share in draft.reach.shares(a, b).items():
                if other in left:
                    left[other] -= share
    return new


def _gain(draft: Draft, pair: tuple[Unit, Unit], left: Mapping[str, float]) -> float:
    if not draft.members(pair[0]) or not draft.members(pair[1]):
        return -1.0
    return sum(share for link, share in draft.reach.shares(*pair).items() if left.get(link, 0) > 0)


def twins(
    entries: Collection[Entry], paths: Mapping[tuple[str, str, int], tuple[str, ...]], classes: Mapping[int, int]
) -> list[Entry]:
    """Entries in further classes on tuples already probed in class 0, so that only the class differs.

    `classes` gives for each class above 0 how many tuples each link shall carry in it; `paths` the traced links by
    tuple. Tuples that serve several lacking links are taken first.
    """
    new: list[Entry] = []
    base = sorted(e for e in entries if e.cls == 0 and e.kind == INTER_TOR and paths.get(e.tuple5))
    present = set(entries)
    for cls, wanted in sorted(classes.items()):
        have: Counter[str] = Counter()
        for e in entries:
            if e.cls == cls:
                have.update(paths.get(e.tuple5, ()))
        for depth in (2, 1):
            for e in base:
                links = paths[e.tuple5]
                lacking = sum(have[link] < wanted for link in links)
                twin = Entry(e.source, e.target, e.sport, e.kind, cls)
                if lacking >= min(depth, len(links)) and twin not in present:
                    present.add(twin)
                    new.append(twin)
                    have.update(links)
    return new
