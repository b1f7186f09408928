"""The far end of `pingmesh ping` where no agent runs: an ordinary responder on a queue pair of its own."""

from __future__ import annotations

import asyncio
import secrets
import time
from typing import Final

from agent.ping import Aim
from agent.responder import Responder
from agent.transport.base import Transport
from pingmesh import probe

FORGET_S: Final = 5.0


class PingServer:
    """Answers the probes of one cluster's name until cancelled."""

    def __init__(self, transport: Transport, cluster: str, busy: bool = False) -> None:
        """`busy`: keep a core busy while waiting, so that waking up is no part of the responder's delay."""
        self.transport = transport
        self.answered = 0
        self._busy = busy
        self._cluster = probe.cluster_hash(cluster)
        self._responder = Responder(transport, secrets.randbits(31) | 1)

    @property
    def aim(self) -> Aim:
        """What the near end takes as its target."""
        t = self.transport
        return Aim(t.address, t.qpn, t.qkey, self._responder.epoch)

    async def run(self) -> None:
        """Answer until cancelled."""
        self.transport.start(asyncio.get_running_loop(), self)
        if self._busy:
            self.transport.spin()
        while True:
            await asyncio.sleep(FORGET_S)
            # Nobody takes our reports: what is counted is dropped.
            self._responder.take(time.monotonic_ns())

    def receive(self, payload: memoryview, source: str, qpn: int, sport: int, dscp: int, ttl: int, rx_ns: int) -> None:
        """One packet for our queue pair; see `Receiver`."""
        try:
            header = probe.decode(payload)
        except probe.BadProbeError:
            return
        if header.cluster != self._cluster or header.kind != probe.PROBE:
            return
        self._responder.on_probe(header, payload, source, qpn, dscp, rx_ns, time.monotonic_ns())
        self.answered += 1
