"""Precision, recall and speed of the localiser, on simulated faults and on probe traces with ground truth.

    benchmarks/localise.py [--quick] [--json FILE] [--traces DIR]

Simulated: a leaf-spine of 4 x 4 x 4, one or two faults of each kind at random places, 50 packets a flow. `exact` is the
share of runs in which the named set equals the truth, `covered` that in which every fault is named or among the
alternatives of a suspect, `false` the share of runs with a name that is not (and has no alternative that is) true.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import probe_traces

from pingmesh.analyzer.candidates import Candidate, candidates_of
from pingmesh.analyzer.evidence import compile_evidence
from pingmesh.analyzer.localise import localise, localise_evidence
from pingmesh.lab.flows import SimulatedFault, draw_flows, draw_observations
from topology.generate import leaf_spine


@dataclass(frozen=True)
class Scenario:
    name: str
    kinds: tuple[tuple[str, str | None, float], ...] = ()
    """(type, direction or `one` or None, rate) of each fault."""
    share: float = 1.0
    unknown: float = 0.0
    sent: int = 50
    noise: float = 1e-5


SCENARIOS = (
    Scenario("healthy"),
    Scenario("healthy, noise 1e-3 a hop", noise=1e-3),
    Scenario("healthy, 5 packets a flow, noise 1e-3", noise=1e-3, sent=5),
    *(Scenario(f"link {r:.0%}", (("link", "one", r),)) for r in (0.01, 0.05, 0.1, 0.3, 1.0)),
    Scenario("link 100%, 3 packets a flow", (("link", "one", 1.0),), sent=3),
    Scenario("link 10%, half the paths unknown", (("link", "one", 0.1),), unknown=0.5),
    Scenario("link 100%, no path known", (("link", "one", 1.0),), unknown=1.0),
    *(Scenario(f"both directions {r:.0%}", (("link", "both", r),)) for r in (0.1, 1.0)),
    *(Scenario(f"rnic {d} {r:.0%}", (("rnic", d, r),)) for d in ("tx", "rx", "both") for r in (0.1, 1.0)),
    *(Scenario(f"switch {r:.0%}", (("switch", None, r),)) for r in (0.05, 0.3, 1.0)),
    *(Scenario(f"host {r:.0%}", (("host", None, r),)) for r in (0.3, 1.0)),
    Scenario("black hole of 25% of flows", (("link", "one", 1.0),), share=0.25),
    Scenario("two links 30%", (("link", "one", 0.3),) * 2),
    Scenario("three links 10%", (("link", "one", 0.1),) * 3),
    Scenario("switch 30%, link 100%", (("switch", None, 0.3), ("link", "one", 1.0))),
)


def draw_faults(scenario: Scenario, candidates: list[Candidate], rng: np.random.Generator) -> list[SimulatedFault]:
    faults: list[SimulatedFault] = []
    for kind, direction, rate in scenario.kinds:
        hit = {e for f in faults for e in f.candidate.elements}
        fits: Callable[[Candidate], bool] = lambda c, k=kind, d=direction, h=hit: (  # type: ignore[misc] # noqa: E731
            c.type == k and (c.direction != "both" if d == "one" else c.direction == d) and not c.elements & h
        )
        pool = [c for c in candidates if fits(c)]
        faults.append(SimulatedFault(pool[int(rng.integers(len(pool)))], rate, scenario.share))
    return faults


def simulate(scenario: Scenario, runs: int) -> dict[str, object]:
    has_host = any(kind == "host" for kind, _, _ in scenario.kinds)
    fabric = leaf_spine(4, 4, 2, 2) if has_host else leaf_spine(4, 4, 4, 1)
    candidates = candidates_of(fabric)
    exact = covered = false = 0
    milliseconds = []
    for seed in range(runs):
        rng = np.random.default_rng([seed, 7])
        faults = draw_faults(scenario, candidates, rng)
        flows = draw_flows(fabric, rng, unknown=scenario.unknown)
        seen = draw_observations(flows, faults, rng, sent=scenario.sent, noise=scenario.noise)
        start = time.perf_counter()
        suspects = localise(seen, candidates)
        milliseconds.append(1e3 * (time.perf_counter() - start))
        truth = {f.candidate for f in faults}
        sets = [{s.candidate, *s.alternatives} for s in suspects]
        exact += {s.candidate for s in suspects} == truth
        covered += truth <= set().union(*sets)
        false += any(not s & truth for s in sets)
    return {
        "scenario": scenario.name,
        "runs": runs,
        "exact": exact / runs,
        "covered": covered / runs,
        "false": false / runs,
        "ms_median": statistics.median(milliseconds),
    }


def speed(quick: bool) -> list[dict[str, object]]:
    """One faulty link in fabrics of several sizes, noise 1e-5 a hop; best of three."""
    sizes = [(8, 8, 4, 2, 24)] if quick else [(8, 8, 4, 2, 24), (32, 16, 8, 2, 16), (64, 32, 16, 2, 16)]
    out: list[dict[str, object]] = []
    for leaves, spines, hosts, rnics, tuples in sizes:
        fabric = leaf_spine(leaves, spines, hosts, rnics)
        candidates = candidates_of(fabric)
        rng = np.random.default_rng(1)
        flows = draw_flows(fabric, rng, tuples=tuples)
        links = [c for c in candidates if c.type == "link" and c.direction != "both"]
        seen = draw_observations(flows, [SimulatedFault(links[5], 0.3)], rng, noise=1e-5)
        best: tuple[float, float] = (1e9, 1e9)
        for _ in range(3):
            start = time.perf_counter()
            evidence = compile_evidence(seen)
            middle = time.perf_counter()
            named = localise_evidence(evidence, candidates)
            best = min(best, (middle - start, time.perf_counter() - middle), key=sum)
        row: dict[str, object] = {
            "observations": len(seen),
            "candidates": len(candidates),
            "elements": len(evidence.elements),
        }
        row |= {"compile_ms": 1e3 * best[0], "localise_ms": 1e3 * best[1]}
        out.append(row | {"right": [s.candidate for s in named] == [links[5]]})
    return out


def measure_trace(directory: Path, file: Path) -> dict[str, object]:
    trace = probe_traces.load(file)
    start = time.perf_counter()
    evidence = compile_evidence(trace.observations)
    middle = time.perf_counter()
    named = [s.candidate for s in localise_evidence(evidence, trace.candidates)]
    seconds = time.perf_counter() - middle
    precision, recall = probe_traces.score(trace, named)
    peers: dict[str, float] = {}
    for row in probe_traces.peers(directory, trace.name):
        key = f"{row['algorithm']} ({row['param_kind']}{', true paths' if row['oracle_path'] == '1' else ''})"
        peers[key] = max(peers.get(key, 0.0), float(row["fscore"]))
    f = 2 * precision * recall / (precision + recall) if precision + recall else 0.0
    result: dict[str, object] = {"trace": trace.name, "records": len(trace.observations)}
    result |= {"precision": precision, "recall": recall, "fscore": f}
    return result | {"compile_s": middle - start, "localise_s": seconds, "peers": peers}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer runs, small sizes; under 50 s")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--traces", type=Path, metavar="DIR", help="directory of .npz probe traces")
    args = parser.parse_args()
    result: dict[str, object] = {"python": platform.python_version(), "numpy": np.__version__}

    print(f"{'simulated':42s} {'runs':>5s} {'exact':>6s} {'covered':>7s} {'false':>6s} {'ms':>6s}")
    simulated = []
    for scenario in SCENARIOS:
        simulated.append(s := simulate(scenario, 8 if args.quick else 60))
        print(
            f"{s['scenario']:42s} {s['runs']:5d} {s['exact']:6.2f} {s['covered']:7.2f} {s['false']:6.2f}"
            f" {s['ms_median']:6.1f}",
            flush=True,
        )
    result["simulated"] = simulated

    print(
        f"\n{'observations':>12s} {'candidates':>10s} {'elements':>8s} {'compile ms':>10s} {'localise ms':>11s}  right"
    )
    result["speed"] = timings = speed(args.quick)
    for t in timings:
        print(
            f"{t['observations']:12d} {t['candidates']:10d} {t['elements']:8d} {t['compile_ms']:10.1f}"
            f" {t['localise_ms']:11.1f}  {t['right']}"
        )

    if args.traces:
        print(f"\n{'trace':28s} {'records':>7s} {'P':>5s} {'R':>5s} {'F':>5s} {'s':>6s}  best peers' F on it")
        traces = [measure_trace(args.traces, f) for f in sorted(args.traces.glob("*.npz"))]
        for r in traces:
            peers = r["peers"]
            assert isinstance(peers, dict)
            line = ", ".join(f"{k} {v:.2f}" for k, v in sorted(peers.items()))
            print(
                f"{r['trace']:28s} {r['records']:7d} {r['precision']:5.2f} {r['recall']:5.2f} {r['fscore']:5.2f}"
                f" {r['localise_s']:6.3f}  {line}"
            )
        for key in ("precision", "recall", "fscore"):
            print(f"mean {key}: {statistics.mean(float(str(r[key])) for r in traces):.3f}")
        result["traces"] = traces
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
