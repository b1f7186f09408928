"""What a "host" of the lab is: where the host's end of an RNIC's cable lives and how to run a command on it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Protocol

from pingmesh.lab import names, namespaces, soft_roce
from pingmesh.lab.namespaces import LabError
from pingmesh.lab.shared_network import SharedNetwork
from topology.model import Rnic, Topology

# A new mount namespace with a sysfs of the host's own network, so that /sys/class/net shows its devices; the
# control groups are kept, since a fresh sysfs hides them and the agent reads its own. "$1" is the host's group or "".
_ENTER_HOST = """\
[ -z "$1" ] || echo 0 > "$1/cgroup.procs" || exit 70
shift
mount -t sysfs sysfs /sys 2>/dev/null && [ -d /run/cgroup ] && mount --rbind /run/cgroup /sys/fs/cgroup
exec "$@"
"""
_ENTER_GROUP = """\
[ -z "$1" ] || echo 0 > "$1/cgroup.procs" || exit 70
shift
exec "$@"
"""
MAX_SHARED_RNICS = 90
"""Each has a routing table and two rules, numbered from 101 and from 201."""


class HostKind(Protocol):
    """One way to have hosts in a lab."""

    transport: str
    """With which the agents probe."""

    def check(self, topology: Topology) -> None:
        """Refuse, by a LabError, a topology whose hosts cannot be made this way."""

    def namespace(self, host: str) -> str | None:
        """The network namespace that holds the host's devices; None: the lab's own."""

    def interface(self, rnic: Rnic) -> str:
        """Name of the RNIC's network device in that namespace."""

    def devices(self, rnics: Sequence[Rnic]) -> list[str]:
        """What the host's agent is given as its devices."""

    def command(self, host: str, argv: Sequence[str], *, cgroup: str | None = None) -> list[str]:
        """The command line that runs `argv` on the host, in a control group (a directory) if one is given."""

    def prepare(self, devices: Sequence[str], rules: Sequence[int]) -> None:
        """Before devices and rules (by preference) of these names are made in the lab's own namespace."""

    def attach(self, rnics: Sequence[Rnic]) -> None:
        """Make the RNICs' network devices, which are up, what the transport needs."""

    def close(self) -> None:
        """Take back what would outlive the lab. Idempotent."""


class NamespaceHosts:
    """Each host is a network namespace of its name; an RNIC is a network device of its device's name."""

    transport = "soft"

    def check(self, topology: Topology) -> None:
        """Any will do."""

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

    def prepare(self, devices: Sequence[str], rules: Sequence[int]) -> None:
        """All is in namespaces that end with the lab."""

    def attach(self, rnics: Sequence[Rnic]) -> None:
        """The soft transport needs no more."""

    def close(self) -> None:
        """Nothing outlives the lab."""


class SharedHosts:
    """All hosts share the machine's first network namespace, where alone the kernel has Soft-RoCE devices.

    An RNIC is a network device `HOST-DEVICE` with a Soft-RoCE device on it. Policy routing sends what one host sends
    to another over the fabric. Meant for a machine that is there for the lab only, such as a virtual one: while the
    lab is up, that machine's rules and some of its settings are changed.
    """

    transport = "verbs"

    def __init__(self, network: SharedNetwork) -> None:
        self._network = network

    def check(self, topology: Topology) -> None:
        """Few RNICs, IPv4, root."""
        if os.geteuid() != 0:
            raise LabError("`lab up --transport verbs` makes Soft-RoCE devices: run it as root")
        if any(":" in str(r.address) for r in topology.rnics.values()):
            raise LabError("`lab up --transport verbs` builds IPv4 fabrics only: leave out --family 6")
        if len(topology.rnics) > MAX_SHARED_RNICS:
            raise LabError(
                f"{len(topology.rnics)} RNICs are too many for `lab up --transport verbs`: {MAX_SHARED_RNICS} at most"
            )
        devices = [self.interface(r) for r in topology.rnics.values()]
        if len(set(devices)) < len(devices):
            raise LabError("hosts and devices of this topology do not make distinct interface names: use other names")

    def namespace(self, host: str) -> None:
        """The lab's own."""

    def interface(self, rnic: Rnic) -> str:
        """Both names, since all hosts are in one namespace."""
        return names.interface_name(f"{rnic.host}-{rnic.device}")

    def devices(self, rnics: Sequence[Rnic]) -> list[str]:
        """RDMA devices, each under the name that it has in the topology."""
        return [f"{r.device}={soft_roce.device_name(self.interface(r))}" for r in rnics]

    def command(self, host: str, argv: Sequence[str], *, cgroup: str | None = None) -> list[str]:
        """Only a control group tells one host from another."""
        return ["sh", "-c", _ENTER_GROUP, "host", cgroup or "", *argv]

    def prepare(self, devices: Sequence[str], rules: Sequence[int]) -> None:
        """Load the modules; note what will be changed, and change the settings."""
        soft_roce.load_modules()
        self._network.borrow(devices, rules)

    def attach(self, rnics: Sequence[Rnic]) -> None:
        """A Soft-RoCE device on each, and wait until all are active."""
        soft_roce.add([self.interface(r) for r in rnics])

    def close(self) -> None:
        """Give the machine its network back."""
        self._network.give_back()
