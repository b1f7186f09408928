"""What both roles count, by flow and window, until a report takes it."""

from __future__ import annotations

from collections.abc import Iterable

from pingmesh.messages import PROBER_COLUMNS, RESPONDER_COLUMNS, pack_columns

_SHORT, _LONG = 0x7FFF, 0xFFFFFFFF


class ProberRow:
    """A prober's counts of one flow in one window since they were last taken; meanings as in PROBER_COLUMNS."""

    __slots__ = ("ack1", "ack2", "arrived", "excluded", "late", "lost", "rtt_max", "rtt_sum", "send_error", "sent")

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self.sent = self.arrived = self.ack1 = self.ack2 = self.lost = 0
        self.late = self.excluded = self.send_error = self.rtt_sum = self.rtt_max = 0

    def take(self) -> tuple[int, ...] | None:
        """The columns but the index, and start from zero; None if nothing happened."""
        counts = (
            self.sent,
            self.arrived,
            self.ack1,
            self.ack2,
            self.lost,
            self.late,
            self.excluded,
            self.send_error,
        )
        if not any(counts):
            return None
        out = (
            *(max(-_SHORT, min(_SHORT, c)) for c in counts),
            min(_LONG, self.rtt_sum // 100),
            min(_LONG, self.rtt_max // 100),
        )
        self._clear()
        return out


class ProberCounts:
    """Rows by (list version, window) and flow index."""

    def __init__(self) -> None:
        self._tables: dict[tuple[int, int], dict[int, ProberRow]] = {}

    def row(self, list_version: int, window: int, index: int) -> ProberRow:
        """The row of a flow in a window."""
        table = self._tables.setdefault((list_version, window), {})
        row = table.get(index)
        if row is None:
            row = table[index] = ProberRow()
        return row

    def windows(self) -> list[tuple[int, int]]:
        """The (list version, window) that have rows."""
        return list(self._tables)

    def take(self, list_version: int, window: int) -> bytes:
        """PROBER_COLUMNS of what happened in a window since it was last taken; empty if nothing."""
        taken = [
            (i, *c) for i, row in self._tables.get((list_version, window), {}).items() if (c := row.take()) is not None
        ]
        return pack_columns(PROBER_COLUMNS, list(zip(*taken, strict=True))) if taken else b""

    def forget(self, list_version: int, window: int) -> None:
        """No more amendments to this window will come."""
        self._tables.pop((list_version, window), None)


class ResponderRow:
    """A responder's counts of one flow in one of its prober's windows: totals, and what is not reported yet."""

    __slots__ = ("ack1", "ack2", "dirty", "index", "key", "mismatched", "received", "reported")

    def __init__(self, key: tuple[int, int, int, int], index: int) -> None:
        self.key = key
        """(source RNIC, source epoch, list version, window)."""
        self.index = index
        self.received = self.ack1 = self.ack2 = self.mismatched = 0
        self.reported = (0, 0, 0, 0)
        self.dirty = False

    def totals(self) -> tuple[int, ...]:
        """One row of RESPONDER_COLUMNS."""
        return (*self.key, self.index, self.received, self.ack1, self.ack2, self.mismatched)

    def take(self) -> tuple[int, ...]:
        """One row of RESPONDER_COLUMNS: what was not yet reported."""
        now = (self.received, self.ack1, self.ack2, self.mismatched)
        before, self.reported = self.reported, now
        self.dirty = False
        return (*self.key, self.index, *(a - b for a, b in zip(now, before, strict=True)))


def pack_responder(rows: Iterable[tuple[int, ...]]) -> bytes:
    """RESPONDER_COLUMNS of rows; empty if there are none."""
    clipped = [(*row[:5], *(min(_SHORT, c) for c in row[5:])) for row in rows]
    return pack_columns(RESPONDER_COLUMNS, list(zip(*clipped, strict=True))) if clipped else b""
