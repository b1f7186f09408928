"""Starving and pausing: what is taken is given back, however the fault ends."""

from __future__ import annotations

import asyncio
import contextlib
import os

import pytest

from pingmesh.lab.faults import host_faults
from pingmesh.lab.faults.errors import FaultError


class FakeProcesses:
    """Remembers what was asked."""

    def __init__(self, *, groups: bool, pid: int | None = None) -> None:
        self.groups = groups
        self._pid = pid
        self.calls: list[tuple[object, ...]] = []

    async def start(self, name: str) -> None:
        raise AssertionError(name)

    stop = kill = restart = start

    def pid(self, name: str) -> int | None:
        return self._pid

    def pause(self, name: str) -> None:
        self.calls.append(("pause", name))

    def resume(self, name: str) -> None:
        self.calls.append(("resume", name))

    def limit_cpu(self, host: str, share: float | None) -> bool:
        if self.groups:
            self.calls.append((host, share))
        return self.groups


async def cancelled_after(seconds: float, work: asyncio.Task[None]) -> None:
    await asyncio.sleep(seconds)
    work.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await work


async def test_quota_is_a_part_of_the_need_and_is_lifted_at_the_end() -> None:
    p = FakeProcesses(groups=True)
    await host_faults.starve(p, "h1", 0.01, 0.05)
    assert p.calls == [("h1", pytest.approx(0.05 * host_faults.STARVED_SHARE)), ("h1", None)]


async def test_quota_is_lifted_when_cleared_early() -> None:
    p = FakeProcesses(groups=True)
    await cancelled_after(0.01, asyncio.create_task(host_faults.starve(p, "h1", 100, 0.05)))
    assert p.calls[-1] == ("h1", None)


async def test_an_idle_agent_is_given_the_least_that_the_kernel_takes() -> None:
    p = FakeProcesses(groups=True)
    await host_faults.starve(p, "h1", 0.01, 0.0)
    assert p.calls[0] == ("h1", host_faults.LEAST_SHARE)


async def test_without_groups_the_agent_stops_and_goes_on_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_faults, "DUTY_STOP_S", 0.02)
    monkeypatch.setattr(host_faults, "DUTY_RUN_S", 0.01)
    p = FakeProcesses(groups=False)
    await host_faults.starve(p, "h1", 0.1, 0.05)
    turns = [c[0] for c in p.calls]
    assert turns[:-1] == ["pause", "resume"] * (len(turns) // 2)
    assert len(turns) >= 5
    assert turns[-1] == "resume"


@pytest.mark.parametrize("fault", ["starve", "pause"])
async def test_a_stopped_agent_goes_on_when_cleared_early(fault: str) -> None:
    p = FakeProcesses(groups=False)
    work = host_faults.starve(p, "h1", 100, 0.05) if fault == "starve" else host_faults.pause(p, "h1", 100)
    await cancelled_after(0.01, asyncio.create_task(work))
    assert p.calls == [("pause", "agent:h1"), ("resume", "agent:h1")]


async def test_need_is_what_the_process_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_faults, "MEASURE_S", 0.2)
    needed = asyncio.create_task(host_faults.needed_share(FakeProcesses(groups=True, pid=os.getpid()), "h1"))
    await asyncio.sleep(0)
    sum(range(4_000_000))  # a few dozen milliseconds of CPU in this process
    assert 0.05 < await needed < 4


async def test_a_dead_agent_cannot_be_starved() -> None:
    with pytest.raises(FaultError, match="agent of h1 does not run"):
        await host_faults.needed_share(FakeProcesses(groups=True), "h1")
