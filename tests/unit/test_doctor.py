from __future__ import annotations

import json
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from pingmesh.cli import ask, checks, main
from pingmesh.cli.check import Check
from pingmesh.cli.doctor import text
from pingmesh.config import AgentSettings, BrokerSettings, Settings


def test_everything_missing_is_named_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> Any:
        raise PermissionError(1, "Operation not permitted")

    def unshare(*_: object, **__: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess([], 1, "", "unshare: unshare failed: Operation not permitted\n")

    def no_controller(*_: object, **__: object) -> Any:
        raise ConnectionError("nobody there")

    monkeypatch.setattr(checks, "_which", lambda command: None)
    monkeypatch.setattr(subprocess, "run", unshare)
    monkeypatch.setattr(ask, "get", no_controller)
    monkeypatch.setattr(checks, "PROC_NET", Path("/nonexistent"))
    settings = Settings(broker=BrokerSettings(port=1), agent=AgentSettings(devices=["pm-none0"]))
    lab = {c.name: c for c in checks.checks(settings, "lab", "http://x")}
    for name in ("nft", "ip", "namespaces for the lab", "kernel: multipath routing"):
        assert lab[name].state == "failed", name
    assert (lab["mosquitto"].state, lab["tshark"].state) == ("warning", "warning")
    assert lab["nft"].remedy == "apt-get install nftables"

    monkeypatch.setattr(socket, "socket", refused)
    assert checks.raw_sockets("agent").state == "failed"
    monkeypatch.undo()
    monkeypatch.setattr(ask, "get", no_controller)
    agent = {c.name: c for c in checks.checks(settings, "agent", "http://x")}
    assert (agent["device pm-none0"].state, agent["broker"].state) == ("failed", "failed")
    assert agent["controller"].state == "warning"  # an agent never talks to it
    assert checks.api("http://x", "server").state == "failed"
    for found in (lab, agent):
        assert all(c.remedy for c in found.values() if c.state != "ok")


@pytest.mark.parametrize(("alive", "state"), [(True, "ok"), (False, "warning")])
def test_a_controller_without_analyzer_is_a_warning(monkeypatch: pytest.MonkeyPatch, alive: bool, state: str) -> None:
    monkeypatch.setattr(ask, "get", lambda *_: {"analyzer": {"alive": alive}})
    assert checks.api("http://x", None).state == state


def test_broker_that_accepts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        settings = Settings(broker=BrokerSettings(port=server.getsockname()[1]))
        assert checks.broker(settings, "agent").state == "ok"


def test_a_running_rxe_or_agent_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        s.bind(("127.0.0.1", 0))
        monkeypatch.setattr(checks, "ROCE_PORT", s.getsockname()[1])
        assert checks.roce_port().state == "warning"


def test_exit_code_and_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    found = [Check("Python", "ok", "3.11"), Check("nft", "failed", "not found", "apt-get install nftables")]
    monkeypatch.setattr("pingmesh.cli.doctor.checks", lambda *_: found)
    assert main.main(["doctor", "--role", "lab"]) == 1
    assert capsys.readouterr().out == text(found) + "\n"
    assert text(found).splitlines()[2].strip() == "-> apt-get install nftables"
    assert main.main(["doctor", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["checks"][1]["state"] == "failed"
    found.pop()
    assert main.main(["doctor"]) == 0
