"""The localiser on tiny literal fabrics and on simulated leaf-spines with faults of each kind."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import permutations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pingmesh.analyzer.candidates import Candidate, candidates_of
from pingmesh.analyzer.components import compile_components
from pingmesh.analyzer.hazards import Hazards
from pingmesh.analyzer.localise import Observation, Suspect, localise, wilson
from pingmesh.analyzer.nats import log_factorial
from pingmesh.analyzer.table import table_of
from pingmesh.lab.flows import SimulatedFault, draw_flows, draw_observations
from topology.generate import leaf_spine

FABRIC = leaf_spine(4, 4, 4, 1)
CANDIDATES = candidates_of(FABRIC)
COMPILED = compile_components(CANDIDATES)
TWO_RNICS = leaf_spine(4, 4, 2, 2)
SMALL = leaf_spine(2, 2, 2, 1)
SMALL_CANDIDATES = candidates_of(SMALL)


def one(src: str, dst: str, sent: int, lost: int, *links: str) -> Observation:
    return Observation(sent, lost, ((f"{src}/rnic0 tx", *links, f"{dst}/rnic0 rx"),))


def names(suspects: list[Suspect]) -> set[tuple[str, str | None]]:
    return {(s.candidate.component, s.candidate.direction) for s in suspects}


def among(suspect: Suspect) -> set[tuple[str, str | None]]:
    return {(c.component, c.direction) for c in (suspect.candidate, *suspect.alternatives)}


@pytest.mark.parametrize("switch", ["spine2", "leaf3"])
@pytest.mark.parametrize("seed", range(4))
def test_a_switch_that_drops_a_share_of_the_tuples_is_one_fault(switch: str, seed: int) -> None:
    """An ACL on a switch; its links do not drop equal shares of what they carry."""
    rng = np.random.default_rng(seed)
    (acl,) = (c for c in CANDIDATES if c.component == switch)
    flows = draw_flows(FABRIC, rng)
    seen = draw_observations(flows, [SimulatedFault(acl, 1.0, 0.25)], rng)
    # Each tuple is seen again and again: in several windows, and in the rounds of a confirmation.
    assert names(localise([*seen, *seen, *seen], CANDIDATES)) == {(switch, None)}


def test_links_of_one_switch_that_drop_shares_are_several_faults() -> None:
    rng = np.random.default_rng(3)
    wanted = {("leaf1--spine1", "leaf1->spine1"), ("leaf2--spine1", "leaf2->spine1")}
    faults = [SimulatedFault(c, 1.0, 0.4) for c in CANDIDATES if (c.component, c.direction) in wanted]
    seen = draw_observations(draw_flows(FABRIC, rng), faults, rng)
    assert names(localise(seen, CANDIDATES)) == wanted


@pytest.mark.parametrize("share", [0.1, 0.25, 0.5])
def test_the_share_of_a_switch_counts_each_tuple_once(share: float) -> None:
    """A packet crosses two elements of a switch: what is spared is not spared twice."""
    rng = np.random.default_rng(5)
    (acl,) = (c for c in CANDIDATES if c.component == "spine2")
    seen = draw_observations(draw_flows(FABRIC, rng), [SimulatedFault(acl, 1.0, share)], rng)
    table = table_of(seen, {e: i for i, e in enumerate(COMPILED.index)})
    hazards = Hazards(table, COMPILED, 1e-4, 0.01)
    single = COMPILED.singles.index(acl)
    fit = hazards.fit(hazards.given([], 1e-6), single)
    crossed = [o for o in seen if not acl.elements.isdisjoint(o.paths[0])]
    dead = sum(o.lost > 0.5 * o.sent for o in crossed)
    assert fit.lossy.share == pytest.approx(dead / len(crossed), rel=0.02)


def test_what_a_switch_drops_of_a_tuple_is_fitted_for_the_whole_way_through_it() -> None:
    crossed = [one(f"h{a}", f"h{b}", 100, 70 if a == 1 else 0, "leaf1->spine2", "spine2->leaf3")
               for a in (1, 2, 3, 4) for b in (9, 10, 11, 12)]  # fmt: skip
    hazards = Hazards(table_of(crossed, {e: i for i, e in enumerate(COMPILED.index)}), COMPILED, 1e-4, 0.01)
    (spine,) = (i for i, c in enumerate(COMPILED.singles) if c.component == "spine2")
    lossy = hazards.fit(hazards.given([], 1e-6), spine).lossy
    assert lossy.share == pytest.approx(0.25, abs=0.01)
    assert lossy.hazard == pytest.approx(-np.log(0.3) / 2)


def test_who_happened_to_send_while_a_link_flapped_is_not_blamed() -> None:
    """All that it sent over the link was sent in a bad moment; of its other packets nothing is known."""
    flap = [one(f"h{a}", f"h{b}", 40, 16, "leaf1->spine2", "spine2->leaf3") for a in (1, 2, 3) for b in (9, 10, 11, 12)]
    well = [one("h1", f"h{b}", 40, 0, "leaf1->spine1", "spine1->leaf3") for b in (9, 10)]
    well += [one(f"h{a}", f"h{b}", 40, 0, "leaf2->spine2", "spine2->leaf3") for a in (5, 6, 7) for b in (9, 10, 11, 12)]
    unlucky = [one("h4", f"h{b}", 40, 36, "leaf1->spine2", "spine2->leaf3") for b in (9, 10, 11, 12)]
    assert names(localise([*flap, *well, *unlucky], CANDIDATES)) == {("leaf1--spine2", "leaf1->spine2")}
    own = [one("h4", f"h{b}", 40, 36, "leaf1->spine1", "spine1->leaf3") for b in (9, 10)]
    both = {("leaf1--spine2", "leaf1->spine2"), ("h4/rnic0", "tx")}
    assert names(localise([*flap, *well, *unlucky, *own], CANDIDATES)) == both


def test_candidates_of_a_small_fabric() -> None:
    found = {(c.component, c.direction): c for c in SMALL_CANDIDATES}
    assert found["leaf1--spine1", "leaf1->spine1"].elements == {"leaf1->spine1"}
    assert found["leaf1--spine1", "both"].elements == {"leaf1->spine1", "spine1->leaf1"}
    assert found["h1/rnic0", "both"].elements == {"h1/rnic0 tx", "h1/rnic0 rx"}
    assert found["leaf1", None].elements == {
        *("leaf1->spine1", "spine1->leaf1", "leaf1->spine2", "spine2->leaf1"),
        *("h1/rnic0 tx", "h1/rnic0 rx", "h2/rnic0 tx", "h2/rnic0 rx"),
    }
    assert not any(c.type == "host" for c in SMALL_CANDIDATES)
    hosts = {c.component: c for c in candidates_of(TWO_RNICS) if c.type == "host"}
    assert len(hosts) == 8
    assert len(hosts["h1"].elements) == 4


def test_two_rnics_of_a_tor_alone_are_one_of_three() -> None:
    seen = [one("h1", "h2", 100, 50), one("h2", "h1", 100, 48)]
    (suspect,) = localise(seen, SMALL_CANDIDATES)
    assert among(suspect) >= {("h1/rnic0", "both"), ("h2/rnic0", "both"), ("leaf1", None)}
    assert suspect.confidence < 0.6


def test_inter_tor_evidence_tells_the_two_rnics_apart() -> None:
    seen = [
        *(one("h1", "h2", 100, 50), one("h2", "h1", 100, 48)),
        *(one("h1", "h3", 100, 51, f"leaf1->{s}", f"{s}->leaf2") for s in ("spine1", "spine2")),
        *(one("h3", "h1", 100, 47, f"leaf2->{s}", f"{s}->leaf1") for s in ("spine1", "spine2")),
        *(one("h2", "h4", 100, 0, f"leaf1->{s}", f"{s}->leaf2") for s in ("spine1", "spine2")),
        *(one("h4", "h2", 100, 0, f"leaf2->{s}", f"{s}->leaf1") for s in ("spine1", "spine2")),
    ]
    (suspect,) = localise(seen, SMALL_CANDIDATES)
    assert among(suspect) == {("h1/rnic0", "both")}
    assert suspect.confidence > 0.99
    assert (suspect.sent, suspect.lost) == (600, 50 + 48 + 2 * 51 + 2 * 47)
    assert suspect.rate_low < 0.49 < suspect.rate_high


def test_one_direction_of_a_cable_is_told_from_the_other() -> None:
    seen = [
        *(one(a, b, 50, 15, "leaf1->spine1", "spine1->leaf2") for a in ("h1", "h2") for b in ("h3", "h4")),
        *(one(a, b, 50, 0, "leaf1->spine2", "spine2->leaf2") for a in ("h1", "h2") for b in ("h3", "h4")),
        *(one(b, a, 50, 0, "leaf2->spine1", "spine1->leaf1") for a in ("h1", "h2") for b in ("h3", "h4")),
    ]
    (suspect,) = localise(seen, SMALL_CANDIDATES)
    # With two leaves, what enters spine1 from leaf1 leaves it to leaf2: the evidence cannot say where it is lost.
    assert among(suspect) == {("leaf1--spine1", "leaf1->spine1"), ("leaf2--spine1", "spine1->leaf2")}
    assert suspect.confidence == pytest.approx(0.5, abs=0.01)


def test_the_only_rnic_of_a_leaf_is_told_from_it_by_nothing() -> None:
    fabric = leaf_spine(3, 2, 1, 1)
    rng = np.random.default_rng(1)
    truth = next(c for c in candidates_of(fabric) if (c.component, c.direction) == ("h1/rnic0", "both"))
    seen = draw_observations(draw_flows(fabric, rng), [SimulatedFault(truth, 0.3)], rng)
    (suspect,) = localise(seen, candidates_of(fabric))
    assert among(suspect) == {("h1/rnic0", "both"), ("leaf1", None)}
    assert 0.5 < suspect.confidence < 0.95


@pytest.mark.parametrize(
    "seen",
    [
        [],
        [one("h1", "h2", 0, 0)],
        [Observation(10, 10, ())],
        [one("h1", "h2", 1000, 1), *(one("h3", "h4", 1000, 0) for _ in range(5))],
        [one("h1", "h2", 1, 1)],
        [one("h1", "h2", 2, 2)],
        [one("h1", "h2", 5000, 0), one("h2", "h1", 5000, 0)],
    ],
)
def test_too_little_names_nothing(seen: list[Observation]) -> None:
    assert localise(seen, SMALL_CANDIDATES) == []


@pytest.mark.parametrize(("lossy", "found"), [((0, 4), False), ((0, 4, 8, 11), True)])
def test_four_losses_on_one_link_and_nowhere_else_are_something(lossy: tuple[int, ...], found: bool) -> None:
    spread = [(a, b) for a in ("h1", "h2", "h3", "h4") for b in ("h5", "h9", "h13")]
    leaf = {"h5": "leaf2", "h9": "leaf3", "h13": "leaf4"}
    seen = []
    for i, (a, b) in enumerate(spread):
        seen.append(one(a, b, 10, int(i in lossy), "leaf1->spine1", f"spine1->{leaf[b]}"))
        seen += [one(a, b, 10, 0, f"leaf1->spine{s}", f"spine{s}->{leaf[b]}") for s in (2, 3, 4)]
        seen += [one(b, a, 10, 0, f"{leaf[b]}->spine{s}", f"spine{s}->leaf1") for s in (1, 2, 3, 4)]
    assert names(localise(seen, CANDIDATES)) == ({("leaf1--spine1", "leaf1->spine1")} if found else set())


def link(c: Candidate) -> bool:
    return c.type == "link" and c.direction != "both"


def cable(c: Candidate) -> bool:
    return c.type == "link" and c.direction == "both"


def switch(c: Candidate) -> bool:
    return c.type == "switch"


def host(c: Candidate) -> bool:
    return c.type == "host"


def rnic(direction: str) -> Callable[[Candidate], bool]:
    return lambda c: c.type == "rnic" and c.direction == direction


KINDS = [
    *[pytest.param([(link, rate, 1.0)], id=f"link {rate:.0%}") for rate in (0.1, 0.3, 1.0)],
    *[pytest.param([(cable, rate, 1.0)], id=f"both directions {rate:.0%}") for rate in (0.1, 1.0)],
    *[pytest.param([(switch, rate, 1.0)], id=f"switch {rate:.0%}") for rate in (0.3, 1.0)],
    *[pytest.param([(rnic(d), r, 1.0)], id=f"rnic {d} {r:.0%}") for d in ("tx", "rx", "both") for r in (0.1, 1.0)],
    *[pytest.param([(host, rate, 1.0)], id=f"host {rate:.0%}") for rate in (0.3, 1.0)],
    pytest.param([(link, 1.0, 0.25)], id="black hole of a quarter of the flows"),
    pytest.param([(link, 0.3, 1.0), (link, 0.3, 1.0)], id="two links"),
    pytest.param([(link, 1.0, 1.0), (rnic("tx"), 0.3, 1.0)], id="link and rnic"),
    pytest.param([(switch, 0.3, 1.0), (link, 1.0, 1.0)], id="switch and link"),
]


@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize("unknown", [0.0, 0.3])
def test_simulated_faults_are_named_exactly(
    kinds: list[tuple[Callable[[Candidate], bool], float, float]], unknown: float
) -> None:
    fabric = TWO_RNICS if kinds[0][0] is host else FABRIC
    candidates = candidates_of(fabric)
    wrong = []
    for seed in range(4):
        rng = np.random.default_rng(seed)
        faults: list[SimulatedFault] = []
        for kind, rate, share in kinds:
            hit = {e for f in faults for e in f.candidate.elements}
            pool = [c for c in candidates if kind(c) and not c.elements & hit]
            faults.append(SimulatedFault(pool[int(rng.integers(len(pool)))], rate, share))
        # A hole in a quarter of the flows needs the paths of most flows to be told from its neighbours.
        seen = draw_observations(draw_flows(fabric, rng, unknown=unknown), faults, rng, noise=1e-5)
        suspects = localise(seen, candidates)
        if {s.candidate for s in suspects} != {f.candidate for f in faults}:
            wrong.append((seed, [f.candidate for f in faults], suspects))
        for s in suspects:
            assert s.rate_low <= s.rate <= s.rate_high
            assert s.lost <= s.sent
    assert not wrong


@pytest.mark.parametrize("noise", [0.0, 1e-4, 1e-3])
@pytest.mark.parametrize("sent", [5, 50, 200])
def test_healthy_fabric_names_nothing(noise: float, sent: int) -> None:
    for seed in range(12):
        rng = np.random.default_rng(seed)
        elements = sorted({e for c in CANDIDATES for e in c.elements})
        rates = dict(zip(elements, rng.uniform(0, 2 * noise, len(elements)), strict=True))
        assert localise(draw_observations(draw_flows(FABRIC, rng), [], rng, sent=sent, noise=rates), CANDIDATES) == []


def test_rates_are_estimated() -> None:
    rng = np.random.default_rng(5)
    truth = next(c for c in CANDIDATES if c.direction == "leaf2->spine3")
    (suspect,) = localise(
        draw_observations(draw_flows(FABRIC, rng), [SimulatedFault(truth, 0.1)], rng, sent=200), CANDIDATES
    )
    assert suspect.rate == pytest.approx(0.1, abs=0.015)
    assert suspect.rate_low < 0.1 < suspect.rate_high


def test_paths_never_known_give_all_alternatives() -> None:
    """Under symmetric ECMP sets the four uplinks of a leaf cannot be told apart."""
    rng = np.random.default_rng(2)
    truth = next(c for c in CANDIDATES if c.direction == "leaf2->spine3")
    seen = draw_observations(draw_flows(FABRIC, rng, unknown=1.0), [SimulatedFault(truth, 1.0)], rng)
    (suspect,) = localise(seen, CANDIDATES)
    assert among(suspect) == {(f"leaf2--spine{s}", f"leaf2->spine{s}") for s in (1, 2, 3, 4)}
    assert suspect.confidence == pytest.approx(0.25, abs=0.01)


ROUTES = [f.path for f in draw_flows(SMALL, np.random.default_rng(0), tuples=8)]
observation_lists = st.lists(
    st.builds(
        lambda sent, share, paths: Observation(sent, int(sent * share), tuple(paths)),
        st.integers(0, 300),
        st.sampled_from([0.0, 0.0, 0.0, 0.1, 0.5, 1.0]),
        st.lists(st.sampled_from(ROUTES), min_size=1, max_size=3),
    ),
    max_size=40,
)


@settings(max_examples=60, deadline=None)
@given(observation_lists, st.randoms(use_true_random=False))
def test_properties(seen: list[Observation], shuffle: random.Random) -> None:
    suspects = localise(seen, SMALL_CANDIDATES)
    for s in suspects:
        for part in s.candidate.parts():
            crossing = [o for o in seen if any(part & set(p) for p in o.paths)]
            assert any(o.lost for o in crossing), "every named part lost packets"
        assert 0 <= s.rate_low <= s.rate <= s.rate_high <= 1
        assert 0 < s.confidence <= 1
        assert s.candidate not in s.alternatives
    mixed = list(seen)
    shuffle.shuffle(mixed)
    candidates = list(SMALL_CANDIDATES)
    shuffle.shuffle(candidates)
    again = localise(mixed, candidates)
    assert [s.candidate for s in again] == [s.candidate for s in suspects]
    assert [s.score for s in again] == pytest.approx([s.score for s in suspects], rel=1e-6, abs=1e-6)


def test_log_factorial() -> None:
    assert np.exp(log_factorial(np.array([0.0, 1, 5, 10]))) == pytest.approx([1, 1, 120, 3628800], rel=1e-6)


def test_wilson() -> None:
    assert wilson(0, 0) == (0.0, 1.0)
    low, high = wilson(10, 100)
    assert (low, high) == (pytest.approx(0.0552, abs=1e-3), pytest.approx(0.1744, abs=1e-3))


def test_round_trips_through_one_link_both_ways_tell_no_direction() -> None:
    """Who sees round trips only cannot know which way packets were lost, and is no less sure of the link."""
    loses = ("leaf1->spine1", "spine1->leaf1")
    seen = []
    for a, b in permutations(range(1, 5), 2):
        for spine, host in product(range(1, 5), repeat=2):
            src, dst = f"h{4 * a - 4 + host}", f"h{4 * b - 4 + (host + spine) % 4 + 1}"
            there = f"leaf{a}->spine{spine}", f"spine{spine}->leaf{b}"
            back = f"leaf{b}->spine{spine}", f"spine{spine}->leaf{a}"
            lost = 20 if any(e in loses for e in (*there, *back)) else 0
            path = (f"{src}/rnic0 tx", *there, f"{dst}/rnic0 rx", f"{dst}/rnic0 tx", *back, f"{src}/rnic0 rx")
            seen.append(Observation(100, lost, (path,)))
    (suspect,) = localise(seen, CANDIDATES)
    assert (suspect.candidate.component, suspect.direction) == ("leaf1--spine1", None)
    assert suspect.confidence > 0.99
