"""A lane: one queue pair with its rings. Where ports follow from QPNs an RNIC has several, else one."""

from __future__ import annotations

import errno
from collections.abc import Sequence

from agent.transport.base import Stamped
from agent.transport.verbs.edge import GRH, Device, Handle, Pair, Shape

SMALL = 128
"""Payloads up to so many bytes use the ring of small slots."""
SMALL_SLOTS = 128
LARGE_SLOTS = 2
SENDS = SMALL_SLOTS + LARGE_SLOTS
SIGNAL_EVERY = 16
"""Without device stamps nobody waits for a send's completion but the ring, which is told of every 16th."""
FIRST_RECEIVES, OTHER_RECEIVES = 64, 32
RECEIVE_BIT = 1 << 23
LANE_SHIFT, SLOT_MASK = 16, 0xFFFF
GENERATION_SHIFT = 24


class Layout:
    """Where the rings of all lanes lie in the registered memory.

    Probes come to the first lane, any size of them; to the others come ACKs, which are small.
    """

    def __init__(self, lanes: int, mtu: int) -> None:
        self.mtu = mtu
        self.receive_sizes = [GRH + mtu, *[GRH + SMALL] * (lanes - 1)]
        self.receives = [FIRST_RECEIVES, *[OTHER_RECEIVES] * (lanes - 1)]
        self.receive_at: list[int] = []
        self.send_at: list[int] = []
        at = 0
        for size, slots in zip(self.receive_sizes, self.receives, strict=True):
            self.receive_at.append(at)
            at += size * slots
            self.send_at.append(at)
            at += SMALL_SLOTS * SMALL + LARGE_SLOTS * mtu
        self.size = (at + 4095) & ~4095
        self.entries = sum(self.receives) + lanes * SENDS
        """Completions that may be waiting at once."""


class Lane:
    """One queue pair. All its receive slots are posted from the start."""

    def __init__(
        self, device: Device, layout: Layout, number: int, generation: int, port: int, qkey: int, stamped: bool
    ) -> None:
        self.memory = device.memory
        self.receive_at = layout.receive_at[number]
        self.receive_size = layout.receive_sizes[number]
        self.sport = 0
        self.waiting: list[Stamped | None] = [None] * SENDS if stamped else []
        self._send_at = layout.send_at[number]
        self._large_at = self._send_at + SMALL_SLOTS * SMALL
        self._mtu = layout.mtu
        self._stamped = stamped
        self._posted = 0
        self._done = 0
        self._last = [0] * SENDS
        """Position in the send queue that each slot was posted at last, counting from 1."""
        self._small = self._large = 0
        own = generation << GENERATION_SHIFT | number << LANE_SHIFT
        shape = Shape(
            port,
            qkey,
            self.receive_at,
            self.receive_size,
            layout.receives[number],
            own | RECEIVE_BIT,
            SENDS,
            own,
        )
        self.pair: Pair = device.make_pair(shape)
        self.qpn = self.pair.qpn
        self.missing = shape.receives
        """Receive slots that the device does not have."""
        for slot in range(shape.receives):
            self.post_receive(slot)

    def post_receive(self, slot: int) -> None:
        """Give a slot's buffer to the device. Raises OSError."""
        self.pair.post_receive(slot)
        self.missing -= 1

    @property
    def full(self) -> bool:
        """Whether the next small packet would overwrite one that has not left."""
        return self._last[self._small] > self._done or self._posted - self._done >= SENDS - SIGNAL_EVERY

    @property
    def large_full(self) -> bool:
        """As `full`, for the next large packet."""
        return self._last[SMALL_SLOTS + self._large] > self._done or self._posted - self._done >= SENDS

    def send(self, payload: bytes | bytearray, size: int, handle: Handle, qpn: int, qkey: int) -> int:
        """Post a packet whose ring is not full; returns its slot. Raises OSError."""
        if size <= SMALL:
            slot = self._small
            at = self._send_at + slot * SMALL
            signaled = self._stamped or slot % SIGNAL_EVERY == SIGNAL_EVERY - 1
            self._small = (slot + 1) % SMALL_SLOTS
        else:
            if size > self._mtu:
                raise OSError(errno.EMSGSIZE, f"{size} bytes do not fit into the MTU of {self._mtu}")
            slot = SMALL_SLOTS + self._large
            at = self._large_at + self._large * self._mtu
            signaled = True
            self._large = (self._large + 1) % LARGE_SLOTS
        # Every payload of one size is equally long: the padding stays zero.
        self.memory[at : at + len(payload)] = payload
        self.pair.post_send(slot, at, size, signaled, handle, qpn, qkey)
        self._posted += 1
        self._last[slot] = self._posted
        return slot

    def completed(self, slot: int) -> None:
        """A send completed, and with it all before it."""
        if self._last[slot] > self._done:
            self._done = self._last[slot]

    def give_up(self) -> None:
        """No more stamps will come."""
        for slot, waiter in enumerate(self.waiting):
            if waiter is not None:
                self.waiting[slot] = None
                waiter.stamped(0)


def lane_of(lanes: Sequence[Lane], sport: int) -> Lane:
    """The lane whose packets have this source port, else one that always is the same for this port."""
    return next((lane for lane in lanes if lane.sport == sport), lanes[sport % len(lanes)])
