"""Every kind of fault at random places of a 4x4x16 lab: is the broken part named, how soon, is anything else blamed?

    benchmarks/lab_faults.py [--quick] [--json FILE [--resume]] [--runs N] [--only KIND,...] [--running]

The whole takes about two hours; each figure is written as soon as it is known, and `--resume` goes on where an
interrupted run stopped.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import random
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fault_rounds
from fault_rounds import Round, quantile, started, wilson

from pingmesh.lab.client import Lab
from pingmesh.lab.faults.draw import KINDS, random_spec

RUNS = {"link": 9, "rnic": 15, "switch": 15, "host": 15, "link-1%": 20, "link-partial": 10, "link-congest": 10}
"""By pool, runs of each kind, so that a class of fault has 60; else DEFAULT_RUNS."""
DEFAULT_RUNS = 5
QUICK_KINDS = ("link-blackhole", "rnic-blackhole", "switch-blackhole", "agent-kill")
QUICK_S = 35.0
READY_S = 120.0
QUIET_S = 60.0


def figures(rounds: Sequence[Round]) -> dict[str, Any]:
    """What the runs say, by kind and pooled by class of fault."""

    def of(chosen: Sequence[Round]) -> dict[str, Any]:
        n, right = len(chosen), sum(r.right for r in chosen)
        low, high = wilson(right, n)
        opened = [r.opened_s for r in chosen if r.opened_s is not None and r.component_right]
        closed = [r.closed_s for r in chosen if r.closed_s is not None]
        return {
            "runs": n,
            "right": right,
            "wilson_95": [round(low, 4), round(high, 4)],
            "component_right": sum(r.component_right for r in chosen),
            "direction_right": sum(r.direction_right for r in chosen),
            "symptom_right": sum(r.symptom_right for r in chosen),
            "blamed": sum(len(r.blamed) for r in chosen),
            "blamed_later": sum(len(r.blamed_later) for r in chosen),
            "open_s_median": quantile(opened, 0.5),
            "open_s_p95": quantile(opened, 0.95),
            "close_s_median": quantile(closed, 0.5),
            "not_closed": sum(r.closed_s is None for r in chosen),
        }

    kinds, pools = defaultdict(list), defaultdict(list)
    for r in rounds:
        kinds[r.kind].append(r)
        pools[r.pool].append(r)
    return {
        "pools": {p: of(rs) for p, rs in sorted(pools.items())},
        "kinds": {k: of(kinds[k]) for k in KINDS if k in kinds},
    }


def write(path: Path | None, rounds: Sequence[Round], beside: dict[str, Any]) -> None:
    """Replace the file of figures, so that it is whole whenever the run ends."""
    if path is None:
        return
    text = json.dumps({"beside": beside, **figures(rounds), "rounds": [r.record() for r in rounds]}, indent=1)
    part = path.with_name(path.name + ".part")
    part.write_text(text + "\n")
    part.replace(path)


def show(rounds: Sequence[Round]) -> None:
    """The tables."""
    f = figures(rounds)
    columns = ("symptom", 8), ("blamed", 7), ("later", 6), ("open", 7), ("p95", 7), ("close", 7)
    head = f"{'runs':>5}{'right':>6}  {'95 %':<12}" + "".join(f"{text:>{width}}" for text, width in columns)
    for title in ("kinds", "pools"):
        print(f"\n{title:22}{head}")
        for key, v in f[title].items():
            interval = f"{v['wilson_95'][0]:.2f}-{v['wilson_95'][1]:.2f}"
            times = "".join(
                f"{'-' if v[t] is None else format(v[t], '.1f'):>7}"
                for t in ("open_s_median", "open_s_p95", "close_s_median")
            )
            print(
                f"{key:22}{v['runs']:>5}{v['right']:>6}  {interval:<12}{v['symptom_right']:>8}{v['blamed']:>7}"
                f"{v['blamed_later']:>6}{times}"
            )


def line(r: Round) -> str:
    """One run for the progress."""
    opened = "nothing opened" if r.opened_s is None else f"opened after {r.opened_s:.1f} s"
    closed = "close not seen" if r.closed_s is None else f"closed after {r.closed_s:.1f} s"
    notes = []
    if not r.component_right:
        notes.append("component missed")
    elif not r.direction_right:
        notes.append("wrong direction")
    elif not r.symptom_right:
        notes.append("other symptom")
    notes += [f"blamed {b}" for b in r.blamed] + [f"later blamed {b}" for b in r.blamed_later]
    return f"{'ok  ' if r.right else 'MISS'} {r.fault}: {opened}, {closed}{''.join('; ' + n for n in notes)}"


def plan(args: argparse.Namespace, done: Sequence[Round]) -> list[tuple[str, int]]:
    """(kind, number) of the runs to make, kinds in turn, so that an interrupted run is balanced."""
    kinds = args.only.split(",") if args.only else list(QUICK_KINDS) if args.quick else list(KINDS)
    for k in kinds:
        if k not in KINDS:
            raise SystemExit(f"There is no kind of fault {k!r}; there is {', '.join(KINDS)}.")
    had: dict[str, int] = defaultdict(int)
    for r in done:
        had[r.kind] += 1
    wanted = {k: args.runs or (1 if args.quick else RUNS.get(KINDS[k].pool, DEFAULT_RUNS)) for k in kinds}
    return [(k, n) for n in range(max(wanted.values())) for k in kinds if had[k] <= n < wanted[k]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small lab and as many faults as 50 s allow")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write figures and runs here, after every run")
    parser.add_argument("--resume", action="store_true", help="keep the runs that are in the JSON file")
    parser.add_argument("--runs", type=int, metavar="N", help="runs of each kind (default: 60 of each class)")
    parser.add_argument("--only", metavar="KIND,...", help="only these kinds")
    parser.add_argument("--running", action="store_true", help="use the lab that runs")
    parser.add_argument("--seed", type=int, default=1, help="draws the places")
    args = parser.parse_args()
    if args.resume and args.json is None:
        parser.error("--resume needs the file of --json")
    rounds: list[Round] = []
    if args.resume and args.json.exists():
        rounds = [Round.of(r) for r in json.loads(args.json.read_text())["rounds"]]
    todo = plan(args, rounds)
    start = time.monotonic()
    # Of two leaves only, the two cables of a spine are in series: nobody could tell them apart.
    shape = {"leaves": 3, "spines": 2, "hosts_per_leaf": 2} if args.quick else {}
    with contextlib.ExitStack() as stack:
        lab = Lab() if args.running else stack.enter_context(started(shape))
        if not lab.wait_ready(READY_S, print):
            raise SystemExit("The lab did not reach full coverage; see `pingmesh status`.")
        t = lab.topology
        beside = {
            "lab": f"{len(t.switches)} switches, {len(t.hosts)} hosts, {len(t.rnics)} RNICs, {len(t.links)} links",
            "cpus": os.cpu_count(),
            "kernel": platform.release(),
            "python": platform.python_version(),
            "seed": args.seed,
        }
        for number, (kind, n) in enumerate(todo, 1):
            patience = QUICK_S - (time.monotonic() - start) if args.quick else QUIET_S
            if fault_rounds.until(lambda: fault_rounds.quiet(lab), patience) is None:
                if args.quick:
                    print("out of time: the rest is left out")
                    break
                print("the lab is not quiet; going on")
            argv = random_spec(random.Random(f"{args.seed}/{kind}/{n}"), t, [kind])
            r = fault_rounds.run(lab, kind, argv, hurry=args.quick)
            rounds.append(r)
            beside["load"] = os.getloadavg()
            write(args.json, rounds, beside)
            print(f"[{number}/{len(todo)}, {time.monotonic() - start:.0f} s] {kind}: {line(r)}", flush=True)
    show(rounds)


if __name__ == "__main__":
    main()
