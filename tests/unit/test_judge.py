from __future__ import annotations

from typing import Any

import pytest

from pingmesh.lab.judge import judge

LINK: dict[str, Any] = {
    "component": "leaf1--spine2",
    "component_type": "link",
    "direction": "leaf1->spine2",
    "symptom": "blackhole",
    "symptoms_also_right": ["drop"],
    "fabric": True,
}
HOST: dict[str, Any] = {
    "component": "h3",
    "component_type": "host",
    "direction": None,
    "symptom": "host_down",
    "fabric": False,
}
NOTHING: dict[str, Any] = {
    "component": "broker",
    "component_type": None,
    "direction": None,
    "symptom": None,
    "fabric": False,
}


def incident(truth: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {
        **{k: truth[k] for k in ("component", "component_type", "direction", "symptom")},
        "alternatives": [],
        **changes,
    }


RNIC = {"component": "h3/rnic0", "component_type": "rnic", "direction": "both", "symptom": "rnic_down"}
AGENT = {"component": "h9", "component_type": "host", "direction": None, "symptom": "agent_down"}


@pytest.mark.parametrize(
    ("truth", "incidents", "right", "why"),
    [
        (LINK, [incident(LINK)], True, "named right"),
        (LINK, [incident(LINK, symptom="drop")], True, "named right"),
        (LINK, [incident(LINK, symptom="flap")], False, "found, but as flap"),
        (LINK, [incident(LINK, direction="spine2->leaf1")], False, "found, but as blackhole, spine2->leaf1"),
        (LINK, [incident(LINK), RNIC], False, "h3/rnic0 was blamed too"),
        (LINK, [incident(LINK), AGENT], False, "h9 was blamed too"),
        (LINK, [{**RNIC, "alternatives": ["leaf1--spine2"]}], False, "only named as an alternative"),
        (LINK, [RNIC], False, "something else was named"),
        (LINK, [], False, "nothing was named"),
        (HOST, [incident(HOST)], True, "named right"),
        (HOST, [incident(HOST), AGENT], True, "named right"),
        (HOST, [incident(HOST, direction="both")], True, "named right"),
        (HOST, [incident(HOST, direction="rx")], False, "found, but as host_down, rx"),
        (HOST, [incident(HOST), RNIC], False, "h3/rnic0 was blamed too"),
        (NOTHING, [], True, "nothing was blamed"),
        (NOTHING, [AGENT], True, "nothing was blamed"),
        (NOTHING, [RNIC], False, "the fabric was blamed"),
    ],
)
def test_judge(truth: dict[str, Any], incidents: list[dict[str, Any]], right: bool, why: str) -> None:
    judgement = judge(truth, incidents)
    assert (judgement.right, why in judgement.why) == (right, True)
