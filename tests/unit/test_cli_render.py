from __future__ import annotations

import datetime
from typing import Any

import pytest

from pingmesh.cli import render
from pingmesh.cli.evidence import evidence_lines, path_text

NOW = datetime.datetime(2026, 3, 1, 14, 5, tzinfo=datetime.UTC)


EVIDENCE: dict[str, Any] = {
    "summary": "124 of 410 packets across leaf1--spine2 were lost",
    "sent": 410,
    "lost": 124,
    "classes": {"small": {"sent": 400, "lost": 100}, "large": {"sent": 10, "lost": 24}},
    "flows": [
        {
            "from": source,
            "to": target,
            "packets": packets,
            "source_port": port,
            "class": cls,
            "path": path,
            "sent": sent,
            "lost": lost,
        }
        for source, target, packets, port, cls, path, sent, lost in (
            ("h1/rnic0", "h2/rnic0", "probes", 49205, "small", ["h1/rnic0 tx", "h2/rnic0 rx"], 90, 0),
            (
                "h1/rnic0",
                "h14/rnic0",
                "probes",
                49203,
                "small",
                ["h1/rnic0 tx", "leaf1->spine2", "spine2->leaf4", "h14/rnic0 rx"],
                100,
                31,
            ),
            ("h14/rnic0", "h1/rnic0", "ACKs", 49204, "large", None, 10, 3),
        )
    ],
    "stalls": 3,
}


def incident(**changes: Any) -> dict[str, Any]:
    return {
        "id": "i-7",
        "component": "leaf1--spine2",
        "component_type": "link",
        "direction": "leaf1->spine2",
        "symptom": "drop",
        "class": None,
        "rate": 0.302,
        "rate_low": 0.27,
        "rate_high": 0.34,
        "state": "open",
        "opened_at": "2026-03-01T14:03:07.120Z",
        "closed_at": None,
        "confidence": 0.99,
        "priority": "P1",
        "alternatives": [],
        "evidence": {},
        **changes,
    }


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, "link leaf1->spine2 loses 30 % (27-34 %) of packets"),
        ({"rate_low": 0.301, "rate_high": 0.303}, "link leaf1->spine2 loses 30 % of packets"),
        ({"rate": None}, "link leaf1->spine2 loses an unknown share of packets"),
        ({"direction": "both", "symptom": "link_down"}, "link leaf1--spine2, both directions is down"),
        ({"direction": None, "symptom": "flap"}, "link leaf1--spine2 goes down and up again and again"),
        (
            {"component": "h3/rnic0", "component_type": "rnic", "direction": "tx", "symptom": "blackhole"},
            "RNIC h3/rnic0, sending side loses every packet",
        ),
        (
            {"component": "h3", "component_type": "host", "direction": None, "symptom": "cpu_overload"},
            "host h3 is short of CPU: its agent stalls, its delays are not the network's",
        ),
        (
            {"symptom": "class_drop", "class": "dscp46", "rate": 1.0, "rate_low": None},
            "link leaf1->spine2 drops one traffic class (dscp46) (100 %), the others pass",
        ),
        ({"symptom": "a_new_one"}, "link leaf1->spine2 a_new_one"),
    ],
)
def test_sentence(changes: dict[str, Any], text: str) -> None:
    assert render.sentence(incident(**changes)) == text


def test_diagnosis_answer_first_then_evidence_then_what_to_do() -> None:
    answer = {
        "verdict": "network",
        "incidents": [incident(alternatives=["leaf1"], evidence=EVIDENCE)],
        "findings": [{"subject": "h9/rnic3", "text": "is not in the topology", "kind": "not_in_topology"}],
        "coverage": {"links": 8, "covered": 8, "fewest_tuples": 16, "not_covered": []},
        "evidence": {"hosts": ["h1: agent online"], "links_with_loss": ["leaf1->spine2: 124 of 410 lost in 60 s"]},
        "next": ["Look at the optics of leaf1 port spine2.", "Drain the link."],
    }
    assert render.diagnosis_lines(answer, ["h1", "h14"], NOW) == [
        "NETWORK: link leaf1->spine2 loses 30 % (27-34 %) of packets, since 14:03:07 UTC (113 s ago), confidence 99 %",
        "  The evidence cannot tell leaf1--spine2 from leaf1.",
        "",
        "Evidence",
        "  124 of 410 packets across leaf1--spine2 were lost",
        "  could not reach, or lost packets:",
        "    h1/rnic0 -> h14/rnic0  31 of 100 probes lost, over leaf1->spine2->leaf4, source port 49203",
        "    h14/rnic0 -> h1/rnic0  3 of 10 large ACKs lost, path not known, source port 49204",
        "  got through:",
        "    h1/rnic0 -> h2/rnic0  0 of 90 probes lost, inside one ToR, source port 49205",
        "  class small: sent 400, lost 100",
        "  class large: sent 10, lost 24",
        "  stalls: 3",
        "  h1: agent online",
        "  links with loss:",
        "    leaf1->spine2: 124 of 410 lost in 60 s",
        "  coverage: 8 of 8 directed links between them probed as often as wanted, each by 16 5-tuples or more",
        "",
        "Also noticed (no fault of the fabric)",
        "  h9/rnic3: is not in the topology",
        "",
        "What to do",
        "  1. Look at the optics of leaf1 port spine2.",
        "  2. Drain the link.",
    ]


@pytest.mark.parametrize(
    ("verdict", "evidence", "first"),
    [
        ("innocent", {}, "NOT THE NETWORK: nothing is wrong on the fabric between h1 and h14"),
        ("insufficient_data", {}, "NOT ENOUGH DATA about h1 and h14: too little was measured"),
        ("insufficient_data", {"missing": ["a", "b"]}, "NOT ENOUGH DATA about h1 and h14: a; b"),
    ],
)
def test_diagnosis_without_incident(verdict: str, evidence: dict[str, Any], first: str) -> None:
    answer = {"verdict": verdict, "incidents": [], "findings": [], "coverage": None, "evidence": evidence, "next": []}
    assert render.diagnosis_lines(answer, ["h1", "h14"], NOW) == [first]


def test_status() -> None:
    status: dict[str, Any] = {
        "healthy": True,
        "coverage": 0.998,
        "agents": {"expected": 16, "online": 15, "died": ["h3"], "silent": []},
        "open_incidents": 0,
        "rtt_us": {"p50": 21.4, "p99": 50.0},
    }
    lines = render.status_lines(status, NOW)
    assert lines[0] == "HEALTHY: no open incidents"
    assert "  agents    15 of 16 online; died: h3" in lines
    assert "  coverage  99.8 % of directed switch links walked at their rate" in lines
    assert "  RTT       p50 21 µs, p99 50 µs" in lines
    broken = render.status_lines({**status, "open_incidents": 1, "incidents": [incident()]}, NOW)
    assert broken[:2] == [
        "BROKEN: 1 open incident",
        "  link leaf1->spine2 loses 30 % (27-34 %) of packets, since 14:03:07 UTC (113 s ago)",
    ]
    for changes, why in (
        ({}, "the first results have yet to come in"),
        ({"agents": {"online": 0}}, "no agent is online"),
        ({"analyzer": {"alive": False}}, "the controller does not hear the analyzer"),
    ):
        unknown = render.status_lines({**status, "healthy": False, **changes}, NOW)
        assert unknown[0] == f"NOT KNOWN: not enough data ({why})"
    assert "  coverage  no switch links" in render.status_lines({**status, "coverage": None}, NOW)


def test_incident_table() -> None:
    closed = incident(id="i-6", state="closed", closed_at="2026-03-01T14:04:07Z")
    lines = render.incident_lines([incident(), closed], NOW)
    assert lines[0].split() == ["ID", "STATE", "PRIORITY", "WHAT", "CONFIDENCE"]
    assert "i-7  open 113 s" in lines[1]
    assert "i-6  closed after 60 s" in lines[2]
    assert render.incident_lines([], NOW) == ["no incidents"]
    assert render.finding_lines([], NOW) == ["no findings"]


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0 s"), (119, "119 s"), (121, "2 min"), (7200, "2 h"), (200_000, "2 days")]
)
def test_duration(seconds: float, text: str) -> None:
    assert render.duration(seconds) == text


@pytest.mark.parametrize(
    ("share", "text"), [(None, "unknown"), (0.3, "30 %"), (0.0012, "0.12 %"), (0.0, "0 %"), (1, "100 %")]
)
def test_percent(share: float | None, text: str) -> None:
    assert render.percent(share) == text


def test_since_another_day_and_unknown() -> None:
    assert render.since("2026-02-27T14:05:00Z", NOW) == "since 2026-02-27 14:05:00 UTC (2 days ago)"
    assert render.since("yesterday", NOW) == ""


def test_path_over_parallel_cables_keeps_ports() -> None:
    assert path_text(["leaf1:p1->spine2:q1", "spine2:q9->leaf4:p2"]) == "over leaf1:p1->spine2:q1->leaf4:p2"


def test_evidence_lists_and_mappings() -> None:
    evidence = {"queues": [{"port": "p1", "of": "leaf1", "depth": 30.5}], "empty": [], "network_rtt_us": {"p50": 24.2}}
    assert evidence_lines(evidence) == ["RTT on the network: p50 24 µs", "queues:", "  port p1, of leaf1, depth 30.5"]


def test_an_incident_that_is_over() -> None:
    over = incident(state="closed", closed_at="2026-03-01T14:04:07Z")
    assert render.when(over, NOW) == "from 14:03:07 to 14:04:07 UTC (over)"


def test_coverage_names_what_is_missing() -> None:
    links = [f"leaf{n}->spine1" for n in range(1, 8)]
    line = render.coverage_line({"links": 8, "covered": 1, "fewest_tuples": 3, "not_covered": links})
    assert line.endswith("(not leaf1->spine1, leaf2->spine1, leaf3->spine1, leaf4->spine1, leaf5->spine1 and 2 more)")
    assert render.coverage_line({"links": 0}) == "coverage: no switch link lies between them"
