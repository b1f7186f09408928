"""A lane: one queue pair with its rings. Where ports follow from QPNs an RNIC has several, else one."""

from __future__ import annotations

import errno
from collections.abc import Sequence

from agent.transport.base import Stamped
from agent.transport.verbs.edge import GRH, Device, Handle, Pair, Shape

SMALL = 128
"""Payloads up to so many bytes use the ring of small slots."""
BLOCK = 14
"""Without device stamps nobody waits for a send's completion but the ring, which is told of the last of each block."""
ONLY_BLOCKS, EACH_BLOCKS = 8, 2
"""Blocks in the ring of an RNIC's only lane, and in those of each of several."""
LARGE_SLOTS = 2
"""Providers make queues of a power of two less one: with these, two blocks are 30."""
FIRST_RECEIVES, OTHER_RECEIVES = 63, 31
RECEIVE_BIT = 1 << 23
LANE_SHIFT, SLOT_MASK = 16, 0xFFFF
GENERATION_SHIFT = 24


class Layout:
    """Where the rings of all lanes lie in the registered memory.

    Probes come to the first lane, any size of them; to the others come ACKs, which are small.
    """

    def __init__(self, lanes: int, mtu: int) -> None:
        self.mtu = mtu
        self.small_slots = BLOCK * (ONLY_BLOCKS if lanes == 1 else EACH_BLOCKS)
        self.sends = self.small_slots + LARGE_SLOTS
        self.receive_sizes = [GRH + mtu, *[GRH + SMALL] * (lanes - 1)]
        self.receives = [FIRST_RECEIVES, *[OTHER_RECEIVES] * (lanes - 1)]
        self.receive_at: list[int] = []
        self.send_at: list[int] = []
        at = 0
        for size, slots in zip(self.receive_sizes, self.receives, strict=True):
            self.receive_at.append(at)
            at += size * slots
            self.send_at.append(at)
            at += self.small_slots * SMALL + LARGE_SLOTS * mtu
        self.size = (at + 4095) & ~4095
        self._lanes = lanes

    def entries(self, stamped: bool) -> int:
        """Completions that may be waiting at once, when every send is `stamped`, or only the last of each block."""
        told = self.sends if stamped else self.small_slots // BLOCK + LARGE_SLOTS
        return sum(self.receives) + self._lanes * told


class Lane:
    """One queue pair. All its receive slots are posted from the start.

    The ring of small packets is used block by block: a block is taken when its first slot is, and free again when its
    last slot's completion came. The slots of large packets are blocks of their own.
    """

    __slots__ = (
        "_large_at",
        "_mtu",
        "_slots",
        "_stamped",
        "busy",
        "large",
        "memory",
        "missing",
        "pair",
        "qpn",
        "receive_at",
        "receive_size",
        "small",
        "small_at",
        "sport",
        "waiting",
    )

    def __init__(
        self, device: Device, layout: Layout, number: int, generation: int, port: int, qkey: int, stamped: bool
    ) -> None:
        self.memory = device.memory
        self.receive_at = layout.receive_at[number]
        self.receive_size = layout.receive_sizes[number]
        self.sport = 0
        self.waiting: list[Stamped | None] = [None] * layout.sends if stamped else []
        self.small_at = layout.send_at[number]
        self.small = self.large = 0
        """The next slot of either ring."""
        self.busy = [False] * (layout.small_slots // BLOCK + LARGE_SLOTS)
        """By block: whether it is taken."""
        self._slots = layout.small_slots
        self._large_at = self.small_at + layout.small_slots * SMALL
        self._mtu = layout.mtu
        self._stamped = stamped
        own = generation << GENERATION_SHIFT | number << LANE_SHIFT
        shape = Shape(
            port,
            qkey,
            self.receive_at,
            self.receive_size,
            layout.receives[number],
            own | RECEIVE_BIT,
            layout.sends,
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
        """Whether the next small packet would begin a block that is taken."""
        return not self.small % BLOCK and self.busy[self.small // BLOCK]

    @property
    def large_full(self) -> bool:
        """As `full`, for the next large packet."""
        return self.busy[self._slots // BLOCK + self.large]

    def send(self, payload: bytes | bytearray, size: int, handle: Handle, qpn: int, qkey: int) -> int:
        """Post a small packet whose ring is not full; returns its slot. Raises OSError."""
        slot = self.small
        at = self.small_at + slot * SMALL
        place = slot % BLOCK
        # Every payload of one size is equally long: the padding stays zero.
        self.memory[at : at + len(payload)] = payload
        self.pair.post_send(slot, at, size, self._stamped or place == BLOCK - 1, handle, qpn, qkey)
        if not place:
            self.busy[slot // BLOCK] = True
        self.small = slot + 1 if slot + 1 < self._slots else 0
        return slot

    def send_large(self, payload: bytes | bytearray, size: int, handle: Handle, qpn: int, qkey: int) -> int:
        """As `send`, for a packet of more than SMALL bytes."""
        if size > self._mtu:
            raise OSError(errno.EMSGSIZE, f"{size} bytes do not fit into the MTU of {self._mtu}")
        slot = self._slots + self.large
        at = self._large_at + self.large * self._mtu
        self.memory[at : at + len(payload)] = payload
        self.pair.post_send(slot, at, size, True, handle, qpn, qkey)
        self.busy[self._slots // BLOCK + self.large] = True
        self.large = (self.large + 1) % LARGE_SLOTS
        return slot

    def completed(self, slot: int) -> None:
        """A send completed, and with it all before it."""
        if slot >= self._slots:
            self.busy[self._slots // BLOCK + slot - self._slots] = False
        elif slot % BLOCK == BLOCK - 1:
            self.busy[slot // BLOCK] = False

    def give_up(self) -> None:
        """No more stamps will come, and nothing is sent or received any more."""
        self.memory = memoryview(b"")
        for slot, waiter in enumerate(self.waiting):
            if waiter is not None:
                self.waiting[slot] = None
                waiter.stamped(0)


def lane_of(lanes: Sequence[Lane], sport: int) -> Lane:
    """The lane whose packets have this source port, else one that always is the same for this port."""
    return next((lane for lane in lanes if lane.sport == sport), lanes[sport % len(lanes)])
