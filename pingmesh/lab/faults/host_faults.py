"""Faults of hosts that end by themselves: starved of CPU, paused."""

from __future__ import annotations

import asyncio

from pingmesh.lab.faults.lab_port import ProcessPort

STARVED_SHARE = 0.02
"""Of one core: an agent's loop then stalls for hundreds of milliseconds at a time."""
DUTY_STOP_S = 0.9
DUTY_RUN_S = 0.1
"""Where there are no control groups: stopped and running in turn."""


async def starve(processes: ProcessPort, host: str, seconds: float) -> None:
    """Leave a host hardly any CPU for a time; it has all again when this returns or is cancelled."""
    if processes.limit_cpu(host, STARVED_SHARE):
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
