"""A scripted machine with RDMA devices: GID tables, clocks, events and failures as a test wants them, and a wire."""

from __future__ import annotations

import errno
import ipaddress
import itertools
import os
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from agent.transport.verbs.edge import GRH, Capabilities, Gid, Happening, Port, Shape, Stamped
from agent.transport.verbs.neighbours import Hop

MLX5, RXE = 0x02C9, 0xFFFFFF
RUBBISH = b"\xa5"


@dataclass
class Script:
    """What a device is like. Tests change it while it runs."""

    vendor: int = MLX5
    table: Sequence[Gid] = ()
    active: bool = True
    ethernet: bool = True
    mtu: int = 4096
    gids: int = 16
    stamp_mask: int = 0
    clock_khz: int = 0
    stamped_queue: bool = True
    memlock: int = 1 << 20
    gone: bool = False
    handle_error: int = 0
    legs: tuple[int, ...] | None = None
    """Which member each queue pair leaves by, whatever was asked; None: cannot be chosen."""


def v2(index: int, gid: str, interface: int = 7) -> Gid:
    return Gid(index, gid, True, interface)


def v1(index: int, gid: str, interface: int = 7) -> Gid:
    return Gid(index, gid, False, interface)


class FakeHandle:
    def __init__(self, index: int, gid: str, label: int, traffic_class: int) -> None:
        self.index, self.gid, self.label, self.traffic_class = index, gid, label, traffic_class
        self.closed = 0

    def close(self) -> None:
        self.closed += 1


class FakeQueue:
    def __init__(self, stamps: bool) -> None:
        self.stamps = stamps
        self.entries: deque[Stamped] = deque()
        self.fd, self._write = (-1, -1) if stamps else os.pipe()
        self.armed = True
        self.arms = 0
        self.before_arming: Callable[[], None] = lambda: None

    def poll(self, limit: int) -> list[Stamped]:
        return [self.entries.popleft() for _ in range(min(limit, len(self.entries)))]

    def arm(self) -> None:
        self.before_arming()
        self.armed = True
        self.arms += 1

    def take_event(self) -> None:
        os.set_blocking(self.fd, False)
        while True:
            try:
                os.read(self.fd, 4096)
            except BlockingIOError:
                return

    def put(self, entry: Stamped) -> None:
        """As a device does: only the first since the queue was armed is told."""
        self.entries.append(entry)
        if self.armed and self.fd >= 0:
            self.armed = False
            os.write(self._write, b"x")

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            os.close(self._write)
            self.fd = -1


@dataclass
class Sent:
    payload: bytes
    handle: FakeHandle
    qpn: int
    qkey: int


class FakePair:
    def __init__(self, device: FakeDevice, shape: Shape, qpn: int) -> None:
        self.device, self.shape, self.qpn = device, shape, qpn
        self.posted: deque[int] = deque()
        self.receives_posted = 0
        self.sent: list[Sent] = []
        self.error = 0
        """Status of everything from now on."""
        self.closed = False

    def choose_leg(self, leg: int) -> int:
        if self.device.script.legs is None:
            raise OSError(errno.EOPNOTSUPP, "no bond")
        return self.device.script.legs[leg - 1]

    def post_receive(self, slot: int) -> None:
        if self.closed or self.device.script.gone:
            raise OSError(errno.EINVAL, "a receive cannot be posted")
        assert slot not in self.posted
        self.posted.append(slot)
        self.receives_posted += 1

    def post_send(self, slot: int, at: int, size: int, signaled: bool, handle: FakeHandle, qpn: int, qkey: int) -> None:
        if self.closed or self.device.script.gone:
            raise OSError(errno.EINVAL, "a send cannot be posted")
        assert not handle.closed
        shape, memory = self.shape, self.device.memory
        padding = size - min(size, shape.head)
        assert padding <= shape.padding
        packet = bytes(memory[at : at + size - padding]) + bytes(memory[shape.zeros_at : shape.zeros_at + padding])
        self.sent.append(Sent(packet, handle, qpn, qkey))
        if signaled or self.error:
            stamp = self.device.tick() if self.device.queue.stamps else 0
            self.device.queue.put(Stamped(self.shape.send_id + slot, self.error, 0, 0, stamp))

    def arrive(
        self,
        payload: bytes,
        source: str,
        src_qp: int,
        *,
        dscp: int = 26,
        ttl: int = 61,
        destination: str | None = None,
        status: int = 0,
    ) -> bool:
        """A packet of the wire; False if there was no receive for it."""
        if not self.posted:
            return False
        slot = self.posted.popleft()
        at = self.shape.receive_at + slot * self.shape.receive_size
        packed = ipaddress.ip_address(source).packed
        to = ipaddress.ip_address(destination or self.device.address).packed
        if len(packed) == 4:
            # Nothing writes the first 20 bytes over IPv4.
            header = RUBBISH * 20 + bytes((0x45, dscp << 2, 0, 0, 0, 0, 0, 0, ttl, 17, 0, 0)) + packed + to
        else:
            header = (6 << 28 | dscp << 22).to_bytes(4) + bytes((0, 0, 17, ttl)) + packed + to
        data = header + payload
        head, rest = data[: self.shape.receive_size], data[self.shape.receive_size :]
        assert len(rest) <= self.shape.padding
        self.device.memory[at : at + len(head)] = head
        self.device.memory[self.shape.spill_at : self.shape.spill_at + len(rest)] = rest
        stamp = self.device.tick() if self.device.queue.stamps else 0
        self.device.queue.put(Stamped(self.shape.receive_id + slot, status, GRH + len(payload), src_qp, stamp))
        return True

    def close(self) -> None:
        self.closed = True


class FakeDevice:
    def __init__(self, name: str, script: Script, qpns: itertools.count[int]) -> None:
        self.name, self.script, self._qpns = name, script, qpns
        self.event_fd, self._write = os.pipe()
        self.events: deque[Happening] = deque()
        self.memory = memoryview(b"")
        self.pairs: list[FakePair] = []
        self.handles: list[FakeHandle] = []
        self.queue: FakeQueue = None  # type: ignore[assignment]
        self.address = ""
        self.stamp = 1000
        self.step = 1000
        self.closed = 0

    def tick(self) -> int:
        self.stamp += self.step
        return self.stamp & self.script.stamp_mask

    def _check(self) -> None:
        if self.script.gone:
            raise OSError(errno.ENODEV, f"{self.name} is gone")

    def capabilities(self) -> Capabilities:
        return Capabilities(self.script.vendor, 1, self.script.stamp_mask, self.script.clock_khz)

    def port(self, number: int) -> Port:
        self._check()
        s = self.script
        return Port(number, s.active, s.ethernet, s.mtu, s.gids)

    def gids(self, port: int) -> list[Gid]:
        self._check()
        return list(self.script.table)

    def happen(self, happening: Happening) -> None:
        self.events.append(happening)
        os.write(self._write, b"x")

    def next_event(self) -> Happening | None:
        if not self.events:
            return None
        os.read(self.event_fd, 1)
        return self.events.popleft()

    def register(self, size: int) -> None:
        if size > self.script.memlock:
            raise OSError(errno.ENOMEM, "cannot allocate memory")
        self.memory = memoryview(bytearray(size))

    def make_queue(self, entries: int, stamps: bool) -> FakeQueue:
        if stamps and not self.script.stamped_queue:
            raise OSError(errno.EOPNOTSUPP, "no extended queue")
        self.queue = FakeQueue(stamps)
        return self.queue

    def make_pair(self, shape: Shape) -> FakePair:
        pair = FakePair(self, shape, next(self._qpns))
        self.pairs.append(pair)
        return pair

    def make_handle(self, port: int, gid_index: int, gid: str, label: int, traffic_class: int) -> FakeHandle:
        if self.script.handle_error:
            raise OSError(self.script.handle_error, "no handle")
        self.handles.append(FakeHandle(gid_index, gid, label, traffic_class))
        return self.handles[-1]

    def close(self) -> None:
        self.closed += 1
        if self.closed == 1:
            os.close(self.event_fd)
            os.close(self._write)
            if self.queue is not None:
                self.queue.close()


class FakeEdge:
    """A machine's devices by name."""

    def __init__(self, **scripts: Script) -> None:
        self.scripts = scripts
        self.opened: list[FakeDevice] = []
        self._qpns = itertools.count(17)

    def devices(self) -> list[str]:
        return [name for name, s in self.scripts.items() if not s.gone]

    def open(self, name: str) -> FakeDevice:
        if name not in self.devices():
            raise OSError(errno.ENODEV, f"{name} cannot be opened")
        device = FakeDevice(name, self.scripts[name], self._qpns)
        self.opened.append(device)
        return device


class FakeResolver:
    """Next hops: known unless a test says otherwise."""

    def __init__(self) -> None:
        self.hop = Hop("10.0.0.254", b"\2\0\0\0\0\1", False)
        self.error: OSError | None = None
        self.looks = 0
        self.nudges = 0

    def look(self, address: str) -> Hop:
        self.looks += 1
        if self.error is not None:
            raise self.error
        return self.hop

    def forget(self, dead: bool) -> None:
        self.hop = self.hop._replace(mac=b"", dead=dead)

    def nudge(self, hop: Hop) -> None:
        self.nudges += 1

    def close(self) -> None:
        pass
