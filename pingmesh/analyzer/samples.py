"""Counts of both ends joined to one-way samples, as columns: a row a flow, a block of columns a window.

Flows of which nothing was lost stay columns and enter as sums; those with losses, corrections and confirmations are
single samples. The rule that joins is `counts.one_way`.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from pingmesh.analyzer.counts import ROUND_TRIP, ProberCounts, ResponderCounts, Sample
from pingmesh.analyzer.flows import ACK, PROBE, FlowBook
from pingmesh.analyzer.plain_join import GIVE_UP_NS, KEEP_NS, PlainJoin, WindowKey, amend
from pingmesh.analyzer.report_columns import (
    ProberTables,
    Raw,
    ResponderTable,
    prober_tables,
    responder_table,
)
from pingmesh.analyzer.table import Bools, Ints
from pingmesh.analyzer.waits import USUAL, Waits
from pingmesh.analyzer.windows import (
    ACKS,
    ACKS2,
    ACKS_SENT,
    ARRIVED,
    EXCLUDED,
    FIRST_LOST,
    MOST,
    NOTHING,
    RECEIVED,
    SECOND_LOST,
    SENT,
    SPLIT,
    TRIP,
    WAITING,
    Clean,
    Gathering,
)
from pingmesh.messages import PROBER_COLUMNS, RESPONDER_COLUMNS, WINDOW_NS, ProberRows, unpack_raw

__all__ = ["KEEP_NS", "ROUND_TRIP", "Joined", "Sample", "SampleStore"]

RELEASE_NS = KEEP_NS + 2 * GIVE_UP_NS
"""After a list is forgotten, samples of its flows are there for so long at most."""
AT_ONCE = 1 << 14
"""Tables that are read together: as many as fit into the processor's caches."""
UNPLACED_NS = 2 * GIVE_UP_NS
"""Responders' counts of lists and RNICs that we do not know yet are kept so long."""


@dataclass(slots=True, eq=False)
class Joined:
    """What one `take_in` brought: the single samples, and the rows of which nothing was lost, by window."""

    single: list[Sample] = field(default_factory=list)
    clean: list[tuple[Clean, Ints]] = field(default_factory=list)

    @property
    def has_loss(self) -> bool:
        """Whether a packet is missing."""
        return any(s.lost for s in self.single)

    @property
    def count(self) -> int:
        """Flows and windows joined."""
        return len(self.single) + sum(len(rows) for _, rows in self.clean)


_Key = tuple[int, int, int, int, int, int]
"""RNIC, epoch, list version, window, offset, and when it came."""


class SampleStore:
    """Samples of the last two minutes, and the windows that wait for the other end's report.

    Reports are kept as they come and read together by `take_in`: O(bytes), then O(rows) to join.
    """

    def __init__(self, flows: FlowBook, waits: Waits = USUAL) -> None:
        self.book = flows
        self._settle_ns = waits.settle_ns
        self.single: deque[Sample] = deque()
        """Samples with losses, of round trips on which packets are missing, corrections, and those of confirmations."""
        self.clean: dict[int, Clean] = {}
        """Everything else, by window."""
        self.not_before = 0
        """Windows that began earlier are left out: whose paths we did not know then, we cannot judge now."""
        self.mismatched: dict[str, int] = {}
        """Probes that arrived in another class than they left in, by source RNIC."""
        self._gathering: dict[int, Gathering] = {}
        self._plain = PlainJoin(flows, waits.settle_ns)
        self._probers: tuple[list[_Key], list[Raw]] = [], []
        self._responders: list[Raw] = []
        self._unplaced: deque[tuple[int, ResponderTable]] = deque()
        self._shift: Ints = np.full(0, _UNKNOWN, np.int64)
        self._retired: deque[tuple[int, int]] = deque()
        self._mark: npt.NDArray[np.int32] = np.zeros(0, np.int32)

    # ------------------------------------------------------------ taking in

    def add_prober(self, rows: ProberRows, offset: int, now: int) -> None:
        """The prober's rows of one window; `offset` turns its clock into ours. Raises BadMessageError."""
        self.add_report([rows], [unpack_raw(PROBER_COLUMNS, rows.columns)], (0, b""), offset, now)

    def add_responder(self, columns: bytes, now: int) -> None:
        """A responder's increments. Raises BadMessageError."""
        self.add_report([], [], unpack_raw(RESPONDER_COLUMNS, columns), 0, now)

    def add_report(
        self, prober: Sequence[ProberRows], raw: Sequence[Raw], responder: Raw, offset: int, now: int
    ) -> None:
        """A report's tables, unpacked already (`report_columns.read_report`)."""
        keys, tables = self._probers
        for rows, table in zip(prober, raw, strict=True):
            if table[0] and _is_usual(rows):
                keys.append((rows.rnic, rows.epoch, rows.list_version, rows.window, offset, now))
                tables.append(table)
        if responder[0]:
            self._responders.append(responder)
        if len(tables) >= AT_ONCE or len(self._responders) >= AT_ONCE:
            self._read(now)

    def _read(self, now: int) -> None:
        """Count what came."""
        if self._probers[0]:
            self._take_probers()
        if self._responders or self._unplaced:
            self._take_responders(now)

    def add(self, samples: Iterable[Sample]) -> None:
        """Samples made elsewhere, by a confirmation."""
        self.single.extend(samples)

    def _take_probers(self) -> None:
        (keys, tables), self._probers = self._probers, ([], [])
        number, epoch, version, window, offset, now = np.array(keys, np.int64).T
        slot = self.book.rows.slots_of(number, version)
        start = window * WINDOW_NS + offset
        window = window + self._shifted(slot, offset)
        use = (slot >= 0) & self._may_begin(slot, window, start, now)
        # An RNIC's tables of one window are counted in the order in which they came: what amends comes later.
        for at in _in_turns(np.flatnonzero(use), slot, window):
            for w in _values(window[at]):
                self._begin(w, at[window[at] == w], slot, epoch, start, keys, tables)

    def _begin(
        self, window: int, at: Ints, slot: Ints, epoch: Ints, start: Ints, keys: list[_Key], tables: list[Raw]
    ) -> None:
        g, mine = self._gather(window), slot[at]
        new = g.epoch[mine] < 0
        g.epoch[mine[new]] = epoch[at[new]]
        same = g.epoch[mine] == epoch[at]
        unstarted = same & (g.start[mine] == 0)
        g.start[mine[unstarted]] = start[at[unstarted]]
        for i in at[~same].tolist():
            self._plain_prober(keys[i][:4], tables[i], int(start[i]))
        kept = at[same]
        for t in prober_tables([tables[i] for i in kept.tolist()]):
            self._count_sent(window, g, slot[kept], t)

    def _shifted(self, slot: Ints, offset: Ints) -> Ints:
        """Windows by which the clocks of the slots' hosts are off ours; it stays unless it is clearly another."""
        shifts, in_windows = self._shifts(), offset / WINDOW_NS
        if not len(shifts):
            return np.zeros(len(slot), np.int64)
        other = (slot >= 0) & (np.abs(in_windows - shifts[slot]) > 0.75)
        shifts[slot[other]] = np.round(in_windows[other]).astype(np.int64)
        return shifts[slot]

    def _may_begin(self, slot: Ints, window: Ints, start: Ints, now: Ints) -> Bools:
        """Which tables are of a window that is under way, or of one that may begin."""
        # From before an outage: history, not evidence for now.
        may: Bools = (start >= np.maximum(self.not_before, now - KEEP_NS)) & (start <= now + WINDOW_NS)
        for w in _values(window[~may]):
            g = self._gathering.get(w)
            if g is not None:
                g.fit()
                may |= (window == w) & (slot >= 0) & (g.start[slot] != 0)
        return may

    def _shifts(self) -> Ints:
        n = len(self.book.rows.base)
        if n > len(self._shift):
            more = np.full(n, _UNKNOWN, np.int64)
            more[: len(self._shift)] = self._shift
            self._shift = more
        return self._shift

    def _gather(self, window: int) -> Gathering:
        g = self._gathering.get(window)
        if g is None:
            g = self._gathering[window] = Gathering(self.book.rows)
        g.fit()
        return g

    def _count_sent(self, window: int, g: Gathering, slots: Ints, t: ProberTables) -> None:
        book = self.book.rows
        slot = slots[t.of]
        inside = t.index < book.span[slot][:, None]
        row = np.where(inside, book.base[slot][:, None] + t.index, 0)
        use = inside & book.used[row]
        values = np.empty((*row.shape, 5), np.int32)
        for column, counts in ((SENT, t.sent), (ARRIVED, t.arrived), (ACKS2, t.ack2), (EXCLUDED, t.excluded)):
            values[:, :, column] = counts
        np.add(values[:, :, ACKS2], t.ack1, out=values[:, :, ACKS])
        row, values, rtt = row.ravel(), values.reshape(-1, 5), t.rtt_sum.astype(np.int64).ravel()
        if not use.all():
            used = use.ravel()
            row, values, rtt = row[used], values[used], rtt[used]
        for part in self._without_doubles(row):
            self._enter(window, g, row[part], values[part], rtt[part])

    def _without_doubles(self, row: Ints) -> Sequence[Ints | slice]:
        """Parts of rows, one after the other, none with a row twice: nearly always everything at once."""
        if len(self._mark) < len(self.book.rows.used):
            self._mark = np.zeros(len(self.book.rows.used), np.int32)
        places = np.arange(len(row), dtype=np.int32)
        self._mark[row] = places
        if (self._mark[row] == places).all():
            return [slice(None)]
        seen: Counter[int] = Counter()
        turn = np.empty(len(row), np.int64)
        for i, r in enumerate(row.tolist()):
            turn[i] = seen[r]
            seen[r] += 1
        return [np.flatnonzero(turn == n) for n in range(int(turn.max()) + 1)]

    def _enter(self, window: int, g: Gathering, row: Ints, values: np.ndarray, rtt: Ints) -> None:
        state = g.state[row]
        new = (state == NOTHING) & ((values[:, SENT] > 0) | (values[:, EXCLUDED] > 0))
        if new.all():
            g.prober[row], g.rtt[row], g.state[row] = values, rtt, WAITING
            g.waiting.append(row)
            return
        more = state == WAITING
        g.prober[row[more]] += values[more]
        g.rtt[row[more]] += rtt[more]
        g.prober[row[new]], g.rtt[row[new]], g.state[row[new]] = values[new], rtt[new], WAITING
        g.waiting.append(row[new])
        for i in np.flatnonzero(state > WAITING).tolist():
            self.single.extend(amend(self._losses_of(g, int(row[i])), _late(values[i])))

    def _losses_of(self, g: Gathering, row: int) -> list[Sample]:
        """The samples that a row was joined to, as far as their losses go."""
        flow = self.book.flow(row)
        start = int(g.start[self.book.rows.slot[row]])
        first, second = int(g.prober[row, FIRST_LOST]), int(g.prober[row, SECOND_LOST])
        if g.state[row] == TRIP:
            return [Sample(start, start + WINDOW_NS, flow, flow.cls_name, ROUND_TRIP, 0, first)]
        return [
            Sample(start, start + WINDOW_NS, flow, flow.cls_name, role, 0, lost)
            for role, lost in ((PROBE, first), (ACK, second))
        ]

    def _plain_prober(self, key: WindowKey, raw: Raw, start: int) -> None:
        for t in prober_tables([raw]):
            columns = (t.index, t.sent, t.arrived, t.ack1, t.ack2, t.excluded, t.rtt_sum)
            for index, sent, arrived, ack1, ack2, excluded, rtt in zip(*(c[0].tolist() for c in columns), strict=True):
                counts = ProberCounts(sent, arrived, ack1, ack2, excluded=excluded, rtt_sum=rtt)
                self.single.extend(self._plain.add_prober(key, start, index, counts))

    # ------------------------------------------------------------ responders

    def _take_responders(self, now: int) -> None:
        taken, self._responders = self._responders, []
        waiting, self._unplaced = self._unplaced, deque()
        for seen, table in waiting:
            if now - seen <= UNPLACED_NS:
                self._place(table, seen, now)
        if taken:
            table = responder_table(taken)
            wrong = np.flatnonzero(table.mismatched > 0)
            for rnic, n in zip(table.source[wrong].tolist(), table.mismatched[wrong].tolist(), strict=True):
                if (name := self.book.rnic_names.get(rnic)) is not None:
                    self.mismatched[name] = self.mismatched.get(name, 0) + n
            self._place(table, now, now)

    def _place(self, table: ResponderTable, seen: int, now: int) -> None:
        """Count rows of lists that are known, in the windows that their probers began; keep the others for later."""
        book, shifts = self.book.rows, self._shifts()
        slot = book.slots_of(table.source, table.version)
        shift = np.where(slot >= 0, shifts[slot], _UNKNOWN) if len(shifts) else np.full(len(slot), _UNKNOWN)
        known = shift != _UNKNOWN
        if not known.all():
            later = table.take(~known)
            self._unplaced.append((seen, later.take(later.window < _CONFIRM)))
            table, slot, shift = table.take(known), slot[known], shift[known]
        if not len(table):
            return
        window = table.window + shift
        inside = table.index < book.span[slot]
        row = np.where(inside, book.base[slot] + table.index, 0)
        row = np.where(inside & book.used[row], row, -1)
        least = (now - KEEP_NS) // WINDOW_NS - 1
        for w in _values(window):
            if least <= w <= now // WINDOW_NS + 2:
                self._count_received(w, np.flatnonzero(window == w), table, slot, row, now)

    def _count_received(self, window: int, at: Ints, t: ResponderTable, slot: Ints, row: Ints, now: int) -> None:
        g = self._gather(window)
        mine, epoch, rows = slot[at], t.epoch[at], row[at]
        new = g.epoch[mine] < 0
        if new.any():
            g.epoch[mine[new]] = epoch[new]
        same = g.epoch[mine] == epoch
        good = same & (rows >= 0)
        if not good.all():
            for i in at[~same].tolist():
                key = (int(t.source[i]), int(t.epoch[i]), int(t.version[i]), int(t.window[i]))
                counts = ResponderCounts(int(t.received[i]), int(t.ack1[i]), int(t.ack2[i]))
                self._plain.add_responder(key, int(t.index[i]), counts, now)
            at, rows = at[good], rows[good]
        np.add.at(g.responder[:, RECEIVED], rows, t.received[at])
        np.add.at(g.responder[:, ACKS_SENT], rows, t.ack1[at] + t.ack2[at])

    # ------------------------------------------------------------ joining

    def take_in(self, now: int, covered_until: Callable[[str], int]) -> Joined:
        """Read what came and join the windows that both ends have reported.

        `covered_until(host)`: until when (our clock) a host's responder reports are complete.
        """
        out = Joined()
        self._read(now)
        for slot in self.book.rows.retired:
            self._retired.append((now, slot))
        self.book.rows.retired.clear()
        self._join(now, covered_until, out)
        plain = self._plain.join(now, covered_until)
        out.single += plain
        self.single.extend(out.single)
        self._drop(now)
        return out

    def _join(self, now: int, covered_until: Callable[[str], int], out: Joined) -> None:
        if not any(g.waiting for g in self._gathering.values()):
            self._give_up(now)
            return
        book = self.book.rows
        covered = np.array([covered_until(h) for h in self.book.hosts.names], np.int64)
        listed = self._is_listed()
        for window, g in self._gathering.items():
            if not g.waiting:
                continue
            g.fit()
            row = g.waiting[0] if len(g.waiting) == 1 else np.concatenate(g.waiting)
            slot = book.slot[row]
            end = g.start[slot] + WINDOW_NS
            heard = covered[book.dst_host[row]] >= end + self._settle_ns
            known = book.used[row] & listed[slot]
            done = known & (heard | (now - end > GIVE_UP_NS))
            rest = known & ~done
            g.waiting = [row[rest]] if rest.any() else []
            g.state[row[~known]] = NOTHING
            if done.any():
                self._join_rows(window, g, row[done], heard[done], out)
        self._give_up(now)

    def _is_listed(self) -> Bools:
        """Slots whose list is known, (slots,)."""
        listed = np.zeros(len(self.book.rows.base), bool)
        listed[list(self.book.rows.of_key.values())] = True
        return listed

    def _join_rows(self, window: int, g: Gathering, row: Ints, heard: Bools, out: Joined) -> None:
        p, r, rtt_sum = g.prober[row], g.responder[row], g.rtt[row]
        sent, arrived, acks, excluded = (np.ascontiguousarray(p[:, c]) for c in (SENT, ARRIVED, ACKS, EXCLUDED))
        received = np.ascontiguousarray(r[:, RECEIVED])
        trip = received < arrived
        if not heard.all():
            trip |= ~heard
        acks_sent = np.maximum(r[:, ACKS_SENT] - 2 * excluded, acks)
        first = np.maximum(0, sent - np.where(trip, arrived, received))
        second = np.where(trip, 0, acks_sent - acks)
        rtts = np.where(rtt_sum > 0, p[:, ACKS2], 0)
        # Exact: all numbers are below 2^53.
        rtt = np.where(rtts > 0, np.floor(rtt_sum * 100.0 / np.maximum(rtts, 1)), 0.0).astype(np.int64)
        clean = self.clean.get(window)
        if clean is None:
            clean = self.clean[window] = Clean(self.book.rows, len(self.book.elements))
        clean.fit()
        plain = (first == 0) & (second == 0) & (sent > 0) & (clean.sent[row] == 0)
        plain &= (sent <= MOST) & (acks_sent <= MOST) & (rtts <= MOST) & (rtts >= 0) & (rtt <= 0xFFFFFFFF)
        at = row[plain]
        clean.sent[at], clean.acks[at], clean.trip[at] = sent[plain], acks_sent[plain], trip[plain]
        clean.rtts[at], clean.rtt_ns[at] = rtts[plain], rtt[plain]
        slots = self.book.rows.slot[at]
        starts = g.start[slots]
        clean.start[slots] = starts
        if len(at):
            clean.first, clean.last = min(clean.first, int(starts.min())), max(clean.last, int(starts.max()))
            clean.fresh.append(at)
            out.clean.append((clean, at))
        for i in np.flatnonzero(~plain).tolist():
            flow = self.book.flow(int(row[i]))
            start = int(g.start[self.book.rows.slot[row[i]]])
            s = Sample(
                start,
                start + WINDOW_NS,
                flow,
                flow.cls_name,
                ROUND_TRIP if trip[i] else PROBE,
                int(sent[i]),
                int(first[i]),
                int(rtt[i]),
                int(rtts[i]),
            )
            pair = (
                [s]
                if trip[i]
                else [s, replace(s, role=ACK, sent=int(acks_sent[i]), lost=int(second[i]), rtt_ns=0, rtts=0)]
            )
            out.single += [s for s in pair if s.sent]
        g.prober[row, FIRST_LOST], g.prober[row, SECOND_LOST] = first, second
        g.state[row] = np.where(trip, TRIP, SPLIT)

    def _give_up(self, now: int) -> None:
        for window in [w for w, g in self._gathering.items() if not g.waiting]:
            # Begun with the greatest offset that still rounds to this window, it ended so long ago.
            if now - (window + 2) * WINDOW_NS > GIVE_UP_NS + WINDOW_NS:
                del self._gathering[window]

    def _drop(self, now: int) -> None:
        while self.single and self.single[0].end < now - KEEP_NS:
            self.single.popleft()
        for window in [w for w, c in self.clean.items() if c.last + WINDOW_NS < now - KEEP_NS]:
            del self.clean[window]
        while self._retired and now - self._retired[0][0] > RELEASE_NS:
            self.book.release(self._retired.popleft()[1])

    # ------------------------------------------------------------ as single samples

    def join(self, now: int, covered_until: Callable[[str], int]) -> list[Sample]:
        """`take_in`, with every new sample as an object. O(samples)."""
        joined = self.take_in(now, covered_until)
        return [s for clean, rows in joined.clean for s in self.samples_of(clean, rows)] + joined.single

    def samples_of(self, clean: Clean, rows: Ints) -> Iterator[Sample]:
        """The samples of some rows of a window, the two of a row one after the other."""
        slots = self.book.rows.slot[rows]
        columns = (rows, clean.start[slots], clean.sent[rows], clean.acks[rows], clean.trip[rows])
        timed = (clean.rtts[rows], clean.rtt_ns[rows])
        for row, start, sent, acks, trip, rtts, rtt in zip(*(c.tolist() for c in (*columns, *timed)), strict=True):
            if not sent:
                continue
            flow = self.book.flow(row)
            role = ROUND_TRIP if trip else PROBE
            yield Sample(start, start + WINDOW_NS, flow, flow.cls_name, role, sent, 0, rtt, rtts)
            if not trip and acks:
                yield Sample(start, start + WINDOW_NS, flow, flow.cls_name, ACK, acks, 0)

    @property
    def samples(self) -> list[Sample]:
        """Every sample kept, as an object. O(samples)."""
        return [*self.single, *(s for c in self.clean.values() for s in self.samples_of(c, np.flatnonzero(c.sent)))]

    def take_samples(self, joined: Joined) -> list[Sample]:
        """What `take_in` brought and all corrections, as objects; nothing is kept."""
        out = [*self.single, *(s for clean, rows in joined.clean for s in self.samples_of(clean, rows))]
        self.single.clear()
        self.clean.clear()
        return out

    def has_any(self, since: int) -> bool:
        """Whether a sample ended since a time."""
        return any(c.last + WINDOW_NS > since for c in self.clean.values()) or any(s.end > since for s in self.single)

    def state(self) -> tuple[object, ...]:
        """What the store holds, for comparing: counters of what came, and the single samples."""
        held = Counter(
            {
                "probers": len(self._probers[0]),
                "responders": len(self._responders),
                "gathering": sum(int(g.state.sum()) for g in self._gathering.values()),
                "clean": sum(int(c.sent.sum()) for c in self.clean.values()),
            }
        )
        return (sorted(held.items()), list(self.single), self.mismatched)


_UNKNOWN = -(1 << 40)
_CONFIRM = 0x8000_0000


def _is_usual(rows: ProberRows) -> bool:
    """Whether numbers are such as agents make; confirmations' windows are none of a report."""
    return (
        0 <= rows.rnic < 1 << 32
        and 0 <= rows.epoch < 1 << 62
        and 0 <= rows.list_version < 1 << 32
        and 0 <= rows.window < _CONFIRM
    )


def _values(numbers: Ints) -> list[int]:
    """The numbers that occur; quick where they lie close together, as windows do."""
    if not len(numbers):
        return []
    least, most = int(numbers.min()), int(numbers.max())
    if most - least > 1 << 10:
        return [int(n) for n in np.unique(numbers)]
    return [least + int(n) for n in np.flatnonzero(np.bincount(numbers - least))]


def _in_turns(at: Ints, slot: Ints, window: Ints) -> list[Ints]:
    """`at` in parts, one after the other, none of which has a slot and window twice."""
    key = window[at] << 24 | slot[at]
    unique, where = np.unique(key, return_inverse=True)
    if len(unique) == len(at):
        return [at]
    order = np.argsort(where, kind="stable")
    first = np.searchsorted(where[order], np.arange(len(unique)))
    turn = np.empty(len(at), np.int64)
    turn[order] = np.arange(len(at)) - first[where[order]]
    return [at[turn == n] for n in range(int(turn.max()) + 1)]


def _late(values: np.ndarray) -> ProberCounts:
    """An amendment's counts, as far as they matter."""
    return ProberCounts(arrived=int(values[ARRIVED]), ack1=int(values[ACKS]))
