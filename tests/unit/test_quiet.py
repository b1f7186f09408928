"""The weights of importance sampling: false incidents are counted right only if these are."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import quiet

from pingmesh.simulate.fabric import Fabric
from pingmesh.simulate.faults import Fault, Places
from pingmesh.simulate.probes import Lists, draw_probes
from pingmesh.simulate.troubles import draw_troubles
from topology.generate import leaf_spine

SECONDS = range(quiet.END_S - 4, quiet.END_S)


FABRIC = Fabric(leaf_spine(2, 2, 2, 1))
LINK = FABRIC.topology.links[0]
NOISE = quiet.Noise(hop_loss=0.02, burst_rate=0.0)


def runs(count: int, *, tilted: bool) -> np.ndarray:
    """(count, [weight, packets lost across the link in some seconds])."""
    places, rng = Places(FABRIC), np.random.default_rng(5)
    flows = draw_probes(FABRIC, rng, Lists())
    out = []
    for _ in range(count):
        start = int(rng.choice(quiet.STARTS)) if tilted else quiet.END_S
        fault = Fault(
            kind="loss",
            component=LINK.name,
            direction=LINK.forward.name,
            start_s=start,
            end_s=start + quiet.LONGEST_S,
            rate=float(rng.choice(quiet.RATES)),
        )
        troubles = draw_troubles(FABRIC, NOISE, quiet.END_S, rng)
        world = quiet.Tilted(FABRIC, flows, [places.place(fault)], troubles, rng)
        world.enough = int(rng.choice(quiet.LOSSES))
        crossing = world._hit(0, world.faults[0], np.arange(len(flows)), 0, flows.cls)
        lost = sum(int((c.sent - c.received)[crossing].sum()) for c in (world.step(s, s + 1.0) for s in SECONDS))
        out.append((world.weight(SECONDS.stop), lost))
    return np.array(out, float)


def mean(values: np.ndarray) -> tuple[float, float]:
    return float(values.mean()), float(values.std() / len(values) ** 0.5)


def test_weighted_runs_are_those_of_a_sound_fabric(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quiet, "RATES", (0.01, 0.06))
    monkeypatch.setattr(quiet, "LOSSES", (3, 6))
    weights, lost = runs(2000, tilted=True).T
    sound, sound_error = mean(runs(500, tilted=False)[:, 1])
    one, error = mean(weights)
    assert error < 0.03
    assert one == pytest.approx(1.0, abs=4 * error)
    weighted, weighted_error = mean(weights * lost)
    assert weighted == pytest.approx(sound, abs=4 * (weighted_error + sound_error))
    assert lost.mean() > sound + 4 * (weighted_error + sound_error), "they would differ without weights"
