"""One line of the report of `pingmesh doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "warning", "failed"]
Role = Literal["agent", "lab", "server"]


@dataclass(frozen=True)
class Check:
    """What was looked at, what was seen and, where something is missing, one remedy."""

    name: str
    state: State
    seen: str
    remedy: str = ""
