from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pingmesh.cli import ask, endpoint, incidents, main
from pingmesh.cli.main import COMMANDS, Command
from pingmesh.config import ConfigError

INCIDENT: dict[str, Any] = {
    "id": "i-7",
    "component": "leaf1--spine2",
    "component_type": "link",
    "direction": "leaf1->spine2",
    "symptom": "blackhole",
    "state": "open",
    "opened_at": "2026-03-01T14:03:07.120Z",
    "closed_at": None,
    "confidence": 0.99,
    "priority": "P0",
}
STATUS: dict[str, Any] = {"healthy": True, "coverage": 1.0, "agents": {"online": 16}, "open_incidents": 0}
FINDING = {"id": "f-1", "kind": "not_in_topology", "subject": "h9/rnic3", "since": None, "text": "unknown"}

Fake = Callable[..., None]


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Fake:
    """A controller that answers by path; records nothing, checks the parameters it is given."""

    def install(answers: dict[str, Any], **expected: object) -> None:
        def get(address: str, path: str, **params: object) -> Any:
            assert address == "unix:/fake"
            assert {k: v for k, v in params.items() if v is not None}.items() >= expected.items()
            return json.loads(json.dumps(answers[path]))

        monkeypatch.setattr(ask, "get", get)
        monkeypatch.setenv("PINGMESH_CONTROLLER", "unix:/fake")

    return install


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a full device")
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_that_finds_no_room_is_told(unbuffered: str) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "pingmesh", "topology", "generate", "leaf-spine"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
            check=False,
        )
    assert done.returncode == 2
    assert done.stderr == "pingmesh: the output cannot be written (No space left on device); make room for it.\n"


def leaves(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    """The parser of every command below this one."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return [leaf for sub in dict.fromkeys(action.choices.values()) for leaf in leaves(sub)]
    return [parser]


def parsers(name: str) -> list[argparse.ArgumentParser]:
    top = main.build_parser(name)
    (action,) = [a for a in top._actions if isinstance(a, argparse._SubParsersAction)]
    return leaves(action.choices[name])


@pytest.mark.parametrize("name", COMMANDS)
def test_every_help_shows_an_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    for parser in parsers(name):
        assert "pingmesh " + name in (parser.epilog or parser.description or ""), parser.prog
    with pytest.raises(SystemExit) as stopped:
        main.main([name, "--help"])
    assert stopped.value.code == 0
    assert f"example: pingmesh {name}" in capsys.readouterr().out


RUN_FOREVER = {"agent", "controller", "analyzer"}


@pytest.mark.parametrize("name", sorted(COMMANDS.keys() - RUN_FOREVER))
def test_every_command_has_json(name: str) -> None:
    for parser in parsers(name):
        assert "--json" in parser.format_help(), parser.prog


@pytest.mark.parametrize(
    ("status", "code", "first"),
    [
        (STATUS, 0, "HEALTHY"),
        ({**STATUS, "healthy": False, "open_incidents": 1}, 1, "BROKEN: 1 open incident"),
        ({**STATUS, "healthy": False}, 3, "NOT KNOWN"),
    ],
)
def test_status(api: Fake, capsys: pytest.CaptureFixture[str], status: dict[str, Any], code: int, first: str) -> None:
    api({"/status": status, "/incidents": [INCIDENT]})
    assert main.main(["status"]) == code
    assert capsys.readouterr().out.startswith(first)
    assert main.main(["status", "--json"]) == code
    assert json.loads(capsys.readouterr().out) == status


@pytest.mark.parametrize(("verdict", "code"), [("network", 1), ("host", 1), ("innocent", 0), ("insufficient_data", 3)])
def test_diagnose(api: Fake, capsys: pytest.CaptureFixture[str], verdict: str, code: int) -> None:
    named = [INCIDENT] if code == 1 else []
    answer = {"verdict": verdict, "incidents": named, "findings": [], "coverage": None, "evidence": {}, "next": []}
    api({"/diagnose": answer}, hosts="h1,h14", since="2m")
    assert main.main(["diagnose", "--hosts", "h1, h14", "--since", "2m"]) == code
    assert ("link leaf1->spine2 loses every packet" in capsys.readouterr().out) == bool(named)
    assert main.main(["diagnose", "--hosts", "h1,h14", "--since", "2m", "--json"]) == code
    assert json.loads(capsys.readouterr().out) == answer


def test_incidents_and_findings(api: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    api({"/incidents": [INCIDENT], "/findings": [FINDING]})
    assert main.main(["incidents", "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == [INCIDENT]
    assert main.main(["findings"]) == 0
    assert "h9/rnic3" in capsys.readouterr().out
    api({"/incidents": [{**INCIDENT, "state": "closed", "closed_at": "2026-03-01T14:04:07Z"}]}, state="closed")
    assert main.main(["incidents", "--state", "closed"]) == 0


def test_follow_tells_changes_only() -> None:
    old = {**INCIDENT, "id": "i-1", "state": "closed"}
    refined = {**INCIDENT, "direction": "both"}
    closed = {**refined, "state": "closed"}
    answers = [[old], [old, INCIDENT], [old, {**INCIDENT, "confidence": 1.0}], [old, refined], [old, closed], [old]]
    assert list(incidents.follow(iter(answers))) == [INCIDENT, refined, closed]


def test_follow_waits_for_a_controller_that_restarts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(incidents, "POLL_S", 0)
    answers: list[Any] = [[], ConnectionError("gone"), ConnectionError("gone"), [INCIDENT]]

    def fetch() -> list[dict[str, Any]]:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        found: list[dict[str, Any]] = answer
        return found

    assert next(incidents.follow(incidents.patient(fetch))) == INCIDENT
    assert capsys.readouterr().err.count("waiting for it") == 1


def test_no_hosts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["diagnose", "--hosts", " ,"]) == 2
    assert "names no host" in capsys.readouterr().err


def test_unreachable_controller_is_no_fault(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PINGMESH_CONTROLLER", "http://127.0.0.1:1")
    assert main.main(["status"]) == 4
    error = capsys.readouterr().err
    assert "the controller at http://127.0.0.1:1 cannot be reached" in error
    assert "Traceback" not in error


def _module(run: Callable[[argparse.Namespace], int]) -> Any:
    return argparse.Namespace(HELP="x", add_arguments=lambda parser: None, run=run)


def test_exit_codes_of_errors(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def use(error: BaseException) -> int:
        def run(_: argparse.Namespace) -> int:
            raise error

        monkeypatch.setattr(main, "load", lambda _: _module(run))
        return main.main(["status"])

    assert use(ConfigError("file:1: broker.port: no.")) == 2
    assert capsys.readouterr().err == "pingmesh: file:1: broker.port: no.\n"
    assert use(RuntimeError("a bug")) == 4
    assert "internal error in `pingmesh status`: RuntimeError('a bug')" in capsys.readouterr().err
    assert use(KeyboardInterrupt()) == 130


def test_a_reader_that_left_is_no_internal_error_and_no_verdict() -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "pingmesh", "config", "dump"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, check=False, timeout=60)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


def test_errors_of_the_table_exist() -> None:
    import importlib

    for name in main.USER_ERRORS:
        module, _, cls = name.rpartition(".")
        assert issubclass(getattr(importlib.import_module(module), cls), Exception)


@pytest.mark.parametrize("argv", [[], ["nonsense"], ["status", "--nonsense"]])
def test_usage_errors_exit_2(argv: list[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main.main(argv)
    assert stopped.value.code == 2


def test_unknown_command_does_not_import_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(command: Command) -> Any:
        raise AssertionError(command)

    monkeypatch.setattr(main, "load", load)
    with pytest.raises(SystemExit):
        main.main(["--help"])


def test_agent_help_imports_nothing_heavy() -> None:
    script = (
        "import sys\n"
        "from pingmesh.cli.main import main\n"
        "try: main(['agent', '--help'])\n"
        "except SystemExit: pass\n"
        "print('\\n'.join({m.split('.')[0] for m in sys.modules}), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    imported = set(done.stderr.split())
    assert "agent" in imported
    heavy = {
        "numpy",
        "networkx",
        "starlette",
        "httpx",
        "uvicorn",
        "topology",
        "controller",
        "prometheus_client",
        "amqtt",
    }
    assert not imported & heavy


def test_controller_address(tmp_path: Path) -> None:
    import socket

    environ = {"PINGMESH_LAB_DIR": str(tmp_path)}
    assert endpoint.controller_address("unix:/x", {"PINGMESH_CONTROLLER": "unix:/y"}) == "unix:/x"
    assert endpoint.controller_address(None, {"PINGMESH_CONTROLLER": "unix:/y"}) == "unix:/y"
    assert endpoint.controller_address(None, environ) == endpoint.DEFAULT
    with socket.socket(socket.AF_UNIX) as s:
        s.bind(str(tmp_path / "controller.sock"))
        assert endpoint.controller_address(None, environ) == endpoint.DEFAULT  # a dead lab's socket
        s.listen()
        assert endpoint.controller_address(None, environ) == f"unix:{tmp_path}/controller.sock"


def test_config_check_and_dump(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PINGMESH_AGENT__HOST", "h7")
    file = tmp_path / "pingmesh.yaml"
    file.write_text("broker: {prot: 1}\n")
    assert main.main(["config", "check", str(file)]) == 2
    assert "did you mean broker.port?" in capsys.readouterr().out
    assert main.main(["config", "check", str(file), "--json"]) == 2
    assert len(json.loads(capsys.readouterr().out)["problems"]) == 1
    file.write_text("broker: {port: 1884}\n")
    assert main.main(["config", "check", str(file)]) == 0
    assert capsys.readouterr().out == f"{file}: ok\n"
    assert main.main(["config", "dump", str(file), "--json"]) == 0
    dumped = json.loads(capsys.readouterr().out)
    assert (dumped["broker"]["port"], dumped["agent"]["host"]) == (1884, "h7")
    assert main.main(["config", "dump", str(file)]) == 0
    assert "  port: 1884\n" in capsys.readouterr().out
