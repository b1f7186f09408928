"""One thing that is wrong with a topology file, and how near misses are recognised."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass

SEARCHED = 5_000
"""Names among which a near miss is looked for: beyond that a suggestion costs more than it helps."""


@dataclass(frozen=True, slots=True, order=True)
class Problem:
    """One thing to mend. `line` counts from 1; 0 is the file as a whole."""

    line: int
    where: str
    """The object, e.g. `hosts.h1.rnics.rnic0` or `links[3]`; empty for the file."""
    text: str
    """What is wrong and what to do."""

    def render(self, source: str) -> str:
        """`source:line: object: text`."""
        place = f"{source}:{self.line}" if self.line else source
        return f"{place}: {self.where}: {self.text}" if self.where else f"{place}: {self.text}"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`; did you mean `x`?` for the nearest known name, or an empty string."""
    names = list(known)
    same = [k for k in names if k.lower() == name.lower()]
    near = same or (difflib.get_close_matches(name, names, 1, 0.7) if len(names) <= SEARCHED else [])
    return f"; did you mean `{near[0]}`?" if near else ""
