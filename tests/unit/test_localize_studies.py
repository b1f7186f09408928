"""What one could find who knew every loss rate: the ceiling that recall is held against."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import localize_studies

NOISE = 1e-4


def log_binomial(lost: int, sent: int, rate: float) -> float:
    """Without what does not depend on the rate."""
    return lost * math.log(rate) + (sent - lost) * math.log(1 - rate)


def test_all_known_is_the_log_likelihood_ratio_of_the_flows_that_cross_the_link() -> None:
    plan = SimpleNamespace(hops=np.array([[0, 1], [1, -1], [2, -1]]), sent=np.array([100, 200, 300]))
    drawn = SimpleNamespace(lost=np.array([9, 21, 5]))
    rates = np.array([[1e-5, 0.1], [0.1, 0.0], [1e-5, 0.0]])
    whole = [1 - (1 - 1e-5) * 0.9, 0.1]
    sound = [1 - (1 - 1e-5) * (1 - NOISE / 2), NOISE / 2]
    expected = sum(
        log_binomial(lost, sent, a) - log_binomial(lost, sent, b)
        for lost, sent, a, b in zip((9, 21), (100, 200), whole, sound, strict=True)
    )
    found = localize_studies.all_known(plan, rates, drawn, 1, NOISE)  # type: ignore[arg-type]
    assert found == pytest.approx(expected)
    assert found > 0 > localize_studies.all_known(plan, rates, SimpleNamespace(lost=np.zeros(3)), 1, NOISE)  # type: ignore[arg-type]
