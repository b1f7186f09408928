"""The names that dashboards and scripts rely on, written out by hand: a change here breaks somebody else's work."""

from __future__ import annotations

import json
import re
from typing import Any, get_args
from urllib.parse import urlencode

import pytest
from prometheus_client.parser import text_string_to_metric_families
from test_controller_api import Bench

from pingmesh import topics
from pingmesh.analyzer.candidates import candidates_of
from pingmesh.cli import ask, diagnose, main
from pingmesh.cli.exits import Exit
from pingmesh.incidents import ComponentType, Symptom
from pingmesh.lab.faults import FaultSpec, parse
from pingmesh.lab.faults.truth import Truth, expect
from pingmesh.messages import FindingReport, Verdict, Verdicts, encode
from topology import files
from topology.generate import leaf_spine

INCIDENT = {
    "id",
    "cluster",
    "component",
    "ends",
    "component_type",
    "direction",
    "symptom",
    "class",
    "rate",
    "rate_low",
    "rate_high",
    "state",
    "opened_at",
    "closed_at",
    "confidence",
    "priority",
    "alternatives",
    "evidence",
    "history",
}
FINDING = {"id", "kind", "subject", "since", "text"}
STATUS = {"healthy", "coverage", "agents", "open_incidents"}
DIAGNOSIS = {"verdict", "incidents", "findings", "coverage", "evidence", "next"}
FAULT = {"id", "component", "component_type", "direction", "symptom", "injected_at"}
COMPONENT_TYPES = {"host", "rnic", "leg", "link", "switch", "tier"}
SYMPTOMS = {
    "drop",
    "blackhole",
    "flow_blackhole",
    "large_packet_drop",
    "class_drop",
    "link_down",
    "flap",
    "high_rtt",
    "rnic_down",
    "switch_down",
    "host_down",
    "agent_down",
    "cpu_overload",
}
TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z")


class Said:
    """The command line before a controller in which a link is broken."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.bench = Bench()
        self.bench.agents("h1", "h2", "h3", "h4")
        self._capsys = capsys
        monkeypatch.setenv("PINGMESH_CONTROLLER", "unix:/controller.sock")
        monkeypatch.setattr(ask, "get", self._get)

    def _get(self, address: str, path: str, **params: str | None) -> Any:
        query = urlencode({k: v for k, v in params.items() if v is not None})
        return self.bench.get(f"{path}?{query}")

    def break_link(self) -> None:
        finding = FindingReport(kind="class_mismatch", subject="h1/rnic0", since_ns=1, text="rewritten")
        self.bench.verdicts(
            Verdict(
                component="leaf1--spine1",
                component_type="link",
                direction="leaf1->spine1",
                symptom="drop",
                since_ns=10**18,
                rate=0.25,
            ),
            findings=(finding,),
        )

    def mend(self) -> None:
        m = Verdicts(cluster="lab", host=topics.ANALYZER, now_ns=1, closed=["leaf1--spine1"])
        self.bench.take(topics.ANALYZER, topics.VERDICTS, encode(m))

    def run(self, *argv: str) -> tuple[int, Any]:
        code = main.main([*argv, "--json"])
        return code, json.loads(self._capsys.readouterr().out)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Said:
    return Said(monkeypatch, capsys)


def test_incidents(said: Said) -> None:
    assert said.run("incidents") == (0, [])
    said.break_link()
    code, (incident,) = said.run("incidents")
    assert (code, set(incident)) == (1, INCIDENT)
    assert (incident["state"], incident["closed_at"], incident["class"]) == ("open", None, None)
    assert TIME.fullmatch(incident["opened_at"])
    assert all(TIME.fullmatch(h["at"]) for h in incident["history"])
    assert incident["priority"] in {"P0", "P1", "P2"}
    said.mend()
    code, (closed,) = said.run("incidents")
    assert (code, closed["id"], closed["state"]) == (0, incident["id"], "closed")
    assert TIME.fullmatch(closed["closed_at"])


def test_types_and_symptoms() -> None:
    assert set(get_args(ComponentType)) == COMPONENT_TYPES
    assert set(get_args(Symptom)) == SYMPTOMS


def test_findings(said: Said) -> None:
    said.break_link()
    code, (finding,) = said.run("findings")
    assert (code, set(finding)) == (0, FINDING)
    assert TIME.fullmatch(finding["since"])


def test_status(said: Said) -> None:
    code, status = said.run("status")
    assert code == 3  # the analyzer has not spoken
    assert set(status) >= STATUS
    said.bench.verdicts()
    said.bench.plan()
    code, status = said.run("status")
    assert (code, status["healthy"], status["open_incidents"]) == (0, True, 0)
    assert 0 < status["coverage"] <= 1
    said.break_link()
    code, status = said.run("status")
    assert (code, status["healthy"], status["open_incidents"]) == (1, False, 1)


def test_diagnose(said: Said) -> None:
    said.break_link()
    code, answer = said.run("diagnose", "--hosts", "h1,h3")
    assert (code, answer["verdict"]) == (1, "network")
    assert set(answer) >= DIAGNOSIS
    assert [set(i) for i in answer["incidents"]] == [INCIDENT]
    assert [set(f) for f in answer["findings"]] == [FINDING]


def test_verdicts_of_diagnose_and_their_exit_codes() -> None:
    assert diagnose.CODES == {"network": 1, "host": 1, "innocent": 0, "insufficient_data": 3}


def test_exit_codes() -> None:
    codes = {"HEALTHY": 0, "FAULT": 1, "USAGE": 2, "NOT_ENOUGH_DATA": 3, "INTERNAL": 4}
    assert {e.name: int(e) for e in Exit} == codes


def test_an_internal_error_never_looks_like_a_fault(said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(ask, "get", fail)
    assert main.main(["status"]) == 4
    with pytest.raises(SystemExit) as stopped:
        main.main(["status", "--no-such-flag"])
    assert stopped.value.code == 2


@pytest.mark.parametrize(
    ("argv", "answer"),
    [
        ("link leaf2 spine1 --loss 100% --direction forward", ("leaf2--spine1", "link", "leaf2->spine1", "blackhole")),
        ("link spine1 leaf2 --loss 30% --direction forward", ("leaf2--spine1", "link", "spine1->leaf2", "drop")),
        ("rnic h1/rnic0 --loss 30% --direction rx", ("h1/rnic0", "rnic", "rx", "drop")),
        ("switch spine1 --down", ("spine1", "switch", None, "switch_down")),
        ("host h2 --pause 5", ("h2", "host", None, "host_down")),
        ("agent h2 --kill", ("h2", "host", None, "agent_down")),
    ],
)
def test_faults(argv: str, answer: tuple[str | None, ...]) -> None:
    spec: FaultSpec = parse(argv.split())
    fault = Truth("f1", spec, expect(leaf_spine(2, 2, 2, 1), spec), 10**18).public()
    assert set(fault) >= FAULT
    assert tuple(fault[k] for k in ("component", "component_type", "direction", "symptom")) == answer
    assert TIME.fullmatch(str(fault["injected_at"]))


FABRIC = """
version: 1
cluster: lab
switches: {spine2: {tier: 2}, leaf10: {tier: 1}, leaf9: {tier: 1}}
hosts:
  gpu-001: {rnics: {mlx5_0: {legs: [{switch: leaf10, port: h1}, {switch: leaf9, port: h1}]}}}
links:
  - {a: spine2, a_port: p2, b: leaf10, b_port: p1}
  - {a: spine2, a_port: p3, b: leaf9, b_port: p1}
  - {a: spine2, a_port: p4, b: leaf9, b_port: p2}
"""


def test_components() -> None:
    fabric = files.parse(FABRIC)
    assert {k.name for k in fabric.links} == {
        "leaf10--spine2",
        "leaf9:p1--spine2:p3",
        "leaf9:p2--spine2:p4",
    }
    assert {d.name for d in fabric.directed_links if d.link.a == "leaf10"} == {"spine2->leaf10", "leaf10->spine2"}
    assert list(fabric.rnics) == ["gpu-001/mlx5_0"]
    named = {c.component for c in candidates_of(fabric) if c.type in ("rnic", "leg")}
    assert named == {"gpu-001/mlx5_0", "gpu-001/mlx5_0@leaf10", "gpu-001/mlx5_0@leaf9"}


def test_topics_and_metrics(said: Said) -> None:
    assert str(topics.Topic("prod", "h1", "report")) == "pingmesh/v1/prod/h1/report"
    said.bench.summary(("leaf1->spine1", 100, 1))
    families = list(text_string_to_metric_families(said.bench.ask("/metrics").text))
    assert families
    for family in families:
        assert family.name.startswith("pingmesh_"), family.name
        assert not re.search(r"_(ms|us|ns|milliseconds|microseconds|percent)(_|$)", family.name), family.name
