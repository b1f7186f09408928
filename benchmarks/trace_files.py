"""Probe traces with ground truth (`.npz`): read and written as arrays, and made into what the localiser computes on.

A trace is one window of counts over recorded flows: `nodes`, `node_kind` (0 ToR, 1 aggregation, 2 core, 3 spine,
4 NIC) and `edges` (undirected cables); per record `src`, `dst` (NICs), `path`, `rpath` (node ids, padded with -1),
`path_known`, `kind` (0 ToR-mesh, 1 inter-ToR, 2 service), `sent`, `lost`; `meta` (JSON) and `truth_*`. Of `meta` only
`round_trip` is used for inference, of `truth_*` nothing.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pingmesh.analyzer.candidates import Candidate
from pingmesh.analyzer.components import Components, compile_components
from pingmesh.analyzer.table import Table, expand, pointer

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Link = tuple[int, int]
NIC = 4
"""`node_kind` of an RNIC."""
HOPS = 7
"""Nodes of the longest path."""


@dataclass(frozen=True, eq=False)
class Fabric:
    """Nodes and cables. A directed link is a number: cable i is link i as `edges` gives it, and i + cables reversed."""

    nodes: Ints
    kinds: Ints
    edges: Ints

    @functools.cached_property
    def links(self) -> Ints:
        """(links, 2): node ids of each directed link."""
        return np.concatenate((self.edges, self.edges[:, ::-1]))

    @functools.cached_property
    def is_nic(self) -> npt.NDArray[np.bool_]:
        """By node id."""
        out = np.zeros(int(self.nodes.max()) + 1, bool)
        out[self.nodes[self.kinds == NIC]] = True
        return out

    @functools.cached_property
    def nic_cables(self) -> npt.NDArray[np.bool_]:
        """(links,): whether a link is one direction of an RNIC's cable."""
        return self.is_nic[self.links[:, 0]] | self.is_nic[self.links[:, 1]]

    @functools.cached_property
    def tor(self) -> Ints:
        """NIC id -> its ToR (-1 for other ids)."""
        out = np.full(len(self.is_nic), -1)
        ends = self.links[self.is_nic[self.links[:, 0]]]
        out[ends[:, 0]] = ends[:, 1]
        return out

    @functools.cached_property
    def names(self) -> list[str]:
        """Element name of each directed link, as the product writes them."""
        return [
            f"{a} tx" if self.is_nic[a] else f"{b} rx" if self.is_nic[b] else f"{a}->{b}"
            for a, b in self.links.tolist()
        ]

    @functools.cached_property
    def _keys(self) -> tuple[Ints, Ints]:
        keys = self.links[:, 0] * len(self.is_nic) + self.links[:, 1]
        order = np.argsort(keys)
        return keys[order], order

    def numbers(self, a: Ints, b: Ints) -> Ints:
        """Link numbers of node pairs (any shape). O(pairs x log links). KeyError for a pair without a cable."""
        keys, order = self._keys
        wanted = a.astype(np.int64) * len(self.is_nic) + b
        at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
        if np.any(keys[at] != wanted):
            raise KeyError("a path takes a step where there is no cable")
        return order[at]

    def hops(self, path: npt.ArrayLike) -> Ints:
        """Link numbers along (rows, nodes) paths of node ids: (rows, nodes - 1), -1 after the end."""
        nodes = np.asarray(path, np.int64)
        there = nodes[:, 1:] >= 0
        out = np.full(there.shape, -1)
        out[there] = self.numbers(nodes[:, :-1][there], nodes[:, 1:][there])
        return out

    @functools.cached_property
    def next_hops(self) -> tuple[Ints, Ints]:
        """CSR over node ids: the switches beside each node."""
        links = self.links[~self.is_nic[self.links[:, 1]]]
        links = links[np.argsort(links[:, 0], kind="stable")]
        return pointer(np.bincount(links[:, 0], minlength=len(self.is_nic))), links[:, 1]

    def distances(self, to: Ints) -> npt.NDArray[np.int16]:
        """(len(to), switch ids): hops between switches. O(hops x switches^2 x len(to)), as matrix products."""
        size = int(self.nodes[self.kinds != NIC].max()) + 1
        trunks = self.links[~self.nic_cables]
        beside = np.zeros((size, size), np.float32)
        beside[trunks[:, 0], trunks[:, 1]] = 1
        out = np.full((len(to), size), 99, np.int16)
        reached = np.zeros((len(to), size), np.float32)
        reached[np.arange(len(to)), to] = 1
        for step in range(HOPS):
            out[(reached > 0) & (out == 99)] = step
            reached = ((reached @ beside + reached) > 0).astype(np.float32)
        return out

    def shortest(self, a: Ints, b: Ints) -> tuple[Ints, Ints]:
        """All shortest paths between pairs of switches: CSR pointers (pairs + 1) and hops (paths, 5), as link numbers
        padded with -1. O(paths x hops x degree)."""
        targets, which = np.unique(b, return_inverse=True)
        distance = self.distances(targets)
        ptr, beside = self.next_hops
        owner, at = np.arange(len(a)), a.astype(np.int64)
        hops = np.full((len(a), HOPS - 2), -1)
        for step in range(HOPS - 2):
            todo = distance[which[owner], at] > 0
            if not todo.any():
                break
            positions, of = expand(ptr, at[todo])
            of = np.flatnonzero(todo)[of]
            nearer = distance[which[owner[of]], beside[positions]] == distance[which[owner[of]], at[of]] - 1
            of, following = of[nearer], beside[positions][nearer]
            taken = hops[of]
            taken[:, step] = self.numbers(at[of], following)
            keep = ~todo
            owner = np.concatenate((owner[keep], owner[of]))
            hops = np.concatenate((hops[keep], taken))
            at = np.concatenate((at[keep], following))
        order = np.argsort(owner, kind="stable")
        return pointer(np.bincount(owner, minlength=len(a))), hops[order]


@dataclass(frozen=True, eq=False)
class Truth:
    """What failed; never an input of inference."""

    links: Ints = field(default_factory=lambda: np.empty((0, 2), np.int64))
    link_rate: Floats = field(default_factory=lambda: np.empty(0))
    link_probes: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    link_lost: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    devices: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    device_rate: Floats = field(default_factory=lambda: np.empty(0))
    device_lost: Ints = field(default_factory=lambda: np.empty(0, np.int64))

    @classmethod
    def of(cls, arrays: Any) -> Truth:
        return cls(*(np.asarray(arrays[f"truth_{name}"]) for name in cls.__dataclass_fields__))


@dataclass(frozen=True, eq=False)
class Trace:
    """One window. Arrays are (records,) unless said otherwise; `path` and `rpath` are (records, 7)."""

    name: str
    meta: dict[str, Any]
    fabric: Fabric
    src: Ints
    dst: Ints
    path: npt.NDArray[np.int32]
    rpath: npt.NDArray[np.int32]
    path_known: npt.NDArray[np.bool_]
    kind: Ints
    sent: Ints
    lost: Ints
    truth: Truth

    @property
    def round_trip(self) -> bool:
        return bool(self.meta["round_trip"])


def load(file: Path) -> Trace:
    """A trace as arrays; a trace without `truth_*` (one to be judged blind) has an empty truth."""
    with np.load(file, allow_pickle=False) as archive:
        d = {key: archive[key] for key in archive.files}
    wide = {key: d[key].astype(np.int64) for key in ("src", "dst", "kind", "sent", "lost")}
    return Trace(
        name=file.stem,
        meta=json.loads(str(d["meta"])),
        fabric=Fabric(*(d[key].astype(np.int64) for key in ("nodes", "node_kind", "edges"))),
        path=d["path"].astype(np.int32),
        rpath=d["rpath"].astype(np.int32),
        path_known=d["path_known"].astype(bool),
        truth=Truth.of(d) if "truth_links" in d else Truth(),
        **wide,
    )


def save(trace: Trace, directory: Path) -> Path:
    """Write a trace as `load` reads it."""
    truth = {f"truth_{name}": getattr(trace.truth, name) for name in Truth.__dataclass_fields__}
    file = directory / f"{trace.name}.npz"
    np.savez_compressed(
        file,
        allow_pickle=False,
        meta=np.array(json.dumps(trace.meta)),
        nodes=trace.fabric.nodes.astype(np.int32),
        node_kind=trace.fabric.kinds.astype(np.uint8),
        edges=trace.fabric.edges.astype(np.int32),
        src=trace.src.astype(np.int32),
        dst=trace.dst.astype(np.int32),
        path=trace.path,
        rpath=trace.rpath,
        path_known=trace.path_known.astype(np.uint8),
        kind=trace.kind.astype(np.int8),
        sent=trace.sent.astype(np.uint16),
        lost=trace.lost.astype(np.uint16),
        **truth,
    )
    return file


def candidates(fabric: Fabric) -> list[Candidate]:
    """What may be broken, as for any fabric: each direction of each cable and RNIC, both, and each switch."""
    names = fabric.names
    cables = len(fabric.edges)
    out: list[Candidate] = []
    touching: dict[int, list[str]] = {n: [] for n in fabric.nodes[fabric.kinds != NIC].tolist()}
    for i, (a, b) in enumerate(fabric.edges.tolist()):
        there, back = names[i], names[i + cables]
        for end in (a, b):
            if end in touching:
                touching[end] += (there, back)
        if fabric.nic_cables[i]:
            component, kind = str(a if fabric.is_nic[a] else b), "rnic"
            directions = ("tx", "rx") if fabric.is_nic[a] else ("rx", "tx")
        else:
            component, kind, directions = f"{a}--{b}", "link", (there, back)
        out += (
            Candidate(component, kind, directions[0], frozenset((there,))),  # type: ignore[arg-type]
            Candidate(component, kind, directions[1], frozenset((back,))),  # type: ignore[arg-type]
            Candidate(component, kind, "both", frozenset((there, back))),  # type: ignore[arg-type]
        )
    out += (Candidate(str(n), "switch", None, frozenset(elements)) for n, elements in touching.items())
    return out


@dataclass(frozen=True, eq=False)
class Compiled:
    """A fabric's components, and the product's element number of each directed link."""

    components: Components
    element: Ints


def compile_fabric(fabric: Fabric) -> Compiled:
    """Once for a fabric. O(links)."""
    components = compile_components(candidates(fabric))
    return Compiled(components, np.array([components.index[name] for name in fabric.names], np.int64))


def table_of(trace: Trace, compiled: Compiled) -> Table:
    """The trace's records as a table: known paths as they are, hidden ones as all shortest paths between the ToRs.

    O(records x hops + hidden pairs x paths x hops). The ACK's path of a round trip is appended to the probe's.
    """
    fabric = trace.fabric
    known = np.flatnonzero(trace.path_known)
    hidden = np.flatnonzero(~trace.path_known)
    hops = fabric.hops(trace.path[known])
    if trace.round_trip:
        hops = np.concatenate((hops, fabric.hops(trace.rpath[known])), axis=1)
    sets, paths = len(known), [hops]
    row_set = np.empty(len(trace.src), np.int64)
    row_set[known] = np.arange(len(known))
    paths_in_set = [np.ones(len(known), np.int64)]
    if len(hidden):
        size = len(fabric.is_nic)
        pairs, of = np.unique(trace.src[hidden] * size + trace.dst[hidden], return_inverse=True)
        row_set[hidden] = sets + of
        more, counts = _hidden(fabric, pairs // size, pairs % size, trace.round_trip)
        width = max(hops.shape[1], more.shape[1])
        paths = [np.pad(p, ((0, 0), (0, width - p.shape[1])), constant_values=-1) for p in (hops, more)]
        paths_in_set.append(counts)
    all_paths = np.concatenate(paths)
    there = all_paths >= 0
    return Table(
        elements=len(compiled.components.index),
        path_ptr=pointer(there.sum(axis=1)),
        path_elements=compiled.element[all_paths[there]],
        set_ptr=pointer(np.concatenate(paths_in_set)),
        row_set=row_set,
        sent=trace.sent.astype(np.float64),
        lost=trace.lost.astype(np.float64),
    )


def _hidden(fabric: Fabric, src: Ints, dst: Ints, round_trip: bool) -> tuple[Ints, Ints]:
    """All paths of pairs of NICs, and how many each pair has. A round trip's ACK takes any path, independently."""
    a, b = fabric.tor[src], fabric.tor[dst]
    size = len(fabric.is_nic)
    ends, of = np.unique(a * size + b, return_inverse=True)
    ptr, between = fabric.shortest(ends // size, ends % size)
    rows, owner = expand(ptr, of)
    first, last = fabric.numbers(src, a), fabric.numbers(b, dst)
    out = np.concatenate((first[owner, None], between[rows], last[owner, None]), axis=1)
    if not round_trip:
        return out, np.diff(ptr)[of]
    back, counts = _hidden(fabric, dst, src, False)
    ways = pointer(counts)
    combined, forward = expand(ways, owner)
    return np.concatenate((out[forward], back[combined]), axis=1), np.bincount(owner[forward], minlength=len(src))
