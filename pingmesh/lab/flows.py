"""Probe counts of a fabric with faults, drawn without a fabric: what the localiser is tested and measured on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pingmesh.analyzer.candidates import Candidate
from pingmesh.analyzer.table import Observation
from topology.model import Topology
from topology.paths import ecmp_paths, path_elements


@dataclass(frozen=True, slots=True)
class Flow:
    """One 5-tuple in one direction: the path it takes, and the alternatives where nobody knows."""

    path: tuple[str, ...]
    alternatives: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class SimulatedFault:
    """Packets that touch `candidate` are dropped at `rate`; with `share` below 1, only those of some flows."""

    candidate: Candidate
    rate: float
    share: float = 1.0


def draw_flows(
    topology: Topology, rng: np.random.Generator, *, tor_mates: int = 8, tuples: int = 16, unknown: float = 0.0
) -> list[Flow]:
    """ToR-mesh flows of each RNIC to some of its ToR-mates and back, and `tuples` inter-ToR flows per ordered ToR pair.

    A share `unknown` of the inter-ToR flows has an ECMP set for a path.
    """
    under: dict[str, list[str]] = {}
    for rnic in topology.rnics.values():
        under.setdefault(rnic.legs[0].switch, []).append(rnic.name)
    flows = []
    for names in under.values():
        for src in names:
            others = [n for n in names if n != src]
            for dst in rng.permutation(others)[:tor_mates] if others else ():
                for a, b in ((src, str(dst)), (str(dst), src)):
                    path = path_elements(topology, a, b, ())
                    flows.append(Flow(path, (path,)))
    for here, sources in under.items():
        for there, targets in under.items():
            ways = ecmp_paths(topology, here, there) if here != there else ()
            for _ in range(tuples if ways else 0):
                src, dst = str(rng.choice(sources)), str(rng.choice(targets))
                alternatives = tuple(path_elements(topology, src, dst, way) for way in ways)
                path = alternatives[int(rng.integers(len(alternatives)))]
                flows.append(Flow(path, alternatives if rng.random() < unknown else (path,)))
    return flows


def draw_observations(
    flows: Sequence[Flow],
    faults: Sequence[SimulatedFault],
    rng: np.random.Generator,
    *,
    sent: int = 50,
    noise: Mapping[str, float] | float = 0.0,
) -> list[Observation]:
    """Send `sent` packets on each flow. `noise` is the loss rate of each healthy hop, or of each element by name."""
    out = []
    for flow in flows:
        left = sent
        if isinstance(noise, Mapping):
            survival = float(np.prod([1 - noise.get(e, 0.0) for e in flow.path]))
        else:
            survival = (1 - noise) ** len(flow.path)
        left = int(rng.binomial(left, survival))
        for fault in faults:
            if fault.candidate.elements & set(flow.path) and (fault.share >= 1 or rng.random() < fault.share):
                left = int(rng.binomial(left, 1 - fault.rate))
        out.append(Observation(sent, sent - left, flow.alternatives))
    return out
