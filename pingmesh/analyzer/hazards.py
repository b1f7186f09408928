"""How much better the counts are explained when a component drops packets, for all components at once.

Each element that a packet crosses has a hazard `-log(1 - drop probability)`; hazards along a path add up, so a flow
that sent n packets and lost k over a path of total hazard H has the log likelihood

    k log(1 - exp(-H)) - (n - k) H.

The second term is linear: clean flows of known path enter as one sum an element. Only flows with losses, and flows
whose path is one of several, are kept one by one. The model of the losses is that of Flock (Harsh et al. 2023), with
hazards estimated instead of fixed, and with a share of flows that lost packets in a burst (any number of them).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pingmesh.analyzer.components import Components
from pingmesh.analyzer.nats import PRIOR_LOST, Cap, between, log_factorial, log_loss, relief, steps
from pingmesh.analyzer.table import Bools, Floats, Ints, Table, expand, pointer

HAZARD_MAX = -math.log(1e-4)
OUTLIER = 0.3
"""Share of the flows through a lossy component that may lose any number of packets: real faults are not binomial, and
what a fault does to its own flows must not accuse the other elements of those flows."""
SHARE_HAZARDS = -np.log1p(-np.array([0.1, 0.3, 0.7, 0.97, 0.9999]))
"""A component that drops a share of the flows drops at least a tenth of each."""
SHARE_COST = 3.0
"""Nats that the second parameter of such a component must earn."""
HEAVY = 0.05
"""Loss rate of a flow from which a share of flows is worth a try."""
BACKGROUND_MAX = 0.01
"""What a flow loses beyond this rate (and beyond one packet) is never the background's."""
TOLERATED = 1.5
"""A healthy element may lose this many times the background on top of it: backgrounds are not uniform."""
KEPT = 64
"""States of `Hazards.given` that are kept."""
COARSE, FINE = np.arange(24) / 23, np.arange(7) / 6
"""Where hazards are tried."""


@dataclass(frozen=True, slots=True)
class Lossy:
    """A single (see `Components`) that drops packets with a hazard, in a `share` of its flows."""

    single: int
    hazard: float
    share: float = 1.0


@dataclass(frozen=True, slots=True)
class Fit:
    """The likeliest hazard of a single, with log likelihood ratios (nats) against no hazard of its own at all."""

    gain: float
    healthy: float
    """That of the hazard that a healthy element may have; >= 0."""
    lossy: Lossy


@dataclass(frozen=True, slots=True, eq=False)
class Given:
    """What is known when some singles are taken as lossy: per pair (single, group), and per group."""

    lossy: tuple[Lossy, ...]
    weight: Floats
    """Probability that the group took a path through the single."""
    hazard: Floats
    """Of the group's path, when it went through the single; where all paths are known, per group."""
    burst: Floats
    """Per group: log odds of a burst against the model."""
    sparse: Floats
    """Per group: share of its losses that are the background's, and no burst, if nothing else is broken (expected)."""
    background: float


class Hazards:
    """Scores singles on one table. A *group* is a flow with losses, or equal clean flows of unknown path.

    Building it is O(rows x hops) for the sums, and O(p log p) for the p pairs of a group and a single that it may
    touch. `noise` is the drop rate up to which an element is healthy, whatever the others do.
    """

    def __init__(self, table: Table, components: Components, noise: float, bursts: float) -> None:
        t = self.table = table
        self.components = components
        self.number = len(components.singles)
        self.bursts = bursts
        sizes, lengths = np.diff(t.set_ptr), np.diff(t.path_ptr)
        sets = len(sizes)
        path_set = np.repeat(np.arange(sets), sizes)
        is_known, is_lossy = (sizes == 1)[t.row_set], t.lost > 0
        clean = is_known & ~is_lossy
        hops_of_set = np.bincount(path_set, weights=lengths, minlength=sets) / np.maximum(sizes, 1)
        self.exposure = float(t.sent @ hops_of_set[t.row_set])
        """Packets times elements crossed."""
        self.noise = noise
        self.prior_exposure = 4 * PRIOR_LOST / max(noise, 1e-7)

        def by_single(of_row: Floats) -> Floats:
            of_set = np.bincount(t.row_set, weights=of_row, minlength=sets)
            weights = np.repeat(of_set[path_set], lengths)
            of_element = np.bincount(t.path_elements, weights=weights, minlength=t.elements)
            return components.sums(of_element[: len(components.index)])

        self._by_single = by_single
        self._clean = clean
        self.clean = by_single(t.sent * clean)
        """Packets of clean flows of known path, times elements of the single that they crossed."""

        rows = np.flatnonzero(is_lossy)
        group_set, sent, lost, flows = t.row_set[rows], t.sent[rows], t.lost[rows], np.ones(len(rows))
        hidden = np.flatnonzero(~is_known & ~is_lossy)
        self.has_hidden = bool(len(hidden)) or bool(np.any(sizes[group_set] > 1))
        self.group_row = rows
        if len(hidden):
            size = np.round(2 * np.log2(np.maximum(t.sent[hidden], 1))).astype(np.int64)
            keys, where = np.unique(t.row_set[hidden] * 256 + size, return_inverse=True)
            count = np.bincount(where).astype(np.float64)
            group_set = np.concatenate((group_set, keys // 256))
            sent = np.concatenate((sent, np.bincount(where, weights=t.sent[hidden]) / count))
            lost = np.concatenate((lost, np.zeros(len(keys))))
            flows = np.concatenate((flows, count))
        self.group_set, self.sent_of, self.lost_of, self.flows = group_set, sent, lost, flows
        self.most = np.minimum(lost, np.maximum(1.0, max(BACKGROUND_MAX, 4 * noise) * sent))
        """Losses of a flow of each group that may be the background's."""
        self.lost = float(self.most @ flows)
        # A burst: any number of losses, 1 / (n + 1), less the coefficient that the likelihoods leave out.
        self._any = -np.log(sent + 1) - (log_factorial(sent) - log_factorial(lost) - log_factorial(sent - lost))
        self._known: dict[tuple[float | Lossy, ...], Given] = {}
        self._alike: dict[int, int] = {}
        self._first: dict[tuple[bytes, bytes, float, float], int] = {}
        self._index(lengths)

    def _index(self, lengths: Ints) -> None:
        """Rows are (group, alternative path); triples (single, row); pairs (single, group)."""
        t, c = self.table, self.components
        paths, self.row_group = expand(t.set_ptr, self.group_set)
        groups = len(self.group_set)
        self.row_hops = lengths[paths].astype(np.float64)
        self.row_ptr = np.searchsorted(self.row_group, np.arange(groups + 1))
        positions, row = expand(t.path_ptr, paths)
        element = t.path_elements[positions]
        if t.elements > len(c.index):
            row, element = row[element < len(c.index)], element[element < len(c.index)]
        positions, of = expand(c.element_ptr, element)
        single, row = c.element_singles[positions], row[of]
        # The rows ascend already. Numbers of 16 bits are sorted without comparing them.
        order = np.argsort(single.astype(np.uint16) if self.number < 1 << 16 else single, kind="stable")
        single, row = single[order], row[order]
        first = np.ones(len(single), bool)
        first[1:] = (single[1:] != single[:-1]) | (row[1:] != row[:-1])
        starts = np.flatnonzero(first)
        single, self.triple_row = single[starts], row[starts]
        self.triple_times = np.diff(starts, append=len(first)).astype(np.float64)
        if self.has_hidden:
            pair_key = single * max(groups, 1) + self.row_group[self.triple_row]
            first = np.ones(len(pair_key), bool)
            first[1:] = pair_key[1:] != pair_key[:-1]
            starts = np.flatnonzero(first)
            self.triple_ptr = np.append(starts, len(pair_key))
            self.pair_single, self.pair_group = np.divmod(pair_key[starts], max(groups, 1))
            self.times = np.add.reduceat(self.triple_times, starts) / np.diff(self.triple_ptr)
        else:
            self.pair_single, self.pair_group, self.times = single, self.row_group[self.triple_row], self.triple_times
        self.pair_ptr = np.searchsorted(self.pair_single, np.arange(self.number + 1))
        self._sure = np.ones(len(self.pair_group))
        g = self.pair_group
        self._lost = self.lost_of[g] * self.flows[g]
        self._is_heavy = (self.lost_of > HEAVY * self.sent_of)[g]
        self._got = (self.sent_of - self.lost_of)[g] * self.flows[g] * self.times

    # ------------------------------------------------------------ what is given

    def background_of(self, lost: float) -> float:
        """Hazard of one healthy element, when this many losses are unexplained."""
        return (lost + PRIOR_LOST) / (self.exposure + self.prior_exposure)

    def given(self, lossy: Sequence[Lossy], background: float) -> Given:
        """Take `lossy` as broken and everything else as healthy. O(rows + pairs); the last ones asked for are kept."""
        key: tuple[float | Lossy, ...] = (background, *lossy)
        if key not in self._known:
            if len(self._known) >= KEPT:
                self._known.pop(next(iter(self._known)))
            self._known[key] = self._given(lossy, background)
        return self._known[key]

    def hazards_of(self, given: Given, pairs: Ints | slice) -> Floats:
        """Of the paths of some pairs."""
        return given.hazard[pairs] if self.has_hidden else given.hazard[self.pair_group[pairs]]

    def _given(self, lossy: Sequence[Lossy], background: float) -> Given:
        hazard = background * self.row_hops
        crossing = np.zeros(len(self.group_set), bool)
        for x in lossy:
            rows, times = self._rows(x.single)
            add = times * x.hazard
            if x.share < 1:
                odds = math.log(x.share / (1 - x.share)) + self._row_gain(rows, hazard[rows], add)
                add = add / (1 + np.exp(-between(odds, -50, 50)))
            hazard[rows] += add
            crossing[self.row_group[rows]] = True
        if not lossy:
            everything = slice(None)
            if self.has_hidden:
                weight, of_pair, of_group = self._paths(hazard, everything, everything)
            else:
                weight, of_pair, of_group = self._sure, hazard, self._of_rows(hazard, everything)
            burst = self._burst(of_group, everything, self.bursts)
            return Given((), weight, of_pair, burst, self._sparse(burst, everything), background)
        # Groups that cross none of the lossy singles are as they were.
        base, groups = self.given((), background), np.flatnonzero(crossing)
        weight, of_pair, burst, sparse = base.weight, hazard, base.burst.copy(), base.sparse.copy()
        if self.has_hidden:
            positions, _ = expand(self.group_ptr, groups)
            pairs = self.group_pairs[positions]
            weight, of_pair = weight.copy(), base.hazard.copy()
            weight[pairs], of_pair[pairs], of_group = self._paths(hazard, groups, pairs)
        else:
            of_group = self._of_rows(hazard, groups)
        burst[groups] = self._burst(of_group, groups, OUTLIER)
        sparse[groups] = self._sparse(burst[groups], groups)
        return Given(tuple(lossy), weight, of_pair, burst, sparse, background)

    def _of_rows(self, hazard: Floats, groups: Ints | slice) -> Floats:
        """Log likelihood of groups, each of one path."""
        n, k, h = self.sent_of[groups], self.lost_of[groups], hazard[groups]
        likelihood: Floats = k * log_loss(np.maximum(h, 1e-12)) - (n - k) * h
        return likelihood

    def _paths(self, hazard: Floats, groups: Ints | slice, pairs: Ints | slice) -> tuple[Floats, Floats, Floats]:
        """Of pairs: probability that the path touches the single, and its hazard then; of groups: log likelihood."""
        if isinstance(groups, slice) or isinstance(pairs, slice):
            rows: Ints | slice = slice(None)
            triples: Ints | slice = slice(None)
            sizes, lengths = np.diff(self.row_ptr), np.diff(self.triple_ptr)
        else:
            rows, triples = expand(self.row_ptr, groups)[0], expand(self.triple_ptr, pairs)[0]
            sizes, lengths = np.diff(self.row_ptr)[groups], np.diff(self.triple_ptr)[pairs]
        starts, of = np.cumsum(sizes) - sizes, np.repeat(np.arange(len(sizes)), sizes)
        group, h = self.row_group[rows], hazard[rows]
        n, k = self.sent_of[group], self.lost_of[group]
        likelihood = k * log_loss(np.maximum(h, 1e-12)) - (n - k) * h
        most = np.maximum.reduceat(likelihood, starts)
        posterior = np.exp(likelihood - most[of])
        mass = np.bincount(of, weights=posterior)
        of_row = np.zeros(len(self.row_group))
        of_row[rows] = posterior / mass[of]
        starts = np.cumsum(lengths) - lengths
        at = self.triple_row[triples]
        weight = np.add.reduceat(of_row[at], starts)
        mean = np.add.reduceat((of_row * hazard)[at], starts)
        of_pair = mean / np.maximum(weight, 1e-300)
        return np.where(weight > 1 - 1e-9, 1.0, weight), of_pair, np.log(mass / sizes) + most

    def _burst(self, of_group: Floats, groups: Ints | slice, share: float) -> Floats:
        return math.log(share) - math.log1p(-share) + self._any[groups] - of_group

    def _sparse(self, burst: Floats, groups: Ints | slice) -> Floats:
        sparse: Floats = self.most[groups] / np.maximum(self.lost_of[groups], 1) / (1 + np.exp(between(burst, -50, 50)))
        return sparse

    def _rows(self, single: int) -> tuple[Ints, Floats]:
        a, b = self.pair_ptr[single], self.pair_ptr[single + 1]
        if self.has_hidden:
            a, b = self.triple_ptr[[a, b]]
        return self.triple_row[a:b], self.triple_times[a:b]

    def _row_gain(self, rows: Ints, before: Floats, add: Floats) -> Floats:
        n, k = self.sent_of[self.row_group[rows]], self.lost_of[self.row_group[rows]]
        return k * (log_loss(before + add) - log_loss(before)) - (n - k) * add

    # ------------------------------------------------------------ scores

    def tolerated(self, given: Given) -> float:
        """Hazard that a healthy element may have on top of the background."""
        return max(TOLERATED * given.background, self.noise - given.background)

    def pairs_of(self, singles: Ints | None) -> tuple[Ints | slice, Ints, int]:
        """Positions of the pairs of some singles (None: of all), the index into `singles` of each, and how many."""
        if singles is None:
            return slice(None), self.pair_single, self.number
        positions, owner = expand(self.pair_ptr, singles)
        return positions, owner, len(singles)

    def scan(self, given: Given, singles: Ints | None = None, unexplained: float | None = None) -> Floats:
        """Score (nats) of each of the singles, at about its likeliest hazard: which ones are worth a `fit`.

        `unexplained` losses were taken as background: what a single explains lowers it. O(pairs).
        """
        p, of, number = self.pairs_of(singles)
        clean = self.clean if singles is None else self.clean[singles]
        lost, got, times = self._lost[p], self._got[p], self.times[p]
        before, weight = self.hazards_of(given, p), given.weight[p]
        base = log_loss(np.maximum(before, 1e-12))
        group = self.pair_group[p]
        flows = self.flows[group]
        cap = Cap.of(given.burst[group], weight if self.has_hidden else None)

        def total(values: Floats) -> Floats:
            return np.bincount(of, weights=values, minlength=number).astype(np.float64)

        denominator = np.maximum(clean + total(got * weight), 1e-9)
        hazard = between(total(lost * weight) / denominator, 1e-12, HAZARD_MAX)
        explained = sparse = np.zeros(number)
        for _ in range(3):
            add = hazard[of] * times
            if self.has_hidden:
                gain = lost * (log_loss(before + add) - base) - got * hazard[of]
                hit = weight / (weight + (1 - weight) * np.exp(between(-gain / flows, -50, 50)) + 1e-300)
                own = lost * hit * add / (before + add)
                denominator = np.maximum(clean + total(got * hit), 1e-9)
            else:
                own = lost * add / (before + add)
            sparse = total(own * given.sparse[group])
            # Where the likelihood of flows without another cause is flat: k / (exp(H) - 1) per unit of hazard.
            whole = before + add
            explained = total(own * whole / np.expm1(np.maximum(whole, 1e-12)))
            hazard = between(explained / denominator, 1e-12, HAZARD_MAX)

        def score(hazard: Floats) -> Floats:
            add = hazard[of] * times
            gain = (lost * (log_loss(before + add) - base) - got * hazard[of]) / flows
            return total(flows * cap.of_gain(gain)) - clean * hazard

        tolerated = np.minimum(hazard, self.tolerated(given))
        healthy = np.maximum(score(tolerated), 0.0)
        out = score(hazard)
        heavy = np.flatnonzero(self._is_heavy[p])
        if len(heavy):
            spared = self.clean_flows if singles is None else self.clean_flows[singles]
            of_heavy = of[heavy]
            light = np.bincount(of, weights=flows * ~self._is_heavy[p], minlength=number)
            spared = spared + light
            hits = np.bincount(of_heavy, weights=(weight * flows)[heavy], minlength=number)
            share = np.clip(hits / np.maximum(hits + spared, 1), 1e-6, 1 - 1e-6)
            hit, miss = np.log(share)[of_heavy], np.log1p(-share)
            cap_heavy = cap.some(heavy)
            mean_times = (self.mean_times if singles is None else self.mean_times[singles])[of_heavy]
            for of_flow in SHARE_HAZARDS:
                x = of_flow / mean_times
                add = x * times[heavy]
                gain = (lost[heavy] * (log_loss(before[heavy] + add) - base[heavy]) - got[heavy] * x) / flows[heavy]
                gain = cap_heavy.of_gain(gain)
                gain = flows[heavy] * np.logaddexp(miss[of_heavy], hit + gain)
                total_gain = np.bincount(of_heavy, weights=gain, minlength=number) + spared * miss - SHARE_COST
                out = np.where(hits > 0, np.maximum(out, total_gain), out)
        out -= healthy
        return out + relief(sparse, unexplained) if unexplained is not None else out

    def fit(self, given: Given, single: int, *, shares: bool = True) -> Fit:
        """The likeliest hazard of one single; with `shares`, a share of the flows may be hit alone. O(its pairs)."""
        p = slice(int(self.pair_ptr[single]), int(self.pair_ptr[single + 1]))
        group, clean = self.pair_group[p], float(self.clean[single])
        n, k, flows = self.sent_of[group], self.lost_of[group], self.flows[group]
        before, got, times = self.hazards_of(given, p), n - k, self.times[p]
        base = log_loss(np.maximum(before, 1e-12))
        cap = Cap.of(given.burst[group], given.weight[p] if self.has_hidden else None)

        def gains(hazards: Floats) -> Floats:
            """(hazards, pairs)"""
            add = np.multiply.outer(hazards, times)
            gain = log_loss(before + add)
            gain -= base
            gain *= k
            gain -= np.multiply(add, got, out=add)
            return cap.of_gain(gain)

        tolerated = self.tolerated(given)
        grid = steps(min(tolerated, HAZARD_MAX / 4), HAZARD_MAX, COARSE)
        totals = gains(grid) @ flows - clean * grid
        healthy = max(0.0, float(totals[0]))
        best = int(np.argmax(totals))
        for _ in range(2):
            grid = steps(float(grid[max(best - 1, 0)]), float(grid[min(best + 1, len(grid) - 1)]), FINE)
            totals = gains(grid) @ flows - clean * grid
            best = int(np.argmax(totals))
        lossy, gain = Lossy(single, float(grid[best])), float(totals[best])
        if shares and bool(np.any(k > HEAVY * n)):
            hazards = SHARE_HAZARDS / self.mean_times[single]
            hit = gains(hazards).T
            spared = float(self.clean_flows[single])
            share = np.full(len(SHARE_HAZARDS), 0.5)
            for _ in range(12):
                odds = between(np.log(share / (1 - share)) + hit, -50, 50)
                share = between(flows @ (1 / (1 + np.exp(-odds))) / (flows.sum() + spared), 1e-6, 1 - 1e-6)
            totals = flows @ np.logaddexp(np.log1p(-share), np.log(share) + hit) + spared * np.log1p(-share)
            best = int(np.argmax(totals))
            if float(totals[best]) - SHARE_COST > gain:
                gain = float(totals[best]) - SHARE_COST
                lossy = Lossy(single, float(hazards[best]), float(share[best]))
        return Fit(gain, healthy, lossy)

    @cached_property
    def group_pairs(self) -> Ints:
        """The pairs of each group, from `group_ptr` on. O(pairs log pairs), once."""
        return np.argsort(self.pair_group, kind="stable")

    @cached_property
    def group_ptr(self) -> Ints:
        """Group -> positions in `group_pairs`."""
        return pointer(np.bincount(self.pair_group, minlength=len(self.group_set)))

    @cached_property
    def mean_times(self) -> Floats:
        """How many elements of each single a flow with losses may cross, where it does at all. O(pairs), once."""
        pairs = np.bincount(self.pair_single, minlength=self.number)
        times = np.bincount(self.pair_single, weights=self.times, minlength=self.number)
        return np.maximum(times / np.maximum(pairs, 1), 1.0)

    @cached_property
    def clean_flows(self) -> Floats:
        """Clean flows of known path through each single, each counted once. O(rows x hops), once."""
        flows = self.table.flows if self.table.flows is not None else 1.0
        return self._by_single(self._clean * flows) / self.mean_times

    def attributed(self, given: Given, lossy: Lossy) -> tuple[Ints, Floats]:
        """The groups that may touch a lossy single, and what it lost of each (expected losses), beside `given`."""
        p = slice(int(self.pair_ptr[lossy.single]), int(self.pair_ptr[lossy.single + 1]))
        group, before, weight = self.pair_group[p], self.hazards_of(given, p), given.weight[p]
        n, k = self.sent_of[group], self.lost_of[group]
        add = self.times[p] * lossy.hazard
        gain = k * (log_loss(before + add) - log_loss(np.maximum(before, 1e-12))) - (n - k) * add
        prior = between(weight * lossy.share, 1e-12, 1 - 1e-12) if lossy.share < 1 or self.has_hidden else None
        hit = 1.0 if prior is None else prior / (prior + (1 - prior) * np.exp(between(-gain, -50, 50)))
        return group, k * self.flows[group] * hit * add / (before + add)

    def crossed(self, given: Given, single: int) -> float:
        """Packets that crossed a single (expected, where paths are uncertain), each counted once."""
        p = slice(int(self.pair_ptr[single]), int(self.pair_ptr[single + 1]))
        group = self.pair_group[p]
        times = float(self.times[p].mean()) if p.stop > p.start else 1.0
        return float(self.clean[single]) / times + float((self.sent_of * self.flows)[group] @ given.weight[p])

    def alike(self, single: int) -> int:
        """The first asked for of the singles of which all evidence is the same, as of the ways there and back of round
        trips over unknown paths. O(its pairs), once."""
        known = self._alike.get(single)
        if known is None:
            rows, times = self._rows(single)
            clean = (float(self.clean[single]), float(self.clean_flows[single]))
            known = self._alike[single] = self._first.setdefault((rows.tobytes(), times.tobytes(), *clean), single)
        return known

    def touches(self, single: int) -> Bools:
        """Which groups may cross a single."""
        out = np.zeros(len(self.group_set), bool)
        out[self.pair_group[self.pair_ptr[single] : self.pair_ptr[single + 1]]] = True
        return out
