"""Scores of single components: against the plain formula, and what must hold whatever the counts are."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pingmesh.analyzer.candidates import candidates_of
from pingmesh.analyzer.components import Components, compile_components
from pingmesh.analyzer.hazards import Hazards
from pingmesh.analyzer.nats import Cap, burden, relief
from pingmesh.analyzer.search import MIN_PART_SCORE
from pingmesh.analyzer.table import Floats, Ints, Table, known_paths, pointer
from pingmesh.lab.flows import draw_flows
from topology.generate import leaf_spine

FABRIC = leaf_spine(2, 2, 2, 1)
COMPONENTS = compile_components(candidates_of(FABRIC))
BACKGROUND = 1e-4
ROUTES = [[COMPONENTS.index[e] for e in flow.path] for flow in draw_flows(FABRIC, np.random.default_rng(0), tuples=6)]


def table(counts: list[tuple[int, int, int]]) -> Table:
    """(route, sent, lost) of each flow."""
    width = max(map(len, ROUTES))
    paths = np.array([ROUTES[r] + [-1] * (width - len(ROUTES[r])) for r, _, _ in counts], np.int64).reshape(-1, width)
    return known_paths(len(COMPONENTS.index), paths, [s for _, s, _ in counts], [k for _, _, k in counts])


def hazards(t: Table, components: Components = COMPONENTS, bursts: float = 1e-300) -> Hazards:
    return Hazards(t, components, 1e-6, bursts)


def plain(t: Table, single: int, hazard: float) -> float:
    """Log likelihood of a table of known paths, flow by flow, with one lossy single."""
    elements = set(COMPONENTS.of(single))
    total = 0.0
    for row in range(t.rows):
        path = t.path_elements[t.path_ptr[row] : t.path_ptr[row + 1]].tolist()
        h = BACKGROUND * len(path) + hazard * sum(e in elements for e in path)
        k, n = t.lost[row], t.sent[row]
        total += (k * math.log(-math.expm1(-h)) if k else 0.0) - (n - k) * h
    return total


flows = st.tuples(
    st.integers(0, len(ROUTES) - 1), st.integers(1, 60), st.sampled_from([0.0, 0.0, 0.0, 0.02, 0.2, 1.0])
).map(lambda x: (x[0], x[1], int(x[1] * x[2])))
tables = st.lists(flows, min_size=1, max_size=30)
singles = st.integers(0, len(COMPONENTS.singles) - 1)


@settings(max_examples=60, deadline=None)
@given(tables, singles)
def test_a_fit_is_that_of_the_plain_formula(counts: list[tuple[int, int, int]], single: int) -> None:
    t = table(counts)
    h = hazards(t)
    fit = h.fit(h.given([], BACKGROUND), single, shares=False)
    assert fit.gain == pytest.approx(plain(t, single, fit.lossy.hazard) - plain(t, single, 0.0), rel=1e-6, abs=1e-6)
    for hazard in np.geomspace(2e-4, 9, 12):
        assert plain(t, single, float(hazard)) - plain(t, single, 0.0) <= fit.gain + max(0.02, 2e-3 * abs(fit.gain))


@settings(max_examples=60, deadline=None)
@given(tables, st.randoms(use_true_random=False))
def test_the_order_of_flows_and_the_numbers_of_elements_mean_nothing(
    counts: list[tuple[int, int, int]], shuffle: object
) -> None:
    t = table(counts)
    rng = np.random.default_rng(shuffle.getrandbits(32))  # type: ignore[attr-defined]
    number, order = rng.permutation(t.elements), rng.permutation(t.rows)
    c = COMPONENTS
    renamed = replace(
        c,
        index={e: int(number[i]) for e, i in c.index.items()},
        elements=number[c.elements],
        element_ptr=pointer(np.diff(c.element_ptr)[np.argsort(number)]),
        element_singles=np.concatenate([c.singles_of(int(e)) for e in np.argsort(number)]),
    )
    mixed = table([counts[i] for i in order])
    mixed = Table(
        mixed.elements,
        mixed.path_ptr,
        number[mixed.path_elements],
        mixed.set_ptr,
        mixed.row_set,
        mixed.sent,
        mixed.lost,
    )
    one, other = hazards(t, bursts=1e-5), hazards(mixed, renamed, bursts=1e-5)
    assert one.scan(one.given([], BACKGROUND)) == pytest.approx(
        other.scan(other.given([], BACKGROUND)), rel=1e-6, abs=1e-6
    )


@settings(max_examples=60, deadline=None)
@given(tables, st.integers(0, len(ROUTES) - 1), st.integers(1, 500))
def test_clean_flows_never_raise_the_suspicion_of_what_they_cross(
    counts: list[tuple[int, int, int]], route: int, sent: int
) -> None:
    before, after = hazards(table(counts), bursts=1e-5), hazards(table([*counts, (route, sent, 0)]), bursts=1e-5)
    for single in range(before.number):
        if set(COMPONENTS.of(single)) & set(ROUTES[route]):
            a = before.fit(before.given([], BACKGROUND), single, shares=False)
            b = after.fit(after.given([], BACKGROUND), single, shares=False)
            assert b.gain <= a.gain + 0.02 + 2e-3 * abs(a.gain)


@settings(max_examples=60, deadline=None)
@given(tables, singles, st.integers(1, 5))
def test_evidence_grows_with_losses(counts: list[tuple[int, int, int]], single: int, more: int) -> None:
    crossing = [
        i for i, (r, n, k) in enumerate(counts) if set(COMPONENTS.of(single)) & set(ROUTES[r]) and k + more <= n
    ]
    if not crossing:
        return
    i = crossing[0]
    worse = [*counts]
    worse[i] = (counts[i][0], counts[i][1], counts[i][2] + more)
    before, after = hazards(table(counts)), hazards(table(worse))
    a = before.fit(before.given([], BACKGROUND), single, shares=False)
    b = after.fit(after.given([], BACKGROUND), single, shares=False)
    assert b.gain >= a.gain - 0.02 - 2e-3 * abs(a.gain)


def hidden(counts: list[tuple[list[int], int, int]]) -> Table:
    """(alternative routes, sent, lost) of each flow."""
    paths = [ROUTES[r] for routes, _, _ in counts for r in routes]
    sent: Floats = np.array([s for _, s, _ in counts], np.float64)
    flat: Ints = np.array([e for p in paths for e in p], np.int64)
    return Table(
        elements=len(COMPONENTS.index),
        path_ptr=pointer([len(p) for p in paths]),
        path_elements=flat,
        set_ptr=pointer([len(routes) for routes, _, _ in counts]),
        row_set=np.arange(len(counts)),
        sent=sent,
        lost=np.array([k for _, _, k in counts], np.float64),
    )


@settings(max_examples=40, deadline=None)
@given(tables, singles)
def test_a_hidden_path_that_can_only_be_one_is_as_good_as_known(
    counts: list[tuple[int, int, int]], single: int
) -> None:
    """Twice the same alternative is one path: rows of unknown path must count as those of known path do."""
    known, twice = hazards(table(counts)), hazards(hidden([([r, r], n, k) for r, n, k in counts]))
    a = known.fit(known.given([], BACKGROUND), single, shares=False)
    b = twice.fit(twice.given([], BACKGROUND), single, shares=False)
    # Clean flows of about equal size are pooled where the path is hidden.
    assert b.gain == pytest.approx(a.gain, rel=0.02, abs=0.1)


@settings(max_examples=40, deadline=None)
@given(tables, singles)
def test_singles_that_are_alike_have_the_same_fit(counts: list[tuple[int, int, int]], single: int) -> None:
    """Of round trips that nobody traced every way there is one with the same way back."""
    back = [[COMPONENTS.index[e] for e in path] for path in map(mirrored, range(len(ROUTES)))]
    t = known_paths(
        len(COMPONENTS.index),
        padded([ROUTES[r] + back[r] for r, _, _ in counts]),
        [s for _, s, _ in counts],
        [k for _, _, k in counts],
    )
    h = hazards(t)
    twin = COMPONENTS.partner.get(single)
    if twin is None:
        return
    assert h.alike(single) == h.alike(twin)
    given_nothing = h.given([], BACKGROUND)
    one, other = h.fit(given_nothing, single), h.fit(given_nothing, twin)
    assert (one.gain, one.healthy, one.lossy.hazard) == (other.gain, other.healthy, other.lossy.hazard)
    beside = h.given([one.lossy], BACKGROUND)
    assert h.fit(beside, twin, shares=False).gain < MIN_PART_SCORE


def mirrored(route: int) -> list[str]:
    """The elements of the way back."""
    names = {i: e for e, i in COMPONENTS.index.items()}
    out = []
    for e in (names[i] for i in ROUTES[route]):
        a, is_link, b = e.partition("->")
        out.append(f"{b}->{a}" if is_link else e[:-2] + {"tx": "rx", "rx": "tx"}[e[-2:]])
    return out


def padded(paths: list[list[int]]) -> Ints:
    width = max(map(len, paths))
    return np.array([p + [-1] * (width - len(p)) for p in paths], np.int64)


def test_what_is_given_explains_its_losses() -> None:
    t = table([(0, 100, 30), (0, 100, 28), (0, 100, 31)])
    h = hazards(t, bursts=1e-5)
    nothing = h.given([], BACKGROUND)
    first = int(np.argmax(h.scan(nothing)))
    fit = h.fit(nothing, first)
    assert fit.gain > 25
    assert h.scan(h.given([fit.lossy], BACKGROUND)).max() < 3


def test_losses_that_are_no_longer_the_backgrounds_are_worth_more_the_more_of_them() -> None:
    own = np.array([0.0, 1, 3, 10])
    earned, owed = relief(own, 12.0), burden(own, 2.0)
    assert earned[0] == pytest.approx(0, abs=1e-6)
    assert owed[0] == pytest.approx(0, abs=1e-6)
    assert (np.diff(earned) > 0).all()
    assert (np.diff(owed) > 0).all()
    assert relief(np.array(12.0), 12.0) > relief(np.array(12.0), 1000.0)


NATS = st.floats(-1e4, 1e4)
SHARES = st.one_of(st.sampled_from([0.0, 1.0, 1e-300, 1e-12]), st.floats(0.0, 1.0))


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(NATS, NATS, SHARES), min_size=1, max_size=5), st.booleans())
def test_a_gain_is_bounded_by_bursts_and_other_paths(rows: list[tuple[float, float, float]], hidden: bool) -> None:
    gain, burst, weight = (np.array(column) for column in zip(*rows, strict=True))
    plain = gain
    if hidden:
        with np.errstate(divide="ignore"):
            plain = np.logaddexp(np.log1p(-weight), np.log(weight) + gain)
    expected = np.logaddexp(plain, burst) - np.logaddexp(0.0, burst)
    found = Cap.of(burst, weight if hidden else None).of_gain(gain.copy())
    # What is unlikelier than that is as bad as any.
    assert np.maximum(found, -400) == pytest.approx(np.maximum(expected, -400), rel=1e-9, abs=1e-9)
    some = np.flatnonzero(gain > 0)
    again = Cap.of(burst, weight if hidden else None).some(some).of_gain(gain[some])
    assert again == pytest.approx(found[some])
