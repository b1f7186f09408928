"""The machine's network interfaces that can carry soft RoCEv2: name, address, MTU."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from agent.transport.base import TransportError

_SIOCGIFADDR, _SIOCGIFMTU, _SIOCGIFFLAGS = 0x8915, 0x8921, 0x8913
_IFF_LOOPBACK = 0x8
_IF_INET6 = Path("/proc/self/net/if_inet6")
_SCOPE_GLOBAL = "00"


@dataclass(frozen=True, slots=True)
class Interface:
    """A network interface. `address`: the first usable one, IPv4 before global IPv6, never link-local."""

    device: str
    address: str
    mtu: int


def _ioctl(device: str, request: int) -> bytes | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        try:
            return fcntl.ioctl(s, request, struct.pack("16s24x", device.encode()[:15]))
        except OSError:
            return None


def _ipv4(device: str) -> str | None:
    answer = _ioctl(device, _SIOCGIFADDR)
    if answer is None:
        return None
    address = ipaddress.IPv4Address(answer[20:24])
    return None if address.is_link_local or address.is_loopback else str(address)


def _ipv6(device: str) -> str | None:
    try:
        lines = _IF_INET6.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        digits, _, _, scope, _, name = line.split()
        if name == device and scope == _SCOPE_GLOBAL:
            return str(ipaddress.IPv6Address(bytes.fromhex(digits)))
    return None


def mtu_of(device: str) -> int:
    """The interface's MTU in bytes; 1500 if it cannot be read."""
    answer = _ioctl(device, _SIOCGIFMTU)
    return int(struct.unpack_from("i", answer, 16)[0]) if answer else 1500


def find(devices: Sequence[str] | None = None) -> list[Interface]:
    """The interfaces named (all that have an address if None), in that order.

    Raises TransportError for a named one that does not exist or has no usable address.
    """
    names = [name for _, name in socket.if_nameindex()]
    if devices is None:
        found = []
        for name in names:
            flags = _ioctl(name, _SIOCGIFFLAGS)
            address = _ipv4(name) or _ipv6(name)
            if address and flags and not struct.unpack_from("H", flags, 16)[0] & _IFF_LOOPBACK:
                found.append(Interface(name, address, mtu_of(name)))
        return found
    found = []
    for name in devices:
        if name not in names:
            raise TransportError(f"{name}: no such network interface; there are {', '.join(names) or 'none'}")
        address = _ipv4(name) or _ipv6(name)
        if address is None:
            raise TransportError(
                f"{name}: has no IPv4 or global IPv6 address; give it one, or leave it out of agent.devices"
            )
        found.append(Interface(name, address, mtu_of(name)))
    return found
