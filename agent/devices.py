"""From device names to transports: which devices there are, their addresses, and trying again while one is missing."""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from agent.interfaces import Interface, Prefix
from agent.transport.base import Transport, TransportError
from pingmesh.config import AgentSettings

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
        super().__init__(f"agent.transport {name!r} is not known: use 'soft'")


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


def open_transport(settings: AgentSettings, netlink: Interfaces, device: str) -> Transport:
    """A transport on a device's own address. Raises TransportError, OSError; UnknownTransportError."""
    if settings.transport != "soft":
        raise UnknownTransportError(settings.transport)
    # Imported here: a further transport brings imports of its own.
    from agent.transport.soft import SoftTransport

    prefixes = netlink.prefixes(device)
    if not prefixes:
        raise NoAddressError(device, netlink.interface(device) is not None)
    return SoftTransport(device, str(prefixes[0].ip))


class Opener:
    """Opens the transports of a list of devices, each as soon as it is there, with back-off while it is not."""

    def __init__(self, devices: Sequence[str], open_one: Callable[[str], Transport]) -> None:
        self._open_one = open_one
        self._waiting: dict[str, tuple[float, float]] = dict.fromkeys(devices, (0.0, RETRY_FIRST_S))

    @property
    def missing(self) -> list[str]:
        """Devices without a transport."""
        return list(self._waiting)

    def hurry(self, device: str) -> None:
        """A device has to be opened (again), and something speaks for trying at once."""
        self._waiting[device] = (0.0, RETRY_FIRST_S)

    def attempt(self, now: float) -> list[Transport]:
        """Open what is due and there."""
        opened: list[Transport] = []
        for device, (due, pause) in list(self._waiting.items()):
            if now < due:
                continue
            try:
                opened.append(self._open_one(device))
            except OSError as error:
                if due == 0.0 or pause >= RETRY_MAX_S:
                    log.warning("device not usable, trying again: %s", error, extra={"device": device})
                self._waiting[device] = (now + pause, min(pause * 2, RETRY_MAX_S))
            else:
                del self._waiting[device]
        return opened
