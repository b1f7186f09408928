"""The lab's state directory: where a lab leaves its sockets and logs, and how a dead one is cleaned up."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import stat
import time
from pathlib import Path

import msgspec

from pingmesh.lab.cgroup import remove_tree
from pingmesh.lab.directory import default_directory
from pingmesh.lab.namespaces import LabError
from pingmesh.lab.shared_network import SharedNetwork

_MAX_SOCKET_PATH = 100
DYING_S = 5.0
_PF_EXITING = 4


class LabRecord(msgspec.Struct, frozen=True, kw_only=True):
    """lab.json: the supervisor as seen from outside its namespaces."""

    pid: int
    start_ticks: int
    """Field 22 of /proc/PID/stat: tells the process from a later one of the same number."""
    user_namespace: bool
    cgroup: str | None = None
    """Directory of the lab's control groups."""


def start_ticks(pid: int, proc: Path = Path("/proc")) -> int | None:
    """When a process started; None when there is none (or only its remains, as a zombie)."""
    try:
        fields = (proc / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def is_exiting(pid: int, proc: Path = Path("/proc")) -> bool:
    """Whether a process is past saving: the init of a namespace waits in its end for all others there."""
    try:
        return bool(int((proc / str(pid) / "stat").read_text().rpartition(")")[2].split()[6]) & _PF_EXITING)
    except OSError:
        return True


class StateDirectory:
    """One lab's files. Nothing is created before `claim`."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path.absolute() if path else default_directory()

    @property
    def control(self) -> Path:
        """The supervisor's socket."""
        return self.path / "lab.sock"

    @property
    def controller(self) -> Path:
        """The socket of the controller's HTTP API."""
        return self.path / "controller.sock"

    @property
    def topology(self) -> Path:
        """The topology file that controller and analyzer read."""
        return self.path / "topology.yaml"

    @property
    def logs(self) -> Path:
        """Where each process writes its log."""
        return self.path / "logs"

    @property
    def record_file(self) -> Path:
        """See LabRecord."""
        return self.path / "lab.json"

    @property
    def network(self) -> SharedNetwork:
        """What the lab has borrowed of the machine's own network; nothing, unless its hosts share that."""
        return SharedNetwork(self.path / "network.json")

    def record(self) -> LabRecord | None:
        """What the last lab wrote about itself; None if there was none, or what it wrote cannot be read."""
        try:
            return msgspec.json.decode(self.record_file.read_bytes(), type=LabRecord)
        except (OSError, msgspec.DecodeError):
            return None

    def running(self) -> LabRecord | None:
        """The lab that runs here."""
        record = self.record()
        return record if record and start_ticks(record.pid) == record.start_ticks else None

    def claim(self) -> int:
        """Make the directory, ours alone, and lock it; returns the lock, which lives as long as its descriptor.

        What a crashed lab left is removed. Raises LabError when a lab runs here or the directory is another user's.
        """
        if len(os.fsencode(self.controller)) > _MAX_SOCKET_PATH:
            raise LabError(f"{self.path} is too long a path for sockets: set PINGMESH_LAB_DIR to a shorter one")
        if self.path.is_relative_to("/run"):
            raise LabError(f"{self.path}: the lab has a /run of its own; set PINGMESH_LAB_DIR to a path outside /run")
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise LabError(f"cannot make {self.path}: {error.strerror}; set PINGMESH_LAB_DIR to another path") from None
        self._check_ours()
        lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        if not self._lock(lock):
            os.close(lock)
            raise LabError(f"a lab already runs in {self.path}: end it with `pingmesh lab down` first")
        if os.fstat(lock).st_nlink == 0:  # removed with that lab while we waited
            os.close(lock)
            return self.claim()
        self.clean_up()
        self.logs.mkdir(mode=0o700, exist_ok=True)
        return lock

    def _lock(self, lock: int) -> bool:
        """Take the lock; processes of a lab that was killed may hold it for a moment yet."""
        deadline = time.monotonic() + DYING_S
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                record = self.running()
                if (record and not is_exiting(record.pid)) or time.monotonic() > deadline:
                    return False
                time.sleep(0.05)
            else:
                return True

    def _check_ours(self) -> None:
        found = self.path.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            raise LabError(f"{self.path} belongs to another user: set PINGMESH_LAB_DIR to a directory of yours")
        foreign = [p.name for p in self.path.iterdir() if p.name not in _OURS and not p.name.startswith("pingmesh.db")]
        if foreign:
            raise LabError(f"{self.path} holds {foreign[0]}, which no lab made: set PINGMESH_LAB_DIR to an empty path")
        if stat.S_IMODE(found.st_mode) != 0o700:
            self.path.chmod(0o700)

    def kill(self, patience: float = 5.0) -> None:
        """SIGKILL the running lab: it is the init of its process namespace, so all of it dies with it."""
        record = self.running()
        if record is None:
            return
        try:
            os.kill(record.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        self.wait_gone(record, patience)

    def wait_gone(self, record: LabRecord, patience: float) -> bool:
        """Wait until a lab's processes have ended."""
        deadline = time.monotonic() + patience
        while start_ticks(record.pid) == record.start_ticks:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        return True

    def clean_up(self, *, keep_logs: bool = False) -> None:
        """Remove what a lab that has ended left: control groups, changes of the machine's network, sockets, files."""
        record = self.record()
        if record and record.cgroup:
            remove_tree(Path(record.cgroup))
        self.network.give_back()
        if not self.path.exists():
            return
        for entry in self.path.iterdir():
            if entry.name == "lock" or (keep_logs and entry == self.logs):
                continue
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                entry.unlink(missing_ok=True)

    def remove(self, *, keep_logs: bool = False) -> None:
        """Clean up, and remove the directory itself unless the logs stay."""
        self.clean_up(keep_logs=keep_logs)
        if not self.path.exists():
            return
        (self.path / "lock").unlink(missing_ok=True)
        if not keep_logs:
            self.path.rmdir()


_OURS = {
    "lab.sock",
    "controller.sock",
    "topology.yaml",
    "logs",
    "lab.json",
    "lab.json.new",
    "lock",
    "broker",
    "network.json",
}
