"""The columns of many reports as arrays: tables of equally many rows are laid side by side and read at once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pingmesh.analyzer.table import Ints
from pingmesh.messages import PROBER_COLUMNS, RESPONDER_COLUMNS, Report, unpack_raw

Counts = npt.NDArray[np.int32]

Raw = tuple[int, bytes]
"""Rows of a table, and its columns one after the other, little-endian."""


def read_report(report: Report) -> tuple[list[Raw], Raw]:
    """A report's tables: of each of its `prober` rows, and the responder's.

    Raises BadMessageError if one cannot be read: a report is taken in as a whole or not at all.
    """
    return [unpack_raw(PROBER_COLUMNS, rows.columns) for rows in report.prober], unpack_raw(
        RESPONDER_COLUMNS, report.responder
    )


@dataclass(frozen=True, slots=True, eq=False)
class ProberTables:
    """Tables of n rows each: `of` numbers them in the sequence given, the counts are (tables, n)."""

    of: Ints
    index: Ints
    sent: Ints
    arrived: Ints
    ack1: Ints
    ack2: Ints
    excluded: Ints
    rtt_sum: Ints


def prober_tables(raw: Sequence[Raw]) -> Iterator[ProberTables]:
    """Prober tables, grouped by their number of rows; those without rows are left out. O(bytes)."""
    for n, of, joined in _grouped(raw):
        at = np.frombuffer(joined, [("index", "<u2", n), ("counts", "<i2", (8, n)), ("rtt", "<u4", (2, n))])
        counts = at["counts"]
        yield ProberTables(
            of=of,
            index=at["index"].astype(np.int64),
            sent=counts[:, 0],
            arrived=counts[:, 1],
            ack1=counts[:, 2],
            ack2=counts[:, 3],
            excluded=counts[:, 6],
            rtt_sum=at["rtt"][:, 0],
        )


@dataclass(frozen=True, slots=True, eq=False)
class ResponderTable:
    """All rows of responder tables, (rows,)."""

    source: Ints
    epoch: Ints
    version: Ints
    window: Ints
    index: Ints
    received: Counts
    ack1: Counts
    ack2: Counts
    mismatched: Counts

    def __len__(self) -> int:
        return len(self.source)

    def take(self, at: np.ndarray | slice) -> ResponderTable:
        """Some of the rows."""
        return ResponderTable(*(getattr(self, name)[at] for name in self.__slots__))


def responder_table(raw: Sequence[Raw]) -> ResponderTable:
    """All responder tables in one. O(bytes)."""
    total = sum(n for n, _ in raw)
    keys = np.empty((4, total), np.int64)
    index = np.empty(total, np.int64)
    counts = np.empty((4, total), np.int32)
    done = 0
    for n, of, joined in _grouped(raw):
        at = np.frombuffer(joined, [("keys", "<u4", (4, n)), ("index", "<u2", n), ("counts", "<i2", (4, n))])
        rows = slice(done, done + n * len(of))
        done = rows.stop
        for i in range(4):
            keys[i, rows].reshape(len(of), n)[:] = at["keys"][:, i]
            counts[i, rows].reshape(len(of), n)[:] = at["counts"][:, i]
        index[rows].reshape(len(of), n)[:] = at["index"]
    source, epoch, version, window = keys
    received, ack1, ack2, mismatched = counts
    return ResponderTable(source, epoch, version, window, index, received, ack1, ack2, mismatched)


def _grouped(raw: Sequence[Raw]) -> Iterator[tuple[int, Ints, bytes]]:
    """(rows, numbers of the tables that have so many, their bytes)."""
    by_rows: dict[int, list[int]] = defaultdict(list)
    for i, (n, _) in enumerate(raw):
        if n:
            by_rows[n].append(i)
    for n, of in by_rows.items():
        yield n, np.array(of), b"".join([raw[i][1] for i in of])
