"""Which components make round trips late: a sparse additive model over the paths there and back.

A round trip takes its usual time and what is added where it passes: `excess = sum(crossings x delay) + noise`. Which
components add something is searched as the localiser does it for losses: greedily, by likelihood ratio, all components
rivals of each other, the delay of each estimated, those that explain as much given back as alternatives. The same
additive idea, with link delays inferred from end-to-end ones, is network tomography (Coates et al. 2002, "Internet
tomography", §III; Duffield et al. 2006 for the sparsest explanation); Liu et al. 2024, §4.3 gives no localisation of
delays but a vote of the flows over a percentile.

Noise is taken as Student's t with few degrees of freedom, so that one flow's outlier is worth some nats and never more
than many flows; a queue is not equally deep for everyone, so that flows that cross a slow component may differ by a
share of its delay. Beside the components there are causes that are no fault of the fabric (`Cause`): everything is
slower, all flows of as many hops are, or all that one prober measures or one responder answers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from pingmesh.analyzer.candidates import Candidate, candidates_of
from pingmesh.analyzer.components import Components
from pingmesh.analyzer.flows import PathSet
from pingmesh.analyzer.search import EXTRA_COST, MARGIN, NEAR, SLACK
from pingmesh.analyzer.table import Bools, Floats, Ints, expand, pointer
from topology.model import Topology

FREEDOM = 3.0
"""Degrees of freedom of the noise."""
UNEVEN = 0.35
"""Share of a delay by which flows that meet it differ."""
THRESHOLD = 6.0
"""Prior log odds (nats) against any slow component, on top of the logarithm of their number."""
COMMON_COST = 2.0
"""What it costs (nats) that everything, or everything of as many hops, is slower."""
END_DISCOUNT = 3.0
"""Nats by which a slow prober or responder is likelier than a slow component."""
MAX_CHOSEN = 24
SHORTLIST = 40
LEAST_Z, OUTSTANDING_Z = 2.5, 4.0
CLIP = (-3.0, 4.0)
"""Standard errors that one flow counts for at most in a quick look."""
SHAPES = 16
"""Numbers of hops that are told apart."""
_QUANTILES = (0.1, 0.25, 0.4, 0.5, 0.65, 0.8, 0.9, 0.97)
_HALF_CHI2 = 1.92
"""Half the 95 % quantile of chi squared with one degree of freedom."""


class Cause(IntEnum):
    """What may make round trips longer."""

    COMPONENT = 0
    FABRIC = 1
    HOPS = 2
    PROBER = 3
    RESPONDER = 4


def delay_candidates(topology: Topology) -> list[Candidate]:
    """What may be slow: all that may be broken, and of each switch with RNICs also its links to other switches alone.

    Back-pressure and routing delay those and not what stays under the switch; as every round trip beyond it takes one
    of them up and one down, which of the two ways it is cannot be told.
    """
    out = candidates_of(topology)
    tors = {leg.switch for rnic in topology.rnics.values() for leg in rnic.legs}
    for switch in sorted(tors):
        links = frozenset(d.name for d in topology.directed_links if switch in (d.source, d.target))
        if links:
            out.append(Candidate(switch, "switch", None, links))
    return out


@dataclass(frozen=True, slots=True, eq=False)
class Crossings:
    """What one pair of path sets, there and back, crosses: singles of `Components`, in ascending order.

    `share` is the chance that a packet crosses at all (1 where both paths are known), `times` how often it does then
    (2 for a switch on both ways).
    """

    singles: Ints
    share: Floats
    times: Floats


def crossings_of(components: Components, there: PathSet, back: PathSet) -> Crossings:
    """Crossings of a round trip. O(paths x hops).

    >>> from pingmesh.analyzer.components import compile_components
    >>> tx, rx = (Candidate("h/0", "rnic", s, frozenset({f"h/0 {s}"})) for s in ("tx", "rx"))
    >>> both = Candidate("s", "switch", None, frozenset({"h/0 tx", "h/0 rx"}))
    >>> found = crossings_of(compile_components([tx, rx, both]), (("h/0 tx",),), (("h/0 rx",),))
    >>> found.singles.tolist(), found.share.tolist(), found.times.tolist()
    ([0, 1, 2], [1.0, 1.0, 1.0], [1.0, 1.0, 2.0])
    """
    ways: list[dict[int, float]] = []
    for paths in (there, back):
        share: dict[int, float] = {}
        for path in paths:
            numbers = {components.index[e] for e in path if e in components.index}
            for single in {s for e in numbers for s in components.singles_of(e).tolist()}:
                share[single] = share.get(single, 0.0) + 1.0 / len(paths)
        ways.append(share)
    singles = sorted(ways[0].keys() | ways[1].keys())
    a = np.array([ways[0].get(s, 0.0) for s in singles])
    b = np.array([ways[1].get(s, 0.0) for s in singles])
    sure = (a > 1 - 1e-9) & (b > 1 - 1e-9)
    share_of = np.minimum(1.0, 1.0 - (1.0 - a) * (1.0 - b))
    share_of[share_of > 1 - 1e-9] = 1.0
    return Crossings(np.array(singles, np.int64), share_of, np.where(sure, 2.0, 1.0))


@dataclass(frozen=True, slots=True, eq=False)
class DelayTable:
    """One row a flow and path: how much longer than usual its round trips take, (rows,) nanoseconds each.

    `scale` is the standard error of `excess`, > 0. `prober` and `responder` number RNICs in any way, `hops` is the
    number of elements of the round trip. `ptr` is CSR: row -> positions in `singles`, `share`, `times` (see
    `Crossings`).
    """

    excess: Floats
    scale: Floats
    prober: Ints
    responder: Ints
    hops: Ints
    ptr: Ints
    singles: Ints
    share: Floats
    times: Floats

    @property
    def rows(self) -> int:
        """Number of flows."""
        return len(self.excess)


@dataclass(frozen=True, slots=True)
class DelaySuspect:
    """A component that makes round trips longer.

    `delay_ns` is what it adds each time it is crossed, `excess_ns` what the typical round trip across it takes longer,
    with a 95 % interval. Of the `flows` that (probably) cross it the `share` is affected, by `probers` different
    probers. `score` is the log likelihood ratio (nats) given the other suspects; `confidence` its posterior share
    against rivals and chance. `alternatives` are what can hardly be told apart from it, `equals` those of them that
    explain it exactly as well, `excuses` causes outside the fabric that do nearly.
    """

    candidate: Candidate
    delay_ns: float
    excess_ns: float
    low_ns: float
    high_ns: float
    share: float
    flows: int
    probers: int
    score: float
    confidence: float
    alternatives: tuple[Candidate, ...]
    equals: tuple[Candidate, ...]
    excuses: tuple[Cause, ...]
    rows: Ints
    """Rows of the table that it affects."""


@dataclass(frozen=True, slots=True)
class _Slow:
    """A single (or cause) taken as slow."""

    single: int
    delay: float
    score: float
    cost: float

    @property
    def worth(self) -> float:
        return self.score - self.cost


def stands_out(table: DelayTable, singles: int) -> bool:
    """Whether any component's flows are late enough, beside the others, for a search to be worth it. O(crossings).

    A sound component of the few thousand looked at is rarely late by four standard errors, one that could be named
    hardly ever by less.
    """
    z = np.clip((table.excess - np.median(table.excess)) / table.scale, *CLIP)
    owner = np.repeat(np.arange(table.rows), np.diff(table.ptr))
    summed = np.bincount(table.singles, weights=table.share * z[owner], minlength=singles)
    weight = np.bincount(table.singles, weights=table.share, minlength=singles)
    return bool((summed > OUTSTANDING_Z * np.sqrt(weight))[weight > 0].any())


def explain_delays(
    table: DelayTable, components: Components, *, threshold: float = THRESHOLD, least_ns: float = 0.0
) -> list[DelaySuspect]:
    """Name the components that make round trips longer, highest score first; none where chance or no fault of the
    fabric explains it.

    `least_ns` is the delay below which nothing is named (it is explained away all the same). Flows of which all
    crossings are uncertain count by the chance that they cross. O(crossings) sums a step of the greedy search, and
    exact fits of the few dozen best.
    """
    if not table.rows or not components.singles:
        return []
    search = _Search(table, components, threshold)
    chosen = search.run()
    found = []
    for i, x in enumerate(chosen):
        if x.single < search.number and x.delay >= least_ns:
            found.append(search.suspect(chosen, i))
    return sorted(found, key=lambda s: (-round(s.score, 6), s.candidate.order))


class _Search:
    """One run over one table."""

    def __init__(self, table: DelayTable, components: Components, threshold: float) -> None:
        self.table, self.components = table, components
        self.number = number = len(components.singles)
        rows = np.arange(table.rows)
        probers, prober = np.unique(table.prober, return_inverse=True)
        responders, responder = np.unique(table.responder, return_inverse=True)
        first = np.cumsum([number, 1, SHAPES, len(probers), len(responders)])
        self.bounds = first
        owner = np.repeat(rows, np.diff(table.ptr))
        ones = np.ones(table.rows)
        single = np.concatenate(
            (
                table.singles,
                np.full(table.rows, first[0]),
                first[1] + np.minimum(table.hops, SHAPES - 1),
                first[2] + prober,
                first[3] + responder,
            )
        )
        order = np.argsort(single, kind="stable")
        self.row = np.concatenate((owner, rows, rows, rows, rows))[order]
        self.single = single[order]
        self.share = np.concatenate((table.share, ones, ones, ones, ones))[order]
        self.times = np.concatenate((table.times, ones, ones, ones, ones))[order]
        self.total = int(first[-1])
        self.ptr = pointer(np.bincount(self.single, minlength=self.total))
        self.weight = np.sqrt(np.maximum(np.bincount(self.single, weights=self.share, minlength=self.total), 1e-9))
        self.is_group = np.zeros(self.total, bool)
        self.is_group[components.groups] = True
        self.costs = np.full(self.total, math.log(max(number - len(components.groups), 1)) + threshold)
        for g in components.groups:
            self.costs[g] += EXTRA_COST[components.singles[g].type]
        self.costs[first[0] : first[2]] = COMMON_COST
        self.costs[first[2] :] = math.log(max(len(probers) + len(responders), 1)) + threshold - END_DISCOUNT

    def run(self) -> list[_Slow]:
        chosen = self.greedy([])
        for _ in range(3):
            before = {x.single for x in chosen}
            chosen = self.greedy(self.exchange(self.merge(self.prune(chosen))))
            if {x.single for x in chosen} == before:
                break
        return self.prune(chosen)

    def cause(self, single: int) -> Cause:
        return Cause(int(np.searchsorted(self.bounds, single, side="right")))

    # ------------------------------------------------------------ fits

    def is_common(self, single: int) -> bool:
        return bool(self.bounds[0] <= single < self.bounds[2])

    def of(self, single: int) -> slice:
        return slice(int(self.ptr[single]), int(self.ptr[single + 1]))

    def state(self, chosen: Sequence[_Slow]) -> tuple[Floats, Floats]:
        """(residual, variance) of each row beside what is chosen."""
        residual = self.table.excess.astype(np.float64)
        variance = np.square(self.table.scale.astype(np.float64))
        for x in chosen:
            at = self.of(x.single)
            row, share, added = self.row[at], self.share[at], self.times[at] * x.delay
            surely = share
            if np.any(share < 1):
                gain = _gain(residual[row], variance[row], np.ones(len(row)), self.times[at], x.delay)
                odds = np.exp(np.clip(gain, -50, 50)) * share
                surely = odds / (odds + 1 - share)
            residual[row] -= surely * added
            variance[row] += surely * np.square(UNEVEN * added) + surely * (1 - surely) * np.square(added)
        return residual, variance

    def fit(self, single: int, state: tuple[Floats, Floats], cost: float | None = None, near: float = 0.0) -> _Slow:
        """The delay of a single that makes the rows most likely, beside the state; `near`: about what it is."""
        at = self.of(single)
        row, share, times = self.row[at], self.share[at], self.times[at]
        cost = float(self.costs[single]) if cost is None else cost
        residual, variance = state[0][row], state[1][row]
        if near:
            guesses = np.array([near])
        elif len(row):
            guesses = _quantiles(residual / times)
            # What all have in common may as well be less; nothing else is quicker than it was.
            guesses = guesses[guesses != 0] if self.is_common(single) else guesses[guesses > 0]
        if not len(row) or not len(guesses):
            return _Slow(single, 0.0, 0.0, cost)
        scores = self.scores(guesses, residual, variance, share, times)
        best, score, step = float(guesses[scores.argmax()]), float(scores.max()), 1.5
        for _ in range(4):
            around = best * np.array([1 / step, 1 / math.sqrt(step), math.sqrt(step), step])
            scores = self.scores(around, residual, variance, share, times)
            if scores.max() > score:
                best, score = float(around[scores.argmax()]), float(scores.max())
            else:
                step = math.sqrt(math.sqrt(step))
        return _Slow(single, best, max(score, 0.0), cost)

    def rough(self, single: int, state: tuple[Floats, Floats]) -> float:
        """About what `fit` would score, some nats less at most where it matters."""
        at = self.of(single)
        row, share, times = self.row[at], self.share[at], self.times[at]
        residual, variance = state[0][row], state[1][row]
        guesses = _quantiles(residual / times) if len(row) else np.empty(0)
        guesses = guesses[guesses != 0] if self.is_common(single) else guesses[guesses > 0]
        if not len(guesses):
            return 0.0
        return float(self.scores(guesses, residual, variance, share, times).max())

    @staticmethod
    def scores(delays: Floats, residual: Floats, variance: Floats, share: Floats, times: Floats) -> Floats:
        """Log likelihood ratio of each delay against none."""
        return np.asarray(_gain(residual, variance, share, times, delays[:, None]).sum(axis=1))

    # ------------------------------------------------------------ greedy

    def quick(self, state: tuple[Floats, Floats]) -> Floats:
        """How many standard errors the rows of each single are late, outliers clipped."""
        z = np.clip(state[0] / np.sqrt(state[1]), *CLIP)
        summed = np.bincount(self.single, weights=self.share * z[self.row], minlength=self.total)
        summed[self.bounds[0] : self.bounds[2]] = np.abs(summed[self.bounds[0] : self.bounds[2]])
        return np.asarray(summed / self.weight)

    def greedy(self, chosen: Sequence[_Slow]) -> list[_Slow]:
        out = list(chosen)
        while len(out) < MAX_CHOSEN:
            state = self.state(out)
            z = self.quick(state)
            z[[x.single for x in out]] = -np.inf
            near = np.flatnonzero(z > LEAST_Z)
            near = near[np.argsort(-z[near], kind="stable")][:SHORTLIST]
            rough = np.array([self.rough(int(s), state) for s in near]) - self.costs[near]
            fits = [self.fit(int(s), state) for s in near[rough > max(rough.max(initial=0.0), 0.0) - SLACK]]
            best = max(fits, key=lambda x: (x.worth, -x.single), default=None)
            if best is None or best.worth <= 0:
                break
            out = self.refit([*out, best])
        return out

    def refit(self, chosen: Sequence[_Slow]) -> list[_Slow]:
        """Each again beside the others."""
        out = list(chosen)
        for i, x in enumerate(out):
            out[i] = self.fit(x.single, self.state([*out[:i], *out[i + 1 :]]), x.cost, x.delay)
        return out

    def prune(self, chosen: Sequence[_Slow]) -> list[_Slow]:
        """Drop what the others explain, the least worthy first."""
        out = self.refit(chosen)
        while out:
            least = min(range(len(out)), key=lambda i: (out[i].worth, -out[i].single))
            if out[least].worth > 0:
                break
            out = self.refit([*out[:least], *out[least + 1 :]])
        return out

    def merge(self, chosen: Sequence[_Slow]) -> list[_Slow]:
        """Replace suspects by a group that holds at least two of them and explains as much for less."""
        out, c = list(chosen), self.components
        mine = [x.single for x in out if x.single < self.number]
        groups = {int(g) for s in mine for e in c.of(s) for g in c.singles_of(e) if self.is_group[g]}
        for g in sorted(groups, key=lambda g: (len(c.of(g)), g)):
            elements = set(c.of(g))
            members = [x for x in out if x.single < self.number and set(c.of(x.single)) < elements]
            if len(members) < 2:
                continue
            rest = [x for x in out if x not in members]
            whole, apart, added = self.fit(g, self.state(rest)), 0.0, list(rest)
            for x in members:
                added.append(self.fit(x.single, self.state(added), x.cost))
                apart += added[-1].worth
            if whole.worth > apart:
                out = [*rest, whole]
        return out

    def exchange(self, chosen: Sequence[_Slow]) -> list[_Slow]:
        """Put a better rival in the place of each suspect, given all others, while there is one."""
        out = list(chosen)
        for _ in range(3):
            moved = False
            for i in range(len(out)):
                mine, rivals = self.rivals(out, i)
                better = max(rivals, key=lambda r: (r.worth, -r.single), default=mine)
                if better.worth > mine.worth + 1e-6:
                    out[i], moved = better, True
            if not moved:
                break
        return out

    def rivals(self, chosen: Sequence[_Slow], i: int) -> tuple[_Slow, list[_Slow]]:
        """A suspect beside all others, and what touches most of its evidence in its place, exactly fitted."""
        others = [*chosen[:i], *chosen[i + 1 :]]
        state = self.state(others)
        mine = self.fit(chosen[i].single, state, chosen[i].cost)
        at = self.of(mine.single)
        gain = _gain(state[0][self.row[at]], state[1][self.row[at]], self.share[at], self.times[at], mine.delay)
        own = np.zeros(self.table.rows)
        own[self.row[at]] = np.maximum(gain, 0.0)
        touching = np.bincount(self.single, weights=own[self.row], minlength=self.total)
        touching[[x.single for x in chosen]] = 0.0
        near = np.flatnonzero(touching >= NEAR * own.sum()) if own.any() else np.empty(0, np.int64)
        near = np.array([s for s in near.tolist() if self.rough(s, state) > mine.score - MARGIN - SLACK], np.int64)
        return mine, [r for s in near.tolist() if (r := self.fit(s, state)).score > 0]

    # ------------------------------------------------------------ what is told

    def suspect(self, chosen: Sequence[_Slow], i: int) -> DelaySuspect:
        """What the evidence says of one of the chosen, given the others."""
        x, rivals = self.rivals(chosen, i)
        state = self.state([*chosen[:i], *chosen[i + 1 :]])
        at = self.of(x.single)
        row, share, times = self.row[at], self.share[at], self.times[at]
        residual, variance = state[0][row], state[1][row]
        low, high = self.interval(x, residual, variance, share, times)
        hit = residual > 0.5 * times * x.delay
        often = float(np.median(times[hit])) if hit.any() else 1.0
        # The likeliest delay lies low, for a small one is sharper.
        delay = float(np.median(residual[hit] / times[hit])) if hit.any() else x.delay
        near = [r for r in rivals if r.score >= x.score - MARGIN]
        mass = sum(math.exp(min(r.worth - x.worth, 50.0)) for r in rivals)
        named = [r for r in near if r.single < self.number]
        singles = self.components.singles
        return DelaySuspect(
            candidate=singles[x.single],
            delay_ns=delay,
            excess_ns=delay * often,
            low_ns=min(low, delay) * often,
            high_ns=max(high, delay) * often,
            share=float(share[hit].sum() / max(share.sum(), 1e-9)),
            flows=round(float(share.sum())),
            probers=len(np.unique(self.table.prober[row[hit]])),
            score=x.score,
            confidence=1 / (1 + mass + math.exp(min(-x.worth, 50.0))),
            alternatives=tuple(singles[r.single] for r in named),
            equals=tuple(singles[r.single] for r in named if abs(r.score - x.score) < 0.05),
            excuses=tuple(sorted({self.cause(r.single) for r in near if r.single >= self.number})),
            rows=row[hit],
        )

    def interval(
        self, x: _Slow, residual: Floats, variance: Floats, share: Floats, times: Floats
    ) -> tuple[float, float]:
        """The delays that are hardly less likely (95 % by likelihood ratio)."""

        def edge(far: float) -> float:
            near = x.delay
            for _ in range(12):
                middle = np.array([math.sqrt(near * far)])
                likely = self.scores(middle, residual, variance, share, times)[0] >= x.score - _HALF_CHI2
                near, far = (float(middle[0]), far) if likely else (near, float(middle[0]))
            return near

        return edge(x.delay / 10), edge(x.delay * 10)


def _quantiles(values: Floats) -> Floats:
    """Some quantiles, each once."""
    ordered = np.sort(values)
    return np.unique(ordered[[int(q * (len(values) - 1) + 0.5) for q in _QUANTILES]])


def _gain(residual: Floats, variance: Floats, share: Floats, times: Floats, delay: float | Floats) -> Floats:
    """Log likelihood ratio of each row with a delay against none, where it crosses with a chance of `share`."""
    added = times * delay
    wider = variance + np.square(UNEVEN * added)
    left = residual - added
    nats = -0.5 * np.log(wider / variance) - 0.5 * (FREEDOM + 1) * (
        np.log1p(np.square(left) / (FREEDOM * wider)) - np.log1p(np.square(residual) / (FREEDOM * variance))
    )
    if share.min(initial=1.0) >= 1:
        return np.asarray(nats)
    with np.errstate(divide="ignore"):
        return np.asarray(np.logaddexp(np.log(share) + nats, np.log1p(-share)))


def table_of(
    crossings: Sequence[Crossings],
    excess: Floats,
    scale: Floats,
    prober: Ints,
    responder: Ints,
    hops: Ints,
) -> DelayTable:
    """A table of rows with their crossings. O(crossings)."""
    empty = np.empty(0)
    return DelayTable(
        excess=excess,
        scale=scale,
        prober=prober,
        responder=responder,
        hops=hops,
        ptr=pointer([len(c.singles) for c in crossings]),
        singles=np.concatenate([c.singles for c in crossings] or [empty.astype(np.int64)]),
        share=np.concatenate([c.share for c in crossings] or [empty]),
        times=np.concatenate([c.times for c in crossings] or [empty]),
    )


def select(table: DelayTable, keep: Bools) -> DelayTable:
    """Only some rows. O(crossings)."""
    rows = np.flatnonzero(keep)
    at, owner = expand(table.ptr, rows)
    return DelayTable(
        excess=table.excess[rows],
        scale=table.scale[rows],
        prober=table.prober[rows],
        responder=table.responder[rows],
        hops=table.hops[rows],
        ptr=pointer(np.bincount(owner, minlength=len(rows))),
        singles=table.singles[at],
        share=table.share[at],
        times=table.times[at],
    )
