from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from agent.cgroup import CgroupCpu, CpuWait
from agent.health import Clocks, FailSlow, HealthMonitor
from pingmesh.messages import RnicHealth


@dataclass
class Time:
    mono: float = 100.0
    wall: int = 1_000_000_000_000
    cpu: float = 0.0

    def pass_(self, seconds: float, cpu_share: float = 0.0) -> None:
        self.mono += seconds
        self.wall += int(seconds * 1e9)
        self.cpu += seconds * cpu_share

    @property
    def clocks(self) -> Clocks:
        return Clocks(lambda: self.mono, lambda: self.wall, lambda: self.cpu)


def nothing(tmp_path: Path) -> CgroupCpu:
    return CgroupCpu(tmp_path / "proc", tmp_path)


def test_over_its_budget_the_rate_falls_but_never_to_nothing() -> None:
    slow = FailSlow(0.2)
    assert slow.update(0.19) == 1.0
    assert slow.update(0.21) == pytest.approx(0.9)
    assert slow.update(0.4) == pytest.approx(0.45)
    for _ in range(50):
        slow.update(5.0)
    assert slow.factor == FailSlow.FLOOR


def test_the_rate_comes_back_slowly_and_not_near_the_budget() -> None:
    slow = FailSlow(0.2)
    slow.factor = 0.5
    assert slow.update(0.18) == 0.5
    assert slow.update(0.1) == pytest.approx(0.525)
    for _ in range(50):
        slow.update(0.0)
    assert slow.factor == 1.0


def test_the_monitor_slows_down_after_five_costly_seconds(tmp_path: Path) -> None:
    t = Time()
    factors: list[float] = []
    monitor = HealthMonitor(0.2, on_factor=factors.append, cgroup=nothing(tmp_path), clocks=t.clocks)
    for _ in range(4):
        t.pass_(1.0, 0.4)
        monitor.second()
    assert factors == []
    t.pass_(1.0, 0.4)
    monitor.second()
    assert factors == [pytest.approx(0.5)]
    health = monitor.take()
    assert health.rate_factor == pytest.approx(0.5)
    assert health.cpu_share == pytest.approx(0.4)


def test_a_stepped_clock_is_counted_once_and_drift_is_not(tmp_path: Path) -> None:
    t = Time()
    monitor = HealthMonitor(0.2, cgroup=nothing(tmp_path), clocks=t.clocks)
    t.pass_(1.0)
    t.wall += 500_000_000
    monitor.second()
    assert monitor.peek().clock_steps == 0
    t.wall -= 3600 * 10**9
    for _ in range(3):
        t.pass_(1.0)
        monitor.second()
    assert monitor.take().clock_steps == 1
    assert monitor.take().clock_steps == 0


def test_peek_begins_no_new_period_and_take_does(tmp_path: Path) -> None:
    asked: list[bool] = []

    def rnics(peek: bool) -> list[RnicHealth]:
        asked.append(peek)
        return [RnicHealth(device="rnic0")]

    delays = iter([0.25, 0.0, 0.0, 0.0])
    t = Time()
    monitor = HealthMonitor(
        0.2, rnics=rnics, read_delay=lambda: next(delays), cgroup=nothing(tmp_path), clocks=t.clocks
    )
    t.pass_(2.0, 0.1)
    assert monitor.peek().read_delay_max == pytest.approx(250.0)
    health = monitor.take()
    assert (health.read_delay_max, health.cpu_share) == (pytest.approx(250.0), pytest.approx(0.1))
    assert monitor.peek().read_delay_max == pytest.approx(250.0), "told again within a second"
    t.pass_(1.5)
    assert monitor.peek().read_delay_max == 0.0
    assert asked == [True, False, True, True]


async def test_a_stalled_loop_is_seen_even_before_its_timer_runs(tmp_path: Path) -> None:
    told: list[float] = []
    monitor = HealthMonitor(0.2, cgroup=nothing(tmp_path), on_stall=lambda: told.append(time.monotonic()))
    task = asyncio.create_task(monitor.run())
    await asyncio.sleep(0.12)
    quiet = monitor.peek().loop_lag_max
    time.sleep(0.4)  # noqa: ASYNC251 - the stall under test
    stalled = monitor.peek().loop_lag_max
    await asyncio.sleep(0.02)
    assert told, "told at once, without waiting for the report"
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert quiet < 140
    assert stalled >= 250


async def test_a_stall_that_the_probe_timer_saw_is_told_once_a_second(tmp_path: Path) -> None:
    told: list[str] = []
    now = [100.0]
    clocks = Clocks(monotonic=lambda: now[0])
    monitor = HealthMonitor(0.2, cgroup=nothing(tmp_path), on_stall=lambda: told.append("stall"), clocks=clocks)
    monitor.late(0.02)
    assert (monitor.peek().loop_lag_max, told) == (pytest.approx(20), [])
    monitor.late(0.15)
    now[0] += 0.5
    monitor.late(0.12)
    assert told == ["stall"], "not again within the second"
    now[0] += 0.6
    monitor.late(0.0)
    assert told == ["stall", "stall"], "the second one is not forgotten"
    assert monitor.take().loop_lag_max == pytest.approx(150)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_cgroup_v2_pressure_and_throttling(tmp_path: Path) -> None:
    write(tmp_path / "proc/cgroup", "0::/system.slice/agent.service\n")
    write(tmp_path / "proc/mountinfo", "25 1 0:22 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw\n")
    own = tmp_path / "sys/fs/cgroup/system.slice/agent.service"
    write(own / "cgroup.type", "domain\n")
    write(own / "cpu.pressure", "some avg10=1.00 avg60=0.00 avg300=0.00 total=2500000\nfull avg10=0.00 total=7\n")
    write(own / "cpu.stat", "usage_usec 5\nnr_throttled 3\nthrottled_usec 1500000\n")
    assert CgroupCpu(tmp_path / "proc", tmp_path).read() == CpuWait(2.5, 1.5)


def test_cgroup_v1_throttling_and_the_scheduler_in_place_of_pressure(tmp_path: Path) -> None:
    write(tmp_path / "proc/cgroup", "5:cpuacct:/x\n4:cpu,cpuacct:/lab/h1\n0::/\n")
    write(tmp_path / "proc/schedstat", "100 3000000000 12\n")
    write(
        tmp_path / "proc/mountinfo",
        "32 31 0:29 /lab /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
        "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
        "nonsense\n",
    )
    # The machine's own pressure, at the root of v2, is not ours.
    write(tmp_path / "sys/fs/cgroup/unified/cpu.pressure", "some avg10=1.00 total=99000000\n")
    write(tmp_path / "sys/fs/cgroup/cpu/h1/cpu.stat", "nr_periods 9\nnr_throttled 2\nthrottled_time 4000000000\n")
    assert CgroupCpu(tmp_path / "proc", tmp_path).read() == CpuWait(3.0, 4.0)


def test_without_any_cgroup_all_is_nought(tmp_path: Path) -> None:
    assert nothing(tmp_path).read() == CpuWait(0.0, 0.0)


def test_the_own_process_can_be_read() -> None:
    wait = CgroupCpu().read()
    assert wait.pressure >= 0
    assert wait.throttled >= 0
