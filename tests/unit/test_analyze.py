"""`pingmesh analyze`: what a simulated recording holds is named; other systems' pings; too little and bad input."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pingmesh.analyzer.candidates import candidates_of
from pingmesh.analyzer.components import compile_components
from pingmesh.analyzer.table import Floats, Table
from pingmesh.cli import main
from pingmesh.offline import evidence as evidence_module
from pingmesh.offline import pathsets
from pingmesh.offline.evidence import Evidence
from pingmesh.offline.names import Names
from pingmesh.offline.pathsets import PathSets
from pingmesh.offline.recording import Recording
from pingmesh.records.errors import RecordsError
from pingmesh.records.model import MOST_NS, MOST_RTT_SUM_NS, Coded, PathColumn, Records, concat
from pingmesh.simulate.fabric import Fabric
from pingmesh.simulate.output import RecordMaker
from pingmesh.simulate.probes import draw_probes
from pingmesh.simulate.tables import Sums, Tables
from pingmesh.simulate.troubles import Noise, draw_troubles
from pingmesh.simulate.world import World
from topology.files import dump
from topology.generate import leaf_spine
from topology.model import Leg, Rnic, Topology
from topology.paths import Halves, ecmp_halves, ecmp_paths, path_elements

SHAPE = "leaf-spine --leaves 4 --spines 3 --hosts-per-leaf 3 --rnics-per-host 1"
FABRIC = leaf_spine(4, 3, 3, 1)
QUIET = "noise: {hop_loss: 1.0e-5, burst_rate: 0, stall_rate: 0, restart_rate: 0}\n"
SECOND = 1_000_000_000


def simulate(tmp_path: Path, faults: str, windows: int = 6, noise: str = QUIET) -> Path:
    script = tmp_path / "faults.yaml"
    script.write_text(noise + faults)
    out = tmp_path / "out"
    argv = ["sim", "--generate", SHAPE, "--faults", str(script), "--out", str(out), "--windows", str(windows)]
    assert main.main(argv) == 0
    return out


def analyze(capsys: pytest.CaptureFixture[str], *argv: str, code: int) -> dict[str, Any]:
    capsys.readouterr()
    assert main.main(["analyze", "--generate", SHAPE, *argv, "--json"]) == code
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answer


@pytest.mark.parametrize(
    ("fault", "component", "direction", "symptom"),
    [
        (
            "kind: loss, component: leaf1--spine2, direction: leaf1->spine2, rate: 0.3",
            "leaf1--spine2",
            "leaf1->spine2",
            "drop",
        ),
        ("kind: blackhole, component: h5/rnic0, direction: rx", "h5/rnic0", "rx", "blackhole"),
        (
            "kind: acl, component: leaf2--spine1, direction: spine1->leaf2, share: 0.4",
            "leaf2--spine1",
            "spine1->leaf2",
            "flow_blackhole",
        ),
        (
            "kind: large_packet_drop, component: leaf1--spine3, direction: leaf1->spine3",
            "leaf1--spine3",
            "leaf1->spine3",
            "large_packet_drop",
        ),
        ("kind: rnic_down, component: h4/rnic0", "h4/rnic0", "both", "rnic_down"),
        ("kind: host_down, component: h7", "h7", None, "host_down"),
        ("kind: cpu_overload, component: h2", "h2", None, "cpu_overload"),
        (
            "kind: hash_collision, component: leaf3--spine1, direction: leaf3->spine1",
            "leaf3--spine1",
            "leaf3->spine1",
            "high_rtt",
        ),
        ("kind: loss, component: spine2, rate: 0.3", "spine2", None, "drop"),
    ],
)
def test_faults_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], fault: str, component: str, direction: str | None, symptom: str
) -> None:
    out = simulate(tmp_path, f"lists: {{large_share: 0.5}}\nfaults: [{{{fault}, start_s: 5}}]")
    answer = analyze(capsys, "--records", str(out), code=1)
    named = [(i["component"], i["direction"], i["symptom"]) for i in answer["incidents"]]
    assert named == [(component, direction, symptom)]
    (incident,) = answer["incidents"]
    assert incident["state"] == "open"
    assert incident["opened_at"] >= "2026-01-01T00:00:05"
    assert answer["verdict"] == ("host" if symptom in ("host_down", "cpu_overload") else "network")


def test_a_fault_that_ends_is_closed_and_windows_say_when(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = simulate(
        tmp_path, "faults: [{kind: loss, component: h1/rnic0, direction: tx, rate: 0.5, start_s: 10, end_s: 20}]", 12
    )
    answer = analyze(capsys, "--records", str(out), code=1)
    (incident,) = answer["incidents"]
    assert (incident["component"], incident["state"]) == ("h1/rnic0", "closed")
    assert incident["opened_at"] == "2026-01-01T00:00:10.000Z"
    assert "00:00:40" <= incident["closed_at"][11:] <= "00:00:50"
    suspected = [w["start"][17:19] for w in answer["windows"] if w["suspects"]]
    assert suspected == ["10", "15"]


def test_a_faint_fault_shows_over_the_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = simulate(
        tmp_path, "faults: [{kind: loss, component: leaf1--spine2, direction: leaf1->spine2, rate: 0.01}]", 60
    )
    answer = analyze(capsys, "--records", str(out), code=1)
    assert [i["direction"] for i in answer["incidents"]] == ["leaf1->spine2"]


def without(out: Path, column: str) -> Path:
    """The same records with a column of nulls."""
    for file in out.glob("flows-*.parquet"):
        table = pq.read_table(file)
        at = table.schema.get_field_index(column)
        field = table.schema.field(at)
        pq.write_table(table.set_column(at, field, pa.nulls(len(table), field.type)), file)
    return out


def test_what_cannot_be_told_apart_is_named_with_its_alternatives(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fault = "faults: [{kind: loss, component: leaf1--spine1, direction: leaf1->spine1, rate: 0.2, start_s: 10}]"
    out = without(simulate(tmp_path, fault, 8), "path")
    (incident,) = analyze(capsys, "--records", str(out), code=1)["incidents"]
    named = {incident["component"], *incident["alternatives"]}
    assert named == {"leaf1--spine1", "leaf1--spine2", "leaf1--spine3"}
    assert incident["confidence"] < 0.5
    assert incident["opened_at"] < "2026-01-01T00:00:35"
    assert main.main(["analyze", "--generate", SHAPE, "--records", str(out)]) == 1
    told = f"cannot tell {incident['component']} from {', '.join(incident['alternatives'])}"
    assert told in capsys.readouterr().out


def test_a_faint_fault_without_paths_shows_over_the_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = without(simulate(tmp_path, "faults: [{kind: loss, component: spine2, rate: 0.01}]", 24), "path")
    (incident,) = analyze(capsys, "--records", str(out), code=1)["incidents"]
    assert {incident["component"], *incident["alternatives"]} == {"spine1", "spine2", "spine3"}


@pytest.mark.parametrize(("rate", "start", "end"), [(0.1, 60, 200), (0.5, 33, 92), (0.2, 10, 1000)])
def test_the_rate_is_that_of_the_time_it_lasted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], rate: float, start: int, end: int
) -> None:
    where = "component: leaf1--spine2, direction: leaf1->spine2"
    fault = f"faults: [{{kind: loss, {where}, rate: {rate}, start_s: {start}, end_s: {end}}}]"
    out = simulate(tmp_path, fault, min(end, 240) // 5 + 12)
    (incident,) = analyze(capsys, "--records", str(out), code=1)["incidents"]
    assert incident["rate_low"] <= rate <= incident["rate_high"]
    assert incident["rate"] == pytest.approx(rate, rel=0.25)


def test_a_stray_suspicion_long_before_dilutes_no_rate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = "component: leaf1--spine2, direction: leaf1->spine2"
    short = [f"{{kind: loss, {where}, rate: 0.3, start_s: {s}, end_s: {s + 3}}}" for s in (11, 91)]
    long = f"{{kind: loss, {where}, rate: 0.1, start_s: 180, end_s: 240}}"
    out = simulate(tmp_path, f"faults: [{', '.join([*short, long])}]", 54)
    (incident,) = analyze(capsys, "--records", str(out), code=1)["incidents"]
    assert incident["rate"] == pytest.approx(0.1, rel=0.25)


def test_round_trips_do_not_tell_which_side_of_an_rnic_is_slow(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = simulate(tmp_path, "faults: [{kind: pcie_slow, component: h2/rnic0, start_s: 10}]", 12)
    (incident,) = analyze(capsys, "--records", str(out), code=1)["incidents"]
    assert (incident["component"], incident["direction"]) == ("h2/rnic0", None)
    assert incident["confidence"] > 0.9


def test_records_of_another_fabric_are_no_evidence_of_a_sound_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = simulate(tmp_path, "")
    capsys.readouterr()
    for shape, why in [("leaf-spine --leaves 2 --spines 2 --hosts-per-leaf 2", "rows"), ("clos3 --pods 2", "paths")]:
        assert main.main(["analyze", "--generate", shape, "--records", str(out), "--json"]) == 3
        assert f"{why} are not" in json.loads(capsys.readouterr().out)["why"]


def test_a_healthy_recording_with_stalls_and_restarts_is_innocent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    noise = "noise: {hop_loss: 1.0e-4, burst_rate: 0, stall_rate: 0.01, stall_s: 0.4, restart_rate: 0.005}\n"
    out = simulate(tmp_path, "", 12, noise)
    capsys.readouterr()
    assert main.main(["analyze", "--generate", SHAPE, "--records", str(out), "--json"]) in (0, 1)
    answer = json.loads(capsys.readouterr().out)
    assert {i["component_type"] for i in answer["incidents"]} <= {"host"}
    assert answer["counted"]["set_aside"]
    assert answer["counted"]["rows"] == answer["counted"]["evidence"] + sum(answer["counted"]["set_aside"].values())


def pings(
    path: Path, sick: str, rows: int = 4000, loses: Callable[[int], bool] = lambda row: True, us: int = 12
) -> None:
    """What a plain pinger writes, 200 rows a second: addresses, no path; one RNIC loses rows, or takes some us."""
    rng = np.random.default_rng(3)
    rnics = list(FABRIC.rnics.values())
    with path.open("w", newline="") as f:
        out = csv.writer(f)
        out.writerow(["source_ip", "target_ip", "source_port", "at", "rtt_us"])
        for i in range(rows):
            a, b = rng.choice(len(rnics), 2, replace=False)
            is_sick = sick in (rnics[a].name, rnics[b].name)
            rtt = "" if is_sick and loses(i) else f"{rng.normal(us if is_sick else 12, 1):.2f}"
            out.writerow([rnics[a].address, f"::ffff:{rnics[b].address}", 50000 + i % 64, 1_700_000_000 + i / 200, rtt])


COLUMNS = "src=source_ip,dst=target_ip,sport=source_port,time=at:s,latency=rtt_us:us"


def test_pings_of_another_system(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pings(tmp_path / "pings.csv", "h6/rnic0")
    with (tmp_path / "pings.csv").open("a") as f:
        f.write("192.0.2.1,10.1.0.1,1,1700000001,3\n192.0.2.1,10.1.0.1,1,1700000001,3\n")
    answer = analyze(capsys, "--records", str(tmp_path / "pings.csv"), "--columns", COLUMNS, code=1)
    assert [i["component"] for i in answer["incidents"]] == ["h6/rnic0"]
    assert answer["counted"]["not_in_topology"] == 1  # two pings of one pair and window are one row
    assert answer["counted"]["names_not_in_topology"] == {"192.0.2.1": 1}
    assert (
        main.main(["analyze", "--generate", SHAPE, "--records", str(tmp_path / "pings.csv"), "--columns", COLUMNS]) == 1
    )
    shown = capsys.readouterr().out
    assert shown.startswith("NETWORK")
    assert "not in the topology: ends in 1 rows, most of 192.0.2.1 (1)" in shown


def test_delays_in_pings_of_another_system(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pings(tmp_path / "pings.csv", "h6/rnic0", loses=lambda row: False, us=9000)
    answer = analyze(capsys, "--records", str(tmp_path / "pings.csv"), "--columns", COLUMNS, code=1)
    named = [(i["component"], i["direction"], i["symptom"]) for i in answer["incidents"]]
    assert named == [("h6/rnic0", None, "high_rtt")]


@pytest.mark.parametrize(
    ("loses", "names"), [(lambda row: 2000 <= row < 2100, []), (lambda row: row % 40 == 0, ["h6/rnic0"])]
)
def test_what_is_lost_in_one_window_is_no_fault_of_the_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], loses: Callable[[int], bool], names: list[str]
) -> None:
    pings(tmp_path / "pings.csv", "h6/rnic0", 12_000, loses)
    answer = analyze(capsys, "--records", str(tmp_path / "pings.csv"), "--columns", COLUMNS, code=len(names))
    assert [i["component"] for i in answer["incidents"]] == names
    assert answer["counted"]["lost"] > 10


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        ("", "the files hold no rows"),
        ("10.1.0.1,10.2.0.1,1,1700000000,5\n", "only 1 packets of 1 rows are evidence"),
        ("192.0.2.1,192.0.2.2,1,1700000000,5\n" * 500, "only 0 packets of 1 rows are evidence"),
    ],
)
def test_too_little_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str], rows: str, why: str) -> None:
    file = tmp_path / "pings.csv"
    file.write_text("source_ip,target_ip,source_port,at,rtt_us\n" + rows)
    answer = analyze(capsys, "--records", str(file), "--columns", COLUMNS, code=3)
    assert (answer["verdict"], answer["why"], answer["incidents"]) == ("insufficient_data", why, [])


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--records", "{tmp}/none.parquet"], "none.parquet: there is no such file"),
        (["--records", "{tmp}/nope"], "nope: there is no such file or directory; correct the path"),
        (["--records", "x" * 5000], "characters) cannot be read (File name too long); name files or directories"),
        (["--records", "{tmp}/a.csv"], "a.csv: only .parquet and .arrow files carry our schema"),
        (["--records", "{tmp}/a.csv", "--columns", "src=x"], "--columns: 'dst' is missing"),
        (["--records", "{tmp}/a.csv", "--columns", "src=x,dst=y,time=t,lost=l"], "a.csv: row 1, column 't': is 'noon'"),
        (["--records", "{tmp}/empty"], "empty holds no .parquet, .arrow or .csv file"),
        (["--records", "{tmp}/a.csv", "--window", "0"], "--window must be"),
    ],
)
def test_bad_input_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], argv: list[str], message: str
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.csv").write_text("x,y,t,l\na,b,noon,0\n")
    assert main.main(["analyze", "--generate", SHAPE, *(a.replace("{tmp}", str(tmp_path)) for a in argv)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def recorded(seed: int = 4) -> tuple[World, Tables, Sums, list[Records]]:
    rng = np.random.default_rng(seed)
    fabric = Fabric(FABRIC)
    world = World(fabric, draw_probes(fabric, rng), [], draw_troubles(fabric, Noise(hop_loss=0.05), 20.0, rng), rng)
    counts = [world.step(t, t + 5.0) for t in (0.0, 5.0, 10.0)]
    components = compile_components(candidates_of(FABRIC))
    maker = RecordMaker(world, 0)
    return (
        world,
        Tables(world, dict(components.index)),
        Sums.of(len(world.flows), counts),
        [maker.records(c) for c in counts],
    )


def rows_of(table: Any) -> list[tuple[tuple[int, ...], float, float]]:
    out = []
    for row in range(table.rows):
        first = table.set_ptr[table.row_set[row]]
        assert table.set_ptr[table.row_set[row] + 1] == first + 1
        path = table.path_elements[table.path_ptr[first] : table.path_ptr[first + 1]]
        out.append((tuple(path.tolist()), table.sent[row], table.lost[row]))
    return sorted(out)


@pytest.mark.parametrize("shuffled", [False, True])
def test_a_recording_gives_the_table_that_the_simulation_had(shuffled: bool) -> None:
    _, tables, sums, batches = recorded()
    if shuffled:
        whole = concat(batches)
        order = np.random.default_rng(1).permutation(len(whole))
        batches = [whole.take(part) for part in np.array_split(order, 7)]
    recording = Recording(FABRIC, tables.index, 5 * SECOND)
    for batch in batches:
        recording.add(batch)
    evidence = Evidence(recording, tables.index)
    assert evidence.windows.tolist() == [0, 1, 2]
    assert rows_of(evidence.losses(evidence.sums(0, 2))) == rows_of(tables.losses(sums))


def test_round_trips_that_would_wrap_are_refused() -> None:
    _, tables, _, batches = recorded()
    many = batches[0].take(np.zeros(MOST_NS // MOST_RTT_SUM_NS + 1, np.int64))
    much = replace(many, rtt_sum_ns=np.full(len(many), MOST_RTT_SUM_NS))
    with pytest.raises(RecordsError, match="more than 146 years"):
        Recording(FABRIC, tables.index, 5 * SECOND).add(much)


def test_round_trips_for_delays_go_both_ways() -> None:
    world, tables, sums, batches = recorded()
    recording = Recording(FABRIC, tables.index, 5 * SECOND)
    for batch in batches:
        recording.add(batch)
    evidence = Evidence(recording, tables.index)
    limit = float(np.median(sums.rtt_sum_ns / np.maximum(sums.rtts, 1)))
    assert rows_of(evidence.slow(evidence.sums(0, 2), limit)) == rows_of(tables.delays(sums, limit))
    assert world.flows.there.shape[1] == 4


def test_strange_paths_are_counted_and_not_believed() -> None:
    _, tables, _, batches = recorded()
    recording = Recording(
        leaf_spine(4, 2, 3, 1), {e: i for i, e in enumerate(tables.index) if "spine3" not in e}, SECOND
    )
    recording.add(batches[0])
    strange = sum("spine3" in e for i in range(len(batches[0])) for e in batches[0].path.value(i) or ())
    assert recording.counted.strange_paths * 2 == strange > 0
    assert not recording.keys().known.all()


def test_names() -> None:
    names = Names(FABRIC)
    address = FABRIC.rnics["h2/rnic0"].address
    given = ["h2/rnic0", "h2", str(address), f"::ffff:{address}", f"{address}:4791", "h99", "192.0.2.9", ""]
    coded = Coded(np.array([*range(len(given)), -1], np.int32), tuple(given))
    found = names.numbers(coded, Coded(np.full(len(coded), -1, np.int32), ()))
    assert found.tolist() == [1, 1, 1, 1, 1, -1, -1, -1, -1]
    assert names.unknown == {"h99": 1, "192.0.2.9": 1, "": 1, "(no name)": 1}
    by_address = Names(FABRIC).numbers(Coded.of([None, "h1/rnic0"]), Coded.of([address, address]))
    assert by_address.tolist() == [1, 0]


def test_round_trip_sets_keep_each_links_share() -> None:
    base = leaf_spine(2, 4, 1, 1)
    sets = PathSets(base, {})
    trips = sets.round_trip("h1/rnic0", "h2/rnic0")
    crossed = np.bincount(np.concatenate(trips))
    assert len(trips) == 4
    assert sorted(set(crossed.tolist())) == [1, 4]  # every spine link in a quarter, the RNICs in all
    there = {path_elements(base, "h1/rnic0", "h2/rnic0", p) for p in ecmp_paths(base, "leaf1", "leaf2")}
    assert len(sets.one_way("h1/rnic0", "h2/rnic0")) == len(there)


def test_sets_of_large_fabrics_are_worked_out_by_pairs_of_tors(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[str, str]] = []

    def counting(t: Topology, a: str, b: str) -> Halves:
        asked.append((a, b))
        return ecmp_halves(t, a, b)

    monkeypatch.setattr(pathsets, "ecmp_halves", counting)
    monkeypatch.setattr(evidence_module, "MOST_PATHS", 2000)
    pings(tmp_path / "pings.csv", "h6/rnic0")
    answer = analyze(capsys, "--records", str(tmp_path / "pings.csv"), "--columns", COLUMNS, code=1)
    assert [i["component"] for i in answer["incidents"]] == ["h6/rnic0"]
    assert len(asked) == len(set(asked)) == 4 * 4, "each pair of the four ToRs once, whatever RNICs are below them"
    said = [f["text"] for f in answer["findings"] if "unknown path" in f["text"]]
    assert len(said) == len(set(said)) >= 1


def test_clean_flows_by_parts_clear_what_they_would_clear_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    _, tables, _, batches = recorded()
    whole = concat(batches)
    hidden = replace(whole, path=PathColumn.none(len(whole)))
    recording = Recording(FABRIC, tables.index, 5 * SECOND)
    recording.add(hidden)
    evidence = Evidence(recording, tables.index)
    sums = evidence.sums(0, 2)
    clean = replace(sums, lost=np.zeros_like(sums.lost))
    one_by_one = evidence.losses(clean)
    leaf = frozenset(d.name for d in FABRIC.out_links["leaf1"]) | {"h1/rnic0 tx", "h2/rnic0 tx", "h3/rnic0 tx"}
    crossed = evidence.crossing(leaf)
    monkeypatch.setattr(evidence_module, "MOST_PATHS", 100)
    by_parts = evidence.losses(clean)
    assert by_parts.rows > one_by_one.rows
    assert len(by_parts.path_ptr) < len(one_by_one.path_ptr)
    assert shares(by_parts) == pytest.approx(shares(one_by_one))
    assert np.array_equal(evidence.crossing(leaf), crossed)
    lossy = evidence.losses(sums)
    assert 0 < lossy.lost.sum() < sums.lost.sum(), "as many flows as the bound allows"


def shares(table: Table) -> Floats:
    """Packets over each element, if every path of a set is as likely."""
    sizes = np.diff(table.set_ptr)
    of_set = np.bincount(table.row_set, weights=table.sent, minlength=len(sizes)) / sizes
    of_path = np.repeat(np.repeat(of_set, sizes), np.diff(table.path_ptr))
    return np.bincount(table.path_elements, weights=of_path, minlength=table.elements).astype(np.float64)


def test_pairs_that_nothing_joins_are_counted(tmp_path: Path) -> None:
    islands = Topology(
        "x",
        {s: FABRIC.switches[s] for s in ("leaf1", "leaf2")},
        {f"h{i}/r": Rnic(f"h{i}", "r", (Leg(f"leaf{i}", "p", f"10.0.0.{i}"),)) for i in (1, 2)},
        (),
    )
    file = tmp_path / "topology.yaml"
    file.write_text(dump(islands))
    pings_file = tmp_path / "pings.csv"
    pings_file.write_text("a,b,t,l\n" + "".join(f"10.0.0.1,10.0.0.2,{1_700_000_000 + i},0\n" for i in range(200)))
    argv = ["analyze", "--topology", str(file), "--records", str(pings_file), "--columns", "src=a,dst=b,time=t,lost=l"]
    assert main.main(argv) == 3
