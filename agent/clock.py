"""The agent's clocks: monotonic for time-outs, and a wall clock that never steps for windows and events."""

from __future__ import annotations

import time
from typing import Protocol

from pingmesh.messages import WINDOW_NS


class Clock(Protocol):
    """Nanoseconds. `wall_ns` runs with `monotonic_ns` from where the wall clock stood at the start."""

    def monotonic_ns(self) -> int:
        """Never goes back; the event loop's clock."""

    def wall_ns(self, monotonic: int) -> int:
        """The anchored wall clock at this monotonic time."""


class AnchoredClock:
    """The system's clocks; what the system does to its wall clock after the start changes nothing."""

    def __init__(self) -> None:
        self.monotonic_ns = time.monotonic_ns
        self._offset = time.time_ns() - time.monotonic_ns()

    def wall_ns(self, monotonic: int) -> int:
        """The anchored wall clock at this monotonic time."""
        return monotonic + self._offset


def window_of(wall: int) -> int:
    """Number of the window that holds this wall time (31 bits until the year 2310)."""
    return wall // WINDOW_NS


def window_end(window: int) -> int:
    """Wall time at which a window ends."""
    return (window + 1) * WINDOW_NS
