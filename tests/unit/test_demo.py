from __future__ import annotations

import argparse
import io
import json
import random
from types import TracebackType
from typing import Any

import pytest

from pingmesh.lab import demo
from topology.generate import leaf_spine

TRUTH: dict[str, Any] = {
    "component": "leaf1--spine1",
    "component_type": "link",
    "direction": "both",
    "symptom": "link_down",
    "fault": "link leaf1 spine1 --down",
    "fabric": True,
    "injected_at": "2026-03-01T14:00:00.000Z",
}


class FakeLab:
    """A lab whose analyzer names every fault as told in `answer`, and closes it when it is cleared."""

    def __init__(self, answer: dict[str, Any] | None, false_alarm: bool = False) -> None:
        self.topology = leaf_spine(2, 2, 1, 1)
        self.answer = answer
        self.known: list[dict[str, Any]] = [self.incident("i-0", TRUTH)] if false_alarm else []
        self.told: list[list[str]] = []
        self.left = False

    def incident(self, name: str, answer: dict[str, Any]) -> dict[str, Any]:
        return {**answer, "id": name, "state": "open", "opened_at": "2026-03-01T14:00:01.500Z", "evidence": {}}

    def __enter__(self) -> FakeLab:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.left = True

    def status(self) -> dict[str, Any]:
        count = sum(i["state"] == "open" for i in self.known)
        return {"agents": {"online": 2}, "coverage": 1.0, "enough_data": True, "open_incidents": count, "rtt_us": {}}

    def incidents(self) -> list[dict[str, Any]]:
        return self.known

    def fault_add(self, argv: list[str]) -> dict[str, Any]:
        self.told.append(argv)
        if self.answer:
            self.known.append(self.incident(f"i-{len(self.known) + 1}", self.answer))
        return TRUTH

    def fault_clear(self) -> list[dict[str, Any]]:
        for i in self.known:
            i["state"] = "closed"
        return []


def run(lab: FakeLab, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> int:
    monkeypatch.setattr(demo.Lab, "up", lambda **_: lab)
    monkeypatch.setattr(demo, "SETTLE_S", 0)
    monkeypatch.setattr(demo, "OPEN_WITHIN_S", 0.1)
    monkeypatch.setattr(demo.time, "sleep", lambda _: None)
    args = argparse.Namespace(faults=2, healthy=0.0, seed=1, json=False)
    vars(args).update(changes)
    return demo.run(args)


def test_all_named_right(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    lab = FakeLab(TRUTH)
    assert run(lab, monkeypatch) == 0
    out = capsys.readouterr().out
    assert "verdict: link leaf1--spine1, both directions is down, after 1.5 s" in out
    assert "2 of 2 faults named right, 0 false alarms" in out
    assert lab.left
    assert len(lab.told) == 2


def test_a_wrong_name_and_silence_fail(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(FakeLab({**TRUTH, "component": "leaf2--spine1"}), monkeypatch) == 1
    assert "WRONG: something else was named" in capsys.readouterr().out
    assert run(FakeLab(None), monkeypatch) == 1
    assert "verdict: no incident" in capsys.readouterr().out


def test_a_false_alarm_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(FakeLab(TRUTH, false_alarm=True), monkeypatch, json=True) == 1
    captured = capsys.readouterr()
    summary = json.loads(captured.out)
    assert (summary["false_alarms"], summary["right"], len(summary["rounds"])) == (1, False, 2)
    assert "FALSE ALARM" in captured.err


def test_a_busy_machine_is_no_false_alarm(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    lab = FakeLab(TRUTH)
    short = {"component": "h1", "component_type": "host", "direction": None, "symptom": "cpu_overload"}
    lab.known.append(lab.incident("i-0", short))
    add = lab.fault_add

    def add_with_noise(argv: list[str]) -> dict[str, Any]:
        lab.known.append(lab.incident(f"n-{len(lab.known)}", {**short, "component": "h2"}))
        return add(argv)

    monkeypatch.setattr(lab, "fault_add", add_with_noise)
    assert run(lab, monkeypatch) == 0
    out = capsys.readouterr().out
    assert "this machine is busy: h1 had too little CPU" in out
    assert "2 of 2 faults named right, 0 false alarms" in out


@pytest.mark.parametrize("flags", [["--faults", "-1"], ["--faults", "x"], ["--healthy", "-4"], ["--healthy", "nan"]])
def test_flags_that_make_no_sense(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    with pytest.raises(SystemExit) as refused:
        parser.parse_args(flags)
    assert refused.value.code == 2
    assert "give" in capsys.readouterr().err


def test_a_lab_that_is_never_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = FakeLab(TRUTH)
    monkeypatch.setattr(lab, "status", lambda: {"agents": {"online": 1, "expected": 2}})
    monkeypatch.setattr(demo, "ONLINE_WITHIN_S", 0.0)
    with pytest.raises(demo.NotReadyError, match="agents: 1 of 2 online"):
        run(lab, monkeypatch)
    assert lab.left


def test_the_same_seed_draws_the_same_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = FakeLab(TRUTH), FakeLab(TRUTH)
    run(one, monkeypatch)
    run(two, monkeypatch)
    assert one.told == two.told
    assert one.told[0] == demo.random_spec(random.Random(1), one.topology)


def test_progress_carries_the_time() -> None:
    out = io.StringIO()
    demo.Demo(out).say("hello")
    assert out.getvalue() == "[0:00] hello\n"
