"""The prober of one RNIC: sends probes by its list, matches ACKs, and decides what became of each packet.

Time only enters as arguments (monotonic ns), so that a test can drive it with a clock of its own. Accounting follows
each packet and not each probe: an ACK of either kind proves that the probe arrived; one ACK without the other is one
packet lost on the way back (`no_rtt`), not a lost probe. network RTT = (5-2) - (4-3), Liu et al. 2024, §4.2.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from heapq import heapify, heapreplace
from typing import Final

from agent.clock import Clock, window_end, window_of
from agent.counts import ProberCounts
from agent.flow import Confirmation, Outstanding, Phase, ProbingFlow, Shot
from agent.transport.base import Transport, address_of
from pingmesh import messages, probe
from pingmesh.messages import CONFIRM_BIT, Confirm, Event, Peer, ProbeClass, ProbeList, ProberRows

BATCH_NS: Final = 1_000_000
"""Probes due this soon leave at the same wake-up."""
JITTER: Final = 0.2
"""Share of its interval by which a probe may leave later than its slot begins."""
STALL_NS: Final = 50_000_000
"""A probe this late is left out: no burst after a stall."""
REMEMBER_NS: Final = 5_000_000_000
"""An ACK this late still amends the loss."""
SLOW_FLOOR_NS: Final = 1_000_000
SLOW_FACTOR: Final = 8.0
QUIET_NS: Final = 1_000_000_000
"""At most one SLOW or SEND_ERROR event per flow and this long."""
NOISY_EVENTS: Final = 10
"""At most so many SLOW and SEND_ERROR events per RNIC in QUIET_NS."""
BURST_S: Final = 0.1
"""Depth of the rate cap's token bucket."""
MAX_CONFIRM_PROBES: Final = 10_000
_NEVER: Final = 1 << 62
_SEQ_MASK: Final = 0xFFFFFFFF

_WAITING, _OVERDUE, _LOST, _ANSWERED, _DONE = Phase


class Prober:
    """Probes from one RNIC. `number` is its number in the registry, 0 before the first list."""

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
        self.epoch = epoch
        self.number = 0
        self.list_version = -1
        self.stray = 0
        """ACKs of no probe of ours that is still remembered, duplicates among them."""
        self.sent = 0
        self.send_errors = 0
        self.next_ns = _NEVER
        """When `tick` wants to be called next."""
        self._cluster = cluster
        self._clock = clock
        self._on_event = on_event
        self._overdue_ns = overdue_ns
        self._timeout_ns = timeout_ns
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
        self._outstanding: dict[tuple[int, int, int], Outstanding] = {}
        self._young: deque[Outstanding] = deque()
        self._overdue: deque[Outstanding] = deque()
        self._old: deque[Outstanding] = deque()
        self._counts = ProberCounts()
        self._noise_from = 0
        self._noise = 0

    # ------------------------------------------------------------ lists and peers

    def apply_list(self, message: ProbeList, now: int) -> None:
        """Probe by this list. Flows that stay keep phase, sequence and baseline; probes in flight keep their counts."""
        old = self._flows
        self.number = message.number
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
        for entry in message.flows:
            if entry.cls >= len(message.classes):
                continue
            flow = self._new_flow(entry)
            same = by_tuple.get((entry.peer, entry.sport, entry.cls))
            if entry.index in old:
                # Should a controller use a version twice, sequences must not repeat.
                flow.seq = old[entry.index].seq
            flow.slot_ns = now - int(random.random() * flow.interval_ns)
            if same is not None:
                flow.baseline_ns = same.baseline_ns
                if same.interval_ns == flow.interval_ns:
                    flow.slot_ns = same.slot_ns
            self._flows[entry.index] = flow
        wanted = sum(1e9 / f.interval_ns for f in self._flows.values())
        self._stretch = max(1.0, wanted / self._rate)
        for flow in self._flows.values():
            self._resolve(flow)
        self._schedule_all(now)

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
                epoch=self.epoch,
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
            for record in list(self._outstanding.values()):
                if record.flow.flow.peer in changed and not record.acks:
                    self._exclude(record, messages.STALE)
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
            flow.target = self.transport.target(address_of(peer.gid), peer.qpn, peer.qkey)
        except (ValueError, OSError):
            return
        flow.size = self._size(self._classes[flow.flow.cls], peer)
        probe.aim(flow.template, peer.epoch)

    def _size(self, cls: ProbeClass, peer: Peer) -> int:
        return max(probe.SIZE, min(cls.size, self.transport.mtu, peer.mtu) & ~3)

    # ------------------------------------------------------------ schedule

    def set_factor(self, factor: float) -> None:
        """Stretch all intervals by 1/factor, from each flow's next probe on."""
        self._factor = factor

    def _schedule_all(self, now: int) -> None:
        self._heap = []
        for order, flow in enumerate(self._flows.values()):
            self._heap.append((self._next_due(flow, now), order, flow))
        heapify(self._heap)
        self._set_next()

    def _next_due(self, flow: ProbingFlow, now: int) -> int:
        """Go to the first slot that begins after now; the probe leaves up to JITTER of an interval into it.

        Slots are exact, so that the mean rate is; the jitter keeps flows of equal interval from marching in step.
        """
        interval = int(flow.interval_ns * self._stretch / self._factor)
        slot = flow.slot_ns + interval
        if slot < now:
            slot += (now - slot + interval - 1) // interval * interval
        flow.slot_ns = slot
        return slot + int(interval * JITTER * random.random())

    def _set_next(self) -> None:
        at = self._heap[0][0] + BATCH_NS if self._heap else _NEVER
        for confirmation in self._confirmations:
            at = min(at, confirmation.due_ns if confirmation.sending else _NEVER)
        if self._young:
            at = min(at, self._young[0].sent_ns + self._overdue_ns)
        if self._overdue:
            at = min(at, self._overdue[0].sent_ns + self._timeout_ns)
        if self._old:
            at = min(at, self._old[0].sent_ns + REMEMBER_NS)
        self.next_ns = at

    def tick(self, now: int) -> None:
        """Do what is due: time-outs, then probes."""
        self._expire(now)
        window = window_of(self._clock.wall_ns(now))
        self._tokens = min(max(2.0, self._rate * BURST_S), self._tokens + (now - self._refilled_ns) * 1e-9 * self._rate)
        self._refilled_ns = now
        if self._confirmations:
            self._send_confirmations(now)
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
            row = flow.row = self._counts.row(flow.list_version, window, flow.flow.index)
            flow.window = window
        seq = flow.seq = (flow.seq + 1) & _SEQ_MASK
        probe.stamp_probe(template, seq, window)
        try:
            tx_ns = self.transport.send(flow.target, flow.flow.sport, dscp, template, size, True)
        except OSError:
            row.send_error += 1
            self.send_errors += 1
            if confirmation is None and self._may_be_noisy(flow, now):
                self._emit(messages.SEND_ERROR, flow, seq, now, 0, 0)
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
        self._outstanding[flow.list_version, flow.flow.index, seq] = record
        self._young.append(record)

    def confirm(self, message: Confirm, now: int, on_done: Callable[[], None]) -> int | None:
        """Begin to send extra probes; their window, or None if there is nothing to send.

        `on_done` is called when all are resolved; then `take_confirmed` has the counts.
        """
        if message.list_version != self.list_version or message.count <= 0 or message.cls >= len(self._classes):
            return None
        shots = []
        for index in dict.fromkeys(message.indexes):
            flow = self._flows.get(index)
            if flow is None or flow.target is None or flow.peer is None:
                continue
            if message.cls < 0 or message.cls == flow.flow.cls:
                shots.append(Shot(flow, flow.template, flow.size, flow.dscp))
            else:
                cls = self._classes[message.cls]
                template = self._template(flow.flow, message.cls)
                probe.aim(template, flow.peer.epoch)
                shots.append(Shot(flow, template, self._size(cls, flow.peer), cls.dscp))
        window = CONFIRM_BIT | (message.id & (CONFIRM_BIT - 1))
        if not shots or any(c.window == window for c in self._confirmations):
            return None
        count = min(message.count, MAX_CONFIRM_PROBES // len(shots) or 1)
        interval_ns = max(message.interval_us, 100) * 1000
        self._confirmations.append(Confirmation(shots, window, count, interval_ns, now, on_done))
        self._set_next()
        return window

    def take_confirmed(self, list_version: int, window: int) -> bytes:
        """PROBER_COLUMNS of a confirmation that is done, and forget it."""
        columns = self._counts.take(list_version, window)
        self._counts.forget(list_version, window)
        for flow in self._flows.values():
            if flow.window == window:
                flow.row = None
        return columns

    def _send_confirmations(self, now: int) -> None:
        for confirmation in list(self._confirmations):
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
            self._close_if_done(confirmation)

    def _close_if_done(self, confirmation: Confirmation) -> None:
        if not confirmation.sending and not confirmation.open and confirmation in self._confirmations:
            self._confirmations.remove(confirmation)
            confirmation.on_done()

    # ------------------------------------------------------------ what became of it

    def _expire(self, now: int) -> None:
        """Move probes on whose time has come. Each passes each queue once, in the order of sending."""
        young, overdue, old = self._young, self._overdue, self._old
        limit = now - self._overdue_ns
        while young and (young[0].phase is _DONE or young[0].sent_ns <= limit):
            record = young.popleft()
            if record.phase is _WAITING:
                self._declare_overdue(record)
            if record.phase is not _DONE:
                overdue.append(record)
        limit = now - self._timeout_ns
        while overdue and (overdue[0].phase is _DONE or overdue[0].sent_ns <= limit):
            record = overdue.popleft()
            if record.phase is not _DONE:
                self._declare_timeout(record)
                old.append(record)
        limit = now - REMEMBER_NS
        while old and (old[0].phase is _DONE or old[0].sent_ns <= limit):
            record = old.popleft()
            if record.phase is not _DONE:
                self._forget(record)

    def _declare_overdue(self, record: Outstanding) -> None:
        record.phase = _OVERDUE
        flow = record.flow
        arrived = flow.arrived(record.seq)
        if arrived is None:
            flow.missing.append(record)
        else:
            record.direction = messages.REVERSE if arrived else messages.FORWARD
        self._tell(messages.OVERDUE, record, 0)

    def _declare_timeout(self, record: Outstanding) -> None:
        if record.phase is _ANSWERED:
            self._tell(messages.NO_RTT, record, 0)
        else:
            if record.phase is _WAITING:
                self._declare_overdue(record)
            record.phase = _LOST
            record.row.lost += 1
            self._tell(messages.LOST, record, 0)
        self._resolve_confirmed(record)

    def _resolve_confirmed(self, record: Outstanding) -> None:
        confirmation = record.confirmation
        if confirmation is not None:
            record.confirmation = None
            confirmation.open -= 1
            self._close_if_done(confirmation)

    def _forget(self, record: Outstanding) -> None:
        record.phase = _DONE
        flow = record.flow
        self._outstanding.pop((flow.list_version, flow.flow.index, record.seq), None)
        if flow.missing and record in flow.missing:
            flow.missing.remove(record)
        self._resolve_confirmed(record)

    def _exclude(self, record: Outstanding, kind: int) -> None:
        """The probe is no evidence: take back what was counted of it."""
        row = record.row
        row.sent -= 1
        row.excluded += 1
        row.arrived -= record.acks != 0
        row.ack1 -= record.acks & 1
        row.ack2 -= record.acks >> 1
        if record.phase is _LOST:
            row.lost -= 1
        self._tell(kind, record, 0)
        self._forget(record)

    def on_ack(self, ack: probe.Header, rx_ns: int, now: int) -> None:
        """An ACK came. Anything that fits no remembered probe is counted as stray."""
        record = self._outstanding.get((ack.list_version, ack.flow_index, ack.seq))
        if record is None or ack.source != self.number or ack.epoch != self.epoch:
            self.stray += 1
            return
        if ack.flags & probe.STALE:
            if not record.acks:
                self._exclude(record, messages.STALE)
            return
        bit = 1 if ack.kind == probe.ACK1 else 2
        if record.acks & bit:
            self.stray += 1
            return
        flow, row = record.flow, record.row
        if not record.acks:
            self._first_ack(record, now)
        record.acks |= bit
        if bit == 1:
            row.ack1 += 1
            record.rx_ns = rx_ns
        else:
            row.ack2 += 1
            record.delay = ack.delay
        flow.heard(ack.seq, ack.history)
        if flow.missing:
            self._place_missing(flow)
        if record.acks == 3:
            self._complete(record, now)

    def _first_ack(self, record: Outstanding, now: int) -> None:
        row = record.row
        row.arrived += 1
        if record.phase is _LOST:
            row.lost -= 1
            row.late += 1
            self._tell(messages.LATE, record, (now - record.sent_ns) // 1000)
        record.phase = _ANSWERED
        if record.flow.missing and record in record.flow.missing:
            record.flow.missing.remove(record)

    def _place_missing(self, flow: ProbingFlow) -> None:
        """A newer ACK tells which of the missing probes had arrived: those lost their ACKs, the others themselves."""
        still = []
        for record in flow.missing:
            arrived = flow.arrived(record.seq)
            if arrived is None:
                if record.seq > flow.acked_seq:
                    still.append(record)
                continue
            record.direction = messages.REVERSE if arrived else messages.FORWARD
            self._tell(messages.LOST if record.phase is _LOST else messages.OVERDUE, record, 0)
        flow.missing = still

    def _complete(self, record: Outstanding, now: int) -> None:
        """Both ACKs are here: the network RTT, or the proof that a clock is wrong."""
        if record.tx_ns:
            rtt = record.rx_ns - record.tx_ns - record.delay
            if rtt < 0 or rtt > now - record.sent_ns + BATCH_NS:
                self._exclude(record, messages.INVALID)
                return
            row, flow = record.row, record.flow
            row.rtt_sum += rtt
            if rtt > row.rtt_max:
                row.rtt_max = rtt
            base = flow.baseline_ns
            if not base:
                flow.baseline_ns = rtt
            else:
                if rtt > SLOW_FLOOR_NS and rtt > SLOW_FACTOR * base and self._may_be_noisy(flow, now):
                    self._tell(messages.SLOW, record, rtt // 1000)
                # Steps of fixed size towards the sample settle at the median and shrug off outliers.
                flow.baseline_ns = base * 1.02 if rtt > base else base * 0.98
        # From here on as _forget, but shorter: this is what happens to nearly every probe.
        record.phase = _DONE
        flow = record.flow
        del self._outstanding[flow.list_version, flow.flow.index, record.seq]
        if record.confirmation is not None:
            self._resolve_confirmed(record)

    # ------------------------------------------------------------ telling

    def _may_be_noisy(self, flow: ProbingFlow, now: int) -> bool:
        if now < flow.quiet_until:
            return False
        if now - self._noise_from >= QUIET_NS:
            self._noise_from, self._noise = now, 0
        if self._noise >= NOISY_EVENTS:
            return False
        self._noise += 1
        flow.quiet_until = now + QUIET_NS
        return True

    def _tell(self, kind: int, record: Outstanding, rtt_us: int) -> None:
        # A confirmation's result is its counts; events of its probes would call for the next one.
        if record.quiet:
            return
        self._emit(kind, record.flow, record.seq, record.sent_ns, record.direction, rtt_us)

    def _emit(self, kind: int, flow: ProbingFlow, seq: int, sent_ns: int, direction: int, rtt_us: int) -> None:
        self._on_event(
            Event(
                kind,
                self.number,
                flow.list_version,
                flow.flow.index,
                seq,
                self._clock.wall_ns(sent_ns),
                direction,
                rtt_us,
            )
        )

    # ------------------------------------------------------------ reports

    def take_rows(self, now: int) -> list[ProberRows]:
        """Counts of all windows that are complete, and amendments to earlier ones."""
        wall = self._clock.wall_ns(now)
        out = []
        for list_version, window in self._counts.windows():
            if window & CONFIRM_BIT or window_end(window) + self._timeout_ns > wall:
                continue
            columns = self._counts.take(list_version, window)
            if columns:
                out.append(self._rows(list_version, window, columns))
            if window_end(window) + REMEMBER_NS + self._timeout_ns < wall:
                self._counts.forget(list_version, window)
        return out

    def _rows(self, list_version: int, window: int, columns: bytes) -> ProberRows:
        return ProberRows(rnic=self.number, epoch=self.epoch, list_version=list_version, window=window, columns=columns)

    def retire(self) -> list[ProberRows]:
        """Stop for good: unanswered probes are no evidence. The counts that were not taken yet."""
        for record in list(self._outstanding.values()):
            if not record.acks:
                self._exclude(record, messages.INVALID)
        for confirmation in list(self._confirmations):
            confirmation.total = confirmation.sent
            confirmation.open = 0
            self._close_if_done(confirmation)
        self.next_ns = _NEVER
        rows = []
        for list_version, window in self._counts.windows():
            if not window & CONFIRM_BIT and (columns := self._counts.take(list_version, window)):
                rows.append(self._rows(list_version, window, columns))
        return rows

    def flows(self) -> Iterator[ProbingFlow]:
        """The flows that are probed."""
        return (flow for flow in self._flows.values() if flow.target is not None)
