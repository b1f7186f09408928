"""How well slow components are named: simulated round trips with the truth, and hours in which nothing is slow.

    benchmarks/delays.py [--quick] [--runs N] [--hours H] [--json FILE] [--seed N]

A fabric of 256 RNICs under 16 leaves and 8 spines, every directed switch link crossed by 10 probes/s. Round trips have
exponential jitter and heavy tails (one probe in a hundred waits 10 us and more, Pareto), the load of each link wanders
slowly, the whole fabric's too; a tenth of the hosts stamps in software, and starves now and then. Each run warms up for
a quarter of an hour, then makes something slow and looks for five minutes with the product's watch
(`pingmesh/analyzer/delay_watch.py`), which never reads the truth. A name is right if component and direction are (the
direction of an RNIC's delay cannot be told from round trips), or all components named are of the class that a pause
storm slows down; anything else that is named is wrong.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from pingmesh.analyzer.components import Components, compile_components
from pingmesh.analyzer.delay_watch import CLOCKS, DelayWatch, Slow
from pingmesh.analyzer.delays import delay_candidates
from pingmesh.analyzer.table import Bools, Floats, Ints
from pingmesh.analyzer.waits import USUAL
from pingmesh.simulate.fabric import Fabric, names_of
from pingmesh.simulate.probes import Flows, Lists, draw_probes
from topology.generate import leaf_spine

WINDOW_S = 5.0
WARM_UP = 180
"""Windows before anything is slow."""
WATCHED = 60
SIZES_US = (2, 5, 10, 100, 1000)
KINDS = ("uplink collision", "ToR downlink incast", "slow NIC", "slow leaf", "pause storm", "two at once")
BASE_NS, HOP_NS, JITTER_NS = 4_000.0, 600.0, 800.0
TAIL_SHARE, TAIL_NS, TAIL_ALPHA = 0.01, 10_000.0, 1.5
WANDER_NS, WANDER_KEPT = 150.0, 0.99
"""Spread of each link's slow load, and what of it is left a window later (a time constant of eight minutes)."""
COMMON_NS = 1_500.0
"""Amplitude of the whole fabric's load over half an hour."""
SOFTWARE_SHARE = 0.1
STARVED_RATE, STARVED_S, STARVED_NS = 1 / 600, 30.0, 150_000.0
"""Spells of each software-stamped host, their mean length, and what they add to what it stamps."""


@dataclass(frozen=True)
class Delay:
    """Elements that add `mean_ns` each; a queue's varies from probe to probe."""

    elements: Ints
    mean_ns: float
    queue: bool


@dataclass(frozen=True)
class Truth:
    """Components that are slow: a name is right if it is (component, direction) of one; all of `needed` are wanted."""

    needed: frozenset[tuple[str, str | None]]
    allowed: frozenset[tuple[str, str | None]]
    delays: tuple[Delay, ...]


class Simulation:
    """Flows, their usual round trips, and noise; `step` gives the mean round trip of each flow in a window."""

    def __init__(self, fabric: Fabric, flows: Flows, rng: np.random.Generator) -> None:
        self.fabric, self.flows, self.rng = fabric, flows, rng
        n, elements = len(flows), len(fabric.element_names)
        paths = np.concatenate((flows.there, flows.back), axis=1)
        self.paths = np.where(paths < 0, elements, paths)
        hops = (paths >= 0).sum(axis=1)
        self.base = BASE_NS + HOP_NS * hops + rng.normal(0, 300, n)
        self.load = np.append(rng.normal(0, WANDER_NS, elements), 0.0)
        self.phase = rng.random(n)
        self.software = rng.random(len(fabric.topology.hosts)) < SOFTWARE_SHARE
        self.starved_until = np.zeros(len(self.software))
        self.window = 0

    def step(self, delays: tuple[Delay, ...] = ()) -> tuple[Ints, Floats]:
        """(flows with round trips, their mean) of the next window, nanoseconds."""
        f, rng, w = self.flows, self.rng, self.window
        self.window += 1
        due = f.rate * WINDOW_S * np.array([[w], [w + 1]]) + self.phase[:, None].T
        n = np.diff(np.floor(due), axis=0)[0].astype(np.int64)
        innovation = rng.normal(0, WANDER_NS * np.sqrt(1 - WANDER_KEPT**2), len(self.load) - 1)
        self.load[:-1] = WANDER_KEPT * self.load[:-1] + innovation
        total = n * (self.base + self.load[self.paths].sum(axis=1) + COMMON_NS * np.sin(w / 360 * 2 * np.pi))
        total += rng.standard_gamma(n) * JITTER_NS
        tails = rng.binomial(n, TAIL_SHARE)
        late = np.repeat(np.arange(len(n)), tails)
        total += np.bincount(late, weights=TAIL_NS * (1 + rng.pareto(TAIL_ALPHA, len(late))), minlength=len(n))
        total += n * self._starved(w)
        for d in delays:
            flag = np.zeros(len(self.load), bool)
            flag[d.elements] = True
            times = flag[self.paths].sum(axis=1)
            # A queue fills and drains: each probe meets another depth, and windows differ.
            depth = rng.uniform(0.6, 1.4) * rng.standard_gamma(n * times) if d.queue else n * times
            total += depth * d.mean_ns
        some = np.flatnonzero(n)
        return some, total[some] / n[some]

    def _starved(self, w: int) -> Floats:
        rng, t = self.rng, w * WINDOW_S
        begins = self.software & (rng.random(len(self.software)) < STARVED_RATE * WINDOW_S)
        self.starved_until[begins] = t + rng.exponential(STARVED_S, int(begins.sum()))
        bad = np.append(self.starved_until > t, False)
        host = self.fabric.host_of
        ends = bad[host[self.flows.src]].astype(int) + bad[host[self.flows.dst]]
        return np.asarray(ends * rng.exponential(STARVED_NS, len(ends)))


@dataclass
class Study:
    """One drawn fabric with its flows; runs start from a warmed-up copy."""

    fabric: Fabric
    components: Components
    simulation: Simulation
    watch: DelayWatch
    slots: Ints

    def again(self, seed: int) -> Study:
        """A copy that goes on by other random numbers."""
        twin = copy.copy(self)
        twin.simulation, twin.watch = copy.copy(self.simulation), copy.deepcopy(self.watch, _shared(self))
        twin.simulation.rng = np.random.default_rng(seed)
        twin.simulation.load = self.simulation.load.copy()
        twin.simulation.starved_until = self.simulation.starved_until.copy()
        return twin

    def pass_by(self, delays: tuple[Delay, ...] = ()) -> None:
        """Another window, without a look."""
        window = self.simulation.window
        some, mean = self.simulation.step(delays)
        self.watch.book.put(self.slots[some], window, mean)

    def step(self, delays: tuple[Delay, ...] = ()) -> list[Slow]:
        """Another window, and what is slow after it."""
        self.pass_by(delays)
        return self.watch.merged(self.watch.fine(), [])


def _shared(s: Study) -> dict[int, object]:
    """What copies may share: nothing of it changes."""
    book = s.watch.book
    kept = (s.components, s.components.singles, *book.crossings())
    return {id(x): x for x in kept}


def make(seed: int) -> Study:
    rng = np.random.default_rng(seed)
    topology = leaf_spine(16, 8, 16, 1)
    fabric = Fabric(topology)
    flows = draw_probes(fabric, rng, Lists(large_share=0.0))
    components = compile_components(delay_candidates(topology))
    simulation = Simulation(fabric, flows, rng)
    watch = DelayWatch(components, len(fabric.rnics), USUAL.slow_ns)
    software = simulation.software[fabric.host_of]
    watch.clocks[:] = np.where(software, CLOCKS["software"], CLOCKS["hardware"])
    slots = [
        watch.book.slot(i, int(flows.src[i]), int(flows.dst[i]), (names_of(fabric, there),), (names_of(fabric, back),))
        for i, (there, back) in enumerate(zip(flows.there.tolist(), flows.back.tolist(), strict=True))
    ]
    return Study(fabric, components, simulation, watch, np.array(slots, np.int64))


# ---------------------------------------------------------------- faults


def draw_truth(kind: str, size_ns: float, s: Study, rng: np.random.Generator) -> Truth:
    """Something slow at a random place."""
    f = s.fabric
    if kind == "two at once":
        a, b = (draw_truth(k, size_ns, s, rng) for k in ("uplink collision", "slow NIC"))
        return Truth(a.needed | b.needed, a.allowed | b.allowed, a.delays + b.delays)
    hardware = np.flatnonzero(~s.simulation.software[f.host_of])
    rnic = int(rng.choice(hardware))
    name = f.rnics[rnic]
    tx, rx = f.links + 2 * rnic, f.links + 2 * rnic + 1
    if kind == "uplink collision":
        e = int(rng.choice(np.flatnonzero(f.tier[f.link_source] == 1)))
        d = f.topology.directed_links[e]
        one = frozenset({(d.link.name, d.name)})
        return Truth(one, one, (Delay(np.array([e]), size_ns, True),))
    if kind == "ToR downlink incast":
        one = frozenset({(name, None)})
        return Truth(one, one, (Delay(np.array([rx]), size_ns, True),))
    if kind == "slow NIC":
        one = frozenset({(name, None)})
        return Truth(one, one, (Delay(np.array([rng.choice([tx, rx])]), size_ns, False),))
    leaf = int(rng.choice(f.tors))
    if kind == "slow leaf":
        one = frozenset({(f.switches[leaf], None)})
        legs = np.flatnonzero(f.leg_switch == leaf)
        down = np.flatnonzero(f.link_source == leaf)
        return Truth(one, one, (Delay(np.concatenate((f.links + 2 * legs + 1, down)), size_ns, False),))
    # A paused NIC holds up its ToR's port, and the ToR in turn the links that come down to it.
    leaf = int(f.leg_switch[rnic])
    down = np.flatnonzero(f.link_target == leaf)
    links = frozenset((f.topology.directed_links[e].link.name, f.topology.directed_links[e].name) for e in down)
    nic = frozenset({(name, None)})
    return Truth(
        nic,
        nic | links | {(f.switches[leaf], None)},
        (Delay(np.array([rx]), size_ns, True), Delay(down, size_ns / 2, True)),
    )


# ---------------------------------------------------------------- runs


@dataclass
class Row:
    kind: str
    size_us: float
    runs: int = 0
    found: int = 0
    named: int = 0
    right: int = 0
    times_s: list[float] = field(default_factory=list)
    queues: int = 0
    """Runs in which a queue was called one, and a shift one."""
    since_s: list[float] = field(default_factory=list)
    """Seconds from when it began to when the name says that it did."""


def names(slow: list[Slow]) -> set[tuple[str, str | None]]:
    return {(s.candidate.component, s.direction if s.candidate.type == "link" else None) for s in slow}


def run(study: Study, truth: Truth, row: Row, is_queue: bool) -> None:
    """Watch one fault until all that is needed is named, and three windows more."""
    began = study.simulation.window
    named: set[tuple[str, str | None]] = set()
    found_at, until = None, WATCHED
    for w in range(WATCHED):
        slow = study.step(truth.delays)
        named |= names(slow)
        if found_at is None and truth.needed <= named:
            found_at, until = w + 1, w + 4
            first = next(s for s in slow if names([s]) & truth.needed)
            row.since_s.append((first.since_ns / 1e9) - began * WINDOW_S)
        if w + 1 >= until:
            row.queues += sum(s.is_queue == is_queue for s in slow if names([s]) <= truth.needed) > 0
            break
    row.runs += 1
    row.found += found_at is not None
    row.named += len(named)
    row.right += len(named & truth.allowed)
    if found_at is not None:
        row.times_s.append(found_at * WINDOW_S)


def quiet(study: Study, windows: int) -> tuple[int, list[str], Bools]:
    """(false names opened, which, windows with one) in a time in which nothing is slow."""
    opened: list[str] = []
    before: set[tuple[str, str | None]] = set()
    bad = np.zeros(windows, bool)
    for w in range(windows):
        now = names(study.step())
        opened += [f"{c} {d or ''}".strip() for c, d in sorted(now - before, key=str)]
        bad[w] = bool(now)
        before = now
    return len(opened), opened, bad


def table(rows: list[Row]) -> list[str]:
    out = [
        "| what is slow | by | runs | recall | precision | median time to name | off in `since` | queue or shift |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        precision = f"{r.right / r.named:.2f} ({r.right} of {r.named})" if r.named else "-"
        seconds = f"{statistics.median(r.times_s):.0f} s" if r.times_s else "-"
        off = f"{statistics.median(map(abs, r.since_s)):.0f} s" if r.since_s else "-"
        kind = f"{r.queues} of {r.found}" if r.found and r.kind != "two at once" else "-"
        recall = f"{r.found / r.runs:.2f}"
        out.append(f"| {r.kind} | {r.size_us:g} µs | {r.runs} | {recall} | {precision} | {seconds} | {off} | {kind} |")
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--hours", type=float, default=3.0, help="quiet hours")
    parser.add_argument("--kinds", nargs="*", default=list(KINDS))
    parser.add_argument("--sizes", nargs="*", type=float, default=list(SIZES_US))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    runs, hours, sizes = (1, 0.05, [10.0]) if args.quick else (args.runs, args.hours, args.sizes)
    began = time.process_time()
    study = make(args.seed)
    for _ in range(WARM_UP):
        study.pass_by()
    flows = len(study.slots)
    windows = int(hours * 3600 / WINDOW_S)
    false, which, bad = quiet(study.again(args.seed + 1), windows)
    print(f"{len(study.fabric.rnics)} RNICs, {flows} flows", flush=True)
    print(f"quiet: {windows} windows, {false} false names {which[:6]}, {int(bad.sum())} windows with one", flush=True)
    rows = []
    for kind in args.kinds:
        for size in sizes:
            row = Row(kind, size)
            for i in range(runs):
                seed = args.seed * 1000 + i
                truth = draw_truth(kind, size * 1e3, study, np.random.default_rng(seed))
                run(study.again(seed), truth, row, any(d.queue for d in truth.delays))
            rows.append(row)
            print(table([row])[-1], flush=True)
    seconds = time.process_time() - began
    print(f"{seconds:.0f} s of CPU")
    print("\n".join(table(rows)))
    if args.json:
        figures = {
            "rnics": len(study.fabric.rnics),
            "flows": flows,
            "quiet_windows": windows,
            "quiet_false_names": false,
            "quiet_named": which,
            "rows": [vars(r) for r in rows],
            "cpu_s": seconds,
            "machine": platform.machine(),
        }
        args.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
