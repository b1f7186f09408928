"""CPU starvation of this process, as its own cgroup and the scheduler tell it.

The machine's pressure says nothing of one host where several share it (namespaces, containers), so only the own
cgroup's is read: `cpu.pressure` and `cpu.stat` (v2), `cpu.stat` (v1). The scheduler's own figure, the time this
process waited for a CPU, exists without any cgroup and stands in for pressure where there is none.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_NONE = Path("/nonexistent")


@dataclass(frozen=True, slots=True)
class CpuWait:
    """Running totals in seconds since some fixed point."""

    pressure: float
    """Time in which something of the cgroup (or else this process) waited for a CPU."""
    throttled: float
    """Time in which the cgroup had used up its quota."""


class CgroupCpu:
    """Reads the totals. `proc` and `root` are replaced in tests; absent files count as 0.

    The cgroup's place is looked up once: processes are seldom moved, and the agent is started inside its own.
    """

    def __init__(self, proc: Path = Path("/proc/self"), root: Path = Path("/")) -> None:
        self._schedstat = proc / "schedstat"
        v2, v1 = _directories(proc, root)
        self._pressure = v2 / "cpu.pressure"
        self._stat_v2 = v2 / "cpu.stat"
        self._stat_v1 = v1 / "cpu.stat"

    def read(self) -> CpuWait:
        """The totals now."""
        some = _words(self._pressure).get("some", "")
        total = some.rpartition("total=")[2]
        pressure = int(total) / 1e6 if total.isdigit() else self._run_delay()
        v2, v1 = _words(self._stat_v2), _words(self._stat_v1)
        throttled = _number(v2.get("throttled_usec")) / 1e6 + _number(v1.get("throttled_time")) / 1e9
        return CpuWait(pressure, throttled)

    def _run_delay(self) -> float:
        try:
            return int(self._schedstat.read_text().split()[1]) / 1e9
        except (OSError, IndexError, ValueError):
            return 0.0


def _directories(proc: Path, root: Path) -> tuple[Path, Path]:
    """The own cgroup's directories in the v2 and in v1's cpu hierarchy; a path that does not exist if there is none."""
    paths: dict[str, str] = {}
    for line in _lines(proc / "cgroup"):
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            paths["v2"] = path
        elif "cpu" in controllers.split(","):
            paths["v1"] = path
    found = {"v2": _NONE, "v1": _NONE}
    for line in _lines(proc / "mountinfo"):
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if len(fields) < 5 or len(kind) < 3:
            continue
        version = "v2" if kind[0] == "cgroup2" else "v1"
        if version == "v1" and (kind[0] != "cgroup" or "cpu" not in kind[2].split(",")):
            continue
        mounted, point = fields[3], fields[4]
        own = paths.get(version)
        if own is None or not (own + "/").startswith(mounted.rstrip("/") + "/"):
            continue
        directory = root / point.lstrip("/") / own[len(mounted.rstrip("/")) :].lstrip("/")
        # The root of v2 carries the machine's pressure; it alone has no `cgroup.type`.
        if version == "v1" or (directory / "cgroup.type").exists():
            found[version] = directory
    return found["v2"], found["v1"]


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _words(path: Path) -> dict[str, str]:
    """`key rest-of-line` by key."""
    return {key: rest for key, _, rest in (line.partition(" ") for line in _lines(path))}


def _number(text: str | None) -> int:
    return int(text) if text and text.isdigit() else 0
