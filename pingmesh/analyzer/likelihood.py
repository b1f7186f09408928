"""How likely the evidence is when given components drop packets, and the loss rates that make it likeliest.

A packet that crosses several lossy elements survives all of them, so survival probabilities multiply and their
logarithms add. A flow whose path is not known is a mixture over its alternatives; a component that drops only a share
of the flows is a mixture too (the flow is hit or is not), and both are rows of the same table.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pingmesh.analyzer.evidence import Bools, Evidence, Floats, Ints, expand

RATE_MAX = 0.9999
OUTLIER = 0.05
"""Share of the flows through a lossy element that may lose any number of packets: real faults are not binomial, and
what a fault does to its own flows must not accuse the other elements of those flows."""
SHARE_RATES = 0.1
"""A component that drops a share of the flows drops at least this much of each."""
SHARE_COST = 3.0
"""Nats that the second parameter of such a component must earn."""


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """A lossy set of elements: each packet that touches it is dropped at `rate`, if its flow is among `share`."""

    elements: tuple[int, ...]
    touched: Bools
    """Over slots."""
    rate: float
    share: float


@dataclass(frozen=True, slots=True)
class Fit:
    """The best rate for a set of elements, and the log likelihood ratio (nats) of that against innocence."""

    score: float
    rate: float
    share: float


@dataclass(frozen=True, slots=True, eq=False)
class _View:
    """The part of the table that some elements see: rows are (group, alternative), in the order of groups."""

    groups: Ints
    slot: Ints
    owner: Ints
    log_weight: Floats
    touched: Bools


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    owner: Ints
    touched: Bools
    crossing: Bools
    """Whether the group crosses an element already known to be lossy."""
    survival: Floats
    """Log probability that one packet gets through."""
    likelihood: Floats
    """Log weight and log likelihood of the row, without the binomial coefficient."""
    starts: Ints


def log_factorial(n: Floats) -> Floats:
    """log n! by Stirling's series, exact to 1e-8 for n >= 0 (n need not be whole)."""
    x = n + 8.0
    tail = np.zeros_like(x)
    for i in range(1, 8):
        tail += np.log(n + i)
    return (x - 0.5) * np.log(x) - x + 0.5 * math.log(2 * math.pi) + 1 / (12 * x) - 1 / (360 * x**3) - tail


class Likelihood:
    """Scores sets of elements on one body of evidence. `background` is the loss rate of one healthy hop.

    `tolerated` is the rate up to which a component counts as healthy: the score of a fit is its likelihood ratio
    against the best rate within that.
    """

    def __init__(self, evidence: Evidence, background: float, tolerated: float) -> None:
        self.evidence = evidence
        self.tolerated = min(max(tolerated, 1e-7), 0.5)
        self._base = self._survival(background)
        sizes = np.diff(evidence.set_ptr)
        self._log_weight = -np.log(np.maximum(sizes, 1))[evidence.slot_set]
        n, k = evidence.sent, evidence.lost
        # A flow that may lose any number: 1 / (n + 1), divided by the coefficient that the other terms leave out.
        self._any = -np.log(n + 1) - (log_factorial(n) - log_factorial(k) - log_factorial(n - k))
        self._views: dict[tuple[int, ...], _View] = {}
        self._grid = np.geomspace(self.tolerated, RATE_MAX, 22)

    def _survival(self, background: float) -> Floats:
        return self.evidence.hops.astype(np.float64) * math.log1p(-min(background, 0.5))

    def at(self, background: float) -> Likelihood:
        """The same with another background rate."""
        other = copy.copy(self)
        other._base = self._survival(background)
        return other

    def part(self, elements: tuple[int, ...], rate: float, share: float) -> Part:
        """A lossy part with its mask over slots."""
        touched = np.zeros(len(self.evidence.slot_set), bool)
        touched[self.evidence.slots_of(elements)] = True
        return Part(elements, touched, rate, share)

    def _view(self, elements: tuple[int, ...]) -> _View:
        view = self._views.get(elements)
        if view is None:
            e = self.evidence
            slots = e.slots_of(elements)
            groups, _ = expand(e.group_ptr, np.unique(e.slot_set[slots]))
            view = self._views[elements] = self._view_of(groups, slots)
        return view

    def _view_of(self, groups: Ints, slots: Ints) -> _View:
        e = self.evidence
        slot, owner = expand(e.set_ptr, e.group_set[groups])
        touched = np.zeros(len(e.slot_set), bool)
        touched[slots] = True
        return _View(groups, slot, owner, self._log_weight[slot], touched[slot])

    def _rows(self, view: _View, parts: Sequence[Part]) -> _Rows:
        slot, owner, touched, weight = view.slot, view.owner, view.touched, view.log_weight
        survival: Floats = self._base[slot]
        crossing = np.zeros(len(view.groups), bool)
        if len(slot) > len(view.groups):
            slot, owner, touched, weight, survival = self._pooled(view, parts)
        for part in parts:
            hit = part.touched[slot]
            if not hit.any():
                continue
            crossing[owner[hit]] = True
            if part.share < 1:
                copies = np.repeat(np.arange(len(slot)), 1 + hit)
                spared = np.zeros(len(copies), bool)
                spared[1:] = copies[1:] == copies[:-1]
                slot, owner, touched, weight = slot[copies], owner[copies], touched[copies], weight[copies]
                survival, hit = survival[copies], hit[copies] & ~spared
                weight = weight + np.where(hit, math.log(part.share), np.where(spared, math.log1p(-part.share), 0.0))
            survival = survival + hit * math.log1p(-part.rate)
        n, k = self.evidence.sent[view.groups][owner], self.evidence.lost[view.groups][owner]
        likelihood = weight + k * np.log(-np.expm1(survival)) + (n - k) * survival
        starts = np.searchsorted(owner, np.arange(len(view.groups)))
        return _Rows(owner, touched, crossing, survival, likelihood.astype(np.float64, copy=False), starts)

    def _pooled(self, view: _View, parts: Sequence[Part]) -> tuple[Ints, Ints, Bools, Floats, Floats]:
        """Alternatives of a flow that touch the same parts are one row; healthy hops count by their mean."""
        pattern = view.touched.astype(np.int64)
        for part in parts:
            hit = part.touched[view.slot]
            if hit.any():
                pattern = 2 * pattern + hit
                if pattern.max() > 1 << 20:
                    pattern = np.unique(pattern, return_inverse=True)[1].astype(np.int64)
        width = int(pattern.max(initial=0)) + 1
        _, first, row = np.unique(view.owner * width + pattern, return_index=True, return_inverse=True)
        weight = np.bincount(row, weights=np.exp(view.log_weight), minlength=len(first))
        hops = np.bincount(row, weights=self._base[view.slot], minlength=len(first)) / np.bincount(row)
        return view.slot[first], view.owner[first], view.touched[first], np.log(weight), hops

    def unlikeliness(self, groups: Ints, parts: Sequence[Part]) -> Floats:
        """By how much (nats a flow) the best possible explanation of each group beats the given parts."""
        view = self._view_of(groups, np.empty(0, np.int64))
        rows = self._rows(view, parts)
        n, k = self.evidence.sent[groups], self.evidence.lost[groups]
        rate = np.clip(k / n, 1e-12, 1 - 1e-12)
        best = k * np.log(rate) + (n - k) * np.log1p(-rate)
        return np.maximum(best - self._totals(view, rows, rows.likelihood[:, None])[:, 0], 0.0)

    def _totals(self, view: _View, rows: _Rows, likelihood: Floats) -> Floats:
        """Log likelihood of each group from that of its rows (rows x rates)."""
        if len(rows.owner) == len(view.groups):
            total = likelihood.copy()
        else:
            total = np.logaddexp.reduceat(likelihood, rows.starts, axis=0)
        c = rows.crossing
        if c.any():
            anything = (self._any[view.groups[c]] + math.log(OUTLIER))[:, None]
            total[c] = np.logaddexp(total[c] + math.log1p(-OUTLIER), anything)
        return total

    def _gains(self, view: _View, rows: _Rows, rates: Floats) -> Floats:
        """Log likelihood ratio of each group (groups x rates) if the touched rows also lose at each of `rates`."""
        n, k = self.evidence.sent[view.groups][rows.owner], self.evidence.lost[view.groups][rows.owner]
        t = slice(None) if rows.touched.all() else rows.touched
        survival = rows.survival[t][:, None] + np.log1p(-rates)
        with_loss = n[t][:, None] * survival
        lossy = np.flatnonzero(k[t])
        s = survival[lossy]
        with_loss[lossy] += k[t][lossy][:, None] * (np.log(-np.expm1(s)) - s)
        before = k * np.log(-np.expm1(rows.survival)) + (n - k) * rows.survival
        likelihood = np.repeat(rows.likelihood[:, None], len(rates), axis=1)
        likelihood[t] += with_loss - before[t][:, None]
        return self._totals(view, rows, likelihood) - self._totals(view, rows, rows.likelihood[:, None])

    def fit(self, elements: tuple[int, ...], parts: Sequence[Part], *, shares: bool = True) -> Fit:
        """The likeliest rate of `elements`, given lossy `parts`; with `shares`, a share of the flows may be hit alone.

        O(rows that the elements see x rates tried).
        """
        view = self._view(elements)
        if not len(view.groups):
            return Fit(0.0, self.tolerated, 1.0)
        e = self.evidence
        flows = e.flows[view.groups]
        rows = self._rows(view, parts)
        gains = self._gains(view, rows, self._grid)
        totals = flows @ gains
        healthy = max(0.0, float(totals[0]))
        best, rate, grid = int(np.argmax(totals)), 0.0, self._grid
        rate, top = float(grid[best]), float(totals[best])
        if top > 1.0:
            for _ in range(2):
                grid = np.geomspace(grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)], 7)
                refined = flows @ self._gains(view, rows, grid)
                best = int(np.argmax(refined))
                rate, top = float(grid[best]), float(refined[best])
        fit = Fit(top - healthy, rate, 1.0)
        if shares and bool(np.any(e.lost[view.groups] > SHARE_RATES / 2 * e.sent[view.groups])):
            fit = max(fit, self._fit_share(gains, flows, healthy), key=lambda f: f.score)
        return fit

    def _fit_share(self, gains: Floats, flows: Floats, healthy: float) -> Fit:
        """The likeliest (share of flows, rate) pair, by a few steps of EM at each rate of the grid."""
        columns = self._grid >= SHARE_RATES
        hit = gains[:, columns]
        share = np.full(hit.shape[1], 0.5)
        total = flows.sum()
        for _ in range(8):
            odds = np.clip(np.log(share) - np.log1p(-share) + hit, -700, 700)
            share = np.clip(flows @ (1 / (1 + np.exp(-odds))) / total, 1e-6, 1 - 1e-6)
        totals = flows @ np.logaddexp(np.log1p(-share), np.log(share) + hit)
        best = int(np.argmax(totals))
        return Fit(
            float(totals[best]) - healthy - SHARE_COST, float(self._grid[columns][best]), min(float(share[best]), 0.99)
        )

    def attributed(self, part: Part, others: Sequence[Part]) -> tuple[float, Ints, Floats]:
        """Packets that crossed the part, the groups concerned, and what the part lost of each (expected counts)."""
        view = self._view(part.elements)
        rows = self._rows(view, [part, *others])
        e = self.evidence
        if not len(view.groups):
            return 0.0, view.groups, np.empty(0)
        # Rows of an outlier flow still say which alternative it took.
        in_rows = np.logaddexp.reduceat(rows.likelihood, rows.starts)
        posterior = np.exp(rows.likelihood - in_rows[rows.owner])
        # A row in which the part spared its flow survives better than the part alone would let it.
        hit = rows.touched & (rows.survival <= math.log1p(-part.rate))
        own = np.where(hit, math.log1p(-part.rate) / rows.survival, 0.0)
        n, k = e.sent[view.groups] * e.flows[view.groups], e.lost[view.groups] * e.flows[view.groups]
        sent = float(np.sum(posterior * rows.touched * n[rows.owner]))
        return (
            sent,
            view.groups,
            np.bincount(rows.owner, weights=posterior * own * k[rows.owner], minlength=len(n)).astype(float),
        )
