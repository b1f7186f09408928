"""Asks kernel and C library to keep a process small."""

from __future__ import annotations

import ctypes

PR_SET_THP_DISABLE = 41
M_MMAP_THRESHOLD, M_ARENA_MAX = -3, -8
APART = 16 << 10
"""Bytes."""


def keep_small() -> None:
    """No huge pages, which back a few kilobytes with 2 MiB, and one heap for all threads, of which one does the work:
    an agent is a guest on its host.

    Where C library or kernel know no such wish, nothing happens. It is for what is allocated from now on.
    """
    _mallopt(M_ARENA_MAX, 1)
    library = ctypes.CDLL(None)
    if hasattr(library, "prctl"):
        library.prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0)


def give_back() -> None:
    """What is larger than 16 KiB goes back to the kernel as soon as it is freed.

    For who makes arrays of such sizes all the time among small things that stay: in the heap they would leave holes,
    and it would grow by some megabytes for an hour. With arrays of megabytes the kernel's part of it costs too much.
    """
    _mallopt(M_MMAP_THRESHOLD, APART)


def _mallopt(what: int, value: int) -> None:
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(what, value)
