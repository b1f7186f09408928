"""The controller's clock: wall time as it was at the start plus monotonic time since, so that steps change nothing.

A step forward would make every agent seem unheard for long and empty all lists, one back would stop the planning.
"""

from __future__ import annotations

import time

_ANCHOR = time.time_ns() - time.monotonic_ns()


def now_ns() -> int:
    """Now, in nanoseconds since the epoch; like the wall clock, as it is written into records that outlive us."""
    return _ANCHOR + time.monotonic_ns()
