"""Runs the tracers of all RNICs: their ICMP sockets, their flows as the engine knows them, their turns."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Iterable, Sequence

from agent import icmp
from agent.engine import TracedFlow
from agent.trace_queue import FlowKey, TraceFlow
from agent.tracer import DeviceTracer, LimitedSender
from pingmesh.messages import LATE, LOST, NO_RTT, OVERDUE, Event, TracedPath

log = logging.getLogger(__name__)

REFRESH_S = 2.0
GAP_S = 0.01
READ_AT_ONCE = 64
_LOSSES = frozenset({OVERDUE, LOST, LATE, NO_RTT})


class Tracing:
    """All tracers of a host.

    `flows` yields the engine's flows of both roles; it is asked every two seconds, and before a retrace.
    """

    def __init__(
        self,
        flows: Callable[[], Iterable[TracedFlow]],
        on_path: Callable[[TracedPath, bool], None],
        now_ns: Callable[[], int],
    ) -> None:
        self._flows = flows
        self._on_path = on_path
        self._now_ns = now_ns
        self._tracers: dict[str, DeviceTracer] = {}
        self._sockets: dict[str, socket.socket] = {}
        self._wake = asyncio.Event()
        self._next_refresh = 0.0

    def add(self, sender: LimitedSender) -> None:
        """Trace from a transport, too. Raises icmp.NoRawSocketError, OSError."""
        self.remove(sender.device)
        tracer = DeviceTracer(sender, self._on_path, self._now_ns)
        s = icmp.open_socket(sender.interface, tracer.family)
        self._tracers[sender.device], self._sockets[sender.device] = tracer, s
        asyncio.get_running_loop().add_reader(s.fileno(), self._read, s, tracer)
        self._wake.set()

    def remove(self, device: str) -> None:
        """Stop tracing from a device; nothing happens if there was none."""
        self._tracers.pop(device, None)
        s = self._sockets.pop(device, None)
        if s is not None:
            asyncio.get_running_loop().remove_reader(s.fileno())
            s.close()

    def close(self) -> None:
        """Close every socket."""
        for device in list(self._sockets):
            self.remove(device)

    def set_budget(self, device: str, quiet: float, suspicion: float) -> None:
        """TTL-limited packets/s of one RNIC, both roles together."""
        tracer = self._tracers.get(device)
        if tracer is not None:
            tracer.bucket.quiet, tracer.bucket.suspicion = max(0.0, quiet), max(0.0, suspicion)
            # A budget comes with a list: there are new flows, too.
            self._next_refresh = 0.0
            self._wake.set()

    def refresh(self) -> None:
        """Take over the flows there are now."""
        by_device: dict[str, list[TraceFlow]] = {d: [] for d in self._tracers}
        found = list(self._flows())
        # A prober whose list changed leaves flows behind that we still remember but it probes no more.
        newest: dict[int, int] = {}
        for f in found:
            newest[f.rnic] = max(f.list_version, newest.get(f.rnic, 0))
        for f in found:
            flows = by_device.get(f.transport.device)
            if flows is not None and f.list_version == newest[f.rnic]:
                key = (f.role, f.rnic, f.list_version, f.index)
                flows.append(
                    TraceFlow(key, f.transport.device, f.address, f.sport, f.dscp, f.qpn, f.trace_mask, f.listed)
                )
        for device, flows in by_device.items():
            self._tracers[device].set_flows(flows)

    def ask(self, keys: Sequence[FlowKey]) -> int:
        """Trace these first; returns how many are known here."""
        self.refresh()
        self._wake.set()
        return sum(t.ask(keys) for t in self._tracers.values())

    def event(self, event: Event) -> None:
        """A probe of ours fared ill: its paths come next."""
        if event.kind in _LOSSES:
            for tracer in self._tracers.values():
                if tracer.lost((0, event.rnic, event.list_version, event.index)):
                    self._wake.set()

    async def run(self) -> None:
        """Trace until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            if loop.time() >= self._next_refresh:
                self.refresh()
                self._next_refresh = loop.time() + REFRESH_S
            self._wake.clear()
            delay = min((t.step() for t in self._tracers.values()), default=REFRESH_S)
            timer = loop.call_later(min(max(delay, GAP_S), REFRESH_S), self._wake.set)
            await self._wake.wait()
            if loop.time() < timer.when():
                timer.cancel()
                # A storm of losses must not turn this into a busy loop.
                await asyncio.sleep(GAP_S)

    def counters(self) -> dict[str, int]:
        """Totals over all RNICs."""
        ts = self._tracers.values()
        return {
            "sent": sum(t.sent for t in ts),
            "answered": sum(t.answered for t in ts),
            "unmatched": sum(t.unmatched for t in ts),
            "send_errors": sum(t.send_errors for t in ts),
        }

    def _read(self, s: socket.socket, tracer: DeviceTracer) -> None:
        for _ in range(READ_AT_ONCE):
            try:
                packet, sender = s.recvfrom(2048)
            except BlockingIOError:
                return
            except OSError as error:  # the device went away; its owner notices
                log.debug("ICMP socket: %s", error)
                return
            quoted = icmp.parse(tracer.family, packet, sender[0])
            if quoted is None:
                tracer.unmatched += 1
            else:
                tracer.answer(quoted)
