"""Flows as columns: one row a list entry, in ranges that belong to lists, and the path of each direction."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pingmesh.analyzer.table import Bools, Ints

PROBE, ACK = 0, 1

MOST_INDEX = 0xFFFF
"""Reports have no room for more."""
MOST_NUMBER = 1 << 22
"""RNIC numbers of the registry; lists of others are of no fabric that we could watch."""
_STEP = 8

Small = npt.NDArray[np.int32]


class Names:
    """Numbers for names, in the order in which they came."""

    def __init__(self) -> None:
        self.number: dict[str, int] = {}
        self.names: list[str] = []

    def __len__(self) -> int:
        return len(self.names)

    def of(self, name: str) -> int:
        """The number of a name, a new one at first sight."""
        number = self.number.get(name)
        if number is None:
            number = self.number[name] = len(self.names)
            self.names.append(name)
        return number


class FlowRows:
    """The columns, each (capacity,) or (2, capacity, ...) with one part a direction (PROBE, ACK).

    A *slot* is a range of rows that holds one list; `base`, `span`, `number` and `is_latest` are (slots,). The row of
    an entry is `base[slot] + index`; `used` tells rows that are entries from gaps. `path` holds element numbers, padded
    with -1; it is the path in either direction only where `plain`: known, single, and unchanged for minutes.
    """

    def __init__(self, width: int = 8) -> None:
        self.rows = 0
        self.slots = 0
        self.used: Bools = np.zeros(0, bool)
        self.slot: Small = np.zeros(0, np.int32)
        self.src: Small = np.zeros(0, np.int32)
        self.dst: Small = np.zeros(0, np.int32)
        self.src_host: Small = np.zeros(0, np.int32)
        self.dst_host: Small = np.zeros(0, np.int32)
        self.sport: npt.NDArray[np.uint16] = np.zeros(0, np.uint16)
        self.cls: npt.NDArray[np.int16] = np.zeros(0, np.int16)
        self.cls_name: npt.NDArray[np.int16] = np.zeros(0, np.int16)
        self.kind: npt.NDArray[np.int8] = np.zeros(0, np.int8)
        self.interval: Ints = np.zeros(0, np.int64)
        self.path: Small = np.full((2, 0, width), -1, np.int32)
        self.plain: Bools = np.zeros((2, 0), bool)
        self.traced: Bools = np.zeros((2, 0), bool)
        self.since: Ints = np.zeros((2, 0), np.int64)
        self.confirmed: Ints = np.zeros((2, 0), np.int64)
        self.base: Ints = np.zeros(0, np.int64)
        self.span: Ints = np.zeros(0, np.int64)
        self.number: Ints = np.zeros(0, np.int64)
        self.is_latest: Bools = np.zeros(0, bool)
        self.version: Ints = np.zeros(0, np.int64)
        self.of_key: dict[tuple[int, int], int] = {}
        """(RNIC number, list version) -> slot."""
        self.of_number: Small = np.full(0, -1, np.int32)
        """RNIC number -> slot of its newest list, -1 without one."""
        self._free: dict[int, list[int]] = {}
        self.retired: list[int] = []
        """Slots of forgotten lists: their rows are still named by counts and are not to be used again yet."""

    # ------------------------------------------------------------ ranges

    def allocate(self, number: int, version: int, span: int) -> int:
        """A slot for a list with indexes below `span`; O(span)."""
        size = -(-max(span, 1) // _STEP) * _STEP
        free = self._free.get(size)
        if free:
            slot = free.pop()
        else:
            slot = self.slots
            self.slots += 1
            self._grow_slots()
            self.base[slot], self.span[slot] = self.rows, size
            self.rows += size
            self._grow_rows()
        rows = self.range(slot)
        self.used[rows] = False
        for column in (self.plain, self.traced):
            column[:, rows] = False
        self.slot[rows] = slot
        self.number[slot], self.version[slot] = number, version
        self.of_key[number, version] = slot
        return slot

    def range(self, slot: int) -> slice:
        """The rows of a slot."""
        base = int(self.base[slot])
        return slice(base, base + int(self.span[slot]))

    def retire(self, slot: int) -> None:
        """Forget a list; its rows keep what they hold until they are released."""
        number = int(self.number[slot])
        del self.of_key[number, int(self.version[slot])]
        if self.of_number[number] == slot:
            self.of_number[number] = -1
        self.is_latest[slot] = False
        self.retired.append(slot)

    def release(self, slot: int) -> None:
        """Nothing names the rows of a retired slot any more."""
        self.used[self.range(slot)] = False
        self._free.setdefault(int(self.span[slot]), []).append(slot)

    def set_latest(self, slot: int) -> None:
        """This is the newest list of its RNIC."""
        number = int(self.number[slot])
        if number >= len(self.of_number):
            more = np.full(max(number + 1, 2 * len(self.of_number)), -1, np.int32)
            more[: len(self.of_number)] = self.of_number
            self.of_number = more
        before = int(self.of_number[number])
        if before >= 0:
            self.is_latest[before] = False
        self.of_number[number] = slot
        self.is_latest[slot] = True

    def _grow_slots(self) -> None:
        if self.slots > len(self.base):
            size = max(64, 3 * self.slots // 2)
            for name in ("base", "span", "number", "version", "is_latest"):
                setattr(self, name, _longer(getattr(self, name), size))

    def _grow_rows(self) -> None:
        if self.rows <= len(self.used):
            return
        size = max(256, 5 * self.rows // 4)
        for name in (
            "used", "slot", "src", "dst", "src_host", "dst_host", "sport", "cls", "cls_name", "kind", "interval"
        ):  # fmt: skip
            setattr(self, name, _longer(getattr(self, name), size))
        for name in ("plain", "traced", "since", "confirmed"):
            setattr(self, name, _longer(getattr(self, name), size, axis=1))
        path = np.full((2, size, self.path.shape[2]), -1, np.int32)
        path[:, : self.path.shape[1]] = self.path
        self.path = path

    # ------------------------------------------------------------ look-ups

    def row(self, number: int, version: int, index: int) -> int | None:
        """The row of an entry of a known list."""
        slot = self.of_key.get((number, version))
        if slot is None or not 0 <= index < int(self.span[slot]):
            return None
        row = int(self.base[slot]) + index
        return row if self.used[row] else None

    def slots_of(self, numbers: Ints, versions: Ints) -> Ints:
        """The slots of (RNIC number, list version) pairs of 32 bits, -1 where unknown. O(pairs) for newest lists."""
        out = np.full(len(numbers), -1, np.int64)
        if not self.slots:
            return out
        inside = numbers < len(self.of_number)
        out[inside] = self.of_number[numbers[inside]]
        old = inside & ((out < 0) | (self.version[out] != versions))
        if old.any():
            at = np.flatnonzero(old)
            pairs, where = np.unique(numbers[at] << 32 | versions[at], return_inverse=True)
            slots = [self.of_key.get((pair >> 32, pair & 0xFFFFFFFF), -1) for pair in pairs.tolist()]
            out[at] = np.array(slots, np.int64)[where]
        return out

    def set_path(self, role: int, row: int, elements: Sequence[int]) -> None:
        """The one known path of a row."""
        if len(elements) > self.path.shape[2]:
            wider = np.full((*self.path.shape[:2], len(elements)), -1, np.int32)
            wider[:, :, : self.path.shape[2]] = self.path
            self.path = wider
        self.path[role, row] = -1
        self.path[role, row, : len(elements)] = elements
        self.plain[role, row] = True

    def copy_path(self, role: int, old: int, new: int) -> None:
        """Give a row the path of another."""
        for column in (self.path, self.plain, self.traced, self.since, self.confirmed):
            column[role, new] = column[role, old]

    def latest(self) -> Bools:
        """Which rows are entries of newest lists, (rows,)."""
        n = self.rows
        return self.used[:n] & self.is_latest[self.slot[:n]]


def _longer(a: np.ndarray, size: int, axis: int = 0) -> np.ndarray:
    shape = list(a.shape)
    shape[axis] = size
    out = np.zeros(shape, a.dtype)
    if axis:
        out[:, : a.shape[1]] = a
    else:
        out[: a.shape[0]] = a
    return out
