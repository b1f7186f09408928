"""How a prediction is scored on a trace with ground truth.

A name is `u>v` for a directed link or `u` for a switch; names joined by `|` are a class: one entry, right only if each
member explains the truth as well as every other, that is, lies on the same records as something right. Precision
counts each member. A link is right if it failed or touches a failed switch. Recall: hits over what failed; of a
failed switch that was not named itself, each named link of it counts one in (its directed links + 1). Where nothing
is named precision is 1, where nothing failed recall is 1. In round trips both directions of an RNIC's cable lie on
the same records and count as one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from trace_files import Fabric, Ints, Link, Trace

from pingmesh.analyzer.localise import Suspect
from pingmesh.analyzer.table import Table

Name = Link | int
"""A directed link or a switch."""


@dataclass(frozen=True)
class Score:
    precision: float
    recall: float

    @property
    def f(self) -> float:
        """The harmonic mean."""
        both = self.precision + self.recall
        return 2 * self.precision * self.recall / both if both else 0.0


def parse(name: str) -> Name:
    a, sep, b = name.partition(">")
    return (int(a), int(b)) if sep else int(a)


def text(name: Name) -> str:
    return f"{name[0]}>{name[1]}" if isinstance(name, tuple) else str(name)


def entries(suspects: Sequence[Suspect], fabric: Fabric) -> list[str]:
    """Suspects as names. A component that failed in both directions is two entries; one that the evidence cannot tell
    from its alternatives is one entry with all of them."""
    out: list[str] = []
    for s in suspects:
        names = _names(s.candidate.component, s.candidate.type, s.candidate.elements, fabric)
        if not s.equals:
            out += map(text, names)
            continue
        for other in s.equals:
            names += _names(other.component, other.type, other.elements, fabric)
        out.append("|".join(dict.fromkeys(map(text, names))))
    return list(dict.fromkeys(out))


def _names(component: str, kind: str, elements: frozenset[str], fabric: Fabric) -> list[Name]:
    if kind == "switch":
        return [int(component)]
    out: list[Name] = []
    for e in sorted(elements):
        if "->" in e:
            a, b = map(int, e.split("->"))
        else:
            nic, side = e.split(" ")
            a, b = int(nic), int(fabric.tor[int(nic)])
            if side == "rx":
                a, b = b, a
        out.append((a, b))
    return out


def signatures(table: Table, element_of_link: Ints, fabric: Fabric) -> dict[Name, int]:
    """For each link and switch a number that is the same for two that lie on the same records (and, where paths are
    hidden, on as many of each record's paths); 0 for those on none. O(paths x hops)."""
    random = np.random.default_rng(0).integers(1, 2**63, table.rows, dtype=np.uint64)
    of_set = np.zeros(len(table.set_ptr) - 1, np.uint64)
    np.add.at(of_set, table.row_set, random)
    of_path = np.repeat(of_set, np.diff(table.set_ptr))
    of_hop = np.repeat(of_path, np.diff(table.path_ptr))
    by_element = np.zeros(table.elements, np.uint64)
    np.add.at(by_element, table.path_elements, of_hop)
    links = by_element[element_of_link]
    out: dict[Name, int] = {(a, b): s for (a, b), s in zip(fabric.links.tolist(), links.tolist(), strict=True)}
    # A path crosses two links of a switch, or one at its end: it counts once.
    path_of_hop = np.repeat(np.arange(len(of_path)), np.diff(table.path_ptr))
    node_of = np.full((table.elements, 2), -1)
    node_of[element_of_link] = fabric.links
    ends = np.concatenate((node_of[table.path_elements, 0], node_of[table.path_elements, 1]))
    size = len(fabric.is_nic)
    once = np.unique(np.tile(path_of_hop, 2) * size + ends)
    by_node = np.zeros(size, np.uint64)
    np.add.at(by_node, once % size, of_path[once // size])
    out |= {int(n): int(by_node[n]) for n in fabric.nodes if not fabric.is_nic[n]}
    return out


def score(trace: Trace, predicted: Sequence[str], same: dict[Name, int] | None = None) -> Score:
    """Precision and recall of the entries; `same`: `signatures`, without which a class is right only if each of its
    members is."""
    fabric, truth = trace.fabric, trace.truth

    def one(name: Name) -> Name:
        cable = isinstance(name, tuple) and trace.round_trip and bool(fabric.is_nic[list(name)].any())
        return (min(name), max(name)) if cable and isinstance(name, tuple) else name

    devices = set(truth.devices.tolist())
    links = {one((a, b)) for a, b in truth.links.tolist()}

    def right(name: Name) -> bool:
        return bool(devices & set(name)) or name in links if isinstance(name, tuple) else name in devices

    alike = {same[name] for name in same if right(one(name)) and same[name]} if same else set()
    classes = {tuple(dict.fromkeys(one(parse(n)) for n in entry.split("|"))) for entry in predicted}
    named: set[Name] = set()
    good = total = 0
    for members in sorted(classes, key=str):
        total += len(members)
        if any(map(right, members)) and all(right(m) or (same is not None and same.get(m) in alike) for m in members):
            good += len(members)
            named |= set(members)
    precision = good / total if total else 1.0
    count = len(links) + len(devices)
    if not count:
        return Score(precision, 1.0)
    hits = float(len(named & links) + len(named & devices))
    for device in devices - named:
        degree = 2 * int((fabric.edges == device).sum())
        hits += sum(isinstance(n, tuple) and device in n for n in named) / (degree + 1)
    return Score(precision, min(hits / count, 1.0))
