"""The sockets of the soft transport: what Linux needs to be told, and the control messages it tells us."""

from __future__ import annotations

import ctypes
import fcntl
import socket
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from agent.frames import PORT
from agent.transport.base import TransportError

SO_TIMESTAMPING = 37
SO_RXQ_OVFL = 40
_SO_RCVBUFFORCE = 33
_SIOCGIFMTU = 0x8921
_IP_MTU_DISCOVER, _IPV6_MTU_DISCOVER, _PMTUDISC_PROBE = 10, 23, 3
_IPV6_DONTFRAG = 62
IP_RECVERR, IPV6_RECVERR = 11, 25

_TX_SOFTWARE, _RX_SOFTWARE, _SOFTWARE, _OPT_ID, _OPT_TSONLY = 1 << 1, 1 << 3, 1 << 4, 1 << 7, 1 << 11
_STAMPING = _RX_SOFTWARE | _SOFTWARE | _TX_SOFTWARE | _OPT_TSONLY

_STAMP = struct.Struct("@qq")
_EXTENDED_ERROR = struct.Struct("@IBBBBII")
_ORIGIN_TIMESTAMPING = 4
_U32 = struct.Struct("@I")
_S32 = struct.Struct("@i")

RECEIVE_BUFFER = 1 << 20

# As plain integers: the enum members of the socket module cost microseconds in every comparison.
SOL_SOCKET = int(socket.SOL_SOCKET)
IPPROTO_IP, IPPROTO_IPV6 = int(socket.IPPROTO_IP), int(socket.IPPROTO_IPV6)
ERROR_QUEUE = int(socket.MSG_ERRQUEUE | socket.MSG_DONTWAIT)
TRUNCATED = int(socket.MSG_TRUNC)

Ancillary = Sequence[tuple[int, int, bytes]]

NO_STAMP: tuple[int, int, bytes] = (socket.SOL_SOCKET, SO_TIMESTAMPING, _U32.pack(0))
"""Control message: do not stamp this packet."""


def limit(version: int, ttl: int) -> tuple[int, int, bytes]:
    """Control message: TTL or hop limit of this packet."""
    if version == 4:
        return socket.IPPROTO_IP, socket.IP_TTL, _S32.pack(ttl)
    return socket.IPPROTO_IPV6, socket.IPV6_HOPLIMIT, _S32.pack(ttl)


# Classic BPF, for IPv4 from the IP header, for IPv6 from the UDP header on.
_LDX_HEADER_LENGTH, _LDH_INDEXED, _LDH_ABSOLUTE, _JEQ, _RET = 0xB1, 0x48, 0x28, 0x15, 0x06
_Program = Sequence[tuple[int, int, int, int]]
_KEEP, _DROP = (_RET, 0, 0, 0x40000), (_RET, 0, 0, 0)
_ROCE4: _Program = ((_LDX_HEADER_LENGTH, 0, 0, 0), (_LDH_INDEXED, 0, 0, 2), (_JEQ, 0, 1, PORT), _KEEP, _DROP)
_ROCE6: _Program = ((_LDH_ABSOLUTE, 0, 0, 2), (_JEQ, 0, 1, PORT), _KEEP, _DROP)
_NOTHING: _Program = (_DROP,)
_SO_ATTACH_FILTER = 26


def _attach(s: socket.socket, program: _Program) -> None:
    code = b"".join(struct.pack("@HBBI", *instruction) for instruction in program)
    buffer = ctypes.create_string_buffer(code)
    s.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("@HP", len(program), ctypes.addressof(buffer)))


def _bind(s: socket.socket, device: str, address: str, port: int) -> None:
    s.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, device.encode() + b"\0")
    try:
        s.bind((address, port))
    except OSError as error:
        raise TransportError(error.errno, f"{device}: cannot bind {address}: {error.strerror}") from None


def open_raw(device: str, address: str, version: int) -> socket.socket:
    """A raw UDP socket of one address on one device, seeing only port 4791; stamps sends and receives. DF is set.

    Raises TransportError.
    """
    s = _raw(device, version, _ROCE4 if version == 4 else _ROCE6)
    with _set_up(s, device):
        if version == 6:
            s.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_RECVTCLASS, 1)
            s.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_RECVHOPLIMIT, 1)
        try:
            s.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, RECEIVE_BUFFER)
        except PermissionError:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER)
        s.setsockopt(socket.SOL_SOCKET, SO_RXQ_OVFL, 1)
        number_stamps(s)
        _bind(s, device, address, 0)
    return s


def open_sender(device: str, address: str, version: int) -> socket.socket:
    """A raw UDP socket that only sends, never fragmented. Raises TransportError."""
    s = _raw(device, version, _NOTHING)
    with _set_up(s, device):
        _bind(s, device, address, 0)
    return s


def _raw(device: str, version: int, program: _Program) -> socket.socket:
    """A raw UDP socket that sees what a filter lets through; DF is set."""
    family = socket.AF_INET if version == 4 else socket.AF_INET6
    try:
        s = socket.socket(family, socket.SOCK_RAW, socket.IPPROTO_UDP)
    except PermissionError:
        raise TransportError(
            f"{device}: raw sockets need root or CAP_NET_RAW; grant one of them to the agent"
        ) from None
    with _set_up(s, device):
        # The filter first: nothing else may slip into the queue before it.
        _attach(s, program)
        s.setblocking(False)
        if version == 4:
            # Never fragmented and never limited by a path MTU learnt from somebody's ICMP; the IP ID is 0 then.
            s.setsockopt(socket.IPPROTO_IP, _IP_MTU_DISCOVER, _PMTUDISC_PROBE)
        else:
            s.setsockopt(socket.IPPROTO_IPV6, _IPV6_MTU_DISCOVER, _PMTUDISC_PROBE)
            s.setsockopt(socket.IPPROTO_IPV6, _IPV6_DONTFRAG, 1)
    return s


@contextmanager
def _set_up(s: socket.socket, device: str) -> Iterator[None]:
    """Close the socket when something inside fails, and say which device it was."""
    try:
        yield
    except OSError as error:
        s.close()
        if isinstance(error, TransportError):
            raise
        raise TransportError(error.errno, f"{device}: cannot set up its raw socket: {error.strerror}") from None


def open_quiet(device: str, address: str, version: int) -> socket.socket:
    """A UDP socket that holds port 4791 and receives nothing, so that the kernel answers nobody "port unreachable".

    Several may hold it on one address: an agent and whoever pings by hand beside it. Raises TransportError.
    """
    s = socket.socket(socket.AF_INET if version == 4 else socket.AF_INET6, socket.SOCK_DGRAM)
    try:
        _attach(s, _NOTHING)
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _bind(s, device, address, PORT)
    except OSError:
        s.close()
        raise
    return s


def mtu_of(device: str) -> int:
    """The interface's MTU in bytes. Raises TransportError if there is no such interface."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        try:
            answer = fcntl.ioctl(s, _SIOCGIFMTU, struct.pack("16s16x", device.encode()[:15]))
        except OSError as error:
            raise TransportError(error.errno, f"{device}: {error.strerror}") from None
    return int(struct.unpack_from("i", answer, 16)[0])


def number_stamps(s: socket.socket) -> None:
    """Stamp packets and number those stamped from 0 on; again from 0 when called again."""
    s.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPING, _STAMPING)
    s.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPING, _STAMPING | _OPT_ID)


def read_time(data: bytes) -> int:
    """The software stamp in the data of an SO_TIMESTAMPING control message, in ns."""
    seconds, nanoseconds = _STAMP.unpack_from(data)
    return seconds * 1_000_000_000 + nanoseconds  # type: ignore[no-any-return]


def read_stamp(ancillary: Ancillary) -> tuple[int, int]:
    """(number, ns) of an error queue entry; number -1 if it is no send stamp."""
    number, ns = -1, 0
    for level, kind, data in ancillary:
        if kind == SO_TIMESTAMPING and level == SOL_SOCKET:
            ns = read_time(data)
        elif (kind == IP_RECVERR and level == IPPROTO_IP) or (kind == IPV6_RECVERR and level == IPPROTO_IPV6):
            _, origin, _, _, _, info, value = _EXTENDED_ERROR.unpack_from(data)
            if origin == _ORIGIN_TIMESTAMPING and info == 0:
                number = value
    return number, ns


def read_received(ancillary: Ancillary) -> tuple[int, int, int, int]:
    """(ns, drops so far or -1, traffic class, hop limit) of a received packet; -1 where not told."""
    ns, drops, traffic_class, hop_limit = 0, -1, -1, -1
    for level, kind, data in ancillary:
        if level == SOL_SOCKET:
            if kind == SO_TIMESTAMPING:
                ns = read_time(data)
            elif kind == SO_RXQ_OVFL:
                drops = _U32.unpack_from(data)[0]
        elif level == IPPROTO_IPV6:
            if kind == socket.IPV6_TCLASS:
                traffic_class = _S32.unpack_from(data)[0]
            elif kind == socket.IPV6_HOPLIMIT:
                hop_limit = _S32.unpack_from(data)[0]
    return ns, drops, traffic_class, hop_limit
