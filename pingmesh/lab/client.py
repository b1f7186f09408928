"""A lab as an object, for tests, benchmarks and the command line."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import msgspec

from pingmesh.lab import control, isolation, launcher
from pingmesh.lab.faults.spec import parse
from pingmesh.lab.namespaces import LabError
from pingmesh.lab.options import LabOptions
from pingmesh.lab.state import StateDirectory
from topology import files
from topology.model import Topology


class Lab:
    """A running lab. As a context manager it is ended on leaving.

    Methods raise LabError when the lab refuses or does not run, and `controller.client.ControllerUnreachableError`
    when they ask the controller and it does not answer.
    """

    def __init__(self, state: StateDirectory | None = None) -> None:
        """Attach to the lab in a state directory; whether one runs there shows in the first call."""
        self._state = state or StateDirectory()
        self._topology: Topology | None = None
        self._child: subprocess.Popen[str] | None = None

    @classmethod
    def up(
        cls,
        topology: Topology | str | Path | None = None,
        *,
        directory: Path | None = None,
        wait: float = 0.0,
        progress: Callable[[str], None] = lambda _: None,
        **shape: Any,
    ) -> Lab:
        """Start a lab of a topology (or its file), or of a shape: the fields of LabOptions, such as `leaves=2`.

        `wait` > 0: also wait so many seconds for all agents and full coverage; whether it was reached shows in
        `status`. Raises LabError, and leaves nothing behind then.
        """
        options = LabOptions(**shape)
        if topology is None:
            topology = options.generate()
        elif not isinstance(topology, Topology):
            topology = files.load(topology)
        state = StateDirectory(directory)
        child = launcher.start(topology, options, state, progress)
        lab = cls(state)
        lab._child = child
        lab._topology = topology
        try:
            if wait > 0 and options.agents:
                lab.wait_ready(wait, progress)
        except BaseException:
            lab.down()
            raise
        return lab

    def __enter__(self) -> Lab:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.down()

    @property
    def directory(self) -> Path:
        """The state directory."""
        return self._state.path

    @property
    def controller(self) -> str:
        """Address of the controller's API, as `controller.client.get` takes it."""
        return f"unix:{self._state.controller}"

    @property
    def topology(self) -> Topology:
        """What was built."""
        if self._topology is None:
            self._topology = files.load(self._state.topology)
        return self._topology

    def down(self, *, keep_logs: bool = False) -> bool:
        """End it and remove what it made. False when no lab was there."""
        existed = launcher.stop(self._state, keep_logs=keep_logs)
        if self._child is not None:
            self._child.wait()
            self._child = None
        return existed

    def lab_status(self) -> dict[str, Any]:
        """The lab's own status: phase, processes, faults."""
        return cast(dict[str, Any], self.ask("status"))

    def process(self, action: str, name: str) -> dict[str, Any]:
        """`start`, `stop`, `kill`, `restart`, `pause` or `resume` a process, such as `agent:h1`; its new status."""
        return cast(dict[str, Any], self.ask(action, name=name))

    def fault_add(self, argv: Sequence[str]) -> dict[str, Any]:
        """Inject the fault of these `lab fault add` arguments; what was done, in incident terms."""
        spec = msgspec.to_builtins(parse(argv))
        return cast(dict[str, Any], self.ask("fault", action="add", spec=spec))

    def fault_list(self) -> list[dict[str, Any]]:
        """The faults that are not cleared."""
        return cast(list[dict[str, Any]], self.ask("fault", action="list"))

    def fault_clear(self, fault_id: str | None = None) -> list[dict[str, Any]]:
        """Undo one fault, or all."""
        return cast(list[dict[str, Any]], self.ask("fault", action="clear", id=fault_id))

    def ask(self, cmd: str, **fields: object) -> Any:
        """Send any request to the supervisor."""
        return control.ask(self._state.control, {"cmd": cmd, **fields})

    def command(self, node: str, argv: Sequence[str]) -> list[str]:
        """The command line that runs `argv` on a switch, a host or the management network (`mgmt`), from outside."""
        record = self._state.running()
        if record is None:
            raise control.LabNotRunningError(self._state.control)
        inner = self.ask("exec", node=node, argv=list(argv))["argv"]
        return isolation.enter_command(record, inner)

    def run(self, node: str, *argv: str, timeout: float = 60.0) -> subprocess.CompletedProcess[str]:
        """Run a command on a node and capture its output; the caller looks at its return code."""
        return subprocess.run(self.command(node, argv), capture_output=True, text=True, check=False, timeout=timeout)

    def log(self, name: str) -> Path:
        """The log file of a process (or `supervisor`). Raises LabError when there is none."""
        path = self._state.logs / f"{name.replace(':', '-')}.log"
        if "/" in name or not path.exists():
            known = sorted(p.stem.replace("agent-", "agent:", 1) for p in self._state.logs.glob("*.log"))
            if not known:
                raise control.LabNotRunningError(self._state.control)
            raise LabError(f"there is no log of {name!r}: there is {', '.join(known)}")
        return path

    def status(self) -> dict[str, Any]:
        """The controller's `/status`."""
        return cast(dict[str, Any], self._get("/status"))

    def incidents(self, *, state: str | None = None) -> list[dict[str, Any]]:
        """The controller's `/incidents`, open and closed; `state="open"` for the open ones."""
        return cast(list[dict[str, Any]], self._get("/incidents", state=state))

    def findings(self) -> list[dict[str, Any]]:
        """The controller's `/findings`."""
        return cast(list[dict[str, Any]], self._get("/findings"))

    def _get(self, path: str, **params: str | None) -> object:
        # Only what asks the controller pays for importing an HTTP client.
        from controller import client

        return client.get(self.controller, path, timeout=10.0, **params)

    def wait_ready(self, patience: float, progress: Callable[[str], None] = lambda _: None) -> bool:
        """Wait until every agent is online and every directed switch link is walked at its rate."""
        deadline = time.monotonic() + patience
        last = ""
        while True:
            status = self._try_status()
            agents, coverage = _online(status), status.get("coverage")
            shown = "unknown" if coverage is None else f"{coverage:.0%}"
            line = f"{agents} of {len(self.topology.hosts)} agents online, coverage {shown}"
            if line != last:
                progress(line)
                last = line
            covered = (coverage is not None and coverage >= 1.0) or not self.topology.links
            if agents >= len(self.topology.hosts) and covered:
                return True
            if time.monotonic() > deadline:
                return False
            time.sleep(0.5)

    def _try_status(self) -> dict[str, Any]:
        try:
            return self.status()
        except ConnectionError:
            return {}


def _online(status: dict[str, Any]) -> int:
    """How many agents are online, of a status whose `agents` is a number or counts by state."""
    agents = status.get("agents", 0)
    return int(agents.get("online", 0)) if isinstance(agents, dict) else int(agents)
