"""The lab's processes by name: broker, controller, analyzer, an agent per host, and helpers of faults."""

from __future__ import annotations

import asyncio
import enum
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pingmesh.lab.cgroup import HostCgroup, LabCgroups
from pingmesh.lab.namespaces import LabError

STOP_PATIENCE_S = 5.0


class ProcessState(enum.Enum):
    """What a process of the lab is doing."""

    NEW = "new"
    """Never started."""
    RUNNING = "running"
    PAUSED = "paused"
    """Stopped by SIGSTOP."""
    STOPPED = "stopped"
    """Ended because the lab asked."""
    CRASHED = "crashed"
    """Ended, and nobody asked."""


@dataclass
class LabProcess:
    """One process: how it is started and how it is."""

    name: str
    command: Callable[[], list[str]]
    """Makes the command line anew for each start."""
    log: Path
    state: ProcessState = ProcessState.NEW
    starts: int = 0
    started_ns: int = 0
    exit_code: int | None = None
    """Of the last end; negative: the signal that ended it."""
    popen: subprocess.Popen[bytes] | None = field(default=None, repr=False)
    ended: asyncio.Event = field(default_factory=asyncio.Event, repr=False)

    @property
    def pid(self) -> int | None:
        """Its process id (in the lab's own numbering) while it lives."""
        return self.popen.pid if self.popen and self.state in (ProcessState.RUNNING, ProcessState.PAUSED) else None

    @property
    def alive(self) -> bool:
        """Running or paused."""
        return self.pid is not None


class Processes:
    """Starts, stops and watches processes. Nothing is restarted unasked. For one event loop, not thread-safe.

    Names: `broker`, `controller`, `analyzer`, `agent:HOST`. Methods that take a name raise LabError if there is none
    of that name, and are idempotent (starting what runs, stopping what is stopped changes nothing).
    """

    def __init__(self, cgroups: LabCgroups | None = None) -> None:
        self._all: dict[str, LabProcess] = {}
        self._cgroups = cgroups

    def add(self, name: str, command: Callable[[], list[str]], log: Path) -> LabProcess:
        """Make a process known, without starting it."""
        self._all[name] = LabProcess(name, command, log)
        return self._all[name]

    def forget(self, name: str) -> None:
        """Drop a process that has ended."""
        process = self.get(name)
        if process.alive:
            raise LabError(f"{name} still runs")
        del self._all[name]

    @property
    def names(self) -> list[str]:
        """All names, in the order of `add`."""
        return list(self._all)

    def get(self, name: str) -> LabProcess:
        """The process of that name."""
        try:
            return self._all[name]
        except KeyError:
            raise LabError(f"the lab has no process {name!r}: it has {', '.join(self._all) or 'none'}") from None

    def pid(self, name: str) -> int | None:
        """Process id while it lives."""
        return self.get(name).pid

    def cgroup(self, host: str) -> HostCgroup | None:
        """The control group in which a host's agent runs; None where the system gives none."""
        return self._cgroups.hosts.get(host) if self._cgroups else None

    def limit_cpu(self, host: str, share: float | None) -> bool:
        """Allow a host's agent this share of one core (None: any). False where the system gives no control groups."""
        group = self.cgroup(host)
        if group is None:
            return False
        group.limit(share)
        return True

    async def start(self, name: str) -> None:
        """Start it; returns as soon as it exists."""
        process = self.get(name)
        if process.alive:
            return
        argv = process.command()
        # Opened here, where a start of a few per second may block for the microseconds that this takes.
        with process.log.open("ab") as log:
            process.popen = await asyncio.to_thread(_spawn, argv, log.fileno())
        process.state = ProcessState.RUNNING
        process.starts += 1
        process.started_ns = time.time_ns()
        process.ended = asyncio.Event()
        self._watch(process, process.popen)

    async def stop(self, name: str, patience: float = STOP_PATIENCE_S) -> None:
        """SIGTERM, and SIGKILL to what has not ended after `patience` seconds; returns when it has ended."""
        process = self.get(name)
        if not process.alive:
            return
        if process.state is ProcessState.PAUSED:
            self._signal(process, signal.SIGCONT)
        process.state = ProcessState.STOPPED
        self._signal(process, signal.SIGTERM)
        try:
            async with asyncio.timeout(patience):
                await process.ended.wait()
        except TimeoutError:
            self._signal(process, signal.SIGKILL)
            await process.ended.wait()

    async def kill(self, name: str) -> None:
        """SIGKILL: it says no goodbye. Returns when it has ended."""
        process = self.get(name)
        if not process.alive:
            return
        process.state = ProcessState.STOPPED
        self._signal(process, signal.SIGKILL)
        await process.ended.wait()

    async def restart(self, name: str) -> None:
        """Stop it in good order and start it again."""
        await self.stop(name)
        await self.start(name)

    def pause(self, name: str) -> None:
        """SIGSTOP: it lives and does nothing."""
        process = self.get(name)
        if process.state is ProcessState.RUNNING:
            self._signal(process, signal.SIGSTOP)
            process.state = ProcessState.PAUSED

    def resume(self, name: str) -> None:
        """SIGCONT after `pause`."""
        process = self.get(name)
        if process.state is ProcessState.PAUSED:
            self._signal(process, signal.SIGCONT)
            process.state = ProcessState.RUNNING

    async def stop_all(self, patience: float = STOP_PATIENCE_S) -> None:
        """Stop everything at once: agents first, so that each can still say goodbye to the broker."""
        agents = [n for n in self._all if n.startswith("agent:")]
        others = [n for n in reversed(self._all) if not n.startswith("agent:")]
        await asyncio.gather(*(self.stop(n, patience) for n in agents))
        for name in others:
            await self.stop(name, patience)

    def _signal(self, process: LabProcess, number: signal.Signals) -> None:
        if process.popen is not None and process.popen.returncode is None:
            process.popen.send_signal(number)

    def _watch(self, process: LabProcess, popen: subprocess.Popen[bytes]) -> None:
        loop = asyncio.get_running_loop()
        fd = os.pidfd_open(popen.pid)

        def gone() -> None:
            loop.remove_reader(fd)
            os.close(fd)
            process.exit_code = popen.wait()
            if process.state is not ProcessState.STOPPED:
                process.state = ProcessState.CRASHED
            process.ended.set()

        loop.add_reader(fd, gone)


def _spawn(argv: Sequence[str], log: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
