"""A first look at every element at once: which are worth fitting exactly."""

from __future__ import annotations

import numpy as np

from pingmesh.analyzer.evidence import Evidence, Floats, Ints, expand
from pingmesh.analyzer.likelihood import RATE_MAX, SHARE_COST, SHARE_RATES


def set_elements(evidence: Evidence, sets: Ints) -> tuple[Ints, Ints, Floats]:
    """For each of `sets`, the elements it may touch: (index into `sets`, element, share of the alternatives)."""
    slots, owner = expand(evidence.set_ptr, sets)
    positions, slot_index = expand(evidence.slot_ptr, slots)
    elements, owner = evidence.slot_elements[positions], owner[slot_index]
    sizes = np.diff(evidence.set_ptr)[sets]
    if len(sets) and sizes.max() > 1:
        keys, counts = np.unique(owner * len(evidence.elements) + elements, return_counts=True)
        owner, elements = np.divmod(keys, len(evidence.elements))
        return owner, elements, counts / sizes[owner]
    return owner, elements, np.ones(len(owner))


def mean_hops(evidence: Evidence) -> Floats:
    """Hops of each path set, averaged over its alternatives."""
    sizes = np.diff(evidence.set_ptr)
    return np.bincount(evidence.slot_set, weights=evidence.hops, minlength=len(sizes)) / np.maximum(sizes, 1)


class Scan:
    """Scores each element as if it were lossy alone. O((lossy groups + unique paths) x hops x rates).

    Flows whose path is one of several count by the share of the alternatives that touch the element.
    """

    def __init__(self, evidence: Evidence, background: float, tolerated: float) -> None:
        e = evidence
        self.background = background
        self._evidence, self._count = e, len(e.elements)
        self._rates = np.geomspace(tolerated, RATE_MAX, 12)
        clean = e.lost == 0
        all_sets = np.arange(len(e.set_ptr) - 1)
        pair_set, pair_element, pair_share = set_elements(e, all_sets)
        is_known = (np.diff(e.set_ptr) == 1)[pair_set]
        clean_sent = self._by_set(e.sent * e.flows * clean)
        clean_flows = self._by_set(e.flows * clean)
        self.sent = self._by_element(self._by_set(e.sent * e.flows)[pair_set] * pair_share, pair_element)
        self.lost = self._by_element(self._by_set(e.lost * e.flows)[pair_set], pair_element)
        self._known_sent = self._by_element(clean_sent[pair_set] * is_known, pair_element)
        self._known_flows = self._by_element(clean_flows[pair_set] * is_known, pair_element)

        # Clean flows of unknown path, pooled by element and share of alternatives.
        unknown = np.flatnonzero(~is_known & (clean_flows[pair_set] > 0))
        keys = np.round(pair_share[unknown] * 4096).astype(np.int64) * self._count + pair_element[unknown]
        pools, where = np.unique(keys, return_inverse=True)
        self._pool_element = pools % max(self._count, 1)
        self._pool_share = np.clip((pools // max(self._count, 1)) / 4096, 1e-4, 1 - 1e-9)
        self._pool_flows = np.bincount(where, weights=clean_flows[pair_set[unknown]], minlength=len(pools))
        pool_sent = np.bincount(where, weights=clean_sent[pair_set[unknown]], minlength=len(pools))
        self._pool_mean = pool_sent / np.maximum(self._pool_flows, 1)

        lossy = np.flatnonzero(~clean)
        owner, self._element, self._share = set_elements(e, e.group_set[lossy])
        self._group = lossy[owner]
        survival = -background * mean_hops(e)[e.group_set[lossy]]
        n, k = e.sent[lossy], e.lost[lossy]
        self._gains = [
            (k * (np.log(-np.expm1(survival + through)) - np.log(-np.expm1(survival))) + (n - k) * through)[owner]
            for through in np.log1p(-self._rates)
        ]
        flows = e.flows[self._group] * self._share
        self._heavy = self._by_element(flows * (e.lost > SHARE_RATES * e.sent)[self._group], self._element)
        known = self._known_flows + self._by_element(flows, self._element)
        self._hit_share = np.clip(self._heavy / np.maximum(known, 1), 1e-6, 0.99)

    def _by_set(self, weights: Floats) -> Floats:
        sets = len(self._evidence.set_ptr) - 1
        return np.bincount(self._evidence.group_set, weights=weights, minlength=sets).astype(np.float64)

    def _by_element(self, weights: Floats, elements: Ints) -> Floats:
        return np.bincount(elements, weights=weights, minlength=self._count).astype(np.float64)

    def beside(self, unexplained: Floats, caps: Floats) -> tuple[Floats, Floats]:
        """Score of each element (nats, an approximate upper bound) and the losses left for it.

        `unexplained` losses and the most that a better explanation may gain (`caps`, nats a flow) are per group:
        what known suspects explain is no evidence against others.
        """
        flows, cap = self._evidence.flows[self._group], caps[self._group]
        lost = self._by_element(unexplained[self._group] * flows * self._share, self._element)
        miss, hit = np.log1p(-np.minimum(self._share, 1 - 1e-12)), np.log(self._share)
        score, healthy = np.zeros(self._count), np.zeros(self._count)
        shared = self._hit_share[self._element] * self._share
        has_heavy = bool(np.any(self._heavy > 0))
        for rate, gain in zip(self._rates, self._gains, strict=True):
            through = np.log1p(-rate)
            pool = np.logaddexp(np.log1p(-self._pool_share), np.log(self._pool_share) + self._pool_mean * through)
            total = self._known_sent * through
            total += self._by_element(self._pool_flows * pool, self._pool_element)
            total += self._by_element(flows * np.minimum(np.logaddexp(miss, hit + gain), cap), self._element)
            if rate == self._rates[0]:
                healthy = np.maximum(total, 0)
            score = np.maximum(score, total)
            if has_heavy and rate >= SHARE_RATES:
                gains = np.minimum(np.logaddexp(np.log1p(-shared), np.log(shared) + gain), cap)
                total = self._by_element(flows * gains, self._element) + self._known_flows * np.log1p(-self._hit_share)
                score = np.maximum(score, np.where(self._heavy > 0, total - SHARE_COST, 0.0))
        return score - healthy, lost
