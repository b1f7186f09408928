"""Labs for tests: a directory of their own each, packets between their hosts, what must not be left behind."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pingmesh.lab.cgroup import CGROUP_ROOT
from pingmesh.lab.client import Lab
from pingmesh.lab.namespaces import LabError
from topology.model import Rnic, Topology

PACKETS = Path(__file__).with_name("lab_packets.py")


def unlimited(t: Topology) -> Topology:
    """The same fabric with switches that answer every expired packet."""
    switches = {n: dataclasses.replace(s, icmp_limit=1_000_000) for n, s in t.switches.items()}
    return dataclasses.replace(t, switches=switches)


@contextmanager
def fabric(t: Topology, **options: Any) -> Iterator[Lab]:
    """A lab without agents, removed afterwards with its directory; skips the test where namespaces are refused."""
    # Short: sockets lie in it.
    directory = Path(tempfile.mkdtemp(prefix="pmlab-"))
    try:
        try:
            lab = Lab.up(t, directory=directory / "lab", agents=False, **options)
        except LabError as error:
            if "namespaces" in str(error):
                pytest.skip(str(error))
            raise
        with lab:
            yield lab
    finally:
        shutil.rmtree(directory)


def packets(lab: Lab, node: str, *args: object) -> Any:
    """Run lab_packets.py on a node and return what it prints."""
    done = lab.run(node, sys.executable, str(PACKETS), *map(str, args))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def trace(
    lab: Lab, source: Rnic, target: Rnic, ttl: int, *, first: int = 0xC000, count: int = 32, gap: float = 0.0
) -> dict[int, str]:
    """Which address answers for each source port."""
    answers = packets(lab, source.host, "trace", source.address, target.address, ttl, first, count, gap)
    return dict(answers)


@contextmanager
def echo(lab: Lab, rnic: Rnic) -> Iterator[None]:
    """An echo server on an RNIC's host."""
    argv = lab.command(rnic.host, [sys.executable, str(PACKETS), "echo", str(rnic.address)])
    server = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        assert server.stdout.readline() == "ready\n"
        yield
    finally:
        server.communicate()


def answered(lab: Lab, source: Rnic, target: Rnic, count: int = 64, first: int = 0xC000) -> int:
    """How many flows reach the echo server on `target` and come back."""
    result = packets(lab, source.host, "flows", source.address, target.address, first, count)
    assert isinstance(result, int)
    return result


def processes_of(directory: Path) -> list[str]:
    """Command lines that name a lab's directory."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = entry.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(directory) in text and int(entry.parent.name) != os.getpid():
            found.append(text)
    return found


def cgroups_of(pid: int) -> list[Path]:
    """Control groups of a lab's supervisor."""
    return [p for base in (CGROUP_ROOT / "cpu", CGROUP_ROOT) for p in base.glob(f"pingmesh-lab-{pid}")]


def eventually(condition: Any, patience: float = 5.0) -> bool:
    """Whether something becomes true."""
    deadline = time.monotonic() + patience
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
