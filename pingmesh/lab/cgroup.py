"""A control group per lab host, so that each agent sees its own CPU pressure and can be starved alone."""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

log = logging.getLogger(__name__)

CGROUP_ROOT = Path("/sys/fs/cgroup")
PREFIX = "pingmesh-lab-"
_PERIOD_US = 1_000_000
"""The longest that the kernel takes: what is used up is missing for hundreds of milliseconds at a stretch."""


@dataclass(frozen=True, slots=True)
class HostCgroup:
    """The control group of one host."""

    path: Path
    version: int
    """1 (the `cpu` hierarchy) or 2."""

    def limit(self, share: float | None) -> None:
        """Allow the group this share of one core; None lifts the limit. Raises OSError when the kernel refuses."""
        # 1000 us is the least that the kernel accepts.
        quota = None if share is None else max(1000, round(share * _PERIOD_US))
        if self.version == 2:
            (self.path / "cpu.max").write_text(f"{'max' if quota is None else quota} {_PERIOD_US}")
        else:
            (self.path / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
            (self.path / "cpu.cfs_quota_us").write_text(str(-1 if quota is None else quota))


class LabCgroups:
    """The groups of one lab: `<hierarchy>/pingmesh-lab-<pid>/<host>`."""

    def __init__(self, path: Path, version: int, hosts: dict[str, HostCgroup]) -> None:
        self.path = path
        self.version = version
        self.hosts = hosts

    @classmethod
    def create(cls, pid: int, hosts: Iterable[str], root: Path = CGROUP_ROOT) -> LabCgroups | None:
        """Make the groups of the lab with that supervisor.

        None where this system gives us none: not root, mounted read-only, no `cpu` controller.
        """
        found = _hierarchy(root)
        if found is None:
            return None
        base, version = found
        path = base / f"{PREFIX}{pid}"
        made: dict[str, HostCgroup] = {}
        try:
            path.mkdir()
            if version == 2:
                (path / "cgroup.subtree_control").write_text("+cpu")
            for host in hosts:
                group = HostCgroup(path / host, version)
                group.path.mkdir()
                group.limit(None)
                made[host] = group
        except OSError as error:
            log.info("no control groups: %s", error)
            remove_tree(path)
            return None
        return cls(path, version, made)

    def remove(self) -> None:
        """Remove the groups; their processes must have ended."""
        remove_tree(self.path)


def _hierarchy(root: Path) -> tuple[Path, int] | None:
    """Where groups with a CPU controller can be made."""
    try:
        if (root / "cpu" / "cpu.shares").exists() or (root / "cpu" / "cgroup.procs").exists():
            return (root / "cpu", 1) if os.access(root / "cpu", os.W_OK) else None
        if (root / "cgroup.controllers").exists() and os.access(root, os.W_OK):
            if "cpu" not in (root / "cgroup.subtree_control").read_text().split():
                (root / "cgroup.subtree_control").write_text("+cpu")
            return root, 2
    except OSError as error:
        log.info("no control groups: %s", error)
    return None


def remove_stale(root: Path = CGROUP_ROOT, proc: Path = Path("/proc")) -> None:
    """Remove the groups of labs whose supervisor has gone."""
    for base in (root / "cpu", root):
        for path in base.glob(f"{PREFIX}*"):
            pid = path.name.removeprefix(PREFIX)
            if pid.isdigit() and not (proc / pid).exists():
                remove_tree(path, patience=0.0)


def remove_tree(path: Path, *, patience: float = 2.0) -> bool:
    """Remove a group and those below it, waiting a little for killed processes to leave. True when it is gone."""
    deadline = time.monotonic() + patience
    while path.exists():
        try:
            for child in path.iterdir():
                if child.is_dir():
                    child.rmdir()
            path.rmdir()
        except OSError as error:
            if error.errno not in (errno.EBUSY, errno.ENOTEMPTY) or time.monotonic() > deadline:
                return False
            time.sleep(0.02)
    return True
