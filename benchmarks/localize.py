"""Precision, recall and speed of the localiser on probe traces with ground truth, with one setting for all of them.

    benchmarks/localize.py --traces DIR [--json FILE]                 every .npz in DIR, blind
    benchmarks/localize.py [--traces DIR] --clean N --curve ... --all studies of generated traces (and DIR's)

Example: benchmarks/localize.py --traces traces/open --curve --svg docs/localisation.svg --json result.json

Per trace: what is named (`u>v` a directed link, `u` a switch, `a|b` a class that the evidence cannot tell apart),
precision, recall and F (how they are counted: benchmarks/trace_score.py), CPU seconds of all threads without parsing,
and beside it the paper's rule (benchmarks/paper_rule.py) and, where `peers_open.csv` lies in DIR or above it, Flock.
The truth of a trace is read for the score, and to draw losses anew for --thin. Generated traces come from
benchmarks/make_traces.py with a seed of their own; nothing was tuned on them.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before numpy is imported

import localize_studies as studies
import numpy as np
from trace_files import Trace, load, table_of
from trace_judge import VOTES, best_votes, compiled, judge, paper_scores

from pingmesh.analyzer.localise import THRESHOLD

Json = dict[str, Any]


def thresholds_around(default: float) -> list[float]:
    """Those of the curve: from far more names than by default to far fewer."""
    return [default + step for step in (-6, -4.5, -3, -2, -1, 0, 1, 2, 3, 5, 8)]


def judge_files(files: Sequence[Path], threshold: float) -> tuple[list[Trace], list[Json]]:
    """The traces and a row for each; nothing but the score looks at a trace's truth."""
    traces, rows = [], []
    for file in files:
        start = time.process_time()
        trace = load(file)
        read = time.process_time()
        known = compiled(trace.fabric)
        middle = time.process_time()
        table = table_of(trace, known)
        parse_s = time.process_time() - middle + read - start
        judged = judge(trace, threshold, table)
        traces.append(trace)
        rows.append(
            {
                "trace": trace.name,
                "predicted": judged.predicted,
                "seconds": judged.seconds,
                "precision": judged.score.precision,
                "recall": judged.score.recall,
                "f": judged.score.f,
                "parse_s": parse_s,
                "records": len(trace.src),
                "hidden": not trace.path_known.all(),
            }
        )
    return traces, rows


def flock(directory: Path) -> dict[str, list[float]]:
    """Flock's F per trace with each of its settings, without the paths that a trace hides."""
    out: dict[str, list[float]] = {}
    for place in (directory, directory.parent):
        file = place / "peers_open.csv"
        if file.is_file():
            with file.open(newline="") as f:
                for row in csv.DictReader(f):
                    if row["algorithm"] == "Flock" and row["oracle_path"] == "0":
                        out.setdefault(row["trace"], []).append(float(row["fscore"]))
            break
    return out


def means(rows: Sequence[Json], keys: Sequence[str]) -> Json:
    return {key: float(np.mean([row[key] for row in rows])) for key in keys}


def report_traces(directory: Path, threshold: float) -> tuple[list[Trace], Json]:
    files = sorted(directory.glob("*.npz"))
    if not files:
        raise SystemExit(f"no .npz in {directory}")
    traces, rows = judge_files(files, threshold)
    papers = [paper_scores(t) for t in traces]
    votes = best_votes(papers)
    peers = flock(directory)
    print(
        f"{'trace':28s} {'records':>7s} {'P':>5s} {'R':>5s} {'F':>5s} {'s':>6s} {'parse':>6s}"
        f" {'paper':>5s} {'Flock':>5s}  predicted"
    )
    for row, paper in zip(rows, papers, strict=True):
        row["paper_f"] = paper[votes].f
        best = max(peers.get(row["trace"], [np.nan]))
        if not np.isnan(best):
            row["flock_f"] = best
        worse = " <" if row["f"] < best - 0.02 else "  "
        print(
            f"{row['trace']:28s} {row['records']:7d} {row['precision']:5.2f} {row['recall']:5.2f} {row['f']:5.2f}"
            f" {row['seconds']:6.3f} {row['parse_s']:6.3f} {row['paper_f']:5.2f} {best:5.2f}{worse}"
            f"{' '.join(row['predicted'])[:80]}"
        )
    keys = ("precision", "recall", "f", "seconds", "paper_f")
    result: Json = {"threshold": threshold, "traces": rows, "mean": means(rows, keys), "paper_least": VOTES[votes]}
    for name, part in (("known", [r for r in rows if not r["hidden"]]), ("hidden", [r for r in rows if r["hidden"]])):
        if part:
            result[f"mean_{name}"] = means(part, keys)
            if all("flock_f" in r for r in part):
                result[f"mean_{name}"]["flock_f"] = float(np.mean([r["flock_f"] for r in part]))
    for name in ("mean", "mean_known", "mean_hidden"):
        if name in result:
            print(f"{name.replace('_', ', '):14s}" + "  ".join(f"{k} {v:.3f}" for k, v in result[name].items()))
    print(
        f"paper: {VOTES[votes]} failed probes or more make a vote (the best for these traces);"
        " Flock: the better of its settings for each trace; <: more than .02 below it"
    )
    return traces, result


def table(rows: Sequence[Json]) -> None:
    """Rows as a Markdown table."""
    keys = list(rows[0])
    print("\n| " + " | ".join(keys) + " |\n|" + "---|" * len(keys))
    for row in rows:
        print("| " + " | ".join(f"{v:.3f}" if isinstance(v := row[k], float) else str(v) for k in keys) + " |")


def report_clean(count: int, threshold: float) -> Json:
    clean, rows = studies.clean_windows(count, [threshold])
    table([row | {"false": row["false"][threshold]} for row in rows])
    print(f"\n{clean.false[threshold]} of {clean.windows} clean windows got a name (threshold {threshold:g})")
    return {"windows": clean.windows, "false": clean.false[threshold], "threshold": threshold, "parts": rows}


def report_curve(count: int, default: float, traces: Sequence[Trace], svg: Path | None) -> Json:
    thresholds = thresholds_around(default)
    clean, _ = studies.clean_windows(count, thresholds)
    known = [t for t in traces if t.path_known.all()]
    sets = {"traces given, known paths": known, "generated, known paths": studies.generated()}
    curves = {name: studies.mean_f(members, thresholds) for name, members in sets.items() if members}
    rows: list[Json] = []
    for t in thresholds:
        f = {name: curve[t] for name, curve in curves.items()}
        rows.append({"threshold": t, "false windows": f"{clean.false[t]}/{clean.windows}", **f})
    table(rows)
    print("; ".join(f"{name}: {len(members)}" for name, members in sets.items()))
    if svg:
        points = {n: [(clean.false[t] / clean.windows, c[t]) for t in thresholds] for n, c in curves.items()}
        svg.write_text(studies.curve_svg(points, clean.windows))
    return {"windows": clean.windows, "points": rows, "traces": {n: [t.name for t in m] for n, m in sets.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, metavar="DIR", help="directory of .npz traces")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there too")
    parser.add_argument(
        "--threshold", type=float, default=THRESHOLD, metavar="NATS", help="lower: more names (default %(default)g)"
    )
    parser.add_argument("--clean", type=int, metavar="N", help="false names in N generated windows without a fault")
    parser.add_argument(
        "--curve", action="store_true", help="F against false names over thresholds (--clean windows, default 2004)"
    )
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw --curve")
    parser.add_argument("--families", action="store_true", help="F on generated traces by family of fault")
    parser.add_argument(
        "--recall", type=int, metavar="N", help="recall by lost packets, at least N failed links a class"
    )
    parser.add_argument(
        "--thin", type=int, metavar="N", help="10 probes/s per link, 1, 3, 10 windows; N redraws a trace"
    )
    parser.add_argument("--speed", type=int, metavar="N", help="CPU seconds at three sizes, best of N")
    parser.add_argument("--all", action="store_true", help="all of these, at the sizes published in docs/benchmarks.md")
    args = parser.parse_args()
    if args.all:
        args.curve = args.families = True
        args.recall, args.thin, args.speed = args.recall or 200, args.thin or 5, args.speed or 5
    studied = args.clean or args.curve or args.families or args.recall or args.thin or args.speed
    if not args.traces and not studied:
        parser.error("nothing to do: --traces or a study")
    result: Json = {}
    traces: list[Trace] = []
    if args.traces:
        traces, result = report_traces(args.traces, args.threshold)
    if args.curve:
        result["curve"] = report_curve(args.clean or 2004, args.threshold, traces, args.svg)
    elif args.clean:
        result["clean"] = report_clean(args.clean, args.threshold)
    if args.families:
        result["families"] = studies.by_family([*studies.generated(), *studies.generated(hidden=True)], args.threshold)
        table(result["families"])
    if args.recall:
        result["recall"] = studies.recall_by_losses(args.threshold, args.recall)
        table(result["recall"])
    if args.thin:
        result["thin"] = studies.thin(traces or studies.generated(1), args.threshold, args.thin)
        table(result["thin"])
        keys = [k for k in result["thin"][0] if k != "trace"]
        result["thin_mean"] = means(result["thin"], keys)
        print("mean: " + "  ".join(f"{k} {v:.3f}" for k, v in result["thin_mean"].items()))
    if args.speed:
        result["speed"] = studies.speed(args.threshold, args.speed)
        table(result["speed"])
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
