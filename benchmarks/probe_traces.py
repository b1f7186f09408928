"""Probe traces with ground truth (`.npz`), as observations and candidates; and how a prediction is scored on one."""

from __future__ import annotations

import collections
import csv
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pingmesh.analyzer.candidates import Candidate
from pingmesh.analyzer.evidence import Observation

NIC = 4
"""`node_kind` of an RNIC."""


@dataclass(frozen=True)
class Trace:
    name: str
    observations: list[Observation]
    candidates: list[Candidate]
    round_trip: bool
    truth_links: frozenset[tuple[int, int]]
    truth_devices: frozenset[int]
    degree: dict[int, int]
    """Directed links per node."""


def load(file: Path) -> Trace:
    d = np.load(file, allow_pickle=False)
    meta = json.loads(str(d["meta"]))
    nodes, kinds, edges = d["nodes"].tolist(), d["node_kind"].tolist(), d["edges"].tolist()
    kind = dict(zip(nodes, kinds, strict=True))
    neighbours: dict[int, list[int]] = collections.defaultdict(list)
    for a, b in edges:
        neighbours[a].append(b)
        neighbours[b].append(a)
    name: dict[tuple[int, int], str] = {}
    for a, b in [(a, b) for a, b in edges] + [(b, a) for a, b in edges]:
        name[a, b] = f"{a} tx" if kind[a] == NIC else f"{b} rx" if kind[b] == NIC else f"{a}->{b}"

    ecmp: dict[tuple[int, int], tuple[tuple[str, ...], ...]] = {}
    shared: dict[tuple[tuple[str, ...], ...], tuple[tuple[str, ...], ...]] = {}

    def switch_paths(a: int, b: int) -> tuple[tuple[str, ...], ...]:
        if (a, b) not in ecmp:
            distance, queue = {b: 0}, collections.deque([b])
            while queue:
                for y in neighbours[x := queue.popleft()]:
                    if kind[y] != NIC and y not in distance:
                        distance[y] = distance[x] + 1
                        queue.append(y)

            def walk(x: int) -> Iterator[tuple[str, ...]]:
                if x == b:
                    yield ()
                for y in neighbours[x]:
                    if distance.get(y, 99) == distance[x] - 1:
                        yield from ((name[x, y], *rest) for rest in walk(y))

            ecmp[a, b] = tuple(walk(a))
        return ecmp[a, b]

    def known(hops: list[int]) -> tuple[str, ...]:
        hops = [h for h in hops if h >= 0]
        return tuple(name[a, b] for a, b in itertools.pairwise(hops))

    tor = {n: neighbours[n][0] for n in nodes if kind[n] == NIC}
    back = d["rpath"].tolist() if meta["round_trip"] else None
    observations = []
    columns = (d[c].tolist() for c in ("path", "path_known", "src", "dst", "sent", "lost"))
    for i, (path, is_known, src, dst, sent, lost) in enumerate(zip(*columns, strict=True)):
        if is_known:
            paths: tuple[tuple[str, ...], ...] = (known(path) + (known(back[i]) if back else ()),)
        else:
            ends = name[src, tor[src]], name[tor[dst], dst]
            paths = tuple((ends[0], *p, ends[1]) for p in switch_paths(tor[src], tor[dst]))
        observations.append(Observation(sent, lost, shared.setdefault(paths, paths)))
    return Trace(
        file.stem,
        observations,
        list(_candidates(kind, neighbours, name, groups=not meta["round_trip"])),
        meta["round_trip"],
        frozenset((int(a), int(b)) for a, b in d["truth_links"]),
        frozenset(int(x) for x in d["truth_devices"]),
        {n: 2 * len(neighbours[n]) for n in nodes},
    )


def _candidates(
    kind: dict[int, int], neighbours: dict[int, list[int]], name: dict[tuple[int, int], str], groups: bool
) -> Iterator[Candidate]:
    for a, b in name:
        if a > b:
            continue
        there, back = name[a, b], name[b, a]
        if NIC in (kind[a], kind[b]):
            nic = a if kind[a] == NIC else b
            if groups:
                yield Candidate(str(nic), "rnic", "tx", frozenset({f"{nic} tx"}))
                yield Candidate(str(nic), "rnic", "rx", frozenset({f"{nic} rx"}))
                yield Candidate(str(nic), "rnic", "both", frozenset({there, back}))
            else:
                yield Candidate(str(nic), "rnic", "tx", frozenset({f"{nic} tx"}))
        else:
            yield Candidate(f"{a}--{b}", "link", there, frozenset({there}))
            yield Candidate(f"{a}--{b}", "link", back, frozenset({back}))
            if groups:
                yield Candidate(f"{a}--{b}", "link", "both", frozenset({there, back}))
    for switch, k in kind.items():
        if k != NIC:
            both = [(switch, n) for n in neighbours[switch]] + [(n, switch) for n in neighbours[switch]]
            yield Candidate(str(switch), "switch", None, frozenset(name[e] for e in both))


def predicted(trace: Trace, named: Sequence[Candidate]) -> tuple[set[tuple[int, int]], set[int]]:
    """Directed links and devices, as the truth lists them."""
    links: set[tuple[int, int]] = set()
    devices: set[int] = set()
    ends = {c: _ends(c) for c in named}
    for c in named:
        if c.type == "switch":
            devices.add(int(c.component))
        else:
            links |= ends[c]
    tors = {
        e.split(" ")[0]: c.component for c in trace.candidates if c.type == "switch" for e in c.elements if " " in e
    }
    links = {(a if a >= 0 else int(tors[str(b)]), b if b >= 0 else int(tors[str(a)])) for a, b in links}
    return links, devices


def _ends(c: Candidate) -> set[tuple[int, int]]:
    out = set()
    for e in c.elements:
        if e.endswith(" tx"):
            out.add((int(e[:-3]), -1))
        elif e.endswith(" rx"):
            out.add((-1, int(e[:-3])))
        else:
            a, b = e.split("->")
            out.add((int(a), int(b)))
    return out


def score(trace: Trace, named: Sequence[Candidate]) -> tuple[float, float]:
    """Precision and recall: a name is right if it failed or touches a failed device; links of an unnamed device count
    one in (its links + 1)."""
    links, devices = predicted(trace, named)
    truth = set(trace.truth_links)
    if trace.round_trip:  # both directions of an RNIC's cable lie on the same records
        nics = {int(c.component) for c in trace.candidates if c.type == "rnic"}

        def cable(link: tuple[int, int]) -> tuple[int, int]:
            return (min(link), max(link)) if nics & set(link) else link

        links, truth = {cable(x) for x in links}, {cable(x) for x in truth}
    failed = trace.truth_devices
    right = len(devices & failed) + sum(x in truth or bool(failed & set(x)) for x in links)
    precision = right / (len(links) + len(devices)) if links or devices else 1.0
    count = len(truth) + len(failed)
    if not count:
        return precision, 1.0
    hits = float(len(links & truth) + len(devices & failed))
    for device in failed - devices:
        hits += sum(device in x for x in links) / (trace.degree[device] + 1)
    return precision, hits / count


def peers(directory: Path, trace: str) -> list[dict[str, str]]:
    """Rows of `peers_open.csv` beside (or above) the traces, if it is there."""
    for place in (directory, directory.parent):
        file = place / "peers_open.csv"
        if file.is_file():
            with file.open(newline="") as f:
                return [r for r in csv.DictReader(f) if r["trace"] == trace]
    return []
