"""Records gathered: every flow once, with its counts by window."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from pingmesh.analyzer.table import Bools, Ints, expand, pointer
from pingmesh.offline.names import Names
from pingmesh.records.errors import RecordsError
from pingmesh.records.model import ACK, MOST_NS, VALID, HostFact, PathColumn, Records
from topology.model import Topology

Hashes = npt.NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_SHIFT = np.uint64(29)


@dataclass(frozen=True, slots=True, eq=False)
class Keys:
    """Distinct flows: prober, target, source port, class, role and path; columns are (keys,).

    Paths are element numbers in CSR; of a key with `known` False only the ECMP set is known.
    """

    prober: Ints
    target: Ints
    source_port: Ints
    cls: Ints
    role: Ints
    known: Bools
    path_ptr: Ints
    path_elements: Ints

    def __len__(self) -> int:
        return len(self.prober)


@dataclass(frozen=True, slots=True, eq=False)
class Cells:
    """Counts of flows in windows; columns are (cells,). `window` is the middle's nanoseconds // the window's length."""

    window: Ints
    key: Ints
    sent: Ints
    lost: Ints
    rtts: Ints
    rtt_sum_ns: Ints


@dataclass(slots=True)
class Counted:
    """What became of the rows."""

    rows: int = 0
    evidence: int = 0
    set_aside: Counter[str] = field(default_factory=Counter)
    """Rows that are no evidence, by reason."""
    strange_paths: int = 0
    """Rows whose path has elements that are not in the topology: taken as if it were not known."""
    no_path: int = 0
    """Rows between RNICs that nothing joins."""


class Recording:
    """Takes records in, batch by batch; `keys()` and `cells()` give the whole.

    `index` numbers the elements (see `Components.index`). O(rows log rows) in time, about 40 bytes a row.
    """

    def __init__(self, topology: Topology, index: dict[str, int], window_ns: int) -> None:
        self.topology = topology
        self.window_ns = window_ns
        self.names = Names(topology)
        self.classes: list[str] = []
        self.counted = Counted()
        self.facts: list[HostFact] = []
        hosts = {h: i for i, h in enumerate(topology.hosts)}
        self._host_of = np.array([hosts[r.host] for r in topology.rnics.values()], np.int64)
        self._index = index
        self._hashes: Hashes = np.empty(0, np.uint64)
        self._numbers: Ints = np.empty(0, np.int64)
        self._keys: list[Keys] = []
        self._cells: list[Cells] = []
        self._reached: Counter[tuple[int, int, str]] = Counter()
        self._rtt_ns = 0.0

    def add(self, r: Records) -> None:
        """Take in one batch of flow records.

        Raises:
            RecordsError: its round trips, added to those before, are more than 64 bits hold.
        """
        n = len(r)
        self._rtt_ns += float(r.rtt_sum_ns.sum(dtype=np.float64))
        if self._rtt_ns > MOST_NS:
            raise RecordsError(
                "--records",
                "the round trips take more than 146 years in all",
                "check that rtt_sum_ns is in nanoseconds",
            )
        self.counted.rows += n
        prober = self.names.numbers(r.prober, r.prober_address)
        target = self.names.numbers(r.target, r.target_address)
        window = (r.start_ns + (r.end_ns - r.start_ns) // 2) // self.window_ns
        there = (prober >= 0) & (target >= 0)
        self._count_reached(r, window, np.where(there, target, 0), there)
        of_validity = np.array([v == VALID for v in r.validity.names] + [True])
        valid = of_validity[r.validity.codes]
        for code, rows in zip(*np.unique(r.validity.codes[~valid], return_counts=True), strict=True):
            self.counted.set_aside[r.validity.names[code]] += int(rows)
        ok = np.flatnonzero(there & valid & (prober != target))
        self.counted.evidence += len(ok)
        if not len(ok):
            return
        batch = self._batch(r, ok, prober[ok], target[ok])
        key = self._number(batch)
        self._cells.append(Cells(window[ok], key, r.sent[ok], r.lost[ok], r.rtts[ok], r.rtt_sum_ns[ok]))

    def add_facts(self, facts: Sequence[HostFact]) -> None:
        """Take in host facts."""
        self.facts.extend(facts)

    def keys(self) -> Keys:
        """All flows so far."""
        return _joined(self._keys)

    def cells(self) -> Cells:
        """All counts so far."""
        if not self._cells:
            return Cells(*(np.empty(0, np.int64) for _ in range(6)))
        columns = ("window", "key", "sent", "lost", "rtts", "rtt_sum_ns")
        return Cells(*(np.concatenate([getattr(c, name) for c in self._cells]) for name in columns))

    def reached(self, host: str, window: int) -> tuple[int, int]:
        """(sent, lost) of all probes to a host in a window, those that were set aside too."""
        number = list(self.topology.hosts).index(host)
        return self._reached[number, window, "sent"], self._reached[number, window, "lost"]

    def _count_reached(self, r: Records, window: Ints, target: Ints, there: Bools) -> None:
        rows = there & (r.role != ACK)
        pair = np.stack((self._host_of[target[rows]], window[rows]))
        unique, at = np.unique(pair, axis=1, return_inverse=True)
        for name, values in (("sent", r.sent), ("lost", r.lost)):
            sums = np.bincount(at.ravel(), weights=values[rows], minlength=unique.shape[1])
            for (host, w), total in zip(unique.T.tolist(), sums.tolist(), strict=True):
                self._reached[host, w, name] += int(total)

    def _batch(self, r: Records, ok: Ints, prober: Ints, target: Ints) -> Keys:
        numbers = {name: i for i, name in enumerate(self.classes)}
        for name in r.cls.names:
            if name not in numbers:
                numbers[name] = len(self.classes)
                self.classes.append(name)
        cls = r.cls.take(ok).lookup(numbers)
        path = r.path.take(ok)
        elements = path.elements.lookup(self._index)
        known = self._without_strange(path, elements)
        lengths = np.where(known, np.diff(path.ptr), 0)
        owner = np.repeat(np.arange(len(ok)), np.diff(path.ptr))
        return Keys(prober, target, r.source_port[ok], cls, r.role[ok], known, pointer(lengths), elements[known[owner]])

    def _without_strange(self, path: PathColumn, elements: Ints) -> Bools:
        strange = np.zeros(len(path.known), bool)
        owner = np.repeat(np.arange(len(strange)), np.diff(path.ptr))
        strange[owner[elements < 0]] = True
        self.counted.strange_paths += int(strange.sum())
        return path.known & ~strange

    def _number(self, batch: Keys) -> Ints:
        """The key's number of each row, new ones added."""
        unique, first, at = np.unique(hashed(batch), return_index=True, return_inverse=True)
        place = np.searchsorted(self._hashes, unique)
        inside = np.minimum(place, max(len(self._hashes) - 1, 0))
        old = (self._hashes[inside] == unique) if len(self._hashes) else np.zeros(len(unique), bool)
        new = np.flatnonzero(~old)
        base = len(self._numbers)
        number = np.empty(len(unique), np.int64)
        number[new] = base + np.arange(len(new))
        if len(self._hashes):
            number[old] = self._numbers[inside[old]]
        if len(new):
            self._keys.append(_taken(batch, first[new]))
            hashes = np.concatenate((self._hashes, unique[new]))
            order = np.argsort(hashes, kind="stable")
            self._hashes = hashes[order]
            self._numbers = np.concatenate((self._numbers, number[new]))[order]
        return number[at.ravel()]


def hashed(k: Keys) -> Hashes:
    """64 bits for each key; among ten million two are equal by chance once in 400,000 recordings."""
    position = np.arange(len(k.path_elements)) - np.repeat(k.path_ptr[:-1], np.diff(k.path_ptr))
    each = _mixed(k.path_elements.astype(np.uint64) * np.uint64(64) + position.astype(np.uint64) + np.uint64(1))
    total = np.concatenate((np.zeros(1, np.uint64), np.cumsum(each, dtype=np.uint64)))
    out = total[k.path_ptr[1:]] - total[k.path_ptr[:-1]]
    for column in (k.prober, k.target, k.source_port + 1, k.cls, k.role):
        out = _mixed(out ^ column.astype(np.uint64))
    return out


def _mixed(values: Hashes) -> Hashes:
    values = (values + _GOLDEN) * np.uint64(0xBF58476D1CE4E5B9)
    values ^= values >> _SHIFT
    values *= np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(32))


def _taken(k: Keys, rows: Ints) -> Keys:
    at, _ = expand(k.path_ptr, rows)
    lengths = np.diff(k.path_ptr)[rows]
    return Keys(
        prober=k.prober[rows],
        target=k.target[rows],
        source_port=k.source_port[rows],
        cls=k.cls[rows],
        role=k.role[rows],
        known=k.known[rows],
        path_ptr=pointer(lengths),
        path_elements=k.path_elements[at],
    )


def _joined(parts: Sequence[Keys]) -> Keys:
    if not parts:
        none = np.empty(0, np.int64)
        return Keys(none, none, none, none, none, np.empty(0, bool), np.zeros(1, np.int64), none)
    return Keys(
        prober=np.concatenate([p.prober for p in parts]),
        target=np.concatenate([p.target for p in parts]),
        source_port=np.concatenate([p.source_port for p in parts]),
        cls=np.concatenate([p.cls for p in parts]),
        role=np.concatenate([p.role for p in parts]),
        known=np.concatenate([p.known for p in parts]),
        path_ptr=pointer(np.concatenate([np.diff(p.path_ptr) for p in parts])),
        path_elements=np.concatenate([p.path_elements for p in parts]),
    )
