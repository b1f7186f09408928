"""Studies of the localiser on generated traces: false names, F against them, recall by losses, few probes, speed."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import make_traces
import numpy as np
from make_traces import FAMILIES, NO_FAULTS, STUDIED, Family, Faults
from trace_files import Trace, table_of
from trace_judge import best_votes, compiled, judge, paper_scores
from trace_score import score

from pingmesh.analyzer.localise import localise_table
from pingmesh.analyzer.table import Floats

Json = dict[str, Any]

NOISES = (1e-5, 1e-4, 5e-4)
SEED = 2026
"""Of everything generated here. No parameter of the product was chosen on these traces."""
BUCKETS = ((3, 5), (6, 10), (11, 20), (21, 50), (51, 200))
"""Packets really lost at a failed link."""
WINDOWS = (1, 3, 10)
PROBES_PER_S = 10.0
RECALL_NOISES = (1e-5, 1e-4)


@dataclass(frozen=True)
class Clean:
    """Clean windows that got a name, for each threshold."""

    windows: int
    false: dict[float, int]


def clean_windows(count: int, thresholds: Sequence[float]) -> tuple[Clean, list[Json]]:
    """At least `count` windows in which nothing failed, in equal parts over topologies and noise levels.

    A window without a name at one threshold is taken to have none at a higher one.
    """
    each = math.ceil(count / (len(STUDIED) * len(NOISES)))
    thresholds = sorted(thresholds)
    total = dict.fromkeys(thresholds, 0)
    rows: list[Json] = []
    for topology, noise in itertools.product(STUDIED, NOISES):
        rng = np.random.default_rng([SEED, 1, STUDIED.index(topology), NOISES.index(noise)])
        plan = make_traces.make_plan(topology, FAMILIES["none"], rng)
        false = dict.fromkeys(thresholds, 0)
        table, known = None, compiled(plan.fabric)
        for _ in range(each):
            drawn = make_traces.draw_losses(plan, make_traces.loss_rates(plan, NO_FAULTS, noise, rng), rng)
            if table is None:
                table = table_of(make_traces.trace_of(plan, "clean", NO_FAULTS, noise, drawn), known)
            window = dataclasses.replace(table, lost=drawn.lost.astype(np.float64))
            for threshold in thresholds:
                if not localise_table(window, known.components, threshold=threshold):
                    break
                false[threshold] += 1
        for threshold in thresholds:
            total[threshold] += false[threshold]
        rows.append({"topology": topology, "noise_max": noise, "windows": each, "false": false})
    return Clean(each * len(rows), total), rows


@functools.lru_cache
def generated(count: int = 2, *, hidden: bool = False) -> list[Trace]:
    """Faulty traces of every family with known paths (or, if `hidden`, of those that hide them)."""
    kinds = [k for k, f in FAMILIES.items() if k != "none" and (f.mode != "int") == hidden]
    return list(make_traces.make_traces(kinds, list(STUDIED), count, SEED))


def mean_f(traces: Sequence[Trace], thresholds: Sequence[float]) -> dict[float, float]:
    """Mean F of the traces at each threshold."""
    total = dict.fromkeys(thresholds, 0.0)
    for trace in traces:
        table = table_of(trace, compiled(trace.fabric))
        for threshold in thresholds:
            total[threshold] += judge(trace, threshold, table).score.f / len(traces)
    return total


def by_family(traces: Sequence[Trace], threshold: float) -> list[Json]:
    """Mean precision, recall and F of generated traces by family, and the paper's F."""
    families: dict[str, list[Trace]] = {}
    for trace in traces:
        families.setdefault(trace.name.split("_", 1)[1].rsplit("_", 2)[0], []).append(trace)
    papers = {t.name: paper_scores(t) for t in traces}
    votes = best_votes(list(papers.values()))
    out: list[Json] = []
    for family, members in families.items():
        scores = [judge(t, threshold).score for t in members]
        row: Json = {"family": family, "traces": len(members)}
        for key in ("precision", "recall", "f"):
            row[key] = float(np.mean([getattr(s, key) for s in scores]))
        found = [score(t, _with_losses(t)).f for t in members]
        row["ceiling_f"] = float(np.mean(found))
        out.append(row | {"paper_f": float(np.mean([papers[t.name][votes].f for t in members]))})
    return out


def _with_losses(trace: Trace) -> list[str]:
    """What failed and lost three packets or more: a localiser that names just these is as good as one may hope."""
    truth = trace.truth
    links = [
        f"{a}>{b}" for (a, b), lost in zip(truth.links.tolist(), truth.link_lost.tolist(), strict=True) if lost > 2
    ]
    return links + [str(d) for d in truth.devices.tolist()]


def recall_by_losses(threshold: float, links: int) -> list[Json]:
    """Share of failed links that are named, by packets really lost there, from at least `links` links a bucket.

    Windows have three failed links each, on all topologies in turn, with noise up to 1e-5 and 1e-4; rates are such that
    3 to 120 packets are expected to be lost. Beside it what one could name who knew all loss rates: `all_known`.
    """
    named = np.zeros((len(BUCKETS), 2, 2), np.int64)
    could = np.zeros((len(BUCKETS), 2), np.int64)
    plans = [make_traces.make_plan(t, FAMILIES["none"], np.random.default_rng([SEED, 3])) for t in STUDIED]
    for turn in range(10_000):
        plan, noise = plans[turn % 4], RECALL_NOISES[turn // 4 % 2]
        rng = np.random.default_rng([SEED, 2, turn])
        if named.sum(axis=2).min(initial=links) >= links / 2 or turn == 9_999:
            break
        crossing = make_traces.probes_by_link(plan)
        at = rng.choice(np.flatnonzero(crossing > 0), 3, replace=False)
        rate = np.exp(rng.uniform(np.log(3), np.log(120), 3)) / crossing[at]
        faults = Faults(at, np.minimum(rate, 1.0), NO_FAULTS.devices, NO_FAULTS.device_rate)
        rates = make_traces.loss_rates(plan, faults, noise, rng)
        drawn = make_traces.draw_losses(plan, rates, rng)
        trace = make_traces.trace_of(plan, "recall", faults, noise, drawn)
        predicted = {name for entry in judge(trace, threshold).predicted for name in entry.split("|")}
        for link, lost in zip(at.tolist(), drawn.link_lost[at].tolist(), strict=True):
            a, b = plan.fabric.links[link].tolist()
            for i, (low, high) in enumerate(BUCKETS):
                if low <= lost <= high:
                    named[i, turn // 4 % 2, int(f"{a}>{b}" in predicted)] += 1
                    could[i, turn // 4 % 2] += all_known(plan, rates, drawn, link, noise) > math.log(len(crossing) / 3)
    out: list[Json] = []
    for i, (low, high) in enumerate(BUCKETS):
        row: Json = {
            "lost": f"{low}-{high}",
            "links": int(named[i].sum()),
            "recall": float(named[i, :, 1].sum() / named[i].sum()),
        }
        for j, noise in enumerate(RECALL_NOISES):
            row[f"recall_noise_{noise:g}"] = float(named[i, j, 1] / named[i, j].sum())
            row[f"all_known_{noise:g}"] = float(could[i, j] / named[i, j].sum())
        row["all_known"] = float(could[i].sum() / named[i].sum())
        out.append(row)
    return out


def all_known(plan: make_traces.Plan, rates: Floats, drawn: make_traces.Drawn, link: int, noise: float) -> float:
    """Log likelihood ratio (nats) of one link at its true rate against a sound one, with every other rate known.

    Named above the logarithm of the prior odds (3 links of all have failed) it is the most probable verdict of one who
    need not estimate a single rate: no localiser finds more without more false names.
    """
    rows = np.flatnonzero((plan.hops == link).any(axis=1))
    mine = rates[rows][plan.hops[rows] == link]
    sick = np.log1p(-rates[rows]).sum(axis=1)
    sound = sick - np.log1p(-mine) + np.log1p(-noise / 2)
    lost, sent = drawn.lost[rows], plan.sent[rows]
    return float(lost @ np.log(np.expm1(sick) / np.expm1(sound)) + (sent - lost) @ (sick - sound))


def thin(traces: Sequence[Trace], threshold: float, redraws: int) -> list[Json]:
    """F with 10 probes/s on the average directed switch link, from counts of 1, 3 and 10 windows in sum; losses are
    drawn anew at the truth's rates. Hidden paths are drawn anew too."""
    out: list[Json] = []
    for trace in traces:
        row: Json = {"trace": trace.name}
        for windows in WINDOWS:
            f, paper = [], []
            for again in range(redraws):
                rng = np.random.default_rng([SEED, 4, windows, again])
                plan = make_traces.thinned(make_traces.plan_of(trace, rng), PROBES_PER_S, windows, rng)
                faults, noise = make_traces.faults_of(trace), float(trace.meta["noise_max"])
                drawn = make_traces.draw_losses(plan, make_traces.loss_rates(plan, faults, noise, rng), rng)
                fewer = make_traces.trace_of(plan, trace.name, faults, noise, drawn)
                f.append(judge(fewer, threshold).score.f)
                paper.append(max(s.f for s in paper_scores(fewer)))
            row[f"f_{windows}"], row[f"paper_{windows}"] = float(np.mean(f)), float(np.mean(paper))
        out.append(row)
    return out


SPEED = (
    ("40k records, 6k links", "ft16", Family((0.002, 1.0), (8, 8)), 2),
    ("400k records, 6k links", "ft16", Family((0.002, 1.0), (8, 8)), 24),
    ("131k records, 49k links", "ft32", Family((0.002, 1.0), (8, 8), destinations=128), 1),
)
PEERS_SECONDS = (("0.09-0.12", "0.07"), ("0.50", "4.2"), ("0.24", "0.25"))
"""Flock and NetBouncer at these sizes, one thread, as published with the traces."""


def speed(threshold: float, repeat: int) -> list[Json]:
    """CPU seconds of all threads: making the table, and localising (best and median of `repeat`)."""
    out: list[Json] = []
    for (name, topology, family, tuples), peers in zip(SPEED, PEERS_SECONDS, strict=True):
        rng = np.random.default_rng([SEED, 5])
        plan = make_traces.make_plan(topology, dataclasses.replace(family, tuples=tuples), rng, at_most=tuples)
        faults = make_traces.draw_faults(plan.fabric, family, rng)
        drawn = make_traces.draw_losses(plan, make_traces.loss_rates(plan, faults, 1e-4, rng), rng)
        trace = make_traces.trace_of(plan, name, faults, 1e-4, drawn)
        known = compiled(trace.fabric)
        start = time.process_time()
        table = table_of(trace, known)
        made = time.process_time() - start
        judged = [judge(trace, threshold, table) for _ in range(repeat)]
        seconds = sorted(j.seconds for j in judged)
        out.append(
            {
                "size": name,
                "records": table.rows,
                "links": len(trace.fabric.links),
                "table_s": made,
                "seconds_best": seconds[0],
                "seconds_median": seconds[len(seconds) // 2],
                "f": judged[0].score.f,
                "flock_s": peers[0],
                "netbouncer_s": peers[1],
                "rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            }
        )
    return out


def curve_svg(curves: dict[str, list[tuple[float, float]]], windows: int) -> str:
    """F against the share of clean windows with a false name (logarithmic; none is drawn at half a window)."""
    width, height, left, bottom, top, right = 640, 400, 60, 50, 20, 20
    least = 0.5 / windows
    lowest = math.floor(math.log10(least))
    ys = [f for points in curves.values() for _, f in points]
    low = math.floor(20 * min(ys)) / 20

    def x(share: float) -> float:
        return left + (math.log10(max(share, least)) - lowest) / -lowest * (width - left - right)

    def y(f: float) -> float:
        return height - bottom - (f - low) / (1 - low) * (height - bottom - top)

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif"'
        ' font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for decade in range(lowest, 1):
        at = x(10.0**decade) if 10.0**decade >= least else left
        out.append(f'<path d="M{at:.1f} {top}V{height - bottom}" stroke="#ddd"/>')
        label = "1" if decade == 0 else f"1/{10**-decade:,}"
        out.append(f'<text x="{at:.1f}" y="{height - bottom + 16}" text-anchor="middle">{label}</text>')
    for i in range(round((1 - low) * 20) + 1):
        f = low + i / 20
        out.append(f'<path d="M{left} {y(f):.1f}H{width - right}" stroke="#ddd"/>')
        out.append(f'<text x="{left - 6}" y="{y(f) + 4:.1f}" text-anchor="end">{f:.2f}</text>')
    out.append(f'<text x="{width / 2}" y="{height - 12}" text-anchor="middle">clean windows with a false name</text>')
    out.append(
        f'<text x="14" y="{height / 2}" transform="rotate(-90 14 {height / 2})" text-anchor="middle">mean F</text>'
    )
    for (name, points), colour in zip(curves.items(), ("#1f5fa8", "#c2571a", "#3a7d44", "#777"), strict=False):
        line = " ".join(f"{x(s):.1f},{y(f):.1f}" for s, f in points)
        out.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        out += [f'<circle cx="{x(s):.1f}" cy="{y(f):.1f}" r="3" fill="{colour}"/>' for s, f in points]
        i = list(curves).index(name)
        out.append(
            f'<text x="{width - right - 8}" y="{height - bottom - 12 - 16 * i}" text-anchor="end"'
            f' fill="{colour}">{name}</text>'
        )
    return "\n".join([*out, "</svg>"]) + "\n"
