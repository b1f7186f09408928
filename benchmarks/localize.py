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

import figures_page
import localize_studies as studies
import numpy as np
from trace_files import Trace, load, table_of
from trace_judge import VOTES, best_votes, compiled, judge, paper_scores

from pingmesh.analyzer.localise import THRESHOLD, wilson

Json = dict[str, Any]
BEGIN, END = "<!-- figures of benchmarks/localize.py -->", "<!-- end of figures -->"


class Report:
    """Text that is printed as it comes, and kept for --docs."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        print(text, flush=True)
        self.lines.append(text)

    def table(self, title: str, rows: Sequence[Json], columns: dict[str, str]) -> None:
        """Rows as a Markdown table; `columns`: key -> heading."""

        def cell(value: object) -> str:
            if not isinstance(value, float):
                return "" if value is None else f"{value}"
            return f"{value:g}" if 0 < abs(value) < 0.001 else f"{value:.3f}"

        head = ["| " + " | ".join(columns.values()) + " |", "|" + "---|" * len(columns)]
        body = ["| " + " | ".join(cell(row.get(key)) for key in columns) + " |" for row in rows]
        self.say("\n".join(["", title, "", *head, *body]))


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


def flock(directory: Path) -> dict[str, float]:
    """Flock's F per trace with the better of its settings, without the paths that a trace hides."""
    out: dict[str, float] = {}
    for place in (directory, directory.parent):
        file = place / "peers_open.csv"
        if file.is_file():
            with file.open(newline="") as f:
                for row in csv.DictReader(f):
                    if row["algorithm"] == "Flock" and row["oracle_path"] == "0":
                        out[row["trace"]] = max(out.get(row["trace"], 0.0), float(row["fscore"]))
            break
    return out


def means(rows: Sequence[Json], keys: Sequence[str]) -> Json:
    return {key: float(np.mean([row[key] for row in rows])) for key in keys}


def report_traces(directory: Path, threshold: float, report: Report) -> tuple[list[Trace], Json]:
    files = sorted(directory.glob("*.npz"))
    if not files:
        raise SystemExit(f"no .npz in {directory}")
    traces, rows = judge_files(files, threshold)
    papers = [paper_scores(t) for t in traces]
    votes = best_votes(papers)
    peers = flock(directory)
    for row, paper in zip(rows, papers, strict=True):
        row["paper_f"] = paper[votes].f
        if row["trace"] in peers:
            row["flock_f"] = peers[row["trace"]]
            row["below"] = "below" if row["f"] < row["flock_f"] - 0.02 else ""
    keys = ["precision", "recall", "f", "seconds", "paper_f"]
    result: Json = {"threshold": threshold, "traces": rows, "mean": means(rows, keys), "paper_least": VOTES[votes]}
    shown: list[Json] = [
        {**row, "names": " ".join(f"`{n}`" for n in row["predicted"]).replace("|", "\\|")} for row in rows
    ]
    parts = {"known": [r for r in rows if not r["hidden"]], "hidden": [r for r in rows if r["hidden"]], "all": rows}
    for name, part in parts.items():
        if part:
            more = ["flock_f"] if all("flock_f" in r for r in part) else []
            result[f"mean_{name}"] = means(part, [*keys, *more])
            shown.append({"trace": f"mean, {name} paths" if name != "all" else "mean", **result[f"mean_{name}"]})
    columns = {"trace": "trace", "records": "records", "precision": "precision", "recall": "recall", "f": "F"}
    columns |= {
        "paper_f": "paper's rule, F",
        "flock_f": "Flock, F",
        "below": "",
        "seconds": "s",
        "parse_s": "parsing s",
    }
    report.table(f"Traces given, threshold {threshold:g}:", shown, columns | {"names": "named"})
    report.say(
        f"\nPaper's rule: it votes from {VOTES[votes]} failed probes on (the best value for these traces). Flock: the"
        " better of its settings for each trace, with paths hidden where the trace hides them; `below`: F more than .02"
        " under it. Parsing: the file into arrays and those into the localiser's table."
    )
    return traces, result


def report_clean(count: int, threshold: float, report: Report) -> Json:
    clean, rows = studies.clean_windows(count, [threshold])
    columns = {"topology": "topology", "noise_max": "noise up to", "windows": "windows", "named": "with a name"}
    report.table("Clean windows:", [row | {"named": row["false"][threshold]} for row in rows], columns)
    false = clean.false[threshold]
    high = wilson(false, clean.windows)[1]
    report.say(f"\n{false} of {clean.windows} at threshold {threshold:g}; at most one in {1 / high:.0f} (95 % Wilson).")
    return {"windows": clean.windows, "false": false, "threshold": threshold, "parts": rows}


def report_curve(count: int, default: float, traces: Sequence[Trace], svg: Path | None, report: Report) -> Json:
    thresholds = thresholds_around(default)
    clean, parts = studies.clean_windows(count, thresholds)
    known = [t for t in traces if t.path_known.all()]
    sets = {"traces given": known, "generated traces": studies.generated()}
    sets = {name: members for name, members in sets.items() if members}
    curves = {name: studies.mean_f(members, thresholds) for name, members in sets.items()}
    rows: list[Json] = []
    for t in thresholds:
        row: Json = {"threshold": t, "false": clean.false[t], "one_in": wilson(clean.false[t], clean.windows)[1]}
        rows.append(row | {name: curve[t] for name, curve in curves.items()})
    columns = {"threshold": "threshold", "false": f"false of {clean.windows}", "one_in": "95 % bound of the share"}
    columns |= {name: f"mean F, {len(members)} {name}, paths known" for name, members in sets.items()}
    report.table(f"F against clean windows with a name (default threshold {default:g}):", rows, columns)
    if svg:
        points = {n: [(clean.false[t] / clean.windows, c[t]) for t in thresholds] for n, c in curves.items()}
        svg.write_text(studies.curve_svg(points, clean.windows))
        report.say(f"\n![F against clean windows with a name]({svg.name})")
    names = {n: [t.name for t in m] for n, m in sets.items()}
    return {"windows": clean.windows, "parts": parts, "points": rows, "traces": names}


def report_families(threshold: float, report: Report) -> list[Json]:
    rows = studies.by_family([*studies.generated(), *studies.generated(hidden=True)], threshold)
    columns = {"family": "family", "traces": "traces", "precision": "precision", "recall": "recall", "f": "F"}
    columns |= {"ceiling_f": "F if all with > 2 losses were named", "paper_f": "paper's rule, F"}
    report.table("Generated traces by kind of fault:", rows, columns)
    return rows


def report_recall(links: int, threshold: float, report: Report) -> list[Json]:
    rows = studies.recall_by_losses(threshold, links)
    columns = {"lost": "packets lost at the link", "links": "links", "recall": "recall"}
    columns |= {"all_known": "with all rates known"}
    for noise in studies.RECALL_NOISES:
        columns |= {f"recall_noise_{noise:g}": f"noise up to {noise:g}", f"all_known_{noise:g}": "with all rates known"}
    report.table("Recall of failed links:", rows, columns)
    report.say(
        "\nWith all rates known: the most probable verdict of one who knows the loss rate of every link, of the failed "
        "one too, and that three of all have failed: who has to estimate them finds more only with more false names."
    )
    return rows


def report_thin(traces: Sequence[Trace], threshold: float, redraws: int, report: Report) -> Json:
    rows = studies.thin(traces, threshold, redraws)
    keys = [f"{what}_{windows}" for what in ("f", "paper") for windows in studies.WINDOWS]
    mean = means(rows, keys)
    columns = {"trace": "trace", **{f"f_{w}": f"F, windows: {w}" for w in studies.WINDOWS}}
    columns |= {f"paper_{w}": f"paper's rule, {w}" for w in studies.WINDOWS}
    title = f"Thinned to {studies.PROBES_PER_S:g} probes/s per switch link, {redraws} redraws a trace:"
    report.table(title, [*rows, {"trace": "mean", **mean}], columns)
    return {"traces": rows, "mean": mean}


def report_speed(threshold: float, repeat: int, report: Report) -> list[Json]:
    rows = studies.speed(threshold, repeat)
    columns = {"size": "size", "records": "records", "links": "links", "seconds_best": "s, best"}
    columns |= {"seconds_median": "s, median", "table_s": "making the table, s", "f": "F"}
    columns |= {"flock_s": "Flock, s", "netbouncer_s": "NetBouncer, s", "rss_mb": "RSS MB"}
    report.table(f"CPU seconds of all threads, {repeat} runs:", rows, columns)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--traces", type=Path, metavar="DIR", help="directory of .npz traces")
    add("--json", type=Path, metavar="FILE", help="write every figure there too")
    add("--docs", type=Path, metavar="FILE", help="put the tables between the markers in this Markdown file")
    add("--threshold", type=float, default=THRESHOLD, metavar="NATS", help="lower: more names (default %(default)g)")
    add("--clean", type=int, metavar="N", help="false names in N generated windows without a fault")
    add("--curve", action="store_true", help="F against false names over thresholds (--clean windows, default 2004)")
    add("--svg", type=Path, metavar="FILE", help="draw --curve; --docs shows it, so keep it beside that file")
    add("--families", action="store_true", help="F on generated traces by family of fault")
    add("--recall", type=int, metavar="N", help="recall by lost packets, at least N failed links a class")
    add("--thin", type=int, metavar="N", help="10 probes/s per link, 1, 3, 10 windows; N redraws a trace")
    add("--speed", type=int, metavar="N", help="CPU seconds at three sizes, best of N")
    add("--all", action="store_true", help="all of these, at the sizes published in docs/benchmarks.md")
    args = parser.parse_args()
    if args.all:
        args.curve = args.families = True
        args.recall, args.thin, args.speed = args.recall or 200, args.thin or 5, args.speed or 5
    studied = args.clean or args.curve or args.families or args.recall or args.thin or args.speed
    if not args.traces and not studied:
        parser.error("nothing to do: --traces or a study")
    if args.docs:
        figures_page.require(args.docs, BEGIN, END)
    report, result, traces = Report(), Json(), list[Trace]()
    if args.traces:
        traces, result = report_traces(args.traces, args.threshold, report)
    if args.curve:
        result["curve"] = report_curve(args.clean or 2004, args.threshold, traces, args.svg, report)
    elif args.clean:
        result["clean"] = report_clean(args.clean, args.threshold, report)
    if args.families:
        result["families"] = report_families(args.threshold, report)
    if args.recall:
        result["recall"] = report_recall(args.recall, args.threshold, report)
    if args.thin:
        result["thin"] = report_thin(traces or studies.generated(1), args.threshold, args.thin, report)
    if args.speed:
        result["speed"] = report_speed(args.threshold, args.speed, report)
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    if args.docs:
        figures_page.put(args.docs, [*report.lines, ""], BEGIN, END)


if __name__ == "__main__":
    main()
