from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

import pytest

from pingmesh import up
from pingmesh.config import BrokerSettings, ConfigError, ControllerSettings, Settings
from pingmesh.up import Part

SLEEP = (sys.executable, "-c", "import time; print('here', flush=True); time.sleep(60)")


def part(name: str, code: str) -> Part:
    return Part(name, (sys.executable, "-c", code))


def test_one_that_dies_stops_the_others_and_is_named() -> None:
    lines: list[tuple[str, str]] = []
    parts = [Part("broker", SLEEP), part("controller", "print('last words'); raise SystemExit(3)")]
    started = time.monotonic()
    assert asyncio.run(up.supervise(parts, "ready", lambda *line: lines.append(line))) == 4
    assert time.monotonic() - started < 10
    assert ("controller", "last words") in lines
    assert ("up", "controller ended with exit code 3 (its last lines are above); stopping broker") in lines


def test_killed_by_a_signal_is_said() -> None:
    lines: list[tuple[str, str]] = []
    code = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    assert asyncio.run(up.supervise([part("broker", code)], "ready", lambda *line: lines.append(line))) == 4
    assert any("broker was killed by signal 9" in text for _, text in lines)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_all(number: signal.Signals) -> None:
    lines: list[tuple[str, str]] = []

    def emit(name: str, line: str) -> None:
        lines.append((name, line))
        if sum(text == "here" for _, text in lines) == 2:
            os.kill(os.getpid(), number)

    assert asyncio.run(up.supervise([Part("a", SLEEP), Part("b", SLEEP)], "ready", emit)) == 0
    assert ("up", "ready") in lines


def test_the_next_part_waits_for_the_one_before() -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    lines: list[tuple[str, str]] = []
    listen = (
        "import socket, time; time.sleep(0.5); s = socket.socket();"
        "s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1);"
        f"s.bind(('127.0.0.1', {port})); print('listening', flush=True); s.listen(); time.sleep(60)"
    )
    parts = [
        Part("broker", (sys.executable, "-c", listen), ("127.0.0.1", port)),
        part("controller", "print('started')"),
    ]
    assert asyncio.run(up.supervise(parts, "ready", lambda *line: lines.append(line))) == 4
    said = [text for _, text in lines]
    assert said.index("listening") < said.index("started")


def test_plan_needs_a_topology_and_a_free_port(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no topology; name a file with --topology"):
        up.plan(Settings(), "127.0.0.1", tmp_path, None)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def test_plan(tmp_path: Path) -> None:
    from topology import files
    from topology.generate import leaf_spine

    file = tmp_path / "topology.yaml"
    file.write_text(files.dump(leaf_spine(2, 2, 1, 1)))
    port, api = free_port(), free_port()
    settings = Settings(
        topology=str(file),
        broker=BrokerSettings(port=port),
        controller=ControllerSettings(listen=f"127.0.0.1:{api}"),
    )
    for taken, what in ((port, "broker"), (api, "API")):
        with socket.socket() as s:
            s.bind(("127.0.0.1", taken))
            s.listen()
            with pytest.raises(
                ConfigError, match=f"the {what} cannot listen on 127.0.0.1:{taken}: Address already in use"
            ):
                up.plan(settings, "127.0.0.1", tmp_path, None)
    with pytest.raises(
        ConfigError, match=r"topology.yaml/state cannot be made: Not a directory; choose another --state"
    ):
        up.plan(settings, "127.0.0.1", file / "state", None)
    broker, controller, analyzer = up.plan(settings, "127.0.0.1", tmp_path / "state", None)
    assert broker.address == ("127.0.0.1", port)
    assert f"ready: broker 127.0.0.1:{port} (" in up.welcome([broker, controller, analyzer])
    assert controller.address == ("127.0.0.1", api)
    assert controller.command[:4] == (sys.executable, "-m", "pingmesh", "controller")
    assert f"127.0.0.1:{port}" in analyzer.command
    assert str(tmp_path / "state/pingmesh.db") in controller.command


def test_log_lines() -> None:
    record = json.dumps(
        {"time": "2026-03-01T14:03:07.120+00:00", "level": "info", "logger": "a.b", "message": "m", "n": 1}
    )
    assert up.text_line("broker", record) == "broker     | 14:03:07 info    a.b: m n=1"
    assert up.text_line("broker", "plain [1") == "broker     | plain [1"
    assert json.loads(up.json_line("x", record))["part"] == "x"
    assert json.loads(up.json_line("x", "plain")) == {"part": "x", "message": "plain"}
    failed = json.dumps({"level": "error", "logger": "a", "message": "m", "exception": "Trace\nback"})
    assert up.text_line("broker", failed).endswith("\nbroker     | Trace\nbroker     | back")
