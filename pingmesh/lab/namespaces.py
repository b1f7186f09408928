"""Network namespaces: made and configured without a process per command."""

from __future__ import annotations

import ctypes
import logging
import os
import subprocess
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

log = logging.getLogger(__name__)

T = TypeVar("T")

NETNS_DIRECTORY = Path("/run/netns")
_CLONE_NEWNET = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)


class LabError(RuntimeError):
    """The lab cannot do what was asked; the text is one sentence for the user."""


class CommandError(LabError):
    """A command in a namespace failed."""

    def __init__(self, node: str | None, argv: Sequence[str], stderr: str) -> None:
        self.node = node
        self.argv = tuple(argv)
        self.stderr = stderr.strip()
        where = f" in namespace {node}" if node else ""
        super().__init__(f"`{' '.join(argv)}`{where} failed: {self.stderr or 'no message'}")


def execute(
    argv: Sequence[str],
    *,
    node: str | None = None,
    text: str | None = None,
    check: bool = True,
    shown: Sequence[str] | None = None,
) -> str:
    """Run a command and return its standard output; `text` is its standard input.

    `node` and `shown` (the command as the user knows it) are for the error only. Raises CommandError when it fails and
    `check` is set.
    """
    try:
        done = subprocess.run(list(argv), input=text, text=True, capture_output=True, check=False)
    except FileNotFoundError:
        raise CommandError(node, argv, f"{argv[0]} is not installed") from None
    if check and done.returncode != 0:
        raise CommandError(node, shown or argv, done.stderr)
    return done.stdout


def entering(name: str, argv: Sequence[str]) -> list[str]:
    """The command line that runs `argv` in a network namespace."""
    return ["nsenter", f"--net={NETNS_DIRECTORY / name}", "--", *argv]


def run(name: str, argv: Sequence[str], *, text: str | None = None, check: bool = True) -> str:
    """Run a command in a network namespace and return its standard output."""
    return execute(entering(name, argv), node=name, text=text, check=check, shown=argv)


def ip_batch(lines: Iterable[str], name: str | None = None, *, force: bool = False) -> None:
    """Run many `ip` commands in one process, in a namespace or here.

    Lines that begin with `-6 ` are run by `ip -6` after all others. `force` logs a line that fails and goes on.
    """
    both: tuple[list[str], list[str]] = ([], [])
    for line in lines:
        both[line.startswith("-6 ")].append(line.removeprefix("-6 "))
    for family, script in zip(("", "-6"), both, strict=True):
        if script:
            options = [*(["-n", name] if name else []), *([family] if family else []), *(["-force"] if force else [])]
            try:
                execute(["ip", *options, "-batch", "-"], node=name, text="\n".join(script) + "\n")
            except CommandError as error:
                if not force:
                    raise
                _log_unexpected(error)


def _log_unexpected(error: CommandError) -> None:
    """A route to delete that the kernel has already deleted is expected; anything else should be seen."""
    expected = ("No such process", "Command failed")
    lines = [line for line in error.stderr.splitlines() if not any(e in line for e in expected)]
    if lines:
        log.warning("ip failed in %s: %s", error.node, "; ".join(lines))


def inside(name: str, function: Callable[[], T]) -> T:
    """Call a Python function in a network namespace (in a thread of its own) and return what it returns."""
    result: list[T] = []
    failure: list[BaseException] = []

    def body() -> None:
        try:
            enter_thread(name)
            result.append(function())
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=body, name=f"netns-{name}")
    thread.start()
    thread.join()
    if failure:
        raise failure[0]
    return result[0]


def enter_thread(name: str) -> None:
    """Move the calling thread, and no other, into a network namespace."""
    fd = os.open(NETNS_DIRECTORY / name, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if _libc.setns(fd, _CLONE_NEWNET) != 0:
            code = ctypes.get_errno()
            raise OSError(code, f"setns to {name}: {os.strerror(code)}")
    finally:
        os.close(fd)


def write_sysctls(values: Mapping[str, str], *, optional: Iterable[str] = ()) -> set[str]:
    """Write sysctls (by path below /proc/sys, e.g. `net/ipv4/ip_forward`) of the calling thread's namespace.

    Returns those of `optional` that the kernel lacks or refuses; any other failure raises LabError.
    """
    may_fail = set(optional)
    missing: set[str] = set()
    for key, value in values.items():
        try:
            Path("/proc/sys", key).write_text(value)
        except OSError as error:
            if key not in may_fail:
                raise LabError(f"cannot set sysctl {key.replace('/', '.')} to {value}: {error.strerror}") from error
            missing.add(key)
    return missing
