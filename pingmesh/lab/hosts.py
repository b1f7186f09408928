"""What a "host" of the lab is: where the host's end of an RNIC's cable lives and how to run a command on it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pingmesh.lab import namespaces
from topology.model import Rnic

# A new mount namespace with a sysfs of the host's own network, so that /sys/class/net shows its devices; the
# control groups are kept, since a fresh sysfs hides them and the agent reads its own. "$1" is the host's group or "".
_ENTER_HOST = """\
[ -z "$1" ] || echo 0 > "$1/cgroup.procs" || exit 70
shift
mount -t sysfs sysfs /sys 2>/dev/null && [ -d /run/cgroup ] && mount --rbind /run/cgroup /sys/fs/cgroup
exec "$@"
"""


class HostKind(Protocol):
    """One way to have hosts in a lab."""

    def namespace(self, host: str) -> str | None:
        """The network namespace that holds the host's devices; None: the lab's own."""

    def interface(self, rnic: Rnic) -> str:
        """Name of the RNIC's network device in that namespace."""

    def devices(self, rnics: Sequence[Rnic]) -> list[str]:
        """What the host's agent is given as its devices."""

    def command(self, host: str, argv: Sequence[str], *, cgroup: str | None = None) -> list[str]:
        """The command line that runs `argv` on the host, in a control group (a directory) if one is given."""


class NamespaceHosts:
    """Each host is a network namespace of its name; an RNIC is a network device of its device's name."""

    def namespace(self, host: str) -> str:
        """The host's own namespace."""
        return host

    def interface(self, rnic: Rnic) -> str:
        """The device name itself: it is at most 15 characters or the fabric refuses it."""
        return rnic.device

    def devices(self, rnics: Sequence[Rnic]) -> list[str]:
        """Network devices, as the soft transport takes them."""
        return [r.device for r in rnics]

    def command(self, host: str, argv: Sequence[str], *, cgroup: str | None = None) -> list[str]:
        """Enter the host's network, then a mount namespace that shows it in /sys."""
        inner = ["unshare", "--mount", "--", "sh", "-c", _ENTER_HOST, "host", cgroup or "", *argv]
        return namespaces.entering(host, inner)
