"""One window of five seconds of all flows as columns: what both ends have counted so far, and what came of it.

Windows are numbered by the analyzer's clock. Columns are (rows,), rows being those of `FlowRows`; pages that no flow of
the window touches take no memory.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pingmesh.analyzer.flow_rows import ACK, PROBE, FlowRows
from pingmesh.analyzer.table import Bools, Floats, Ints

SENT, ARRIVED, ACKS, ACKS2, EXCLUDED = range(5)
"""Columns of `Gathering.prober`: as in PROBER_COLUMNS, `ACKS` those of both kinds."""
FIRST_LOST, SECOND_LOST = SENT, ARRIVED
"""The same columns once a row is joined: losses of its one or two samples."""
RECEIVED, ACKS_SENT = range(2)
"""Columns of `Gathering.responder`."""
NOTHING, WAITING, SPLIT, TRIP = range(4)
"""States of a row: nothing came, waits for the other end, joined to two samples, joined to one."""

MOST = 0xFFFF


class Gathering:
    """What both ends counted. `start` and `epoch` are (slots,): when the window began for an RNIC, in our clock."""

    def __init__(self, rows: FlowRows) -> None:
        self._rows = rows
        n, slots = len(rows.used), len(rows.base)
        self.prober: npt.NDArray[np.int32] = np.zeros((n, 5), np.int32)
        self.rtt: Ints = np.zeros(n, np.int64)
        """Sum, in 100 ns."""
        self.responder: npt.NDArray[np.int32] = np.zeros((n, 2), np.int32)
        self.state: npt.NDArray[np.uint8] = np.zeros(n, np.uint8)
        self.start: Ints = np.zeros(slots, np.int64)
        self.epoch: Ints = np.full(slots, -1, np.int64)
        self.waiting: list[Ints] = []
        """Rows that came to wait; some may have been joined since."""

    def fit(self) -> None:
        """Make room for rows and slots that there were not when the window began."""
        n, slots = len(self._rows.used), len(self._rows.base)
        if n > len(self.state):
            self.prober = _longer(self.prober, n)
            self.rtt, self.state = _longer(self.rtt, n), _longer(self.state, n)
            self.responder = _longer(self.responder, n)
        if slots > len(self.start):
            self.start = _longer(self.start, slots)
            epoch = np.full(slots, -1, np.int64)
            epoch[: len(self.epoch)] = self.epoch
            self.epoch = epoch


class Clean:
    """Rows of which nothing was lost: counts of two one-way samples, or of one round trip (`trip`).

    `sums` and `flows` add them up by element, as far as their paths were known: packets, and rows.
    """

    def __init__(self, rows: FlowRows, elements: int) -> None:
        self._rows = rows
        n = len(rows.used)
        self.sent: npt.NDArray[np.uint16] = np.zeros(n, np.uint16)
        self.acks: npt.NDArray[np.uint16] = np.zeros(n, np.uint16)
        self.rtts: npt.NDArray[np.uint16] = np.zeros(n, np.uint16)
        self.rtt_ns: npt.NDArray[np.uint32] = np.zeros(n, np.uint32)
        self.trip: Bools = np.zeros(n, bool)
        self.summed: Bools = np.zeros((2, n), bool)
        self.start: Ints = np.zeros(len(rows.base), np.int64)
        self.first, self.last = 1 << 62, -(1 << 62)
        """Least and greatest start of a row."""
        self.sums: Floats = np.zeros(elements)
        self.flows: Floats = np.zeros(elements)
        self.fresh: list[Ints] = []
        self.hidden: tuple[Ints, Ints] = (np.empty(0, np.int64), np.empty(0, np.int64))
        """Rows, by direction, whose path was not known when they were last looked at."""
        self._looked = -1

    def fit(self) -> None:
        """Make room for rows and slots that there were not before."""
        n, slots = len(self._rows.used), len(self._rows.base)
        if n > len(self.sent):
            for name in ("sent", "acks", "rtts", "rtt_ns", "trip"):
                setattr(self, name, _longer(getattr(self, name), n))
            summed = np.zeros((2, n), bool)
            summed[:, : self.summed.shape[1]] = self.summed
            self.summed = summed
        if slots > len(self.start):
            self.start = _longer(self.start, slots)

    def packets(self, role: int, at: Ints) -> Ints:
        """Packets of rows in one direction: a round trip counts in both."""
        out: Ints = self.sent[at].astype(np.int64)
        if role == ACK:
            out = np.where(self.trip[at], out, self.acks[at])
        return out

    def add_up(self, elements: int, changes: int) -> None:
        """Bring the sums up to date: O(rows that are new, or whose path became known, x hops)."""
        if elements > len(self.sums):
            self.sums, self.flows = _longer(self.sums, elements), _longer(self.flows, elements)
        again = changes != self._looked
        if not self.fresh and not (again and (len(self.hidden[0]) or len(self.hidden[1]))):
            return
        new, self.fresh, self._looked = self.fresh, [], changes
        hidden = []
        for role in (PROBE, ACK):
            rows = np.concatenate((*new, self.hidden[role])) if again else np.concatenate(new)
            plain = self._rows.plain[role, rows]
            self._count(role, rows[plain], 1)
            self.summed[role, rows[plain]] = True
            rest = rows[~plain]
            hidden.append(rest if again else np.concatenate((self.hidden[role], rest)))
        self.hidden = hidden[0], hidden[1]

    def _count(self, role: int, rows: Ints, sign: int) -> None:
        packets, flows = self.by_element(role, rows, len(self.sums))
        self.sums += sign * packets
        self.flows += sign * flows

    def by_element(self, role: int, rows: Ints, elements: int) -> tuple[Floats, Floats]:
        """Packets, and rows with any, of some rows by element of the path in one direction. O(rows x hops)."""
        packets = self.packets(role, rows)
        rows, packets = rows[packets > 0], packets[packets > 0]
        sums, flows = np.zeros(elements), np.zeros(elements)
        for hop in range(self._rows.path.shape[2]):
            element = self._rows.path[role, rows, hop]
            there = element >= 0
            if not there.all():
                rows, packets, element = rows[there], packets[there], element[there]
            if not len(rows):
                break
            sums += np.bincount(element, weights=packets, minlength=elements)
            flows += np.bincount(element, minlength=elements)
        return sums, flows


def _longer(a: np.ndarray, n: int) -> np.ndarray:
    out = np.zeros((n, *a.shape[1:]), a.dtype)
    out[: len(a)] = a
    return out
