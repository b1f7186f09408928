"""Which flow is which, and which way it walks: probe lists and traced paths, mapped to elements of the fabric.

An *element* is what a packet crosses and what can be broken: a directed switch link by name, `h1/rnic0 tx` (the
cable from the RNIC to its ToR) and `h1/rnic0 rx` (the way back).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from pingmesh.analyzer.flow_rows import ACK, MOST_INDEX, MOST_NUMBER, PROBE, FlowRows, Names
from pingmesh.analyzer.hops import HopReader
from pingmesh.analyzer.table import Bools, Ints
from pingmesh.messages import BadMessageError, ProbeList, TracedPath
from topology.model import Topology
from topology.paths import ecmp_paths, path_elements

__all__ = ["ACK", "PROBE", "Elements", "Flow", "FlowBook", "FlowKey", "PathRecord", "PathSet", "Walk"]

FlowKey = tuple[int, int, int]
"""(prober's RNIC number, list version, index)."""

Elements = tuple[str, ...]
PathSet = tuple[Elements, ...]
"""Equally likely alternatives; one entry: the path is known."""

_VERSIONS_KEPT = 3
_CHANGES_KEPT = 12
_MOST_HOPS = 32
_MOST_SETS = 100_000
"""Alternatives of path sets that are kept."""
_MOST_SHARED = 20_000
"""Flows of unknown path for which it is worked out what all their alternatives have in common."""
_STAYED: frozenset[str] = frozenset()
UNSTABLE_NS = 60 * 1_000_000_000
"""For this long after a tuple was seen to move, its earlier paths are possible too."""
SETTLED_NS = 4 * UNSTABLE_NS
"""So long after its last move nothing that is still judged was sent on another path."""
LEAST_SPARE = 15.0
"""Probes/s that a rate cap leaves for confirmations, at the least: the planner fills nine tenths of 150."""


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


class _Flows(Mapping[FlowKey, Flow]):
    """The flows of all lists kept, made of the columns when asked for."""

    def __init__(self, book: FlowBook) -> None:
        self._book = book

    def __getitem__(self, key: FlowKey) -> Flow:
        row = self._book.rows.row(*key)
        if row is None:
            raise KeyError(key)
        return self._book.flow(row)

    def get(self, key: FlowKey, default: object = None) -> Flow | None:  # type: ignore[override]
        row = self._book.rows.row(*key)
        return None if row is None else self._book.flow(row)

    def __iter__(self) -> Iterator[FlowKey]:
        return (self._book.key(row) for row in self._book.listed())

    def __len__(self) -> int:
        return sum(1 for _ in self._book.listed())

    def __repr__(self) -> str:
        return repr(dict(self))


class FlowBook:
    """All flows known and their paths in both directions. What is asked for often is kept as columns (`rows`)."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self.rows = FlowRows()
        self.flows: Mapping[FlowKey, Flow] = _Flows(self)
        self.rnics = Names()
        self.hosts = Names()
        self.class_names = Names()
        self.elements = Names()
        self.rnic_names: dict[int, str] = {}
        self.classes: dict[int, list[str]] = {}
        self.latest: dict[int, int] = {}
        self.spare_rate: dict[int, float] = {}
        """Probes/s that each RNIC's cap leaves beside its list."""
        self.mismatches: dict[FlowKey, str] = {}
        self.changes = 0
        """Counts what changes what a row's path is."""
        self._versions: dict[int, list[int]] = defaultdict(list)
        self._records: dict[tuple[int, int], PathRecord] = {}
        """(direction, row) of tuples that moved, or whose trace leaves alternatives."""
        self._sets: dict[tuple[str, str], PathSet] = {}
        self._sets_size = 0
        self._shared: dict[str, list[int]] | None = None
        self._hops = HopReader(topology)
        self._ends = np.empty((2, 0), np.int64)

    # ------------------------------------------------------------ lists

    def add_list(self, message: ProbeList) -> None:
        """Take over a probe list; the two versions before it stay known for reports under way.

        Entries that no report could name are left out. Raises BadMessageError for an RNIC number or version that no
        controller gives.
        """
        number, version = message.number, message.list_version
        if not 0 <= number < MOST_NUMBER or not 0 <= version < 1 << 32:
            raise BadMessageError("ProbeList", f"RNIC number {number} or version {version} is out of range")
        source = f"{message.host}/{message.device}"
        self.rnic_names[number] = source
        names = {p.number: p.name for p in message.peers}
        self.rnic_names |= names
        self.classes[number] = [c.name for c in message.classes]
        self.latest[number] = version
        planned = sum(1e6 / f.interval_us for f in message.flows if f.interval_us > 0)
        self.spare_rate[number] = max(LEAST_SPARE, message.max_rate - planned)
        entries = [
            (f.index, f.sport, f.cls, f.kind, f.interval_us, names[f.peer], f.trace_mask)
            for f in message.flows
            if f.peer in names
            and 0 <= f.cls < len(message.classes)
            and 0 <= f.index <= MOST_INDEX
            and 0 <= f.sport <= 0xFFFF
            and -128 <= f.kind <= 127
            and abs(f.interval_us) < 1 << 62
        ]
        rows = self.rows
        span = max((e[0] for e in entries), default=0) + 1
        slot = rows.of_key.get((number, version))
        if slot is not None and span > int(rows.span[slot]):
            self._forget(number, version)
            slot = None
        if slot is None:
            slot = rows.allocate(number, version, span)
        if entries:
            self._enter(slot, source, entries, self.classes[number])
        kept = self._versions[number]
        if version not in kept:
            kept.append(version)
        rows.set_latest(slot)
        if entries:
            self._inherit_paths(number, slot)
        while len(kept) > _VERSIONS_KEPT:
            self._forget(number, kept.pop(0))
        self._changed()

    def _changed(self) -> None:
        self._shared = None
        self.changes += 1

    def _enter(
        self, slot: int, source: str, entries: Sequence[tuple[int, int, int, int, int, str, int]], classes: list[str]
    ) -> None:
        r = self.rows
        index, sport, cls, kind, interval, target, mask = zip(*entries, strict=True)
        at = int(r.base[slot]) + np.array(index, np.int64)
        fresh = ~r.used[at]
        src = self.rnics.of(source)
        dst = np.array([self.rnics.of(t) for t in target], np.int32)
        same = fresh | ((r.src[at] == src) & (r.dst[at] == dst) & (r.sport[at] == np.array(sport)))
        for row in at[~same].tolist():  # another tuple under the name of one: nothing is known of it
            self._untrace(row)
        r.used[at] = True
        r.src[at], r.dst[at] = src, dst
        r.src_host[at] = self.hosts.of(source.split("/")[0])
        r.dst_host[at] = [self.hosts.of(t.split("/")[0]) for t in target]
        r.sport[at], r.cls[at], r.kind[at], r.interval[at] = sport, cls, kind, interval
        r.cls_name[at] = np.array([self.class_names.of(c) for c in classes], np.int16)[np.array(cls, np.int64)]
        for row, name, choices in zip(at.tolist(), target, mask, strict=True):
            if not choices and not r.plain[PROBE, row] and not r.traced[:, row].any():
                self._take_only_path(row, source, name)

    def _take_only_path(self, row: int, source: str, target: str) -> None:
        """Where the fabric leaves no choice, nothing needs to be traced."""
        a, b = self.tor(source), self.tor(target)
        for role, ends in ((PROBE, (source, target)), (ACK, (target, source))):
            if a is not None and b is not None and len(paths := self.path_set(*ends)) == 1:
                self.rows.set_path(role, row, [self.elements.of(e) for e in paths[0]])

    def _untrace(self, row: int) -> None:
        for role in (PROBE, ACK):
            self.rows.plain[role, row] = self.rows.traced[role, row] = False
            self._records.pop((role, row), None)

    def _inherit_paths(self, number: int, slot: int) -> None:
        """A tuple that stays in a new version keeps its traced path under its new key."""
        r = self.rows
        by_tuple: dict[tuple[int, int], int] = {}
        for version in self._versions[number]:
            old = r.of_key.get((number, version))
            if old is not None and old != slot:
                rows = self._used(old)
                by_tuple.update(
                    zip(zip(r.dst[rows].tolist(), r.sport[rows].tolist(), strict=True), rows.tolist(), strict=True)
                )
        if not by_tuple:
            return
        rows = self._used(slot)
        for row, dst, sport in zip(rows.tolist(), r.dst[rows].tolist(), r.sport[rows].tolist(), strict=True):
            before = by_tuple.get((dst, sport))
            if before is None:
                continue
            for role in (PROBE, ACK):
                if r.traced[role, before] and not r.traced[role, row]:
                    r.copy_path(role, before, row)
                    if (role, before) in self._records:
                        self._records[role, row] = self._records[role, before]

    def _used(self, slot: int) -> Ints:
        rows = self.rows.range(slot)
        used: Ints = np.flatnonzero(self.rows.used[rows]) + int(self.rows.base[slot])
        return used

    def _forget(self, number: int, version: int) -> None:
        slot = self.rows.of_key.get((number, version))
        if slot is None:
            return
        for row in self._used(slot).tolist():
            self.mismatches.pop(self.key(row), None)
        self.rows.retire(slot)

    def release(self, slot: int) -> None:
        """No sample names the flows of this slot any more, which was retired: its rows may be used again."""
        for row in self._used(slot).tolist():
            self._untrace(row)
        self.rows.release(slot)

    def listed(self) -> Iterator[int]:
        """The rows of all lists kept."""
        for slot in list(self.rows.of_key.values()):
            yield from self._used(slot).tolist()

    def key(self, row: int) -> FlowKey:
        """The key of a row."""
        r = self.rows
        slot = int(r.slot[row])
        return int(r.number[slot]), int(r.version[slot]), row - int(r.base[slot])

    def flow(self, row: int) -> Flow:
        """The flow of a row."""
        r = self.rows
        return Flow(
            self.key(row),
            self.rnics.names[r.src[row]],
            self.rnics.names[r.dst[row]],
            int(r.sport[row]),
            int(r.cls[row]),
            self.class_names.names[r.cls_name[row]],
            int(r.kind[row]),
            int(r.interval[row]),
        )

    def row(self, flow: Flow) -> int | None:
        """The row of a flow, None if its list is forgotten."""
        return self.rows.row(*flow.key)

    def current(self) -> Iterator[Flow]:
        """Flows of the newest list of each RNIC."""
        return (self.flow(row) for row in np.flatnonzero(self.rows.latest()).tolist())

    def ends(self) -> Ints:
        """Elements of both sides (tx, rx) of each RNIC, -1 where it has several legs or none, (2, RNICs)."""
        have, names = self._ends.shape[1], self.rnics.names
        if len(names) > have:
            rnics = self.topology.rnics
            more = [
                [
                    self.elements.of(f"{n} {side}") if n in rnics and len(rnics[n].legs) == 1 else -1
                    for n in names[have:]
                ]
                for side in ("tx", "rx")
            ]
            self._ends = np.concatenate((self._ends, np.array(more, np.int64)), axis=1)
        return self._ends

    # ------------------------------------------------------------ paths

    def tor(self, rnic: str) -> str | None:
        """The ToR of an RNIC, None for one that is not in the topology."""
        r = self.topology.rnics.get(rnic)
        return r.legs[0].switch if r else None

    def add_path(self, traced: TracedPath, at: int) -> frozenset[str]:
        """Take over a path traced at a time; returns the elements that the tuple has left since its last trace."""
        role, r = traced.role, self.rows
        row = r.row(traced.rnic, traced.list_version, traced.index)
        hops = [(ttl, address) for ttl, address in traced.hops if 1 <= ttl <= _MOST_HOPS]
        if row is None or role not in (PROBE, ACK) or all(a is None for _, a in hops):
            return _STAYED
        names = self.rnics.names
        a, b = names[r.src[row]], names[r.dst[row]]
        if role == ACK:
            a, b = b, a
        ta, tb = self.tor(a), self.tor(b)
        if ta is None or tb is None:
            return _STAYED
        key = (traced.rnic, traced.list_version, traced.index)
        found = self._hops.paths(ta, tb, hops)
        if not found:
            self.mismatches[key] = ", ".join(f"TTL {t}: {addr}" for t, addr in hops)
            return _STAYED
        if self.mismatches:
            self.mismatches.pop(key, None)
        return self._walks(role, row, tuple(path_elements(self.topology, a, b, p) for p in found), at)

    def _walks(self, role: int, row: int, paths: PathSet, at: int) -> frozenset[str]:
        r = self.rows
        record = self._records.get((role, row))
        if not r.traced[role, row]:
            r.traced[role, row] = True
            r.since[role, row] = r.confirmed[role, row] = at
            if len(paths) == 1:
                r.set_path(role, row, [self.elements.of(e) for e in paths[0]])
            else:
                r.plain[role, row] = False
                self._records[role, row] = PathRecord([(at, paths)], at)
            self._changed()
            return _STAYED
        if int(r.confirmed[role, row]) > at:
            return _STAYED
        r.confirmed[role, row] = at
        now = record.paths if record is not None else (self._path(role, row),)
        if record is not None:
            record.confirmed = at
        if paths == now or (len(paths) > 1 and set(now) <= set(paths)):
            if record is not None and len(now) == 1 and at - record.since > SETTLED_NS and not r.plain[role, row]:
                r.set_path(role, row, [self.elements.of(e) for e in now[0]])
            return _STAYED
        left = frozenset(e for p in now for e in p) - frozenset(e for p in paths for e in p)
        if record is None:
            record = self._records[role, row] = PathRecord([(int(r.since[role, row]), now)], at)
        r.plain[role, row] = False
        r.since[role, row] = at
        record.move(at, paths)
        self._changed()
        return left

    def _path(self, role: int, row: int) -> Elements:
        names = self.elements.names
        return tuple(names[e] for e in self.rows.path[role, row].tolist() if e >= 0)

    def path_set(self, src: str, dst: str) -> PathSet:
        """Every path that ECMP may choose between two RNICs; empty if one is not in the topology."""
        known = self._sets.get((src, dst))
        if known is None:
            ta, tb = self.tor(src), self.tor(dst)
            found = ecmp_paths(self.topology, ta, tb) if ta and tb else ()
            known = tuple(path_elements(self.topology, src, dst, p) for p in found)
            self._sets_size += len(known) + 1
            if self._sets_size > _MOST_SETS:
                self._sets, self._sets_size = {}, len(known) + 1
            self._sets[src, dst] = known
        return known

    def row_paths_at(self, row: int, role: int, when: int) -> PathSet:
        """The path of a row that was confirmed before `when`, else the ECMP set."""
        if self.rows.plain[role, row]:
            return (self._path(role, row),)
        record = self._records.get((role, row))
        if record is not None:
            return record.at(when)
        names = self.rnics.names
        a, b = names[self.rows.src[row]], names[self.rows.dst[row]]
        return self.path_set(a, b) if role == PROBE else self.path_set(b, a)

    def paths_at(self, flow: Flow, role: int, when: int) -> PathSet:
        """The path that was confirmed before `when`, else the ECMP set."""
        row = self.row(flow)
        if row is not None:
            return self.row_paths_at(row, role, when)
        return self.path_set(flow.src, flow.dst) if role == PROBE else self.path_set(flow.dst, flow.src)

    def last_seen_paths(self, flow: Flow, role: int, when: int) -> PathSet:
        """The path of the last trace where the packets left after it, without doubting that it lasts."""
        record = self.record(flow, role)
        return record.paths if record is not None and when >= record.since else self.paths_at(flow, role, when)

    def record(self, flow: Flow, role: int) -> PathRecord | None:
        """What tracing knows of a tuple."""
        row = self.row(flow)
        return None if row is None else self.row_record(row, role)

    def row_record(self, row: int, role: int) -> PathRecord | None:
        """What tracing knows of a row's tuple."""
        r = self.rows
        if not r.traced[role, row]:
            return None
        record = self._records.get((role, row))
        if record is None:
            since, confirmed = int(r.since[role, row]), int(r.confirmed[role, row])
            record = PathRecord([(since, (self._path(role, row),))], confirmed)
        return record

    def element_mask(self, elements: Collection[str]) -> Bools:
        """Which element numbers are among these names; one entry more, for the -1 of padding."""
        mask = np.zeros(len(self.elements) + 1, bool)
        mask[[n for e in elements if (n := self.elements.number.get(e)) is not None]] = True
        return mask

    def crossing(self, role: int, elements: Collection[str], among: Bools | None = None) -> Ints:
        """Rows, of those that are known by one path and `among` these (rows,), that cross one of the elements."""
        r, n = self.rows, self.rows.rows
        plain = r.plain[role, :n] if among is None else r.plain[role, :n] & among
        rows = np.flatnonzero(plain)
        numbers = [k for e in elements if (k := self.elements.number.get(e)) is not None]
        path = r.path[role, :n]
        if len(numbers) == 1:
            hit: Bools = (path == numbers[0]).any(axis=1) & plain
            return np.flatnonzero(hit)
        return rows[self.element_mask(elements)[path[rows]].any(axis=1)]

    def through(self, element: str) -> list[Flow]:
        """Current flows whose *probes* are known to cross an element."""
        rows = self.crossing(PROBE, (element,), self.rows.latest()).tolist()
        return [self.flow(row) for row in sorted({*rows, *self._sharing(element)})]

    def _sharing(self, element: str) -> list[int]:
        """Current rows without one known path of which every alternative crosses an element."""
        r = self.rows
        if self._shared is None:
            shared: dict[str, list[int]] = defaultdict(list)
            hidden = np.flatnonzero(r.latest() & ~r.plain[PROBE, : r.rows])
            for row in hidden[:_MOST_SHARED].tolist():
                for e in _common(self.row_paths_at(row, PROBE, _FOREVER)):
                    shared[e].append(row)
            self._shared = dict(shared)
        return self._shared.get(element, [])

    def traced_through(self, links: Collection[str]) -> list[tuple[int, Flow, set[str]]]:
        """(role, flow, links crossed) of every tuple known to cross one of these links, or that did before it moved."""
        out = []
        r = self.rows
        latest = r.latest()
        for role in (PROBE, ACK):
            for row in self.crossing(role, links, latest & r.traced[role, : r.rows]).tolist():
                if (role, row) not in self._records:
                    out.append((role, self.flow(row), {e for e in self._path(role, row) if e in links}))
        for (role, row), record in self._records.items():
            if latest[row]:
                crossed = {e for p in record.paths + (record.before or ()) for e in p if e in links}
                if crossed:
                    out.append((role, self.flow(row), crossed))
        return out

    def has_moved(self, since: int) -> bool:
        """Whether a tuple was seen to walk another way since a time."""
        return any(x.since >= since and x.before is not None for x in self._records.values())

    def walk(self, since: int) -> dict[str, Walk]:
        """How the tuples traced since a time walk the directed links, against what chance would give.

        A tuple that walks as before says nothing about the links it never used: which tuples are traced anew is no
        random choice. Only those that moved drew again.
        """
        out: dict[str, Walk] = defaultdict(Walk)
        r, n = self.rows, self.rows.rows
        latest = r.latest()
        moved = np.zeros((2, n), bool)
        for role, row in self._records:
            moved[role, row] = True
        kept = r.used[:n] & ~np.isin(r.slot[:n], r.retired) if r.retired else r.used[:n]
        for role in (PROBE, ACK):
            plain = r.plain[role, :n] & r.traced[role, :n] & kept & ~moved[role]
            fresh = r.confirmed[role, :n] >= since
            for rows, name in ((plain & fresh, "walkers"), (plain & ~fresh & latest, "unseen")):
                path = r.path[role, :n][rows]
                counts = np.bincount(path[path >= 0], minlength=len(self.elements))
                for number in np.flatnonzero(counts).tolist():
                    if "->" in (element := self.elements.names[number]):
                        walk = out[element]
                        setattr(walk, name, getattr(walk, name) + int(counts[number]))
        shares: dict[tuple[str, str], dict[str, float]] = {}
        for (role, row), record in self._records.items():
            if not kept[row] or len(record.paths) != 1:
                continue
            if record.confirmed < since:
                if latest[row]:
                    for e in record.paths[0][1:-1]:
                        out[e].unseen += 1
                continue
            for e in record.paths[0][1:-1]:
                out[e].walkers += 1
            if record.since < since or record.before is None or len(record.before) != 1:
                continue
            names = self.rnics.names
            a, b = names[r.src[row]], names[r.dst[row]]
            if role == ACK:
                a, b = b, a
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
