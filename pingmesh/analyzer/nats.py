"""Arithmetic of log likelihoods in nats, on arrays: what scores of components are made of. All of it is O(values)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from pingmesh.analyzer.table import Floats, Ints

FAR = 500.0
"""Nats beyond which a share is none."""
PRIOR_LOST = 0.25
"""Losses that the prior of the background stands for."""


def log_loss(hazard: Floats) -> Floats:
    """Log of the probability that a packet is lost."""
    out: Floats = np.negative(hazard)
    np.expm1(out, out=out)
    np.negative(out, out=out)
    return np.log(out, out=out)


def between(values: Floats, least: float, most: float) -> Floats:
    """`np.clip` of few values takes longer for what it asks first than for them."""
    out: Floats = np.maximum(values, least)
    return np.minimum(out, most, out=out)


def log_with(other: Floats, gain: Floats) -> Floats:
    """log(other + exp(gain)), for a share 0 <= other <= 1; not below -`FAR`.

    As `logaddexp` of the share's logarithm, which does not take exponentials many at once.

    >>> log_with(np.array([0.5, 0.0, 1.0]), np.array([math.log(0.5), 900.0, -np.inf])).tolist()
    [0.0, 900.0, 0.0]
    """
    near = between(gain, -FAR, FAR)
    out: Floats = np.exp(near)
    out += other
    np.log(out, out=out)
    # Beyond that the other is nothing.
    out += np.maximum(np.subtract(gain, near, out=near), 0.0, out=near)
    return out


def steps(first: float, last: float, shares: Floats) -> Floats:
    """Numbers between two positive ones, evenly spaced by their logarithms as `shares` (0 to 1) say."""
    return first * np.exp(math.log(last / first) * shares)


def log_factorial(n: Floats) -> Floats:
    """log n! by Stirling's series, exact to 1e-8 for n >= 0 (n need not be whole)."""
    x = n + 8.0
    tail = np.zeros_like(x)
    for i in range(1, 8):
        tail += np.log(n + i)
    return (x - 0.5) * np.log(x) - x + 0.5 * math.log(2 * math.pi) + 1 / (12 * x) - 1 / (360 * x**3) - tail


def relief(own: Floats, background_lost: float) -> Floats:
    """Nats that a component earns because its losses are no longer the background's, with that integrated over.

    The background was taken at its mean with `background_lost` losses, `own` among them; its prior is a gamma
    distribution. >= 0.
    """
    all_of_it = background_lost + PRIOR_LOST
    rest = np.maximum(all_of_it - own, PRIOR_LOST)
    return np.maximum(own * math.log(all_of_it) + log_gamma(rest) - log_gamma(np.array(all_of_it)), 0.0)


def burden(own: Floats, background_lost: float) -> Floats:
    """Nats that a component owes because the background was taken without its losses: the converse of `relief`."""
    without = np.array(background_lost + PRIOR_LOST)
    owed: Floats = log_gamma(without + own) - log_gamma(without) - own * np.log(without)
    return owed


def log_gamma(x: Floats) -> Floats:
    """Log of the gamma function, for x > 0."""
    x = np.asarray(x, np.float64)
    return (log_factorial(x) - np.log(x)).astype(np.float64)


@dataclass(frozen=True, slots=True, eq=False)
class Cap:
    """What bounds the gain of pairs: the path may be another, and the losses a burst."""

    shift: Floats
    burst: Floats
    """Share of a burst, against the model."""
    path: tuple[Floats, Floats] | None
    """Log probability of the path, and the probability of another; None: it is known."""

    @classmethod
    def of(cls, burst: Floats, weight: Floats | None) -> Cap:
        """From log odds of a burst and the probability of the path (None: it is known)."""
        shift = np.logaddexp(0.0, burst)
        path = None
        if weight is not None:
            with np.errstate(divide="ignore"):  # a path that is surely not taken
                path = np.log(weight), 1 - weight
        return cls(shift, np.exp(np.maximum(burst - shift, -FAR)), path)

    def some(self, pairs: Ints) -> Cap:
        """That of some of the pairs."""
        path = None if self.path is None else (self.path[0][pairs], self.path[1][pairs])
        return Cap(self.shift[pairs], self.burst[pairs], path)

    def of_gain(self, gain: Floats) -> Floats:
        """Nats that are left of a gain in log likelihood, (..., pairs); `gain` is used up."""
        if self.path is not None:
            gain += self.path[0]
            gain = log_with(self.path[1], gain)
        gain -= self.shift
        return log_with(self.burst, gain)
