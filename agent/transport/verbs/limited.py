"""TTL-limited packets of a probe's very form: from a raw socket, since no RNIC lets a UD packet's TTL be trusted."""

from __future__ import annotations

import ipaddress
import socket

from agent import frames
from agent.transport import sockets


class LimitedSocket:
    """Sends frames with a small TTL and a spoiled ICRC, and receives nothing. Raises TransportError."""

    def __init__(self, interface: str, address: str) -> None:
        own = ipaddress.ip_address(address)
        self._own = own.packed
        self._version = own.version
        self._socket = sockets.open_sender(interface, address, self._version)
        self._dscp = -1

    def send(self, address: str, sport: int, dscp: int, ttl: int, payload: bytes, qpn: int, source_qpn: int) -> None:
        """Send one. Raises OSError, ValueError for another family."""
        target = ipaddress.ip_address(address)
        if target.version != self._version:
            raise ValueError(f"no way from IPv{self._version} to {address}")
        payload += bytes(-len(payload) % 4)
        length = frames.HEAD + len(payload) + frames.TAIL
        if self._version == 4:
            prefix = frames.prefix4(self._own, target.packed, frames.IPV4_HEADER + length)
        else:
            prefix = frames.prefix6(self._own, target.packed, length)
        head, crc = frames.head(prefix, length, sport, qpn, 0, source_qpn)
        frame = bytearray(head + payload + bytes(frames.TAIL))
        frames.put_icrc(frame, memoryview(frame), crc, frames.SPOILED)
        if self._version == 6:
            frames.add_checksum6(frame, frames.pseudo6(self._own, target.packed))
        if dscp != self._dscp:
            level, option = (
                (socket.IPPROTO_IP, socket.IP_TOS) if self._version == 4 else (socket.IPPROTO_IPV6, socket.IPV6_TCLASS)
            )
            self._socket.setsockopt(level, option, dscp << 2)
            self._dscp = dscp
        self._socket.sendmsg((frame,), (sockets.limit(self._version, ttl),), 0, (address, 0))

    def close(self) -> None:
        """Close the socket; safe to call twice."""
        self._socket.close()
