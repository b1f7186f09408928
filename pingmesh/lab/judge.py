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


def matches(truth: Json, incident: Json) -> bool:
    """Component, direction and symptom are those of the fault."""
    symptoms = {truth["symptom"], *truth.get("symptoms_also_right", ())}
    return (
        incident["component"] == truth["component"]
        and incident["component_type"] == truth["component_type"]
        and incident.get("direction") == truth["direction"]
        and incident["symptom"] in symptoms
    )


def judge(truth: Json, incidents: Sequence[Json]) -> Judgement:
    """Judge the incidents opened since a fault was injected.

    A fault of the fabric must be named and nothing else blamed; a fault of a host or an agent must be named and no
    part of the fabric blamed; a truth without symptom must bring no incident of the fabric at all.
    """
    named = next((i for i in incidents if matches(truth, i)), None)
    others = [i for i in incidents if i is not named]
    blamed = tuple(i for i in others if truth.get("fabric", True) or i["component_type"] in FABRIC)
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
