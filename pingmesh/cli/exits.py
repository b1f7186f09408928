"""Exit codes, the same for every command."""

from __future__ import annotations

import enum


class Exit(enum.IntEnum):
    """An uncaught exception is INTERNAL: it must never look like a fault, or a script would drain a node for it."""

    HEALTHY = 0
    FAULT = 1
    USAGE = 2
    NOT_ENOUGH_DATA = 3
    INTERNAL = 4
