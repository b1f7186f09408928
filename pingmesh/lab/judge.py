"""Is a verdict right? Incidents of the API beside the truth of a fault: one rule for demo, tests, benchmarks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Json = Mapping[str, Any]

FABRIC = frozenset({"link", "switch", "rnic", "leg", "tier"})


@dataclass(frozen=True)
class Judgement:
    """`named` is the incident that names the fault, `blamed` those that blame something that was not broken."""

    named: Json | None
    blamed: tuple[Json, ...]
    right: bool
    why: str


def is_component(truth: Json, incident: Json) -> bool:
    """The incident is about the component of the fault."""
    return (incident["component"], incident["component_type"]) == (truth["component"], truth["component_type"])


def is_direction(truth: Json, incident: Json) -> bool:
    """Directions agree; a truth without one (a switch, a host) has them both."""
    said = incident.get("direction")
    return said in (None, "both") if truth["direction"] is None else said == truth["direction"]


def is_symptom(truth: Json, incident: Json) -> bool:
    """The symptom is one of those that are right for the fault."""
    return incident["symptom"] in {truth["symptom"], *truth.get("symptoms_also_right", ())}


def matches(truth: Json, incident: Json) -> bool:
    """Component, direction and symptom are those of the fault."""
    return is_component(truth, incident) and is_direction(truth, incident) and is_symptom(truth, incident)


def is_wrong(truth: Json, incident: Json) -> bool:
    """Whether an incident blames what was not broken: anything else, or of a host's fault anything in the fabric."""
    if truth["symptom"] is not None and is_component(truth, incident):
        return False
    return bool(truth.get("fabric", True)) or incident["component_type"] in FABRIC


def judge(truth: Json, incidents: Sequence[Json]) -> Judgement:
    """Judge the incidents opened since a fault was injected.

    A fault of the fabric must be named and nothing else blamed; a fault of a host or an agent must be named and no
    part of the fabric blamed; a truth without symptom must bring no incident of the fabric at all.
    """
    named = next((i for i in incidents if matches(truth, i)), None)
    blamed = tuple(i for i in incidents if is_wrong(truth, i))
    if truth["symptom"] is None:
        return Judgement(None, blamed, not blamed, "nothing was blamed" if not blamed else "the fabric was blamed")
    if named is None:
        near = next((i for i in incidents if i["component"] == truth["component"]), None)
        if near is not None:
            return Judgement(None, blamed, False, f"found, but as {near['symptom']}, {near.get('direction')}")
        if any(truth["component"] in (i.get("alternatives") or ()) for i in incidents):
            return Judgement(None, blamed, False, "only named as an alternative")
        return Judgement(None, blamed, False, "something else was named" if incidents else "nothing was named")
    if blamed:
        return Judgement(named, blamed, False, f"{blamed[0]['component']} was blamed too")
    return Judgement(named, (), True, "named right")
