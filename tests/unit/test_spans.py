"""The span of evidence in which faults explain most: what was counted before a fault began does not clear it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from pingmesh.analyzer.candidates import candidates_of
from pingmesh.analyzer.components import compile_components
from pingmesh.analyzer.localise import localise_table
from pingmesh.offline.spans import best_span
from pingmesh.simulate.fabric import Fabric
from pingmesh.simulate.faults import Fault, Places
from pingmesh.simulate.probes import draw_probes
from pingmesh.simulate.tables import Sums, Tables
from pingmesh.simulate.troubles import QUIET, draw_troubles
from pingmesh.simulate.world import World
from topology.generate import leaf_spine

FABRIC = leaf_spine(4, 4, 4, 1)
COMPONENTS = compile_components(candidates_of(FABRIC))
LINK = "leaf1->spine2"


def tables(fault: Fault, *firsts: float) -> list:
    rng = np.random.default_rng(1)
    fabric = Fabric(FABRIC)
    flows = draw_probes(fabric, rng)
    world = World(
        fabric,
        flows,
        [Places(fabric).place(fault)],
        draw_troubles(fabric, replace(QUIET, hop_loss=3e-4), 60.0, rng),
        rng,
    )
    make = Tables(world, dict(COMPONENTS.index))
    counts = [world.step(t, t + 5.0) for t in np.arange(0.0, 60.0, 5.0)]
    return [make.losses(Sums.of(len(flows), [c for c in counts if c.start_s >= first])) for first in firsts]


def fault(start_s: float, rate: float) -> Fault:
    return Fault(kind="loss", component="leaf1--spine2", direction=LINK, rate=rate, start_s=start_s)


def test_a_fresh_fault_is_judged_by_what_came_since() -> None:
    at, suspects = best_span(tables(fault(50.0, 0.3), 55.0, 50.0, 40.0, 0.0), COMPONENTS)
    assert at in (1, 2)
    assert [s.candidate.direction for s in suspects] == [LINK]
    assert suspects[0].rate > 0.12  # over the minute it would be 0.05


def test_an_old_faint_fault_is_judged_by_all() -> None:
    spans = tables(fault(0.0, 0.03), 55.0, 40.0, 0.0)
    at, suspects = best_span(spans, COMPONENTS)
    assert at == 2
    assert [s.candidate.direction for s in suspects] == [LINK]
    assert sum(s.score for s in suspects) > sum(s.score for s in localise_table(spans[0], COMPONENTS))


def test_nothing_is_nothing() -> None:
    assert best_span(tables(fault(99.0, 1.0), 55.0, 0.0), COMPONENTS) == (-1, [])
    assert best_span([], COMPONENTS) == (-1, [])
