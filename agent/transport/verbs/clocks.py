"""Completion stamps as nanoseconds: counters wrap, tick at a rate of their own, or hold seconds and nanoseconds."""

from __future__ import annotations

import time
from typing import Protocol

from agent.transport.verbs.edge import Capabilities

PATIENCE_NS = 10_000_000_000
"""Two stamps of one probe lie at most this far apart; a counter must not wrap in it, nor in twice of it."""
_BILLION = 1_000_000_000
_DAY_S = 86_400


class StampClock(Protocol):
    """Turns raw stamps of one device to ns; only differences mean anything."""

    def ns(self, raw: int) -> int:
        """The time of a raw stamp."""


class TickClock:
    """A free-running counter. Stamps may come a little out of order: each is taken as near the one before."""

    def __init__(self, mask: int, khz: int) -> None:
        self._mask = mask
        self._half = (mask + 1) >> 1
        self._khz = khz
        self._last = -1
        self._ticks = 0

    def ns(self, raw: int) -> int:
        """The time of a raw stamp.

        >>> clock = TickClock(0x1FFFF, 1_000_000)
        >>> -clock.ns(0x1FFF0) + clock.ns(0x00010)
        32
        """
        raw &= self._mask
        if self._last < 0:
            self._ticks = self._mask + 1  # never near 0, which means "no stamp"
        else:
            step = (raw - self._last) & self._mask
            self._ticks += step if step < self._half else step - self._mask - 1
        self._last = raw
        return self._ticks * 1_000_000 // self._khz


class RealTimeClock:
    """Stamps with seconds in the upper and nanoseconds in the lower 32 bits."""

    def ns(self, raw: int) -> int:
        """The time of a raw stamp."""
        return (raw >> 32) * _BILLION + (raw & 0xFFFFFFFF)


class DetectingClock:
    """Tells from the first stamp which of the two forms a device uses: the attributes do not say."""

    def __init__(self, mask: int, khz: int, wall_s: float | None = None) -> None:
        self._tick = TickClock(mask, khz)
        self._wall_s = wall_s
        self._clock: StampClock | None = None

    def ns(self, raw: int) -> int:
        """The time of a raw stamp."""
        if self._clock is None:
            wall = time.time() if self._wall_s is None else self._wall_s
            real = raw & 0xFFFFFFFF < _BILLION and abs((raw >> 32) - wall) < _DAY_S
            self._clock = RealTimeClock() if real else self._tick
        return self._clock.ns(raw)


def stamp_clock(capabilities: Capabilities) -> tuple[StampClock | None, str]:
    """(clock, "") for a device whose stamps can be used; else (None, why not)."""
    mask, khz = capabilities.stamp_mask, capabilities.clock_khz
    if not mask:
        return None, "the device stamps no completions"
    if not khz:
        return None, "the device does not tell the rate of its clock"
    if mask & (mask + 1):
        return None, f"the stamp mask {mask:#x} is no counter's"
    if (mask + 1) // 2 * 1_000_000 // khz < PATIENCE_NS:
        return None, f"the device's counter of {mask.bit_length()} bits wraps too soon"
    return DetectingClock(mask, khz), ""
