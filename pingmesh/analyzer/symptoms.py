"""How a component fails: a share of all packets, some 5-tuples wholly, one class only, or everything."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from pingmesh.analyzer.flows import Flow, PathSet
from pingmesh.analyzer.observe import Sums, crosses

_FLOW_PACKETS = 6
_CLASS_PACKETS = 20
_DEAD = 0.95
"""Share of the packets from which on a component lets nothing through."""
_SINCE_ONSET = 40
"""Packets since a loss began that tell whether all are lost."""


@dataclass(frozen=True, slots=True)
class Crossing:
    """Packets of one flow, direction and class that surely crossed a component."""

    flow: Flow
    role: int
    cls: str
    paths: PathSet
    sent: int
    lost: int


def crossings(sums: Sums, elements: frozenset[str]) -> list[Crossing]:
    """Those whose every possible path crosses one of the elements."""
    return [
        Crossing(flow, role, cls, paths, sent, lost)
        for (flow, role, cls, paths), (sent, lost) in sums.items()
        if crosses(paths, elements)
    ]


def per_class(crossed: list[Crossing]) -> dict[str, tuple[int, int]]:
    """(sent, lost) by class."""
    out: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for c in crossed:
        out[c.cls][0] += c.sent
        out[c.cls][1] += c.lost
    return {k: (v[0], v[1]) for k, v in out.items()}


def lossy_tuples(crossed: list[Crossing]) -> int:
    """How many 5-tuples and directions lost something."""
    return len({(c.flow.key, c.role) for c in crossed if c.lost})


def sick_class(classes: Mapping[str, tuple[int, int]]) -> str | None:
    """The one class that loses while another, well probed, does not; None if none or all do."""
    losing = [c for c, (_, lost) in classes.items() if lost]
    clean = [c for c, (sent, lost) in classes.items() if not lost and sent >= _CLASS_PACKETS]
    if len(losing) != 1 or not clean:
        return None
    sent, lost = classes[losing[0]]
    rate = lost / sent
    # Were the other classes as sick, they would hardly all be clean.
    others = sum(classes[c][0] for c in clean)
    return losing[0] if (1 - rate) ** others < 1e-3 else None


def is_flow_blackhole(crossed: list[Crossing]) -> bool:
    """Whether the loss is all of some 5-tuples and nothing of the others."""
    tuples: dict[tuple[object, int, str], list[int]] = defaultdict(lambda: [0, 0])
    for c in crossed:
        t = tuples[c.flow.key, c.role, c.cls]
        t[0] += c.sent
        t[1] += c.lost
    big = [(sent, lost) for sent, lost in tuples.values() if sent >= _FLOW_PACKETS]
    dead = sum(1 for sent, lost in big if lost >= 0.9 * sent)
    clean = sum(1 for sent, lost in big if lost <= 0.05 * sent)
    return dead >= 2 and clean >= 2 and dead + clean >= 0.9 * len(big)


def is_dead_since(sent: int, lost: int) -> bool:
    """Whether (nearly) all was lost of what was sent after the first loss."""
    return sent >= _SINCE_ONSET and lost >= _DEAD * sent


def symptom_of(
    component_type: str, rate: float, crossed: list[Crossing], large_classes: frozenset[str]
) -> tuple[str, str | None]:
    """(symptom, class or None)."""
    cls = sick_class(per_class(crossed))
    if cls is not None:
        return ("large_packet_drop" if cls in large_classes else "class_drop"), cls
    if rate < _DEAD and is_flow_blackhole(crossed):
        return "flow_blackhole", None
    if rate >= _DEAD:
        return ("switch_down" if component_type == "switch" else "blackhole"), None
    return "drop", None
