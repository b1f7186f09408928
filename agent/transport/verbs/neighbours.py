"""Whether the next hop towards an address is known, asked of the kernel before it is asked to resolve one.

Making an address handle for a dead neighbour blocks the whole process for a second; this does not.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket
import struct
from typing import NamedTuple, Protocol

from agent.interfaces import Netlink

_RTM_GETROUTE, _RTM_GETNEIGH = 26, 30
_NLM_F_REQUEST = 1
_RTA_DST, _RTA_SRC, _RTA_OIF, _RTA_GATEWAY, _RTA_VIA = 1, 2, 4, 5, 18
_NDA_DST, _NDA_LLADDR = 1, 2
_RTN_UNICAST, _RTN_LOCAL = 1, 2
_NUD_VALID = 0x02 | 0x04 | 0x08 | 0x10 | 0x40 | 0x80
"""Reachable, stale, delay, probe, no ARP, permanent."""
_NUD_FAILED = 0x20
_RTMSG = struct.Struct("=BBBBBBBBI")
_NDMSG = struct.Struct("=BxxxiHBB")
_RTATTR = struct.Struct("=HH")
_DISCARD = 9


class Hop(NamedTuple):
    """The next hop now. `mac` is empty while it is not known; `dead`: asked, and it did not answer."""

    address: str
    mac: bytes
    dead: bool


class Resolver(Protocol):
    """Looks up next hops; does not block."""

    def look(self, address: str) -> Hop:
        """The next hop towards an address. Raises OSError without a route out of the interface."""

    def nudge(self, hop: Hop) -> None:
        """Have the kernel look for a neighbour that is not known."""

    def close(self) -> None:
        """Release the sockets."""


class NetlinkResolver(Netlink):
    """Next hops from one source address out of one interface."""

    def __init__(self, interface: str, source: str) -> None:
        super().__init__()
        parsed = ipaddress.ip_address(source)
        self._family = socket.AF_INET if parsed.version == 4 else socket.AF_INET6
        self._bits = parsed.max_prefixlen
        self._source = parsed
        self._interface = interface
        link = self.interface(interface)
        self._index = link.index if link is not None else 0

    def look(self, address: str) -> Hop:
        """The next hop towards an address. Raises OSError without a route out of the interface."""
        target = ipaddress.ip_address(address)
        request = (
            _RTMSG.pack(self._family, self._bits, self._bits, 0, 0, 0, 0, 0, 0)
            + _attribute(_RTA_DST, target.packed)
            + _attribute(_RTA_SRC, self._source.packed)
            + _attribute(_RTA_OIF, self._index.to_bytes(4, "little"))
        )
        hop = None
        for _, body in self._request(_RTM_GETROUTE, _NLM_F_REQUEST, request):
            hop = self._hop(body, target.packed)
            break
        if hop is None:
            raise OSError(errno.ENETUNREACH, f"no route to {address} out of {self._interface}: {os.strerror(101)}")
        return self._neighbour(hop)

    def _hop(self, body: bytes, target: bytes) -> bytes | None:
        if body[7] not in (_RTN_UNICAST, _RTN_LOCAL):
            return None
        found = _read(body, _RTMSG.size)
        if int.from_bytes(found.get(_RTA_OIF, b""), "little") not in (self._index, 0):
            return None
        via = found.get(_RTA_VIA)
        return found.get(_RTA_GATEWAY) or (via[2:] if via else target)

    def _neighbour(self, hop: bytes) -> Hop:
        text = str(ipaddress.ip_address(hop))
        request = _NDMSG.pack(self._family if len(hop) == 4 else socket.AF_INET6, self._index, 0, 0, 0)
        try:
            for _, body in self._request(_RTM_GETNEIGH, _NLM_F_REQUEST, request + _attribute(_NDA_DST, hop)):
                state = _NDMSG.unpack_from(body)[2]
                if state & _NUD_VALID:
                    return Hop(text, _read(body, _NDMSG.size).get(_NDA_LLADDR, b"\0"), False)
                return Hop(text, b"", bool(state & _NUD_FAILED))
        except OSError as error:
            if error.errno != errno.ENOENT:
                raise
        return Hop(text, b"", False)

    def nudge(self, hop: Hop) -> None:
        """Send a datagram to the neighbour's discard port: the kernel has to look for it then."""
        family = socket.AF_INET6 if ":" in hop.address else socket.AF_INET
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as s:
            s.setblocking(False)
            s.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, self._interface.encode() + b"\0")
            s.bind((str(self._source), 0))
            s.sendto(b"", (hop.address, _DISCARD))


def _attribute(kind: int, data: bytes) -> bytes:
    return _RTATTR.pack(_RTATTR.size + len(data), kind) + data + b"\0" * (-len(data) % 4)


def _read(body: bytes, at: int) -> dict[int, bytes]:
    found = {}
    while at + _RTATTR.size <= len(body):
        size, kind = _RTATTR.unpack_from(body, at)
        if size < _RTATTR.size:
            break
        found[kind & 0x3FFF] = body[at + _RTATTR.size : at + size]
        at += (size + 3) & ~3
    return found
