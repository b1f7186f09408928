"""The columns of record files and their versions; records as Arrow tables. pyarrow is imported on use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from pingmesh.analyzer.table import Ints
from pingmesh.records.errors import MissingPyarrowError
from pingmesh.records.model import (
    ROLES,
    UNKNOWN,
    VALID,
    Coded,
    HostFact,
    PathColumn,
    Records,
)

FLOWS, HOSTS = "flows/1", "hosts/1"
"""Kind and major version. A reader takes files of its own major; unknown columns are ignored."""

KEY = b"pingmesh.schema"

Kind = Literal["ns", "count", "count?", "ns?", "name", "name?", "path", "flag", "ms", "names"]


@dataclass(frozen=True, slots=True)
class Column:
    """A column: its name and kind (a `?` may be null), and the value that stands in where a file lacks it."""

    name: str
    kind: Kind
    default: object = None
    """None: the file must have the column."""


FLOW_COLUMNS = (
    Column("start_ns", "ns"),
    Column("end_ns", "ns"),
    Column("role", "name"),
    Column("prober", "name"),
    Column("target", "name"),
    Column("prober_address", "name?", ""),
    Column("target_address", "name?", ""),
    Column("source_port", "count?", UNKNOWN),
    Column("class", "name", "default"),
    Column("sent", "count"),
    Column("lost", "count"),
    Column("overdue", "count?", UNKNOWN),
    Column("rtts", "count", 0),
    Column("rtt_sum_ns", "ns", 0),
    Column("rtt_p50_ns", "ns?", UNKNOWN),
    Column("rtt_p99_ns", "ns?", UNKNOWN),
    Column("rtt_max_ns", "ns?", UNKNOWN),
    Column("path", "path", ""),
    Column("validity", "name", VALID),
    Column("confirmed", "flag", False),
)

HOST_COLUMNS = (
    Column("start_ns", "ns"),
    Column("end_ns", "ns"),
    Column("host", "name"),
    Column("state", "name", "online"),
    Column("state_since_ns", "ns", 0),
    Column("heard_ns", "ns", 0),
    Column("stall_ms", "ms", 0.0),
    Column("cpu_pressure", "ms", 0.0),
    Column("throttled_ms", "ms", 0.0),
    Column("rebooted_ns", "ns", 0),
    Column("unanswered", "count", 0),
    Column("silent_since_ns", "ns", 0),
    Column("set_aside", "flag", False),
    Column("dark", "names", ""),
)

FIELD = {"class": "cls"}


def pyarrow(source: str) -> Any:
    """The pyarrow module. Raises MissingPyarrowError."""
    try:
        import pyarrow as pa
    except ImportError:
        raise MissingPyarrowError(source) from None
    return pa


def _metadata(kind: str, about: Mapping[str, str]) -> dict[bytes, bytes]:
    return {KEY: kind.encode(), **{f"pingmesh.{k}".encode(): v.encode() for k, v in about.items()}}


def _dictionary(pa: Any, c: Coded) -> Any:
    codes = pa.array(c.codes, mask=c.codes < 0 if len(c.codes) and c.codes.min() < 0 else None)
    return pa.DictionaryArray.from_arrays(codes, pa.array(c.names, pa.string()))


def _numbers(pa: Any, values: Ints, is_optional: bool) -> Any:
    return pa.array(values, pa.int64(), mask=values < 0 if is_optional else None)


def flows_to_arrow(records: Records, about: Mapping[str, str]) -> Any:
    """Records as an Arrow table; `about` goes into the metadata as `pingmesh.KEY`. O(rows)."""
    pa = pyarrow("records")
    columns: dict[str, Any] = {}
    for c in FLOW_COLUMNS:
        value = getattr(records, FIELD.get(c.name, c.name))
        if c.name == "role":
            columns[c.name] = _dictionary(pa, Coded(records.role.astype(np.int32), ROLES))
        elif isinstance(value, Coded):
            columns[c.name] = _dictionary(pa, value)
        elif isinstance(value, PathColumn):
            columns[c.name] = pa.ListArray.from_arrays(
                pa.array(value.ptr.astype(np.int32)),
                _dictionary(pa, value.elements),
                mask=pa.array(~value.known),
            )
        elif c.kind == "flag":
            columns[c.name] = pa.array(value)
        else:
            columns[c.name] = _numbers(pa, value, c.kind.endswith("?"))
    return pa.table(columns).replace_schema_metadata(_metadata(FLOWS, about))


def hosts_to_arrow(facts: Sequence[HostFact], about: Mapping[str, str]) -> Any:
    """Host facts as an Arrow table. O(facts)."""
    pa = pyarrow("records")
    types = {"ns": pa.int64(), "count": pa.int64(), "ms": pa.float64(), "flag": pa.bool_(), "name": pa.string()}
    columns: dict[str, Any] = {}
    for c in HOST_COLUMNS:
        values = [getattr(f, c.name) for f in facts]
        columns[c.name] = pa.array(values, types.get(c.kind, pa.list_(pa.string())))
    return pa.table(columns).replace_schema_metadata(_metadata(HOSTS, about))
