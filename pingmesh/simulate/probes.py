"""Probe lists as arrays: which 5-tuples are probed how often, and the paths of probes and of their ACKs.

The lists follow the controller's rules (Liu et al. 2024, §4.2): ToR-mesh inside each ToR, and between ToRs enough
random 5-tuples, at rates that give every directed switch link its probes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pingmesh.analyzer.table import Floats, Ints, pointer
from pingmesh.simulate.fabric import Distances, Fabric, Small, draw_paths

TOR_MESH, INTER_TOR = 0, 1
CLASSES = ("small", "large", "other")
"""`other` rides another DSCP than the first two."""
FIRST_PORT, PORTS = 0xC000, 0x4000
FIT_ROUNDS = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Lists:
    """What is probed. Rates are probes/s; `mates` bounds the ToR-mates that one RNIC probes."""

    link_rate: float = 10.0
    link_tuples: int = 16
    mesh_rate: float = 10.0
    mates: int = 16
    large_share: float = 0.1
    other_share: float = 0.0
    """Shares of the tuples that are probed in the class `large` or `other` too, each at the tuple's rate."""


@dataclass(frozen=True, slots=True, eq=False)
class Flows:
    """Flows as columns, (flows,); `there` and `back` are (flows, hops) element numbers padded with -1."""

    src: Ints
    dst: Ints
    src_leg: Ints
    dst_leg: Ints
    sport: Ints
    cls: Ints
    kind: Ints
    rate: Floats
    there: Small
    back: Small

    def __len__(self) -> int:
        return len(self.src)


def tor_mesh(fabric: Fabric, lists: Lists, rng: np.random.Generator) -> tuple[Ints, Ints]:
    """(prober, target) RNICs of the ToR-mesh: each probes up to `mates` others under its ToR. O(RNICs x mates)."""
    order = np.argsort(fabric.leg_switch, kind="stable")
    order = order[fabric.leg_switch[order] >= 0]
    src, dst = [], []
    for members in np.split(order, np.flatnonzero(np.diff(fabric.leg_switch[order])) + 1):
        n = len(members)
        if n < 2:
            continue
        if n - 1 <= lists.mates:
            offsets = np.broadcast_to(np.arange(1, n), (n, n - 1))
        else:
            # A random subset each: distinct offsets, so that every RNIC is probed by about as many as it probes.
            offsets = np.argpartition(rng.random((n, n - 1)), lists.mates, axis=1)[:, : lists.mates] + 1
        at = np.arange(n)[:, None]
        src.append(np.broadcast_to(members[:, None], offsets.shape).ravel())
        dst.append(members[(at + offsets) % n].ravel())
    if not src:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    src_leg, dst_leg = np.concatenate(src), np.concatenate(dst)
    other_host = fabric.host_of[fabric.leg_rnic[src_leg]] != fabric.host_of[fabric.leg_rnic[dst_leg]]
    return src_leg[other_host].astype(np.int64), dst_leg[other_host].astype(np.int64)


def inter_tor(fabric: Fabric, lists: Lists, rng: np.random.Generator) -> tuple[Ints, Ints]:
    """(prober, target) legs between ToRs that may probe each other, about `link_tuples` over every directed link.

    Every ToR with uplinks sends as many tuples; the busiest tier decides how many. O(tuples).
    """
    tors = len(fabric.tors)
    under = [np.flatnonzero(fabric.leg_switch == s) for s in fabric.tors] if tors < 64 else _under(fabric)
    if tors < 2:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    of_tor = np.array([lists.link_tuples * int((fabric.link_source == s).sum()) for s in fabric.tors])
    above = fabric.tier[fabric.link_source] > 1
    climbing = int((fabric.tier[fabric.link_target[above]] > fabric.tier[fabric.link_source[above]]).sum())
    # Most far tuples climb to the top: there must be enough for the links there too.
    short = lists.link_tuples * climbing / max(int(of_tor.sum()), 1)
    if short > 1:
        of_tor = np.ceil(of_tor * short).astype(np.int64)
    src_tor = np.repeat(np.arange(tors), of_tor)
    dst_tor = (src_tor + 1 + (rng.random(len(src_tor)) * (tors - 1)).astype(np.int64)) % tors
    sizes = np.array([len(u) for u in under])
    ptr, flat = pointer(sizes), np.concatenate(under)
    # Round the RNICs of a ToR, so that each probes and is probed.
    turn = np.arange(len(src_tor))
    src = flat[ptr[src_tor] + turn % sizes[src_tor]]
    dst = flat[ptr[dst_tor] + (rng.random(len(dst_tor)) * sizes[dst_tor]).astype(np.int64)]
    ok = fabric.intact.any[fabric.tors[src_tor], dst_tor] < 100
    ok &= fabric.host_of[fabric.leg_rnic[src]] != fabric.host_of[fabric.leg_rnic[dst]]
    return src[ok].astype(np.int64), dst[ok].astype(np.int64)


def _under(fabric: Fabric) -> list[Ints]:
    order = np.argsort(fabric.leg_switch, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(fabric.leg_switch[order])) + 1)


def fit_rates(links: int, there: Small, rate: float) -> Floats:
    """Probes/s of each flow so that every directed link that is walked carries `rate`, as nearly as they allow.

    Proportional fitting: each flow is scaled by the mean of what its links lack. O(rounds x flows x hops).
    """
    rows, hops = np.nonzero((there >= 0) & (there < links))
    element = there[rows, hops]
    walked = np.bincount(rows, minlength=len(there))
    out = np.full(len(there), rate / 16)
    for _ in range(FIT_ROUNDS):
        load = np.bincount(element, weights=out[rows], minlength=links)
        lack = np.bincount(rows, weights=rate / load[element], minlength=len(there))
        out *= np.where(walked, lack / np.maximum(walked, 1), 1.0)
    return out


def draw_probes(
    fabric: Fabric,
    rng: np.random.Generator,
    lists: Lists | None = None,
    *,
    ack_ways: Distances | None = None,
) -> Flows:
    """Draw the lists of a whole fabric and the way every tuple and its ACK take.

    `ack_ways`: other routes for ACKs (asymmetric routing). O(flows x hops x ports).
    """
    lists = lists or Lists()
    mesh_src, mesh_dst = tor_mesh(fabric, lists, rng)
    far_src, far_dst = inter_tor(fabric, lists, rng)
    src_leg, dst_leg = np.concatenate((mesh_src, far_src)), np.concatenate((mesh_dst, far_dst))
    kind = np.repeat([TOR_MESH, INTER_TOR], [len(mesh_src), len(far_src)])
    src, dst = fabric.leg_rnic[src_leg].astype(np.int64), fabric.leg_rnic[dst_leg].astype(np.int64)
    # An RNIC with several legs sends each tuple, and each answer, by the one that its hash picks.
    back_src = np.where(kind == TOR_MESH, dst_leg, fabric.legs(dst, rng.random(len(dst))))
    there = draw_paths(fabric, src_leg, dst_leg, rng)
    back = draw_paths(fabric, back_src, src_leg, rng, ack_ways)
    mesh = kind == TOR_MESH
    mates = np.bincount(src[mesh], minlength=len(fabric.rnics))
    rate = np.where(mesh, lists.mesh_rate / np.maximum(mates[src], 1), 0.0)
    rate[~mesh] = fit_rates(fabric.links, there[~mesh], lists.link_rate)
    sport = FIRST_PORT + rng.integers(0, PORTS, len(src))
    flows = Flows(src, dst, src_leg, dst_leg, sport, np.zeros(len(src), np.int64), kind, rate, there, back)
    shares = (lists.large_share, lists.other_share)
    rows, classes = [np.arange(len(src))], [np.zeros(len(src), np.int64)]
    for number, share in enumerate(shares, 1):
        chosen = np.flatnonzero(rng.random(len(src)) < share)
        rows.append(chosen)
        classes.append(np.full(len(chosen), number))
    return with_classes(flows, np.concatenate(rows), np.concatenate(classes))


def with_classes(flows: Flows, rows: Ints, cls: Ints) -> Flows:
    """Some of the flows, each in a class: the same tuple and path."""
    return Flows(
        flows.src[rows],
        flows.dst[rows],
        flows.src_leg[rows],
        flows.dst_leg[rows],
        flows.sport[rows],
        cls,
        flows.kind[rows],
        flows.rate[rows],
        flows.there[rows],
        flows.back[rows],
    )


def link_load(fabric: Fabric, flows: Flows) -> Floats:
    """Probes/s of the first class that every directed link carries, (links,)."""
    first = flows.cls == 0
    at = flows.there[first]
    weights = np.broadcast_to(flows.rate[first, None], at.shape)
    walked = (at >= 0) & (at < fabric.links)
    load: Floats = np.bincount(at[walked], weights=weights[walked], minlength=fabric.links).astype(np.float64)
    return load
