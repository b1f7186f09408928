"""What was really done, in the terms in which the analyzer speaks of incidents."""

from __future__ import annotations

from dataclasses import dataclass, field

from pingmesh.incidents import rfc3339
from pingmesh.lab.faults.places import find_host, find_link, find_rnic, find_switch
from pingmesh.lab.faults.spec import Action, FaultSpec, Target
from topology.model import DirectedLink, Topology


@dataclass(frozen=True, slots=True)
class Expected:
    """The right answer to a fault. `component_type` and `symptom` None: no incident at all.

    `also` lists symptoms that are right too, where the evidence cannot tell them apart.
    """

    component: str
    component_type: str | None
    direction: str | None
    symptom: str | None
    also: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    fabric: bool = True
    """Whether a part of the fabric is at fault; if not, none may be blamed."""

    @property
    def sentence(self) -> str:
        """What a right analyzer answers, for people."""
        if self.symptom is None:
            return "no incident, and nothing in the fabric is blamed"
        where = f" ({self.direction})" if self.direction else ""
        rest = "nothing else is blamed" if self.fabric else "nothing in the fabric is blamed"
        return f"{self.component_type} {self.component}{where}: {self.symptom}; {rest}"


@dataclass(slots=True)
class Truth:
    """One fault over its life. Times in nanoseconds since the epoch."""

    id: str
    spec: FaultSpec
    expected: Expected
    injected_at: int
    ended_at: int | None = None
    error: str | None = None
    """Why the fault could not go on as asked."""
    counters: dict[str, dict[str, int]] = field(default_factory=dict)
    """By direction: `dropped` packets in all and dropped `probes` (with ACKs), of faults that drop."""

    @property
    def state(self) -> str:
        """`active`, or `ended` for one that is over by itself."""
        return "active" if self.ended_at is None else "ended"

    def public(self) -> dict[str, object]:
        """What `lab fault add|list --json` shows."""
        e = self.expected
        return {
            "id": self.id,
            "fault": self.spec.text,
            "component": e.component,
            "component_type": e.component_type,
            "direction": e.direction,
            "symptom": e.symptom,
            "symptoms_also_right": list(e.also),
            "ends": list(e.ends),
            "fabric": e.fabric,
            "expected": e.sentence,
            "injected_at": rfc3339(self.injected_at),
            "ended_at": rfc3339(self.ended_at),
            "state": self.state,
            "error": self.error,
            "counters": self.counters,
        }


def loss_directions(link: DirectedLink, direction: str) -> tuple[DirectedLink, ...]:
    """The directed links that a direction relative to `link` means."""
    back = link.link.reverse if link.is_forward else link.link.forward
    return {"forward": (link,), "reverse": (back,), "both": (link, back)}[direction]


def _loss_symptom(spec: FaultSpec) -> tuple[str, tuple[str, ...]]:
    if spec.larger_than is not None:
        return "large_packet_drop", ()
    if spec.dscp is not None:
        return "class_drop", ()
    if spec.flows is not None:
        return ("flow_blackhole", ()) if spec.loss >= 1 else ("drop", ("flow_blackhole",))
    return ("blackhole", ()) if spec.loss >= 1 else ("drop", ())


def _expect_link(topology: Topology, spec: FaultSpec) -> Expected:
    link = find_link(topology, *spec.names)
    ends = (link.source, link.target)
    if spec.action is Action.DOWN:
        return Expected(link.link.name, "link", "both", "link_down", ends=ends)
    if spec.action is Action.FLAP:
        return Expected(link.link.name, "link", "both", "flap", ("link_down",), ends)
    chosen = loss_directions(link, spec.direction)
    direction = "both" if len(chosen) == 2 else chosen[0].name
    if spec.action in (Action.CONGEST, Action.DELAY):
        return Expected(link.link.name, "link", direction, "high_rtt", ends=ends)
    symptom, also = _loss_symptom(spec)
    return Expected(link.link.name, "link", direction, symptom, also, ends)


def expect(topology: Topology, spec: FaultSpec) -> Expected:
    """The right answer to a fault. Raises FaultError for names that the topology does not have."""
    match spec.target:
        case Target.LINK:
            return _expect_link(topology, spec)
        case Target.RNIC:
            rnic = find_rnic(topology, spec.names[0])
            ends = (rnic.host, *(leg.switch for leg in rnic.legs))
            if spec.action is Action.DOWN:
                return Expected(rnic.name, "rnic", "both", "rnic_down", ("blackhole",), ends)
            symptom, also = _loss_symptom(spec)
            if symptom == "blackhole" and spec.direction == "both":
                also = ("rnic_down",)
            return Expected(rnic.name, "rnic", spec.direction, symptom, also, ends)
        case Target.SWITCH:
            switch = find_switch(topology, spec.names[0])
            if spec.action is Action.DOWN:
                return Expected(switch, "switch", None, "switch_down", ("blackhole",), (switch,))
            symptom, also = _loss_symptom(spec)
            return Expected(
                switch, "switch", None, symptom, ("switch_down",) if symptom == "blackhole" else also, (switch,)
            )
        case Target.HOST | Target.AGENT:
            host = find_host(topology, spec.names[0])
            symptoms = {
                Action.DOWN: "host_down",
                Action.PAUSE: "host_down",
                Action.STARVE: "cpu_overload",
                Action.KILL: "agent_down",
            }
            symptom_or_none = symptoms.get(spec.action)
            return Expected(
                host,
                "host" if symptom_or_none else None,
                None,
                symptom_or_none,
                ends=(host,),
                fabric=False,
            )
        case Target.BROKER | Target.CONTROLLER | Target.ANALYZER:
            return Expected(spec.target.value, None, None, None, fabric=False)
