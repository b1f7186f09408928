"""Since when a component is slow, and whether it is a queue or a shift: change points of its flows' delays."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import numpy as np

from pingmesh.analyzer.delay_baselines import median
from pingmesh.analyzer.table import Floats, Ints

LEAST_SIDE = 3
"""Moments on each side of a change."""
SUDDEN = 0.8
"""Share of a straight line's misfit that a step's must stay below."""
VARYING = 0.1
"""A delay that varies by more than this share of itself, beyond noise, is a queue's."""


@dataclass(frozen=True, slots=True)
class Shift:
    """The step that fits a series best: from `before` to `after` at position `at`.

    `z` is how many standard errors the two sides differ, `wander` the spread of the series around each side's level
    at a single moment. `is_sudden`: a step fits clearly better than a steady rise.
    """

    at: int
    before: float
    after: float
    z: float
    wander: float
    is_sudden: bool


def level(values: Floats) -> Floats:
    """The median of many flows at each moment, (flows, moments) -> (moments,); NaN where fewer than half are known."""
    if not values.size:
        return np.full(values.shape[1], np.nan)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # moments without values
        middle = np.nanmedian(values, axis=0)
    known = np.count_nonzero(~np.isnan(values), axis=0)
    return np.where(2 * known >= known.max(initial=1), middle, np.nan)


def change_point(series: Floats, at: Ints | None = None) -> Shift | None:
    """The step up that fits best, by the largest CUSUM of the series about its mean (Page 1954; Hinkley 1970).

    `at` are the times of the moments, if they are not evenly spaced. NaNs are left out. None where there are too few
    moments. O(moments squared).

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
    is_sudden = float(np.abs(left).sum()) < SUDDEN * _misfit_of_rise(
        (known if at is None else at[known]).astype(np.float64), x
    )
    return Shift(int(known[split]), before, after, float((after - before) / error), wander, is_sudden)


def _misfit_of_rise(at: Floats, x: Floats) -> float:
    """What the best level that turns into a steady rise leaves of a series. O(moments squared)."""
    rise = np.maximum(at[None, :] - at[:-1, None], 0.0)
    rise -= rise.mean(axis=1, keepdims=True)
    slope = np.maximum(rise @ (x - x.mean()), 0.0) / np.square(rise).sum(axis=1)
    return float(np.abs(x - x.mean() - slope[:, None] * rise).sum(axis=1).min())


def is_queue(cells: Floats, noise: Floats, delay: float, varying: float = VARYING) -> bool:
    """Whether the delay of flows through a component varies as a queue does, or is the same all the time.

    Each flow's differences are from its own median, so that what is wrong about its usual round trip does not count.

    `cells` (flows, moments) are excesses while it is slow, NaN where unknown, `noise` (flows,) is what a moment of each
    flow differs by anyway; all in the unit of `delay`. A queue's varies by more than the share `varying` of itself.
    """
    n = int(np.count_nonzero(~np.isnan(cells)))
    if n < 2 * LEAST_SIDE or delay <= 0 or cells.shape[1] < LEAST_SIDE:
        return False
    spread = 1.4826 * float(np.nanmedian(np.abs(cells - median(cells)[0][:, None])))
    usual = float(np.median(noise))
    more = spread**2 - usual**2
    return bool(more > (varying * delay) ** 2 and more > 3 * usual**2 * np.sqrt(4 / n))
