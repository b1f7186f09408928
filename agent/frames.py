"""RoCEv2 UD frames: UDP 4791, BTH (opcode 100), DETH, payload, ICRC (InfiniBand specification, Annex A17).

The ICRC is CRC-32 over 8 bytes of ones and the packet from its IP header on, with the fields that routers change
(TOS or traffic class and flow label, TTL or hop limit, IPv4 and UDP checksum, BTH's resv8a) set to ones.
Functions here work on the part from the UDP header on; what stands before it enters as a CRC *prefix*, which is
computed once per pair of addresses and length.
"""

from __future__ import annotations

import struct
import zlib
from typing import NamedTuple

PORT = 4791
UD_SEND_ONLY = 100
DEFAULT_PKEY = 0xFFFF
QPN_MASK = 0xFFFFFF
HEAD = 28
"""Bytes of UDP header, BTH and DETH."""
TAIL = 4
"""Bytes of the ICRC."""
IPV4_HEADER, IPV6_HEADER = 20, 40
SPOILED = 0xFFFFFFFF

_ONES = b"\xff" * 8
_HEAD = struct.Struct("!HHHHBBHIIII")
_ICRC = struct.Struct("<I")
_IPV4 = struct.Struct("!BBHHHBBH4s4s")
_IPV6 = struct.Struct("!IHBB16s16s")
_CHECKSUM = struct.Struct("!H")
_RESERVED = 0xFF000000
_PROTOCOL_UDP = 17
DONT_FRAGMENT = 0x4000

crc32 = zlib.crc32
_pack_head, _unpack_head = _HEAD.pack_into, _HEAD.unpack_from
pack_icrc, unpack_icrc = _ICRC.pack_into, _ICRC.unpack_from
"""The ICRC at an offset: CRC-32 over the rest of the frame from the value that `head` or `open_head` gave."""


class BadFrameError(ValueError):
    """Not a RoCEv2 UD frame, or damaged. `reason` is a short constant, fit for a counter's label."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(f"not a RoCEv2 UD frame: {reason}")


def prefix4(source: bytes, destination: bytes, length: int, ident: int = 0, fragment: int = DONT_FRAGMENT) -> int:
    """CRC of everything before the UDP header, IPv4 without options. `length` is the IP header's total length."""
    header = _IPV4.pack(0x45, 0xFF, length, ident, fragment, 0xFF, _PROTOCOL_UDP, 0xFFFF, source, destination)
    return crc32(_ONES + header)


def prefix6(source: bytes, destination: bytes, length: int) -> int:
    """CRC of everything before the UDP header, IPv6 without extension headers. `length` is the payload length."""
    return crc32(_ONES + _IPV6.pack(0x6FFFFFFF, length, _PROTOCOL_UDP, 0xFF, source, destination))


def pseudo6(source: bytes, destination: bytes) -> int:
    """The addresses' and the protocol's part of a UDP checksum over IPv6, as an unfolded sum."""
    return int.from_bytes(source) + int.from_bytes(destination) + _PROTOCOL_UDP


def head(prefix: int, length: int, sport: int, qpn: int, qkey: int, source_qpn: int) -> tuple[bytes, int]:
    """The first HEAD bytes of a frame of `length` bytes in all (a multiple of 4), and the ICRC's value after them.

    The UDP checksum is zero, as RNICs send it. So are the PSN and the pad count: no receiver looks at a UD packet's
    PSN, and with a fixed one all headers of a flow are computed once.
    """
    buffer = bytearray(HEAD)
    _pack_head(
        buffer, 0, sport, PORT, length, 0xFFFF, UD_SEND_ONLY, 0, DEFAULT_PKEY, _RESERVED | qpn, 0, qkey, source_qpn
    )
    crc = crc32(buffer, prefix)
    buffer[6] = buffer[7] = buffer[12] = 0
    return bytes(buffer), crc


def put_icrc(frame: bytearray, view: memoryview, crc: int, spoil: int = 0) -> None:
    """Complete a frame whose payload is in place; `crc` as from `head`. `spoil` is XORed to the ICRC."""
    end = len(frame) - TAIL
    pack_icrc(frame, end, crc32(view[HEAD:end], crc) ^ spoil)


def add_checksum6(buffer: bytearray, pseudo: int) -> None:
    """Put the UDP checksum that IPv6 asks for into a built frame."""
    # Modulo 2**16-1, a number equals the one's complement sum of its 16 bit digits.
    checksum = 0xFFFF - (pseudo + len(buffer) + int.from_bytes(buffer)) % 0xFFFF
    _CHECKSUM.pack_into(buffer, 6, checksum)


class Opened(NamedTuple):
    """What the first HEAD bytes of a received frame say, and the ICRC's value after them."""

    crc: int
    length: int
    padding: int
    sport: int
    qpn: int
    qkey: int
    source_qpn: int


def open_head(buffer: bytearray, start: int, length: int, prefix: int) -> Opened:
    """Read the headers of the frame at `start` that has `length` bytes from the UDP header to the ICRC.

    Raises BadFrameError.
    """
    if length < HEAD + TAIL:
        raise BadFrameError("short")
    sport, port, udp_length, _, opcode, flags, _, qpn, _, qkey, source_qpn = _unpack_head(buffer, start)
    if udp_length != length or port != PORT:
        raise BadFrameError("length")
    if opcode != UD_SEND_ONLY or flags & 0x0F:
        raise BadFrameError("opcode")
    padding = flags >> 4 & 3
    if length < HEAD + padding + TAIL:
        raise BadFrameError("padding")
    masked = buffer[start : start + HEAD]
    masked[6] = masked[7] = masked[12] = 0xFF
    return Opened(crc32(masked, prefix), length, padding, sport, qpn & QPN_MASK, qkey, source_qpn & QPN_MASK)
