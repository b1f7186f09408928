"""The edge to pyverbs. Work requests are made once per slot and posted again and again.

In pyverbs 44 work requests are freed by `close()` only, completion channels tell no descriptor, and a blocking wait
would hold the interpreter's lock: hence the explicit closing, the search in /proc, and the non-blocking descriptors.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import ipaddress
import mmap
import os
import select
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from agent.transport.verbs import library
from agent.transport.verbs.edge import Capabilities, Completion, Gid, Handle, Happening, Port, Shape, Stamped

_SIZES_KEPT = 8
"""Work requests of this many sizes are kept."""
_EVENTS_KEPT = 1024
"""So many notifications are acknowledged at once: it takes a lock each time."""
_SEND_SIGNALED = 2
_HOP_LIMIT = 64
_MANY_GIDS = 1024


def _code(error: Exception) -> int:
    """The errno in an error of pyverbs; EIO where it tells none."""
    code = int(getattr(error, "error_code", 0))
    return code if code > 0 else errno.EIO


@contextlib.contextmanager
def _as_os_error(what: str) -> Iterator[None]:
    error_type = library.load("pyverbs_error").PyverbsError
    try:
        yield
    except error_type as error:
        code = _code(error)
        raise OSError(code, f"{what}: {os.strerror(code)}") from None


def _close_all(requests: Sequence[Any]) -> None:
    for request in requests:
        if request is not None:
            request.close()


def _event_fds() -> set[int]:
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if str(entry.readlink()) == "anon_inode:[infinibandevent]":
                found.add(int(entry.name))
    return found


def _words(gid: str) -> str:
    """A GID in the form that pyverbs reads: eight words."""
    return ipaddress.IPv6Address(gid).exploded


class PyverbsEdge:
    """The machine's devices."""

    def devices(self) -> list[str]:
        """Names; empty without RDMA. Raises library.NoVerbsError without pyverbs."""
        device = library.load("device")
        try:
            with _as_os_error("RDMA devices cannot be listed"):
                return sorted(d.name.decode() for d in device.get_device_list())
        except OSError:
            return []

    def open(self, name: str) -> PyverbsDevice:
        """Open one. Raises OSError."""
        return PyverbsDevice(name)


class PyverbsDevice:
    """A context with its protection domain."""

    def __init__(self, name: str) -> None:
        self._device = library.load("device")
        self._enums = library.load_enums()
        self._addr = library.load("addr")
        self._cq = library.load("cq")
        self._closing: list[Any] = []
        self.name = name
        before = _event_fds()
        with _as_os_error(f"{name} cannot be opened"):
            self._context = self._device.Context(name=name)
            self._closing.append(self._context)
            self._pd = library.load("pd").PD(self._context)
            self._closing.append(self._pd)
        self.event_fd = (_event_fds() - before or {-1}).pop()
        self._ready = select.poll()
        if self.event_fd >= 0:
            os.set_blocking(self.event_fd, False)
            self._ready.register(self.event_fd, select.POLLIN)
        self._queue: Any = None
        self._lkey = 0
        self._address = 0
        self.memory = memoryview(b"")
        events = self._enums
        self._happenings = {
            events.IBV_EVENT_PORT_ACTIVE: Happening.PORT,
            events.IBV_EVENT_PORT_ERR: Happening.PORT,
            events.IBV_EVENT_GID_CHANGE: Happening.PORT,
            events.IBV_EVENT_LID_CHANGE: Happening.PORT,
            events.IBV_EVENT_CLIENT_REREGISTER: Happening.PORT,
            events.IBV_EVENT_QP_FATAL: Happening.QUEUE,
            events.IBV_EVENT_QP_REQ_ERR: Happening.QUEUE,
            events.IBV_EVENT_QP_ACCESS_ERR: Happening.QUEUE,
            events.IBV_EVENT_CQ_ERR: Happening.QUEUE,
            events.IBV_EVENT_DEVICE_FATAL: Happening.FATAL,
        }

    def capabilities(self) -> Capabilities:
        """What the device can do."""
        with _as_os_error(f"{self.name} cannot be queried"):
            plain = self._context.query_device()
            mask = clock = 0
            with contextlib.suppress(OSError), _as_os_error(""):
                extended = self._context.query_device_ex()
                mask, clock = extended.completion_timestamp_mask, extended.hca_core_clock
            return Capabilities(plain.vendor_id, plain.phys_port_cnt, mask, clock)

    def port(self, number: int) -> Port:
        """One port now."""
        with _as_os_error(f"{self.name} port {number} cannot be queried"):
            p = self._context.query_port(number)
        return Port(
            number,
            p.state == self._enums.IBV_PORT_ACTIVE,
            p.link_layer == self._enums.IBV_LINK_LAYER_ETHERNET,
            128 << p.active_mtu,
            p.gid_tbl_len,
        )

    def gids(self, port: int) -> list[Gid]:
        """Populated entries of a port's table."""
        with _as_os_error(f"{self.name}: the GID table cannot be read"):
            entries = self._context.query_gid_table(_MANY_GIDS)
        v2 = self._enums.IBV_GID_TYPE_ROCE_V2
        return [
            Gid(e.gid_index, _text(e.gid_str()), e.gid_type == v2, e.ndev_ifindex)
            for e in entries
            if e.port_num == port
        ]

    def next_event(self) -> Happening | None:
        """The next asynchronous event; None if there is none now."""
        # What pyverbs raises does not tell an empty queue from a device that was taken away: poll does.
        ready = self._ready.poll(0)
        if not ready:
            return None
        if not ready[0][1] & select.POLLIN:
            return Happening.FATAL
        try:
            with _as_os_error("no event"):
                event = self._context.get_async_event()
        except OSError:
            return Happening.FATAL
        happening = self._happenings.get(event.event_type, Happening.OTHER)
        event.ack()
        return happening

    def register(self, size: int) -> None:
        """Register `memory` of that many bytes."""
        area = mmap.mmap(-1, size)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(area))
        with _as_os_error(f"{self.name}: {size >> 10} KiB cannot be registered"):
            region = library.load("mr").MR(self._pd, size, self._enums.IBV_ACCESS_LOCAL_WRITE, address=self._address)
        self._closing.append(region)
        self._lkey = region.lkey
        self.memory = memoryview(area)

    def make_queue(self, entries: int, stamps: bool) -> PlainQueue | StampQueue:
        """A completion queue, with a channel unless it has stamps."""
        with _as_os_error(f"{self.name}: no completion queue of {entries} entries"):
            if stamps:
                flags = (
                    self._enums.IBV_WC_EX_WITH_BYTE_LEN
                    | self._enums.IBV_WC_EX_WITH_SRC_QP
                    | self._enums.IBV_WC_EX_WITH_COMPLETION_TIMESTAMP
                )
                attributes = self._cq.CqInitAttrEx(cqe=entries, wc_flags=flags)
                self._queue = self._cq.CQEX(self._context, attributes)
                self._closing.append(self._queue)
                return StampQueue(self._queue, self._cq.PollCqAttr(), self._enums.IBV_WC_RECV)
            before = _event_fds()
            channel = self._cq.CompChannel(self._context)
            self._closing.append(channel)
            fd = getattr(channel, "fd", -1)
            if fd < 0:
                fd = (_event_fds() - before).pop()
            os.set_blocking(fd, False)
            self._queue = self._cq.CQ(self._context, entries, None, channel, 0)
            self._closing.append(self._queue)
            self._queue.req_notify()
        return PlainQueue(self._queue, channel, fd)

    def make_pair(self, shape: Shape) -> PyverbsPair:
        """A queue pair on the queue made last."""
        qp = library.load("qp")
        with _as_os_error(f"{self.name}: no queue pair"):
            cap = qp.QPCap(max_send_wr=shape.sends, max_recv_wr=shape.receives, max_send_sge=2, max_recv_sge=2)
            init = qp.QPInitAttr(
                qp_type=self._enums.IBV_QPT_UD, scq=self._queue, rcq=self._queue, cap=cap, sq_sig_all=0
            )
            attributes = qp.QPAttr(port_num=shape.port)
            attributes.qkey, attributes.pkey_index, attributes.sq_psn = shape.qkey, 0, 0
            made = qp.QP(self._pd, init, attributes)
        pair = PyverbsPair(made, self._address, self._lkey, shape, self._enums.IBV_WR_SEND)
        self._closing.append(pair)
        return pair

    def make_handle(self, port: int, gid_index: int, gid: str, label: int, traffic_class: int) -> Handle:
        """An address handle, hop limit 64. Blocks for a second where the neighbour is unknown and dead."""
        addr = self._addr
        with _as_os_error(f"{gid} cannot be resolved"):
            route = addr.GlobalRoute(
                dgid=addr.GID(_words(gid)),
                flow_label=label,
                sgid_index=gid_index,
                hop_limit=_HOP_LIMIT,
                traffic_class=traffic_class,
            )
            return addr.AH(self._pd, attr=addr.AHAttr(is_global=1, port_num=port, gr=route))  # type: ignore[no-any-return]

    def close(self) -> None:
        """Close everything; safe to call twice."""
        while self._closing:
            with contextlib.suppress(OSError), _as_os_error("closing"):
                self._closing.pop().close()
        self.memory = memoryview(b"")


def _text(words: str) -> str:
    address = ipaddress.IPv6Address(words)
    return f"::ffff:{address.ipv4_mapped}" if address.ipv4_mapped is not None else str(address)


class PlainQueue:
    """A completion queue without stamps, whose channel wakes the event loop."""

    def __init__(self, queue: Any, channel: Any, fd: int) -> None:
        self._queue = queue
        self._channel = channel
        self.fd = fd
        self._error = library.load("pyverbs_error").PyverbsError
        self._events = 0

    def poll(self, limit: int) -> Sequence[Completion]:
        """Take up to `limit` entries."""
        return self._queue.poll(limit)[1] or ()

    def take_event(self) -> None:
        """Take the notification that made `fd` readable, if there is one."""
        try:
            self._channel.get_cq_event(self._queue)
        except self._error:
            pass
        else:
            # The queue counts them, and acknowledges the rest when it is closed.
            self._events += 1
            if self._events == _EVENTS_KEPT:
                self._queue.ack_events(self._events)
                self._events = 0

    def arm(self) -> None:
        """Ask for a notification of what comes from now on. Poll afterwards."""
        self._queue.req_notify()


class StampQueue:
    """A completion queue with the device's stamps; pyverbs gives it no channel, so it is polled."""

    fd = -1

    def __init__(self, queue: Any, attributes: Any, receive: int) -> None:
        self._queue = queue
        self._attributes = attributes
        self._receive = receive

    def poll(self, limit: int) -> Sequence[Completion]:
        """Take up to `limit` entries, one in each cycle: going on within a cycle corrupts some providers' queues."""
        queue = self._queue
        found: list[Stamped] = []
        while len(found) < limit and queue.start_poll(self._attributes) == 0:
            status = queue.status
            received = status == 0 and queue.read_opcode() == self._receive
            found.append(
                Stamped(
                    queue.wr_id,
                    status,
                    queue.read_byte_len() if received else 0,
                    queue.read_src_qp() if received else 0,
                    queue.read_timestamp() if status == 0 else 0,
                )
            )
            queue.end_poll()
        return found

    def take_event(self) -> None:
        """There is none."""

    def arm(self) -> None:
        """There is nothing to arm."""


class PyverbsPair:
    """A UD queue pair and its work requests."""

    def __init__(self, qp: Any, address: int, lkey: int, shape: Shape, opcode: int) -> None:
        self._qp = qp
        self._address = address
        self._lkey = lkey
        self._shape = shape
        self._opcode = opcode
        self._wr = library.load("wr")
        self._error = library.load("pyverbs_error").PyverbsError
        self.qpn: int = qp.qp_num
        self._receives = [self._receive_request(slot) for slot in range(shape.receives)]
        self._sends: dict[int, list[Any]] = {}
        """By size: the request of each slot, once it was needed."""
        self._closed = False

    def _receive_request(self, slot: int) -> Any:
        shape = self._shape
        elements = [self._element(shape.receive_at + slot * shape.receive_size, shape.receive_size)]
        if shape.padding:
            elements.append(self._element(shape.spill_at, shape.padding))
        request = self._wr.RecvWR(wr_id=shape.receive_id + slot, num_sge=len(elements), sg=elements)
        _close_all(elements)  # the request has copies
        return request

    def _element(self, at: int, size: int) -> Any:
        return self._wr.SGE(self._address + at, size, self._lkey)

    def _send_request(self, slot: int, at: int, size: int, signaled: bool) -> Any:
        kept = self._sends.get(size)
        if kept is None:
            if len(self._sends) >= _SIZES_KEPT:
                _close_all(self._sends.pop(next(iter(self._sends))))
            kept = self._sends[size] = [None] * self._shape.sends
        shape = self._shape
        elements = [self._element(at, min(size, shape.head))]
        if size > shape.head:
            elements.append(self._element(shape.zeros_at, size - shape.head))
        request = self._wr.SendWR(
            wr_id=shape.send_id + slot,
            opcode=self._opcode,
            num_sge=len(elements),
            sg=elements,
            send_flags=_SEND_SIGNALED if signaled else 0,
        )
        _close_all(elements)
        kept[slot] = request
        return request

    def post_receive(self, slot: int) -> None:
        """Give the slot's buffer to the device."""
        try:
            self._qp.post_recv(self._receives[slot])
        except self._error as error:
            raise OSError(_code(error), "a receive cannot be posted") from None

    def post_send(self, slot: int, at: int, size: int, signaled: bool, handle: Handle, qpn: int, qkey: int) -> None:
        """Send the head at offset `at` of the memory, `size` bytes with padding."""
        kept = self._sends.get(size)
        request = kept[slot] if kept is not None else None
        if request is None:
            request = self._send_request(slot, at, size, signaled)
        request.set_wr_ud(handle, qpn, qkey)
        try:
            self._qp.post_send(request)
        except self._error as error:
            raise OSError(_code(error), "a send cannot be posted") from None

    def choose_leg(self, leg: int) -> int:
        """Have packets leave by a bond's member, where the device is an mlx5 that has the members as its ports."""
        try:
            mlx5 = library.load("providers.mlx5.mlx5dv").Mlx5QP
            mlx5.modify_lag_port(self._qp, leg)
            return int(mlx5.query_lag_port(self._qp)[1])
        except (library.NoVerbsError, self._error) as error:
            code = errno.EOPNOTSUPP if isinstance(error, library.NoVerbsError) else _code(error)
            raise OSError(code, f"the member of the bond cannot be chosen: {os.strerror(code)}") from None

    def close(self) -> None:
        """Destroy the queue pair, then its work requests; safe to call twice."""
        if self._closed:
            return
        self._closed = True
        self._qp.close()
        for requests in (self._receives, *self._sends.values()):
            _close_all(requests)
        # Whoever still holds this holds no more memory than it must: a flapping port is opened anew each time.
        self._receives.clear()
        self._sends.clear()
