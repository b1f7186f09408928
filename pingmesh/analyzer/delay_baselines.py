"""What round trips of each flow usually take on each path, and by how much they differ from that now.

A *slot* is a flow on a pair of paths between two agent processes: after a reroute or a restart another slot
applies, with what was learnt there before, if ever. A slot keeps the mean round trip of each window (*cell*) of the
last two minutes, and the median of each minute (*block*) of the last quarter of an hour: the median of those is its
usual round trip, so that slow change is followed and a spike is forgotten. While a component is known to be slow its
slots learn nothing (`hold`): a fault that lasts must not become usual.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pingmesh.analyzer.components import Components
from pingmesh.analyzer.delays import Crossings, DelayTable, crossings_of
from pingmesh.analyzer.flows import PathSet
from pingmesh.analyzer.table import Bools, Floats, Ints, expand, pointer
from pingmesh.messages import WINDOW_NS

CELLS = 24
"""Windows kept one by one."""
BLOCK = 12
"""Windows of a block."""
BLOCKS = 16
"""Blocks kept."""
STRAGGLERS = 4
"""Windows after which a window's counts are complete: both ends have reported, or are given up."""
LEAST_CELLS = 4
"""Windows with round trips that make a block."""
LEAST_BLOCKS = 3
"""Blocks without which nothing is usual yet."""
LONG_AGO = -(1 << 40)
MEDIAN_LOSS = 1.57
"""Variance of a median over that of a mean, of normal noise."""
GRAIN_NS = 100.0
"""Round trips come in multiples of this."""
LEAST_FORGOTTEN = 256
"""Fewer slots are not worth forgetting."""
FORGET_BLOCKS = 240
"""A slot without round trips for so many blocks (four hours) is given up."""
FORGET_UNUSUAL_BLOCKS = 5
"""The same of one for which nothing is usual: flows have such slots while they may walk one of several paths."""

Singles = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class Excess:
    """Slots with a usual round trip and round trips now: `slots` (n,) and a table with a row for each."""

    slots: Ints
    usual: Floats
    """(n,) nanoseconds."""
    table: DelayTable


class DelayBook:
    """All slots. About 1,700 bytes each in a fabric of two tiers.

    Time is counted in windows (usually of `WINDOW_NS`) since the epoch.
    """

    def __init__(self, components: Components) -> None:
        self.components = components
        self.newest = -1
        """The newest window with round trips."""
        self.renumbered = 0
        """Counts how often slots got new numbers."""
        self._number: dict[Hashable, int] = {}
        self._keys: list[Hashable] = []
        self._crossings: list[Crossings] = []
        self._compiled: tuple[Ints, Crossings] | None = None
        self._usual: dict[int, tuple[Floats, Floats, Ints]] = {}
        """What `usual` said since the last block."""
        self._room = 0
        self._blocked = -1
        """The last block that was taken in."""
        self.prober = np.empty(0, np.int64)
        self.responder = np.empty(0, np.int64)
        self.hops = np.empty(0, np.int64)
        self._cells = np.empty((0, CELLS), np.float32)
        self._blocks = np.empty((0, BLOCKS), np.float32)
        self._stamps = np.empty((0, BLOCKS), np.int32)
        self._at = np.empty(0, np.int64)
        self._noise = np.empty(0, np.float32)
        self._held = np.empty(0, bool)
        self._used = np.empty(0, np.int64)

    def __len__(self) -> int:
        return len(self._keys)

    # ------------------------------------------------------------ slots

    def slot(self, key: Hashable, prober: int, responder: int, there: PathSet, back: PathSet) -> int:
        """The slot of a flow (`key`) on these paths; made on first sight. RNICs are numbered by the caller."""
        whole = (key, there, back)
        found = self._number.get(whole)
        if found is not None:
            return found
        slot = len(self._keys)
        self._number[whole] = slot
        self._keys.append(whole)
        self._crossings.append(crossings_of(self.components, there, back))
        self._compiled = None
        self._usual.clear()
        if slot >= self._room:
            self._grow()
        self.prober[slot], self.responder[slot] = prober, responder
        self.hops[slot] = max(map(len, there), default=0) + max(map(len, back), default=0)
        self._used[slot] = max(self._blocked, 0)
        return slot

    def _grow(self) -> None:
        more = max(1024, self._room)
        self.prober, self.responder, self.hops, self._at, self._used = (
            np.concatenate((a, np.zeros(more, np.int64)))
            for a in (self.prober, self.responder, self.hops, self._at, self._used)
        )
        self._cells = np.concatenate((self._cells, np.full((more, CELLS), np.nan, np.float32)))
        self._blocks = np.concatenate((self._blocks, np.full((more, BLOCKS), np.nan, np.float32)))
        self._stamps = np.concatenate((self._stamps, np.full((more, BLOCKS), -1, np.int32)))
        self._noise = np.concatenate((self._noise, np.full(more, np.nan, np.float32)))
        self._held = np.concatenate((self._held, np.zeros(more, bool)))
        self._room += more

    def forget(self) -> Ints | None:
        """Give up slots that nobody used for long, if they are many. O(slots).

        The others get new numbers then: returned is old slot -> new one, -1 for those given up.
        """
        n = len(self)
        blocks = np.where(self._at[:n] > 0, FORGET_BLOCKS, FORGET_UNUSUAL_BLOCKS)
        keep = np.flatnonzero(self._used[:n] >= self._blocked - blocks)
        if n < LEAST_FORGOTTEN or len(keep) > n // 2:
            return None
        self._keys = [self._keys[i] for i in keep.tolist()]
        self._crossings = [self._crossings[i] for i in keep.tolist()]
        self._number = {k: i for i, k in enumerate(self._keys)}
        self.prober, self.responder, self.hops = self.prober[keep], self.responder[keep], self.hops[keep]
        self._cells, self._blocks, self._stamps = self._cells[keep], self._blocks[keep], self._stamps[keep]
        self._at, self._noise = self._at[keep], self._noise[keep]
        self._held, self._used = self._held[keep], self._used[keep]
        self._room, self._compiled = len(keep), None
        self._usual.clear()
        self.renumbered += 1
        new = np.full(n, -1, np.int64)
        new[keep] = np.arange(len(keep))
        return new

    def give_up(self, slots: Bools) -> None:
        """These slots (mask) will not be used again: the process at one of their ends is gone."""
        n = len(self)
        self._cells[:n][slots[:n]] = np.nan
        self._used[:n][slots[:n]] = LONG_AGO

    def crossings(self) -> tuple[Ints, Crossings]:
        """(pointer, flat crossings) of all slots, CSR by slot. O(crossings) after new slots, else nothing."""
        if self._compiled is None:
            all_of = self._crossings
            self._compiled = (
                pointer([len(c.singles) for c in all_of]),
                Crossings(
                    np.concatenate([c.singles for c in all_of] or [np.empty(0, np.int64)]),
                    np.concatenate([c.share for c in all_of] or [np.empty(0)]),
                    np.concatenate([c.times for c in all_of] or [np.empty(0)]),
                ),
            )
        return self._compiled

    # ------------------------------------------------------------ round trips

    def put(self, slots: Ints, window: int, mean_ns: npt.ArrayLike) -> None:
        """Mean round trips of slots in a window (number), nanoseconds; a later word replaces an earlier one.

        What is older than `CELLS` windows is left out. O(slots given), and O(all slots) once a block.
        """
        if window <= self.newest - CELLS + 1:
            return
        self.advance(window)
        self._cells[slots, window % CELLS] = mean_ns

    def advance(self, window: int) -> None:
        """Time goes on to a window, if it is a new one: the oldest cells go, and complete blocks are taken in."""
        if window <= self.newest:
            return
        if self.newest >= 0:
            for w in range(max(self.newest + 1, window - CELLS + 1), window + 1):
                self.newest = w
                block = (w - STRAGGLERS) // BLOCK - 1
                if block > self._blocked:
                    self._take_in(block)
                self._cells[:, w % CELLS] = np.nan
        else:
            self._blocked = max((window - STRAGGLERS) // BLOCK - 1, -1)
            self._used[:] = self._blocked
        self.newest = window

    def drop(self, slots: Bools, first: int, last: int) -> None:
        """The cells of these slots (mask) from one window to another were no evidence."""
        n = len(self)
        for w in range(max(first, self.newest - CELLS + 1), min(last, self.newest) + 1):
            self._cells[:n, w % CELLS][slots[:n]] = np.nan

    def hold(self, slots: Bools) -> None:
        """These slots (mask) learn nothing until this is said anew."""
        self._held[: len(self)] = slots[: len(self)]

    @property
    def blocked(self) -> int:
        """The last complete block."""
        return self._blocked

    def noise(self, slots: Ints) -> Floats:
        """By how much a window's round trip of these slots usually differs from their median."""
        return self._noise[slots].astype(np.float64)

    def cells(self, first: int, last: int) -> Singles:
        """(slots, windows) mean round trips, NaN where there are none."""
        windows = np.arange(max(first, self.newest - CELLS + 1), last + 1)
        return self._cells[: len(self), windows % CELLS]

    def _take_in(self, block: int) -> None:
        """Take the medians of a block's cells into the memory. O(slots x BLOCK log BLOCK)."""
        self._blocked = block
        self._usual.clear()
        n = len(self)
        cells = self.cells(block * BLOCK, block * BLOCK + BLOCK - 1)
        middle, count = median(cells)
        self._used[:n][count > 0] = block
        rows = np.flatnonzero((count >= LEAST_CELLS) & ~self._held[:n])
        spread = 1.4826 * median(np.abs(cells[rows] - middle[rows, None]))[0]
        # Of few cells the median deviation falls short.
        spread *= 1 + 0.8 / count[rows]
        at = self._at[rows] % BLOCKS
        self._blocks[rows, at] = middle[rows]
        self._stamps[rows, at] = block
        self._at[rows] += 1
        before = self._noise[rows]
        # One bad minute must not make a flow look noisy for long.
        limited = np.minimum(spread, 3 * before + GRAIN_NS)
        self._noise[rows] = np.where(np.isnan(before), spread, before + 0.15 * (limited - before))

    # ------------------------------------------------------------ excess

    def usual(self, before: int) -> tuple[Floats, Floats, Ints]:
        """(median of the blocks before window `before`, its standard error, number of blocks) of all slots.

        The error holds how much the slot's blocks wander. O(slots x BLOCKS) once a block. The arrays are not to be
        written to.
        """
        known = self._usual.get(before // BLOCK)
        if known is not None:
            return known
        n = len(self)
        blocks = np.where(self._stamps[:n] < before // BLOCK, self._blocks[:n], np.float32(np.nan))
        middle, count = median(blocks)
        wander = 1.4826 * median(np.abs(blocks - middle[:, None]))[0] * (1 + 1 / np.maximum(count, 1))
        least = self._noise[:n] * np.sqrt(MEDIAN_LOSS / BLOCK)
        of_block = np.maximum(np.nan_to_num(wander), least)
        out = middle, of_block * np.sqrt(1 + MEDIAN_LOSS / np.maximum(count, 1)), count
        self._usual[before // BLOCK] = out
        return out

    def excess(self, first: int, last: int, *, least_cells: int = 2) -> Excess:
        """How much longer than usual round trips take in the windows from `first` to `last`.

        Of slots with enough cells in them and `LEAST_BLOCKS` before them. The median over windows stands for a slot,
        so that one bad window is not a slow minute. O(slots x (CELLS + BLOCKS)).
        """
        now, cells = median(self.cells(first, last))
        return self._table(now, cells, first, least_cells)

    def block_excess(self, blocks: int) -> Excess:
        """The same of the last `blocks` complete blocks together, against those before them."""
        first = self._blocked - blocks + 1
        n = len(self)
        # Held slots have no new blocks: what is known of them stays with whoever holds them.
        recent = np.where(self._stamps[:n] >= first, self._blocks[:n], np.float32(np.nan))
        now, count = median(recent)
        return self._table(now, count * BLOCK * (count * 2 >= blocks), first * BLOCK, 1)

    def _table(self, now: Floats, cells: Ints, first: int, least_cells: int) -> Excess:
        usual, error, blocks = self.usual(first)
        n = len(self)
        slots = np.flatnonzero((cells >= least_cells) & (blocks >= LEAST_BLOCKS))
        noise = self._noise[:n][slots]
        scale = np.sqrt(MEDIAN_LOSS * np.square(noise) / cells[slots] + np.square(error[slots]) + GRAIN_NS**2)
        if len(slots):
            # A flow that seems much quieter than the others has only been watched for too short.
            scale = np.maximum(scale, 0.5 * float(np.median(scale)))
        return Excess(slots, usual[slots], self.table(slots, now[slots] - usual[slots], scale))

    def table(self, slots: Ints, excess: Floats, scale: Floats) -> DelayTable:
        """Rows of slots for the search."""
        ptr, flat = self.crossings()
        at, owner = expand(ptr, slots)
        return DelayTable(
            excess=excess.astype(np.float64),
            scale=scale.astype(np.float64),
            prober=self.prober[slots],
            responder=self.responder[slots],
            hops=self.hops[slots],
            ptr=pointer(np.bincount(owner, minlength=len(slots))),
            singles=flat.singles[at],
            share=flat.share[at],
            times=flat.times[at],
        )

    def crossing(self, singles: Ints) -> Bools:
        """Mask of the slots that surely cross one of some singles. O(crossings)."""
        ptr, flat = self.crossings()
        wanted = np.zeros(len(self.components.singles), bool)
        wanted[singles] = True
        hit = wanted[flat.singles] & (flat.share >= 1)
        owner = np.repeat(np.arange(len(self)), np.diff(ptr))
        return np.bincount(owner[hit], minlength=len(self)) > 0

    def history(self, slots: Ints) -> tuple[Ints, Floats]:
        """(windows, excess of each slot in each, NaN where unknown) over the memory: a block a minute, then the cells
        of the last two minutes, each against the slot's usual round trip before all of the cells. For change points.
        """
        last = self.newest
        first = last - CELLS + 1
        usual = self.usual(first)[0][slots]
        if not len(slots):
            return np.empty(0, np.int64), np.empty((0, 0))
        stamps = np.arange(first // BLOCK - BLOCKS, first // BLOCK)
        series = np.full((len(slots), len(stamps)), np.nan)
        known = self._stamps[slots]
        inside = (known >= stamps[0]) & (known <= stamps[-1])
        rows, columns = np.nonzero(inside)
        series[rows, known[rows, columns] - stamps[0]] = self._blocks[slots][rows, columns]
        both = np.concatenate((series, self.cells(first, last)[slots]), axis=1)
        return np.concatenate((stamps * BLOCK, np.arange(first, last + 1))), both - usual[:, None]


def median(values: npt.NDArray[np.floating]) -> tuple[Floats, Ints]:
    """(median, count) of each row without its NaNs; NaN where there is nothing. O(values log columns).

    >>> median(np.array([[3.0, np.nan, 1.0], [np.nan] * 3], np.float32))
    (array([ 2., nan]), array([2, 0]))
    """
    if not values.size:
        return np.full(len(values), np.nan), np.zeros(len(values), np.int64)
    ordered = np.sort(values, axis=1)  # NaNs go last
    count = np.count_nonzero(~np.isnan(values), axis=1)
    rows = np.arange(len(values))
    low, high = ordered[rows, np.maximum(count - 1, 0) // 2], ordered[rows, np.minimum(count // 2, values.shape[1] - 1)]
    return np.where(count > 0, (low.astype(np.float64) + high) / 2, np.nan), count


def window_of(at_ns: Ints) -> Ints:
    """Numbers of the windows that began at some times; windows of different clocks are rounded to the nearest.

    >>> window_of(np.array([12_000_000_000, 9_900_000_000]))
    array([2, 2])
    """
    return (at_ns + WINDOW_NS // 2) // WINDOW_NS
