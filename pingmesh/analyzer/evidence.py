"""What speaks of the fabric since a time: sums of the flows of which nothing was lost, and the others one by one.

A flow that lost something, that was probed in a confirmation or whose path is not known by one trace is *apart*: all
its samples are objects, as few as these are. Of the others only sums by element are kept, window by window; they are
all that the likelihood of a clean flow of known path needs (`hazards`). So a look costs what is new, what was lost
and the number of elements, not the number of flows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from pingmesh.analyzer.components import Components
from pingmesh.analyzer.counts import ROUND_TRIP, Sample
from pingmesh.analyzer.flow_rows import ACK, PROBE, Names
from pingmesh.analyzer.flows import FlowBook, PathSet
from pingmesh.analyzer.host_rules import Reached
from pingmesh.analyzer.hosts import Host
from pingmesh.analyzer.observe import Sums, Walked, crosses, loss_observations, totals, walked_since
from pingmesh.analyzer.samples import SampleStore
from pingmesh.analyzer.symptoms import Crossing, crossings
from pingmesh.analyzer.table import Bools, Floats, Ints, Table, table_of
from pingmesh.analyzer.windows import Clean
from pingmesh.messages import WINDOW_NS

MOST_PATHS = 60_000
"""Possible paths of flows of unknown path that are looked at one by one; of more flows, only what their ends tell is
used."""
MOST_MOVED = 30_000


class Numbers:
    """The components' numbers of elements, by the flow book's; elements of no component get numbers above those."""

    def __init__(self, components: Components) -> None:
        self.index = dict(components.index)
        self._of = np.empty(0, np.int64)

    def of(self, elements: Names) -> Ints:
        """The number of each of the book's elements. O(elements that are new)."""
        more = [self.index.setdefault(e, len(self.index)) for e in elements.names[len(self._of) :]]
        if more:
            self._of = np.concatenate((self._of, np.array(more, np.int64)))
        return self._of


@dataclass(slots=True, eq=False)
class Span:
    """One window's part: rows that are not to be used, and those of unknown path."""

    clean: Clean
    left_out: Ints
    """Rows of ends that are excused."""
    partly: Bools | None
    """Rows that began in time, where not all did, (rows,)."""

    def counts(self, rows: Ints) -> Bools:
        """Which of some rows are evidence."""
        good = ~np.isin(rows, self.left_out) if len(self.left_out) else np.ones(len(rows), bool)
        return good if self.partly is None else good & self.partly[rows]

    def keep(self, rows: Ints) -> Ints:
        """Those of some rows that are evidence."""
        return rows if not len(self.left_out) and self.partly is None else rows[self.counts(rows)]


@dataclass(slots=True)
class Moment:
    """Packets that crossed a component in a round of confirmation, or in a window."""

    confirmed: bool
    sent: int = 0
    lost: int = 0
    last_lost_ns: int = 0
    """End of the last of its samples with a loss."""


@dataclass(slots=True, eq=False)
class Evidence:
    """Evidence since a time. `single` are samples that are objects anyway."""

    store: SampleStore
    spans: list[Span]
    single: list[Sample]
    _apart: list[Sample] | None = None
    _rows_apart: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    _untraced: dict[int, tuple[Ints, Ints]] = field(default_factory=dict)
    _sums: Sums | None = None
    _ways: list[tuple[Sample, PathSet]] | None = None

    @property
    def has_loss(self) -> bool:
        """Whether anything is missing, corrections taken into account."""
        return any(s.lost > 0 for s in self.single) and any(lost for _, lost in self.sums.values())

    @property
    def book(self) -> FlowBook:
        """Whose rows these are."""
        return self.store.book

    # ------------------------------------------------------------ one by one

    @property
    def apart(self) -> list[Sample]:
        """All samples of the flows that are looked at one by one."""
        if self._apart is None:
            rows = {row for s in self.single if (row := self.book.row(s.flow)) is not None}
            self._rows_apart = np.array(sorted(rows), np.int64)
            self._apart = list(self.single)
            self._apart += self._clean_samples()
            self._apart += self._hidden_samples()
        return self._apart

    def _clean_samples(self) -> Iterator[Sample]:
        """What was not lost of the flows that are looked at one by one: where their paths do not change, all in one."""
        r, rows = self.book.rows, self._rows_apart
        settled = r.plain[PROBE, rows] & r.plain[ACK, rows]
        for span in self.spans:
            yield from self.store.samples_of(span.clean, span.keep(rows[~settled]))
        rows = rows[settled]
        sent = np.zeros((3, len(rows)), np.int64)
        for span in self.spans:
            c, good = span.clean, span.counts(rows)
            trip = c.trip[rows]
            sent[ROUND_TRIP] += np.where(good & trip, c.sent[rows], 0)
            sent[PROBE] += np.where(good & ~trip, c.sent[rows], 0)
            sent[ACK] += np.where(good & ~trip, c.acks[rows], 0)
        for i, row in enumerate(rows.tolist()):
            flow = self.book.flow(row)
            for role in (PROBE, ACK, ROUND_TRIP):
                if sent[role, i]:
                    yield Sample(0, 0, flow, flow.cls_name, role, int(sent[role, i]), 0)

    def _hidden_samples(self) -> Iterator[Sample]:
        """Samples whose packets are in no sum: those of directions without one known path."""
        for role in (PROBE, ACK):
            unknown, packets = self._unknown(role)
            for row, sent in zip(unknown.tolist(), packets.tolist(), strict=True) if self._few_unknown else ():
                flow = self.book.flow(row)
                yield Sample(0, 0, flow, flow.cls_name, role, sent, 0)  # whenever it was: any of the same paths
            for span in self.spans:
                rows = span.keep(span.clean.hidden[role])
                rows = rows[self.book.rows.traced[role, rows] & ~np.isin(rows, self._rows_apart)]
                for s in self.store.samples_of(span.clean, rows):
                    if s.role == role:
                        yield s
                    elif s.role == ROUND_TRIP:
                        # Each way by itself: the other may be known, and in the sums.
                        yield replace(s, role=role)

    def _unknown(self, role: int) -> tuple[Ints, Ints]:
        """Rows that were never traced in a direction, and their packets. O(rows)."""
        if role not in self._untraced:
            sent = np.zeros(len(self.book.rows.used), np.int64)
            for span in self.spans:
                rows = span.keep(span.clean.hidden[role])
                sent[rows] += span.clean.packets(role, rows)
            sent[self._rows_apart] = 0
            rows = np.flatnonzero(sent)
            rows = rows[~self.book.rows.traced[role, rows]]
            self._untraced[role] = rows, sent[rows]
        return self._untraced[role]

    @property
    def _few_unknown(self) -> bool:
        """Whether the flows of unknown path are few enough for one by one."""
        rows = [self._unknown(role)[0] for role in (PROBE, ACK)]
        some = [row for part in rows for row in part[:: max(1, len(part) // 8)].tolist()]
        paths = sum(len(self.book.row_paths_at(row, PROBE, 0)) for row in some)
        return sum(map(len, rows)) * paths <= MOST_PATHS * len(some)

    @property
    def sums(self) -> Sums:
        """(sent, lost) of what is looked at one by one, by flow, direction, class and paths."""
        if self._sums is None:
            self._sums = totals(self.book, self.apart)
        return self._sums

    # ------------------------------------------------------------ as sums

    def clean_sums(self) -> tuple[Floats, Floats]:
        """Packets by element, and flows, of all that is not looked at one by one.

        A flow that was probed in several windows counts once: the window with most of them counts. O(elements x windows
        + rows left out x hops).
        """
        apart = self.apart
        del apart
        n = len(self.book.elements)
        sums, flows = np.zeros(n), np.zeros(n)
        for span in self.spans:
            c = span.clean
            packets, rows = c.sums.copy(), c.flows.copy()
            for role in (PROBE, ACK):
                out = self._excluded(span, role)
                if len(out):
                    less, fewer = c.by_element(role, out, len(packets))
                    packets, rows = packets - less, rows - fewer
            sums[: len(packets)] += packets
            flows[: len(rows)] = np.maximum(flows[: len(rows)], rows)
        return np.maximum(sums, 0.0), np.maximum(flows, 0.0)

    def _excluded(self, span: Span, role: int) -> Ints:
        """Rows of a window that are in its sums and should not be."""
        rows = [span.left_out, self._rows_apart]
        if span.partly is not None:
            rows.append(np.flatnonzero(~span.partly))
        out = np.unique(np.concatenate(rows))
        out = out[out < len(span.clean.sent)]
        summed: Ints = out[span.clean.summed[role, out]]
        return summed

    def table(self, numbers: Numbers) -> Table:
        """Everything as the localiser takes it: a row of one element for each sum, then the flows one by one."""
        rest = table_of(loss_observations(self.sums), numbers.index)
        sums, flows = self._with_ends(*self.clean_sums())
        element = np.flatnonzero(sums)
        number = numbers.of(self.book.elements)[element]
        k = len(element)
        return Table(
            elements=len(numbers.index),
            path_ptr=np.concatenate((np.arange(k), k + rest.path_ptr)),
            path_elements=np.concatenate((number, rest.path_elements)),
            set_ptr=np.concatenate((np.arange(k), k + rest.set_ptr)),
            row_set=np.concatenate((np.arange(k), k + rest.row_set)),
            sent=np.concatenate((sums[element], rest.sent)),
            lost=np.concatenate((np.zeros(k), rest.lost)),
            flows=np.concatenate((flows[element], np.ones(rest.rows))),
        )

    def _with_ends(self, sums: Floats, flows: Floats) -> tuple[Floats, Floats]:
        """Where flows of unknown path are too many for one by one, they speak for the RNICs at their ends."""
        if self._few_unknown:
            return sums, flows
        tx, rx = self.book.ends()
        n = len(self.book.elements)
        sums, flows = np.append(sums, np.zeros(n - len(sums))), np.append(flows, np.zeros(n - len(flows)))
        r = self.book.rows
        for role in (PROBE, ACK):
            rows, packets = self._unknown(role)
            ends = (tx[r.src[rows]], rx[r.dst[rows]]) if role == PROBE else (tx[r.dst[rows]], rx[r.src[rows]])
            for end in ends:
                there = end >= 0
                sums += np.bincount(end[there], weights=packets[there].astype(np.float64), minlength=n)
                flows += np.bincount(end[there], minlength=n)
        return sums, flows

    # ------------------------------------------------------------ what crosses a component

    def crossings(self, elements: frozenset[str]) -> list[Crossing]:
        """Flows, directions and classes whose every possible path crosses one of the elements. O(rows + those)."""
        found = crossings(self.sums, elements)
        book, r = self.book, self.book.rows
        for role in (PROBE, ACK):
            rows = np.setdiff1d(book.crossing(role, elements), self._rows_apart)
            sent = np.zeros(len(rows), np.int64)
            for span in self.spans:
                at = np.flatnonzero(rows < len(span.clean.sent))
                at = at[span.clean.summed[role, rows[at]]]
                if len(span.left_out) or span.partly is not None:
                    at = at[np.isin(rows[at], span.keep(rows[at]))]
                sent[at] += span.clean.packets(role, rows[at])
            for row, n in zip(rows[sent > 0].tolist(), sent[sent > 0].tolist(), strict=True):
                flow = book.flow(row)
                found.append(
                    Crossing(flow, role, book.class_names.names[r.cls_name[row]], book.row_paths_at(row, role, 0), n, 0)
                )
        return found

    def moments(self, elements: frozenset[str]) -> list[Moment]:
        """What crossed a component in each confirmation, and what did in each window of flows that lost packets there.

        In order of time. O(single samples x hops).
        """
        out: dict[tuple[int, bool], Moment] = {}
        if self._ways is None:
            one_way = (s for s in self.single if s.role != ROUND_TRIP)
            self._ways = [(s, self.book.paths_at(s.flow, s.role, s.start)) for s in one_way]
        for s, paths in self._ways:
            if crosses(paths, elements):
                at = s.start if s.confirmed else s.start // WINDOW_NS * WINDOW_NS
                m = out.setdefault((at, s.confirmed), Moment(s.confirmed))
                m.sent += s.sent
                m.lost += s.lost
                if s.lost > 0:
                    m.last_lost_ns = max(m.last_lost_ns, s.end)
        return [m for _, m in sorted(out.items(), key=lambda i: i[0])]

    def rtts_us(self, most: int = 1 << 20) -> Floats:
        """Mean round trips of flows and windows in microseconds; of more than `most`, evenly chosen ones."""
        parts = [np.array([s.rtt_ns for s in self.single if s.rtts], np.float64)]
        for span in self.spans:
            rows = np.flatnonzero(span.clean.rtts)
            rows = span.keep(rows[:: max(1, len(rows) * len(self.spans) // most)])
            parts.append(span.clean.rtt_ns[rows].astype(np.float64))
        return np.sort(np.concatenate(parts)) / 1000


def evidence_since(
    store: SampleStore, hosts: Iterable[Host], since: int, margin: int, dark: Collection[str]
) -> Evidence:
    """Samples since a time that speak of the fabric: no end was silent, stalled, gone, new or without link.

    Windows of the lists' own probes may have begun by `margin` earlier.
    """
    excused = {h.name: h for h in hosts if h.excused or h.dark}
    single = [
        s
        for s in store.single
        if s.start >= (since if s.confirmed else since - margin)
        and s.flow.src not in dark
        and s.flow.dst not in dark
        and not (excused and _is_excused(s, excused))
    ]
    spans = []
    for clean in store.clean.values():
        if clean.last < since - margin:
            continue
        clean.fit()
        clean.add_up(len(store.book.elements), store.book.changes)
        partly = None
        if clean.first < since - margin:
            began = clean.start[store.book.rows.slot[: len(clean.sent)]] >= since - margin
            partly = np.asarray(began)
        spans.append(Span(clean, _left_out(store.book, clean, excused, dark), partly))
    return Evidence(store, spans, single)


def _is_excused(s: Sample, excused: dict[str, Host]) -> bool:
    for name in (s.flow.src, s.flow.dst):
        host, device = name.split("/")
        h = excused.get(host)
        if h is not None and (h.is_excused(s.start, s.end) or h.was_dark(device, s.start, s.end)):
            return True
    return False


def _left_out(book: FlowBook, clean: Clean, excused: dict[str, Host], dark: Collection[str]) -> Ints:
    """Rows of a window whose RNICs or hosts are excused for it. O(rows) if there are any."""
    start, end = clean.first, clean.last + WINDOW_NS
    rnics = [n for name in dark if (n := book.rnics.number.get(name)) is not None]
    bad_hosts = []
    for name, h in excused.items():
        number = book.hosts.number.get(name)
        if number is None:
            continue
        if h.is_excused(start, end):
            bad_hosts.append(number)
        elif h.dark:
            names = {f"{name}/{device}" for device, _, _ in h.dark if h.was_dark(device, start, end)}
            rnics += [n for r in names if (n := book.rnics.number.get(r)) is not None]
    if not rnics and not bad_hosts:
        return np.empty(0, np.int64)
    r, n = book.rows, len(clean.sent)
    bad_host, bad_rnic = np.zeros(len(book.hosts), bool), np.zeros(len(book.rnics), bool)
    bad_host[bad_hosts] = bad_rnic[rnics] = True
    # Rows that never were used name the RNIC and host 0: they have no counts either.
    bad = bad_host[r.src_host[:n]] | bad_host[r.dst_host[:n]] | bad_rnic[r.src[:n]] | bad_rnic[r.dst[:n]]
    return np.flatnonzero(bad & (clean.sent > 0))


def reaching(store: SampleStore, since: int) -> Reached:
    """Looks up the samples of probes, and of round trips, that were sent to a host since a time. O(rows) a host."""

    def of(host: str) -> list[Sample]:
        out = [s for s in store.single if s.start >= since and s.role != ACK and s.flow.dst_host == host]
        number = store.book.hosts.number.get(host)
        if number is not None:
            r = store.book.rows
            rows = np.flatnonzero(r.used[: r.rows] & (r.dst_host[: r.rows] == number))
            for c in store.clean.values():
                if c.last >= since:
                    c.fit()
                    out += [s for s in store.samples_of(c, rows) if s.start >= since and s.role != ACK]
        return out

    return of


def walked(store: SampleStore, since: int, elements: frozenset[str], slow_ns: int) -> Walked:
    """Sums of the one-way samples that began since a time and whose tuples, as last seen, cross one of the elements.

    Tuples that have come back to a component speak for it at once. O(rows x hops).
    """
    book, r = store.book, store.book.rows
    out = walked_since(book, (s for s in store.single if s.start >= since), elements, slow_ns)
    sent, delayed, moved = out.sent, out.delayed, list[Sample]()
    for role in (PROBE, ACK):
        crossing = book.crossing(role, elements)
        other = np.flatnonzero(r.used[: r.rows] & ~r.plain[role, : r.rows])
        for clean in store.clean.values():
            if clean.last < since:
                continue
            clean.fit()
            rows = crossing[crossing < len(clean.sent)]
            rows = rows[~clean.trip[rows] & (clean.start[r.slot[rows]] >= since)]
            sent += int(clean.packets(role, rows).sum())
            if role == PROBE:
                delayed += int(((clean.rtt_ns[rows] > slow_ns) & (clean.sent[rows] > 0)).sum())
            if len(other) <= MOST_MOVED:
                moved += [s for s in store.samples_of(clean, other) if s.role == role and s.start >= since]
    more = walked_since(book, moved, elements, slow_ns)
    return Walked(sent + more.sent, max(out.last_lost, more.last_lost), delayed + more.delayed)
