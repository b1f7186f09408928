"""The soft transport: RoCEv2 UD frames on a raw socket, with the kernel's send and receive stamps as CQE stamps.

A machine without RNICs runs the whole system with it, and a soft agent and an RNIC can probe each other: frames are
the same to the bit. The kernel's stamps are of CLOCK_REALTIME; a step of it makes single RTTs absurd, nothing else.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from typing import Literal

from agent import frames
from agent.transport import sockets
from agent.transport.base import Receiver, Stamped, Target, gid_of

log = logging.getLogger(__name__)

DRAIN = 64
"""Packets read at one wake-up, so that a flood cannot keep the loop from its timers."""
STAMP_PATIENCE_S = 0.005
_CACHED = 4096
_MTUS = (4096, 2048, 1024, 512, 256)
_QKEY_MASK = 0x7FFFFFFF
"""Verbs keep Q_Keys with the highest bit for privileged queue pairs."""


class SoftTarget:
    """A remote queue pair, and the headers of frames to it by (source port, payload size)."""

    __slots__ = ("address", "heads", "pseudo", "qkey", "qpn", "raw", "sockaddr")

    def __init__(self, address: str, raw: bytes, qpn: int, qkey: int, pseudo: int) -> None:
        self.address = address
        self.raw = raw
        self.qpn = qpn
        self.qkey = qkey
        self.pseudo = pseudo
        self.sockaddr = (address, 0)
        self.heads: dict[tuple[int, int], tuple[bytes, int]] = {}


class SoftTransport:
    """One network interface as an RNIC. Raises TransportError if its sockets cannot be opened."""

    kind = "soft"
    source_port_honoured: Literal["yes", "no", "unknown"] = "yes"
    clock: Literal["hardware", "software", "kernel"] = "kernel"
    members = 1
    legs: Sequence[int] = ()

    def __init__(self, device: str, address: str, interface: str | None = None) -> None:
        """`device` is the name that is published, `interface` the network interface if that has another."""
        self.device = device
        self.interface = interface or device
        self.address = address
        self.gid = gid_of(address)
        parsed = ipaddress.ip_address(address)
        self._version = parsed.version
        self._raw_address = parsed.packed
        self._ip_header = frames.IPV4_HEADER if self._version == 4 else 0
        overhead = (frames.IPV4_HEADER if self._version == 4 else frames.IPV6_HEADER) + frames.HEAD + frames.TAIL
        room = sockets.mtu_of(self.interface) - overhead
        self.mtu = next((m for m in _MTUS if m <= room), _MTUS[-1])
        self.rx_dropped = 0
        self.receives_missing = 0
        self.polled = False
        self.bad_frames = 0
        self.foreign = 0
        self._read_delay_ns = 0
        self.qpn = self.qkey = 0
        self._opened: dict[tuple[str, bytes], frames.Opened] = {}
        self._targets: dict[tuple[str, int, int], SoftTarget] = {}
        self.renew()
        self._socket = sockets.open_raw(self.interface, address, self._version)
        try:
            self._quiet = sockets.open_quiet(self.interface, address, self._version)
        except OSError:
            self._socket.close()
            raise
        self._buffer = bytearray(room + overhead + 64)
        self._view = memoryview(self._buffer)
        self._frames: dict[int, tuple[bytearray, memoryview, int]] = {}
        self._dscp = -1
        self._next_stamp = 0
        self._waiting: dict[int, tuple[Stamped, int]] = {}
        self._sent_last = 0
        self._patience: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._receive: Callable[[memoryview, str, int, int, int, int, int], None] | None = None

    def start(self, loop: asyncio.AbstractEventLoop, receiver: Receiver) -> None:
        """Begin to deliver packets."""
        self._loop = loop
        self._receive = receiver.receive
        loop.add_reader(self._socket.fileno(), self._readable)

    def spin(self) -> None:
        """Have the event loop never wait."""
        if self._loop is not None and self._socket.fileno() >= 0:
            self._loop.call_soon(self.spin)

    def watch(self, on_trouble: Callable[[str], None]) -> None:
        """Sockets outlive whatever befalls their device; what does not, its owner sees by netlink."""

    def close(self) -> None:
        """Close the sockets; safe to call twice."""
        if self._socket.fileno() < 0:
            return
        if self._loop is not None:
            self._loop.remove_reader(self._socket.fileno())
        if self._patience is not None:
            self._patience.cancel()
        self._waiting.clear()
        self._socket.close()
        self._quiet.close()

    def renew(self) -> None:
        """A new queue pair: new QPN and Q_Key; what still arrives for the old one is foreign."""
        old = self.qpn
        while self.qpn == old:
            # 0 and 1 are the management queue pairs, the all-ones QPN means multicast.
            self.qpn = secrets.randbelow(frames.QPN_MASK - 16) + 16
        self.qkey = secrets.randbits(32) & _QKEY_MASK
        self._opened.clear()
        for target in self._targets.values():
            target.heads.clear()

    def take_read_delay(self) -> int:
        """Longest time in ns between a packet's receive stamp and its reading since the last call."""
        delay, self._read_delay_ns = self._read_delay_ns, 0
        return delay

    def source_port(self, sport: int) -> int:
        """Any port can be had."""
        return sport

    def target(self, address: str, qpn: int, qkey: int) -> SoftTarget:
        """Resolve a remote queue pair. Raises ValueError for an address of another family, numbers out of range."""
        key = (address, qpn, qkey)
        found = self._targets.get(key)
        if found is None:
            parsed = ipaddress.ip_address(address)
            if parsed.version != self._version:
                raise ValueError(f"{self.device} has an IPv{self._version} address and cannot reach {address}")
            if not 0 <= qpn <= frames.QPN_MASK or not 0 <= qkey < 1 << 32:
                raise ValueError(f"QPN {qpn} or Q_Key {qkey} is out of range")
            pseudo = frames.pseudo6(self._raw_address, parsed.packed) if self._version == 6 else 0
            found = SoftTarget(address, parsed.packed, qpn, qkey, pseudo)
            if len(self._targets) >= _CACHED:
                self._targets.clear()
            self._targets[key] = found
        return found

    # ------------------------------------------------------------ sending

    def _frame(self, target: SoftTarget, sport: int, payload: bytes | bytearray, size: int) -> bytearray:
        buffers = self._frames.get(size)
        if buffers is None:
            frame = bytearray(frames.HEAD + size + frames.TAIL)
            buffers = self._frames[size] = frame, memoryview(frame)[frames.HEAD : -frames.TAIL], frames.HEAD + size
        frame, body, end = buffers
        head, crc = target.heads.get((sport, size)) or self._head(target, sport, size)
        frame[: frames.HEAD] = head
        # Every payload of one size is equally long: the padding stays zero.
        body[: len(payload)] = payload
        frames.pack_icrc(frame, end, frames.crc32(body, crc))
        if target.pseudo:
            frames.add_checksum6(frame, target.pseudo)
        return frame

    def _head(self, target: SoftTarget, sport: int, size: int) -> tuple[bytes, int]:
        length = frames.HEAD + size + frames.TAIL
        if self._version == 4:
            prefix = frames.prefix4(self._raw_address, target.raw, frames.IPV4_HEADER + length)
        else:
            prefix = frames.prefix6(self._raw_address, target.raw, length)
        known = frames.head(prefix, length, sport, target.qpn, target.qkey, self.qpn)
        if len(target.heads) >= _CACHED:
            target.heads.clear()
        target.heads[sport, size] = known
        return known

    def _set_dscp(self, dscp: int) -> None:
        if self._version == 4:
            self._socket.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, dscp << 2)
        else:
            self._socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_TCLASS, dscp << 2)
        self._dscp = dscp

    def send(self, target: Target, sport: int, dscp: int, payload: bytes | bytearray, size: int, stamp: bool) -> int:
        """Send `payload` padded with zeros to `size` bytes; see `Transport.send`."""
        assert isinstance(target, SoftTarget)
        frame = self._frame(target, sport, payload, size)
        if dscp != self._dscp:
            self._set_dscp(dscp)
        if not stamp:
            self._socket.sendmsg((frame,), (sockets.NO_STAMP,), 0, target.sockaddr)
            return 0
        try:
            self._socket.sendto(frame, target.sockaddr)
        except OSError:
            self._renumber()
            raise
        number = self._next_stamp
        self._next_stamp = (number + 1) & 0xFFFFFFFF
        # Virtual and most real devices stamp within the system call: asking at once saves a wake-up.
        while True:
            try:
                _, ancillary, _, _ = self._socket.recvmsg(0, 256, sockets.ERROR_QUEUE)
            except OSError:
                self._sent_last = time.time_ns()
                return 0
            got, ns = sockets.read_stamp(ancillary)
            if got == number:
                return ns
            self._deliver_stamp(got, ns)

    def await_stamp(self, waiter: Stamped) -> None:
        """Tell `waiter` the last packet's send stamp; after 5 ms the time at which the system call returned."""
        self._waiting[(self._next_stamp - 1) & 0xFFFFFFFF] = (waiter, self._sent_last)
        if self._patience is None and self._loop is not None:
            self._patience = self._loop.call_later(STAMP_PATIENCE_S, self._give_up)

    def send_limited(self, address: str, sport: int, dscp: int, ttl: int, payload: bytes, qpn: int = 0) -> None:
        """Send a packet of a probe's very 5-tuple and BTH with a small TTL and a spoiled ICRC."""
        target = self.target(address, qpn, 0)
        payload += bytes(-len(payload) % 4)
        head, crc = self._head(target, sport, len(payload))
        frame = bytearray(head + payload + bytes(frames.TAIL))
        frames.put_icrc(frame, memoryview(frame), crc, frames.SPOILED)
        if self._version == 6:
            frames.add_checksum6(frame, target.pseudo)
        if dscp != self._dscp:
            self._set_dscp(dscp)
        control = (sockets.NO_STAMP, sockets.limit(self._version, ttl))
        self._socket.sendmsg((frame,), control, 0, target.sockaddr)

    # ------------------------------------------------------------ send stamps

    def _deliver_stamp(self, number: int, ns: int) -> None:
        waiting = self._waiting.pop(number, None)
        if waiting is not None:
            waiting[0].stamped(ns or waiting[1])

    def _drain_stamps(self) -> None:
        for _ in range(DRAIN):
            try:
                _, ancillary, _, _ = self._socket.recvmsg(0, 256, sockets.ERROR_QUEUE)
            except OSError:
                return
            self._deliver_stamp(*sockets.read_stamp(ancillary))

    def _give_up(self) -> None:
        """Some stamps are overdue: a device that has none, or a long queue. The system call's time must do."""
        self._patience = None
        self._drain_stamps()
        waiting = list(self._waiting.values())
        self._waiting.clear()
        for waiter, ns in waiting:
            waiter.stamped(ns)

    def _renumber(self) -> None:
        """A failed send may or may not have used up a number: begin anew."""
        self._drain_stamps()
        waiting = list(self._waiting.values())
        self._waiting.clear()
        sockets.number_stamps(self._socket)
        self._next_stamp = 0
        for waiter, ns in waiting:
            waiter.stamped(ns)

    # ------------------------------------------------------------ receiving

    def _readable(self) -> None:
        receive = self._socket.recvmsg_into
        buffers = (self._buffer,)
        for count in range(DRAIN):
            try:
                size, ancillary, flags, source = receive(buffers, 256)
            except BlockingIOError:
                if count == 0 or self._waiting:
                    self._drain_stamps()
                return
            except OSError as error:
                log.warning("%s: receive failed: %s", self.device, error)
                return
            traffic_class = hop_limit = -1
            if len(ancillary) == 1 and ancillary[0][1] == sockets.SO_TIMESTAMPING:
                ns = sockets.read_time(ancillary[0][2])
            else:
                ns, drops, traffic_class, hop_limit = sockets.read_received(ancillary)
                if drops >= 0:
                    self.rx_dropped = drops
            if count == 0:
                delay = time.time_ns() - ns
                if delay > self._read_delay_ns:
                    self._read_delay_ns = delay
            if flags & sockets.TRUNCATED:
                self.bad_frames += 1
                continue
            self.accept(size, source[0], ns, traffic_class, hop_limit)

    def accept(self, size: int, source: str, ns: int, traffic_class: int, hop_limit: int) -> None:
        """Check the packet in the first `size` bytes of the buffer and deliver it; never raises."""
        buffer, view, start = self._buffer, self._view, self._ip_header
        if start:
            traffic_class, hop_limit = buffer[1], buffer[8]
        else:
            buffer[6] = buffer[7] = 0xFF  # the checksum, the one field that differs from packet to packet
        # A soft sender's packets of one flow differ in nothing before the payload: their headers are checked once.
        body = start + frames.HEAD
        key = (source, bytes(view[:body]))
        opened = self._opened.get(key)
        if opened is None or opened.length != size - start:
            opened = self._open(key, size, source)
            if opened is None:
                return
        end = size - frames.TAIL
        if frames.crc32(view[body:end], opened.crc) != frames.unpack_icrc(buffer, end)[0]:
            self.bad_frames += 1
        elif opened.qpn != self.qpn or opened.qkey != self.qkey:
            self.foreign += 1
        elif self._receive is not None:
            payload = view[body : end - opened.padding]
            self._receive(payload, source, opened.source_qpn, opened.sport, traffic_class >> 2, hop_limit, ns)

    def _open(self, key: tuple[str, bytes], size: int, source: str) -> frames.Opened | None:
        """Read headers not seen before; remember them."""
        start = self._ip_header
        try:
            prefix = self._prefix4(size) if start else self._prefix6(size, source)
            opened = frames.open_head(self._buffer, start, size - start, prefix)
        except frames.BadFrameError:
            self.bad_frames += 1
            return None
        # RNICs count IP IDs and PSNs up: their frames come here each time, and remembering them would gain nothing.
        if self._buffer[4:6] == b"\0\0" or not start:
            if len(self._opened) >= _CACHED:
                self._opened.clear()
            self._opened[key] = opened
        return opened

    def _prefix4(self, size: int) -> int:
        buffer = self._buffer
        if size < frames.IPV4_HEADER or buffer[0] != 0x45:
            raise frames.BadFrameError("ip header")
        length, ident, fragment = int.from_bytes(buffer[2:4]), int.from_bytes(buffer[4:6]), int.from_bytes(buffer[6:8])
        if length != size:
            raise frames.BadFrameError("length")
        return frames.prefix4(bytes(buffer[12:16]), self._raw_address, length, ident, fragment)

    def _prefix6(self, size: int, source: str) -> int:
        return frames.prefix6(ipaddress.IPv6Address(source).packed, self._raw_address, size)
