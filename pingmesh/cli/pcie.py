"""What a PCIe function gets, against the smaller of what the two ends of each hop on its way can do."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pingmesh.cli.rdma import read

N = TypeVar("N", int, float)


@dataclass(frozen=True, slots=True)
class Hop:
    """One link of the way to the root. Speeds in GT/s, widths in lanes; None: the attribute is not there."""

    function: str
    speed: float | None
    width: int | None
    possible_speed: float | None
    possible_width: int | None

    @property
    def slow(self) -> bool:
        """Whether both ends could do more than the link does now."""
        return (self.speed is not None and self.possible_speed is not None and self.speed < self.possible_speed) or (
            self.width is not None and self.possible_width is not None and self.width < self.possible_width
        )

    def __str__(self) -> str:
        """Now and possible, such as `16.0 GT/s x8 of 32.0 GT/s x16`."""
        now = f"{self.speed or '?'} GT/s x{self.width or '?'}"
        return f"{now} of {self.possible_speed or '?'} GT/s x{self.possible_width or '?'}" if self.slow else now


def hops(function: Path) -> list[Hop]:
    """The links from a PCI function (a directory of sysfs) to the root, nearest first; empty where it has none."""
    try:
        here = function.resolve(strict=True)
    except OSError:
        return []
    found = []
    while (here / "current_link_speed").exists():
        above = here.parent
        if not (above / "max_link_speed").exists():
            above = here  # the root port hides: what the card can do must do
        found.append(
            Hop(
                here.name,
                _speed(here, "current_link_speed"),
                _width(here, "current_link_width"),
                _least(_speed(here, "max_link_speed"), _speed(above, "max_link_speed")),
                _least(_width(here, "max_link_width"), _width(above, "max_link_width")),
            )
        )
        # A bridge's own attributes are of the link below it; the one above is its parent's.
        here = above.parent if above != here else Path("/")
    return found


def _speed(at: Path, name: str) -> float | None:
    found = re.match(r"([\d.]+) GT/s", read(at / name))
    return float(found[1]) if found else None


def _width(at: Path, name: str) -> int | None:
    text = read(at / name)
    return int(text) if text.isdigit() and 0 < int(text) < 255 else None


def _least(a: N | None, b: N | None) -> N | None:
    return min(a, b) if a is not None and b is not None else None
