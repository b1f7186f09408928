"""A lab's life: started, asked, crashed, interrupted, ended; what it leaves behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from lab_rig import cgroups_of, eventually, fabric, processes_of

from pingmesh.lab.client import Lab
from pingmesh.lab.control import LabNotRunningError, ask
from pingmesh.lab.namespaces import LabError
from topology.generate import leaf_spine

pytestmark = pytest.mark.lab

TINY = leaf_spine(2, 1, 1, 1)
CLI = [sys.executable, "-m", "pingmesh", "lab"]


@pytest.fixture
def directory() -> Iterator[Path]:
    """A short path for a lab's state, not yet there."""
    base = Path(tempfile.mkdtemp(prefix="pmlab-"))
    base.chmod(0o711)
    yield base / "lab"
    if (base / "lab").exists():  # the test failed: its lab must not run on under the others
        cli(base / "lab", "down")
    shutil.rmtree(base)


def cli(directory: Path, *args: str, prefix: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PINGMESH_LAB_DIR": str(directory)}
    return subprocess.run([*prefix, *CLI, *args], env=env, capture_output=True, text=True, timeout=60, check=False)


def links_here() -> str:
    return subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout


def assert_nothing_left(directory: Path, pid: int | None = None) -> None:
    assert not directory.exists()
    assert eventually(lambda: not processes_of(directory)), processes_of(directory)
    if pid is not None:
        assert not cgroups_of(pid)


def test_a_whole_lab_starts_is_driven_and_leaves_nothing(directory: Path) -> None:
    before = links_here()
    with Lab.up(TINY, directory=directory) as lab:
        status = lab.lab_status()
        assert status["state"] == "ready"
        names = ["broker", "controller", "analyzer", "agent:h1", "agent:h2"]
        assert [p["name"] for p in status["processes"]] == names
        assert links_here() == before
        assert lab.wait_ready(30), status
        assert all(p["state"] == "running" for p in lab.lab_status()["processes"])
        if status["cgroups"]:
            members = Path(status["cgroups"], "h1", "cgroup.procs").read_text().split()
            assert len(members) == 1
            command = Path("/proc", members[0], "cmdline").read_bytes().decode()
            assert "agent\0" in command
            assert "--host\0h1\0" in command
        assert lab.process("pause", "agent:h1")["state"] == "paused"
        assert lab.process("resume", "agent:h1")["state"] == "running"
        assert lab.process("stop", "agent:h1") == lab.process("stop", "agent:h1")
        assert lab.process("restart", "agent:h1")["starts"] == 2
        with pytest.raises(LabError, match="no process 'agent:h9'"):
            lab.process("kill", "agent:h9")
        victim = lab.process("restart", "agent:h2")["pid"]
        assert lab.run("mgmt", "kill", "-KILL", str(victim)).returncode == 0
        assert eventually(lambda: lab.lab_status()["processes"][4]["state"] == "crashed")
        assert lab.lab_status()["processes"][4]["exit_code"] == -signal.SIGKILL
    assert_nothing_left(directory, status["pid"])
    assert links_here() == before


def test_a_lab_that_was_killed_is_cleaned_up_by_the_next(directory: Path) -> None:
    lab = Lab.up(TINY, directory=directory)
    first = lab.lab_status()
    os.kill(first["pid"], signal.SIGKILL)
    assert eventually(lambda: not [p for p in processes_of(directory) if "supervisor" not in p])
    with pytest.raises(LabNotRunningError, match="pingmesh lab up"):
        lab.lab_status()
    assert directory.exists()
    with Lab.up(TINY, directory=directory, agents=False) as second:
        assert second.lab_status()["pid"] != first["pid"]
        assert not cgroups_of(first["pid"])
    lab.down()
    assert_nothing_left(directory, first["pid"])


def test_a_second_lab_in_the_same_place_is_refused_and_the_first_lives_on() -> None:
    with fabric(TINY) as lab:
        with pytest.raises(LabError, match="already runs"):
            Lab.up(TINY, directory=lab.directory, agents=False)
        assert lab.lab_status()["state"] == "ready"
        assert lab.run("h1", "true").returncode == 0


@pytest.mark.parametrize(("delay", "times"), [(0.0, 1), (0.3, 1), (0.6, 1), (1.2, 1), (1.2, 2)])
def test_ctrl_c_while_starting_leaves_nothing(directory: Path, delay: float, times: int) -> None:
    env = os.environ | {"PINGMESH_LAB_DIR": str(directory)}
    argv = [*CLI, "up", "--leaves", "4", "--spines", "4"]
    # A shell starts what runs in its background with Ctrl-C ignored, and whoever runs the tests may be such.
    up = subprocess.Popen(
        argv,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    # Before the directory exists there is nothing to interrupt but the imports of Python itself.
    assert eventually(directory.exists)
    time.sleep(delay)
    for _ in range(times):
        up.send_signal(signal.SIGINT)
        time.sleep(0.1)
    out, err = up.communicate(timeout=30)
    assert up.returncode == 130, out + err
    assert_nothing_left(directory)


def test_down_without_a_lab_is_no_error(directory: Path) -> None:
    done = cli(directory, "down", "--json")
    assert (done.returncode, json.loads(done.stdout)) == (0, {"existed": False})
    assert not directory.exists()


def test_the_command_line_from_up_to_down(directory: Path) -> None:
    up = cli(directory, "up", "--leaves", "1", "--spines", "1", "--hosts-per-leaf", "2", "--no-agents", "--json")
    assert up.returncode == 0, up.stderr
    assert json.loads(up.stdout)["hosts"] == 2
    assert "fabric built" in up.stderr
    again = cli(directory, "up", "--no-agents")
    assert again.returncode == 2
    assert "pingmesh lab down" in again.stderr
    assert json.loads(cli(directory, "status", "--json").stdout)["state"] == "ready"
    devices = cli(directory, "exec", "h1", "--", "ls", "/sys/class/net").stdout.split()
    assert sorted(devices) == ["lo", "mgmt0", "rnic0"]
    assert cli(directory, "exec", "leaf1", "ip", "-br", "link").stdout.count("UP") >= 3
    assert cli(directory, "exec", "h2", "--", "sh", "-c", "exit 7").returncode == 7
    unknown = cli(directory, "exec", "h3", "--", "true")
    assert unknown.returncode == 2
    assert "no node 'h3'" in unknown.stderr
    assert "ready" in cli(directory, "logs", "supervisor").stdout
    assert "there is supervisor" in cli(directory, "logs", "agent:h1").stderr
    assert cli(directory, "down").stdout == "lab removed\n"
    assert_nothing_left(directory)


def test_logs_are_kept_on_demand_and_do_not_disturb_the_next_lab(directory: Path) -> None:
    Lab.up(TINY, directory=directory, agents=False).down(keep_logs=True)
    assert [p.name for p in directory.iterdir()] == ["logs"]
    with Lab.up(TINY, directory=directory, agents=False):
        pass
    assert_nothing_left(directory)


def test_a_directory_that_holds_other_things_is_left_alone(directory: Path) -> None:
    directory.mkdir()
    (directory / "thesis.tex").write_text("x")
    with pytest.raises(LabError, match=r"thesis\.tex"):
        Lab.up(TINY, directory=directory, agents=False)
    assert (directory / "thesis.tex").read_text() == "x"


def test_too_long_a_path_is_named(directory: Path) -> None:
    with pytest.raises(LabError, match="PINGMESH_LAB_DIR"):
        Lab.up(TINY, directory=directory / ("x" * 100), agents=False)


def test_requests_that_make_no_sense_are_answered(directory: Path) -> None:
    with fabric(TINY) as lab:
        path = lab.directory / "lab.sock"
        for request, answer in (
            ({"cmd": "dance"}, "no command 'dance'"),
            ({}, '"cmd"'),
            ({"cmd": "fault", "action": "add", "spec": {"target": "moon"}}, "not understood"),
            ({"cmd": "fault", "action": "mend"}, "'mend'"),
            ({"cmd": "restart"}, "no process"),
        ):
            with pytest.raises(LabError, match=answer):
                ask(path, request)
        assert lab.lab_status()["state"] == "ready"


def test_an_ordinary_user_has_a_lab_too(directory: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("the whole suite runs as an ordinary user already")
    user = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--")
    if subprocess.run([*user, sys.executable, "-c", "import pingmesh.lab.cli"], check=False).returncode:
        pytest.skip("an ordinary user cannot read this installation of pingmesh")
    if subprocess.run([*user, "unshare", "--user", "--map-root-user", "--net", "true"], check=False).returncode:
        pytest.skip("this system gives ordinary users no namespaces")
    os.chown(directory.parent, 65534, 65534)
    shape = ("--leaves", "2", "--spines", "2", "--hosts-per-leaf", "1")
    up = cli(directory, "up", *shape, "--json", "--wait", "30", prefix=user)
    try:
        assert up.returncode == 0, up.stderr
        assert json.loads(up.stdout)["cgroups"] is None
        assert directory.stat().st_uid == 65534
        done = cli(directory, "exec", "h1", "--", "cat", "/proc/self/uid_map", prefix=user)
        assert done.stdout.split() == ["0", "65534", "1"], done.stderr
        fault = cli(directory, "fault", "add", "link", "leaf1", "spine1", "--down", "--json", prefix=user)
        assert json.loads(fault.stdout)["component"] == "leaf1--spine1"
    finally:
        down = cli(directory, "down", prefix=user)
    assert down.returncode == 0, down.stderr
    assert_nothing_left(directory)


def test_where_namespaces_are_refused_a_sentence_says_what_to_do(directory: Path) -> None:
    refuse = (
        "unshare",
        "--user",
        "--map-root-user",
        "sh",
        "-c",
        'echo 0 > /proc/sys/user/max_net_namespaces; exec "$@"',
    )
    if subprocess.run([*refuse, "-", "true"], check=False, capture_output=True).returncode:
        pytest.skip("this system does not let namespaces be limited")
    done = cli(directory, "up", "--no-agents", prefix=(*refuse, "-"))
    assert done.returncode == 2
    assert "CAP_SYS_ADMIN" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert_nothing_left(directory)
