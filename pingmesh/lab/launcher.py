"""Starting and ending a lab from outside its namespaces."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import msgspec

from pingmesh.lab import cgroup, control, isolation, names
from pingmesh.lab.namespaces import LabError
from pingmesh.lab.options import LabOptions
from pingmesh.lab.state import StateDirectory
from topology import files
from topology.model import Topology

Progress = Callable[[str], None]
SHUTDOWN_PATIENCE_S = 10.0


def end_on_signals() -> None:
    """Have SIGTERM and a closed terminal (but for `nohup`) interrupt us as Ctrl-C does."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, interrupt)


def start(topology: Topology, options: LabOptions, state: StateDirectory, progress: Progress) -> subprocess.Popen[str]:
    """Start a lab and return when its fabric is built and its processes have started.

    Returns our child, which lives as long as the lab, for whoever outlives the lab to wait for.

    Raises LabError when a lab already runs there, the system refuses namespaces or a part does not start; then, and
    when interrupted, nothing is left behind.
    """
    names.check(topology)
    lock = state.claim()
    try:
        cgroup.remove_stale()
        state.topology.write_text(files.dump(topology))
        return _run_supervisor(options, state, progress, lock)
    except BaseException:
        stop(state)
        raise
    finally:
        os.close(lock)


def _run_supervisor(options: LabOptions, state: StateDirectory, progress: Progress, lock: int) -> subprocess.Popen[str]:
    argv = [sys.executable, "-m", "pingmesh.lab.supervisor", str(state.path), msgspec.json.encode(options).decode()]
    log = state.logs / "supervisor.log"
    with log.open("ab") as stderr:
        try:
            # A session of its own: Ctrl-C is for the launcher, which then ends the lab in good order.
            child = subprocess.Popen(
                isolation.isolated_command(argv, shares_network=options.transport == "verbs"),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                start_new_session=True,
                pass_fds=(lock,),
            )
        except FileNotFoundError:
            raise LabError("`unshare` is not installed: install util-linux") from None
    try:
        _follow(child, progress, log.read_text)
    except BaseException:
        # Its init dies with it; there may be no record yet by which `stop` would find it.
        if state.running() is None:
            child.kill()
        else:
            stop(state)
        child.wait()
        raise
    return child


def _follow(child: subprocess.Popen[str], progress: Progress, read_log: Callable[[], str]) -> None:
    assert child.stdout is not None
    spoke = False
    with child.stdout:
        for line in child.stdout:
            spoke = True
            message = json.loads(line)
            if "ready" in message:
                return
            if "error" in message:
                raise LabError(message["error"])
            progress(message["progress"])
    child.wait()
    if not spoke and "unshare" in read_log():
        raise isolation.refused()
    last = read_log().strip().splitlines()[-1:]
    raise LabError(f"the lab's supervisor ended before the lab was ready: {last[0] if last else 'no reason given'}")


def stop(state: StateDirectory, *, keep_logs: bool = False) -> bool:
    """End the lab, in good order if it answers, and remove what it made. False when there was none."""
    with _undisturbed():
        record = state.running()
        if record is not None:
            with suppress(LabError):
                control.ask(state.control, {"cmd": "shutdown"}, SHUTDOWN_PATIENCE_S)
                state.wait_gone(record, SHUTDOWN_PATIENCE_S)
            state.kill()
        existed = record is not None or state.record() is not None
        state.remove(keep_logs=keep_logs)
        return existed


@contextmanager
def _undisturbed() -> Iterator[None]:
    """A second Ctrl-C comes when the lab is gone."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
