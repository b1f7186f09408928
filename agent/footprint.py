"""Asks kernel and C library to keep this process small: an agent is a guest on its host."""

from __future__ import annotations

import ctypes

PR_SET_THP_DISABLE = 41
M_ARENA_MAX = -8


def keep_small() -> None:
    """No huge pages, which back a few kilobytes with 2 MiB, and one heap for all threads, of which one does the work.

    Where C library or kernel know no such wish, nothing happens. It is for what is allocated from now on.
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(M_ARENA_MAX, 1)
    if hasattr(library, "prctl"):
        library.prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0)
