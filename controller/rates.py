"""How often: intervals of a list's entries under the RNIC's cap, and the tracing budget of every RNIC. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from controller.pinglist import Entry
from controller.reach import Reach, Unit
from pingmesh.messages import TOR_MESH

PLANNED_SHARE = 0.9
"""Of the cap goes to lists; the rest is for confirmation probes."""
STEPS = 20
"""The cap lowers rates in steps, so that one flow more or less seldom changes all intervals."""
TRACE_SAFETY = 0.7
"""ECMP never spreads evenly: plan for this share of a switch's ICMP budget."""
QUIET_SHARE, SUSPICION_SHARE = 0.1, 0.5
TRACE_MAX = 50.0


@dataclass(frozen=True)
class RatePlan:
    """What the settings ask for, in probes/s."""

    tor_mesh_rate: float = 10.0
    link_rate: float = 10.0
    link_tuples: int = 16
    max_rate: float = 150.0

    @property
    def flow_rate(self) -> float:
        """Of one inter-ToR tuple: `link_tuples` of them make `link_rate`."""
        return self.link_rate / self.link_tuples


def intervals(entries: Collection[Entry], plan: RatePlan) -> tuple[dict[Entry, int], float]:
    """Microseconds between probes of each entry of one RNIC, and the factor (<= 1) by which its cap lowered rates.

    >>> e = [Entry("h1/r", f"h{i}/r", 50000) for i in range(2, 4)]
    >>> sorted(set(intervals(e, RatePlan())[0].values()))
    [1600000]
    """
    mates = sum(e.kind == TOR_MESH for e in entries)
    total = (plan.tor_mesh_rate if mates else 0.0) + plan.flow_rate * (len(entries) - mates)
    budget = plan.max_rate * PLANNED_SHARE
    factor = 1.0
    if total > budget:
        factor = max(math.floor(budget / total * STEPS) / STEPS, 0.0) or budget / total
    mesh = max(mates, 1) / plan.tor_mesh_rate / factor
    inter = 1 / plan.flow_rate / factor
    return {e: max(round((mesh if e.kind == TOR_MESH else inter) * 1e6), 1) for e in entries}, factor


def trace_rates(reach: Reach, entries: Iterable[Entry]) -> tuple[float, float]:
    """TTL-limited packets/s that each RNIC may send, in quiet times and on suspicion.

    An RNIC traces its own tuples and the ACKs of the tuples that come to it, so both load switches. Each RNIC's
    packets are spread over its tuples alike and over ECMP evenly, within `TRACE_SAFETY`; then all RNICs together ask
    no switch for more than a tenth (a half) of its ICMP limit.
    """
    pairs: dict[str, Counter[tuple[Unit, Unit]]] = {}
    for e in entries:
        if e.cls == 0 and reach.mask(e.source, e.target):
            a, b = reach.unit_of[e.source], reach.unit_of[e.target]
            pairs.setdefault(e.source, Counter())[a, b] += 1
            pairs.setdefault(e.target, Counter())[b, a] += 1
    load: dict[str, float] = {}
    for counts in pairs.values():
        hits: dict[str, float] = {}
        for (a, b), n in counts.items():
            for switch, share in reach.trace_hits(a, b).items():
                hits[switch] = hits.get(switch, 0.0) + n * share
        total = sum(hits.values())
        for switch, n_hits in hits.items():
            load[switch] = load.get(switch, 0.0) + n_hits / total
    return _rate(reach, load, QUIET_SHARE), _rate(reach, load, SUSPICION_SHARE)


def _rate(reach: Reach, load: Mapping[str, float], share: float) -> float:
    limits = (TRACE_SAFETY * share * reach.topology.switches[s].icmp_limit / n for s, n in load.items() if n)
    rate = min(limits, default=TRACE_MAX)
    return float(f"{min(max(rate, 0.01), TRACE_MAX):.2g}")
