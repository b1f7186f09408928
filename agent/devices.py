"""From device names to transports: which devices there are, their addresses, and trying again while one is missing."""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from agent.interfaces import Interface, Prefix
from agent.transport.base import Transport, TransportError
from pingmesh.config import AgentSettings

if TYPE_CHECKING:
    from agent.transport.verbs.transport import Rule

log = logging.getLogger(__name__)

RETRY_FIRST_S, RETRY_MAX_S = 1.0, 30.0


class Interfaces(Protocol):
    """What is asked of the kernel; see Netlink."""

    def interface(self, name: str) -> Interface | None:
        """One interface."""

    def interfaces(self) -> list[Interface]:
        """All interfaces."""

    def prefixes(self, name: str) -> list[Prefix]:
        """Usable addresses of one, best first."""


class NoAddressError(TransportError):
    """A device that is not there, or has no usable address (yet)."""

    def __init__(self, device: str, present: bool) -> None:
        self.device = device
        what = "has no usable address; give it an IPv4 or a global IPv6 address" if present else "does not exist"
        super().__init__(f"{device} {what}")


class UnknownTransportError(ValueError):
    """A transport that this agent does not have."""

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(f"agent.transport {name!r} is not known: use 'soft' or 'verbs'")


class DeviceNameError(ValueError):
    """Entries of `agent.devices` that do not name distinct devices."""

    def __init__(self, what: str) -> None:
        super().__init__(f"agent.devices: {what}")


def named_devices(entries: Sequence[str]) -> dict[str, str]:
    """System device by published name, of entries `DEVICE` or `NAME=DEVICE`. Raises DeviceNameError.

    >>> named_devices(["mlx5_0", "rail1=mlx5_3"])
    {'mlx5_0': 'mlx5_0', 'rail1': 'mlx5_3'}
    """
    out: dict[str, str] = {}
    for entry in entries:
        name, _, system = (part.strip() for part in entry.partition("="))
        if not name or ("=" in entry and not system):
            raise DeviceNameError(f"{entry!r} is neither DEVICE nor NAME=DEVICE")
        if name in out:
            raise DeviceNameError(f"two devices are called {name!r}: give one another name, NAME=DEVICE")
        out[name] = system or name
    return out


def find_devices(settings: AgentSettings, netlink: Interfaces, broker: str) -> list[str]:
    """The devices that the transport finds by itself. Raises TransportError without RDMA, UnknownTransportError."""
    if settings.transport == "soft":
        return found_devices(netlink, broker)
    if settings.transport != "verbs":
        raise UnknownTransportError(settings.transport)
    from agent.transport.verbs import discovery, library
    from agent.transport.verbs.pyverbs_edge import PyverbsEdge

    found = discovery.look(PyverbsEdge(), gid_rule(settings), settings.roles)
    if not found:
        raise library.NoVerbsError(library.explain_no_devices())
    return [f.device for f in found if f.usable]


def gid_rule(settings: AgentSettings) -> Rule:
    """How the settings want GIDs chosen."""
    from agent.transport.verbs.transport import Rule

    return Rule(settings.gid_index, settings.gid_family, settings.gid_link_local)


def interface_of(settings: AgentSettings, system: str) -> str:
    """The network interface below a system device; empty while it is not there."""
    if settings.transport != "verbs":
        return system
    from agent.transport.verbs import discovery

    return discovery.interface_of(system)


def node_of(settings: AgentSettings, system: str) -> Path | None:
    """What goes when a system device is taken away, even while it is held open; None where nothing does."""
    if settings.transport != "verbs":
        return None
    from agent.transport.verbs import discovery

    return discovery.node_of(system)


def has_gid(settings: AgentSettings, system: str, gid: str) -> bool:
    """Whether a system device has a GID now; only for `verbs`."""
    if settings.transport != "verbs":
        return False
    from agent.transport.verbs import discovery
    from agent.transport.verbs.pyverbs_edge import PyverbsEdge

    try:
        return discovery.index_of(PyverbsEdge(), system, gid) is not None
    except OSError:
        return False


def found_devices(netlink: Interfaces, broker: str) -> list[str]:
    """Interfaces with a usable address, but not loopback and not the one on whose subnet the broker is."""
    return [i.name for i in netlink.interfaces() if not i.loopback and _probes_from(netlink, i, broker)]


def _probes_from(netlink: Interfaces, interface: Interface, broker: str) -> bool:
    prefixes = netlink.prefixes(interface.name)
    try:
        management = ipaddress.ip_address(broker)
    except ValueError:
        return bool(prefixes)
    return bool(prefixes) and not any(management in p.network for p in prefixes)


def open_transport(settings: AgentSettings, netlink: Interfaces, entry: str, earlier: str = "") -> Transport:
    """A transport on a device, `DEVICE` or `NAME=DEVICE`. With verbs, an `earlier` GID of it goes before all others.

    Raises TransportError, OSError; UnknownTransportError, DeviceNameError, and with a forced GID index
    gids.GidIndexError.
    """
    ((name, system),) = named_devices([entry]).items()
    # Imported here: each transport brings imports of its own.
    if settings.transport == "verbs":
        return _open_verbs(settings, netlink, name, system, earlier)
    if settings.transport != "soft":
        raise UnknownTransportError(settings.transport)
    from agent.transport.soft import SoftTransport

    prefixes = netlink.prefixes(system)
    if not prefixes:
        raise NoAddressError(system, netlink.interface(system) is not None)
    return SoftTransport(name, str(prefixes[0].ip), system)


def _open_verbs(settings: AgentSettings, netlink: Interfaces, name: str, system: str, earlier: str) -> Transport:
    from agent.transport.verbs import discovery, library
    from agent.transport.verbs.pyverbs_edge import PyverbsEdge
    from agent.transport.verbs.transport import VerbsTransport

    edge = PyverbsEdge()
    devices = edge.devices()
    if system not in devices:
        there = f"there are {', '.join(devices)}" if devices else library.explain_no_devices()
        raise library.NoVerbsError(f"{system} is no RDMA device of this machine: {there}")

    def interface_name(index: int) -> str:
        return next((i.name for i in netlink.interfaces() if i.index == index), "") or interface_of(settings, system)

    rule = gid_rule(settings)
    if earlier and rule.index is None:
        rule.index = discovery.index_of(edge, system, earlier)
    return VerbsTransport(name, system, edge, interface_name, rule)


class Opener:
    """Opens the transports of a list of devices, each as soon as it is there, with back-off while it is not."""

    def __init__(self, devices: Sequence[str], open_one: Callable[[str], Transport]) -> None:
        self._open_one = open_one
        self._first = True
        self._waiting: dict[str, tuple[float, float]] = dict.fromkeys(devices, (0.0, RETRY_FIRST_S))

    @property
    def missing(self) -> list[str]:
        """Devices without a transport."""
        return list(self._waiting)

    def hurry(self, device: str) -> None:
        """A device has to be opened (again), and something speaks for trying at once."""
        self._waiting[device] = (0.0, RETRY_FIRST_S)

    def wait(self, device: str, now: float) -> None:
        """A device has to be opened again, but not at once: it had been opened only just."""
        self._waiting[device] = (now + RETRY_FIRST_S, RETRY_FIRST_S)

    def attempt(self, now: float) -> list[Transport]:
        """Open what is due and there.

        A setting that does not fit (ValueError) is raised by the first attempt only: once the agent runs, it is no
        reason to end it for all devices.
        """
        first, self._first = self._first, False
        opened: list[Transport] = []
        for device, (due, pause) in list(self._waiting.items()):
            if now < due:
                continue
            try:
                opened.append(self._open_one(device))
            except (OSError, ValueError) as error:
                if first and isinstance(error, ValueError):
                    raise
                if due == 0.0 or pause >= RETRY_MAX_S:
                    log.warning("device not usable, trying again: %s", error, extra={"device": device})
                self._waiting[device] = (now + pause, min(pause * 2, RETRY_MAX_S))
            else:
                del self._waiting[device]
        return opened
