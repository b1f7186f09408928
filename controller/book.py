"""The probe lists as they stand: entries with indexes that last, versions, traced paths; kept in the database."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from controller.database import recall, remember
from controller.pinglist import Entry
from controller.reach import Reach
from pingmesh.messages import INTER_TOR, Flow, TracedPath

MAX_CLASSES = 16
MAX_TTL = 32


class Line(msgspec.Struct, array_like=True):
    """One entry of a list. `since`: the version that brought it; `leaving`: to be taken out when it is not needed."""

    index: int
    target: str
    sport: int
    kind: int
    cls: int
    since: int
    leaving: bool = False


class Sheet(msgspec.Struct, array_like=True):
    """The list of one RNIC: all its lines (also those of peers away for now) and what was published last."""

    lines: dict[int, Line] = {}
    flows: list[Flow] = []
    links: dict[int, tuple[str, ...]] = {}
    """Traced links by index, class 0 only."""
    complete: set[int] = set()
    """Indexes whose trace left no choice open."""


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Sheet).decode

Key = tuple[str, str, int]


class Book:
    """All lists. `paths` maps each traced tuple to its links, `pending` the inter-ToR tuples still to be traced.

    Changing methods mark lists `dirty`; `publish` turns a dirty list into flows with a version that grows only when
    they differ from the last ones, and saves it first: a version is never used twice for different flows.
    """

    def __init__(self, db: sqlite3.Connection, reach: Reach, classes: Sequence[str] = ("small",)) -> None:
        self._db = db
        self._reach = reach
        self._classes = json.dumps(list(classes))
        self.sheets: dict[str, Sheet] = {}
        self.versions: dict[str, int] = {}
        self.where: dict[Entry, int] = {}
        self.paths: dict[Key, tuple[str, ...]] = {}
        self.pending: dict[Key, int] = {}
        self.probers: dict[str, dict[str, int]] = {}
        """By target: who has lines to it, and how many."""
        self.dirty: set[str] = set()
        self._unsaved: set[str] = set()
        self._load()

    def _load(self) -> None:
        known = self._reach.unit_of
        same_classes = recall(self._db, "classes") == self._classes
        for name, version, blob in self._db.execute("SELECT name, version, flows FROM lists ORDER BY name"):
            self.versions[name] = version
            sheet = self.sheets[name] = _decode(blob)
            if name not in known:
                sheet.lines.clear()
                self.dirty.add(name)
            for line in list(sheet.lines.values()):
                entry = Entry(name, line.target, line.sport, line.kind, line.cls)
                if line.target not in known or (line.cls and not same_classes):
                    del sheet.lines[line.index]
                    self.dirty.add(name)
                    continue
                self._index(entry, line.index)
                if entry.kind == INTER_TOR and entry.cls == 0:
                    links = sheet.links.get(line.index)
                    if links is not None:
                        self.paths[entry.tuple5] = links
                    if line.index not in sheet.complete:
                        self.pending[entry.tuple5] = 0
        remember(self._db, "classes", self._classes)

    def _index(self, entry: Entry, index: int) -> None:
        self.where[entry] = index
        by = self.probers.setdefault(entry.target, {})
        by[entry.source] = by.get(entry.source, 0) + 1

    def add(self, entries: Iterable[Entry], now_ns: int) -> None:
        """Bring entries in, each at the lowest free index of its list."""
        free: dict[str, int] = {}
        for e in entries:
            if e in self.where:
                continue
            sheet = self.sheets.setdefault(e.source, Sheet())
            index = free.get(e.source, 0)
            while index in sheet.lines:
                index += 1
            free[e.source] = index + 1
            sheet.lines[index] = Line(index, e.target, e.sport, e.kind, e.cls, self.versions.get(e.source, 0) + 1)
            self._index(e, index)
            self.dirty.add(e.source)
            if e.kind == INTER_TOR and e.cls == 0:
                self._expect(sheet, index, e, now_ns)

    def _expect(self, sheet: Sheet, index: int, e: Entry, now_ns: int) -> None:
        if self._reach.mask(e.source, e.target):
            self.pending[e.tuple5] = now_ns
        else:  # the topology leaves no choice: the path is known
            sheet.links[index] = self.paths[e.tuple5] = self._reach.walk(e.source, e.target).links
            sheet.complete.add(index)

    def drop(self, entries: Iterable[Entry]) -> None:
        """Take entries out; those of further classes on the same tuple go with class 0."""
        for e in entries:
            others = (
                [Entry(e.source, e.target, e.sport, e.kind, c) for c in range(1, MAX_CLASSES)] if e.cls == 0 else []
            )
            for x in (e, *others):
                index = self.where.pop(x, None)
                if index is None:
                    continue
                sheet = self.sheets[x.source]
                del sheet.lines[index]
                sheet.links.pop(index, None)
                sheet.complete.discard(index)
                by = self.probers[x.target]
                by[x.source] -= 1
                if not by[x.source]:
                    del by[x.source]
                self.dirty.add(x.source)
            if e.cls == 0:
                self.paths.pop(e.tuple5, None)
                self.pending.pop(e.tuple5, None)

    def leave(self, entries: Iterable[Entry]) -> None:
        """Mark entries as no longer wanted; they go on until `drop`."""
        for e in entries:
            self.sheets[e.source].lines[self.where[e]].leaving = True
            self._unsaved.add(e.source)

    def leaving(self) -> list[Entry]:
        """Entries marked by `leave`."""
        return [e for e, i in self.where.items() if self.sheets[e.source].lines[i].leaving]

    def traced(self, source: str, p: TracedPath) -> bool:
        """Take the path of a prober's tuple in; False where it tells nothing new or is about another entry.

        The trace may be of an older version of the list: it counts if the index still means the same tuple.
        """
        sheet = self.sheets.get(source)
        line = sheet.lines.get(p.index) if sheet else None
        if sheet is None or line is None or line.sport != p.sport or p.list_version < line.since:
            return False
        base = Entry(source, line.target, line.sport, line.kind)
        index = self.where.get(base)
        if index is None or line.kind != INTER_TOR:
            return False
        walk = self._reach.walk(source, line.target, [(ttl, a) for ttl, a in p.hops if 1 <= ttl <= MAX_TTL])
        if not walk.links and not walk.complete:
            return False
        known = self.paths.get(base.tuple5)
        if not walk.complete and index in sheet.complete:
            return False  # less than we know
        fresh = known != walk.links or base.tuple5 in self.pending
        self.paths[base.tuple5] = sheet.links[index] = walk.links
        if walk.complete:
            sheet.complete.add(index)
            self.pending.pop(base.tuple5, None)
        if fresh:
            self._unsaved.add(source)
        return fresh

    def compose(self, name: str, number: Callable[[str], int | None], flows: Mapping[Entry, int]) -> bool:
        """Make the list of one RNIC from `flows` (entry -> interval in us) and save it; True where it changed."""
        sheet = self.sheets.setdefault(name, Sheet())
        out = []
        for entry, interval_us in flows.items():
            peer = number(entry.target)
            if peer is not None:
                mask = self._reach.mask(entry.source, entry.target) if entry.kind == INTER_TOR else 0
                index = self.where[entry]
                out.append(Flow(index, peer, entry.sport, entry.cls, entry.kind, interval_us, mask))
        out.sort(key=lambda f: f.index)
        self.dirty.discard(name)
        changed = out != sheet.flows or name not in self.versions
        if changed:
            sheet.flows = out
            self.versions[name] = self.versions.get(name, 0) + 1
        self._unsaved.add(name)
        return changed

    def save(self) -> None:
        """Write what changed; before anything is published."""
        if self._unsaved:
            with self._db:
                self._db.executemany(
                    "INSERT OR REPLACE INTO lists VALUES (?, ?, ?)",
                    [(n, self.versions.get(n, 0), _encode(self.sheets[n])) for n in self._unsaved],
                )
            self._unsaved.clear()
