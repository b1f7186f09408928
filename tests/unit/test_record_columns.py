"""Another system's ping records: the column map, what becomes of values, and every bad one told with its place."""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from pingmesh.records import columns
from pingmesh.records.columns import ColumnMapError, parse_map, read_mapped
from pingmesh.records.errors import RecordsError
from pingmesh.records.model import UNKNOWN, Records, concat

SECOND = 1_000_000_000
MAP = "src=a,dst=b,time=t,latency=rtt,lost=l,sport=p,class=c"
HEAD = "a,b,t,rtt,l,p,c\n"


def read(tmp_path: Path, text: str, mapped: str = MAP) -> Records:
    file = tmp_path / "pings.csv"
    file.write_text(text)
    return concat(list(read_mapped(file, parse_map(mapped), 5 * SECOND)))


def test_pings_of_one_tuple_and_window_are_summed(tmp_path: Path) -> None:
    r = read(
        tmp_path,
        HEAD + "10.0.0.1,10.0.0.2,1700000000,12.5,0,50000,x\n10.0.0.1,10.0.0.2,1700000004.9,,1,50000,x\n"
        "10.0.0.1,10.0.0.2,1700000005,7,0,50000,x\n10.0.0.1,10.0.0.2,1700000001,9,0,,\n",
    )
    rows = {(int(r.start_ns[i]) // SECOND, int(r.source_port[i]), r.cls.value(i)): i for i in range(len(r))}
    assert set(rows) == {(1700000000, 50000, "x"), (1700000005, 50000, "x"), (1700000000, UNKNOWN, "default")}
    i = rows[1700000000, 50000, "x"]
    assert (r.sent[i], r.lost[i], r.rtts[i], r.rtt_sum_ns[i], r.rtt_max_ns[i]) == (2, 1, 1, 12_500, 12_500)
    assert (r.prober.value(i), r.target.value(i), r.role[i]) == ("10.0.0.1", "10.0.0.2", 2)
    assert r.path.value(i) is None


@pytest.mark.parametrize(
    ("time", "unit"),
    [
        ("1700000000", ""),
        ("1700000000000", ""),
        ("1700000000000000", ""),
        ("1700000000000000000", ""),
        ("1.7e9", ""),
        ("2023-11-14T22:13:20Z", ""),
        ("2023-11-14T23:13:20+01:00", ""),
        ("2023-11-14 22:13:20", ""),
        ("1700000000", ":s"),
    ],
)
def test_times(tmp_path: Path, time: str, unit: str) -> None:
    r = read(tmp_path, f"a,b,t,rtt\nx,y,{time},1\n", f"src=a,dst=b,time=t{unit},latency=rtt")
    assert r.start_ns.tolist() == [1_700_000_000 * SECOND]


def test_without_lost_a_missing_latency_is_a_loss(tmp_path: Path) -> None:
    r = read(tmp_path, "a,b,t,rtt,n\nx,y,1,2,3\nx,z,1,,4\n", "src=a,dst=b,time=t:s,latency=rtt:ms,sent=n")
    assert sorted(zip(r.sent.tolist(), r.lost.tolist(), r.rtt_sum_ns.tolist(), strict=True)) == [
        (3, 0, 2_000_000),
        (4, 4, 0),
    ]


def test_an_empty_lost_leaves_it_to_the_latency(tmp_path: Path) -> None:
    mapped = "src=a,dst=b,time=t,latency=rtt,lost=l"
    for empty in ("", "nan", "None", " null "):
        r = read(tmp_path, f"a,b,t,rtt,l\nx,y,1,,{empty}\nx,y,1,7,{empty}\nx,y,1,,0\n", mapped)
        assert (r.sent.tolist(), r.lost.tolist(), r.rtts.tolist()) == ([3], [1], [1])
    r = read(tmp_path, "a,b,t,l\nx,y,1,\n", "src=a,dst=b,time=t,lost=l")
    assert (r.sent.tolist(), r.lost.tolist()) == ([1], [0])
    table = pa.table({"a": ["x"] * 2, "b": ["y"] * 2, "t": [1, 1], "rtt": [None, 2.0], "l": pa.nulls(2, pa.bool_())})
    parquet.write_table(table, tmp_path / "a.parquet")
    (r,) = read_mapped(tmp_path / "a.parquet", parse_map(mapped), 5 * SECOND)
    assert (r.sent.tolist(), r.lost.tolist()) == ([2], [1])


@pytest.mark.parametrize("word", ["1", "true", "Yes", "lost", "TIMEOUT"])
def test_words_for_lost(tmp_path: Path, word: str) -> None:
    r = read(tmp_path, f"a,b,t,l\nx,y,1,{word}\nx,y,2,ok\nx,y,3,0\n", "src=a,dst=b,time=t,lost=l")
    assert (r.sent.tolist(), r.lost.tolist()) == ([3], [1])


@pytest.mark.parametrize("empty", ["", "nan", "None"])
def test_whole_numbers_may_be_written_as_floats(tmp_path: Path, empty: str) -> None:
    text = f"a,b,t,l,n,p,c\nx,y,1,1.0,3.0,50000.0,{empty}\nx,y,2,0.0,2.0,{empty},z\n"
    r = read(tmp_path, text, "src=a,dst=b,time=t,lost=l,sent=n,sport=p,class=c")
    rows = zip(r.sent.tolist(), r.lost.tolist(), r.source_port.tolist(), map(r.cls.value, range(2)), strict=True)
    assert sorted(rows) == [(2, 0, UNKNOWN, "z"), (3, 1, 50000, "default")]


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("l", "0.5", "row 1, column 'l': is '0.5'; write 0 or 1"),
        ("p", "1e9", "row 1, column 'p': is '1e9'; write a port"),
        ("p", "7" * 5000, r"row 1, column 'p': is '7{59}\.\.\. \(5002 characters\); write a port"),
    ],
)
def test_numbers_that_are_not_whole(tmp_path: Path, key: str, value: str, message: str) -> None:
    cells = {"l": "0", "p": "1"} | {key: value}
    with pytest.raises(RecordsError, match=message):
        read(tmp_path, f"a,b,t,l,p\nx,y,1,{cells['l']},{cells['p']}\n", "src=a,dst=b,time=t,lost=l,sport=p")


def test_an_unknown_unit_is_told(tmp_path: Path) -> None:
    with pytest.raises(RecordsError, match="column 't': has no unit 'min'; write one of ns, us, ms, s"):
        read(tmp_path, "a,b,t,l\nx,y,1,0\n", "src=a,dst=b,time=t:min,lost=l")


def test_a_column_named_with_a_colon() -> None:
    assert parse_map("src=net:src,dst=b,time=at:odd,lost=l").columns == {
        "src": "net:src",
        "dst": "b",
        "time": "at:odd",
        "lost": "l",
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "'' is no KEY=COLUMN"),
        ("src=a,dst=b,lost=l", "'time' is missing"),
        ("src=a,dst=b,time=t", "neither 'latency' nor 'lost'"),
        ("src=a,src=b,time=t,lost=l", "'src' is there twice"),
        ("source=a,dst=b,time=t,lost=l", "'source' is unknown"),
        ("src=a,dst=b,time=t,latancy=l", "did you mean `latency`"),
    ],
)
def test_bad_maps(text: str, message: str) -> None:
    with pytest.raises(ColumnMapError, match=message):
        parse_map(text)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("x,y,1,-1,0,,", "row 2, column 'rtt': is '-1'; write a number"),
        ("x,y,never,1,0,,", "row 2, column 't': is 'never'; write an RFC 3339 time"),
        ("x,y,-5,1,0,,", "row 2, column 't': is '-5'"),
        ("x,y,nan,1,0,,", "row 2, column 't'"),
        ("x,y,1,1,perhaps,,", "row 2, column 'l': is 'perhaps'; write 0 or 1"),
        ("x,y,1,1,2,,", "row 2, column 'l': is 2; of 1 packets no more can be lost"),
        ("x,y,1,1,0,70000,", "row 2, column 'p': is '70000'; write a port"),
        (" ,y,1,1,0,,", "row 2, column 'a': is ' '; name the prober"),
        ("x,y,1,1", "row 2: has 4 fields, the header 7"),
    ],
)
def test_bad_rows_are_told_with_their_place(tmp_path: Path, row: str, message: str) -> None:
    with pytest.raises(RecordsError, match=message):
        read(tmp_path, f"{HEAD}x,y,1,1,0,,\n{row}\n")


def test_counts_and_latencies_are_bounded(tmp_path: Path) -> None:
    mapped = "src=a,dst=b,time=t,lost=l,sent=n"
    with pytest.raises(RecordsError, match="row 2, column 'n': is '4503599627370496'; write a count up to 4294967296"):
        read(tmp_path, f"a,b,t,l,n\nx,y,1,1,{2**32}\nx,y,1,1,{2**52}\n", mapped)
    with pytest.raises(RecordsError, match="row 1, column 'rtt': is '3600001'; write a number from 0 to an hour"):
        read(tmp_path, "a,b,t,rtt\nx,y,1,3600001\n", "src=a,dst=b,time=t,latency=rtt:ms")


@pytest.mark.parametrize(
    ("times", "unit", "message"),
    [
        (("1700000000000", "1700000001"), "", "row 2, column 't': is '1700000001'; that is in 1970, years from"),
        (("5", "1700000000"), "", "row 2, column 't': is '1700000000'; that is in 2023, years from"),
        (("2023-11-14T22:13:20Z", "1800-01-01"), "", "row 2, column 't'"),
        (("1700000000000",), ":us", "row 1, column 't': is '1700000000000'; its size is that of ms since 1970: write "),
        (("1700000000",), ":ms", "write time=t:s"),
    ],
)
def test_times_of_another_unit_are_refused(tmp_path: Path, times: tuple[str, ...], unit: str, message: str) -> None:
    rows = "".join(f"x,y,{t},1\n" for t in times)
    with pytest.raises(RecordsError, match=message):
        read(tmp_path, f"a,b,t,rtt\n{rows}", f"src=a,dst=b,time=t{unit},latency=rtt")


def test_times_of_another_unit_are_refused_in_later_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columns, "BATCH", 1)
    with pytest.raises(RecordsError, match="row 2, column 't': is '1700000001'; that is in 1970"):
        read(tmp_path, "a,b,t,rtt\nx,y,1700000000000,1\nx,y,1700000001,1\n", "src=a,dst=b,time=t,latency=rtt")


def test_times_since_a_start_are_taken(tmp_path: Path) -> None:
    r = read(tmp_path, "a,b,t,rtt\nx,y,0,1\nx,y,86400,1\n", "src=a,dst=b,time=t:s,latency=rtt")
    assert r.start_ns.tolist() == [0, 86_400 * SECOND]


@pytest.mark.parametrize("time", ["1E300", "1e308", "9" * 400, "-1E300"])
def test_a_first_time_beyond_all_time_is_refused(tmp_path: Path, time: str) -> None:
    with pytest.raises(RecordsError, match="row 1, column 't'"):
        read(tmp_path, f"{HEAD}x,y,{time},1,0,,\n")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "pings.csv: has no header; write the names"),
        (b"\n\n", "has no header"),
        (b"a,b,l,l,t\n", "column 'l': is there more than once; keep one"),
        (b"a,b,T\n", "did you mean `T`"),
        (b"\xff\xfe\n", "is not UTF-8"),
        (b"a\x00b\n", "pings.csv"),
    ],
)
def test_bad_files(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "pings.csv"
    file.write_bytes(content)
    with pytest.raises(RecordsError, match=message):
        list(read_mapped(file, parse_map("src=a,dst=b,time=t,lost=l"), SECOND))
    with pytest.raises(RecordsError, match="there is no such file"):
        list(read_mapped(tmp_path / "none.csv", parse_map("src=a,dst=b,time=t,lost=l"), SECOND))


def test_parquet_of_another_system(tmp_path: Path) -> None:
    table = pa.table(
        {
            "from": ["10.0.0.1", "10.0.0.1"],
            "to": ["10.0.0.2", "10.0.0.2"],
            "at": pa.array([1_700_000_000_000, 1_700_000_001_000], pa.timestamp("ms", tz="UTC")),
            "us": [10.0, None],
        }
    )
    parquet.write_table(table, tmp_path / "a.parquet")
    (r,) = read_mapped(tmp_path / "a.parquet", parse_map("src=from,dst=to,time=at,latency=us"), 5 * SECOND)
    assert (r.start_ns.tolist(), r.sent.tolist(), r.lost.tolist()) == ([1_700_000_000 * SECOND], [2], [1])


NS = 1_700_000_000_000_000_001


@pytest.mark.parametrize("kind", [pa.timestamp("ns"), pa.timestamp("ns", "UTC"), pa.timestamp("ns", "No/Where")])
def test_timestamps_of_every_precision_and_zone(tmp_path: Path, kind: pa.DataType) -> None:
    table = pa.table({"a": ["x"], "b": ["y"], "t": pa.array([NS]).cast(kind), "l": [0]})
    parquet.write_table(table, tmp_path / "a.parquet")
    (r,) = read_mapped(tmp_path / "a.parquet", parse_map("src=a,dst=b,time=t,lost=l"), 1)
    assert r.start_ns.tolist() == [NS]


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("t", pa.array([2**60], pa.timestamp("s")), "row 1, column 't': is 1152921504606846976"),
        ("t", pa.array([None], pa.timestamp("s")), "row 1, column 't': is None"),
        ("rtt", pa.array([NS], pa.duration("ns")), r"column 'rtt': holds duration\[ns\] values that cannot be read"),
        ("rtt", pa.array([NS], pa.timestamp("ns")), "row 1, column 'rtt'"),
    ],
)
def test_bad_arrow_values(tmp_path: Path, name: str, values: pa.Array, message: str) -> None:
    cells = {"a": ["x"], "b": ["y"], "t": [1], "rtt": [1.0], name: values}
    with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as sink, pa.ipc.new_file(sink, pa.table(cells).schema) as out:
        out.write_table(pa.table(cells))
    with pytest.raises(RecordsError, match=message):
        list(read_mapped(tmp_path / "a.arrow", parse_map("src=a,dst=b,time=t,latency=rtt"), SECOND))


CELLS = st.one_of(
    st.text(max_size=6), st.integers().map(str), st.floats().map(str), st.sampled_from(["", "10.0.0.1", "1e400"])
)


@given(rows=st.lists(st.lists(CELLS, min_size=7, max_size=7), max_size=4))
@settings(max_examples=300, deadline=None)
def test_any_cells_are_read_or_refused(rows: list[list[str]], tmp_path_factory: pytest.TempPathFactory) -> None:
    text = io.StringIO()
    csv.writer(text).writerows([HEAD.strip().split(","), *rows])
    file = tmp_path_factory.mktemp("cells") / "pings.csv"
    file.write_text(text.getvalue(), errors="replace", newline="")
    try:
        for r in read_mapped(file, parse_map(MAP), 5 * SECOND):
            assert (r.lost <= r.sent).all()
    except RecordsError as error:
        assert str(error).startswith(str(file))  # noqa: PT017 - some cells fit


@given(raw=st.binary(max_size=200))
@settings(max_examples=200, deadline=None)
def test_any_bytes_are_read_or_refused(raw: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    file = tmp_path_factory.mktemp("bytes") / "pings.csv"
    file.write_bytes(HEAD.encode() + raw)
    try:
        for r in read_mapped(file, parse_map(MAP), 5 * SECOND):
            assert (r.lost <= r.sent).all()
    except RecordsError as error:
        assert str(error).startswith(str(file))  # noqa: PT017 - some bytes are rows


def test_the_documented_pings_are_read(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "records.md").read_text()
    mapped = re.findall(r"--columns (src=\S+)", text)[0]
    rows = re.findall(r"^    (ts,.*|17\d{11},.*)$", text, re.M)
    r = read(tmp_path, "\n".join(rows) + "\n", mapped)
    assert (r.sent.tolist(), r.lost.tolist(), r.rtt_max_ns.tolist()) == ([1, 1], [0, 1], [12_500, UNKNOWN])
