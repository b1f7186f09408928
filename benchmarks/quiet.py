"""How often a fabric without a fault gets a false incident: importance sampling of the whole watch.

    benchmarks/quiet.py [--runs N] [--check N] [--rnics N] [--seed N] [--json FILE] [--docs FILE]

Example: benchmarks/quiet.py --runs 4000 --check 2000 --docs docs/accuracy.md

False names of the background's chance losses are so rare that no number of clean windows shows them. So each run draws
a component and makes it lose, as a fault would, from some second on until it has lost some packets, and weighs what
opens there by how much less likely the very same losses are in a sound fabric: the likelihood of all packets that
crossed the component until the incident opened, sound, over that of the mixture of all tilts that could have been drawn
(balance heuristic, Veach & Guibas 1995). That is unbiased. It ends after some losses because chance would take no more
than it needs: runs that lose more weigh nothing.

What is watched is a fabric of 96 RNICs with stalled and restarted agents and lost reports. Its localiser demands what
it would in the large fabric (its threshold is raised by the logarithm of their ratio), and the rate is that of each
component times the large fabric's number of them: false names are local.

`--check N`: N plain runs at a threshold so low that false incidents are common, beside the same by importance sampling.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import accuracy_page
import figures_page
import numpy as np
from accuracy import DRAWS, Ground, ground
from simulated_watch import HOST_SYMPTOMS, Opened, Watch

from pingmesh.analyzer.candidates import Candidate
from pingmesh.analyzer.localise import THRESHOLD
from pingmesh.analyzer.table import Floats, Ints
from pingmesh.simulate.faults import Fault, Placed
from pingmesh.simulate.troubles import Noise, draw_troubles
from pingmesh.simulate.world import ACKS, BACK, World

BEGIN, END = "<!-- figures of benchmarks/quiet.py -->", "<!-- end of the quiet figures -->"
NOISE = Noise(burst_rate=0.0)
WARM_S, LEAD_S, WATCHED_S = 60, 15, 20
"""Evidence of a minute; then losses may begin; then incidents count."""
END_S = WARM_S + LEAD_S + WATCHED_S
STARTS = tuple(range(WARM_S, END_S))
LONGEST_S = 30
LOSSES = (9, 12, 15, 19)
"""A tilt ends with the second in which so many packets were lost that cross its component."""
RATES = (0.002, 0.004, 0.008, 0.016)
MONTH_S = 30 * 86_400
ENOUGH = 10
"""Runs that an estimate has to rest on before its standard error says anything."""
LOW_THRESHOLD = -4.0
"""Of --check."""


@dataclass(eq=False)
class Tilted(World):
    """A world whose fault ends when enough was lost; keeps the log likelihood ratio, tilted to sound, of each rate and
    second."""

    enough: int = LOSSES[-1]
    ratios: Floats = field(default_factory=lambda: np.zeros((len(RATES), END_S)))
    lost: Ints = field(default_factory=lambda: np.zeros(END_S, np.int64))
    """What crosses the component and was lost, a second."""

    def _lost(
        self, rows: Ints, role: int, packets: Ints, copies: int, start_s: float, end_s: float, cls: Ints
    ) -> tuple[Ints, Ints]:
        p, second = self.faults[0], int(start_s)
        if self.lost[int(min(p.fault.start_s, second)) : second].sum() >= self.enough and p.active(start_s, end_s):
            p = self.faults[0] = replace(p, fault=replace(p.fault, end_s=float(second)))
        lost, whole = super()._lost(rows, role, packets, copies, start_s, end_s, cls)
        at = np.flatnonzero(self._hit(0, p, rows, role, cls))
        sent, gone = packets[at] * (ACKS if role == BACK else 1), lost[at]
        sound = self._sum(self.now[role][rows[at]], np.log1p(-self.troubles.hop_loss))
        for i, rate in enumerate(RATES):
            tilted = sound + math.log1p(-rate)
            more = np.log(np.expm1(tilted) / np.expm1(sound))
            self.ratios[i, second] += float(gone @ more + (sent - gone) @ (tilted - sound))
        self.lost[second] += gone.sum()
        return lost, whole

    def weight(self, until_s: int) -> float:
        """Likelihood of all until a second, sound, over that of the mixture of tilts."""
        sums = np.concatenate((np.zeros((len(RATES), 1)), np.cumsum(self.ratios[:, :until_s], axis=1)), axis=1)
        lost = np.concatenate(([0], np.cumsum(self.lost[:until_s])))
        starts = np.minimum(STARTS, until_s)
        parts = []
        for enough in LOSSES:
            ends = np.searchsorted(lost, lost[starts] + enough)  # the second after that in which enough were lost
            ends = np.minimum(ends, np.minimum(starts + LONGEST_S, until_s))
            parts.append(sums[:, ends] - sums[:, starts])
        logs = np.concatenate(parts, axis=None)
        top = float(logs.max())
        return float(len(logs) * math.exp(-top) / np.exp(logs - top).sum())


def troubled_world(g: Ground, number: int, tilt: Placed | None, rng: np.random.Generator) -> World:
    flows, _ = g.lists[number % DRAWS]
    troubles = draw_troubles(g.fabric, NOISE, END_S, rng)
    return World(g.fabric, flows, [], troubles, rng) if tilt is None else Tilted(g.fabric, flows, [tilt], troubles, rng)


def watched(g: Ground, world: World, number: int, threshold: float, target: str | None = None) -> list[Opened]:
    """Incidents of the fabric that opened while they count; ends when the target's did."""
    watch = Watch(world, g.components, g.delay_components, g.lists[number % DRAWS][1], threshold=threshold)
    opened = watch.run(END_S, lambda found: any(o.verdict.component == target for o in found))
    return [o for o in opened if o.at_s > WARM_S + LEAD_S and o.verdict.symptom not in HOST_SYMPTOMS]


def tilted_run(g: Ground, c: Candidate, number: int, threshold: float, rng: np.random.Generator) -> float:
    """The weight of the incident of a component, 0 where none opened."""
    start = int(rng.choice(STARTS))
    rate, enough = float(rng.choice(RATES)), int(rng.choice(LOSSES))
    fault = Fault(
        kind="loss", component=c.component, direction=c.direction, start_s=start, end_s=start + LONGEST_S, rate=rate
    )
    world = troubled_world(g, number, g.places.place(fault), rng)
    assert isinstance(world, Tilted)
    world.enough = enough
    for o in watched(g, world, number, threshold, c.component):
        v = o.verdict
        if (v.component, v.component_type) == (c.component, c.type) and v.direction in (c.direction, "both", None):
            return world.weight(int(o.at_s))
    return 0.0


@dataclass
class Estimate:
    """False incidents a second of one component of a type: weights of its runs."""

    kind: str
    components: int
    """In the small fabric."""
    weights: list[float] = field(default_factory=list)

    @property
    def mean(self) -> float:
        return float(np.mean(self.weights)) / WATCHED_S if self.weights else 0.0

    @property
    def error(self) -> float:
        """Standard error of the mean."""
        return float(np.std(self.weights)) / math.sqrt(max(len(self.weights), 1)) / WATCHED_S

    @property
    def effective(self) -> float:
        """How many runs the mean rests on: (sum of weights)^2 / sum of squares (Kish 1965)."""
        squares = float(np.square(self.weights).sum())
        return sum(self.weights) ** 2 / squares if squares else 0.0


def sample(g: Ground, runs: int, threshold: float, seed: int, most_s: float) -> list[Estimate]:
    """`runs` in all, by type as the square root of their number (links are many, switches are few), types in turn, so
    that what is cut short has some of each.
    """
    singles: dict[str, list[Candidate]] = {}
    for c in g.components.singles:
        singles.setdefault(c.type, []).append(c)
    shares = {kind: math.sqrt(len(some)) for kind, some in singles.items()}
    out = [Estimate(kind, len(some)) for kind, some in singles.items()]
    rngs = {e.kind: np.random.default_rng([seed, *e.kind.encode()]) for e in out}
    began = time.monotonic()
    for done in range(max(runs, len(out))):
        if done >= len(out) and time.monotonic() - began > most_s:
            break
        e = min(out, key=lambda e: len(e.weights) / shares[e.kind])
        rng = rngs[e.kind]
        c = singles[e.kind][int(rng.integers(e.components))]
        e.weights.append(tilted_run(g, c, len(e.weights), threshold, rng))
        if (done + 1) % 100 == 0:
            print(f"{time.monotonic() - began:7.0f} s  {done + 1} of {runs} runs", file=sys.stderr, flush=True)
    return out


def together(studies: Sequence[Sequence[Estimate]]) -> list[Estimate]:
    """The runs of several studies as those of one."""
    return [
        Estimate(some[0].kind, some[0].components, [w for e in some for w in e.weights])
        for some in zip(*studies, strict=True)
    ]


def plain(g: Ground, runs: int, threshold: float, seed: int) -> int:
    """False incidents of plain runs."""
    rng = np.random.default_rng([seed, 1])
    found = 0
    for number in range(runs):
        found += len(watched(g, troubled_world(g, number, None, rng), number, threshold))
    return found


def told(estimates: Sequence[Estimate], scale: float) -> dict[str, object]:
    """Per month, in a fabric `scale` times as large."""
    rows = [
        {
            "type": e.kind,
            "components": round(e.components * scale),
            "runs": len(e.weights),
            "opened": sum(w > 0 for w in e.weights),
            "largest_weight": max(e.weights, default=0.0),
            "weight_of_one_a_month": len(e.weights) * WATCHED_S / (e.components * scale * MONTH_S),
            "effective": e.effective,
            "a_month": e.mean * e.components * scale * MONTH_S,
            "error": e.error * e.components * scale * MONTH_S,
        }
        for e in estimates
    ]
    total = sum(float(r["a_month"]) for r in rows)  # type: ignore[arg-type]
    error = math.sqrt(sum(float(r["error"]) ** 2 for r in rows))  # type: ignore[arg-type]
    return {"rows": rows, "a_month": total, "error": error, "bound_95": total + 1.645 * error}


def page(result: dict) -> list[str]:
    rows = [
        [
            r["type"],
            str(r["components"]),
            str(r["runs"]),
            str(r["opened"]),
            f"{r['effective']:.1f}",
            f"{r['a_month']:.2g} ± {r['error']:.1g}",
        ]
        for r in result["rows"]
    ]
    head = ("component", f"of them under {result['rnics']:,} RNICs", "runs", "opened in", "rests on runs", "a month")
    lines = accuracy_page.table(head, rows)
    most = max(result["rows"], key=lambda r: r["a_month"])
    lines += ["", f"All together {result['a_month']:.2g} false incidents a month for {result['rnics']:,} RNICs."]
    if most["effective"] >= ENOUGH:
        lines += [f"At most {result['bound_95']:.2g} (one-sided 95 % bound, by the standard error)."]
    else:
        largest = max(r["largest_weight"] for r in result["rows"])
        needed = min(r["weight_of_one_a_month"] for r in result["rows"])
        lines += [
            f"That rests on {most['effective']:.1f} runs, weighted: an order of magnitude at best. The largest weight "
            f"of a run is {largest:.1g}; for one a month, one run would have had to weigh {needed:.1g}."
        ]
    check = result.get("check")
    if check:
        lines += [
            "",
            f"Check of the method at a threshold of {check['threshold']:g} nats: {check['found']} false incidents in "
            f"{check['runs']} plain runs of {WATCHED_S} s, {check['plain']:.2g} ± {check['plain_error']:.1g} a run; by "
            f"importance sampling {check['sampled']:.2g} ± {check['sampled_error']:.1g}.",
        ]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=4000, metavar="N", help="tilted runs (default 4000)")
    parser.add_argument("--check", type=int, default=0, metavar="N", help="plain runs, and as many tilted ones")
    parser.add_argument("--rnics", type=int, default=10_000, metavar="N", help="of the large fabric (default 10000)")
    parser.add_argument("--threshold", type=float, default=THRESHOLD, metavar="NATS", help="of the localiser")
    parser.add_argument(
        "--seed", type=int, nargs="+", default=[0], metavar="N", help="of several, runs are put together"
    )
    parser.add_argument(
        "--most-s", type=float, default=math.inf, metavar="S", help="start no run after so long, of each seed"
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--docs", type=Path, metavar="FILE", help="put the figures between their markers there")
    args = parser.parse_args()
    if args.docs:
        figures_page.require(args.docs, BEGIN, END)
    g = ground("three tiers")
    scale = args.rnics / len(g.fabric.rnics)
    threshold = args.threshold + math.log(scale)
    estimates = together([sample(g, args.runs, threshold, seed, args.most_s) for seed in args.seed])
    result: dict[str, object] = {"rnics": args.rnics, **told(estimates, scale)}
    if args.check:
        found = plain(g, args.check, LOW_THRESHOLD, args.seed[0])
        some = sample(g, args.check, LOW_THRESHOLD, args.seed[-1] + 1, args.most_s)
        result["check"] = {
            "threshold": LOW_THRESHOLD,
            "runs": args.check,
            "found": found,
            "plain": found / args.check,
            "plain_error": math.sqrt(max(found, 1)) / args.check,
            "sampled": sum(e.mean * e.components for e in some) * WATCHED_S,
            "sampled_error": math.sqrt(sum((e.error * e.components) ** 2 for e in some)) * WATCHED_S,
        }
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    print("\n".join(page(result)))
    if args.docs:
        figures_page.put(args.docs, page(result), BEGIN, END)


if __name__ == "__main__":
    main()
