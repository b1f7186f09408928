"""Arrow tables to records and host facts, every value checked: files come from anybody."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pingmesh.analyzer.table import Ints
from pingmesh.records.errors import RecordsError, shown
from pingmesh.records.model import (
    HOST_STATES,
    MOST_COUNT,
    MOST_NS,
    MOST_RTT_SUM_NS,
    ROLES,
    UNKNOWN,
    Coded,
    HostFact,
    PathColumn,
    Records,
)
from pingmesh.records.schema import FIELD, FLOW_COLUMNS, HOST_COLUMNS, Column, pyarrow

_MOST = {"rtt_sum_ns": MOST_RTT_SUM_NS}


class _Reader:
    """Takes the columns of one Arrow table apart; `first_row` is the number of its first row, from 1."""

    def __init__(self, table: Any, source: str, first_row: int) -> None:
        self.pa = pyarrow(source)
        self.table = table
        self.source = source
        self.first_row = first_row
        self.rows: int = table.num_rows

    def error(self, column: str, problem: str, remedy: str, at: int | None = None) -> RecordsError:
        row = None if at is None else self.first_row + at
        return RecordsError(self.source, problem, remedy, row=row, column=column)

    def array(self, c: Column) -> Any:
        """The column as one array; None where it is left out and need not be there."""
        count = self.table.schema.names.count(c.name)
        if count > 1:
            raise self.error(c.name, "is there more than once", "keep one of the columns")
        if count == 0:
            if c.default is None:
                raise self.error(c.name, "is missing", "write it as docs/records.md describes")
            return None
        chunked = self.table.column(c.name)
        array = chunked.combine_chunks()
        if isinstance(array, self.pa.ChunkedArray):
            array = self.pa.concat_arrays(array.chunks) if array.num_chunks else self.pa.array([], chunked.type)
        if array.null_count and not c.kind.endswith("?") and c.kind not in ("path", "names"):
            at = int(np.flatnonzero(np.asarray(array.is_null()))[0])
            raise self.error(c.name, "is null", "give it a value in every row", at)
        return array

    def numbers(self, c: Column) -> Ints:
        """Whole numbers, none negative; null becomes the default."""
        array = self.array(c)
        default = c.default if isinstance(c.default, int) else UNKNOWN
        if array is None:
            return np.full(self.rows, default, np.int64)
        pa = self.pa
        try:
            if pa.types.is_timestamp(array.type):
                array = array.cast(pa.timestamp("ns"))
            # Null type arises from columns without any value.
            filled = array.cast(pa.int64()).fill_null(UNKNOWN)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
            raise self.error(
                c.name, f"holds {array.type} values that are no whole numbers of 64 bits", "write 64-bit integers"
            ) from None
        values: Ints = np.asarray(filled, np.int64)
        most = _MOST.get(c.name, MOST_NS if c.kind.startswith("ns") else MOST_COUNT)
        bad = np.flatnonzero(((values < 0) | (values > most)) & np.asarray(array.is_valid()))
        if len(bad):
            at = int(bad[0])
            remedy = (
                "counts and times are never negative" if values[at] < 0 else f"the most that a row may hold is {most}"
            )
            raise self.error(c.name, f"is {values[at]}", remedy, at)
        return values

    def flags(self, c: Column) -> Any:
        array = self.array(c)
        if array is None:
            return np.full(self.rows, bool(c.default))
        if not self.pa.types.is_boolean(array.type):
            raise self.error(c.name, f"holds {array.type} values", "write booleans")
        return np.asarray(array, bool)

    def floats(self, c: Column) -> Any:
        array = self.array(c)
        if array is None:
            return np.full(self.rows, c.default, np.float64)
        try:
            return np.nan_to_num(np.asarray(array.cast(self.pa.float64()), np.float64))
        except (self.pa.ArrowInvalid, self.pa.ArrowNotImplementedError):
            raise self.error(c.name, f"holds {array.type} values that are no numbers", "write numbers") from None

    def is_text(self, kind: Any) -> bool:
        of = self.pa.types
        return bool(of.is_string(kind) or of.is_large_string(kind) or of.is_string_view(kind))

    def coded(self, c: Column, array: Any = None) -> Coded:
        """Names; null and the empty name are none."""
        array = self.array(c) if array is None else array
        if array is None:
            default = str(c.default)
            return Coded.repeat(default, self.rows) if default else Coded(np.full(self.rows, -1, np.int32), ())
        pa = self.pa
        if not pa.types.is_dictionary(array.type):
            if not (self.is_text(array.type) or pa.types.is_null(array.type)):
                raise self.error(c.name, f"holds {array.type} values", "write text")
            array = array.cast(pa.string()).dictionary_encode()
        names = array.dictionary
        if not self.is_text(names.type):
            raise self.error(c.name, f"holds {names.type} values", "write text")
        texts = names.to_pylist()
        if None in texts:
            raise self.error(c.name, "has null among its dictionary's names", "write null rows instead")
        codes = np.asarray(array.indices.cast(pa.int32()).fill_null(-1), np.int32)
        return Coded(codes, tuple(texts))

    def path(self, c: Column) -> PathColumn:
        array = self.array(c)
        pa = self.pa
        if array is None or pa.types.is_null(array.type):
            return PathColumn.none(self.rows)
        if pa.types.is_large_list(array.type):
            array = array.cast(pa.list_(array.type.value_type))
        if not pa.types.is_list(array.type):
            raise self.error(c.name, f"holds {array.type} values", "write a list of element names, or null")
        known = np.asarray(array.is_valid(), bool)
        ends = np.asarray(array.offsets, np.int64)
        # Null rows may hide values: `flatten` leaves them out.
        lengths = np.where(known, np.diff(ends), 0)
        elements = self.coded(c, array.flatten())
        ptr = np.concatenate((np.zeros(1, np.int64), np.cumsum(lengths)))
        empty = np.flatnonzero(known & (lengths == 0))
        if len(empty):
            raise self.error(c.name, "is an empty list", "write null where no path is known", int(empty[0]))
        none = np.flatnonzero(elements.codes < 0)
        if len(none):
            at = int(np.searchsorted(ptr, none[0], side="right")) - 1
            raise self.error(c.name, "holds null", "name every element of a path", at)
        return PathColumn(ptr, elements, known)


def flows_from_arrow(table: Any, source: str, first_row: int = 1) -> Records:
    """Records of an Arrow table, checked. O(rows).

    Raises:
        RecordsError: a column is missing, of another type, or holds what cannot be.
    """
    r = _Reader(table, source, first_row)
    out: dict[str, Any] = {}
    for c in FLOW_COLUMNS:
        name = FIELD.get(c.name, c.name)
        if c.name == "role":
            roles = r.coded(c)
            out[name] = roles.lookup({role: i for i, role in enumerate(ROLES)})
            bad = np.flatnonzero(out[name] < 0)
            if len(bad):
                raise r.error(
                    c.name, f"is {shown(roles.value(bad[0]))}", f"write one of {', '.join(ROLES)}", int(bad[0])
                )
        elif c.kind in ("name", "name?"):
            out[name] = r.coded(c)
        elif c.kind == "path":
            out[name] = r.path(c)
        elif c.kind == "flag":
            out[name] = r.flags(c)
        else:
            out[name] = r.numbers(c)
    records = Records(**out)
    _check(records, r)
    return records


def _check(records: Records, r: _Reader) -> None:
    """What fits no fabric whatever: an end before its start, more packets lost than sent."""
    for column, wrong, problem, remedy in (
        ("end_ns", records.end_ns <= records.start_ns, "is not after start_ns", "a window ends after it starts"),
        ("lost", records.lost > records.sent, "is more than sent", "count only packets that were sent"),
        ("source_port", records.source_port > 0xFFFF, "is above 65535", "write the UDP source port, or null"),
    ):
        bad = np.flatnonzero(wrong)
        if len(bad):
            raise r.error(column, problem, remedy, int(bad[0]))


def hosts_from_arrow(table: Any, source: str, first_row: int = 1) -> list[HostFact]:
    """Host facts of an Arrow table, checked. Raises RecordsError."""
    r = _Reader(table, source, first_row)
    columns: dict[str, Sequence[Any]] = {}
    for c in HOST_COLUMNS:
        if c.kind == "name":
            coded = r.coded(c)
            columns[c.name] = [coded.value(i) or "" for i in range(r.rows)]
        elif c.kind == "names":
            array = r.array(c)
            lists = [None] * r.rows if array is None else array.to_pylist()
            if any(x is not None and not (isinstance(x, list) and all(isinstance(e, str) for e in x)) for x in lists):
                raise r.error(c.name, "holds other than lists of names", "write a list of device names, or null")
            columns[c.name] = [tuple(x or ()) for x in lists]
        elif c.kind == "flag":
            columns[c.name] = r.flags(c).tolist()
        elif c.kind == "ms":
            columns[c.name] = r.floats(c).tolist()
        else:
            columns[c.name] = r.numbers(c).tolist()
    for at, state in enumerate(columns["state"]):
        if state not in HOST_STATES:
            raise r.error("state", f"is {shown(state)}", f"write one of {', '.join(HOST_STATES)}", at)
    names = [c.name for c in HOST_COLUMNS]
    return [HostFact(**dict(zip(names, row, strict=True))) for row in zip(*(columns[n] for n in names), strict=True)]
