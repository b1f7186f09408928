"""Faults of hosts that end by themselves: starved of CPU, paused."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from pingmesh.lab.faults.errors import FaultError
from pingmesh.lab.faults.lab_port import ProcessPort

STARVED_SHARE = 0.8
"""Of the CPU that the agent needs: it then stands still for most of every second."""
LEAST_SHARE = 0.001
"""Of one core: the least quota that the kernel takes."""
MEASURE_S = 1.0
DUTY_STOP_S = 0.9
DUTY_RUN_S = 0.1
"""Where there are no control groups: stopped and running in turn."""


async def needed_share(processes: ProcessPort, host: str) -> float:
    """What share of one core a host's agent uses, over a second. Raises FaultError when it does not run."""
    before = _cpu_ns(processes, host)
    start = time.monotonic_ns()
    await asyncio.sleep(MEASURE_S)
    return max(0, _cpu_ns(processes, host) - before) / (time.monotonic_ns() - start)


def _cpu_ns(processes: ProcessPort, host: str) -> int:
    pid = processes.pid(f"agent:{host}")
    if pid is None:
        raise FaultError(f"The agent of {host} does not run: there is nothing to starve.")
    return sum(int(f.read_text().split()[0]) for f in Path("/proc", str(pid), "task").glob("*/schedstat"))


async def starve(processes: ProcessPort, host: str, seconds: float, needed: float) -> None:
    """Leave a host's agent a part of the share of a core that it needs, for a time.

    It has all again when this returns or is cancelled.
    """
    if processes.limit_cpu(host, max(LEAST_SHARE, STARVED_SHARE * needed)):
        try:
            await asyncio.sleep(seconds)
        finally:
            processes.limit_cpu(host, None)
        return
    agent = f"agent:{host}"
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    try:
        while (left := end - loop.time()) > 0:
            processes.pause(agent)
            await asyncio.sleep(min(DUTY_STOP_S, left))
            processes.resume(agent)
            await asyncio.sleep(DUTY_RUN_S)
    finally:
        processes.resume(agent)


async def pause(processes: ProcessPort, host: str, seconds: float) -> None:
    """Freeze a host's agent for a time; it runs again when this returns or is cancelled."""
    agent = f"agent:{host}"
    processes.pause(agent)
    try:
        await asyncio.sleep(seconds)
    finally:
        processes.resume(agent)
