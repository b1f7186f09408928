"""The agent's data plane: a prober and a responder per RNIC, one timer, and the counts of both roles.

Single-threaded: every call must come from the event loop's thread. Only the transports do input and output.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from agent.clock import AnchoredClock, Clock
from agent.counts import pack_responder
from agent.prober import BATCH_NS, Prober
from agent.rnic import Rnic
from agent.transport.base import Transport
from pingmesh import probe
from pingmesh.config import AgentSettings
from pingmesh.messages import Confirm, Event, Peer, ProbeList, ProberRows, RnicHealth, RnicInfo

log = logging.getLogger(__name__)

PROBER, RESPONDER = 0, 1
_IDLE_NS = 1_000_000_000
_LATE_NS = 10_000_000
"""From here on a late timer is worth a word."""


@dataclass(frozen=True, slots=True)
class TracedFlow:
    """A tuple whose path may be traced. `role` PROBER: our probes; RESPONDER: our ACKs of somebody's probes.

    `rnic`, `list_version` and `index` name the flow by its *prober* in both roles. The packets to imitate leave from
    `transport` to `address`, UDP source port `sport`, with `qpn` in their BTH; the list asked for the port `listed` (0:
    the same). `seen_ns` (monotonic): when a packet of the tuple was last sent.
    """

    role: int
    rnic: int
    list_version: int
    index: int
    transport: Transport
    address: str
    qpn: int
    sport: int
    dscp: int
    trace_mask: int
    seen_ns: int
    listed: int = 0


class Engine:
    """All RNICs of this host.

    `on_event` is called at once, from the event loop, for everything unusual; it must not raise or block.
    `rate_factor` (0 < f <= 1) stretches all probe intervals by 1/f: fail-slow sets it.
    """

    def __init__(
        self,
        settings: AgentSettings,
        cluster: str,
        host: str,
        transports: Sequence[Transport],
        *,
        on_event: Callable[[Event], None],
        loop: asyncio.AbstractEventLoop,
        clock: Clock | None = None,
    ) -> None:
        self._settings = settings
        self._host = host
        self._on_event = on_event
        self._loop = loop
        self._clock: Clock = clock or AnchoredClock()
        self._cluster = probe.cluster_hash(cluster)
        self._factor = 1.0
        self._rnics = {t.device: Rnic(t, self._cluster, self._clock, self._make_prober) for t in transports}
        self._timer: asyncio.TimerHandle | None = None
        self._timer_ns = 0
        self.on_late: Callable[[float], None] = lambda _: None
        """Told when the probe timer fires 10 ms late or more: by how many seconds."""
        self._started = False
        self._closed = False

    def _make_prober(self, rnic: Rnic) -> Prober:
        settings = self._settings
        prober = Prober(
            rnic.transport,
            self._cluster,
            rnic.epoch,
            self._clock,
            self._on_event,
            overdue_ns=settings.overdue_ms * 1_000_000,
            timeout_ns=settings.timeout_ms * 1_000_000,
            max_rate=settings.max_rate,
        )
        prober.set_factor(self._factor)
        return prober

    # ------------------------------------------------------------ life

    def start(self) -> None:
        """Answer probes from now on, and probe once lists come."""
        for rnic in self._rnics.values():
            rnic.transport.start(self._loop, rnic)
        self._arm()

    def add(self, transport: Transport) -> None:
        """One more RNIC after `start`: its device came late, or came back and is opened anew.

        It answers at once and probes once its list comes. What was counted on the device before is still reported.
        """
        rnic = Rnic(transport, self._cluster, self._clock, self._make_prober)
        old = self._rnics.get(transport.device)
        if old is not None:
            old.retire_prober()
            rnic.retired = old.retired
            rnic.retired_responder = old.retired_responder + old.responder.take(self._clock.monotonic_ns())
            old.transport.close()
        self._rnics[transport.device] = rnic
        transport.start(self._loop, rnic)

    def close(self) -> None:
        """Stop probing and close the transports; safe to call twice."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for rnic in self._rnics.values():
            rnic.transport.close()

    def _arm(self) -> None:
        """Have the timer fire when the first prober wants it, and not earlier than it is armed for already."""
        if self._closed:
            return
        at = min((r.prober.next_ns for r in self._rnics.values()), default=0)
        if self._timer is not None:
            if self._timer_ns <= at:
                return
            self._timer.cancel()
        self._timer_ns = min(at, self._clock.monotonic_ns() + _IDLE_NS)
        self._timer = self._loop.call_at(self._timer_ns * 1e-9, self._tick)

    def _tick(self) -> None:
        self._timer = None
        now = self._clock.monotonic_ns()
        if now - self._timer_ns >= _LATE_NS:
            self.on_late((now - self._timer_ns) * 1e-9)
        at = now + _IDLE_NS
        try:
            for rnic in self._rnics.values():
                prober = rnic.prober
                # A prober asks for BATCH_NS after its first due probe; those within the batch of this tick go along.
                if prober.next_ns <= now + 2 * BATCH_NS:
                    prober.tick(now)
                if prober.next_ns < at:
                    at = prober.next_ns
        finally:
            # Whatever went wrong with one prober, the others go on.
            if not self._closed:
                self._timer_ns = at
                self._timer = self._loop.call_at(at * 1e-9, self._tick)

    @property
    def rate_factor(self) -> float:
        """What is left of the probe rate, 0 < f <= 1."""
        return self._factor

    @rate_factor.setter
    def rate_factor(self, factor: float) -> None:
        self._factor = min(1.0, max(0.01, factor))
        for rnic in self._rnics.values():
            rnic.prober.set_factor(self._factor)
        self._arm()

    # ------------------------------------------------------------ what to register, what to probe

    def infos(self) -> list[RnicInfo]:
        """What to register, one per RNIC."""
        return [
            RnicInfo(
                device=device,
                address=rnic.transport.address,
                gid=rnic.transport.gid,
                qpn=rnic.transport.qpn,
                qkey=rnic.transport.qkey,
                epoch=rnic.epoch,
                mtu=rnic.transport.mtu,
                up=rnic.up,
                transport=rnic.transport.kind,
                source_port_honoured=rnic.transport.source_port_honoured,
                clock=rnic.transport.clock,
                members=rnic.transport.members,
                legs=list(rnic.transport.legs),
            )
            for device, rnic in self._rnics.items()
        ]

    def set_link(self, device: str, up: bool) -> None:
        """The link of an RNIC went up or down (as its owner polls it): counted as flaps, shown in `infos`."""
        rnic = self._rnics[device]
        if rnic.up != up:
            rnic.up = up
            rnic.flaps += 1

    def apply_list(self, message: ProbeList) -> bool:
        """Probe by this list from now on; False (and nothing changes) if no RNIC here has its device or its numbers
        do not fit. Flows whose fields do not fit are left out.

        Flows that stay keep their phase. Probes in flight are still counted under their own list version.
        """
        rnic = self._rnics.get(message.device)
        if rnic is None:
            log.warning("a probe list for %s, which is no RNIC of this agent", message.device)
            return False
        if not 0 < message.number < 1 << 32 or not 0 <= message.list_version < 1 << 32:
            log.warning("a probe list for %s whose number or version is out of range", message.device)
            return False
        if rnic.prober.number not in (0, message.number):
            rnic.retire_prober()
            rnic.prober = self._make_prober(rnic)
        rnic.prober.apply_list(message, self._clock.monotonic_ns())
        self._arm()
        return True

    def apply_peers(self, peers: Sequence[Peer]) -> None:
        """Peers changed their QPN, epoch or GID: what is outstanding to them is stale, flows go on to the new ones."""
        for rnic in self._rnics.values():
            rnic.prober.apply_peers(peers)
        self._arm()

    # ------------------------------------------------------------ questions from outside

    async def confirm(self, message: Confirm) -> tuple[int, bytes]:
        """Send extra probes; returns (own epoch, PROBER_COLUMNS of what was really sent) when all are resolved.

        Empty columns when the RNIC, the list version or every index is unknown here.
        """
        for rnic in self._rnics.values():
            prober = rnic.prober
            if prober.number != message.rnic:
                continue
            done: asyncio.Future[None] = self._loop.create_future()

            def finish(done: asyncio.Future[None] = done) -> None:
                if not done.done():
                    done.set_result(None)

            window = prober.confirm(message, self._clock.monotonic_ns(), finish)
            if window is None:
                return prober.ledger.epoch, b""
            self._arm()
            await done
            return prober.ledger.epoch, prober.take_confirmed(message.list_version, window)
        return 0, b""

    def responder_totals(self, windows: Sequence[tuple[int, int, int, int]]) -> bytes:
        """RESPONDER_COLUMNS totals for these (source RNIC, source epoch, list version, window)."""
        return pack_responder(row for rnic in self._rnics.values() for row in rnic.responder.totals(windows))

    # ------------------------------------------------------------ reports

    def take_report(self) -> tuple[list[ProberRows], bytes, int]:
        """What happened since the last call: (prober rows, responder columns, until_ns).

        Prober rows: windows whose end lies more than the time-out back, and amendments to earlier ones. Responder
        columns: increments of everything received till `until_ns` (anchored wall clock).
        """
        now = self._clock.monotonic_ns()
        prober: list[ProberRows] = []
        responder: list[tuple[int, ...]] = []
        for rnic in self._rnics.values():
            prober += rnic.retired
            rnic.retired = []
            prober += rnic.prober.ledger.take_rows(now)
            responder += rnic.retired_responder
            rnic.retired_responder = []
            responder += rnic.responder.take(now)
        return prober, pack_responder(responder), self._clock.wall_ns(now)

    def wall_ns(self) -> int:
        """The wall clock as anchored at the start: it never steps."""
        return self._clock.wall_ns(self._clock.monotonic_ns())

    def take_read_delay(self) -> int:
        """Longest time in ns between a packet's stamp and its reading since the last call."""
        return max((rnic.transport.take_read_delay() for rnic in self._rnics.values()), default=0)

    def rnic_health(self, *, peek: bool = False) -> list[RnicHealth]:
        """One per RNIC: `flaps` since the start, the other counters since the last call without `peek`."""
        out = []
        for device, rnic in self._rnics.items():
            now = rnic.totals()
            before = rnic.seen
            if not peek:
                rnic.seen = now
            out.append(
                RnicHealth(
                    device=device,
                    up=rnic.up,
                    flaps=now.flaps,
                    rx_dropped=now.rx_dropped - before.rx_dropped,
                    bad_frames=now.bad_frames - before.bad_frames,
                    foreign=now.foreign - before.foreign,
                    send_errors=now.send_errors - before.send_errors,
                    receives_missing=rnic.transport.receives_missing,
                )
            )
        return out

    def probes_sent(self) -> dict[str, int]:
        """Probes that left, by device, since the RNIC's start."""
        return {device: rnic.prober.sent for device, rnic in self._rnics.items()}

    # ------------------------------------------------------------ for the path tracer

    def own_flows(self, number: int | None = None) -> Iterator[TracedFlow]:
        """Tuples of the RNIC with this registry number (default: all RNICs) that have a trace mask."""
        for rnic in self._rnics.values():
            prober = rnic.prober
            if number is not None and prober.number != number:
                continue
            for flow in prober.flows():
                if flow.flow.trace_mask and flow.target is not None and flow.peer is not None:
                    yield TracedFlow(
                        PROBER,
                        prober.number,
                        flow.list_version,
                        flow.flow.index,
                        rnic.transport,
                        flow.target.address,
                        flow.peer.qpn,
                        rnic.transport.source_port(flow.flow.sport),
                        flow.dscp,
                        flow.flow.trace_mask,
                        flow.seen_ns,
                        flow.flow.sport,
                    )

    def incoming_flows(self) -> Iterator[TracedFlow]:
        """Tuples of the ACKs sent within the last minute that have a trace mask."""
        for rnic in self._rnics.values():
            for flow in rnic.responder.flows():
                if flow.trace_mask:
                    yield TracedFlow(
                        RESPONDER,
                        flow.source,
                        flow.list_version,
                        flow.index,
                        rnic.transport,
                        flow.address,
                        flow.qpn,
                        rnic.transport.source_port(flow.sport),
                        flow.dscp,
                        flow.trace_mask,
                        flow.seen_ns,
                    )
