"""The responder of one RNIC: answers each probe with two ACKs and counts by the prober's books.

ACK1 leaves at once, from the probe's source port and with its DSCP, so that its path is a function of the probe's
5-tuple; ACK2 carries how long ACK1 took to leave, which is known only then (Liu et al. 2024, §4.2).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from agent.counts import ResponderRow
from agent.transport.base import Target, Transport
from pingmesh import probe

KEEP_NS: Final = 60_000_000_000
"""Windows and flows nobody probed in for so long are forgotten."""
MAX_FLOWS: Final = 16_384
MAX_ROWS: Final = 65_536

Window = tuple[int, int, int, int]


class IncomingFlow:
    """A flow that somebody probes us with: what arrived of it, and how to answer."""

    __slots__ = (
        "address",
        "dscp",
        "history",
        "index",
        "last",
        "list_version",
        "qkey",
        "qpn",
        "row",
        "seen_ns",
        "source",
        "sport",
        "target",
        "trace_mask",
        "window",
    )

    def __init__(self, first: probe.Header) -> None:
        self.source = first.source
        self.list_version = first.list_version
        self.index = first.flow_index
        self.last = -1
        self.history = 0
        """Bit i: sequence last-1-i arrived."""
        self.row: ResponderRow | None = None
        self.window = -1
        self.seen_ns = 0
        self.address = ""
        self.qpn = -1
        self.qkey = -1
        self.sport = 0
        self.dscp = 0
        self.trace_mask = 0
        self.target: Target | None = None

    def note(self, seq: int) -> int | None:
        """Note that `seq` arrived; the history relative to it, or None if it is known to have arrived before."""
        if self.last < 0:
            self.last = seq
            return 0
        ahead = seq - self.last
        if ahead > 0:
            self.last = seq
            # Whatever the packet claims, never shift by more than the bitmap holds.
            self.history = (self.history << 1 | 1) << (ahead - 1) & probe.HISTORY_MASK if ahead <= 64 else 0
            return self.history
        if ahead < -64:
            return 0
        bit = 1 << (-ahead - 1) if ahead else 0
        if not bit or self.history & bit:
            return None
        self.history |= bit
        return self.history >> -ahead


class _Answer:
    """One probe's ACKs: ACK2 follows when ACK1's send stamp is known."""

    __slots__ = ("_ack", "_dscp", "_responder", "_row", "_rx_ns", "_sport", "_target")

    def __init__(
        self,
        responder: Responder,
        target: Target,
        row: ResponderRow,
        sport: int,
        dscp: int,
        ack: bytearray,
        rx_ns: int,
    ) -> None:
        self._responder = responder
        self._target = target
        self._row = row
        self._sport = sport
        self._dscp = dscp
        self._ack = ack
        self._rx_ns = rx_ns

    def stamped(self, ns: int) -> None:
        """ACK1 left: so may ACK2."""
        if ns:
            self._responder.second(self._target, self._row, self._sport, self._dscp, self._ack, ns - self._rx_ns)


class Responder:
    """Answers for one queue pair."""

    def __init__(self, transport: Transport, epoch: int) -> None:
        self.transport = transport
        self.epoch = epoch
        self.stale = 0
        """Probes that meant an earlier epoch."""
        self.duplicates = 0
        self.send_errors = 0
        self.overflow = 0
        """Probes answered but not counted, for want of room."""
        self._flows: dict[tuple[int, int, int, int], IncomingFlow] = {}
        self._windows: dict[Window, dict[int, ResponderRow]] = {}
        self._touched: dict[Window, int] = {}
        self._rows = 0
        self._dirty: list[ResponderRow] = []

    def on_probe(
        self, header: probe.Header, payload: memoryview, source: str, qpn: int, dscp: int, rx_ns: int, now: int
    ) -> None:
        """A probe for this queue pair came."""
        ack = bytearray(payload[: probe.SIZE])
        if header.target_epoch != self.epoch:
            self._answer_stale(header, ack, source, qpn, dscp)
            return
        key = (header.source, header.epoch, header.list_version, header.flow_index)
        flow = self._flows.get(key)
        if flow is None:
            flow = IncomingFlow(header)
            if len(self._flows) < MAX_FLOWS:
                self._flows[key] = flow
        history = flow.note(header.seq)
        if history is None:
            self.duplicates += 1
            return
        row = flow.row
        if row is None or flow.window != header.window:
            row = self._row(flow, key, header.window, now)
        flow.seen_ns = now
        changed = flow.qpn != qpn or flow.address != source or flow.qkey != header.qkey or flow.sport != header.sport
        if changed and not self._learn(flow, header, source, qpn):
            return
        flow.dscp = header.dscp
        row.received += 1
        if not row.dirty:
            self.touch(row)
        if dscp >= 0 and dscp != header.dscp:
            row.mismatched += 1
        transport, target, sport = self.transport, flow.target, header.sport
        assert target is not None
        flags = probe.POLLED if transport.polled else 0
        probe.answer(ack, header, flags=flags, dscp=dscp & 0xFF, left=transport.source_port(sport), history=history)
        try:
            tx_ns = transport.send(target, sport, header.dscp, ack, probe.SIZE, True)
        except OSError:
            self.send_errors += 1
            return
        row.ack1 += 1
        if tx_ns:
            self.second(target, row, sport, header.dscp, ack, tx_ns - rx_ns)
        else:
            transport.await_stamp(_Answer(self, target, row, sport, header.dscp, ack, rx_ns))

    def second(self, target: Target, row: ResponderRow, sport: int, dscp: int, ack: bytearray, delay: int) -> None:
        """Turn the ACK1 into ACK2 and send it. `delay`: how long ACK1 took to leave, in ns."""
        probe.answer_again(ack, delay)
        try:
            self.transport.send(target, sport, dscp, ack, probe.SIZE, False)
        except OSError:
            self.send_errors += 1
            return
        row.ack2 += 1
        if not row.dirty:
            self.touch(row)

    def touch(self, row: ResponderRow) -> None:
        """The row has something to report."""
        row.dirty = True
        self._dirty.append(row)

    def _learn(self, flow: IncomingFlow, header: probe.Header, source: str, qpn: int) -> bool:
        try:
            flow.target = self.transport.target(source, qpn, header.qkey)
        except (ValueError, OSError):
            self.send_errors += 1
            return False
        flow.address, flow.qpn, flow.qkey, flow.sport = source, qpn, header.qkey, header.sport
        flow.trace_mask = header.trace_mask
        return True

    def _answer_stale(self, header: probe.Header, ack: bytearray, source: str, qpn: int, dscp: int) -> None:
        self.stale += 1
        left = self.transport.source_port(header.sport)
        probe.answer(ack, header, flags=probe.STALE, dscp=dscp & 0xFF, left=left, history=0)
        try:
            target = self.transport.target(source, qpn, header.qkey)
            self.transport.send(target, header.sport, header.dscp, ack, probe.SIZE, False)
        except (ValueError, OSError):
            self.send_errors += 1

    def _row(self, flow: IncomingFlow, key: tuple[int, int, int, int], window: int, now: int) -> ResponderRow:
        of = (key[0], key[1], key[2], window)
        table = self._windows.get(of)
        row = table.get(flow.index) if table is not None else None
        if row is None:
            row = ResponderRow(of, flow.index)
            if self._rows < MAX_ROWS:
                if table is None:
                    table = self._windows[of] = {}
                table[flow.index] = row
                self._rows += 1
                self._touched[of] = now
            else:
                self.overflow += 1
                row.dirty = True  # never to be reported
        flow.row = row
        flow.window = window
        return row

    # ------------------------------------------------------------ asking

    def totals(self, windows: Sequence[Window]) -> list[tuple[int, ...]]:
        """Rows of RESPONDER_COLUMNS of these windows: all that was counted in them."""
        return [row.totals() for window in windows for row in self._windows.get(window, {}).values()]

    def take(self, now: int) -> list[tuple[int, ...]]:
        """Rows of RESPONDER_COLUMNS: what was counted since the last call. Forgets what is old."""
        rows = [row.take() for row in self._dirty]
        self._dirty.clear()
        self._forget(now)
        return rows

    def _forget(self, now: int) -> None:
        limit = now - KEEP_NS
        for window in [w for w, seen in self._touched.items() if seen < limit]:
            del self._touched[window]
            self._rows -= len(self._windows.pop(window, ()))
        for key in [k for k, flow in self._flows.items() if flow.seen_ns < limit]:
            del self._flows[key]

    def flows(self) -> Iterator[IncomingFlow]:
        """The flows that were answered within the last minute."""
        return (flow for flow in self._flows.values() if flow.target is not None)
