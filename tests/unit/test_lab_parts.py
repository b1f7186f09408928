"""The lab's parts that need no namespaces: names, seeds, options, processes, state, the control socket."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pingmesh.lab import control, names
from pingmesh.lab.cgroup import HostCgroup, LabCgroups, remove_stale
from pingmesh.lab.hashing import router_seed
from pingmesh.lab.namespaces import LabError
from pingmesh.lab.options import LabOptions
from pingmesh.lab.processes import Processes, ProcessState
from pingmesh.lab.state import LabRecord, StateDirectory, is_exiting, start_ticks
from topology import files
from topology.generate import leaf_spine


def test_a_port_keeps_its_name_where_the_kernel_takes_it() -> None:
    assert names.interface_name("spine1") == "spine1"
    assert names.interface_name("a" * 15) == "a" * 15


@pytest.mark.parametrize("port", ["a" * 16, "Ethernet1/1", "lo", "mgmt0", "..", "", "port with blanks"])
def test_any_other_gets_a_short_one_that_is_always_the_same(port: str) -> None:
    name = names.interface_name(port)
    assert name == names.interface_name(port)
    assert name not in names.RESERVED
    assert 0 < len(name) <= 15
    assert not set(name) & set("/ ")


def test_long_ports_that_begin_alike_stay_apart() -> None:
    ports = [f"very-long-port-name-{n}" for n in range(500)]
    assert len({names.interface_name(p) for p in ports}) == 500


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("rnic0:", "a-device-name-too-long:"), "1 to 15"),
        ((", address: 10.1.0.1", ""), "h1/rnic0 needs"),
        ((", a_address: 172.16.0.0", ""), "leaf1--spine1 needs"),
    ],
)
def test_a_topology_that_no_lab_can_be_made_of_is_refused_in_a_sentence(change: tuple[str, str], message: str) -> None:
    text = """
version: 1
cluster: x
switches: {leaf1: {tier: 1}, spine1: {tier: 2}}
hosts:
  h1: {rnics: {rnic0: {switch: leaf1, address: 10.1.0.1, switch_address: 10.1.0.0}}}
links: [{a: leaf1, b: spine1, a_address: 172.16.0.0, b_address: 172.16.0.1}]
"""
    names.check(files.parse(text))
    changed = files.parse(text.replace(*change))
    with pytest.raises(LabError, match=message):
        names.check(changed)


def test_more_hosts_than_the_management_bridge_has_ports_are_refused() -> None:
    names.check(leaf_spine(10, 1, 100, 1))
    with pytest.raises(LabError, match="1001 hosts are too many for a lab on one machine: 1000 at most"):
        names.check(leaf_spine(11, 1, 91, 1))


def test_a_process_that_is_past_saving_is_told_from_one_that_runs(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "stat").write_text("7 (a) b) D 1 7 7 0 -1 4194308 0 0")
    assert is_exiting(7, tmp_path)
    assert is_exiting(8, tmp_path)
    assert not is_exiting(os.getpid())


def test_every_router_has_a_seed_of_its_own() -> None:
    seeds = {router_seed(lab, f"leaf{n}") for lab in range(4) for n in range(500)}
    assert len(seeds) == 2000
    assert min(seeds) > 0
    assert max(seeds) < 1 << 32


def test_pods_make_three_tiers() -> None:
    t = LabOptions(pods=2, leaves=2, spines=4, hosts_per_leaf=1).generate()
    assert {s.tier for s in t.switches.values()} == {1, 2, 3}
    assert LabOptions(leaves=2, spines=3).generate() == leaf_spine(2, 3, 4, 1)


# ---------------------------------------------------------------- processes


async def state_of(processes: Processes, name: str, wanted: ProcessState) -> None:
    for _ in range(200):
        if processes.get(name).state is wanted:
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"{name} is {processes.get(name).state}, not {wanted}")


async def said(log: Path, text: str) -> None:
    assert await settles(lambda: log.read_text() == text)


async def settles(condition: Callable[[], bool]) -> bool:
    for _ in range(100):
        if condition():
            return True
        await asyncio.sleep(0.02)
    return False


def kernel_state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


async def test_a_process_is_started_paused_stopped_and_restarted(tmp_path: Path) -> None:
    processes = Processes()
    processes.add("p", lambda: ["sh", "-c", "echo started; exec sleep 100"], tmp_path / "p.log")
    assert processes.get("p").state is ProcessState.NEW
    await processes.start("p")
    await processes.start("p")
    pid = processes.pid("p")
    assert pid is not None
    assert processes.get("p").starts == 1
    await said(tmp_path / "p.log", "started\n")
    processes.pause("p")
    assert processes.get("p").state is ProcessState.PAUSED
    assert await settles(lambda: kernel_state(pid) == "T")
    processes.resume("p")
    assert await settles(lambda: kernel_state(pid) != "T")
    processes.pause("p")
    await processes.stop("p")
    await processes.stop("p")
    assert processes.get("p").state is ProcessState.STOPPED
    assert processes.get("p").exit_code == -15
    assert processes.pid("p") is None
    await processes.restart("p")
    assert processes.get("p").starts == 2
    await said(tmp_path / "p.log", "started\n" * 2)
    await processes.kill("p")
    assert processes.get("p").exit_code == -9


async def test_who_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    processes = Processes()
    processes.add("p", lambda: ["sh", "-c", "trap '' TERM; echo up; while :; do sleep 0.1; done"], tmp_path / "p.log")
    await processes.start("p")
    await said(tmp_path / "p.log", "up\n")
    await processes.stop("p", patience=0.2)
    assert processes.get("p").exit_code == -9


async def test_a_crash_is_visible_and_not_mended(tmp_path: Path) -> None:
    processes = Processes()
    processes.add("p", lambda: ["sh", "-c", "exit 3"], tmp_path / "p.log")
    await processes.start("p")
    await state_of(processes, "p", ProcessState.CRASHED)
    assert processes.get("p").exit_code == 3
    await asyncio.sleep(0.1)
    assert processes.get("p").starts == 1


async def test_all_stop_together_agents_before_the_broker(tmp_path: Path) -> None:
    processes = Processes()
    out = tmp_path / "order"
    for name in ("broker", "agent:h1", "agent:h2"):
        script = f"trap 'echo {name} >> {out}; exit 0' TERM; echo up; while :; do sleep 0.02; done"
        processes.add(name, lambda script=script: ["sh", "-c", script], tmp_path / name)  # type: ignore[misc]
        await processes.start(name)
    for name in processes.names:
        await said(tmp_path / name, "up\n")
    await processes.stop_all()
    order = out.read_text().split()
    assert sorted(order) == ["agent:h1", "agent:h2", "broker"]
    assert order[-1] == "broker"


async def test_an_unknown_process_is_named_with_those_there_are(tmp_path: Path) -> None:
    processes = Processes()
    processes.add("broker", lambda: ["true"], tmp_path / "log")
    with pytest.raises(LabError, match="no process 'brocker': it has broker"):
        await processes.start("brocker")
    assert processes.limit_cpu("h1", 0.5) is False


# ---------------------------------------------------------------- control groups


@pytest.mark.parametrize(
    ("version", "share", "expected"),
    [
        (1, 0.02, {"cpu.cfs_period_us": "1000000", "cpu.cfs_quota_us": "20000"}),
        (1, 0.0001, {"cpu.cfs_period_us": "1000000", "cpu.cfs_quota_us": "1000"}),
        (1, None, {"cpu.cfs_period_us": "1000000", "cpu.cfs_quota_us": "-1"}),
        (2, 0.5, {"cpu.max": "500000 1000000"}),
        (2, None, {"cpu.max": "max 1000000"}),
    ],
)
def test_a_limit_is_written_as_the_kernel_wants_it(
    tmp_path: Path, version: int, share: float | None, expected: dict[str, str]
) -> None:
    HostCgroup(tmp_path, version).limit(share)
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == expected


def test_no_hierarchy_no_groups(tmp_path: Path) -> None:
    assert LabCgroups.create(1, ["h1"], tmp_path) is None


def test_groups_of_labs_that_have_gone_are_removed(tmp_path: Path) -> None:
    proc, cpu = tmp_path / "proc", tmp_path / "cg" / "cpu"
    for path in (proc / "41", cpu / "pingmesh-lab-41" / "h1", cpu / "pingmesh-lab-42" / "h1", cpu / "other-43"):
        path.mkdir(parents=True)
    remove_stale(tmp_path / "cg", proc)
    assert sorted(p.name for p in cpu.iterdir()) == ["other-43", "pingmesh-lab-41"]


# ---------------------------------------------------------------- state


def test_another_process_of_the_same_number_is_not_the_lab(tmp_path: Path) -> None:
    ticks = start_ticks(os.getpid())
    assert ticks is not None
    state = StateDirectory(tmp_path)
    for claimed, alive in ((ticks, True), (ticks - 1, False)):
        record = LabRecord(pid=os.getpid(), start_ticks=claimed, user_namespace=False)
        state.record_file.write_text(json.dumps({f: getattr(record, f) for f in record.__struct_fields__}))
        assert (state.running() is not None) == alive
    state.record_file.write_text("{broken")
    assert state.record() is None


def test_a_zombie_does_not_count_as_running() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert start_ticks(child.pid) is None
    child.wait()


def test_the_default_directory_can_be_chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PINGMESH_LAB_DIR", str(tmp_path / "x"))
    assert StateDirectory().path == tmp_path / "x"
    monkeypatch.delenv("PINGMESH_LAB_DIR")
    assert StateDirectory().path == Path(f"/tmp/pingmesh-lab-{os.getuid()}")


# ---------------------------------------------------------------- control socket


async def test_requests_and_refusals_cross_the_socket(tmp_path: Path) -> None:
    async def handler(request: control.Request) -> object:
        match request["cmd"]:
            case "double":
                return request["n"] * 2
            case "refuse":
                raise LabError("not today")
            case _:
                raise RuntimeError("bug")

    path = tmp_path / "s"
    server = await control.serve(path, handler)
    try:
        assert await asyncio.to_thread(control.ask, path, {"cmd": "double", "n": 21}) == 42
        for request, message in (({"cmd": "refuse"}, "not today"), ({"cmd": "x"}, "internal error"), ({}, '"cmd"')):
            with pytest.raises(LabError, match=message):
                await asyncio.to_thread(control.ask, path, request)
        reader, writer = await asyncio.open_unix_connection(str(path))
        writer.write(b'not json\n[1]\n{"cmd": "double", "n": 1}\n')
        answers = [json.loads(await reader.readline()) for _ in range(3)]
        assert ["error" in a for a in answers] == [True, True, False]
        writer.close()
        await writer.wait_closed()
    finally:
        server.close()
        await server.wait_closed()
    with pytest.raises(control.LabNotRunningError, match="pingmesh lab up"):
        control.ask(tmp_path / "nobody", {"cmd": "double"})
