"""The narrow edge between the prober and whatever puts RoCEv2 UD packets on a wire.

One transport is one RNIC: one UD queue pair with its QPN and Q_Key. Times are nanoseconds of the clock that stamps
this RNIC's packets (kernel software stamps, CQE stamps); only differences of the same transport's stamps mean anything.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Callable, Sequence
from typing import Literal, Protocol


class TransportError(OSError):
    """The RNIC cannot be used; the message names the device, the cause and the remedy."""


class Target(Protocol):
    """A remote queue pair, resolved once (an address handle): reuse it for every packet to that queue pair."""

    @property
    def address(self) -> str:
        """The remote IP address."""


class Stamped(Protocol):
    """Waits for the send stamp of one packet."""

    def stamped(self, ns: int) -> None:
        """The packet left at `ns`; 0: the stamp never came and never will."""


class Receiver(Protocol):
    """Takes what arrives for the own queue pair: right ICRC, own QPN, own Q_Key."""

    def receive(self, payload: memoryview, source: str, qpn: int, sport: int, dscp: int, ttl: int, rx_ns: int) -> None:
        """One packet; `payload` is valid during the call only, and what is beyond its first 128 bytes may be left out.

        `source` and `qpn` say who sent it. `sport` is 0 and `ttl` -1 where the transport cannot see them. Must not
        raise.
        """


class Transport(Protocol):
    """One RNIC. All calls come from the event loop's thread; none blocks."""

    device: str
    """Name under which the RNIC is published."""
    interface: str
    """The network interface below it, for its link state and for sockets beside it."""
    address: str
    gid: str
    qpn: int
    qkey: int
    mtu: int
    """RDMA path MTU: the largest UD payload in bytes."""
    kind: str
    """Name of the transport, `soft` or `verbs`."""
    source_port_honoured: Literal["yes", "no", "unknown"]
    clock: Literal["hardware", "software", "kernel"]
    """What stamps packets: the RNIC, this process, or the kernel."""
    polled: bool
    """Whether a timer looks for packets: the wait for its turn is in the delays of this host, though not in RTTs."""
    members: int
    """Ports of the bond that the RNIC is, 1 where it is none; `legs`: those that packets are known to leave by."""
    legs: Sequence[int]
    rx_dropped: int
    """Packets dropped for want of room in the receive queue, since the start."""
    bad_frames: int
    """Packets that are no RoCEv2 UD packets or whose ICRC is wrong, since the start."""
    foreign: int
    """Packets for another queue pair or with another Q_Key, since the start."""

    @property
    def receives_missing(self) -> int:
        """Receive buffers that the device should hold and does not: what would be lost to the ring for good."""

    def start(self, loop: asyncio.AbstractEventLoop, receiver: Receiver) -> None:
        """Begin to deliver packets."""

    def spin(self) -> None:
        """From now on look for packets all the time, keeping a core busy, instead of being woken; after `start`."""

    def watch(self, on_trouble: Callable[[str], None]) -> None:
        """Have `on_trouble` told, once and from the event loop, why this transport has to be opened anew.

        From then on every `send` raises OSError.
        """

    def target(self, address: str, qpn: int, qkey: int) -> Target:
        """Resolve a remote queue pair. Raises ValueError for an address of another family or numbers out of range,
        OSError.
        """

    def send(self, target: Target, sport: int, dscp: int, payload: bytes | bytearray, size: int, stamp: bool) -> int:
        """Send `payload` (at most 128 bytes) padded with zeros to `size` bytes (a multiple of 4).

        Returns the send stamp if `stamp` and already known, else 0: then `await_stamp` gets it later. Raises OSError
        when the packet did not leave.
        """

    def await_stamp(self, waiter: Stamped) -> None:
        """Tell `waiter` the send stamp of the packet sent last, as soon as it comes."""

    def send_limited(self, address: str, sport: int, dscp: int, ttl: int, payload: bytes, qpn: int = 0) -> None:
        """Send a packet of a probe's very 5-tuple and BTH with a small TTL and a spoiled ICRC: nobody answers it
        but the hop at which it dies. Raises OSError, ValueError.
        """

    def take_read_delay(self) -> int:
        """Longest time in ns between a packet's receive stamp and its reading since the last call."""

    def source_port(self, sport: int) -> int:
        """The UDP source port a packet really leaves from when `sport` is asked for."""

    def renew(self) -> None:
        """A new queue pair: new QPN and Q_Key; what still arrives for the old one is foreign."""

    def close(self) -> None:
        """Release everything; safe to call twice."""


def address_of(gid: str) -> str:
    """The IP address in a RoCEv2 GID: IPv4 where it is mapped, else IPv6. Raises ValueError.

    >>> address_of("::ffff:10.0.0.1"), address_of("fd00::1")
    ('10.0.0.1', 'fd00::1')
    """
    address = ipaddress.ip_address(gid)
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return str(address)


def gid_of(address: str) -> str:
    """The GID of an IP address, as text."""
    return f"::ffff:{address}" if ipaddress.ip_address(address).version == 4 else address
