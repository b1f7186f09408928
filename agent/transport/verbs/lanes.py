"""A lane: one queue pair with its rings. Where ports follow from QPNs an RNIC has several, else one."""

from __future__ import annotations

import errno
from collections.abc import Sequence

from agent.transport.base import Stamped
from agent.transport.verbs.edge import GRH, Device, Handle, Pair, Shape

HEAD = 128
"""Bytes of a packet that have room of their own. What a probe has more is zeros, which all share."""
BLOCK = 7
"""Without device stamps nobody waits for a send's completion but the ring, which is told of the last of each block."""
ONLY_BLOCKS, EACH_BLOCKS = 18, 2
"""Blocks in the ring of an RNIC's only lane, and in those of each of several. Providers make queues of a power of two
less one: of 126 and of 14 sends little is left over.
"""
FIRST_RECEIVES, OTHER_RECEIVES = 63, 23
"""Probes come to the first lane, to the others come ACKs. With eight, all fits into a completion queue of 255."""
RECEIVE_BIT = 1 << 23
LANE_SHIFT, SLOT_MASK = 16, 0xFFFF
GENERATION_SHIFT = 24


class Layout:
    """Where the rings of all lanes lie in the registered memory, and the padding of large packets."""

    def __init__(self, lanes: int, mtu: int) -> None:
        self.mtu = mtu
        self.sends = BLOCK * (ONLY_BLOCKS if lanes == 1 else EACH_BLOCKS)
        self.receive_size = GRH + HEAD
        self.receives = [FIRST_RECEIVES, *[OTHER_RECEIVES] * (lanes - 1)]
        self.receive_at: list[int] = []
        self.send_at: list[int] = []
        at = 0
        for slots in self.receives:
            self.receive_at.append(at)
            at += self.receive_size * slots
            self.send_at.append(at)
            at += HEAD * self.sends
        self.padding = max(0, mtu - HEAD)
        self.zeros_at = at
        self.spill_at = at + self.padding
        self.size = (self.spill_at + self.padding + 4095) & ~4095
        self._lanes = lanes

    def entries(self, stamped: bool) -> int:
        """Completions that may be waiting at once, when every send is `stamped`, or only the last of each block."""
        return sum(self.receives) + self._lanes * (self.sends if stamped else self.sends // BLOCK)


class Lane:
    """One queue pair. All its receive slots are posted from the start.

    The ring of sends is used block by block: a block is taken when its first slot is, and free again when its last
    slot's completion came.
    """

    __slots__ = (
        "_mtu",
        "_send_at",
        "_slots",
        "_stamped",
        "busy",
        "memory",
        "missing",
        "next",
        "pair",
        "qpn",
        "receive_at",
        "receive_size",
        "sport",
        "waiting",
    )

    def __init__(
        self, device: Device, layout: Layout, number: int, generation: int, port: int, qkey: int, stamped: bool
    ) -> None:
        self.memory = device.memory
        self.receive_at = layout.receive_at[number]
        self.receive_size = layout.receive_size
        self.sport = 0
        self.waiting: list[Stamped | None] = [None] * layout.sends if stamped else []
        self.next = 0
        """The next slot of the ring of sends."""
        self.busy = [False] * (layout.sends // BLOCK)
        """By block: whether it is taken."""
        self._send_at = layout.send_at[number]
        self._slots = layout.sends
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
            HEAD,
            layout.zeros_at,
            layout.spill_at,
            layout.padding,
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
        """Whether the next packet would begin a block that is taken."""
        return not self.next % BLOCK and self.busy[self.next // BLOCK]

    def send(self, payload: bytes | bytearray, size: int, handle: Handle, qpn: int, qkey: int) -> int:
        """Post a packet of at most HEAD bytes and padding; the ring must not be full. Its slot. Raises OSError."""
        if size > self._mtu or len(payload) > HEAD:
            raise OSError(
                errno.EMSGSIZE,
                f"{len(payload)} of {size} bytes do not fit into {HEAD} and an MTU of {self._mtu}",
            )
        slot = self.next
        at = self._send_at + slot * HEAD
        place = slot % BLOCK
        # Payloads are equally long, all of them: what is behind them in the slot stays zero.
        self.memory[at : at + len(payload)] = payload
        self.pair.post_send(slot, at, size, self._stamped or place == BLOCK - 1, handle, qpn, qkey)
        if not place:
            self.busy[slot // BLOCK] = True
        self.next = slot + 1 if slot + 1 < self._slots else 0
        return slot

    def completed(self, slot: int) -> None:
        """A send completed, and with it all before it."""
        if slot % BLOCK == BLOCK - 1:
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
