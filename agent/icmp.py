"""ICMP "time exceeded" answers, IPv4 and IPv6: the socket that hears nothing else, and what an answer quotes."""

from __future__ import annotations

import ipaddress
import socket
import struct
from dataclasses import dataclass

_SOL_RAW, _ICMP_FILTER, _ICMP6_FILTER = 255, 1, 1
_TIME_EXCEEDED_4, _TIME_EXCEEDED_6 = 11, 3
_UDP = 17


class NoRawSocketError(PermissionError):
    """Raw sockets are not allowed."""

    def __init__(self) -> None:
        super().__init__("raw sockets are not allowed here: run the agent as root or give it CAP_NET_RAW")


@dataclass(frozen=True, slots=True)
class Quoted:
    """The UDP packet that expired at `router`. `length` is its UDP length field."""

    router: str
    source: str
    target: str
    sport: int
    dport: int
    length: int


def check_allowed() -> None:
    """Raises NoRawSocketError without the right to open raw sockets."""
    try:
        socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP).close()
    except PermissionError:
        raise NoRawSocketError from None


def open_socket(device: str, family: int) -> socket.socket:
    """A non-blocking raw socket bound to a device that receives time exceeded only.

    Raises NoRawSocketError without the right, OSError when the device is gone.
    """
    protocol = socket.IPPROTO_ICMP if family == socket.AF_INET else socket.IPPROTO_ICMPV6
    try:
        s = socket.socket(family, socket.SOCK_RAW, protocol)
    except PermissionError:
        raise NoRawSocketError from None
    try:
        # In both filters a set bit blocks the type.
        if family == socket.AF_INET:
            s.setsockopt(_SOL_RAW, _ICMP_FILTER, struct.pack("=I", 0xFFFFFFFF & ~(1 << _TIME_EXCEEDED_4)))
        else:
            words = [0xFFFFFFFF] * 8
            words[_TIME_EXCEEDED_6 >> 5] &= ~(1 << (_TIME_EXCEEDED_6 & 31))
            s.setsockopt(socket.IPPROTO_ICMPV6, _ICMP6_FILTER, struct.pack("=8I", *words))
        s.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, device.encode() + b"\0")
        s.setblocking(False)
    except OSError:
        s.close()
        raise
    return s


def parse(family: int, packet: bytes, sender: str) -> Quoted | None:
    """What an answer quotes, as read from `open_socket`'s socket; None if it is no expired UDP packet.

    Over IPv4 the kernel hands out the outer IP header too, over IPv6 it does not; `sender` is the address the socket
    gave, the router's. Never raises, whatever the bytes: anybody may send them.
    """
    if family == socket.AF_INET:
        return _parse4(packet, sender)
    return _parse6(packet, sender)


def _parse4(packet: bytes, sender: str) -> Quoted | None:
    if len(packet) < 20 or packet[0] >> 4 != 4:
        return None
    at = (packet[0] & 15) * 4
    # Type, code 0 (expired in transit), checksum, unused: 8 bytes; then the quoted packet.
    if at < 20 or len(packet) < at + 8 + 20 or packet[at] != _TIME_EXCEEDED_4 or packet[at + 1] != 0:
        return None
    at += 8
    size = (packet[at] & 15) * 4
    # A later fragment has no UDP header; our packets are never fragmented.
    fragment = (packet[at + 6] & 0x1F) | packet[at + 7]
    if packet[at] >> 4 != 4 or size < 20 or packet[at + 9] != _UDP or fragment or len(packet) < at + size + 8:
        return None
    sport, dport, length = struct.unpack_from(">HHH", packet, at + size)
    source, target = socket.inet_ntoa(packet[at + 12 : at + 16]), socket.inet_ntoa(packet[at + 16 : at + 20])
    return Quoted(sender, source, target, sport, dport, length)


def _parse6(packet: bytes, sender: str) -> Quoted | None:
    if len(packet) < 8 + 40 + 8 or packet[0] != _TIME_EXCEEDED_6 or packet[1] != 0:
        return None
    # Our packets carry no extension headers.
    if packet[8] >> 4 != 6 or packet[8 + 6] != _UDP:
        return None
    sport, dport, length = struct.unpack_from(">HHH", packet, 8 + 40)
    source, target = (str(ipaddress.IPv6Address(packet[a : a + 16])) for a in (8 + 8, 8 + 24))
    return Quoted(sender.partition("%")[0], source, target, sport, dport, length)
