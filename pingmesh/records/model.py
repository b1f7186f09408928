"""Flow records in memory: numpy columns, names as numbers. Knows nothing of files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from pingmesh.analyzer.table import Bools, Ints, expand, pointer

Codes = npt.NDArray[np.int32]

PROBE, ACK, ROUND_TRIP = 0, 1, 2
ROLES = ("probe", "ack", "round_trip")
UNKNOWN = -1
"""Stands for a value that nobody has measured, in columns of counts and times."""

MOST_COUNT = 1 << 32
MOST_NS = 1 << 62
MOST_RTT_SUM_NS = 1 << 50
"""What one row may hold: two billion rows of such counts, more than fit into memory, are summed without wrapping."""

VALID = "valid"
PROBER_SET_ASIDE = "prober_set_aside"
TARGET_SET_ASIDE = "target_set_aside"
NO_LINK = "no_link"
VALIDITIES = (VALID, PROBER_SET_ASIDE, TARGET_SET_ASIDE, NO_LINK)


@dataclass(frozen=True, slots=True, eq=False)
class Coded:
    """A column of names: `codes` (rows,) index `names`; -1 stands for none."""

    codes: Codes
    names: tuple[str, ...]

    @classmethod
    def of(cls, values: Iterable[str | None]) -> Coded:
        """From plain values, numbered in order of appearance. O(rows)."""
        index: dict[str, int] = {}
        codes = [-1 if v is None else index.setdefault(v, len(index)) for v in values]
        return cls(np.array(codes, np.int32), tuple(index))

    @classmethod
    def repeat(cls, value: str, rows: int) -> Coded:
        """One value in every row."""
        return cls(np.zeros(rows, np.int32), (value,))

    def __len__(self) -> int:
        return len(self.codes)

    def value(self, row: int) -> str | None:
        """The name in a row."""
        code = int(self.codes[row])
        return None if code < 0 else self.names[code]

    def take(self, rows: Ints | Bools) -> Coded:
        """Some rows."""
        return Coded(self.codes[rows], self.names)

    def lookup(self, numbers: dict[str, int]) -> Ints:
        """Per row, what `numbers` says of its name; -1 for others and for none. O(rows + names)."""
        table = np.array([*(numbers.get(n, -1) for n in self.names), -1], np.int64)
        return table[self.codes]


@dataclass(frozen=True, slots=True, eq=False)
class PathColumn:
    """A path a row: element names as numbers, in CSR. Rows with `known` False have none: only the ECMP set is known."""

    ptr: Ints
    elements: Coded
    known: Bools

    @classmethod
    def of(cls, paths: Sequence[Sequence[str] | None]) -> PathColumn:
        """From plain values. O(elements)."""
        flat = [e for p in paths if p is not None for e in p]
        lengths = [0 if p is None else len(p) for p in paths]
        return cls(pointer(lengths), Coded.of(flat), np.array([p is not None for p in paths], bool))

    @classmethod
    def none(cls, rows: int) -> PathColumn:
        """No path is known."""
        return cls(np.zeros(rows + 1, np.int64), Coded(np.empty(0, np.int32), ()), np.zeros(rows, bool))

    def value(self, row: int) -> tuple[str, ...] | None:
        """The path of a row."""
        if not self.known[row]:
            return None
        return tuple(self.elements.names[c] for c in self.elements.codes[self.ptr[row] : self.ptr[row + 1]])

    def take(self, rows: Ints | Bools) -> PathColumn:
        """Some rows."""
        numbers = np.flatnonzero(rows) if rows.dtype == np.bool_ else rows.astype(np.int64, copy=False)
        at, _ = expand(self.ptr, numbers)
        lengths = np.diff(self.ptr)[numbers]
        return PathColumn(pointer(lengths), self.elements.take(at), self.known[numbers])


@dataclass(frozen=True, slots=True, eq=False)
class Records:
    """One row a flow (5-tuple and class), role and window; every column is (rows,). docs/records.md has the meanings.

    `UNKNOWN` in `source_port`, `overdue` and the `rtt_p50_ns`, `rtt_p99_ns`, `rtt_max_ns` columns: not measured.
    """

    start_ns: Ints
    end_ns: Ints
    role: Ints
    prober: Coded
    target: Coded
    prober_address: Coded
    target_address: Coded
    source_port: Ints
    cls: Coded
    sent: Ints
    lost: Ints
    overdue: Ints
    rtts: Ints
    rtt_sum_ns: Ints
    rtt_p50_ns: Ints
    rtt_p99_ns: Ints
    rtt_max_ns: Ints
    path: PathColumn
    validity: Coded
    confirmed: Bools

    def __len__(self) -> int:
        return len(self.start_ns)

    def take(self, rows: Ints | Bools) -> Records:
        """Some rows, by number or mask."""
        out: dict[str, Any] = {}
        for f in fields(self):
            column = getattr(self, f.name)
            out[f.name] = column.take(rows) if isinstance(column, (Coded, PathColumn)) else column[rows]
        return Records(**out)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFact:
    """What was known of one host's agent at the end of a window: what sets its probes aside. Times in ns.

    `stall_ms` is the longest stall that it reported in the window, `silent_since_ns` when it was heard last if it owes
    answers (0: it does not), `rebooted_ns` when its process was first seen, `dark` its devices without link.
    """

    start_ns: int
    end_ns: int
    host: str
    state: str = "online"
    state_since_ns: int = 0
    heard_ns: int = 0
    stall_ms: float = 0.0
    cpu_pressure: float = 0.0
    throttled_ms: float = 0.0
    rebooted_ns: int = 0
    unanswered: int = 0
    silent_since_ns: int = 0
    set_aside: bool = False
    dark: tuple[str, ...] = ()


HOST_STATES = ("online", "stopped", "died")


def _join(columns: Sequence[Coded]) -> Coded:
    index: dict[str, int] = {}
    parts = []
    for c in columns:
        table = np.array([*(index.setdefault(n, len(index)) for n in c.names), -1], np.int32)
        parts.append(table[c.codes])
    return Coded(np.concatenate(parts), tuple(index))


def concat(parts: Sequence[Records]) -> Records:
    """All rows of several records, in order; names are numbered anew. O(rows).

    Raises:
        ValueError: there is none.
    """
    if not parts:
        raise ValueError("no records to put together")
    if len(parts) == 1:
        return parts[0]
    out: dict[str, Any] = {}
    for f in fields(Records):
        columns = [getattr(p, f.name) for p in parts]
        if isinstance(columns[0], Coded):
            out[f.name] = _join(columns)
        elif isinstance(columns[0], PathColumn):
            lengths = np.concatenate([np.diff(c.ptr) for c in columns])
            known = np.concatenate([c.known for c in columns])
            out[f.name] = PathColumn(pointer(lengths), _join([c.elements for c in columns]), known)
        else:
            out[f.name] = np.concatenate(columns)
    return Records(**out)
