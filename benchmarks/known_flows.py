"""Lists and traces of before put into an analyzer's flow book as columns, in the place of a million messages.

What is there afterwards is what the messages would have left (`same_book` compares); it only takes less time.
"""

from __future__ import annotations

import numpy as np
from agents_at_scale import Agents

from pingmesh.analyzer.flow_rows import ACK, PROBE
from pingmesh.analyzer.flows import FlowBook
from pingmesh.messages import TOR_MESH


def fill(book: FlowBook, agents: Agents, traced_ns: int) -> None:
    """Give an empty book every list and every known path of `agents`."""
    f, r, names = agents.flows, book.rows, agents.names
    rnic = np.array([book.rnics.of(n) for n in names], np.int32)
    host = np.array([book.hosts.of(n.split("/")[0]) for n in names], np.int32)
    classes = [book.class_names.of(c) for c in ("small", "large")]
    counts = np.diff(agents.first)
    r.rows = 0
    for i, name in enumerate(names):
        slot = r.allocate(i + 1, 1, int(counts[i]))
        r.set_latest(slot)
        book.rnic_names[i + 1] = name
        book.classes[i + 1] = ["small", "large"]
        book.latest[i + 1] = 1
        book._versions[i + 1].append(1)
    at = r.base[f.src] + f.index
    r.used[at] = True
    r.src[at], r.dst[at] = rnic[f.src], rnic[f.dst]
    r.src_host[at], r.dst_host[at] = host[f.src], host[f.dst]
    r.sport[at], r.cls[at], r.kind[at] = f.sport, f.cls, f.kind
    r.interval[at] = 1_600_000
    r.cls_name[at] = np.array(classes)[f.cls]
    _paths(book, agents, at, traced_ns)
    book.changes += 1


def _paths(book: FlowBook, agents: Agents, at: np.ndarray, traced_ns: int) -> None:
    f, r = agents.flows, book.rows
    pods, leaves, aggs, cores, _, _ = agents.shape
    of = book.elements.of
    tx, rx = (np.array([of(f"{n} {side}") for n in agents.names], np.int32) for side in ("tx", "rx"))
    tors = [(f"p{p + 1}-leaf{k + 1}", f"p{p + 1}-agg") for p in range(pods) for k in range(leaves)]
    to_agg = np.array([[of(f"{tor}->{agg}{a + 1}") for a in range(aggs)] for tor, agg in tors])
    from_agg = np.array([[of(f"{agg}{a + 1}->{tor}") for a in range(aggs)] for tor, agg in tors])
    width = cores // aggs
    pairs = [(p, c // width, c) for p in range(pods) for c in range(cores)]
    to_core = np.array([of(f"p{p + 1}-agg{a + 1}->core{c + 1}") for p, a, c in pairs]).reshape(pods, cores)
    from_core = np.array([of(f"core{c + 1}->p{p + 1}-agg{a + 1}") for p, a, c in pairs]).reshape(pods, cores)
    for role in (PROBE, ACK):
        a, b = (f.src, f.dst) if role == PROBE else (f.dst, f.src)
        mesh = f.kind == TOR_MESH
        rows = at[mesh]
        r.path[role, rows, 0], r.path[role, rows, 1] = tx[a[mesh]], rx[b[mesh]]
        r.plain[role, rows] = True
        known = np.flatnonzero(agents.known)
        rows, a, b = at[known], a[known], b[known]
        up, core = f.up[role, known], f.core[role, known]
        leaf_a, leaf_b = a // agents.per_leaf, b // agents.per_leaf
        far = core >= 0
        path = np.full((len(rows), r.path.shape[2]), -1)
        path[:, 0], path[:, 1] = tx[a], to_agg[leaf_a, up]
        path[far, 2] = to_core[leaf_a[far] // leaves, core[far]]
        path[far, 3] = from_core[leaf_b[far] // leaves, core[far]]
        path[far, 4], path[~far, 2] = from_agg[leaf_b, up][far], from_agg[leaf_b, up][~far]
        path[far, 5], path[~far, 3] = rx[b][far], rx[b][~far]
        r.path[role, rows] = path
        r.plain[role, rows] = r.traced[role, rows] = True
        r.since[role, rows] = r.confirmed[role, rows] = traced_ns


def same_book(a: FlowBook, b: FlowBook) -> bool:
    """Whether two books hold the same flows on the same paths. O(flows); for small fabrics."""
    when = 1 << 62
    return dict(a.flows) == dict(b.flows) and all(
        a.paths_at(flow, role, when) == b.paths_at(flow, role, when)
        and (a.record(flow, role) is None) == (b.record(flow, role) is None)
        for flow in a.flows.values()
        for role in (PROBE, ACK)
    )
