"""Faults: what may break, how it shows in probes, and the right answer. The kinds cover Liu et al. 2024, Table 2."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from pingmesh.analyzer.candidates import Candidate, candidates_of
from pingmesh.analyzer.table import Ints
from pingmesh.records.errors import shown
from pingmesh.simulate.fabric import Fabric
from topology.model import Topology
from topology.problems import did_you_mean

Place = Literal["link", "rnic", "leg", "switch", "host"]
ALL = frozenset({"small", "large", "other"})
LOSSLESS = frozenset({"small", "large"})
"""Classes that ride the priority which PFC makes lossless."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A way to fail. What is not given in a fault comes from here; `causes` are the paper's root causes (its Table 2).

    `rate`: share of packets lost across the component while it fails; `share`: of the tuples that it hits;
    `classes`: those it hits; `far_only`: only what goes to other ToRs; `burst_s`: the mean length of bad spells
    (None: each packet alone); `period_s` and `on`: it comes and goes; `delay_us`: mean extra delay; `reroute_s`:
    routing leaves it after that time; `is_dark`: the agent reports no link; `is_silent`: no agent speaks; `sends`:
    whether its own probes leave; `stall_ms`: its agent is stalled so long, again and again.
    """

    places: tuple[Place, ...]
    symptom: str
    causes: tuple[int, ...] = ()
    rate: float = 0.0
    share: float = 1.0
    classes: frozenset[str] = ALL
    far_only: bool = False
    burst_s: float | None = None
    period_s: float = 0.0
    on: float = 1.0
    delay_us: float = 0.0
    reroute_s: float | None = None
    is_dark: bool = False
    is_silent: bool = False
    sends: bool = True
    stall_ms: float = 0.0
    directed: bool = False
    """Whether it has one direction (of a link) or side (of an RNIC), unless the fault says otherwise."""


KINDS: Mapping[str, Kind] = {
    "loss": Kind(
        places=("link", "rnic", "leg", "switch", "host"), symptom="drop", causes=(2,), rate=0.1, directed=True
    ),
    "bursty_loss": Kind(
        places=("link", "rnic", "leg"), symptom="drop", causes=(2,), rate=0.1, burst_s=0.5, directed=True
    ),
    "blackhole": Kind(places=("link", "rnic", "leg", "switch", "host"), symptom="blackhole", rate=1.0, directed=True),
    "flap": Kind(places=("link", "rnic"), symptom="flap", causes=(1,), rate=1.0, period_s=4.0, on=0.5),
    "link_down": Kind(places=("link",), symptom="link_down", causes=(1,), rate=1.0, reroute_s=0.5),
    "switch_down": Kind(places=("switch",), symptom="switch_down", rate=1.0),
    "rnic_down": Kind(places=("rnic",), symptom="rnic_down", causes=(3,), rate=1.0, is_dark=True),
    "host_down": Kind(places=("host",), symptom="host_down", causes=(4,), rate=1.0, is_silent=True, sends=False),
    "pfc_deadlock": Kind(
        places=("link",), symptom="class_drop", causes=(5,), rate=1.0, classes=LOSSLESS, directed=True
    ),
    "misroute": Kind(places=("rnic",), symptom="drop", causes=(6,), rate=1.0, far_only=True, directed=True),
    "gid_missing": Kind(places=("rnic",), symptom="blackhole", causes=(7,), rate=1.0, sends=False),
    "acl": Kind(places=("link", "switch"), symptom="flow_blackhole", causes=(8,), rate=1.0, share=0.25, directed=True),
    "pfc_headroom": Kind(
        places=("link",), symptom="drop", causes=(9,), rate=0.05, burst_s=0.05, delay_us=300.0, directed=True
    ),
    "hash_collision": Kind(places=("link",), symptom="high_rtt", causes=(10,), delay_us=8_000.0, directed=True),
    "incast": Kind(places=("rnic",), symptom="high_rtt", causes=(11,), delay_us=8_000.0, directed=True),
    "cpu_overload": Kind(places=("host",), symptom="cpu_overload", causes=(12,), stall_ms=800.0),
    "pcie_slow": Kind(places=("rnic",), symptom="high_rtt", causes=(13,), delay_us=8_000.0),
    "acs": Kind(places=("rnic",), symptom="high_rtt", causes=(14,), delay_us=5_000.0),
    "pause_storm": Kind(places=("rnic", "switch"), symptom="high_rtt", causes=(5, 13), delay_us=10_000.0),
    "large_packet_drop": Kind(
        places=("link", "rnic"), symptom="large_packet_drop", rate=1.0, classes=frozenset({"large"}), directed=True
    ),
    "class_drop": Kind(places=("link",), symptom="class_drop", rate=1.0, classes=frozenset({"other"}), directed=True),
}


class FaultError(ValueError):
    """A fault that cannot be: the sentence says which key and what is allowed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault in a place, from `start_s` to `end_s` of the simulated time; None and empty: as its kind says."""

    kind: str
    component: str
    direction: str | None = None
    start_s: float = 0.0
    end_s: float = float("inf")
    rate: float | None = None
    share: float | None = None
    delay_us: float | None = None
    burst_s: float | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Placed:
    """A fault with its kind's values filled in and its component found: what the simulator computes with."""

    fault: Fault
    how: Kind
    candidate: Candidate
    elements: Ints
    rnics: Ints
    """Of a host or RNIC: whose agents and devices are concerned."""
    host: str | None
    """The host, for faults that concern its agent."""

    def active(self, start_s: float, end_s: float) -> float:
        """The share of [start, end) in which it fails."""
        a, b = max(start_s, self.fault.start_s), min(end_s, self.fault.end_s)
        if b <= a:
            return 0.0
        if not self.how.period_s:
            return (b - a) / (end_s - start_s)
        return (self._on(b) - self._on(a)) / (end_s - start_s)

    def _on(self, at_s: float) -> float:
        """Seconds of failing since the fault began, of one that comes and goes."""
        period, on = self.how.period_s, self.how.on
        whole, rest = divmod(at_s - self.fault.start_s, period)
        return float(whole * period * on + min(rest, period * on))

    def truth(self, epoch_ns: int = 0) -> dict[str, object]:
        """The right answer, in the words of an incident; times in ns, `closed_at_ns` None where it lasts."""
        f = self.fault
        end = None if np.isinf(f.end_s) else epoch_ns + round(f.end_s * 1e9)
        return {
            "component": self.candidate.component,
            "component_type": self.candidate.type,
            "direction": self.candidate.direction,
            "symptom": self.how.symptom,
            "kind": f.kind,
            "rate": self.how.rate or None,
            "share": self.how.share,
            "opened_at_ns": epoch_ns + round(f.start_s * 1e9),
            "closed_at_ns": end,
        }


class Places:
    """Finds components by name, and draws them. Compiled once for a fabric."""

    def __init__(self, fabric: Fabric) -> None:
        self.fabric = fabric
        self.topology: Topology = fabric.topology
        self._candidates: dict[str, list[Candidate]] | None = None

    @property
    def by_component(self) -> dict[str, list[Candidate]]:
        """Component -> its candidates (both directions, each direction)."""
        if self._candidates is None:
            out: dict[str, list[Candidate]] = {}
            for c in candidates_of(self.topology):
                out.setdefault(c.component, []).append(c)
            for host, rnics in self.topology.hosts.items():
                if host not in out:  # a host with one RNIC is no candidate of its own
                    (rnic,) = rnics
                    elements = {e for c in out[rnic.name] for e in c.elements}
                    out[host] = [Candidate(host, "host", None, frozenset(elements))]
            self._candidates = out
        return self._candidates

    def kind(self, name: str) -> Kind:
        """A kind by its name. Raises FaultError."""
        if name not in KINDS:
            hint = did_you_mean(name, KINDS) or "."
            raise FaultError(f"kind {shown(name)} is unknown{hint} Known: {', '.join(KINDS)}")
        return KINDS[name]

    def place(self, fault: Fault) -> Placed:
        """Put a fault into the fabric. Raises FaultError."""
        how = self.kind(fault.kind)
        found = self.by_component.get(fault.component)
        if found is None:
            a, dashes, b = fault.component.partition("--")
            if dashes and f"{b}--{a}" in self.by_component:
                return self.place(replace(fault, component=f"{b}--{a}"))
            hint = did_you_mean(fault.component, self.by_component) or "; `pingmesh topology show` lists all"
            raise FaultError(f"component {shown(fault.component)} is not in the topology{hint}")
        if found[0].type not in how.places:
            places = ", ".join(how.places)
            raise FaultError(
                f"{fault.kind} does not happen to a {found[0].type} ({fault.component}), only to: {places}"
            )
        directions = [c.direction for c in found]
        if fault.direction is not None and fault.direction not in directions:
            allowed = ", ".join(d for d in directions if d is not None)
            remedy = f"allowed: {allowed}" if allowed else f"a {found[0].type} has none, leave it out"
            raise FaultError(f"direction {shown(fault.direction)} of {fault.component} does not exist; {remedy}")
        wanted = fault.direction or (directions[0] if how.directed else "both" if len(found) > 1 else directions[0])
        return self._filled(fault, how, next(c for c in found if c.direction == wanted))

    def _filled(self, fault: Fault, how: Kind, candidate: Candidate) -> Placed:
        how = replace(
            how,
            rate=how.rate if fault.rate is None else fault.rate,
            share=how.share if fault.share is None else fault.share,
            delay_us=how.delay_us if fault.delay_us is None else fault.delay_us,
            burst_s=how.burst_s if fault.burst_s is None else fault.burst_s,
        )
        index = self.fabric.element_index
        elements = np.array(sorted(index[e] for e in candidate.elements), np.int64)
        host = candidate.component if candidate.type == "host" else None
        names = {
            "host": [r.name for r in self.topology.hosts.get(candidate.component, ())],
            "rnic": [candidate.component],
        }.get(candidate.type, [])
        rnics = np.array([self.fabric.rnic_index[n] for n in names], np.int64)
        return Placed(fault, how, candidate, elements, rnics, host)

    def draw(self, kind: str, rng: np.random.Generator, place: Place | None = None, **given: float) -> Fault:
        """A fault of a kind at a random place (of one sort), in a random direction where it has one."""
        how = self.kind(kind)
        if place is not None and place not in how.places:
            raise FaultError(f"{kind} does not happen to a {place}, only to: {', '.join(how.places)}")
        there = {found[0].type for found in self.by_component.values()}
        sorts = [place] if place else [p for p in how.places if p in there]
        wanted = sorts[int(rng.integers(len(sorts)))] if sorts else how.places[0]
        pool = [c for c, found in self.by_component.items() if found[0].type == wanted]
        if not pool:
            raise FaultError(f"the fabric has no {wanted} for {kind}")
        component = pool[int(rng.integers(len(pool)))]
        directions = [c.direction for c in self.by_component[component] if c.direction not in (None, "both")]
        direction = directions[int(rng.integers(len(directions)))] if how.directed and directions else None
        if kind == "incast":
            direction = "rx"
        if kind == "misroute":
            direction = "tx"
        return Fault(kind=kind, component=component, direction=direction, **given)
