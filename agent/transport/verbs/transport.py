"""The verbs transport: one RNIC's UD queue pairs, driven by the event loop.

It never repairs itself: whatever makes its queue pairs or its GID unfit is told to its owner once, every send is
refused from then on, and the owner opens the device anew, under a new epoch (what was under way is no evidence).
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Literal

from agent.transport.base import Receiver, Stamped, Target, TransportError, address_of
from agent.transport.verbs import bonds, clocks, gids, labels
from agent.transport.verbs.edge import GRH, Completion, Device, Gid, Handle, Happening, VerbsEdge
from agent.transport.verbs.handles import HandleBook, Route
from agent.transport.verbs.lanes import (
    BLOCK,
    GENERATION_SHIFT,
    HEAD,
    LANE_SHIFT,
    RECEIVE_BIT,
    SLOT_MASK,
    Lane,
    Layout,
    lane_of,
)
from agent.transport.verbs.limited import LimitedSocket
from agent.transport.verbs.neighbours import NetlinkResolver, Resolver

log = logging.getLogger(__name__)

LANES = 8
"""Queue pairs per RNIC where the source port follows from the QPN: so many ports there are."""
BATCH = 32
ROUNDS = 4
"""Batches taken at one wake-up, so that a flood cannot keep the loop from its timers."""
POLL_BUSY_S, POLL_IDLE_S = 0.001, 0.01
"""How often a queue without channel is looked at: for a while after traffic, and else."""
BUSY_POLLS = 20
SPIN_NS = 500_000
MAX_QPN, MAX_QKEY = 0xFFFFFF, 0xFFFFFFFF
_PORTS = 1 << 16
_CACHED = 4096


class Rule:
    """How an RNIC's port and GID are chosen."""

    __slots__ = ("family", "index", "link_local")

    def __init__(self, index: int | None = None, family: gids.Family = "any", link_local: bool = False) -> None:
        self.index = index
        self.family = family
        self.link_local = link_local


class VerbsTarget:
    """A remote queue pair."""

    __slots__ = ("address", "qkey", "qpn", "route")

    def __init__(self, address: str, qpn: int, qkey: int, route: Route) -> None:
        self.address = address
        self.qpn = qpn
        self.qkey = qkey
        self.route = route


class VerbsTransport:
    """One RDMA device's first Ethernet port as an RNIC. Raises TransportError, gids.GidIndexError, OSError."""

    kind = "verbs"

    def __init__(
        self,
        name: str,
        system: str,
        edge: VerbsEdge,
        interface_name: Callable[[int], str],
        rule: Rule,
        *,
        resolver: Callable[[str, str], Resolver] = NetlinkResolver,
        limited: Callable[[str, str], LimitedSocket] = LimitedSocket,
        clock: Callable[[], int] = time.perf_counter_ns,
        members_of: Callable[[str], int] = bonds.members_of,
    ) -> None:
        """`name` is published, `system` is the device's; `interface_name` tells a network interface by its index."""
        self.device = name
        self.system = system
        self.rx_dropped = self.bad_frames = self.foreign = 0
        self.legs: Sequence[int] = ()
        """Of a bond: the members that probes leave by. `members` is how many there are."""
        self._members_of = members_of
        self._now = clock
        self._rule = rule
        self._lanes: list[Lane] = []
        self._refusal: str | None = None
        self._closed = False
        self._told = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._receive: Callable[[memoryview, str, int, int, int, int, int], None] | None = None
        self._on_trouble: Callable[[str], None] = lambda _: None
        self._timer: asyncio.Handle | None = None
        self._backlog: list[Completion] = []
        self._targets: dict[tuple[str, int, int], VerbsTarget] = {}
        self._sources: dict[bytes, str] = {}
        """By the two addresses in a packet's header: who sent it."""
        self._receivers: dict[int, Lane] = {}
        """By the upper bits of a receive's `wr_id`."""
        self._choice: dict[int, tuple[Lane, int]] = {}
        self._last: tuple[Lane, int] | None = None
        self._generation = 0
        self._quiet_polls = 0
        self._spinning = False
        self._device: Device = edge.open(system)
        try:
            self._set_up(interface_name)
            self._book = HandleBook(resolver(self.interface, self.address), self._make_handle)
        except BaseException:
            self._device.close()
            raise
        try:
            self._limited = limited(self.interface, self.address)
        except OSError:
            self._book.close()
            self._device.close()
            raise

    # ------------------------------------------------------------ life

    def _set_up(self, interface_name: Callable[[int], str]) -> None:
        device = self._device
        capabilities = device.capabilities()
        ports = [device.port(number) for number in range(1, capabilities.ports + 1)]
        ethernet = sorted((p for p in ports if p.ethernet), key=lambda p: not p.active)
        if not ethernet:
            raise TransportError(f"{self.system} has no Ethernet port: RoCE needs one")
        port = ethernet[0]
        self._port = port.number
        rule = self._rule
        table = device.gids(port.number)
        self._gid: Gid = gids.choose(
            self.system, port, table, index=rule.index, family=rule.family, link_local=rule.link_local
        )
        self.gid = self._gid.gid
        self.address = address_of(self.gid)
        self._own = ipaddress.ip_address(self.address).packed
        self._version = 4 if len(self._own) == 4 else 6
        self.interface = interface_name(self._gid.interface)
        self.mtu = port.mtu
        self.provider = labels.provider_of(self.system, capabilities.vendor)
        self.source_port_honoured: Literal["yes", "no", "unknown"] = self.provider.honoured
        self._sends_in_call = self.provider is labels.Provider.QPN
        """Soft-RoCE: post_send is the very way through the kernel, and the answer may be here before it returns. A
        send stamp is never later than the packet: an RTT may be too long by a part of the call, and never negative.
        """
        self._stamps, why = clocks.stamp_clock(capabilities)
        self.members = self._members_of(self.interface)
        lanes = LANES if self.provider is labels.Provider.QPN else self.members
        self._layout = Layout(lanes, port.mtu)
        try:
            device.register(self._layout.size)
        except OSError as error:
            if error.errno in (errno.ENOMEM, errno.EAGAIN, errno.EPERM):
                raise TransportError(
                    error.errno,
                    f"{self.system}: {self._layout.size >> 10} KiB cannot be locked in memory: raise the limit "
                    "(LimitMEMLOCK=infinity, `ulimit -l unlimited`, or the container runtime's ulimits)",
                ) from None
            raise
        self.clock: Literal["hardware", "software", "kernel"] = "software"
        if self._stamps is not None:
            try:
                self._queue = device.make_queue(self._layout.entries(True), True)
                self.clock = "hardware"
            except OSError as error:
                self._stamps, why = None, str(error)
        if self._stamps is None:
            self._queue = device.make_queue(self._layout.entries(False), False)
        self.polled = self._queue.fd < 0
        self.qpn = self.qkey = 0
        self.renew()
        if not port.active:
            self._refusal = f"{self.system} port {port.number} is down"
        log.info(
            "GID %s, index %d, was chosen of %d; stamps: %s",
            self.gid,
            self._gid.index,
            len(table),
            f"{self.clock} ({why})" if why else self.clock,
            extra={"device": self.device, "system": self.system},
        )

    def renew(self) -> None:
        """New queue pairs under a new Q_Key; what still arrives for the old ones is dropped by the device."""
        self._generation = (self._generation + 1) & 0xFF
        old, self._lanes = self._lanes, []
        self._receivers.clear()
        for lane in old:
            lane.give_up()
            lane.pair.close()
        self._choice.clear()
        self._last = None
        self.qkey = secrets.randbits(31)
        for number in range(len(self._layout.receives)):
            lane = Lane(
                self._device,
                self._layout,
                number,
                self._generation,
                self._port,
                self.qkey,
                self._stamps is not None,
            )
            if self.provider is labels.Provider.QPN:
                lane.sport = labels.port_of_qpn(lane.qpn)
            self._lanes.append(lane)
            self._receivers[
                (self._generation << GENERATION_SHIFT | number << LANE_SHIFT | RECEIVE_BIT) >> LANE_SHIFT
            ] = lane
        self.qpn = self._lanes[0].qpn
        if self.members > 1:
            self.legs = bonds.spread(self._lanes)
            if len(self.legs) < self.members:
                log.warning(
                    "%s is a bond of %d members, and probes are known to leave by %s only",
                    self.system,
                    self.members,
                    self.legs or "none of them",
                    extra={"device": self.device},
                )

    def watch(self, on_trouble: Callable[[str], None]) -> None:
        """Tell, once and from the event loop, why this transport has to be opened anew."""
        self._on_trouble = on_trouble

    def start(self, loop: asyncio.AbstractEventLoop, receiver: Receiver) -> None:
        """Begin to deliver packets."""
        self._loop = loop
        self._receive = receiver.receive
        if self._device.event_fd >= 0:
            loop.add_reader(self._device.event_fd, self._events)
        if self._queue.fd >= 0:
            loop.add_reader(self._queue.fd, self._readable)
            loop.call_soon(self._readable)
        else:
            self._timer = loop.call_later(POLL_IDLE_S, self._poll_later)
        self._reconsider()

    def spin(self) -> None:
        """Poll all the time instead of being woken."""
        assert self._loop is not None
        if self._queue.fd >= 0:
            # Nobody arms the queue any more: one notification at most is still to come, and nobody reads it.
            self._loop.remove_reader(self._queue.fd)
        if self._timer is not None:
            self._timer.cancel()
        self._spinning = True
        self.polled = False
        self._loop.call_soon(self._spin)

    def _spin(self) -> None:
        """For a moment, so that the event loop has its turns."""
        if self._closed or self._loop is None:
            return
        until = self._now() + SPIN_NS
        while not self._drain() and self._now() < until:
            pass
        self._loop.call_soon(self._spin)

    def close(self) -> None:
        """Release everything; safe to call twice."""
        if self._closed:
            return
        self._closed = True
        self._refusal = self._refusal or f"{self.system} is closed"
        if self._loop is not None:
            for fd in (self._device.event_fd, self._queue.fd):
                if fd >= 0:
                    self._loop.remove_reader(fd)
        if self._timer is not None:
            self._timer.cancel()
        for lane in self._lanes:
            lane.give_up()
        self._book.close()
        self._device.close()
        self._limited.close()

    # ------------------------------------------------------------ what goes wrong

    def _trouble(self, reason: str) -> None:
        if self._told:
            return
        self._told = True
        self._refusal = f"{self.system}: {reason}"
        if self._loop is not None and not self._closed:
            # Not from within whatever noticed: the owner closes what it works on.
            self._loop.call_soon(self._on_trouble, self._refusal)

    def _events(self) -> None:
        changed = False
        while (event := self._device.next_event()) is not None:
            if event is Happening.FATAL:
                self._trouble("the device failed or was taken away")
                if self._loop is not None:
                    self._loop.remove_reader(self._device.event_fd)
                return
            if event is Happening.QUEUE:
                self._trouble("a queue failed")
            changed = changed or event is Happening.PORT
        if changed:
            self._reconsider()

    def _reconsider(self) -> None:
        """The port or its GIDs may have changed."""
        try:
            port = self._device.port(self._port)
            table = self._device.gids(self._port)
        except OSError as error:
            self._trouble(str(error))
            return
        entry = gids.find(table, self._gid)
        if entry is None:
            self._trouble(f"its GID {self.gid} is gone")
        elif entry.index != self._gid.index:
            self._trouble(f"its GID {self.gid} moved from index {self._gid.index} to {entry.index}")
        elif port.active and self._refusal is not None:
            self._trouble("the port is active again")
        elif not port.active and self._refusal is None:
            self._refusal = f"{self.system} port {self._port} is down"
            log.warning("%s", self._refusal, extra={"device": self.device})

    # ------------------------------------------------------------ sending

    def target(self, address: str, qpn: int, qkey: int) -> VerbsTarget:
        """Resolve a remote queue pair. Raises ValueError for an address of another family, numbers out of range."""
        key = (address, qpn, qkey)
        found = self._targets.get(key)
        if found is None:
            version = ipaddress.ip_address(address).version
            if version != self._version:
                raise ValueError(f"{self.device} has an IPv{self._version} address and cannot reach {address}")
            if not 0 <= qpn <= MAX_QPN or not 0 <= qkey <= MAX_QKEY:
                raise ValueError(f"QPN {qpn} or Q_Key {qkey} is out of range")
            if len(self._targets) >= _CACHED:
                self._targets.clear()
            route = self._book.route(address)
            self._book.prepare(route, self._now())
            found = self._targets[key] = VerbsTarget(address, qpn, qkey, route)
        return found

    def _make_handle(self, address: str, label: int, traffic_class: int) -> Handle:
        gid = address if self._version == 6 else f"::ffff:{address}"
        return self._device.make_handle(self._port, self._gid.index, gid, label, traffic_class)

    def _choose(self, sport: int) -> tuple[Lane, int]:
        """The lane and the flow label for a wanted source port."""
        label = 0 if self.provider is labels.Provider.QPN else labels.label_of_port(sport)
        if len(self._choice) >= _PORTS:
            self._choice.clear()
        chosen = self._choice[sport] = lane_of(self._lanes, sport), label
        return chosen

    def source_port(self, sport: int) -> int:
        """The UDP source port a packet really leaves from when `sport` is asked for."""
        lane, label = self._choice.get(sport) or self._choose(sport)
        return lane.sport or labels.port_of_label(label)

    def send(self, target: Target, sport: int, dscp: int, payload: bytes | bytearray, size: int, stamp: bool) -> int:
        """Send `payload` padded with zeros to `size` bytes; see `Transport.send`."""
        if self._refusal is not None:
            raise OSError(errno.ENETDOWN, self._refusal)
        assert isinstance(target, VerbsTarget)
        lane, label = self._choice.get(sport) or self._choose(sport)
        route = target.route
        now = self._now()
        handle = route.handles.get(label << 6 | dscp)
        if handle is None or now >= route.check_ns:
            handle = self._book.handle(route, label, dscp, now)
        try:
            if lane.next % BLOCK == 0 and lane.full:
                self._make_room(lane)
            slot = lane.send(payload, size, handle, target.qpn, target.qkey)
        except OSError as error:
            if error.errno not in (errno.EMSGSIZE, errno.ENOMEM, errno.ENOBUFS):
                self._trouble(str(error))
            raise
        if self._stamps is None:
            if not stamp:
                return 0
            return now if self._sends_in_call else self._now()
        self._last = lane, slot
        self._quiet_polls = 0
        return 0

    def await_stamp(self, waiter: Stamped) -> None:
        """Tell `waiter` the send stamp of the packet sent last, at its completion."""
        if self._last is not None:
            lane, slot = self._last
            lane.waiting[slot] = waiter

    def send_limited(self, address: str, sport: int, dscp: int, ttl: int, payload: bytes, qpn: int = 0) -> None:
        """Send a packet of a probe's very 5-tuple and BTH with a small TTL and a spoiled ICRC."""
        self._limited.send(address, self.source_port(sport), dscp, ttl, payload, qpn, self.qpn)

    # ------------------------------------------------------------ completions

    def _readable(self) -> None:
        if self._closed or self._spinning:
            return
        self._queue.take_event()
        self._drain()

    def _poll_later(self) -> None:
        if self._closed or self._loop is None:
            return
        try:
            self._quiet_polls = 0 if self._drain() else self._quiet_polls + 1
        finally:
            pause = POLL_BUSY_S if self._quiet_polls < BUSY_POLLS else POLL_IDLE_S
            self._timer = self._loop.call_later(pause, self._poll_later)

    @property
    def receives_missing(self) -> int:
        """See `Transport.receives_missing`."""
        return sum(lane.missing for lane in self._lanes)

    def take_read_delay(self) -> int:
        """Without device stamps nobody knows how long a packet waited; with them the clocks differ: 0."""
        return 0

    def _make_room(self, lane: Lane) -> None:
        """See what has left meanwhile; packets that came are left for their turn. Raises OSError if nothing has."""
        for completion in self._queue.poll(BATCH * ROUNDS):
            if completion.wr_id & RECEIVE_BIT:
                self._backlog.append(completion)
            else:
                self._completed(completion, completion.wr_id)
        if lane.full:
            raise OSError(errno.ENOBUFS, f"{self.system}: the send queue is full")

    def _drain(self) -> int:
        """Take what completed; returns how many.

        The queue is armed after the first batch: an ACK2 that came while its ACK1 was handled needs no other wake-up.
        """
        if self._closed:
            return 0
        total = 0
        armed = self._spinning or self._queue.fd < 0
        for _ in range(ROUNDS):
            found: Sequence[Completion] = self._queue.poll(BATCH)
            if self._backlog:
                found = [*self._backlog, *found]
                self._backlog = []
            now = self._now()
            total += len(found)
            for completion in found:
                wr_id = completion.wr_id
                if wr_id & RECEIVE_BIT:
                    self._received(completion, wr_id, now)
                else:
                    self._completed(completion, wr_id)
            if not armed:
                armed = True
                self._queue.arm()
            elif len(found) < BATCH and not self._backlog:
                # It was empty then, and whatever came later is told.
                return total
        if self._loop is not None and self._queue.fd >= 0:
            self._loop.call_soon(self._drain)
        return total

    def _completed(self, completion: Completion, wr_id: int) -> None:
        """A send left, or failed."""
        if wr_id >> GENERATION_SHIFT != self._generation:
            return
        lane, slot = self._lanes[wr_id >> LANE_SHIFT & 0x7F], wr_id & SLOT_MASK
        if completion.status:
            self._trouble(f"a send failed with status {completion.status}")
        lane.completed(slot)
        if self._stamps is not None:
            waiter = lane.waiting[slot]
            if waiter is not None:
                lane.waiting[slot] = None
                waiter.stamped(self._stamps.ns(completion.stamp) if not completion.status else 0)  # type: ignore[attr-defined]

    def _received(self, completion: Completion, wr_id: int, now: int) -> None:
        """Deliver a packet and give its buffer back, whatever it holds."""
        lane = self._receivers.get(wr_id >> LANE_SHIFT)
        if lane is None:
            return  # of a queue pair that was renewed
        slot = wr_id & SLOT_MASK
        lane.missing += 1
        if completion.status:
            self._trouble(f"a receive failed with status {completion.status}")
            return
        if self._stamps is not None:
            now = self._stamps.ns(completion.stamp)  # type: ignore[attr-defined]
        try:
            at = lane.receive_at + slot * lane.receive_size
            length = completion.byte_len
            # Of an IPv4 packet only bytes 20..39 were written, by its header; those before hold what there was.
            if self._version == 4:
                head = bytes(lane.memory[at + 20 : at + GRH])
                traffic_class, ttl, ends = head[1], head[8], head[12:]
            else:
                head = bytes(lane.memory[at : at + GRH])
                traffic_class, ttl, ends = (head[0] << 4 | head[1] >> 4) & 0xFF, head[7], head[8:]
            source = self._sources.get(ends) or self._source(ends)
            if source is None or head[0] >> 4 != self._version or length <= GRH:
                self.bad_frames += 1
            elif self._receive is not None:
                payload = lane.memory[at + GRH : at + min(length, GRH + HEAD)]
                self._receive(payload, source, completion.src_qp, 0, traffic_class >> 2, ttl, now)
        except Exception:
            # The rest of the batch must not suffer: what is not given back is lost to the ring for good.
            log.exception("a packet could not be handled", extra={"device": self.device})
        try:
            lane.post_receive(slot)
        except OSError as error:
            self._trouble(str(error))

    def _source(self, ends: bytes) -> str | None:
        """Who sent a packet with these addresses, its own and ours, in its header; None if it was not for us."""
        middle = len(ends) // 2
        if ends[middle:] != self._own:
            return None
        if len(self._sources) >= _CACHED:
            self._sources.clear()
        source = self._sources[ends] = str(ipaddress.ip_address(ends[:middle]))
        return source
