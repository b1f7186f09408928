"""Slow components from round trips: given excesses on a drawn fabric, who is named; and what must not change that."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pingmesh.analyzer.components import Components, compile_components
from pingmesh.analyzer.delays import (
    Cause,
    DelaySuspect,
    DelayTable,
    crossings_of,
    delay_candidates,
    explain_delays,
    select,
    table_of,
)
from pingmesh.analyzer.flows import PathSet
from topology.generate import leaf_spine
from topology.model import Topology
from topology.paths import ecmp_paths, path_elements

US = 1_000.0
NOISE = 1.0 * US
TOPOLOGY = leaf_spine(4, 4, 4, 1)
COMPONENTS = compile_components(delay_candidates(TOPOLOGY))

Slow = dict[str, float]
"""Element -> delay (ns)."""


@dataclasses.dataclass(frozen=True)
class Trip:
    """A flow: its ends, its ways (one known path each, or the whole ECMP set) and the way it really takes."""

    src: str
    dst: str
    there: PathSet
    back: PathSet
    walks: tuple[str, ...]


def draw_trips(topology: Topology, count: int, rng: random.Random, *, hidden: float = 0.0) -> list[Trip]:
    names = list(topology.rnics)
    tor = {n: topology.rnics[n].legs[0].switch for n in names}
    out = []
    for i in range(count):
        src = names[i % len(names)]
        dst = rng.choice([n for n in names if n != src])
        sets = [
            tuple(path_elements(topology, a, b, p) for p in ecmp_paths(topology, tor[a], tor[b]))
            for a, b in ((src, dst), (dst, src))
        ]
        ways = [rng.choice(s) for s in sets]
        told = [s if rng.random() < hidden else (w,) for s, w in zip(sets, ways, strict=True)]
        out.append(Trip(src, dst, told[0], told[1], ways[0] + ways[1]))
    return out


def table(
    trips: Sequence[Trip],
    slow: Slow,
    rng: random.Random,
    components: Components = COMPONENTS,
    *,
    extra: Callable[[Trip], float] = lambda t: 0.0,
    uneven: float = 0.0,
    noise: float = NOISE,
) -> DelayTable:
    names = {n: i for i, n in enumerate(sorted({t.src for t in trips} | {t.dst for t in trips}))}
    excess = [
        rng.gauss(0, noise) + extra(t) + sum(slow.get(e, 0.0) * rng.uniform(1 - uneven, 1 + uneven) for e in t.walks)
        for t in trips
    ]
    return table_of(
        [crossings_of(components, t.there, t.back) for t in trips],
        np.array(excess),
        np.full(len(trips), NOISE),
        np.array([names[t.src] for t in trips]),
        np.array([names[t.dst] for t in trips]),
        np.array([len(t.walks) for t in trips]),
    )


def named(found: Sequence[DelaySuspect]) -> list[tuple[str, str | None]]:
    return [(s.candidate.component, s.candidate.direction) for s in found]


def components_named(found: Sequence[DelaySuspect]) -> set[str]:
    return {s.candidate.component for s in found}


@pytest.fixture(params=range(5))
def rng(request: pytest.FixtureRequest) -> random.Random:
    return random.Random(request.param)


# ---------------------------------------------------------------- who is named


def test_nothing_is_slow(rng: random.Random) -> None:
    assert explain_delays(table(draw_trips(TOPOLOGY, 400, rng), {}, rng), COMPONENTS) == []


@pytest.mark.parametrize("size", [4 * US, 50 * US, 1000 * US])
def test_an_uplink_that_flows_were_hashed_onto(rng: random.Random, size: float) -> None:
    (s,) = explain_delays(table(draw_trips(TOPOLOGY, 400, rng), {"leaf2->spine3": size}, rng, uneven=0.4), COMPONENTS)
    assert (s.candidate.component, s.candidate.direction) == ("leaf2--spine3", "leaf2->spine3")
    assert s.low_ns <= s.excess_ns <= s.high_ns
    assert s.excess_ns == pytest.approx(size, rel=0.3)
    assert s.share > 0.8
    assert s.probers > 3
    assert not s.excuses


def test_incast_at_a_tor_downlink_is_the_rnics_and_its_side_cannot_be_told(rng: random.Random) -> None:
    found = explain_delays(table(draw_trips(TOPOLOGY, 400, rng), {"h7/rnic0 rx": 20 * US}, rng, uneven=0.5), COMPONENTS)
    assert components_named(found) == {"h7/rnic0"}
    (s,) = found
    assert {s.candidate.direction, *(a.direction for a in s.equals)} == {"tx", "rx"}


def test_a_slow_switch_and_not_its_links_one_by_one(rng: random.Random) -> None:
    slow = {e: 3 * US for e in COMPONENTS.index if "->spine2" in e}
    (s,) = explain_delays(table(draw_trips(TOPOLOGY, 400, rng), slow, rng), COMPONENTS)
    assert (s.candidate.component, s.candidate.type) == ("spine2", "switch")


def test_a_slow_leaf_answers_later_by_both_ways_through_it(rng: random.Random) -> None:
    slow = {e: 4 * US for e in COMPONENTS.index if e.startswith("leaf3->")}
    slow |= {f"{r.name} rx": 4 * US for r in TOPOLOGY.rnics_under("leaf3")}
    (s,) = explain_delays(table(draw_trips(TOPOLOGY, 400, rng), slow, rng), COMPONENTS)
    assert s.candidate.component == "leaf3"
    assert s.excess_ns == pytest.approx(8 * US, rel=0.15)


def test_two_at_once_of_very_different_size(rng: random.Random) -> None:
    slow = {"leaf1->spine4": 300 * US, "h14/rnic0 tx": 8 * US}
    found = explain_delays(table(draw_trips(TOPOLOGY, 600, rng), slow, rng, uneven=0.2), COMPONENTS)
    assert components_named(found) == {"leaf1--spine4", "h14/rnic0"}
    by_name = {s.candidate.component: s for s in found}
    assert by_name["leaf1--spine4"].excess_ns == pytest.approx(300 * US, rel=0.2)
    assert by_name["h14/rnic0"].excess_ns == pytest.approx(8 * US, rel=0.3)


def test_a_pause_storm_is_named_by_its_members_or_as_a_whole(rng: random.Random) -> None:
    slow = {e: 30 * US for e in COMPONENTS.index if e.endswith("->leaf2")} | {"h6/rnic0 rx": 60 * US}
    found = explain_delays(table(draw_trips(TOPOLOGY, 600, rng), slow, rng, uneven=0.4), COMPONENTS)
    assert {"leaf2", "h6/rnic0"} <= components_named(found) | {a.component for s in found for a in s.alternatives}
    assert all("leaf2" in c or c == "h6/rnic0" for c in components_named(found)), named(found)


def test_paths_that_are_not_known_name_it_all_the_same(rng: random.Random) -> None:
    trips = draw_trips(TOPOLOGY, 800, rng, hidden=0.5)
    found = explain_delays(table(trips, {"leaf2->spine3": 40 * US}, rng, uneven=0.3), COMPONENTS)
    assert named(found) == [("leaf2--spine3", "leaf2->spine3")]


def test_a_tor_and_its_only_rnic_are_given_as_alternatives() -> None:
    rng = random.Random(1)
    topology = leaf_spine(3, 2, 1, 1)
    components = compile_components(delay_candidates(topology))
    found = explain_delays(table(draw_trips(topology, 200, rng), {"h2/rnic0 rx": 30 * US}, rng, components), components)
    (s,) = found
    assert {"h2/rnic0", "leaf2"} <= {s.candidate.component, *(a.component for a in s.alternatives)}


# ---------------------------------------------------------------- what is no fault of the fabric


def test_everything_is_slower(rng: random.Random) -> None:
    trips = draw_trips(TOPOLOGY, 400, rng)
    assert explain_delays(table(trips, {}, rng, extra=lambda t: 20 * US), COMPONENTS) == []
    beyond = table(trips, {}, rng, extra=lambda t: 20 * US * (len(t.walks) > 4))
    assert explain_delays(beyond, COMPONENTS) == []


def test_something_is_slow_while_everything_else_is_quicker_than_it_was(rng: random.Random) -> None:
    trips = draw_trips(TOPOLOGY, 400, rng)
    t = table(trips, {"leaf2->spine3": 8 * US}, rng, extra=lambda t: -6 * US)
    assert named(explain_delays(t, COMPONENTS)) == [("leaf2--spine3", "leaf2->spine3")]


@pytest.mark.parametrize("end", ["src", "dst"])
def test_what_one_prober_measures_or_one_responder_answers_is_its_own(rng: random.Random, end: str) -> None:
    trips = draw_trips(TOPOLOGY, 600, rng)
    t = table(trips, {}, rng, extra=lambda t: 30 * US if getattr(t, end) == "h5/rnic0" else 0.0)
    assert explain_delays(t, COMPONENTS) == []


def test_a_link_that_only_one_prober_crosses_has_the_prober_for_an_excuse(rng: random.Random) -> None:
    trips = [t for t in draw_trips(TOPOLOGY, 600, rng) if "leaf2->spine3" not in t.walks or t.src == "h5/rnic0"]
    trips = [t for t in trips if t.src != "h5/rnic0" or "leaf2->spine3" in t.walks]
    found = explain_delays(table(trips, {"leaf2->spine3": 30 * US}, rng), COMPONENTS)
    assert all(Cause.PROBER in s.excuses for s in found), found


def test_outliers_of_single_flows_name_nothing(rng: random.Random) -> None:
    trips = draw_trips(TOPOLOGY, 400, rng)
    t = table(trips, {}, rng, extra=lambda t: 1e6 if rng.random() < 0.02 else 0.0)
    assert explain_delays(t, COMPONENTS) == []


def test_no_rows() -> None:
    assert explain_delays(table([], {}, random.Random(1)), COMPONENTS) == []


# ---------------------------------------------------------------- properties

seeds = st.integers(0, 2**32 - 1)


@settings(max_examples=25, deadline=None)
@given(seeds, st.sampled_from([4 * US, 30 * US, 500 * US]))
def test_the_order_of_flows_changes_nothing(seed: int, size: float) -> None:
    rng = random.Random(seed)
    t = table(draw_trips(TOPOLOGY, 200, rng), {"leaf2->spine3": size, "h9/rnic0 tx": size / 2}, rng, uneven=0.3)
    order = np.array(rng.sample(range(t.rows), t.rows))
    turned = select(t, np.ones(t.rows, bool))
    shuffled = _take(turned, order)
    a, b = explain_delays(t, COMPONENTS), explain_delays(shuffled, COMPONENTS)
    assert named(a) == named(b)
    assert [s.score for s in a] == pytest.approx([s.score for s in b], abs=1e-6)


def _take(t: DelayTable, order: np.ndarray) -> DelayTable:
    parts = [select(t, np.arange(t.rows) == i) for i in order]
    return DelayTable(
        **{
            f: np.concatenate([getattr(p, f) for p in parts])
            for f in ("excess", "scale", "prober", "responder", "hops", "singles", "share", "times")
        },
        ptr=np.concatenate(([0], np.cumsum([len(p.singles) for p in parts]))),
    )


@settings(max_examples=15, deadline=None)
@given(seeds)
def test_other_names_change_nothing_but_names(seed: int) -> None:
    """The mirrored fabric: leaf i is called leaf 5-i, and all that hangs on it accordingly."""

    def renamed(e: str) -> str:
        ends = e.split("->")
        if len(ends) == 2:
            return "->".join(f"leaf{5 - int(x[4:])}" if x.startswith("leaf") else x for x in ends)
        host, rest = e.split("/")
        number = int(host[1:]) - 1
        return f"h{(3 - number // 4) * 4 + number % 4 + 1}/{rest}"

    rng = random.Random(seed)
    trips = draw_trips(TOPOLOGY, 300, rng)
    slow = {rng.choice([e for e in COMPONENTS.index if "->" in e]): 40 * US}
    state = rng.getstate()
    a = explain_delays(table(trips, slow, rng, uneven=0.3), COMPONENTS)
    others = [
        Trip(
            renamed(t.src + " tx").split()[0],
            renamed(t.dst + " tx").split()[0],
            tuple(tuple(map(renamed, p)) for p in t.there),
            tuple(tuple(map(renamed, p)) for p in t.back),
            tuple(map(renamed, t.walks)),
        )
        for t in trips
    ]
    rng.setstate(state)
    b = explain_delays(table(others, {renamed(e): d for e, d in slow.items()}, rng, uneven=0.3), COMPONENTS)
    assert [renamed(s.candidate.direction or "") for s in a] == [s.candidate.direction for s in b]
    assert [s.score for s in a] == pytest.approx([s.score for s in b], abs=1e-6)


@settings(max_examples=25, deadline=None)
@given(seeds, st.sampled_from([3 * US, 10 * US, 200 * US]), st.integers(1, 60))
def test_flows_that_cross_it_in_time_never_raise_suspicion(seed: int, size: float, more: int) -> None:
    rng = random.Random(seed)
    t = table(draw_trips(TOPOLOGY, 200, rng), {"leaf2->spine3": size}, rng, uneven=0.3)
    crossing = [x for x in draw_trips(TOPOLOGY, 2000, rng) if "leaf2->spine3" in x.walks]
    clean = table(crossing[:more], {}, rng, noise=0.0)
    both = _join(t, clean)

    def score(x: DelayTable) -> float:
        return sum(s.score for s in explain_delays(x, COMPONENTS) if s.candidate.direction == "leaf2->spine3")

    assert score(both) <= score(t) + 1e-6


def _join(a: DelayTable, b: DelayTable) -> DelayTable:
    return DelayTable(
        **{
            f: np.concatenate((getattr(a, f), getattr(b, f)))
            for f in ("excess", "scale", "prober", "responder", "hops", "singles", "share", "times")
        },
        ptr=np.concatenate((a.ptr, a.ptr[-1] + b.ptr[1:])),
    )


@settings(max_examples=25, deadline=None)
@given(seeds)
def test_evidence_grows_with_the_delay(seed: int) -> None:
    rng = random.Random(seed)
    trips = draw_trips(TOPOLOGY, 200, rng)
    state = rng.getstate()
    scores = []
    for size in (5, 10, 40, 160, 640):
        rng.setstate(state)
        found = explain_delays(table(trips, {"leaf2->spine3": size * US}, rng), COMPONENTS)
        scores.append(max(s.score for s in found if s.candidate.direction == "leaf2->spine3"))
    assert scores == sorted(scores), scores
