"""The benchmark of the localiser: its score, its traces and the paper's rule beside it."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))

    def load(name: str) -> ModuleType:
        return importlib.import_module(name)

    return load


def tiny(make: ModuleType) -> Any:
    """Leaves 0 and 1, spines 2 and 3, two RNICs a leaf (10000, 10001 at 0; 10002, 10003 at 1)."""
    return make.leaf_spine(2, 2, 2)


def trace_with(module: Any, links: list[tuple[int, int]], devices: list[int], round_trip: bool = False) -> Any:
    make, files = module("make_traces"), module("trace_files")
    fabric = tiny(make)
    none = np.empty(0, np.int64)
    truth = files.Truth(links=np.array(links, np.int64).reshape(-1, 2), devices=np.array(devices, np.int64))
    path = np.empty((0, 7), np.int32)
    flows = (none, none, path, path, np.empty(0, bool), none, none, none)
    return files.Trace("t", {"round_trip": round_trip}, fabric, *flows, truth)


@pytest.mark.parametrize(
    ("links", "devices", "predicted", "precision", "recall"),
    [
        ([(0, 2)], [], ["0>2"], 1.0, 1.0),
        ([(0, 2)], [], ["2>0"], 0.0, 0.0),
        ([(0, 2)], [], ["0>2", "1>3", "10000>0"], 1 / 3, 1.0),
        ([(0, 2), (1, 3)], [], ["0>2"], 1.0, 0.5),
        ([(0, 2)], [], [], 1.0, 0.0),
        ([], [], [], 1.0, 1.0),
        ([], [], ["0>2"], 0.0, 1.0),
        ([(0, 2)], [], ["2"], 0.0, 0.0),  # only a link of it failed
        ([], [2], ["2"], 1.0, 1.0),
        ([], [2], ["0>2", "2>0"], 1.0, 2 / 5),  # spine 2 has four directed links
        ([], [2], ["2", "0>2"], 1.0, 1.0),
        ([(0, 3)], [2], ["2", "0>3"], 1.0, 1.0),
        ([(0, 2)], [], ["0>2|2>0"], 0.0, 0.0),  # they do not lie on the same records
    ],
)
def test_score(
    module: Any, links: list[Any], devices: list[int], predicted: list[str], precision: float, recall: float
) -> None:
    score = module("trace_score").score(trace_with(module, links, devices), predicted)
    assert (score.precision, score.recall) == pytest.approx((precision, recall))


def test_a_class_is_right_if_its_members_lie_on_the_same_records(module: Any) -> None:
    score = module("trace_score").score
    trace = trace_with(module, [(0, 2)], [])
    same = {(0, 2): 7, (10000, 0): 7, (2, 1): 8, (1, 3): 0}
    assert score(trace, ["0>2|10000>0"], same).f == 1.0
    assert score(trace, ["0>2|10000>0", "1>3"], same).precision == pytest.approx(2 / 3)
    assert score(trace, ["0>2|2>1"], same).f == 0.0
    assert score(trace, ["10000>0|2>1"], same).f == 0.0


def test_rnic_cables_of_round_trips_are_one(module: Any) -> None:
    score = module("trace_score").score
    trace = trace_with(module, [(10000, 0)], [], round_trip=True)
    assert score(trace, ["0>10000"]).f == 1.0
    assert score(trace, ["0>10000|10000>0"]).f == 1.0
    assert score(trace, ["0>10000", "10000>0"]).f == 1.0
    switches = trace_with(module, [(0, 2)], [], round_trip=True)
    assert score(switches, ["2>0"]).f == 0.0


def small_trace(module: Any, kind: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    make = module("make_traces")
    monkeypatch.setitem(make.TOPOLOGIES, "tiny", lambda: tiny(make))
    monkeypatch.setattr(make, "SERVICE_FLOWS", 5)
    make.fabric_of.cache_clear()
    return make.make_trace(kind, "tiny", 0, 1)


@pytest.mark.parametrize("kind", ["bh", "passive", "rt"])
def test_trace_files_come_back_as_written(
    module: Any, kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    files = module("trace_files")
    trace = small_trace(module, kind, monkeypatch)
    again = files.load(files.save(trace, tmp_path))
    for name in ("src", "dst", "path", "rpath", "path_known", "kind", "sent", "lost"):
        assert np.array_equal(getattr(trace, name), getattr(again, name)), name
    assert np.array_equal(trace.truth.links, again.truth.links)
    assert again.meta == trace.meta


def row_paths(table: Any, row: int) -> list[list[int]]:
    paths = range(table.set_ptr[table.row_set[row]], table.set_ptr[table.row_set[row] + 1])
    return [table.path_elements[table.path_ptr[p] : table.path_ptr[p + 1]].tolist() for p in paths]


def test_tables_hold_the_elements_of_known_paths(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    files = module("trace_files")
    trace = small_trace(module, "rt", monkeypatch)
    known = files.compile_fabric(trace.fabric)
    table = files.table_of(trace, known)
    number = known.components.index
    row = int(np.flatnonzero(trace.kind == 1)[0])
    expected = []
    for path in (trace.path[row], trace.rpath[row]):
        src, a, spine, b, dst = (n for n in path.tolist() if n >= 0)
        expected += [f"{src} tx", f"{a}->{spine}", f"{spine}->{b}", f"{dst} rx"]
    assert row_paths(table, row) == [[number[name] for name in expected]]
    assert (table.sent[row], table.lost[row]) == (trace.sent[row], trace.lost[row])


def test_hidden_paths_are_all_shortest_ones(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    files = module("trace_files")
    trace = small_trace(module, "passive", monkeypatch)
    known = files.compile_fabric(trace.fabric)
    table = files.table_of(trace, known)
    number = known.components.index
    for row in np.flatnonzero(~trace.path_known):
        src, dst = int(trace.src[row]), int(trace.dst[row])
        a, b = (int(trace.fabric.tor[n]) for n in (src, dst))
        ways = {tuple(number[n] for n in (f"{src} tx", f"{a}->{s}", f"{s}->{b}", f"{dst} rx")) for s in (2, 3)}
        assert {tuple(p) for p in row_paths(table, int(row))} == ways


def test_fat_tree_paths(module: Any) -> None:
    """k = 4: two paths within a pod, four between pods."""
    fabric = module("make_traces").fat_tree(4)
    assert (len(fabric.nodes), len(fabric.edges)) == (36, 48)
    ptr, hops = fabric.shortest(np.array([0, 0, 0]), np.array([1, 2, 0]))
    assert np.diff(ptr).tolist() == [2, 4, 1]
    assert (hops >= 0).sum(axis=1).tolist() == [2, 2, 4, 4, 4, 4, 0]


def test_losses_follow_the_rates_hop_by_hop(module: Any) -> None:
    """10 % at the first link and 50 % at a later one: 0.9 of the packets reach the second, 0.45 get through."""
    make = module("make_traces")
    rng = np.random.default_rng(3)
    plan = make.make_plan("ls", make.FAMILIES["none"], rng)
    row = int(np.flatnonzero(plan.kind == 1)[0])
    one = {name: getattr(plan, name)[[row]] for name in ("src", "dst", "kind", "path", "rpath", "hops")}
    plan = make.dataclasses.replace(plan, sent=np.array([1_000_000]), **one)
    links = plan.hops[0, [0, 2]]
    faults = make.Faults(links, np.array([0.1, 0.5]), np.empty(0, np.int64), np.empty(0))
    drawn = make.draw_losses(plan, make.loss_rates(plan, faults, 0.0, rng), rng)
    assert drawn.link_probes[links] == pytest.approx([1_000_000, 900_000], rel=0.01)
    assert drawn.link_lost[links] == pytest.approx([100_000, 450_000], rel=0.01)
    assert drawn.lost[0] == drawn.link_lost.sum()


def test_background_lies_within_its_bound(module: Any) -> None:
    make = module("make_traces")
    rng = np.random.default_rng(4)
    plan = make.make_plan("ft8", make.FAMILIES["none"], rng)
    rates = make.loss_rates(plan, make.NO_FAULTS, 1e-3, rng)
    assert 0 <= rates.min() < 1e-4
    assert 9e-4 < rates.max() <= 1e-3
    assert not rates[plan.hops < 0].any()


def test_a_failed_switch_drops_on_all_its_links(module: Any) -> None:
    make = module("make_traces")
    rng = np.random.default_rng(5)
    plan = make.make_plan("ls", make.FAMILIES["none"], rng)
    faults = make.Faults(np.empty(0, np.int64), np.empty(0), np.array([31]), np.array([0.2]))
    rates = make.loss_rates(plan, faults, 0.0, rng)
    through = (plan.path == 31).any(axis=1)
    assert ((rates == 0.2).sum(axis=1) == np.where(through, 2, 0)).all()


def test_every_switch_link_carries_a_tuple(module: Any) -> None:
    make = module("make_traces")
    plan = make.make_plan("ft8", make.FAMILIES["sparse"], np.random.default_rng(6))
    crossed = make.probes_by_link(plan)
    assert (crossed[~plan.fabric.nic_cables] > 0).all()
    fewer = make.thinned(plan, 10.0, 3, np.random.default_rng(7))
    mean = make.probes_by_link(fewer)[~plan.fabric.nic_cables].mean()
    assert mean == pytest.approx(3 * 10.0 * make.WINDOW_S, rel=0.03)


def paper(module: Any, lost: list[int], **options: int) -> Any:
    """RNICs 0, 1, 2 at one ToR (links 0 to 2 to it, 3 to 5 from it) and 3 beyond link 6; 100 packets a flow."""
    hops = np.array([[0, 4, -1], [1, 5, -1], [2, 3, -1], [0, 6, -1], [1, 6, -1]])
    src, dst = np.array([0, 1, 2, 0, 1]), np.array([1, 2, 0, 3, 3])
    kind = np.array([0, 0, 0, 1, 1])
    return module("paper_rule").paper_rule(7, hops, kind, src, dst, np.full(5, 100), np.array(lost), **options)


def test_paper_rule_rnic(module: Any) -> None:
    """More than a tenth of the mesh probes to RNIC 1 fail: its failures are its own, and too few are left to vote."""
    named = paper(module, [11, 0, 0, 4, 30])
    assert (named.rnics.tolist(), named.links.tolist()) == ([1], [])
    assert paper(module, [10, 0, 0, 0, 0]).rnics.tolist() == []


def test_paper_rule_votes(module: Any) -> None:
    named = paper(module, [1, 0, 0, 8, 4])
    assert (named.rnics.tolist(), named.links.tolist()) == ([], [6])
    assert paper(module, [0, 0, 0, 8, 0]).links.tolist() == []
    assert paper(module, [0, 0, 0, 8, 0], least=8).links.tolist() == [0, 6]
