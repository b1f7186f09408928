"""How many random 5-tuples cover N parallel paths: Liu et al. 2024, Eq. (1)."""

from __future__ import annotations

import math
from functools import lru_cache

EXACT_UP_TO = 256


@lru_cache(maxsize=4096)
def tuples_needed(paths: int, percent: int = 99) -> int:
    """Smallest k >= N such that k random 5-tuples walk all N parallel paths with a probability of `percent` %.

    Liu et al. 2024, Eq. (1): sum over i = 1..N of (-1)^(i+1) C(N,i) (1 - i/N)^k <= 1 - P, the chance that some
    path is missed when each tuple falls on each path alike. Solved in whole numbers, since the alternating sum
    cancels badly in floating point; above 256 paths by the independence approximation, which is the same number
    or one off wherever both were computed. O(N) big-integer powers per trial, a handful of trials.

    >>> [tuples_needed(n) for n in (1, 2, 4, 8, 16, 32, 64)]
    [1, 8, 21, 51, 115, 255, 557]
    """
    if paths <= 1:
        return max(paths, 0)
    miss_each = -math.expm1(math.log(percent / 100) / paths)
    k = max(paths, math.ceil(math.log(miss_each) / math.log1p(-1 / paths)))
    if paths > EXACT_UP_TO:
        return k
    while not _covers(paths, k, percent):
        k += 1
    while k > paths and _covers(paths, k - 1, percent):
        k -= 1
    return k


def _covers(n: int, k: int, percent: int) -> bool:
    missed: int = sum((-1) ** (i + 1) * math.comb(n, i) * (n - i) ** k for i in range(1, n))
    return bool(100 * missed <= (100 - percent) * n**k)
