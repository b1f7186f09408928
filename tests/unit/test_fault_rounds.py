"""The rule by which the benchmark of faults counts an answer as right, and its statistics."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

Json = dict[str, Any]


@pytest.fixture(scope="module")
def rounds() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "fault_rounds.py"
    spec = importlib.util.spec_from_file_location("fault_rounds", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up while they are made.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def truth(**changes: Any) -> Json:
    base: Json = {
        "component": "leaf1--spine1",
        "component_type": "link",
        "direction": "leaf1->spine1",
        "symptom": "blackhole",
        "symptoms_also_right": [],
        "fabric": True,
    }
    return base | changes


def incident(component: str, kind: str, direction: str | None, symptom: str) -> Json:
    return {"component": component, "component_type": kind, "direction": direction, "symptom": symptom}


LINK = incident("leaf1--spine1", "link", "leaf1->spine1", "blackhole")
HOST = truth(component="h1", component_type="host", direction=None, symptom="host_down", fabric=False)
NOBODY = truth(component="broker", component_type=None, direction=None, symptom=None, fabric=False)


@pytest.mark.parametrize(
    ("fault", "seen", "right", "blamed"),
    [
        (truth(), [LINK], True, 0),
        (truth(), [], False, 0),
        (truth(), [LINK | {"direction": "both"}], False, 0),
        (truth(direction="both"), [LINK], False, 0),
        (truth(), [LINK | {"symptom": "drop"}], True, 0),  # the symptom is scored by itself
        (truth(), [LINK, incident("leaf1", "switch", None, "drop")], False, 1),
        (truth(), [incident("leaf1--spine2", "link", "leaf1->spine2", "blackhole")], False, 1),
        (
            truth(component="leaf1", component_type="switch", direction=None),
            [incident("leaf1", "switch", None, "blackhole")],
            True,
            0,
        ),
        (HOST, [incident("h1", "host", None, "host_down")], True, 0),
        (HOST, [incident("h1", "host", None, "host_down"), incident("h1/rnic0", "rnic", "both", "drop")], False, 1),
        (NOBODY, [], True, 0),
        (NOBODY, [LINK], False, 1),
        (NOBODY, [incident("h1", "host", None, "agent_down")], True, 0),
    ],
)
def test_what_counts_as_right(rounds: ModuleType, fault: Json, seen: list[Json], right: bool, blamed: int) -> None:
    r = rounds.Round("kind", "pool", "text", fault)
    rounds.score(r, seen)
    assert (r.right, len(r.blamed)) == (right, blamed)
    assert rounds.Round.of(r.record()) == r


def test_wilson_interval(rounds: ModuleType) -> None:
    low, high = rounds.wilson(57, 60)
    assert (round(low, 3), round(high, 3)) == (0.863, 0.983)
    assert rounds.wilson(0, 0) == (0.0, 1.0)
    assert rounds.wilson(60, 60) == pytest.approx((0.940, 1.0), abs=5e-4)


def test_quantiles_are_values_that_occurred(rounds: ModuleType) -> None:
    values = [float(n) for n in range(1, 21)]
    assert (rounds.quantile(values, 0.5), rounds.quantile(values, 0.95)) == (10.0, 19.0)
    assert rounds.quantile([], 0.5) is None
