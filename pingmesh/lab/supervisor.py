"""The process that is a lab: init of its own namespaces, builds the fabric, runs the processes, answers the socket."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from pingmesh import logs
from pingmesh.broker import broker_command
from pingmesh.lab import control, isolation
from pingmesh.lab.cgroup import LabCgroups
from pingmesh.lab.fabric import MANAGEMENT_ADDRESS, Fabric
from pingmesh.lab.faults.manager import FaultManager
from pingmesh.lab.faults.spec import FaultSpec
from pingmesh.lab.hashing import HashKind
from pingmesh.lab.hosts import HostKind, NamespaceHosts, SharedHosts
from pingmesh.lab.namespaces import LabError
from pingmesh.lab.options import LabOptions
from pingmesh.lab.processes import Processes, ProcessState
from pingmesh.lab.state import LabRecord, StateDirectory
from topology import files

log = logging.getLogger(__name__)

BROKER_PORT = 1883
START_PATIENCE_S = 180.0
CLASSES = "[{name: cnp, dscp: 48, size: 0, share: 0.25}]"
AGENT_PACE_S = 0.1
"""Between the starts of two agents: their imports must not starve those that already probe."""
GOODBYE_S = 3.0

ProcessAction = Callable[[Processes, str], Any]
_ACTIONS: dict[str, ProcessAction] = {
    "start": Processes.start,
    "stop": Processes.stop,
    "kill": Processes.kill,
    "restart": Processes.restart,
    "pause": Processes.pause,
    "resume": Processes.resume,
}


class Supervisor:
    """One lab, from its first namespace to its end."""

    def __init__(self, options: LabOptions, state: StateDirectory, record: LabRecord) -> None:
        self.options = options
        self.state = state
        self.record = record
        self.seed = options.seed if options.seed is not None else random.SystemRandom().randrange(1, 1 << 32)
        topology = files.load(state.topology)
        kind = HashKind(options.hashing) if options.hashing else None
        hosts: HostKind = SharedHosts(state.network) if options.transport == "verbs" else NamespaceHosts()
        self.fabric = Fabric(topology, hosts, seed=self.seed, hash_kind=kind)
        self.phase = "starting"
        self.started_ns = time.time_ns()
        self.cgroups = LabCgroups.create(record.pid, topology.hosts) if options.agents else None
        if self.cgroups:
            self.record = msgspec.structs.replace(record, cgroup=str(self.cgroups.path))
        self.processes = Processes(self.cgroups)
        self.faults = FaultManager(self.fabric, self.processes)
        self._end = asyncio.Event()

    async def run(self, report: Callable[[str, str], None]) -> None:
        """Live until asked to end. `report(kind, text)` tells the launcher of `progress`, `ready` and nothing after."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._end.set)
        self._write_record()
        server = await control.serve(self.state.control, self.handle)
        try:
            starting = asyncio.create_task(self._start(lambda text: report("progress", text)), name="start")
            ending = asyncio.create_task(self._end.wait(), name="end")
            await asyncio.wait({starting, ending}, return_when=asyncio.FIRST_COMPLETED)
            if not starting.done():
                starting.cancel()
                with suppress(asyncio.CancelledError):
                    await starting
                return
            await starting
            self.phase = "ready"
            report("ready", "")
            await ending
        finally:
            self.phase = "stopping"
            await self.processes.stop_all(GOODBYE_S)
            if self.cgroups:
                await asyncio.to_thread(self.cgroups.remove)
            await asyncio.to_thread(self.fabric.close)
            server.close()

    def _write_record(self) -> None:
        new = self.state.path / "lab.json.new"
        new.write_bytes(msgspec.json.encode(self.record))
        new.replace(self.state.record_file)

    async def _start(self, progress: Callable[[str], None]) -> None:
        began = time.monotonic()
        await asyncio.to_thread(self.fabric.build, progress)
        progress(f"fabric built in {time.monotonic() - began:.1f} s ({self.fabric.hash_kind.value} hash)")
        if not self.options.agents:
            return
        # A further DSCP, as congestion notification has its own: so a fault of one class only can be found.
        os.environ.setdefault("PINGMESH_CONTROLLER__CLASSES", CLASSES)
        self._add_processes()
        await self.processes.start("broker")
        await self._until_open("broker", lambda: asyncio.open_connection(MANAGEMENT_ADDRESS, BROKER_PORT))
        progress("broker started")
        await self.processes.start("controller")
        await self._until_open("controller", lambda: asyncio.open_unix_connection(str(self.state.controller)))
        await self.processes.start("analyzer")
        progress("controller and analyzer started")
        agents = [n for n in self.processes.names if n.startswith("agent:")]
        for name in agents:
            await self.processes.start(name)
            await asyncio.sleep(AGENT_PACE_S)
        progress(f"{len(agents)} agents started{'' if self.cgroups else ' (no control groups on this system)'}")

    def _add_processes(self) -> None:
        this = [sys.executable, "-m", "pingmesh"]
        topology = self.fabric.topology
        common = ["--cluster", topology.cluster, "--log-level", self.options.log_level]
        central = [*common, "--broker", f"{MANAGEMENT_ADDRESS}:{BROKER_PORT}", "--topology", str(self.state.topology)]
        listen = ["--listen", f"unix:{self.state.controller}", "--database", str(self.state.path / "pingmesh.db")]
        place = self.state.path / "broker"
        self._add("broker", lambda: broker_command(self.fabric.broker_listens, BROKER_PORT, place))
        self._add("controller", lambda: [*this, "controller", *central, *listen])
        self._add("analyzer", lambda: [*this, "analyzer", *central])
        for host, rnics in topology.hosts.items():
            devices = ",".join(self.fabric.hosts.devices(rnics))
            broker = f"{self.fabric.broker_address(host)}:{BROKER_PORT}"
            argv = [*this, "agent", *common, "--broker", broker, "--host", host, "--devices", devices]
            if self.fabric.hosts.transport != "soft":
                argv += ["--transport", self.fabric.hosts.transport]
            group = self.processes.cgroup(host)
            self._add(f"agent:{host}", self._on_host(host, argv, str(group.path) if group else None))

    def _on_host(self, host: str, argv: list[str], cgroup: str | None) -> Callable[[], list[str]]:
        return lambda: self.fabric.hosts.command(host, argv, cgroup=cgroup)

    def _add(self, name: str, command: Callable[[], list[str]]) -> None:
        self.processes.add(name, command, self.state.logs / f"{name.replace(':', '-')}.log")

    async def _until_open(self, name: str, connect: Callable[[], Any]) -> None:
        """Wait until a process listens. Raises LabError when it ends instead, or takes too long."""
        deadline = time.monotonic() + START_PATIENCE_S
        while True:
            try:
                _, writer = await connect()
                writer.close()
                return
            except OSError:
                process = self.processes.get(name)
                if not process.alive:
                    raise LabError(
                        f"the {name} ended at once (exit {process.exit_code}): {_tail(process.log)}"
                    ) from None
                if time.monotonic() > deadline:
                    raise LabError(f"the {name} does not listen after {START_PATIENCE_S:.0f} s") from None
            await asyncio.sleep(0.05)

    async def handle(self, request: control.Request) -> object:
        """Answer a request of the control socket. Raises LabError or FaultError for what cannot be."""
        command = request["cmd"]
        if command == "status":
            return await self._status()
        if command == "shutdown":
            self._end.set()
            return {"pid": self.record.pid}
        if command == "exec":
            return self._exec(str(request.get("node")), [str(a) for a in request.get("argv", [])])
        if self.phase != "ready":
            raise LabError(f"the lab is {self.phase}: wait until it is ready")
        if command in _ACTIONS:
            result = _ACTIONS[command](self.processes, str(request.get("name")))
            if result is not None:
                await result
            return _process(self.processes, str(request.get("name")))
        if command == "fault":
            return await self._fault(request)
        raise LabError(f"the lab knows no command {command!r}")

    async def _fault(self, request: control.Request) -> object:
        match request.get("action"):
            case "add":
                spec = msgspec.convert(request.get("spec"), FaultSpec)
                return (await self.faults.add(spec)).public()
            case "list":
                return [t.public() for t in await self.faults.faults()]
            case "clear":
                chosen = request.get("id")
                return [t.public() for t in await self.faults.clear(None if chosen is None else str(chosen))]
            case other:
                raise LabError(f"the lab knows no fault command {other!r}")

    def _exec(self, node: str, argv: list[str]) -> object:
        """The command line that runs `argv` on a node, for use inside the lab's namespaces."""
        if node == "mgmt":
            return {"argv": argv}
        return {"argv": self.fabric.command(node, argv)}

    async def _status(self) -> object:
        t = self.fabric.topology
        faults = await self.faults.faults() if self.phase == "ready" else []
        return {
            "state": self.phase,
            "directory": str(self.state.path),
            "pid": self.record.pid,
            "started_ns": self.started_ns,
            "cluster": t.cluster,
            "switches": len(t.switches),
            "hosts": len(t.hosts),
            "rnics": len(t.rnics),
            "links": len(t.links),
            "transport": self.options.transport,
            "seed": self.seed,
            "hash": self.fabric.hash_kind.value,
            "cgroups": str(self.cgroups.path) if self.cgroups else None,
            "withdrawn": sorted(self.fabric.routes.withdrawn),
            "processes": [_process(self.processes, n) for n in self.processes.names],
            "faults": [f.public() for f in faults],
        }


def _process(processes: Processes, name: str) -> dict[str, object]:
    p = processes.get(name)
    return {
        "name": name,
        "state": p.state.value,
        "pid": p.pid,
        "starts": p.starts,
        "started_ns": p.started_ns,
        "exit_code": p.exit_code if p.state in (ProcessState.STOPPED, ProcessState.CRASHED) else None,
    }


def _tail(path: Path) -> str:
    """The last line of a log: mostly the reason."""
    try:
        lines = path.read_text(errors="replace").strip().splitlines()
    except OSError:
        lines = []
    return lines[-1] if lines else f"it left nothing in {path}"


def _reporter() -> Callable[[str, str], None]:
    """Tells the launcher over standard output; after `ready` that pipe is closed."""

    def report(kind: str, text: str) -> None:
        print(json.dumps({kind: text}), flush=True)
        log.info("%s %s", kind, text)
        if kind == "ready":
            os.dup2(2, 1)

    return report


def main() -> int:
    """`python -m pingmesh.lab.supervisor DIRECTORY OPTIONS`, as init of new namespaces."""
    parser = argparse.ArgumentParser(description="A lab's supervisor; started by `pingmesh lab up`.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("options", help="JSON")
    args = parser.parse_args()
    logs.set_up("info")
    report = _reporter()
    try:
        options = msgspec.json.decode(args.options, type=LabOptions)
        record = isolation.settle()
        asyncio.run(_live(options, StateDirectory(args.directory), record, report))
    except (LabError, files.TopologyError) as error:
        with suppress(BrokenPipeError):
            report("error", str(error))
        return 1
    except BrokenPipeError:
        log.info("the launcher has gone")
        return 1
    return 0


async def _live(
    options: LabOptions, state: StateDirectory, record: LabRecord, report: Callable[[str, str], None]
) -> None:
    await Supervisor(options, state, record).run(report)


if __name__ == "__main__":
    sys.exit(main())
