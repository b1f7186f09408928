from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pingmesh.lab.client import Lab
from pingmesh.lab.namespaces import LabError

PING = [sys.executable, "-m", "pingmesh", "ping"]


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    directory = Path(tempfile.mkdtemp(prefix="pmping-"))
    try:
        try:
            lab = Lab.up(directory=directory / "lab", wait=60, leaves=2, spines=1, hosts_per_leaf=1)
        except LabError as error:
            if "namespaces" in str(error):
                pytest.skip(str(error))
            raise
        with lab:
            yield lab
    finally:
        shutil.rmtree(directory)


def ping(lab: Lab, *argv: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PINGMESH_LAB_DIR": str(lab.directory)}
    env.pop("PINGMESH_CONTROLLER", None)
    return subprocess.run([*PING, *argv], capture_output=True, text=True, timeout=60, check=False, env=env)


def test_by_names_from_outside_beside_a_running_agent(lab: Lab) -> None:
    done = ping(lab, "h1/rnic0", "h2/rnic0", "--count", "20", "--interval", "0.01", "--sport", "50123", "--json")
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout)
    assert (said["sent"], said["answered"], said["lost"]) == (20, 20, 0)
    assert (said["source"]["name"], said["target"]["name"]) == ("h1/rnic0", "h2/rnic0")
    assert said["network_rtt_us"]["median"] > 0
    for p in said["probes"]:
        assert p["t1"] <= p["t2"] < p["t5"] <= p["t6"]
        assert p["t4_t3"] > 0
        assert p["t5"] - p["t2"] > p["t4_t3"]
        assert (p["ack_sport"], p["ack_ttl"], p["arrived_dscp"]) == (50123, 61, 26)
    assert not lab.incidents()
    assert lab.lab_status()["processes"]


def test_an_unknown_target_has_a_remedy(lab: Lab) -> None:
    done = ping(lab, "h1/rnic0", "h2/rnic7")
    assert done.returncode == 2
    assert "did you mean h2/rnic0" in done.stderr


def test_without_a_controller_one_end_serves(lab: Lab) -> None:
    argv = lab.command("h2", [*PING, "--serve", "--device", "rnic0", "--json"])
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            target = json.loads(server.stdout.readline())["target"]
            near = [*PING, "rnic0", target, "--count", "5", "--interval", "0", "--size", "512", "--verbose"]
            done = lab.run("h1", *near)
            assert done.returncode == 0, done.stderr
            assert "5 probes, 5 answered, 0 lost (0.00%)" in done.stdout
            assert done.stdout.count("seq ") == 5
            assert "512 bytes" in done.stdout
        finally:
            server.terminate()


def test_ctrl_c_prints_the_summary(lab: Lab) -> None:
    env = os.environ | {"PINGMESH_LAB_DIR": str(lab.directory)}
    argv = [*PING, "h1/rnic0", "10.2.0.1,77,1,1", "--count", "0", "--interval", "0.1", "--timeout", "0.2"]
    argv += ["--controller", lab.controller]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, start_new_session=True, env=env) as running:
        assert running.stdout is not None
        for line in running.stdout:
            if line.startswith("seq 2"):
                break
        os.killpg(running.pid, signal.SIGINT)
        rest = running.stdout.read()
    assert "lost (100.00%)" in rest
    assert running.returncode == 1


def test_nobody_answers_for_an_agent_that_died(lab: Lab) -> None:
    lab.process("kill", "agent:h2")
    try:
        done = ping(lab, "h1/rnic0", "h2/rnic0", "--count", "2", "--timeout", "0.3")
        assert done.returncode == 1
        assert "2 lost (100.00%)" in done.stdout
    finally:
        lab.process("start", "agent:h2")
