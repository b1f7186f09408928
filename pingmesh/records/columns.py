"""Another system's ping records: a map of its columns, and the records made of them."""

from __future__ import annotations

import csv
import datetime
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pingmesh.analyzer.table import Ints
from pingmesh.records.errors import RecordsError, shown
from pingmesh.records.files import tables
from pingmesh.records.model import MOST_COUNT, MOST_NS, ROUND_TRIP, UNKNOWN, VALID, Coded, PathColumn, Records
from pingmesh.records.schema import pyarrow
from topology.problems import did_you_mean

REQUIRED = ("src", "dst", "time")
OPTIONAL = ("latency", "lost", "sent", "sport", "class")
TIME_UNITS = {"ns": 1, "us": 1_000, "ms": 1_000_000, "s": 1_000_000_000}
BATCH = 1 << 18
"""Rows read at a time."""
_YEAR_NS = 31_556_952_000_000_000
LONGEST_SPAN_NS = 5 * _YEAR_NS
"""Times of one file that are further apart are of different units."""
_CENTURY_NS = range(30 * _YEAR_NS, 130 * _YEAR_NS)
"""2000 to 2100."""
LONGEST_NS = 3_600_000_000_000
"""A latency beyond an hour is none: its unit is wrong."""
_YES = frozenset({"1", "true", "t", "yes", "y", "lost", "timeout"})
_NO = frozenset({"0", "false", "f", "no", "n", "ok"})
_EMPTY = frozenset({"", "nan", "none", "null"})
"""What other systems write for no value."""


class ColumnMapError(ValueError):
    """`--columns` that cannot be used."""

    def __init__(self, problem: str) -> None:
        super().__init__(
            f"--columns: {problem}; write for example "
            "src=source_ip,dst=target_ip,time=ts:ms,latency=rtt:us,lost=timeout."
        )


@dataclass(frozen=True, slots=True)
class ColumnMap:
    """Which of a file's columns is what. `time_unit` None: RFC 3339, or guessed from the first value's size."""

    columns: Mapping[str, str]
    time_unit: str | None = None
    latency_unit: str = "us"


def parse_map(text: str) -> ColumnMap:
    """`src=COLUMN,dst=COLUMN,time=COLUMN[:UNIT],latency=COLUMN[:UNIT],lost=COLUMN,...`.

    Raises:
        ColumnMapError: a part is missing, unknown or given twice.

    >>> parse_map("src=a,dst=b,time=t:ms,lost=l").columns["time"]
    't'
    """
    columns: dict[str, str] = {}
    units: dict[str, str] = {}
    for part in text.split(","):
        key, is_pair, column = (p.strip() for p in part.partition("="))
        if not is_pair or not column:
            raise ColumnMapError(f"{shown(part.strip())} is no KEY=COLUMN")
        if key not in REQUIRED + OPTIONAL:
            hint = did_you_mean(key, REQUIRED + OPTIONAL)
            raise ColumnMapError(f"{shown(key)} is unknown{hint or ', known are ' + ', '.join(REQUIRED + OPTIONAL)}")
        if key in columns:
            raise ColumnMapError(f"{key!r} is there twice")
        if key in ("time", "latency"):
            name, _, unit = column.rpartition(":")
            if name and unit in TIME_UNITS:
                column, units[key] = name, unit
        columns[key] = column
    missing = [k for k in REQUIRED if k not in columns]
    if missing:
        raise ColumnMapError(f"{missing[0]!r} is missing")
    if "latency" not in columns and "lost" not in columns:
        raise ColumnMapError("neither 'latency' nor 'lost' is given")
    return ColumnMap(columns, units.get("time"), units.get("latency", "us"))


class _Nanoseconds(int):
    """A time whose unit the file told."""


@dataclass(slots=True)
class _Converter:
    """Makes records of columns of text (or of values, from Arrow)."""

    source: str
    map: ColumnMap
    window_ns: int
    time_unit: str | None = field(init=False)
    earliest: int = field(default=MOST_NS, init=False)
    latest: int = field(default=-1, init=False)

    def __post_init__(self) -> None:
        self.time_unit = self.map.time_unit

    def error(self, key: str, row: int, value: object, remedy: str) -> RecordsError:
        return RecordsError(self.source, f"is {shown(value)}", remedy, row=row, column=self.map.columns[key])

    def records(self, columns: Mapping[str, Sequence[object]], first_row: int) -> Records:
        """Round trips, summed up by pair, port, class and window."""
        times = self._each("time", columns["time"], first_row, self._time)
        self._check_units(times, columns["time"], first_row)
        n = len(times)
        src, dst = (Coded.of(self._names(key, columns[key], first_row)) for key in ("src", "dst"))
        latency = np.full(n, -1, np.int64)
        if "latency" in columns:
            latency = self._each("latency", columns["latency"], first_row, self._latency)
        sent = self._each("sent", columns["sent"], first_row, _count) if "sent" in columns else np.ones(n, np.int64)
        # Where nothing is said of the loss, the latency tells: an answer has one.
        lost = np.where(latency < 0, sent, 0) if "latency" in columns else np.zeros(n, np.int64)
        if "lost" in columns:
            told = self._each("lost", columns["lost"], first_row, _lost)
            lost = np.where(told == UNKNOWN, lost, told)
        wrong = np.flatnonzero(lost > sent)
        if len(wrong):
            at = int(wrong[0])
            key = "lost" if "lost" in columns else "sent"
            raise self.error(key, first_row + at, int(lost[at]), f"of {int(sent[at])} packets no more can be lost")
        sport = np.full(n, UNKNOWN, np.int64)
        if "sport" in columns:
            sport = self._each("sport", columns["sport"], first_row, _port)
        cls = Coded.repeat("default", n)
        if "class" in columns:
            cls = Coded.of([_text(v) or "default" for v in columns["class"]])
        return _summed(times // self.window_ns, self.window_ns, src, dst, sport, cls, sent, lost, latency)

    def _each(self, key: str, values: Sequence[object], first_row: int, convert: Callable[[object], int]) -> Ints:
        out = np.empty(len(values), np.int64)
        for i, value in enumerate(values):
            try:
                out[i] = convert(value)
            except (ValueError, OverflowError, TypeError) as error:
                raise self.error(key, first_row + i, value, _REMEDIES[key].format(why=error)) from None
        return out

    def _check_units(self, times: Ints, values: Sequence[object], first_row: int) -> None:
        """A time far from those before it is in another unit, and its windows would be of another year."""
        if self.latest < 0 and (unit := self.map.time_unit) is not None and int(times[0]) < _CENTURY_NS[0]:
            number = int(times[0]) // TIME_UNITS[unit]
            better = next((u for u, scale in TIME_UNITS.items() if number * scale in _CENTURY_NS), None)
            if better is not None:
                remedy = f"its size is that of {better} since 1970: write time={self.map.columns['time']}:{better}"
                raise self.error("time", first_row, values[0], remedy)
        earliest = np.minimum(np.minimum.accumulate(times), self.earliest)
        latest = np.maximum(np.maximum.accumulate(times), self.latest)
        far = np.flatnonzero(latest - earliest > LONGEST_SPAN_NS)
        if len(far):
            at = int(far[0])
            year = 1970 + int(times[at]) // _YEAR_NS
            remedy = f"that is in {year}, years from the rows before it: write all times in one unit"
            raise self.error("time", first_row + at, values[at], remedy)
        self.earliest, self.latest = int(earliest[-1]), int(latest[-1])

    def _names(self, key: str, values: Sequence[object], first_row: int) -> Iterator[str]:
        for i, value in enumerate(values):
            name = str(value).strip() if value is not None else ""
            if not name:
                raise self.error(key, first_row + i, value, _REMEDIES[key])
            yield name

    def _time(self, value: object) -> int:
        if isinstance(value, _Nanoseconds):
            return _checked_time(value)
        if isinstance(value, datetime.datetime):
            return _checked_time(_of_datetime(value))
        text = str(value).strip()
        try:
            number = float(text)
        except ValueError:
            return _checked_time(_of_datetime(datetime.datetime.fromisoformat(text)))
        if not math.isfinite(number):
            raise ValueError("no time")
        if self.time_unit is None:
            # 1e11 s is the year 5138, 1e11 ms is 1973.
            self.time_unit = next((u for u, top in (("s", 1e11), ("ms", 1e14), ("us", 1e17)) if number < top), "ns")
        scale = TIME_UNITS[self.time_unit]
        return _checked_time(int(text) * scale if text.isdecimal() else int(number * scale))

    def _latency(self, value: object) -> int:
        text = _text(value)
        if text.lower() in ("", "inf"):
            return -1
        number = float(text) * TIME_UNITS[self.map.latency_unit]
        if not 0 <= number <= LONGEST_NS:
            raise ValueError("out of range")
        return int(number)


_REMEDIES = {
    "src": "name the prober's address or RNIC in every row",
    "dst": "name the target's address or RNIC in every row",
    "time": "write an RFC 3339 time or a number, with its unit as in --columns time=COLUMN:ms",
    "latency": "write a number from 0 to an hour in its unit (latency=COLUMN:ms), or nothing where the probe was lost",
    "lost": f"write 0 or 1, true or false, or a count up to {MOST_COUNT}",
    "sent": f"write a count up to {MOST_COUNT}",
    "sport": "write a port from 0 to 65535, or nothing",
}


def _of_datetime(t: datetime.datetime) -> int:
    aware = t if t.tzinfo else t.replace(tzinfo=datetime.UTC)
    delta = aware - datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
    return (delta.days * 86_400 + delta.seconds) * 1_000_000_000 + delta.microseconds * 1_000


def _checked_time(ns: int) -> int:
    if not 0 <= ns <= MOST_NS:
        raise ValueError("out of range")
    return ns


def _text(value: object) -> str:
    """Without space around it; empty where there is no value."""
    text = "" if value is None else str(value).strip()
    return "" if text.lower() in _EMPTY else text


def _whole(text: str) -> int:
    """Also `1.0`: a column of which some values are missing is often written as floats."""
    try:
        return int(text)
    except ValueError:
        number = float(text)
        if not number.is_integer():
            raise ValueError("no whole number") from None
        return int(number)


def _count(value: object) -> int:
    number = _whole(str(value))
    if not 0 <= number <= MOST_COUNT:
        raise ValueError("out of range")
    return number


def _lost(value: object) -> int:
    text = _text(value).lower()
    if not text:
        return UNKNOWN
    if text in _YES:
        return 1
    return 0 if text in _NO else _count(text)


def _port(value: object) -> int:
    text = _text(value)
    if not text:
        return UNKNOWN
    number = _whole(text)
    if not 0 <= number <= 0xFFFF:
        raise ValueError("out of range")
    return number


def _summed(
    window: Ints,
    window_ns: int,
    src: Coded,
    dst: Coded,
    sport: Ints,
    cls: Coded,
    sent: Ints,
    lost: Ints,
    latency: Ints,
) -> Records:
    key = np.stack((window, src.codes, dst.codes, sport, cls.codes))
    unique, row = np.unique(key, axis=1, return_inverse=True)
    row = row.ravel()
    n = unique.shape[1]

    def total(values: Ints) -> Ints:
        out = np.zeros(n, np.int64)
        np.add.at(out, row, values)
        return out

    timed = latency >= 0
    largest = np.full(n, UNKNOWN, np.int64)
    np.maximum.at(largest, row, latency)
    none = np.full(n, UNKNOWN, np.int64)
    return Records(
        start_ns=unique[0] * window_ns,
        end_ns=(unique[0] + 1) * window_ns,
        role=np.full(n, ROUND_TRIP),
        prober=Coded(unique[1].astype(np.int32), src.names),
        target=Coded(unique[2].astype(np.int32), dst.names),
        prober_address=Coded(np.full(n, -1, np.int32), ()),
        target_address=Coded(np.full(n, -1, np.int32), ()),
        source_port=unique[3],
        cls=Coded(unique[4].astype(np.int32), cls.names),
        sent=total(sent),
        lost=total(lost),
        overdue=none,
        rtts=total(timed.astype(np.int64)),
        rtt_sum_ns=total(np.where(timed, latency, 0)),
        rtt_p50_ns=none,
        rtt_p99_ns=none,
        rtt_max_ns=largest,
        path=PathColumn.none(n),
        validity=Coded.repeat(VALID, n),
        confirmed=np.zeros(n, bool),
    )


def read_mapped(path: Path, columns: ColumnMap, window_ns: int) -> Iterator[Records]:
    """Round trips of a CSV, Parquet or Arrow file of another system, batch by batch; windows are `window_ns` long.

    Raises:
        RecordsError: the file cannot be read, lacks a column, or a value is none.
    """
    convert = _Converter(str(path), columns, window_ns)
    batches = (
        _csv_batches(path, columns) if path.suffix not in (".parquet", ".arrow") else _arrow_batches(path, columns)
    )
    row = 1
    for batch in batches:
        n = len(batch["time"])
        if n:
            yield convert.records(batch, row)
        row += n


def _missing(path: Path, key: str, column: str, there: Sequence[str]) -> RecordsError:
    if not any(there):
        return RecordsError(str(path), "has no header", "write the names of its columns into the first line")
    if column in there:
        return RecordsError(str(path), "is there more than once", "keep one of the columns", column=column)
    name, _, unit = column.rpartition(":")
    if key in ("time", "latency") and name in there:
        return RecordsError(
            str(path), f"has no unit {shown(unit)}", f"write one of {', '.join(TIME_UNITS)}", column=name
        )
    hint = did_you_mean(column, there) or f"; the file has {', '.join(map(shown, there[:20]))}"
    return RecordsError(str(path), f"is not in the file{hint}".rstrip("?"), "correct --columns", column=column)


def _arrow_batches(path: Path, columns: ColumnMap) -> Iterator[dict[str, Sequence[object]]]:
    for table in tables(path):
        for key, column in columns.columns.items():
            if table.schema.names.count(column) != 1:
                raise _missing(path, key, column, table.schema.names)
        yield {key: _values(path, column, table.column(column)) for key, column in columns.columns.items()}


def _values(path: Path, name: str, column: Any) -> Sequence[object]:
    """Timestamps as nanoseconds: Python's own have no more than microseconds and 9999 years, and want to know zones."""
    pa = pyarrow(str(path))
    try:
        if pa.types.is_timestamp(column.type):
            scale = TIME_UNITS[column.type.unit]
            return [None if v is None else _Nanoseconds(v * scale) for v in column.cast(pa.int64()).to_pylist()]
        values: list[object] = column.to_pylist()
    except (ValueError, OverflowError, LookupError):  # among them ArrowInvalid, UnicodeDecodeError, unknown zones
        what = f"holds {column.type} values that cannot be read"
        raise RecordsError(str(path), what, "write numbers or text", column=name) from None
    return values


def _csv_batches(path: Path, columns: ColumnMap) -> Iterator[dict[str, Sequence[object]]]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as f:
            yield from _csv_rows(path, columns, csv.reader(f))
    except FileNotFoundError:
        raise RecordsError(str(path), "there is no such file", "give the path of a record file") from None
    except OSError as error:
        raise RecordsError(str(path), f"cannot be read ({error.strerror})", "give the path of a record file") from None
    except UnicodeDecodeError:
        raise RecordsError(
            str(path), "is not UTF-8 text", "save it as UTF-8, or name a Parquet file .parquet"
        ) from None
    except csv.Error as error:
        raise RecordsError(str(path), f"is no CSV ({error})", "save it with commas and double quotes") from None


def _csv_rows(path: Path, columns: ColumnMap, rows: Iterator[list[str]]) -> Iterator[dict[str, Sequence[object]]]:
    head = [h.strip() for h in next(rows, [])]
    at = {}
    for key, column in columns.columns.items():
        if head.count(column) != 1:
            raise _missing(path, key, column, head)
        at[key] = head.index(column)
    batch: dict[str, list[object]] = {key: [] for key in at}
    number = 0
    for number, row in enumerate((r for r in rows if r), 1):
        if len(row) != len(head):
            raise RecordsError(
                str(path), f"has {len(row)} fields, the header {len(head)}", "mend or remove the row", row=number
            )
        for key, i in at.items():
            batch[key].append(row[i])
        if number % BATCH == 0:
            yield dict(batch)
            batch = {key: [] for key in at}
    yield dict(batch)
