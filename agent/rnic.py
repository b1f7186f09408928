"""One RNIC of this host: its transport, its prober and its responder."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import NamedTuple

from agent.clock import Clock
from agent.prober import Prober
from agent.responder import Responder
from agent.transport.base import Transport
from pingmesh import probe
from pingmesh.messages import ProberRows


class Totals(NamedTuple):
    """What health counts of one RNIC, since the start."""

    flaps: int
    rx_dropped: int
    bad_frames: int
    foreign: int
    send_errors: int


class Rnic:
    """One RNIC: its transport and both roles. It receives for the transport and hands on by kind of packet."""

    def __init__(self, transport: Transport, cluster: int, clock: Clock, make_prober: Callable[[Rnic], Prober]) -> None:
        self.transport = transport
        self.up = True
        self.flaps = 0
        self.rejected = 0
        """Frames for our queue pair that hold no probe or ACK of this cluster."""
        self.epoch = 0
        self.seen = Totals(0, 0, 0, 0, 0)
        self.retired_errors = 0
        self.retired: list[ProberRows] = []
        self.retired_responder: list[tuple[int, ...]] = []
        self._cluster = cluster
        self._clock = clock
        self._make_prober = make_prober
        self.new_epoch()

    def new_epoch(self) -> None:
        """Fresh roles under a fresh random epoch."""
        old = self.epoch
        while self.epoch in (old, 0):
            self.epoch = secrets.randbits(32)
        self.responder = Responder(self.transport, self.epoch)
        self.prober = self._make_prober(self)

    def receive(self, payload: memoryview, source: str, qpn: int, sport: int, dscp: int, ttl: int, rx_ns: int) -> None:
        """One packet for our queue pair; see `Receiver`."""
        try:
            header = probe.decode(payload)
        except probe.BadProbeError:
            self.rejected += 1
            return
        if header.cluster != self._cluster:
            self.rejected += 1
            return
        now = self._clock.monotonic_ns()
        if header.kind == probe.PROBE:
            self.responder.on_probe(header, payload, source, qpn, dscp, rx_ns, now)
        else:
            self.prober.ledger.on_ack(header, rx_ns, now)

    def retire_prober(self) -> None:
        """Keep the prober's counts for the next report; the caller puts another in its place."""
        self.retired_errors += self.prober.send_errors
        self.retired += self.prober.retire()

    def retire(self, now: int) -> None:
        """As `retire_prober`, and the responder's counts too."""
        self.retire_prober()
        self.retired_errors += self.responder.send_errors
        self.retired_responder += self.responder.take(now)

    def totals(self) -> Totals:
        """Counters since the start."""
        transport = self.transport
        return Totals(
            self.flaps,
            transport.rx_dropped,
            transport.bad_frames + self.rejected,
            transport.foreign,
            self.retired_errors + self.prober.send_errors + self.responder.send_errors,
        )
