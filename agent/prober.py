"""The prober of one RNIC: sends probes by its list, each flow at its interval, never more than the rate cap allows.

Time only enters as arguments (monotonic ns), so that a test can drive it with a clock of its own.
"""

from __future__ import annotations

import logging
import random
import struct
from collections.abc import Callable, Iterable, Iterator
from heapq import heapify, heapreplace
from typing import Final

from agent.clock import Clock, window_of
from agent.flow import Confirmation, Outstanding, ProbingFlow, Shot
from agent.ledger import NEVER, Ledger
from agent.transport.base import Transport, address_of
from pingmesh import messages, probe
from pingmesh.messages import CONFIRM_BIT, Confirm, Event, Peer, ProbeClass, ProbeList, ProberRows

log = logging.getLogger(__name__)

BATCH_NS: Final = 3_000_000
"""Probes due this soon leave at the same wake-up: on a quiet agent waking up is what costs most."""
JITTER: Final = 0.2
"""Share of its interval by which a probe may leave later than its slot begins."""
STALL_NS: Final = 50_000_000
"""A probe this late is left out: no burst after a stall."""
BURST_S: Final = 0.1
"""Depth of the rate cap's token bucket."""
MAX_CONFIRM_PROBES: Final = 10_000
MAX_CONFIRM_INTERVAL_US: Final = 1_000_000
MAX_CONFIRMATIONS: Final = 64
_SEQ_MASK: Final = 0xFFFFFFFF


class Prober:
    """Probes from one RNIC under one epoch."""

    def __init__(
        self,
        transport: Transport,
        cluster: int,
        epoch: int,
        clock: Clock,
        on_event: Callable[[Event], None],
        *,
        overdue_ns: int,
        timeout_ns: int,
        max_rate: float,
    ) -> None:
        self.transport = transport
        self.ledger = Ledger(clock, epoch, on_event, overdue_ns=overdue_ns, timeout_ns=timeout_ns)
        self.list_version = -1
        self.sent = 0
        self.send_errors = 0
        self.next_ns = NEVER
        """When `tick` wants to be called next."""
        self._cluster = cluster
        self._clock = clock
        self._own_max_rate = max_rate
        self._rate = max_rate
        self._tokens = 1.0
        self._refilled_ns = clock.monotonic_ns()
        self._factor = 1.0
        self._stretch = 1.0
        self._classes: list[ProbeClass] = []
        self._flows: dict[int, ProbingFlow] = {}
        self._peers: dict[int, Peer] = {}
        self._needed: set[int] = set()
        self._heap: list[tuple[int, int, ProbingFlow]] = []
        self._confirmations: list[Confirmation] = []

    # ------------------------------------------------------------ lists and peers

    def apply_list(self, message: ProbeList, now: int) -> None:
        """Probe by this list. Flows that stay keep phase, sequence and baseline; probes in flight keep their counts."""
        old = self._flows
        self.ledger.number = message.number
        self._rate = max(0.1, min(self._own_max_rate, message.max_rate))
        self._needed = {f.peer for f in message.flows}
        self._peers = {n: p for n, p in self._peers.items() if n in self._needed}
        self.apply_peers(message.peers)
        if (message.list_version, message.classes, message.flows) == (
            self.list_version,
            self._classes,
            [f.flow for f in old.values()],
        ):
            return
        by_tuple = {(f.flow.peer, f.flow.sport, f.flow.cls): f for f in old.values()}
        self.list_version = message.list_version
        self._classes = message.classes
        self._flows = {}
        unusable = 0
        for entry in message.flows:
            if not self._usable(entry):
                unusable += 1
                continue
            flow = self._new_flow(entry)
            same = by_tuple.get((entry.peer, entry.sport, entry.cls))
            if entry.index in old:
                # Should a controller use a version twice, sequences must not repeat.
                flow.seq = old[entry.index].seq
            if same is not None:
                flow.baseline_ns = same.baseline_ns
                if same.interval_ns == flow.interval_ns:
                    flow.slot_ns, flow.due_ns = same.slot_ns, same.due_ns
            self._flows[entry.index] = flow
        wanted = sum(1e9 / f.interval_ns for f in self._flows.values())
        self._stretch = max(1.0, wanted / self._rate)
        if unusable:
            log.warning("%s: %d flows of its list have fields out of range, left out", self.transport.device, unusable)
        for flow in self._flows.values():
            self._resolve(flow)
        self._schedule_all(now)

    def _usable(self, entry: messages.Flow) -> bool:
        """Whether the flow fits into the header, and its class exists and is one."""
        return (
            0 <= entry.cls < min(len(self._classes), 256)
            and 0 <= self._classes[entry.cls].dscp < 64
            and 0 <= entry.index < 1 << 16
            and 0 < entry.sport < 1 << 16
            and 0 <= entry.trace_mask < 1 << 8
        )

    def _new_flow(self, entry: messages.Flow) -> ProbingFlow:
        cls = self._classes[entry.cls]
        return ProbingFlow(entry, self.list_version, self._template(entry, entry.cls), cls.size, cls.dscp)

    def _template(self, entry: messages.Flow, cls: int) -> bytearray:
        return probe.encode(
            probe.Header(
                magic=probe.MAGIC,
                version=probe.VERSION,
                kind=probe.PROBE,
                cls=cls,
                flags=0,
                trace_mask=entry.trace_mask,
                dscp=self._classes[cls].dscp,
                cluster=self._cluster,
                source=self.number,
                epoch=self.ledger.epoch,
                target_epoch=0,
                seq=0,
                list_version=self.list_version,
                flow_index=entry.index,
                sport=entry.sport,
                window=0,
                left=0,
                reserved=0,
                qkey=self.transport.qkey,
                history=0,
                delay=0,
            )
        )

    def apply_peers(self, peers: Iterable[Peer]) -> None:
        """Go on to the new queue pairs; what is unanswered by the old ones is stale and no evidence."""
        changed = set()
        for peer in peers:
            if peer.number not in self._needed:
                continue
            old = self._peers.get(peer.number)
            self._peers[peer.number] = peer
            if old is not None and old != peer:
                changed.add(peer.number)
        if changed:
            self.ledger.peers_changed(changed)
        for flow in self._flows.values():
            if flow.flow.peer in changed or flow.target is None:
                self._resolve(flow)

    def _resolve(self, flow: ProbingFlow) -> None:
        """Find the flow's target; without one it is not probed."""
        peer = self._peers.get(flow.flow.peer)
        flow.peer, flow.target = peer, None
        if peer is None:
            return
        try:
            probe.aim(flow.template, peer.epoch)
            flow.target = self.transport.target(address_of(peer.gid), peer.qpn, peer.qkey)
        except (ValueError, OSError, struct.error):
            return
        flow.size = self._size(self._classes[flow.flow.cls], peer)

    def _size(self, cls: ProbeClass, peer: Peer) -> int:
        return max(probe.SIZE, min(cls.size, self.transport.mtu, peer.mtu) & ~3)

    # ------------------------------------------------------------ schedule

    def set_factor(self, factor: float) -> None:
        """Stretch all intervals by 1/factor."""
        if factor == self._factor:
            return
        now = self._clock.monotonic_ns()
        change = self._factor / factor
        self._factor = factor
        for flow in self._flows.values():
            flow.due_ns = now + int((flow.due_ns - now) * change)
            flow.slot_ns = now + int((flow.slot_ns - now) * change)
        self._schedule_all(now)

    def _schedule_all(self, now: int) -> None:
        """Flows that are scheduled stay so; the others begin anywhere within their interval."""
        self._heap = []
        for order, flow in enumerate(self._flows.values()):
            if not flow.due_ns:
                flow.slot_ns = now - int(random.random() * self._interval(flow))
                self._next_due(flow, now)
            self._heap.append((flow.due_ns, order, flow))
        heapify(self._heap)
        self._set_next()

    def _interval(self, flow: ProbingFlow) -> int:
        return int(flow.interval_ns * self._stretch / self._factor)

    def _next_due(self, flow: ProbingFlow, now: int) -> int:
        """Go to the first slot that begins after now; the probe leaves up to JITTER of an interval into it.

        Slots are exact, so that the mean rate is; the jitter keeps flows of equal interval from marching in step.
        """
        interval = self._interval(flow)
        slot = flow.slot_ns + interval
        if slot < now:
            slot += (now - slot + interval - 1) // interval * interval
        flow.slot_ns = slot
        flow.due_ns = slot + int(interval * JITTER * random.random())
        return flow.due_ns

    def _set_next(self) -> None:
        at = self._heap[0][0] + BATCH_NS if self._heap else NEVER
        for confirmation in self._confirmations:
            at = min(at, confirmation.due_ns if confirmation.sending else NEVER)
        self.next_ns = min(at, self.ledger.next_ns())

    def tick(self, now: int) -> None:
        """Do what is due: time-outs, then probes."""
        self.ledger.expire(now)
        window = window_of(self._clock.wall_ns(now))
        self._tokens = min(max(2.0, self._rate * BURST_S), self._tokens + (now - self._refilled_ns) * 1e-9 * self._rate)
        self._refilled_ns = now
        if self._confirmations:
            self._send_confirmations(now)
            self._confirmations = [c for c in self._confirmations if not c.finished]
        # Confirmations go first: the list gets what they leave.
        busy = any(c.sending for c in self._confirmations)
        reserve = max(2.0, self._rate * BURST_S) / 2 if busy else 1.0
        heap = self._heap
        horizon = now + BATCH_NS
        while heap and heap[0][0] <= horizon:
            due, order, flow = heap[0]
            if flow.target is not None and now - due < STALL_NS and self._tokens >= reserve:
                self._send(flow, flow.template, flow.size, flow.dscp, window, now, None)
            heapreplace(heap, (self._next_due(flow, now), order, flow))
        self._set_next()

    # ------------------------------------------------------------ sending

    def _send(
        self,
        flow: ProbingFlow,
        template: bytearray,
        size: int,
        dscp: int,
        window: int,
        now: int,
        confirmation: Confirmation | None,
    ) -> None:
        assert flow.target is not None
        self._tokens -= 1.0
        row = flow.row
        if row is None or flow.window != window:
            row = flow.row = self.ledger.counts.row(flow.list_version, window, flow.flow.index)
            flow.window = window
        seq = flow.seq = (flow.seq + 1) & _SEQ_MASK
        probe.stamp_probe(template, seq, window)
        try:
            tx_ns = self.transport.send(flow.target, flow.flow.sport, dscp, template, size, True)
        except OSError:
            row.send_error += 1
            self.send_errors += 1
            if confirmation is None:
                self.ledger.send_error(flow, seq, now)
            return
        row.sent += 1
        self.sent += 1
        flow.seen_ns = now
        record = Outstanding(flow, seq, now, row, confirmation)
        if tx_ns:
            record.tx_ns = tx_ns
        else:
            self.transport.await_stamp(record)
        if confirmation is not None:
            confirmation.open += 1
        self.ledger.add(record)

    def confirm(self, message: Confirm, now: int, on_done: Callable[[], None]) -> int | None:
        """Begin to send extra probes; their window, or None if there is nothing to send.

        `on_done` is called when all are resolved; then `take_confirmed` has the counts.
        """
        if message.list_version != self.list_version or message.count <= 0 or message.cls >= len(self._classes):
            return None
        if len(self._confirmations) >= MAX_CONFIRMATIONS:
            return None
        shots = []
        for index in dict.fromkeys(message.indexes):
            flow = self._flows.get(index)
            if flow is None or flow.target is None or flow.peer is None:
                continue
            if message.cls < 0 or message.cls == flow.flow.cls:
                shots.append(Shot(flow, flow.template, flow.size, flow.dscp))
            elif 0 <= self._classes[message.cls].dscp < 64:
                cls = self._classes[message.cls]
                template = self._template(flow.flow, message.cls)
                probe.aim(template, flow.peer.epoch)
                shots.append(Shot(flow, template, self._size(cls, flow.peer), cls.dscp))
        window = CONFIRM_BIT | (message.id & (CONFIRM_BIT - 1))
        if not shots or any(c.window == window and not c.finished for c in self._confirmations):
            return None
        count = min(message.count, MAX_CONFIRM_PROBES // len(shots) or 1)
        interval_ns = min(max(message.interval_us, 100), MAX_CONFIRM_INTERVAL_US) * 1000
        self._confirmations.append(Confirmation(shots, window, count, interval_ns, now, on_done))
        self._set_next()
        return window

    def take_confirmed(self, list_version: int, window: int) -> bytes:
        """PROBER_COLUMNS of a confirmation that is done, and forget it."""
        columns = self.ledger.counts.take(list_version, window)
        self.ledger.counts.forget(list_version, window)
        for flow in self._flows.values():
            if flow.window == window:
                flow.row = None
        return columns

    def _send_confirmations(self, now: int) -> None:
        for confirmation in self._confirmations:
            while confirmation.sending and confirmation.due_ns <= now + BATCH_NS:
                if now > confirmation.give_up_ns:
                    confirmation.total = confirmation.sent
                    break
                if self._tokens < 1.0:
                    confirmation.due_ns = now + int((1.0 - self._tokens) / self._rate * 1e9) + BATCH_NS
                    break
                shot = confirmation.shots[confirmation.sent % len(confirmation.shots)]
                confirmation.sent += 1
                # Late by a stall or by the rate cap: keep the step, do not catch up.
                confirmation.due_ns = max(confirmation.due_ns, now - BATCH_NS) + confirmation.step_ns
                if shot.flow.target is not None:
                    self._send(shot.flow, shot.template, shot.size, shot.dscp, confirmation.window, now, confirmation)
            confirmation.check()

    # ------------------------------------------------------------ the end

    def retire(self) -> list[ProberRows]:
        """Stop for good: unanswered probes are no evidence. The counts that were not taken yet."""
        self.ledger.abandon()
        for confirmation in self._confirmations:
            confirmation.total = confirmation.sent
            confirmation.open = 0
            confirmation.check()
        self.next_ns = NEVER
        return self.ledger.take_rows(self._clock.monotonic_ns(), last=True)

    def flows(self) -> Iterator[ProbingFlow]:
        """The flows that are probed."""
        return (flow for flow in self._flows.values() if flow.target is not None)

    @property
    def number(self) -> int:
        """The RNIC's number in the registry, 0 before the first list."""
        return self.ledger.number
