"""Since when a component is slow, and whether it is a queue or a shift: change points of its flows' delays."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import numpy as np

from pingmesh.analyzer.table import Floats

LEAST_SIDE = 3
"""Moments on each side of a change."""
VARYING = 0.1
"""A delay that varies by more than this share of itself, beyond noise, is a queue's."""


@dataclass(frozen=True, slots=True)
class Shift:
    """The step that fits a series best: from `before` to `after` at position `at`.

    `z` is how many standard errors the two sides differ, `wander` the spread of the series around each side's level
    at a single moment.
    """

    at: int
    before: float
    after: float
    z: float
    wander: float


def level(values: Floats) -> Floats:
    """The median of many flows at each moment, (flows, moments) -> (moments,); NaN where fewer than half are known."""
    if not values.size:
        return np.full(values.shape[1], np.nan)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # moments without values
        middle = np.nanmedian(values, axis=0)
    known = np.count_nonzero(~np.isnan(values), axis=0)
    return np.where(2 * known >= known.max(initial=1), middle, np.nan)


def change_point(series: Floats) -> Shift | None:
    """The step up that fits best, by the largest CUSUM of the series about its mean (Page 1954; Hinkley 1970).

    NaNs are left out. None where there are too few moments. O(moments).

    >>> change_point(np.array([0, 1, 0, np.nan, 1, 0, 8, 9, 8, 8.0])).at
    6
    """
    known = np.flatnonzero(~np.isnan(series))
    n = len(known)
    if n < 2 * LEAST_SIDE:
        return None
    x = series[known]
    k = np.arange(1, n)
    cusum = np.cumsum(x - x.mean())[:-1]
    # Down, then up: a level that rises leaves the largest lack before it. Scaled so that every split is as likely.
    strength = -cusum / np.sqrt(k * (n - k) / n)
    strength[: LEAST_SIDE - 1] = strength[n - LEAST_SIDE :] = -np.inf
    split = int(strength.argmax()) + 1
    before, after = float(np.median(x[:split])), float(np.median(x[split:]))
    left = np.concatenate((x[:split] - before, x[split:] - after))
    wander = float(1.4826 * np.median(np.abs(left))) * (1 + 2 / n)
    error = max(wander, 1e-9) * np.sqrt(1 / split + 1 / (n - split))
    return Shift(int(known[split]), before, after, (after - before) / error, wander)


def is_queue(cells: Floats, noise: Floats, delay: float) -> bool:
    """Whether the delay of flows through a component varies as a queue does, or is the same all the time.

    `cells` (flows, moments) are excesses while it is slow, NaN where unknown, `noise` (flows,) is what a moment of each
    flow differs by anyway; all in the unit of `delay`.
    """
    n = int(np.count_nonzero(~np.isnan(cells)))
    if n < 2 * LEAST_SIDE or delay <= 0:
        return False
    left = np.abs(cells - np.nanmedian(cells))
    spread = 1.4826 * float(np.nanmedian(left))
    usual = float(np.median(noise))
    more = spread**2 - usual**2
    return more > (VARYING * delay) ** 2 and more > 3 * spread**2 * np.sqrt(4 / n)
