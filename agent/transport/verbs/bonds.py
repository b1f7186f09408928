"""Bonds: one RDMA device over several ports that go to different ToRs."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from agent.transport.verbs.lanes import Lane

NETWORK = Path("/sys/class/net")


def members_of(interface: str, sysfs: Path = NETWORK) -> int:
    """How many members a bond has; 1 for what is no bond."""
    try:
        return max(1, len((sysfs / interface / "bonding/slaves").read_text().split()))
    except OSError:
        return 1


def spread(lanes: Sequence[Lane]) -> list[int]:
    """Have each lane leave by a member of its own; the members that lanes really leave by, from 1.

    In a bond's queue affinity mode the source port chooses no member: what is not returned here no probe walks, and
    nothing may be said of it.
    """
    covered = set()
    for leg, lane in enumerate(lanes, 1):
        with contextlib.suppress(OSError):
            covered.add(lane.pair.choose_leg(leg))
    return sorted(covered)
