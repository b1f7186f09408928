"""The accuracy study in words: tables for the terminal and for docs/accuracy.md."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import figures_page

BEGIN, END = "<!-- figures of benchmarks/accuracy.py -->", "<!-- end of figures -->"

HEAD = f"""# How well faults are named

    benchmarks/accuracy.py --seed 61000 --json accuracy.json --docs docs/accuracy.md

puts faults at random places of simulated fabrics (`pingmesh/simulate/`) and watches with the product's inference until
they are named or a minute has passed. The lists give every directed switch link 10 probes/s, in three classes; both
ends count; paths are traced. What decides is the product's code: the localiser, the plan of confirmations, the host
rules, the tracker. What is modelled is time (`benchmarks/simulated_watch.py`): losses are noticed at the end of their
second, the first three rounds of confirmation leave two a second from then on, later ones one a second, each known
0.5 s after its last probe, counts of a 5 s window are there a second after its end.

Noise goes on all the time: every directed hop loses U(0, 1e-4) of its packets; every hop has a burst of 5 ms that loses
half, each 10 minutes on average; every agent stalls for 0.3 s on average each 5 minutes and restarts each half hour,
one time in four without a goodbye; of 0.2 % of hosts and windows the responder's counts are lost.

*Recall* is the share of the faults named within the time beside it: the fault's component is the incident's, or among
the alternatives that it says cannot be told apart; *exact* asks for component and direction, without alternatives.
*Precision* is the share of right ones among all incidents of links, switches and RNICs, also those opened before the
fault began. Incidents of hosts whose agents really were shaken by the noise are not counted. In brackets the 95 %
Wilson interval. *Paper*: the rule of Liu et al. 2024 (`benchmarks/paper_rule.py`) on 20 s of the same faults, right if
it names the component, or a link of the switch.

Rules and settings of localiser and tracker were chosen on runs of the same simulator with other seeds (`--seed` below
50,000), those of these tables were made once.

What is not modelled: delays are named by the analyzer's quick look alone (milliseconds; what is usual needs minutes), a
delay at an RNIC has no direction, which *exact* asks for, and packets are lost by chance and not by queues.

{BEGIN}
{END}

## A fabric without a fault

    benchmarks/quiet.py --runs 520 --seed 8 --docs docs/accuracy.md

The same watch over a fabric that only loses what a sound one loses, U(0, 1e-4) of every hop's packets, with stalls,
restarts and lost reports, and without the bursts. Chance is so rarely mistaken for a fault that no number of clean
windows would show it; so losses are drawn as a fault would make them, and each incident is weighed by how much less
likely they are in a sound fabric: the script tells how. Under 10,000 RNICs a packet is lost by chance a hundred times
a second, and each starts a confirmation; watched are 96 of them, and confirmations in different parts of a fabric are
taken not to disturb one another.

<!-- figures of benchmarks/quiet.py -->
<!-- end of the quiet figures -->
"""


def number(value: object, digits: int = 2) -> str:
    return "–" if not isinstance(value, int | float) else f"{value:.{digits}f}"


def score_rows(scores: Sequence[dict]) -> list[list[str]]:
    rows = []
    for s in scores:
        if s["recall"] is None:
            continue
        rows.append(
            [
                f"{s['cause']}" if s["cause"] else "",
                s["scenario"],
                str(s["runs"]),
                f"{s['recall']:.3f} ({s['recall_low']:.2f}–{s['recall_high']:.2f}) in {s['within_s']:.0f} s",
                number(s["recall_60"], 3),
                number(s["exact"]),
                number(s["precision"], 3),
                number(s["median_s"], 1),
                number(s["p95_s"], 1),
                f"{number(s['paper_recall'])} / {number(s['paper_precision'])}",
            ]
        )
    return rows


COLUMNS = (
    "cause",
    "fault",
    "runs",
    "recall",
    "in 60 s",
    "exact",
    "precision",
    "median s",
    "p95 s",
    "paper: recall / precision",
)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(r)} |" for r in (head, ["---"] * len(head), *rows)]


def page(result: dict) -> list[str]:
    scores = result["scores"]
    lines: list[str] = []
    parts = (
        ("The paper's root causes", [s for s in scores if s["cause"]]),
        ("Rates, switches, several faults", [s for s in scores if not s["cause"] and s["fabric"] == "three tiers"]),
        ("Other fabrics", [s for s in scores if s["fabric"] != "three tiers"]),
    )
    for title, chosen in parts:
        rows = score_rows(chosen)
        if rows:
            lines += [f"## {title}", "", *table(COLUMNS, rows), ""]
    quiet = [s for s in scores if s["recall"] is None]
    opened = sum(s["opened"] for s in scores)
    wrong = sum(s["wrong"] for s in scores)
    lines += [
        f"All scenarios together: {opened} incidents of the fabric, {wrong} wrong (precision "
        f"{1 - wrong / max(opened, 1):.4f}).",
        "",
    ]
    for s in quiet:
        lines += [f"Without a fault: {s['wrong']} false incidents in {s['runs']} runs of a minute and more.", ""]
    lines += [
        "## Confidence",
        "",
        "Incidents by their confidence, and the share whose component is the fault's (alternatives not counted).",
        "",
    ]
    rows = [
        (f"{c['from']:.2f}–{c['to']:.2f}", str(c["n"]), f"{c['right']:.3f} ({c['low']:.2f}–{c['high']:.2f})")
        for c in result["calibration"]
    ]
    lines += [*table(("confidence", "incidents", "right"), rows), ""]
    types = sorted({k for v in result["confusion"].values() for k in v})
    rows = [[truth, *(str(v.get(t, 0)) for t in types)] for truth, v in result["confusion"].items()]
    lines += ["## What was named for what", "", *table(("fault in a", *types), rows), ""]
    if result["cpu_s_per_run"]:
        lines.append(
            f"A run takes {result['cpu_s_per_run']:.1f} s of CPU. Python {result['python']}, numpy {result['numpy']}."
        )
    return lines


def show(result: dict) -> None:
    """The same tables on the terminal."""
    print("\n".join(page(result)))


def write(path: Path, result: dict) -> None:
    """Put the figures between the markers; what is written by hand around them stays."""
    if not path.exists():
        path.write_text(HEAD, encoding="utf-8")
    figures_page.put(path, page(result), BEGIN, END)
