"""Makes probe traces with ground truth: topologies, probes over them, faults, losses hop by hop.

    benchmarks/make_traces.py --out DIR [--kind KIND ...] [--topology NAME ...] [--count N] [--seed S]

KIND is a family of faults (`--list` names them); `all` (default): every family, on each topology it is defined for.
Example: benchmarks/make_traces.py --out /tmp/traces --kind gray mix --topology ft8 --count 5 --seed 7

Each directed link drops a background of U(0, noise_max). ToR-mesh: each RNIC to up to 8 RNICs of its ToR. Inter-ToR:
random 5-tuples per ordered pair of ToRs, each on a random shortest path, and more until every directed switch link
carries one. 10 probes/s of each tuple (5 in some families) in 20 s, of which 97 to 100 % were sent.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from trace_files import HOPS, NIC, Fabric, Floats, Ints, Trace, Truth, save

from pingmesh.analyzer.table import expand

WINDOW_S = 20
MATES = 8


def fat_tree(k: int) -> Fabric:
    """k pods of k/2 ToRs and k/2 aggregation switches, (k/2)^2 cores, k/2 RNICs a ToR."""
    half = k // 2
    pods = k * half
    tor = np.arange(pods)
    agg = pods + tor
    core = 2 * pods + np.arange(half * half)
    up = np.repeat(tor, half), (pods + tor[:, None] // half * half + np.arange(half)).ravel()
    over = np.repeat(agg, half), (2 * pods + tor[:, None] % half * half + np.arange(half)).ravel()
    nic = 10000 + np.arange(pods * half)
    down = nic, np.repeat(tor, half)
    return _fabric({0: tor, 1: agg, 2: core, NIC: nic}, up, over, down)


def leaf_spine(leaves: int, spines: int, rnics: int) -> Fabric:
    leaf, spine = np.arange(leaves), leaves + np.arange(spines)
    nic = 10000 + np.arange(leaves * rnics)
    return _fabric(
        {0: leaf, 3: spine, NIC: nic}, (np.repeat(leaf, spines), np.tile(spine, leaves)), (nic, np.repeat(leaf, rnics))
    )


def rail_optimised(groups: int, hosts: int, rails: int, spines: int) -> Fabric:
    """RNIC r of each of a group's hosts is at the group's leaf r; every leaf is at every spine."""
    leaf, spine = np.arange(groups * rails), groups * rails + np.arange(spines)
    number = np.arange(groups * hosts * rails)
    at = number // (hosts * rails) * rails + number % rails
    return _fabric(
        {0: leaf, 3: spine, NIC: 10000 + number},
        (np.repeat(leaf, spines), np.tile(spine, len(leaf))),
        (10000 + number, at),
    )


def _fabric(by_kind: dict[int, Ints], *cables: tuple[Ints, Ints]) -> Fabric:
    return Fabric(
        np.concatenate(list(by_kind.values())),
        np.concatenate([np.full(len(nodes), kind) for kind, nodes in by_kind.items()]),
        np.concatenate([np.stack(ends, axis=1) for ends in cables]),
    )


TOPOLOGIES = {
    "ft8": lambda: fat_tree(8),
    "ft16": lambda: fat_tree(16),
    "ft32": lambda: fat_tree(32),
    "ls": lambda: leaf_spine(30, 10, 10),
    "rail": lambda: rail_optimised(4, 32, 8, 16),
}
STUDIED = ("ft8", "ft16", "ls", "rail")
MAX_TUPLES = {"ft16": 2}
"""5-tuples per pair of ToRs, where pairs are many."""
SERVICE_FLOWS = 5800


@functools.lru_cache
def fabric_of(name: str) -> Fabric:
    """One of `TOPOLOGIES`, made once."""
    return TOPOLOGIES[name]()


@dataclass(frozen=True)
class Family:
    """A kind of trace: how many links fail (`links`, from-to) at which rates, and how it is probed."""

    rates: tuple[float, float] = (0.0, 0.0)
    links: tuple[int, int] = (0, 0)
    """Rates are drawn log-uniformly."""
    device: tuple[float, float] | None = None
    noise: tuple[float, ...] = (1e-5, 1e-4)
    both: float = 0.0
    """Chance that a failed link fails in its other direction too."""
    share: float = 0.0
    """Of the 5-tuples on the failed link that it drops altogether; 0: all packets at the rate."""
    tuples: int = 4
    destinations: int | None = None
    """Other ToRs that a ToR probes; all if None."""
    rates_per_s: tuple[int, ...] = (10,)
    mode: str = "int"
    round_trip: bool = False
    topologies: tuple[str, ...] = STUDIED


FAMILIES = {
    "none": Family(noise=(0.0, 1e-5, 1e-4, 5e-4)),
    "gray": Family((0.001, 0.007), (2, 4)),
    "faint": Family((0.001, 0.003), (2, 4)),
    "mid": Family((0.01, 0.1), (1, 8)),
    "mix": Family((0.002, 1.0), (2, 8), noise=(0.0, 1e-5, 1e-4), both=0.1, rates_per_s=(10, 5)),
    "noisy": Family((0.003, 0.01), (1, 4), noise=(5e-4,)),
    "bh": Family((1.0, 1.0), (1, 1)),
    "tupbh": Family((1.0, 1.0), (1, 1), share=0.3),
    "devhard": Family(device=(0.2, 1.0)),
    "devgray": Family(device=(0.005, 0.02)),
    "dev_link": Family((0.01, 0.1), (1, 1), device=(0.02, 0.2), rates_per_s=(10, 5)),
    "sparse": Family((0.01, 0.1), (2, 4), tuples=1, destinations=12),
    "passive": Family((0.01, 0.1), (1, 4), tuples=2, mode="p", topologies=("ft8", "ls")),
    "a2p": Family((0.005, 0.5), (2, 4), tuples=2, mode="a2p", topologies=("ft8", "ls")),
    "rt": Family((0.01, 0.5), (2, 4), round_trip=True, topologies=("ft8", "ft16", "ls")),
    "rt_sparse": Family((0.01, 0.1), (2, 4), tuples=1, destinations=12, round_trip=True, topologies=("ft16",)),
}


@dataclass(frozen=True, eq=False)
class Plan:
    """Who probes whom over which path: fixed, while losses are drawn many times. Arrays are (records,);
    `path` and `rpath` are node ids (records, 7), `hops` their link numbers (records, 6 or 12), -1 padded."""

    topology: str
    fabric: Fabric
    src: Ints
    dst: Ints
    kind: Ints
    sent: Ints
    path: Ints
    rpath: Ints
    hops: Ints
    mode: str
    probes_per_s: int

    @property
    def round_trip(self) -> bool:
        return bool(self.hops.shape[1] > HOPS - 1)


def walk(fabric: Fabric, a: Ints, b: Ints, rng: np.random.Generator) -> Ints:
    """A random shortest path between each pair of switches (uniform where the fabric is regular): (pairs, 5)."""
    targets, which = np.unique(b, return_inverse=True)
    distance = fabric.distances(targets)
    ptr, beside = fabric.next_hops
    path = np.full((len(a), HOPS - 2), -1)
    path[:, 0] = a
    todo = np.flatnonzero(distance[which, a] > 0)
    for step in range(1, HOPS - 2):
        at = path[todo, step - 1]
        positions, of = expand(ptr, at)
        nearer = distance[which[todo[of]], beside[positions]] == distance[which[todo], at][of] - 1
        choices, of = beside[positions][nearer], of[nearer]
        count = np.bincount(of, minlength=len(todo))
        first = np.cumsum(count) - count
        path[todo, step] = choices[first + (rng.random(len(todo)) * count).astype(np.int64)]
        todo = todo[distance[which[todo], path[todo, step]] > 0]
        if not len(todo):
            break
    return path


def _with_ends(src: Ints, between: Ints, dst: Ints) -> Ints:
    out = np.concatenate((src[:, None], between, np.full((len(src), 1), -1)), axis=1)
    out[np.arange(len(src)), (out >= 0).sum(axis=1)] = dst
    return out


def make_plan(topology: str, family: Family, rng: np.random.Generator, at_most: int | None = None) -> Plan:
    """Flows and paths. `at_most` tuples a pair of ToRs (default: as `MAX_TUPLES`). O(records x hops x degree)."""
    fabric = fabric_of(topology)
    nics = fabric.nodes[fabric.kinds == NIC]
    nics = nics[np.argsort(fabric.tor[nics], kind="stable")]
    tors, first, size = np.unique(fabric.tor[nics], return_index=True, return_counts=True)
    of = np.repeat(np.arange(len(tors)), size)
    within = np.arange(len(nics)) - first[of]
    smallest = int(size.min())
    shifts = np.sort(rng.choice(np.arange(1, smallest), min(MATES, smallest - 1), replace=False))
    mesh_src = np.tile(nics, len(shifts))
    mesh_dst = np.concatenate([nics[first[of] + (within + s) % size[of]] for s in shifts])

    ordered = np.array([(a, b) for a in range(len(tors)) for b in range(len(tors)) if a != b])
    if family.destinations is not None and family.destinations < len(tors) - 1:
        rank = np.argsort(rng.random((len(tors), len(tors) - 1)), axis=1)
        ordered = ordered.reshape(len(tors), -1, 2)[np.arange(len(tors))[:, None], rank[:, : family.destinations]]
    at_most = at_most or MAX_TUPLES.get(topology, family.tuples)
    pairs = np.repeat(ordered.reshape(-1, 2), min(family.tuples, at_most), axis=0)

    def tuples(pairs: Ints) -> tuple[Ints, Ints, Ints]:
        src, dst = (nics[first[p] + (rng.random(len(p)) * size[p]).astype(np.int64)] for p in pairs.T)
        return src, dst, _with_ends(src, walk(fabric, tors[pairs[:, 0]], tors[pairs[:, 1]], rng), dst)

    inter = [tuples(pairs)]
    trunks = np.flatnonzero(~fabric.nic_cables)
    for _ in range(200):
        crossed = np.zeros(len(fabric.links), bool)
        for _, _, path in inter:
            crossed[fabric.hops(path)[fabric.hops(path) >= 0]] = True
        missing = trunks[~crossed[trunks]]
        if not len(missing):
            break
        tried = rng.integers(len(tors), size=(4 * len(trunks), 2))
        more = tuples(tried[tried[:, 0] != tried[:, 1]])
        hops = fabric.hops(more[2])
        links, at = np.unique(hops.ravel(), return_index=True)
        rows = np.unique(at[np.isin(links, missing)] // hops.shape[1])
        if len(rows):
            inter.append((more[0][rows], more[1][rows], more[2][rows]))
    src, dst, path = (np.concatenate([t[i] for t in inter]) for i in range(3))
    tor_of = fabric.tor[mesh_src]
    mesh_path = _with_ends(
        mesh_src, np.concatenate((tor_of[:, None], np.full((len(tor_of), HOPS - 3), -1)), axis=1), mesh_dst
    )
    kinds = [np.zeros(len(mesh_src), np.int64), np.ones(len(src), np.int64)]
    src, dst, path = (
        np.concatenate((mesh_src, src)),
        np.concatenate((mesh_dst, dst)),
        np.concatenate((mesh_path, path)),
    )
    probes_per_s = int(rng.choice(family.rates_per_s))
    sent = np.rint(probes_per_s * WINDOW_S * rng.uniform(0.97, 1.0, len(src))).astype(np.int64)
    if family.mode != "int":
        a = rng.integers(len(tors), size=SERVICE_FLOWS)
        b = (a + rng.integers(1, len(tors), size=SERVICE_FLOWS)) % len(tors)
        flows = tuples(np.stack((a, b), axis=1))
        src, dst, path = (np.concatenate((x, y)) for x, y in zip((src, dst, path), flows, strict=True))
        kinds.append(np.full(SERVICE_FLOWS, 2))
        sizes = np.clip(rng.lognormal(np.log(65), 0.92, SERVICE_FLOWS), 10, 600).astype(np.int64)
        sent = np.concatenate((sent, sizes))
    rpath = np.full_like(path, -1)
    hops = fabric.hops(path)
    if family.round_trip:
        rpath = _with_ends(dst, walk(fabric, fabric.tor[dst], fabric.tor[src], rng), src)
        hops = np.concatenate((hops, fabric.hops(rpath)), axis=1)
    kind = np.concatenate(kinds)
    return Plan(topology, fabric, src, dst, kind, sent, path, rpath, hops, family.mode, probes_per_s)


@dataclass(frozen=True, eq=False)
class Faults:
    """Failed directed links (numbers) and switches (ids) with their rates."""

    links: Ints
    link_rate: Floats
    devices: Ints
    device_rate: Floats
    share: float = 0.0


NO_FAULTS = Faults(np.empty(0, np.int64), np.empty(0), np.empty(0, np.int64), np.empty(0))


def draw_faults(fabric: Fabric, family: Family, rng: np.random.Generator) -> Faults:
    """Random links (of switches and RNICs alike) and a random switch."""

    def rates(low: float, high: float, count: int) -> Floats:
        return np.maximum(np.round(np.exp(rng.uniform(np.log(low), np.log(high), count)), 4), 1e-4)

    devices, device_rate = np.empty(0, np.int64), np.empty(0)
    if family.device:
        devices, device_rate = rng.choice(fabric.nodes[fabric.kinds != NIC], 1), rates(*family.device, 1)
    count = int(rng.integers(family.links[0], family.links[1] + 1))
    sound = np.flatnonzero(~np.isin(fabric.links, devices).any(axis=1))
    links = rng.choice(sound, count, replace=False)
    rate = rates(*family.rates, count) if count else np.empty(0)
    again = np.flatnonzero(rng.random(count) < family.both)
    cables = len(fabric.edges)
    other = (links[again] + cables) % (2 * cables)
    new = ~np.isin(other, links)
    links, rate = np.concatenate((links, other[new])), np.concatenate((rate, rate[again][new]))
    return Faults(links, rate, devices, device_rate, family.share)


@dataclass(frozen=True, eq=False)
class Drawn:
    """Losses of one window: per record, and per directed link what crossed it and what it dropped."""

    lost: Ints
    link_probes: Ints
    link_lost: Ints


def loss_rates(plan: Plan, faults: Faults, noise_max: float, rng: np.random.Generator) -> Floats:
    """(records, hops): the chance that a packet that reaches a hop is dropped there. The background is drawn once."""
    background = rng.uniform(0, noise_max, len(plan.fabric.links)) if noise_max else np.zeros(len(plan.fabric.links))
    rate = background.copy()
    for device, at in zip(faults.devices, faults.device_rate, strict=True):
        rate[(plan.fabric.links == device).any(axis=1)] = at
    if not faults.share:
        rate[faults.links] = faults.link_rate
    per_hop = np.append(rate, 0.0)[plan.hops]
    if faults.share:
        hit = np.isin(plan.hops, faults.links) & (rng.random(len(plan.src)) < faults.share)[:, None]
        per_hop[hit] = faults.link_rate[0]
    return per_hop


def draw_losses(plan: Plan, rates: Floats, rng: np.random.Generator) -> Drawn:
    """Packets pass the hops in turn, each independently of the others. O(records x hops)."""
    alive = plan.sent.copy()
    links = len(plan.fabric.links)
    probes, dropped = np.zeros(links + 1), np.zeros(links + 1)
    for i in range(plan.hops.shape[1]):
        hop = plan.hops[:, i]
        gone = rng.binomial(alive, rates[:, i])
        probes += np.bincount(hop % (links + 1), alive, links + 1)
        dropped += np.bincount(hop % (links + 1), gone, links + 1)
        alive -= gone
    return Drawn(plan.sent - alive, probes[:-1].astype(np.int64), dropped[:-1].astype(np.int64))


def trace_of(plan: Plan, name: str, faults: Faults, noise_max: float, drawn: Drawn) -> Trace:
    """The window as a trace. Mode `p` hides the paths of all but ToR-mesh probes, `a2p` those of flows without loss."""
    known = np.ones(len(plan.src), bool)
    if plan.mode == "p":
        known = plan.kind == 0
    elif plan.mode == "a2p":
        known = (plan.kind == 0) | (drawn.lost > 0)
    meta = {
        "topology": plan.topology,
        "scenario": name,
        "mode": plan.mode,
        "window_s": float(WINDOW_S),
        "noise_max": noise_max,
        "tuple_blackhole_fraction": faults.share,
        "probes_per_s": plan.probes_per_s,
        "round_trip": plan.round_trip,
    }
    fabric = plan.fabric
    device_lost = [drawn.link_lost[(fabric.links == d).any(axis=1)].sum() for d in faults.devices]
    truth = Truth(
        fabric.links[faults.links],
        faults.link_rate,
        drawn.link_probes[faults.links],
        drawn.link_lost[faults.links],
        faults.devices,
        faults.device_rate,
        np.array(device_lost, np.int64),
    )
    return Trace(
        name=name,
        meta=meta,
        fabric=fabric,
        src=plan.src,
        dst=plan.dst,
        path=np.where(known[:, None], plan.path, -1).astype(np.int32),
        rpath=plan.rpath.astype(np.int32),
        path_known=known,
        kind=plan.kind,
        sent=plan.sent,
        lost=drawn.lost,
        truth=truth,
    )


def make_trace(kind: str, topology: str, number: int, seed: int) -> Trace:
    """Trace `number` of a family on a topology; the same arguments give the same trace."""
    family = FAMILIES[kind]
    rng = np.random.default_rng([seed, number, sorted(FAMILIES).index(kind), sorted(TOPOLOGIES).index(topology)])
    plan = make_plan(topology, family, rng)
    faults = draw_faults(plan.fabric, family, rng)
    noise_max = float(rng.choice(family.noise))
    drawn = draw_losses(plan, loss_rates(plan, faults, noise_max, rng), rng)
    return trace_of(plan, f"{topology}_{kind}_{seed}_{number}", faults, noise_max, drawn)


def make_traces(kinds: list[str], topologies: list[str], count: int, seed: int) -> Iterator[Trace]:
    """`count` traces of each family on each topology that it is defined for."""
    for kind in kinds:
        for topology in topologies:
            if topology in FAMILIES[kind].topologies:
                for number in range(count):
                    yield make_trace(kind, topology, number, seed)


def plan_of(trace: Trace, rng: np.random.Generator) -> Plan:
    """The flows of a trace, to draw losses again; a hidden path becomes a random shortest one."""
    fabric, path, rpath = trace.fabric, trace.path.astype(np.int64), trace.rpath.astype(np.int64)
    hidden = np.flatnonzero(~trace.path_known)
    if len(hidden):
        src, dst = trace.src[hidden], trace.dst[hidden]
        path[hidden] = _with_ends(src, walk(fabric, fabric.tor[src], fabric.tor[dst], rng), dst)
        if trace.round_trip:
            rpath[hidden] = _with_ends(dst, walk(fabric, fabric.tor[dst], fabric.tor[src], rng), src)
    hops = fabric.hops(path)
    if trace.round_trip:
        hops = np.concatenate((hops, fabric.hops(rpath)), axis=1)
    meta = trace.meta
    return Plan(
        meta["topology"],
        fabric,
        trace.src,
        trace.dst,
        trace.kind,
        trace.sent,
        path,
        rpath,
        hops,
        meta["mode"],
        meta["probes_per_s"],
    )


def faults_of(trace: Trace) -> Faults:
    """The faults of a trace's truth."""
    t = trace.truth
    links = trace.fabric.numbers(t.links[:, 0], t.links[:, 1]) if len(t.links) else np.empty(0, np.int64)
    share = float(trace.meta["tuple_blackhole_fraction"])
    return Faults(links, t.link_rate.astype(float), t.devices.astype(np.int64), t.device_rate.astype(float), share)


def probes_by_link(plan: Plan) -> Floats:
    """(links,): packets whose path crosses each directed link."""
    there = plan.hops >= 0
    sent = np.broadcast_to(plan.sent[:, None], plan.hops.shape)[there]
    return np.bincount(plan.hops[there], sent, len(plan.fabric.links)).astype(np.float64)


def thinned(plan: Plan, probes_per_s: float, windows: int, rng: np.random.Generator) -> Plan:
    """The counts of `windows` windows in sum, scaled so that directed switch links carry `probes_per_s` on average (no
    more than they do now). Fractions become a packet or none at random; flows without a packet are left out."""
    now = float(probes_by_link(plan)[~plan.fabric.nic_cables].mean()) / WINDOW_S
    scaled = plan.sent * (windows * min(1.0, probes_per_s / now))
    sent = (scaled + rng.random(len(scaled))).astype(np.int64)
    rows = sent > 0
    flows = {name: getattr(plan, name)[rows] for name in ("src", "dst", "kind", "path", "rpath", "hops")}
    return dataclasses.replace(plan, sent=sent[rows], **flows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, metavar="DIR", help="directory for the files (made if missing)")
    parser.add_argument("--kind", nargs="+", default=["all"], choices=["all", *FAMILIES], metavar="KIND")
    parser.add_argument("--topology", nargs="+", default=list(STUDIED), choices=list(TOPOLOGIES), metavar="NAME")
    parser.add_argument("--count", type=int, default=1, metavar="N", help="of each family on each topology (default 1)")
    parser.add_argument("--seed", type=int, default=1, metavar="S")
    parser.add_argument("--list", action="store_true", help="list families and topologies")
    args = parser.parse_args()
    if args.list:
        for name, family in FAMILIES.items():
            print(f"{name:9s} {', '.join(family.topologies)}")
        return
    if args.out is None:
        parser.error("--out is required")
    args.out.mkdir(parents=True, exist_ok=True)
    kinds = list(FAMILIES) if "all" in args.kind else args.kind
    for trace in make_traces(kinds, args.topology, args.count, args.seed):
        print(save(trace, args.out), len(trace.src), flush=True)


if __name__ == "__main__":
    main()
