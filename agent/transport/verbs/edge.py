"""The narrow edge between the verbs transport and pyverbs, so that a scripted fake can stand in for hardware.

Everything that fails here raises OSError with the errno of the verb.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

GRH = 40
"""Bytes before the payload in every receive buffer of a UD queue pair."""


@dataclass(frozen=True, slots=True)
class Gid:
    """One entry of a port's GID table. `interface` is the index of its network interface, 0 where unknown."""

    index: int
    gid: str
    v2: bool
    interface: int = 0


@dataclass(frozen=True, slots=True)
class Port:
    """A port now. `mtu` is the active one in bytes."""

    number: int
    active: bool
    ethernet: bool
    mtu: int
    table: int
    """Size of the GID table."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a device says of itself. `stamp_mask` 0: no completion stamps; `clock_khz` 0: rate not told."""

    vendor: int
    ports: int
    stamp_mask: int = 0
    clock_khz: int = 0


class Happening(enum.Enum):
    """An asynchronous event of a device, as far as it makes a difference."""

    PORT = "port or GID changed"
    QUEUE = "a queue failed"
    FATAL = "the device failed or went away"
    OTHER = "nothing of ours"


@dataclass(frozen=True, slots=True)
class Shape:
    """A queue pair to make, and where in the registered memory its packets lie.

    Receive slot i is `receive_size` bytes at `receive_at + i * receive_size`; a completion tells `receive_id + i`
    or `send_id + slot`. What of a packet goes beyond its slot is padding: of one that comes it is written to
    `spill_at`, one place for all, and of one that is sent, beyond its first `head` bytes, it is read from `zeros_at`;
    `padding` bytes of room there are at either.
    """

    port: int
    qkey: int
    receive_at: int
    receive_size: int
    receives: int
    receive_id: int
    sends: int
    send_id: int
    head: int
    zeros_at: int
    spill_at: int
    padding: int


class Completion(Protocol):
    """One entry of a completion queue. `status` 0 is success; `byte_len` counts the GRH; `src_qp` of receives only."""

    @property
    def wr_id(self) -> int:
        """Which slot."""

    @property
    def status(self) -> int:
        """0: done."""

    @property
    def byte_len(self) -> int:
        """Bytes received, GRH included."""

    @property
    def src_qp(self) -> int:
        """Who sent it."""


@dataclass(slots=True)
class Stamped:
    """A completion with the device's stamp."""

    wr_id: int
    status: int
    byte_len: int
    src_qp: int
    stamp: int


class Handle(Protocol):
    """An address handle."""

    def close(self) -> None:
        """Destroy it."""


class Queue(Protocol):
    """A completion queue. `fd` is readable when something completed; -1: it has to be polled."""

    fd: int

    def poll(self, limit: int) -> Sequence[Completion]:
        """Take up to `limit` entries (`Stamped` ones where the queue has stamps)."""

    def take_event(self) -> None:
        """Take the notification that made `fd` readable, if there is one."""

    def arm(self) -> None:
        """Ask to be notified of what comes from now on. Poll afterwards: what came before is not told."""


class Pair(Protocol):
    """A UD queue pair that is ready to send."""

    qpn: int

    def post_receive(self, slot: int) -> None:
        """Give the slot's buffer to the device."""

    def post_send(self, slot: int, at: int, size: int, signaled: bool, handle: Handle, qpn: int, qkey: int) -> None:
        """Send the head at offset `at` of the memory, `size` bytes with padding. A slot always has the same `at` and
        `signaled`.
        """

    def choose_leg(self, leg: int) -> int:
        """Have packets leave by a bond's member, counting from 1; the one that they really leave by.

        Raises OSError where the device does not let choose.
        """

    def close(self) -> None:
        """Destroy it."""


class Device(Protocol):
    """An opened device. Closing it closes all that was made of it."""

    name: str
    event_fd: int
    memory: memoryview

    def capabilities(self) -> Capabilities:
        """What the device can do."""

    def port(self, number: int) -> Port:
        """One port now."""

    def gids(self, port: int) -> list[Gid]:
        """Populated entries of a port's table."""

    def next_event(self) -> Happening | None:
        """The next asynchronous event; None if there is none now."""

    def register(self, size: int) -> None:
        """Register `memory` of that many bytes."""

    def make_queue(self, entries: int, stamps: bool) -> Queue:
        """A completion queue, with a channel unless it has stamps."""

    def make_pair(self, shape: Shape) -> Pair:
        """A queue pair on the queue made last."""

    def make_handle(self, port: int, gid_index: int, gid: str, label: int, traffic_class: int) -> Handle:
        """An address handle, hop limit 64. Blocks for a second where the neighbour is unknown and dead."""

    def close(self) -> None:
        """Close everything; safe to call twice."""


class VerbsEdge(Protocol):
    """A machine's RDMA devices."""

    def devices(self) -> list[str]:
        """Names; empty without RDMA."""

    def open(self, name: str) -> Device:
        """Open one. Raises OSError."""
