"""The analyzer's clock: wall time as it was at the start plus monotonic time since, so that steps change nothing."""

from __future__ import annotations

import time


class Clock:
    """Nanoseconds since the epoch that never jump."""

    def __init__(self) -> None:
        self._anchor = time.time_ns() - time.monotonic_ns()

    def now(self) -> int:
        """Now, in nanoseconds."""
        return self._anchor + time.monotonic_ns()
