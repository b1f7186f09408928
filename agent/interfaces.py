"""Network interfaces as the kernel tells of them over rtnetlink: carrier, transitions, addresses.

Netlink answers for the network namespace of the socket, whatever `/sys` is mounted, and knows a lost carrier at once
where `ifconfig`-style flags lag by up to a second.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

_RTM_GETLINK, _RTM_NEWLINK, _RTM_GETADDR, _RTM_NEWADDR = 18, 16, 22, 20
_NLM_F_REQUEST, _NLM_F_DUMP = 1, 0x300
_NLMSG_ERROR, _NLMSG_DONE = 2, 3
_IFLA_IFNAME, _IFLA_MTU, _IFLA_CARRIER_CHANGES = 3, 4, 35
_IFA_ADDRESS, _IFA_LOCAL, _IFA_FLAGS = 1, 2, 8
_IFF_UP, _IFF_LOOPBACK, _IFF_LOWER_UP = 1, 8, 1 << 16
_IFA_F_SECONDARY, _IFA_F_DADFAILED, _IFA_F_TENTATIVE = 0x01, 0x08, 0x40

_RTMGRP_LINK, _RTMGRP_IPV4_IFADDR, _RTMGRP_IPV6_IFADDR = 0x1, 0x10, 0x100

_NLMSG = struct.Struct("=IHHII")
_IFINFO = struct.Struct("=BxHiII")
_IFADDR = struct.Struct("=BBBBI")
_RTATTR = struct.Struct("=HH")


Prefix = ipaddress.IPv4Interface | ipaddress.IPv6Interface


@dataclass(frozen=True, slots=True)
class Interface:
    """One interface now. `carrier_changes` counts transitions since the interface exists."""

    name: str
    index: int
    up: bool
    carrier_changes: int
    mtu: int
    loopback: bool = False


class LinkSource(Protocol):
    """Where the link state comes from."""

    def interface(self, name: str) -> Interface | None:
        """The interface, or None while there is none of that name."""


class Netlink:
    """A request socket of rtnetlink. Close it after use; usable as a context manager."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE)
        self._socket.bind((0, 0))
        # The kernel answers within the send call; a missing answer must not stop the event loop.
        self._socket.settimeout(0.2)
        self._sequence = 0

    def __enter__(self) -> Netlink:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def interface(self, name: str) -> Interface | None:
        """The interface of that name; None if there is none."""
        encoded = name.encode() + b"\0"
        size = _RTATTR.size + len(encoded)
        attribute = _RTATTR.pack(size, _IFLA_IFNAME) + encoded + b"\0" * (-size % 4)
        for _, body in self._request(_RTM_GETLINK, _NLM_F_REQUEST, _IFINFO.pack(0, 0, 0, 0, 0) + attribute):
            return _interface(body)
        return None

    def interfaces(self) -> list[Interface]:
        """All interfaces."""
        request = self._request(_RTM_GETLINK, _NLM_F_REQUEST | _NLM_F_DUMP, _IFINFO.pack(0, 0, 0, 0, 0))
        return [_interface(body) for kind, body in request if kind == _RTM_NEWLINK]

    def prefixes(self, name: str) -> list[Prefix]:
        """Usable addresses of an interface, best first: IPv4, then global or unique-local IPv6; none link-local."""
        link = self.interface(name)
        if link is None:
            return []
        found: list[tuple[bool, bool, int, Prefix]] = []
        for kind, body in self._request(_RTM_GETADDR, _NLM_F_REQUEST | _NLM_F_DUMP, _IFADDR.pack(0, 0, 0, 0, 0)):
            if kind != _RTM_NEWADDR:
                continue
            family, length, flags, _, index = _IFADDR.unpack_from(body)
            if index != link.index or family not in (socket.AF_INET, socket.AF_INET6):
                continue
            attributes = dict(_attributes(body, _IFADDR.size))
            if _IFA_FLAGS in attributes:
                (flags,) = struct.unpack_from("=I", attributes[_IFA_FLAGS])
            raw = attributes.get(_IFA_LOCAL) or attributes.get(_IFA_ADDRESS)
            if raw is None or flags & (_IFA_F_TENTATIVE | _IFA_F_DADFAILED):
                continue
            prefix = ipaddress.ip_interface((raw, length))
            if prefix.ip.is_link_local or prefix.ip.is_loopback or prefix.ip.is_multicast:
                continue
            # The same bit says "secondary" over IPv4 and "temporary" over IPv6: both may go away, so they come last.
            found.append((prefix.version == 6, bool(flags & _IFA_F_SECONDARY), len(found), prefix))
        return [prefix for _, _, _, prefix in sorted(found, key=lambda item: item[:3])]

    def _request(self, kind: int, flags: int, payload: bytes) -> Iterator[tuple[int, bytes]]:
        self._sequence += 1
        self._socket.send(_NLMSG.pack(_NLMSG.size + len(payload), kind, flags, self._sequence, 0) + payload)
        while True:
            data = self._socket.recv(1 << 17)
            at = 0
            while at + _NLMSG.size <= len(data):
                size, answer, _, sequence, _ = _NLMSG.unpack_from(data, at)
                body = data[at + _NLMSG.size : at + size]
                at += (size + 3) & ~3
                if sequence != self._sequence:
                    continue  # left over from a request whose answer was not read to its end
                if answer == _NLMSG_DONE:
                    return
                if answer == _NLMSG_ERROR:
                    code = -struct.unpack_from("=i", body)[0]
                    if code in (0, errno.ENODEV):
                        return
                    raise OSError(code, f"netlink request {kind} failed")
                yield answer, body
                if not flags & _NLM_F_DUMP:
                    return


class NetlinkEvents:
    """Says when links or addresses may have changed: `changed` is set, and what did is to be looked up.

    Without it somebody would have to look several times a second, also on the many days when nothing happens.
    """

    def __init__(self, changed: asyncio.Event, loop: asyncio.AbstractEventLoop) -> None:
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE)
        self._socket.setblocking(False)
        self._socket.bind((0, _RTMGRP_LINK | _RTMGRP_IPV4_IFADDR | _RTMGRP_IPV6_IFADDR))
        self._changed = changed
        self._loop = loop
        loop.add_reader(self._socket.fileno(), self._readable)

    def close(self) -> None:
        """Close the socket."""
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close()

    def _readable(self) -> None:
        try:
            while True:
                self._socket.recv(1 << 16)
                self._changed.set()
        except BlockingIOError:
            pass
        except OSError:
            self._changed.set()  # more events than the queue holds: something changed for certain


def _interface(body: bytes) -> Interface:
    _, _, index, flags, _ = _IFINFO.unpack_from(body)
    attributes = dict(_attributes(body, _IFINFO.size))
    return Interface(
        name=attributes[_IFLA_IFNAME].rstrip(b"\0").decode(),
        index=index,
        up=flags & (_IFF_UP | _IFF_LOWER_UP) == _IFF_UP | _IFF_LOWER_UP,
        carrier_changes=struct.unpack("=I", attributes.get(_IFLA_CARRIER_CHANGES, b"\0" * 4))[0],
        mtu=struct.unpack("=I", attributes.get(_IFLA_MTU, b"\0" * 4))[0],
        loopback=bool(flags & _IFF_LOOPBACK),
    )


def _attributes(body: bytes, at: int) -> Iterator[tuple[int, bytes]]:
    while at + _RTATTR.size <= len(body):
        size, kind = _RTATTR.unpack_from(body, at)
        if size < _RTATTR.size:
            return
        yield kind, body[at + _RTATTR.size : at + size]
        at += (size + 3) & ~3
