from __future__ import annotations

import configparser
import os
import shlex
import shutil
import socket
import subprocess
import time
from pathlib import Path

import pytest

from pingmesh.broker import find_mosquitto
from pingmesh.cli import main
from pingmesh.config import load

ROOT = Path(__file__).parents[2]
UNITS = sorted((ROOT / "deploy/systemd").glob("*.service"))


def unit(path: Path) -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None)
    parser.optionxform = str  # type: ignore[method-assign, assignment]
    parser.read(path)
    return parser


@pytest.mark.parametrize("path", UNITS, ids=lambda p: p.name)
def test_units_start_commands_that_parse(path: Path) -> None:
    service = unit(path)["Service"]
    program, command, *flags = shlex.split(service["ExecStart"])
    assert program.endswith("/bin/pingmesh")
    assert path.name == f"pingmesh-{command}.service"
    args = main.build_parser(command).parse_args([command, *flags])
    assert args.config == "/etc/pingmesh/pingmesh.yaml"
    assert service["Restart"] == "always"


def test_the_agent_alone_gets_a_capability() -> None:
    capabilities = {p.stem: unit(p)["Service"]["CapabilityBoundingSet"] for p in UNITS}
    assert capabilities == {
        "pingmesh-agent": "CAP_NET_RAW",
        "pingmesh-analyzer": "",
        "pingmesh-controller": "",
    }


@pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze checks units where it is installed"
)
@pytest.mark.parametrize("path", UNITS, ids=lambda p: p.name)
def test_systemd_knows_every_key(path: Path) -> None:
    done = subprocess.run(["systemd-analyze", "verify", path], capture_output=True, text=True, check=False, timeout=60)
    assert "Unknown" not in done.stderr


@pytest.mark.skipif(find_mosquitto() is None, reason="mosquitto is not installed")
def test_mosquitto_takes_the_example(tmp_path: Path) -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    text = (ROOT / "deploy/mosquitto.conf").read_text()
    assert "listener 1883 10.0.0.1" in text
    passwords = tmp_path / "passwd"
    passwords.write_text("")
    conf = tmp_path / "mosquitto.conf"
    user = "user root\n" if os.geteuid() == 0 else ""  # the tests' directory is closed to the user mosquitto
    conf.write_text(
        user
        + text.replace("listener 1883 10.0.0.1", f"listener {port} 127.0.0.1").replace(
            "/etc/pingmesh/mosquitto.passwd", str(passwords)
        )
    )
    mosquitto = find_mosquitto()
    assert mosquitto is not None
    process = subprocess.Popen([mosquitto, "-c", conf], stderr=subprocess.PIPE, text=True)
    try:
        for _ in range(100):
            with socket.socket() as s:
                if s.connect_ex(("127.0.0.1", port)) == 0:
                    return
            assert process.poll() is None, process.communicate()[1]
            time.sleep(0.05)
        pytest.fail("mosquitto does not listen")
    finally:
        process.terminate()
        process.communicate(timeout=10)


def test_the_example_broker_and_configuration_agree() -> None:
    settings = load(str(ROOT / "deploy/pingmesh.yaml"), environ={})
    listener = next(
        line.split()
        for line in (ROOT / "deploy/mosquitto.conf").read_text().splitlines()
        if line.startswith("listener")
    )
    assert listener == ["listener", str(settings.broker.port), settings.broker.host]
