"""RoCEv2 UD frames: UDP 4791, BTH (opcode 100), DETH, payload, ICRC (InfiniBand specification, Annex A17).

The ICRC is CRC-32 over 8 bytes of ones and the packet from its IP header on, with the fields that routers change
(TOS or traffic class and flow label, TTL or hop limit, IPv4 and UDP checksum, BTH's resv8a) set to ones.
Functions here work on the part from the UDP header on; what stands before it enters as a CRC *prefix*, which is
computed once per pair of addresses and length.
"""

from __future__ import annotations

import struct
import zlib

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

_crc32 = zlib.crc32
_pack_head, _unpack_head = _HEAD.pack_into, _HEAD.unpack_from
_pack_icrc, _unpack_icrc = _ICRC.pack_into, _ICRC.unpack_from


class BadFrameError(ValueError):
    """Not a RoCEv2 UD frame, or damaged. `reason` is a short constant, fit for a counter's label."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(f"not a RoCEv2 UD frame: {reason}")


def prefix4(source: bytes, destination: bytes, length: int, ident: int = 0, fragment: int = DONT_FRAGMENT) -> int:
    """CRC of everything before the UDP header, IPv4 without options. `length` is the IP header's total length."""
    header = _IPV4.pack(0x45, 0xFF, length, ident, fragment, 0xFF, _PROTOCOL_UDP, 0xFFFF, source, destination)
    return _crc32(_ONES + header)


def prefix6(source: bytes, destination: bytes, length: int) -> int:
    """CRC of everything before the UDP header, IPv6 without extension headers. `length` is the payload length."""
    return _crc32(_ONES + _IPV6.pack(0x6FFFFFFF, length, _PROTOCOL_UDP, 0xFF, source, destination))


def pseudo6(source: bytes, destination: bytes) -> int:
    """The addresses' and the protocol's part of a UDP checksum over IPv6, as an unfolded sum."""
    return int.from_bytes(source) + int.from_bytes(destination) + _PROTOCOL_UDP


def build(
    buffer: bytearray,
    prefix: int,
    sport: int,
    qpn: int,
    qkey: int,
    psn: int,
    source_qpn: int,
    payload: bytes | bytearray,
    spoil: int = 0,
) -> None:
    """Fill a buffer of exactly HEAD + payload + padding + TAIL bytes (a multiple of 4) with a frame.

    Padding is what the buffer holds (part of the payload, by our classes' sizes; BTH's pad count stays 0). The UDP
    checksum is zero, as RNICs send it. `spoil` is XORed to the ICRC.
    """
    size = len(buffer)
    end = size - TAIL
    _pack_head(
        buffer, 0, sport, PORT, size, 0xFFFF, UD_SEND_ONLY, 0, DEFAULT_PKEY, _RESERVED | qpn, psn, qkey, source_qpn
    )
    buffer[HEAD : HEAD + len(payload)] = payload
    _pack_icrc(buffer, end, _crc32(memoryview(buffer)[:end], prefix) ^ spoil)
    buffer[6] = buffer[7] = buffer[12] = 0


def add_checksum6(buffer: bytearray, pseudo: int) -> None:
    """Put the UDP checksum that IPv6 asks for into a built frame."""
    # Modulo 2**16-1, a number equals the one's complement sum of its 16 bit digits.
    checksum = 0xFFFF - (pseudo + len(buffer) + int.from_bytes(buffer)) % 0xFFFF
    _CHECKSUM.pack_into(buffer, 6, checksum)


def open_frame(
    buffer: bytearray, view: memoryview, start: int, end: int, prefix: int
) -> tuple[int, int, int, int, int]:
    """Check the frame in buffer[start:end] (from the UDP header to the ICRC); `view` is a view of `buffer`.

    Returns (UDP source port, destination QPN, Q_Key, source QPN, end of the payload). Raises BadFrameError. Changes
    the masked fields in the buffer.
    """
    if end - start < HEAD + TAIL:
        raise BadFrameError("short")
    sport, port, length, _, opcode, flags, _, qpn, _, qkey, source_qpn = _unpack_head(buffer, start)
    if length != end - start or port != PORT:
        raise BadFrameError("length")
    if opcode != UD_SEND_ONLY or flags & 0x0F:
        raise BadFrameError("opcode")
    buffer[start + 6] = buffer[start + 7] = buffer[start + 12] = 0xFF
    tail = end - TAIL
    if _crc32(view[start:tail], prefix) != _unpack_icrc(buffer, tail)[0]:
        raise BadFrameError("icrc")
    tail -= (flags >> 4) & 3
    if tail < start + HEAD:
        raise BadFrameError("padding")
    return sport, qpn & QPN_MASK, qkey, source_qpn & QPN_MASK, tail
