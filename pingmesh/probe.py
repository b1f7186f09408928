"""What a probe and its ACKs carry: one header of 64 bytes at the start of the UD payload, network byte order.

A UD receiver never sees the UDP header, and nobody's clocks agree; so everything that the other end needs to count a
packet by the *prober's* books travels with it (after Liu et al. 2024, §4.2, extended to count each packet).

=====  ======  ==========================================================================================
bytes  field   meaning
=====  ======  ==========================================================================================
0-1    magic   `PM`
2      version
3      kind    PROBE, ACK1, ACK2
4      cls     index of the class in the probe list
5      flags   STALE: the ACK of a probe that meant an earlier epoch of this queue pair
               POLLED: the responder's RNIC is looked at by a timer, whose wait is in the responder's delay
6      trace   bit t-1: the hop at TTL t shall be traced, for probe and ACK
7      dscp    probe: as meant; ACK: as the probe arrived with it
8-11   cluster CRC-32 of the cluster's name
12-15  source  the prober RNIC's number in the registry
16-19  epoch   of the prober's queue pair
20-23  target  epoch of the responder's queue pair that is meant
24-27  seq     of this flow
28-31  list    version of the probe list
32-33  flow    its index in that list
34-35  sport   UDP source port as meant
36-39  window  number of the prober's window, or `CONFIRM_BIT | id`
40-41  left    ACK: UDP source port that the ACK really left from
42-43  -       zero
44-47  qkey    probe: Q_Key of the prober's queue pair, for the ACKs
48-55  history ACK: bit i: sequence seq-1-i of this flow had arrived
56-63  delay   ACK2: ns from the probe's arrival to ACK1's departure (t4-t3)
=====  ======  ==========================================================================================
"""

from __future__ import annotations

import struct
import zlib
from typing import NamedTuple

SIZE = 64
MAGIC = 0x504D
VERSION = 1
PROBE, ACK1, ACK2 = 0, 1, 2
STALE, POLLED = 1, 2
HISTORY_BITS = 64
HISTORY_MASK = (1 << HISTORY_BITS) - 1

_HEADER = struct.Struct("!HBBBBBBIIIIIIHHIHHIQQ")
_unpack = _HEADER.unpack_from
_new = tuple.__new__
_U32 = struct.Struct("!I")
_TARGET_AT, _SEQ_AT, _WINDOW_AT = 20, 24, 36
_DELAY = struct.Struct("!Q")
_ACK_HEAD = struct.Struct("!BBBBB")
_ACK_TAIL = struct.Struct("!HHIQQ")
_ACK_HEAD_AT, _ACK_TAIL_AT, _DELAY_AT = 3, 40, 56


class BadProbeError(ValueError):
    """A payload that is no probe or ACK of ours. `reason` is a short constant, fit for a counter's label."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(f"not a probe: {reason}")


class Header(NamedTuple):
    """The header's fields, in the order of the module's table."""

    magic: int
    version: int
    kind: int
    cls: int
    flags: int
    trace_mask: int
    dscp: int
    cluster: int
    source: int
    epoch: int
    target_epoch: int
    seq: int
    list_version: int
    flow_index: int
    sport: int
    window: int
    left: int
    reserved: int
    qkey: int
    history: int
    delay: int


def cluster_hash(name: str) -> int:
    """What stands for a cluster's name in the header."""
    return zlib.crc32(name.encode())


def encode(header: Header) -> bytearray:
    """The header's 64 bytes. Raises struct.error where a field does not fit."""
    buffer = bytearray(SIZE)
    _HEADER.pack_into(buffer, 0, *header)
    return buffer


def decode(payload: bytes | bytearray | memoryview) -> Header:
    """The header at the start of a payload. Raises BadProbeError, never anything else, whatever the bytes."""
    if len(payload) < SIZE:
        raise BadProbeError("short")
    header: Header = _new(Header, _unpack(payload))
    if header[0] != MAGIC:
        raise BadProbeError("magic")
    if header[1] != VERSION:
        raise BadProbeError("version")
    if header[2] > ACK2:
        raise BadProbeError("kind")
    return header


def aim(buffer: bytearray, target_epoch: int) -> None:
    """Set the epoch that a flow's template means, in place."""
    _U32.pack_into(buffer, _TARGET_AT, target_epoch)


def stamp_probe(buffer: bytearray, seq: int, window: int) -> None:
    """Turn a flow's template into its next probe, in place."""
    _U32.pack_into(buffer, _SEQ_AT, seq)
    _U32.pack_into(buffer, _WINDOW_AT, window)


def answer(buffer: bytearray, probe: Header, *, flags: int, dscp: int, left: int, history: int) -> None:
    """Turn a copy of a probe's 64 bytes into its ACK1, in place. `dscp`: as the probe arrived with it."""
    _ACK_HEAD.pack_into(buffer, _ACK_HEAD_AT, ACK1, probe.cls, flags, probe.trace_mask, dscp)
    _ACK_TAIL.pack_into(buffer, _ACK_TAIL_AT, left, 0, 0, history, 0)


def answer_again(buffer: bytearray, delay: int) -> None:
    """Turn an ACK1 into its ACK2, in place. `delay` in ns goes modulo 2**64: a negative one is absurd over there."""
    buffer[_ACK_HEAD_AT] = ACK2
    _DELAY.pack_into(buffer, _DELAY_AT, delay & HISTORY_MASK)
