"""How well faults are named, and how soon: simulated fabrics, the paper's 14 causes, noise going on.

    benchmarks/accuracy.py [--quick] [--runs N] [--only NAME ...] [--json FILE] [--docs FILE] [--seed N]

Each run puts a fault at a random place of a fabric whose every directed switch link is crossed by 10 probes/s, and
watches with the product's inference and active confirmation (`benchmarks/simulated_watch.py`) until it is named or a
minute has passed. Background loss of every hop is U(0, 1e-4), bursts on top; agents stall, restart and crash, reports
get lost. The paper's rule (`benchmarks/paper_rule.py`) judges 20 s of the same faults.

`--json FILE` is read first if it is there: runs in it are not repeated, so that a long study can be made in parts.
`--docs FILE` writes the tables between its markers (or the whole page if it is new).
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path

import accuracy_page
import figures_page
import numpy as np
from paper_rule import paper_rule
from simulated_watch import HOST_SYMPTOMS, Book, Opened, Watch

from pingmesh.analyzer.candidates import candidates_of
from pingmesh.analyzer.components import Components, compile_components
from pingmesh.analyzer.delays import delay_candidates
from pingmesh.simulate.fabric import Distances, Fabric, distances
from pingmesh.simulate.fabrics import dual_tor
from pingmesh.simulate.faults import Placed, Places
from pingmesh.simulate.probes import Flows, Lists, draw_probes
from pingmesh.simulate.troubles import Noise, draw_troubles
from pingmesh.simulate.world import World
from topology.generate import clos3, leaf_spine, rail_optimised
from topology.model import Topology

WATCHED_S = 60
PAPER_S = 20.0
DRAWS = 4
"""Lists drawn for each fabric; runs take turns."""
LISTS = Lists(other_share=0.1)
NOISE = Noise()

FABRICS: dict[str, Callable[[], Topology]] = {
    "three tiers": lambda: clos3(3, 4, 2, 4, 4, 2),
    "1 RNIC a ToR": lambda: leaf_spine(6, 4, 1, 1),
    "2 RNICs a ToR": lambda: leaf_spine(6, 4, 2, 1),
    "3 RNICs a ToR": lambda: leaf_spine(6, 4, 3, 1),
    "8 RNICs a ToR": lambda: leaf_spine(6, 4, 8, 1),
    "rail-optimised": lambda: rail_optimised(3, 4, 4, 4),
    "dual ToR": lambda: dual_tor(3, 4, 6, 1),
    "asymmetric ACK paths": lambda: leaf_spine(6, 4, 4, 1),
    "spraying": lambda: clos3(3, 2, 2, 4, 3, 1),
}


@dataclass(frozen=True)
class Part:
    """One of a scenario's faults; `rates` are drawn from, if several."""

    kind: str
    place: str | None = None
    rates: tuple[float, ...] = ()


@dataclass(frozen=True)
class Scenario:
    name: str
    parts: tuple[Part, ...]
    cause: int | None = None
    fabric: str = "three tiers"
    within_s: float = WATCHED_S
    """How soon it should be named."""


def _link(rate: float) -> tuple[Part, ...]:
    return (Part("loss", "link", (rate,)),)


MIXED = (Part("loss", "link", (0.05, 0.1, 0.3, 1.0)), Part("loss", "rnic", (0.1, 0.3, 1.0)))
SCENARIOS = (
    Scenario("link loses 10 %", _link(0.1), 2, within_s=10),
    Scenario("link loses 5 %", _link(0.05), 2, within_s=20),
    Scenario("link loses 1 %", _link(0.01), 2, within_s=60),
    Scenario("port flaps (link)", (Part("flap", "link"),), 1, within_s=10),
    Scenario("RNIC flaps", (Part("flap", "rnic"),), 1, within_s=10),
    Scenario("RNIC corrupts 10 %", (Part("loss", "rnic", (0.1,)),), 2, within_s=10),
    Scenario("RNIC down", (Part("rnic_down"),), 3, within_s=10),
    Scenario("host down", (Part("host_down"),), 4, within_s=10),
    Scenario("PFC deadlock", (Part("pfc_deadlock"),), 5, within_s=10),
    Scenario("RNIC routing missing", (Part("misroute"),), 6, within_s=10),
    Scenario("GID index missing", (Part("gid_missing"),), 7, within_s=10),
    Scenario("ACL on a link", (Part("acl", "link"),), 8, within_s=10),
    Scenario("ACL on a switch", (Part("acl", "switch"),), 8, within_s=10),
    Scenario("PFC headroom wrong", (Part("pfc_headroom"),), 9, within_s=20),
    Scenario("uneven load balance", (Part("hash_collision"),), 10, within_s=20),
    Scenario("services interfere (incast)", (Part("incast"),), 11, within_s=20),
    Scenario("CPU overload", (Part("cpu_overload"),), 12, within_s=20),
    Scenario("PCIe downgrade", (Part("pcie_slow"),), 13, within_s=20),
    Scenario("PCIe misconfigured (ACS)", (Part("acs"),), 14, within_s=20),
    Scenario("link black hole", _link(1.0), within_s=10),
    Scenario("link loses 30 %", _link(0.3), within_s=10),
    Scenario("link loses 2 %", _link(0.02)),
    Scenario("link loses 0.5 %", _link(0.005)),
    Scenario("switch loses 10 %", (Part("loss", "switch", (0.1,)),), within_s=10),
    Scenario("switch down", (Part("switch_down"),), within_s=10),
    Scenario("bursty 5 % on a link", (Part("bursty_loss", "link", (0.05,)),), within_s=20),
    Scenario("two faults", MIXED, within_s=20),
    Scenario("four faults", MIXED + MIXED, within_s=20),
    *(
        Scenario(f"{fabric}: {what} 10 %", (Part("loss", place, (0.1,)),), fabric=fabric, within_s=10)
        for fabric in FABRICS
        if fabric != "three tiers"
        for what, place in (("link", "link"), ("RNIC", "leg" if fabric == "dual ToR" else "rnic"))
    ),
    Scenario("nothing", ()),
)


@dataclass
class Ground:
    """A fabric with all that is made once for it."""

    fabric: Fabric
    places: Places
    components: Components
    delay_components: Components
    lists: list[tuple[Flows, Book]] = field(default_factory=list)


@cache
def ground(name: str) -> Ground:
    fabric = Fabric(FABRICS[name]())
    out = Ground(
        fabric,
        Places(fabric),
        compile_components(candidates_of(fabric.topology)),
        compile_components(delay_candidates(fabric.topology)),
    )
    rng = np.random.default_rng([7, len(name)])
    for _ in range(DRAWS):
        flows = draw_probes(fabric, rng, LISTS, ack_ways=_odd_ways(fabric) if name.startswith("asym") else None)
        out.lists.append((flows, Book(fabric, flows)))
    return out


def _odd_ways(fabric: Fabric) -> Distances:
    """Routes of ACKs that avoid one uplink of each ToR."""
    dead = np.zeros(fabric.links, bool)
    for n, tor in enumerate(fabric.tors):
        ups = np.flatnonzero(fabric.link_source == tor)
        dead[ups[n % len(ups)]] = True
    return distances(fabric, dead)


def one_run(s: Scenario, seed: int) -> dict[str, object]:
    """Draw, watch, and let the paper's rule judge the same."""
    g = ground(s.fabric)
    rng = np.random.default_rng([seed, *s.name.encode()])
    start = float(rng.uniform(5, 10))
    placed: list[Placed] = []
    for part in s.parts:
        for _ in range(50):
            given = {"rate": float(rng.choice(part.rates))} if part.rates else {}
            p = g.places.place(g.places.draw(part.kind, rng, part.place, start_s=start, **given))
            if not any(set(p.elements.tolist()) & set(q.elements.tolist()) for q in placed):
                placed.append(p)
                break
    flows, book = g.lists[seed % DRAWS]
    troubles = draw_troubles(g.fabric, NOISE, start + WATCHED_S + PAPER_S, rng)
    world = World(g.fabric, flows, placed, troubles, rng, spray=s.fabric == "spraying")
    watch = Watch(world, g.components, g.delay_components, book)
    began = time.process_time()
    true_names = {p.candidate.component for p in placed}
    opened = watch.run(
        math.ceil(start) + WATCHED_S,
        lambda found: bool(true_names) and true_names <= {n for o in found for n in _names(o)},
    )
    hosts = list(g.fabric.topology.hosts)
    shaken = {hosts[h] for h in np.concatenate((troubles.restarts.what, troubles.stalls.what)).tolist()}
    return {
        "scenario": s.name,
        "seed": seed,
        "start_s": start,
        "truth": [{**p.truth(), "rate": p.how.rate} for p in placed],
        "opened": [_told(o, shaken) for o in opened],
        "paper": _paper(g, World(g.fabric, flows, placed, troubles, rng, spray=world.spray), start),
        "looks": watch.looks,
        "cpu_s": round(time.process_time() - began, 2),
    }


def _names(o: Opened) -> set[str]:
    return {o.verdict.component, *o.verdict.alternatives}


def _told(o: Opened, shaken: set[str]) -> dict[str, object]:
    v = o.verdict
    return {
        "at_s": o.at_s,
        "component": v.component,
        "type": v.component_type,
        "direction": v.direction,
        "symptom": v.symptom,
        "confidence": round(v.confidence, 4),
        "alternatives": v.alternatives,
        "of_noise": v.symptom in HOST_SYMPTOMS and v.component in shaken,
    }


def _paper(g: Ground, world: World, start: float) -> list[str]:
    """Names by the paper's rule from 20 s of round trips."""
    c = world.step(start, start + PAPER_S)
    f, links = world.flows, g.fabric.links
    hops = np.concatenate((world.told[0], world.told[1]), axis=1).astype(np.int64)
    hops = np.where((hops >= 0) & (hops < links), hops, -1)
    if world.spray:
        hops[:] = -1
    named = paper_rule(links, hops, f.kind, f.src, f.dst, c.sent, c.sent - c.answered)
    cables = {d.name: d.link.name for d in g.fabric.topology.directed_links}
    return [
        *(g.fabric.rnics[r] for r in named.rnics.tolist()),
        *sorted({cables[g.fabric.element_names[k]] for k in named.links.tolist()}),
    ]


# ---------------------------------------------------------------- scores


def wilson(right: int, n: int) -> tuple[float, float]:
    if not n:
        return 0.0, 1.0
    z2, p = 1.959964**2, right / n
    middle, half = p + z2 / (2 * n), math.sqrt(z2 * (p * (1 - p) / n + z2 / (4 * n * n)))
    return max(0.0, (middle - half) / (1 + z2 / n)), min(1.0, (middle + half) / (1 + z2 / n))


def score(s: Scenario, runs: Sequence[dict]) -> dict[str, object]:
    """Recall within the scenario's time, precision of what opened, times, and the paper's rule beside it."""
    n = named = in_time = exact = right = wrong = 0
    paper_right = paper_hits = paper_names = 0
    times: list[float] = []
    for r in runs:
        opened = [o for o in r["opened"] if not o["of_noise"]]
        for o in opened:
            good = o["at_s"] >= r["start_s"] and any(t["component"] in names_of(o) for t in r["truth"])
            right, wrong = right + good, wrong + (not good)
        for t in r["truth"]:
            n += 1
            hits = [o for o in r["opened"] if t["component"] in names_of(o) and o["at_s"] >= r["start_s"]]
            if hits:
                took = min(o["at_s"] for o in hits) - r["start_s"]
                named += 1
                in_time += took <= s.within_s
                times.append(took)
                exact += any(o["component"] == t["component"] and fits(o, t) for o in hits)
            paper_hits += any(paper_fits(name, t) for name in r["paper"])
        paper_names += len(r["paper"])
        paper_right += sum(any(paper_fits(name, t) for t in r["truth"]) for name in r["paper"])
    low, high = wilson(in_time, n)
    return {
        "scenario": s.name,
        "cause": s.cause,
        "fabric": s.fabric,
        "runs": len(runs),
        "faults": n,
        "within_s": s.within_s,
        "recall": in_time / n if n else None,
        "recall_low": low,
        "recall_high": high,
        "recall_60": named / n if n else None,
        "exact": exact / n if n else None,
        "precision": right / (right + wrong) if right + wrong else None,
        "opened": right + wrong,
        "wrong": wrong,
        "median_s": statistics.median(times) if times else None,
        "p95_s": float(np.quantile(times, 0.95)) if times else None,
        "paper_recall": paper_hits / n if n else None,
        "paper_precision": paper_right / paper_names if paper_names else None,
    }


def names_of(o: dict) -> set[str]:
    return {o["component"], *o["alternatives"]}


def fits(o: dict, t: dict) -> bool:
    """Whether the direction is right: a fault of both is found in one of them by some evidence."""
    return t["direction"] in (None, "both") or o["direction"] == t["direction"]


def paper_fits(name: str, t: dict) -> bool:
    """A link of a sick switch, and an RNIC of a sick host or leg, count as right for the paper's rule."""
    c = t["component"]
    if t["component_type"] == "switch":
        return c in name.split("--")
    if t["component_type"] == "host":
        return name.split("/")[0] == c
    return name == c.split("@")[0]


def calibration(runs: Iterable[dict]) -> list[dict[str, object]]:
    """Of the incidents with a confidence in each range, the share whose component is right."""
    edges = (0.0, 0.5, 0.7, 0.9, 0.99, 1.0001)
    out = []
    verdicts = [
        (o["confidence"], o["at_s"] >= r["start_s"] and any(o["component"] == t["component"] for t in r["truth"]))
        for r in runs
        for o in r["opened"]
        if not o["of_noise"]
    ]
    for low, high in pairwise(edges):
        inside = [right for c, right in verdicts if low <= c < high]
        if inside:
            bounds = wilson(sum(inside), len(inside))
            out.append(
                {
                    "from": low,
                    "to": min(high, 1.0),
                    "n": len(inside),
                    "right": sum(inside) / len(inside),
                    "low": bounds[0],
                    "high": bounds[1],
                }
            )
    return out


def confusion(runs: Iterable[dict]) -> dict[str, dict[str, int]]:
    """Type of the fault -> type of what was named for it: the incident that is right, else the first after it began."""
    out: dict[str, Counter[str]] = {}
    for r in runs:
        after = [o for o in r["opened"] if o["at_s"] >= r["start_s"] and not o["of_noise"]]
        for t in r["truth"]:
            hits = [o for o in r["opened"] if o["component"] == t["component"] and o["at_s"] >= r["start_s"]]
            named = (hits or after)[0]["type"] if hits or after else "nothing"
            if not hits and named == t["component_type"]:
                named = f"another {named}"
            out.setdefault(t["component_type"], Counter())[named] += 1
    return {k: dict(v) for k, v in sorted(out.items())}


# ---------------------------------------------------------------- the whole


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two runs each of a few scenarios; under 2 minutes")
    parser.add_argument("--runs", type=int, default=200, metavar="N", help="runs of each scenario (default 200)")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="scenarios whose names hold one of these")
    parser.add_argument(
        "--most-s", type=float, default=math.inf, metavar="S", help="start no further run after so long"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--docs", type=Path, metavar="FILE")
    args = parser.parse_args()
    if args.docs and args.docs.exists():
        figures_page.require(args.docs, accuracy_page.BEGIN, accuracy_page.END)
    for name in args.only or ():
        if not any(name in s.name for s in SCENARIOS):
            parser.error(
                f"--only {name}: no scenario's name holds this; there are: {', '.join(s.name for s in SCENARIOS)}"
            )
    scenarios = [s for s in SCENARIOS if not args.only or any(o in s.name for o in args.only)]
    count = args.runs
    if args.quick:
        count = 2
        scenarios = [s for s in scenarios if s.fabric == "three tiers" and s.cause] if not args.only else scenarios
    done: dict[str, object] = json.loads(args.json.read_text()) if args.json and args.json.exists() else {}
    runs: list[dict] = list(done.get("runs", []))  # type: ignore[call-overload]
    have = {(r["scenario"], r["seed"]) for r in runs}
    began = time.monotonic()
    # All scenarios grow together, so that a study that is cut short has something of each.
    for seed in range(args.seed, args.seed + count):
        for s in scenarios:
            if (s.name, seed) not in have and time.monotonic() - began < args.most_s:
                runs.append(one_run(s, seed))
        save(args.json, runs)
        if time.monotonic() - began >= args.most_s:
            break
        print(f"{time.monotonic() - began:7.0f} s  {seed + 1 - args.seed} runs of each", file=sys.stderr, flush=True)
    result = save(args.json, runs)
    accuracy_page.show(result)
    if args.docs:
        accuracy_page.write(args.docs, result)


def save(path: Path | None, runs: list[dict]) -> dict[str, object]:
    """All that the study says, and its runs."""
    by_name = {s.name: [r for r in runs if r["scenario"] == s.name] for s in SCENARIOS}
    known = [r for s in SCENARIOS if s.fabric != "spraying" for r in by_name[s.name]]
    result = {
        "python": platform.python_version(),
        "numpy": np.__version__,
        "scores": [score(s, by_name[s.name]) for s in SCENARIOS if by_name[s.name]],
        "calibration": calibration(known),
        "confusion": confusion(known),
        "cpu_s_per_run": statistics.fmean(r["cpu_s"] for r in runs) if runs else None,
        "runs": runs,
    }
    if path:
        # Whole or not at all: a study that is cut short goes on from here.
        part = path.with_suffix(".part")
        part.write_text(json.dumps(result) + "\n")
        part.replace(path)
    return result


if __name__ == "__main__":
    main()
