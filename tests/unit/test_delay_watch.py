"""The watch over delays on a simulated fabric, window by window: what lasts is named, and nothing else."""

from __future__ import annotations

import numpy as np
import pytest

from pingmesh.analyzer.components import compile_components
from pingmesh.analyzer.delay_baselines import LEAST_BLOCKS, DelayBook
from pingmesh.analyzer.delay_shifts import change_point, is_queue, level
from pingmesh.analyzer.delay_watch import HARDWARE, SOFTWARE, DelayWatch, Slow
from pingmesh.analyzer.delays import delay_candidates
from pingmesh.messages import WINDOW_NS
from topology.generate import leaf_spine
from topology.paths import ecmp_paths, path_elements

US = 1e3
TOPOLOGY = leaf_spine(4, 4, 4, 1)
COMPONENTS = compile_components(delay_candidates(TOPOLOGY))
WARM_UP = 70


class Fabric:
    """Flows with known ways and noisy round trips; `window` lets one pass."""

    def __init__(self, seed: int, flows: int = 300) -> None:
        self.rng = rng = np.random.default_rng(seed)
        self.watch = DelayWatch(COMPONENTS, len(TOPOLOGY.rnics), 2_000_000)
        self.watch.clocks[:] = HARDWARE
        self.at = self.began = 1_000_000
        names = list(TOPOLOGY.rnics)
        tor = [TOPOLOGY.rnics[n].legs[0].switch for n in names]
        self.ends, self.slots, ways = [], [], []
        for i in range(flows):
            a = i % len(names)
            b = int(rng.choice([k for k in range(len(names)) if k != a]))
            there, back = (
                path_elements(TOPOLOGY, names[x], names[y], options[rng.integers(len(options))])
                for x, y in ((a, b), (b, a))
                if (options := ecmp_paths(TOPOLOGY, tor[x], tor[y]))
            )
            self.ends.append((a, b))
            self.slots.append(self.watch.book.slot(i, a, b, (there,), (back,)))
            ways.append(there + back)
        self.ways = ways
        self.base = 8_000 + 600.0 * np.array([len(w) for w in ways])

    def crossing(self, *elements: str) -> np.ndarray:
        return np.array([sum(e in w for e in elements) for w in self.ways], float)

    def window(self, extra: np.ndarray | float = 0.0, count: int = 1) -> list[Slow]:
        slow: list[Slow] = []
        n = len(self.slots)
        for _ in range(count):
            rtt = self.base + self.rng.gamma(5, 160, n) + extra
            rtt += np.where(self.rng.random(n) < 0.05, 5 * US * self.rng.pareto(1.5, n), 0)
            self.watch.book.put(np.array(self.slots), self.at, rtt)
            self.at += 1
            slow = self.watch.merged(self.watch.fine(), [])
        return slow


def named(slow: list[Slow]) -> list[tuple[str, str | None]]:
    return [(s.candidate.component, s.direction) for s in slow]


@pytest.fixture(params=range(3))
def fabric(request: pytest.FixtureRequest) -> Fabric:
    fabric = Fabric(request.param)
    assert fabric.window(count=WARM_UP) == []
    return fabric


LINK = ("leaf2--spine3", "leaf2->spine3")


def test_a_shift_is_named_with_its_size_and_beginning(fabric: Fabric) -> None:
    began = fabric.at
    (s,) = fabric.window(fabric.crossing("leaf2->spine3") * 8 * US, count=8)
    assert named([s]) == [LINK]
    assert s.excess_ns == pytest.approx(8 * US, abs=1.2 * US)
    assert s.low_ns < s.excess_ns < s.high_ns
    assert abs(s.since_ns // WINDOW_NS - began) <= 2
    assert not s.is_queue


def test_a_queue_is_told_from_a_shift(fabric: Fabric) -> None:
    slow: list[Slow] = []
    for _ in range(8):
        depth = fabric.rng.exponential(40 * US, len(fabric.slots))
        slow = fabric.window(fabric.crossing("leaf2->spine3") * depth)
    assert named(slow) == [LINK]
    assert slow[0].is_queue


def test_three_microseconds_take_some_minutes(fabric: Fabric) -> None:
    extra = fabric.crossing("leaf2->spine3") * 3 * US
    assert any(named(fabric.window(extra)) == [LINK] for _ in range(60))


def test_it_is_over_soon_after_it_ends(fabric: Fabric) -> None:
    assert fabric.window(fabric.crossing("leaf2->spine3") * 10 * US, count=10)
    assert fabric.window(count=4) == []
    assert all(fabric.window() == [] for _ in range(30))


def test_what_lasts_does_not_become_usual(fabric: Fabric) -> None:
    extra = fabric.crossing("leaf2->spine3") * 10 * US
    (first,) = fabric.window(extra, count=12)
    (last,) = fabric.window(extra, count=260)
    assert named([last]) == [LINK]
    assert last.since_ns == first.since_ns
    assert last.excess_ns == pytest.approx(10 * US, rel=0.15)


def test_slow_change_is_followed(fabric: Fabric) -> None:
    crossing = fabric.crossing("leaf2->spine3")
    for i in range(360):  # 12 us in half an hour
        assert fabric.window(crossing * 12 * US * i / 360) == []


def test_a_spike_is_forgotten(fabric: Fabric) -> None:
    assert fabric.window(fabric.crossing("leaf2->spine3") * 300 * US) == []
    assert all(fabric.window() == [] for _ in range(40))


def test_a_quiet_hour_with_a_starved_host_now_and_then() -> None:
    fabric = Fabric(7)
    fabric.watch.clocks[4] = SOFTWARE
    of_host = np.array([4 in ends for ends in fabric.ends], float)
    for i in range(720):
        starved = (i // 20) % 5 == 4
        slow = fabric.window(of_host * starved * fabric.rng.exponential(150 * US, len(fabric.slots)))
        assert slow == [], (i, named(slow))


def test_a_prober_that_measures_too_much_is_an_excuse_that_is_counted(fabric: Fabric) -> None:
    lying = np.array([a == 5 for a, _ in fabric.ends], float)
    assert all(fabric.window(lying * 30 * US) == [] for _ in range(30))


def test_a_link_that_only_one_prober_crosses_is_not_named() -> None:
    fabric = Fabric(3)
    only = fabric.crossing("leaf2->spine3") > 0
    lone = np.array([a == 5 for a, _ in fabric.ends])
    keep = np.flatnonzero(~only | lone)
    fabric.slots = [fabric.slots[i] for i in keep]
    fabric.ways = [fabric.ways[i] for i in keep]
    fabric.base = fabric.base[keep]
    fabric.window(count=WARM_UP)
    assert all(fabric.window(fabric.crossing("leaf2->spine3") * 50 * US) == [] for _ in range(30))


# ---------------------------------------------------------------- baselines


def one_slot() -> DelayBook:
    book = DelayBook(COMPONENTS)
    there, back = ("h1/rnic0 tx", "h2/rnic0 rx"), ("h2/rnic0 tx", "h1/rnic0 rx")
    assert book.slot("flow", 0, 1, (there,), (back,)) == 0
    return book


def feed(book: DelayBook, first: int, values: list[float]) -> int:
    for w, v in enumerate(values, first):
        book.put(np.array([0]), w, np.array([v]))
    return first + len(values)


def test_a_slot_needs_some_minutes_before_anything_is_usual() -> None:
    book = one_slot()
    at = feed(book, 12_000, [10_000.0, 11_000.0] * 6 * LEAST_BLOCKS)
    assert len(book.excess(at - 3, at - 1).slots) == 0
    at = feed(book, at, [10_000.0, 11_000.0] * 8)
    (excess,) = book.excess(at - 4, at - 1).table.excess
    assert excess == pytest.approx(0, abs=1)


def test_the_usual_is_a_median_and_what_is_held_learns_nothing() -> None:
    book = one_slot()
    at = feed(book, 12_000, [10_000.0] * 100)
    book.hold(np.array([True]))
    at = feed(book, at, [90_000.0] * 120)
    assert book.usual(at)[0].tolist() == [10_000.0]
    book.hold(np.array([False]))
    at = feed(book, at, [90_000.0] * 240)
    assert book.usual(at)[0].tolist() == [90_000.0]


def test_dropped_windows_are_no_evidence_and_late_ones_count() -> None:
    book = one_slot()
    at = feed(book, 12_000, [10_000.0] * 20)
    book.put(np.array([0]), at - 2, np.array([77_000.0]))
    assert book.cells(at - 2, at - 1).tolist() == [[77_000.0, 10_000.0]]
    book.drop(np.array([True]), at - 2, at - 2)
    assert np.isnan(book.cells(at - 2, at - 1)).tolist() == [[True, False]]
    book.put(np.array([0]), at - 60, np.array([1.0]))  # long past: left out
    assert not np.any(book.cells(at - 23, at - 1) == 1.0)


def test_another_path_or_process_is_another_slot_and_the_old_one_is_remembered() -> None:
    book = one_slot()
    there, back = ("h1/rnic0 tx", "h2/rnic0 rx"), ("h2/rnic0 tx", "h1/rnic0 rx")
    far = ("h1/rnic0 tx", "leaf1->spine1", "spine1->leaf1", "h2/rnic0 rx")
    assert book.slot("flow", 0, 1, (far,), (back,)) == 1
    assert book.slot("flow after a restart", 0, 1, (there,), (back,)) == 2
    assert book.slot("flow", 0, 1, (there,), (back,)) == 0


def test_time_may_jump() -> None:
    book = one_slot()
    feed(book, 12_000, [10_000.0] * 100)
    at = feed(book, 90_000, [10_000.0] * 3)
    assert np.count_nonzero(~np.isnan(book.cells(at - 24, at - 1))) == 3


# ---------------------------------------------------------------- change points


@pytest.mark.parametrize("at", [5, 20, 34])
def test_a_change_point_is_found_where_it_is(at: int) -> None:
    rng = np.random.default_rng(at)
    series = rng.normal(0, 1, 40) + 6.0 * (np.arange(40) >= at)
    shift = change_point(series)
    assert shift is not None
    assert abs(shift.at - at) <= 1
    assert shift.after - shift.before == pytest.approx(6, abs=1)
    assert shift.z > 5


def test_a_steady_rise_is_no_step() -> None:
    rng = np.random.default_rng(1)
    for series, sudden in (
        (np.arange(40) / 5.0, False),
        (np.maximum(np.arange(40) - 25, 0) / 2.0, False),
        (8.0 * (np.arange(40) >= 30), True),
        (8.0 * (np.arange(40) >= 37), True),
    ):
        shift = change_point(series + rng.normal(0, 0.5, 40))
        assert shift is not None
        assert shift.is_sudden == sudden


def test_no_step_up_has_no_strength() -> None:
    falling = change_point(np.where(np.arange(30) < 15, 5.0, 0.0) + np.arange(30) % 2)
    assert falling is not None
    assert falling.z < 5
    assert change_point(np.full(30, np.nan)) is None


def test_the_level_of_many_flows_is_their_median_where_enough_are_known() -> None:
    values = np.array([[1.0, np.nan, 3.0], [2.0, np.nan, 3.0], [9.0, 5.0, 3.0]])
    assert level(values)[[0, 2]].tolist() == [2.0, 3.0]
    assert np.isnan(level(values)[1])


def test_noise_is_no_queue() -> None:
    rng = np.random.default_rng(1)
    noise = np.full(20, 3.0)
    steady, wavy = rng.normal(40, 3, (20, 6)), rng.exponential(40, (20, 6))
    assert not is_queue(steady + rng.normal(0, 9, (20, 1)), noise, 40.0)
    assert is_queue(wavy, noise, 40.0)
    assert not is_queue(wavy[:1, :2], noise[:1], 40.0), "too few to say"
    depths = 15.0 + rng.uniform(-1.5, 1.5, (1, 12))
    assert is_queue(depths, np.zeros(1), 15.0, 0.05)
    assert not is_queue(15.0 + rng.normal(0, 0.2, (1, 12)), np.zeros(1), 15.0, 0.05)


def test_slots_that_nobody_uses_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pingmesh.analyzer.delay_baselines.LEAST_FORGOTTEN", 10)
    book = one_slot()
    there, back = ("h1/rnic0 tx", "h2/rnic0 rx"), ("h2/rnic0 tx", "h1/rnic0 rx")
    others = np.array([book.slot(i, 0, 1, (there,), (back,)) for i in range(20)])
    last = book.slot("used", 0, 1, (there,), (back,))
    at = 12_000
    for w in range(at, at + 30):
        book.put(np.array([0, *others]), w, np.full(21, 10_000.0))
    assert book.forget() is None

    def go_on(blocks: int) -> int:
        for w in range(at + 30, at + 30 + 12 * blocks, 6):
            book.put(np.array([last]), w, np.array([5_000.0]))
        return at + 30 + 12 * blocks

    go_on(230)
    assert book.forget() is None, "they are remembered for hours"
    end = go_on(250)
    new = book.forget()
    assert new is not None
    assert new[last] == 0
    assert set(new.tolist()) == {-1, 0}
    assert book.slot("used", 0, 1, (there,), (back,)) == 0
    assert book.slot("flow", 0, 1, (there,), (back,)) == 1
    assert np.isnan(book.usual(end)[0][1])


def test_slots_of_moments_and_of_processes_that_are_gone_are_forgotten_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pingmesh.analyzer.delay_baselines.LEAST_FORGOTTEN", 10)
    book = one_slot()
    there, back = ("h1/rnic0 tx", "h2/rnic0 rx"), ("h2/rnic0 tx", "h1/rnic0 rx")
    for i in range(20):
        book.slot(i, 0, 1, (there,), (back,))  # nothing is usual for them
    at = feed(book, 12_000, [10_000.0] * 48)
    assert book.forget() is None
    at = feed(book, at, [10_000.0] * 48)
    new = book.forget()
    assert new is not None
    assert np.flatnonzero(new >= 0).tolist() == [0]
    rest = np.array([book.slot(f"usual {i}", 0, 1, (there,), (back,)) for i in range(20)])
    for w in range(at, at + 48):
        book.put(rest, w, np.full(20, 7_000.0))
    assert book.forget() is None
    book.give_up(np.arange(len(book)) > 0)
    assert np.isnan(book.cells(at, at + 47)[1:]).all(), "what it measured last is no evidence either"
    book.advance(at + 60)
    new = book.forget()
    assert new is not None
    assert np.flatnonzero(new >= 0).tolist() == [0]
