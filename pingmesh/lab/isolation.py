"""The supervisor's own world: user (unless root), mount, network and process namespaces that end with it."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path

from pingmesh.lab.namespaces import NETNS_DIRECTORY, LabError
from pingmesh.lab.state import LabRecord, start_ticks

_MS_REC = 0x4000
_MS_BIND = 0x1000
_MS_PRIVATE = 1 << 18

REFUSED_ROOT = (
    "the lab needs to make namespaces, which this system refuses even to root: "
    "run it outside the container, or give the container CAP_SYS_ADMIN and CAP_NET_ADMIN"
)
REFUSED_USER = (
    "the lab needs root or unprivileged user namespaces, which this system refuses: run it as root, or as root set "
    "`sysctl user.max_user_namespaces=10000` (also kernel.unprivileged_userns_clone=1 or "
    "kernel.apparmor_restrict_unprivileged_userns=0 where these exist)"
)

_libc = ctypes.CDLL(None, use_errno=True)


def refused() -> LabError:
    """What to say when the kernel does not give us namespaces."""
    return LabError(REFUSED_ROOT if os.geteuid() == 0 else REFUSED_USER)


def isolated_command(argv: Sequence[str], *, shares_network: bool = False) -> list[str]:
    """The command line that runs `argv` as the init of new namespaces; it dies with the process that starts it.

    `shares_network`: it stays in our network namespace.
    """
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    network = [] if shares_network else ["--net"]
    return ["unshare", *user, "--mount", *network, "--pid", "--fork", "--kill-child", "--", *argv]


def enter_command(record: LabRecord, argv: Sequence[str]) -> list[str]:
    """The command line that runs `argv` inside a running lab, from outside; also where both are in a chroot."""
    user = ["--user", "--preserve-credentials"] if record.user_namespace else []
    return ["nsenter", "--target", str(record.pid), *user, "--mount", "--root", "--net", "--pid", "--", *argv]


def settle() -> LabRecord:
    """Make the new namespaces a place to live in; call it first, in the process that `isolated_command` started.

    Returns what the outside needs to know of this process. Mounts a /run and a /proc of our own; control groups stay
    reachable for hosts at /run/cgroup. Raises LabError when the kernel refuses.
    """
    # Still the outside's /proc: it tells our number there.
    pid = int(Path("/proc/self").readlink().name)
    ticks = start_ticks(pid)
    if os.getpid() != 1 or ticks is None:
        raise LabError("the supervisor of a lab is started by `pingmesh lab up` only")
    uid_map = Path("/proc/self/uid_map").read_text().split()
    try:
        _mount("none", "/", None, _MS_REC | _MS_PRIVATE)
        _mount("tmpfs", "/run", "tmpfs", 0)
        NETNS_DIRECTORY.mkdir()
        cgroups = Path("/sys/fs/cgroup")
        if cgroups.is_dir():
            Path("/run/cgroup").mkdir()
            _mount(str(cgroups), "/run/cgroup", None, _MS_REC | _MS_BIND)
        _mount("proc", "/proc", "proc", 0)
    except PermissionError:
        raise refused() from None
    except OSError as error:
        raise LabError(f"cannot prepare the lab's namespaces: {error}") from error
    return LabRecord(pid=pid, start_ticks=ticks, user_namespace=uid_map != ["0", "0", "4294967295"])


def _mount(source: str, target: str, kind: str | None, flags: int) -> None:
    result = _libc.mount(
        source.encode(), target.encode(), kind.encode() if kind else None, ctypes.c_ulong(flags), ctypes.c_char_p(None)
    )
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{os.strerror(code)} (mount {target})")
