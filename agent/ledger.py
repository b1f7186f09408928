"""What became of each probe of one RNIC: matches ACKs, runs the time-outs, counts packets, tells what is unusual.

Time only enters as arguments (monotonic ns), so that a test can drive it with a clock of its own. Accounting follows
each packet and not each probe: an ACK of either kind proves that the probe arrived; one ACK without the other is one
packet lost on the way back (`no_rtt`), not a lost probe. network RTT = (5-2) - (4-3), Liu et al. 2024, §4.2.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from typing import Final

from agent.clock import Clock, window_end
from agent.counts import ProberCounts
from agent.flow import Outstanding, Phase, ProbingFlow
from pingmesh import messages, probe
from pingmesh.messages import CONFIRM_BIT, Event, ProberRows

REMEMBER_NS: Final = 5_000_000_000
"""An ACK this late still amends the loss."""
SLOW_SHARE: Final = 500
"""Faster than this part of the time-out is not slow, whatever the baseline: 1 ms by default."""
SLOW_FACTOR: Final = 8.0
RTT_SLACK_NS: Final = 1_000_000
"""An RTT this much longer than the time between sending and reading is no RTT."""
QUIET_NS: Final = 1_000_000_000
"""At most one SLOW or SEND_ERROR event per flow and this long."""
NOISY_EVENTS: Final = 10
"""At most so many SLOW and SEND_ERROR events per RNIC in QUIET_NS."""
NEVER: Final = 1 << 62

_WAITING, _OVERDUE, _LOST, _ANSWERED, _DONE = Phase


class Ledger:
    """The probes of one RNIC under one epoch. `number` is the RNIC's in the registry, 0 before the first list."""

    def __init__(
        self, clock: Clock, epoch: int, on_event: Callable[[Event], None], *, overdue_ns: int, timeout_ns: int
    ) -> None:
        self.epoch = epoch
        self.number = 0
        self.counts = ProberCounts()
        self.stray = 0
        """ACKs of no probe of ours that is still remembered, duplicates among them."""
        self._clock = clock
        self._on_event = on_event
        self._overdue_ns = overdue_ns
        self._timeout_ns = timeout_ns
        self._slow_floor_ns = timeout_ns // SLOW_SHARE
        self._outstanding: dict[tuple[int, int, int], Outstanding] = {}
        self._young: deque[Outstanding] = deque()
        self._overdue: deque[Outstanding] = deque()
        self._old: deque[Outstanding] = deque()
        self._noise_from = 0
        self._noise = 0

    def __len__(self) -> int:
        return len(self._outstanding)

    def add(self, record: Outstanding) -> None:
        """A probe left."""
        flow = record.flow
        self._outstanding[flow.list_version, flow.flow.index, record.seq] = record
        self._young.append(record)

    def next_ns(self) -> int:
        """When `expire` has something to do."""
        at = NEVER
        if self._young:
            at = self._young[0].sent_ns + self._overdue_ns
        if self._overdue:
            at = min(at, self._overdue[0].sent_ns + self._timeout_ns)
        if self._old:
            at = min(at, self._old[0].sent_ns + REMEMBER_NS)
        return at

    def send_error(self, flow: ProbingFlow, seq: int, now: int) -> None:
        """A probe did not leave."""
        if self._may_be_noisy(flow, now):
            self._emit(messages.SEND_ERROR, flow, seq, now, 0, 0)

    def peers_changed(self, numbers: Collection[int]) -> None:
        """What is unanswered by these peers' old queue pairs is stale and no evidence."""
        for record in list(self._outstanding.values()):
            if not record.acks and record.flow.flow.peer in numbers:
                self._exclude(record, messages.STALE)

    def abandon(self) -> None:
        """Our own queue pair goes: nobody can answer what is unanswered, and that is no evidence."""
        for record in list(self._outstanding.values()):
            if not record.acks:
                self._exclude(record, messages.INVALID)

    # ------------------------------------------------------------ what became of it

    def expire(self, now: int) -> None:
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
        record.resolve()

    def _forget(self, record: Outstanding) -> None:
        record.phase = _DONE
        flow = record.flow
        self._outstanding.pop((flow.list_version, flow.flow.index, record.seq), None)
        if flow.missing and record in flow.missing:
            flow.missing.remove(record)
        record.resolve()

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
            if rtt < 0 or rtt > now - record.sent_ns + RTT_SLACK_NS:
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
                slow = rtt > self._slow_floor_ns and rtt > SLOW_FACTOR * base
                # A late one has been told of already.
                if slow and now - record.sent_ns < self._timeout_ns and self._may_be_noisy(flow, now):
                    self._tell(messages.SLOW, record, rtt // 1000)
                # Steps of fixed size towards the sample settle at the median and shrug off outliers. Far down at
                # once: the first probes of a flow wait for neighbours to be resolved, and no RTT is short by accident.
                if rtt < base / 2:
                    flow.baseline_ns = (base + rtt) / 2
                else:
                    flow.baseline_ns = base * 1.02 if rtt > base else base * 0.98
        # From here on as _forget, but shorter: this is what happens to nearly every probe.
        record.phase = _DONE
        flow = record.flow
        del self._outstanding[flow.list_version, flow.flow.index, record.seq]
        record.resolve()

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

    def take_rows(self, now: int, *, last: bool = False) -> list[ProberRows]:
        """Counts of all windows that are complete (of all if `last`), and amendments to earlier ones."""
        wall = self._clock.wall_ns(now)
        out = []
        for list_version, window in self.counts.windows():
            if window & CONFIRM_BIT or (window_end(window) + self._timeout_ns > wall and not last):
                continue
            columns = self.counts.take(list_version, window)
            if columns:
                out.append(self._rows(list_version, window, columns))
            if window_end(window) + REMEMBER_NS + self._timeout_ns < wall:
                self.counts.forget(list_version, window)
        return out

    def _rows(self, list_version: int, window: int, columns: bytes) -> ProberRows:
        return ProberRows(rnic=self.number, epoch=self.epoch, list_version=list_version, window=window, columns=columns)
