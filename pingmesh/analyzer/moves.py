"""Tuples that were seen to move: routing changed somewhere, with or without a loss that anybody noticed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from pingmesh.analyzer.host_rules import SECOND

ACTIVE_NS = 8 * SECOND
"""A change of routing is looked into for this long after the last move seen."""
ASK_NS = SECOND // 2
MOST_LINKS = 8


class Moves:
    """The links that tuples left in the latest change of routing, most deserted first."""

    def __init__(self) -> None:
        self._left: Counter[str] = Counter()
        self._since = 0
        self._last = -ACTIVE_NS
        self._asked = 0

    def note(self, links: Iterable[str], at: int, now: int) -> None:
        """A tuple traced at a time was found to have left these links."""
        if now - self._last > ACTIVE_NS:
            self._left.clear()
            self._since = at
        self._last = now
        self._left.update(links)

    def since(self, now: int) -> int | None:
        """When the change was first seen, while it is being looked into."""
        return self._since if now - self._last <= ACTIVE_NS else None

    def to_trace(self, now: int) -> list[str]:
        """Links whose other tuples should be traced now; empty most of the time."""
        if now - self._last > ACTIVE_NS or now - self._asked < ASK_NS:
            return []
        self._asked = now
        return [e for e, _ in sorted(self._left.items(), key=lambda i: (-i[1], i[0]))[:MOST_LINKS]]
