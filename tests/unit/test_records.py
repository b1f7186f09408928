"""Record files: written and read back equal, and every bad one refused in one sentence."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from pingmesh.records import files
from pingmesh.records.decode import flows_from_arrow
from pingmesh.records.errors import MissingPyarrowError, RecordsError
from pingmesh.records.model import UNKNOWN, Coded, HostFact, PathColumn, Records, concat
from pingmesh.records.schema import FLOW_COLUMNS, FLOWS, KEY, flows_to_arrow

PATH = ("h1/r0 tx", "leaf1->spine1", "spine1->leaf2", "h2/r0 rx")


def small() -> Records:
    """Two windows of one flow: first over a known path, then round trips of which only the ECMP set is known."""
    numbers = {"sent": [10, 10], "lost": [1, 0], "overdue": [UNKNOWN, 2], "rtts": [9, 10], "rtt_sum_ns": [9000, 11000]}
    return Records(
        start_ns=np.array([0, 5]),
        end_ns=np.array([5, 10]),
        role=np.array([0, 2]),
        prober=Coded.of(["h1/r0", "h1/r0"]),
        target=Coded.of(["h2/r0", "h2/r0"]),
        prober_address=Coded.of(["10.0.0.1", None]),
        target_address=Coded.of([None, None]),
        source_port=np.array([50000, UNKNOWN]),
        cls=Coded.of(["small", "large"]),
        **{k: np.array(v) for k, v in numbers.items()},
        rtt_p50_ns=np.array([1000, UNKNOWN]),
        rtt_p99_ns=np.array([UNKNOWN, UNKNOWN]),
        rtt_max_ns=np.array([2000, 3000]),
        path=PathColumn.of([PATH, None]),
        validity=Coded.of(["valid", "no_link"]),
        confirmed=np.array([False, True]),
    )


def plain(r: Records) -> list[dict[str, object]]:
    out: list[dict[str, object]] = []
    for i in range(len(r)):
        row: dict[str, object] = {}
        for f in dataclasses.fields(r):
            column = getattr(r, f.name)
            row[f.name] = column.value(i) if isinstance(column, (Coded, PathColumn)) else column[i].item()
        out.append(row)
    return out


def read_all(path: Path) -> Records:
    return concat([b for b in files.read(path) if isinstance(b, Records)])


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_written_and_read_back(tmp_path: Path, name: str) -> None:
    size = files.write(tmp_path / name, small(), {"cluster": "lab"})
    assert size == (tmp_path / name).stat().st_size
    assert [p.name for p in tmp_path.iterdir()] == [name]
    assert plain(read_all(tmp_path / name)) == plain(small())
    assert plain(small())[0]["path"] == PATH


def test_metadata_says_schema_and_cluster(tmp_path: Path) -> None:
    files.write(tmp_path / "a.parquet", small(), {"cluster": "lab"})
    metadata = parquet.read_schema(tmp_path / "a.parquet").metadata
    assert (metadata[KEY], metadata[b"pingmesh.cluster"]) == (b"flows/1", b"lab")


def test_hosts_written_and_read_back(tmp_path: Path) -> None:
    facts = [
        HostFact(start_ns=0, end_ns=5, host="h1", stall_ms=300.5, set_aside=True, dark=("r0",)),
        HostFact(start_ns=0, end_ns=5, host="h2", state="died", state_since_ns=3, unanswered=3, silent_since_ns=1),
    ]
    files.write(tmp_path / "hosts.parquet", facts, {})
    assert list(files.read(tmp_path / "hosts.parquet")) == [facts]


def test_take_and_concat() -> None:
    r = small()
    swapped = concat([r.take(np.array([1])), r.take(np.array([True, False]))])
    assert plain(swapped) == plain(r)[::-1]


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(RecordsError, match=r"use \.parquet or \.arrow"):
        files.write(tmp_path / "a.txt", small(), {})
    assert list(tmp_path.iterdir()) == []


def test_without_pyarrow_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingPyarrowError, match=r"pip install 'pingmesh\[offline\]'"):
        next(files.read(tmp_path / "a.parquet"))


def replaced(name: str, values: list[Any], kind: Any = None) -> Any:
    table = flows_to_arrow(small(), {})
    at = table.schema.names.index(name)
    return table.set_column(at, name, pa.array(values, kind))


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("sent", [1, None], r"f: row 8, column 'sent': is null"),
        ("lost", [-1, 0], r"row 7, column 'lost': is -1"),
        ("lost", [0, 11], r"row 8, column 'lost': is more than sent"),
        ("lost", ["a", "b"], r"column 'lost': holds string values"),
        (
            "sent",
            [1, 2**62],
            r"row 8, column 'sent': is 4611686018427387904; the most that a row may hold is 4294967296",
        ),
        ("rtts", [1, 2**40], r"row 8, column 'rtts': is 1099511627776; the most"),
        ("rtt_sum_ns", [1, 2**51], r"row 8, column 'rtt_sum_ns': is 2251799813685248; the most"),
        ("end_ns", [5, 2**63 - 1], r"row 8, column 'end_ns': is 9223372036854775807; the most"),
        ("end_ns", [5, 5], r"row 8, column 'end_ns': is not after start_ns"),
        ("role", ["probe", "pong"], r"row 8, column 'role': is 'pong'; write one of probe, ack, round_trip"),
        ("source_port", [1, 70000], r"row 8, column 'source_port': is above 65535"),
        ("path", [["a", None], None], r"row 7, column 'path': holds null"),
        ("path", [None, []], r"row 8, column 'path': is an empty list"),
        ("path", ["a", "b"], r"column 'path': holds string values"),
        ("class", [1, 2], r"column 'class': holds int64 values"),
        ("confirmed", [0, 1], r"column 'confirmed': holds int64 values"),
    ],
)
def test_bad_values_are_told_with_row_and_column(name: str, values: list[Any], message: str) -> None:
    with pytest.raises(RecordsError, match=message):
        flows_from_arrow(replaced(name, values), "f", 7)


@pytest.mark.parametrize("kind", [pa.string_view(), pa.large_string()])
def test_text_of_every_type_is_read(kind: pa.DataType) -> None:
    r = flows_from_arrow(replaced("prober", ["a", "b"], kind), "f")
    assert [r.prober.value(i) for i in range(2)] == ["a", "b"]


def test_timestamps_beyond_64_bits_are_refused() -> None:
    table = replaced("start_ns", [2**40, 2**40], pa.timestamp("s"))
    with pytest.raises(
        RecordsError, match=r"column 'start_ns': holds timestamp\[s\] values that are no whole numbers of"
    ):
        flows_from_arrow(table, "f")
    assert flows_from_arrow(replaced("end_ns", [2, 2], pa.timestamp("s")), "f").end_ns.tolist() == [2 * 10**9] * 2


def test_columns_that_may_be_left_out() -> None:
    table = flows_to_arrow(small(), {})
    least = table.select([c.name for c in FLOW_COLUMNS if c.default is None])
    r = flows_from_arrow(least, "f")
    assert plain(r)[0]["cls"] == "default"
    assert plain(r)[0]["path"] is None
    assert plain(r)[0]["validity"] == "valid"
    with pytest.raises(RecordsError, match="column 'sent': is missing"):
        flows_from_arrow(least.drop_columns(["sent"]), "f")


@pytest.mark.parametrize(
    ("metadata", "message"),
    [({KEY: b"flows/2"}, "has schema 'flows/2', this pingmesh reads flows/1"), ({}, "with --columns")],
)
def test_another_schema_is_refused(tmp_path: Path, metadata: dict[bytes, bytes], message: str) -> None:
    parquet.write_table(flows_to_arrow(small(), {}).replace_schema_metadata(metadata), tmp_path / "a.parquet")
    with pytest.raises(RecordsError, match=message):
        next(files.read(tmp_path / "a.parquet"))


def test_no_file_and_no_parquet(tmp_path: Path) -> None:
    with pytest.raises(RecordsError, match="there is no such file"):
        next(files.read(tmp_path / "a.parquet"))
    (tmp_path / "a.parquet").write_bytes(b"PAR1 nonsense")
    with pytest.raises(RecordsError, match="cannot be read as parquet"):
        next(files.read(tmp_path / "a.parquet"))


def test_a_file_that_the_system_does_not_give_is_told_in_its_words(tmp_path: Path) -> None:
    for name in ("a.parquet", "a.arrow"):
        (tmp_path / name).mkdir()
        with pytest.raises(RecordsError, match=r"cannot be read as .*is a directory"):
            list(files.read(tmp_path / name))
    with pytest.raises(RecordsError, match=r"cannot be read \(File name too long\); give the path"):
        list(files.read(tmp_path / f"{'x' * 5000}.parquet"))


def test_a_flipped_bit_in_a_page_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    files.write(path, small(), {})
    column = parquet.ParquetFile(path).metadata.row_group(0).column(9)
    assert column.path_in_schema == "sent"
    raw = bytearray(path.read_bytes())
    raw[column.dictionary_page_offset + column.total_compressed_size - 1] ^= 1
    path.write_bytes(raw)
    with pytest.raises(
        RecordsError, match=r"a.parquet: cannot be read as parquet .*CRC.*; check that the file is whole"
    ):
        list(files.read(path))


@given(data=st.data(), name=st.sampled_from(["a.parquet", "a.arrow"]))
@settings(max_examples=60, deadline=None)
def test_damaged_files_are_refused_or_read(
    data: st.DataObject, name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("damaged") / name
    files.write(path, small(), {})
    raw = bytearray(path.read_bytes())
    for at, value in data.draw(st.lists(st.tuples(st.integers(0, len(raw) - 1), st.integers(0, 255)), max_size=6)):
        raw[at] = value
    path.write_bytes(raw[: data.draw(st.integers(0, len(raw)))] if data.draw(st.booleans()) else raw)
    try:
        for batch in files.read(path):
            assert len(batch) >= 0
    except RecordsError as error:
        assert str(error).startswith(str(path))  # noqa: PT017 - most damaged files can be read


SCALARS = st.one_of(st.none(), st.integers(-5, 2**63 - 1), st.text(max_size=5), st.floats(), st.booleans())


@given(name=st.sampled_from([c.name for c in FLOW_COLUMNS]), values=st.lists(SCALARS, min_size=2, max_size=2))
@settings(max_examples=200, deadline=None)
def test_any_column_may_hold_anything(name: str, values: list[Any]) -> None:
    try:
        table = replaced(name, values)
    except (pa.ArrowException, OverflowError):
        return  # no Arrow column holds both
    try:
        r = flows_from_arrow(table.replace_schema_metadata({KEY: FLOWS.encode()}), "f")
    except RecordsError as error:
        assert "column" in str(error)  # noqa: PT017 - some values fit
    else:
        assert np.all(r.lost <= r.sent)
        assert len(plain(r)) == 2
