"""A first look at every element at once: which are worth fitting exactly."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pingmesh.analyzer.evidence import Evidence, Floats, Ints, expand
from pingmesh.analyzer.likelihood import RATE_MAX, SHARE_COST

_SHARED_RATES = (0.2, 0.5, RATE_MAX)


@dataclass(frozen=True, slots=True, eq=False)
class Scan:
    """Per element: packets that crossed it, packets lost on flows that crossed it, and about its score alone (nats).

    Flows whose path is one of several count by the share of the alternatives that touch the element.
    """

    sent: Floats
    lost: Floats
    score: Floats
    background: float


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


def scan_elements(evidence: Evidence, background: float, tolerated: float) -> Scan:
    """Score each element as if it alone were lossy. O((lossy groups + unique paths) x hops x rates)."""
    e, count = evidence, len(evidence.elements)
    all_sets = np.arange(len(e.set_ptr) - 1)
    pair_set, pair_element, pair_share = set_elements(e, all_sets)
    is_known = (np.diff(e.set_ptr) == 1)[pair_set]

    def by_set(weights: Floats) -> Floats:
        return np.bincount(e.group_set, weights=weights, minlength=len(all_sets)).astype(np.float64)

    def by_element(weights: Floats, elements: Ints) -> Floats:
        return np.bincount(elements, weights=weights, minlength=count).astype(np.float64)

    clean = e.lost == 0
    sent = by_element(by_set(e.sent * e.flows)[pair_set] * pair_share, pair_element)
    lost = by_element(by_set(e.lost * e.flows)[pair_set] * pair_share, pair_element)
    clean_sent, clean_flows = by_set(e.sent * e.flows * clean), by_set(e.flows * clean)
    known_sent = by_element((clean_sent[pair_set]) * is_known, pair_element)
    known_flows = by_element((clean_flows[pair_set]) * is_known, pair_element)

    # Clean flows of unknown path, pooled by element and share of alternatives.
    u = np.flatnonzero(~is_known & (clean_flows[pair_set] > 0))
    pooled, where = np.unique(
        np.round(pair_share[u] * 4096).astype(np.int64) * count + pair_element[u], return_inverse=True
    )
    pool_share, pool_element = (pooled // max(count, 1)) / 4096, pooled % max(count, 1)
    pool_flows = np.bincount(where, weights=clean_flows[pair_set[u]], minlength=len(pooled))
    pool_mean = np.bincount(where, weights=clean_sent[pair_set[u]], minlength=len(pooled)) / np.maximum(pool_flows, 1)
    pool_miss = np.log1p(-np.minimum(pool_share, 1 - 1e-12))

    lossy = np.flatnonzero(~clean)
    owner, element, share = set_elements(e, e.group_set[lossy])
    group = lossy[owner]
    n, k, flows = e.sent[group], e.lost[group], e.flows[group]
    survival = -background * mean_hops(e)[e.group_set[group]]
    dropped = np.log(-np.expm1(survival))
    miss, hit = np.log1p(-np.minimum(share, 1 - 1e-12)), np.log(share)
    heavy_flows = by_element(flows * share * (k > 0.1 * n), element)
    hit_share = np.clip(heavy_flows / np.maximum(known_flows + by_element(flows * share, element), 1), 1e-6, 0.99)

    score, healthy = np.zeros(count), np.zeros(count)
    for rate in np.geomspace(tolerated, RATE_MAX, 12):
        log_through = np.log1p(-rate)
        s = survival + log_through
        gain = k * (np.log(-np.expm1(s)) - dropped) + (n - k) * log_through
        through = np.logaddexp(pool_miss, np.log(pool_share) + pool_mean * log_through)
        total = known_sent * log_through + by_element(flows * np.logaddexp(miss, hit + gain), element)
        total += by_element(pool_flows * through, pool_element)
        if rate <= tolerated * 1.0001:
            healthy = np.maximum(total, 0)
        score = np.maximum(score, total)
    has_heavy = np.flatnonzero(heavy_flows > 0)
    if len(has_heavy):
        f = hit_share[element]
        for rate in _SHARED_RATES:
            log_through = np.log1p(-rate)
            gain = k * (np.log(-np.expm1(survival + log_through)) - dropped) + (n - k) * log_through
            total = by_element(flows * np.logaddexp(np.log1p(-f * share), np.log(f * share) + gain), element)
            total += known_flows * np.log1p(-hit_share)
            score = np.maximum(score, np.where(heavy_flows > 0, total - SHARE_COST, 0.0))
    return Scan(sent, lost, score - healthy, background)
