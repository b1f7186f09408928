"""Runs the localiser and the paper's rule on traces; what benchmarks/localize.py and its studies share."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from paper_rule import paper_rule
from trace_files import Compiled, Fabric, Trace, compile_fabric, table_of
from trace_score import Score, entries, score, signatures

from pingmesh.analyzer import localise
from pingmesh.analyzer.table import Table

VOTES = (1, 3, 10, 30, 100)
"""Values tried for the paper's unpublished threshold; the best for the traces at hand is shown."""

_compiled: dict[bytes, Compiled] = {}


def compiled(fabric: Fabric) -> Compiled:
    """Made once for equal fabrics."""
    key = fabric.nodes.tobytes() + fabric.edges.tobytes()
    if key not in _compiled:
        _compiled[key] = compile_fabric(fabric)
    return _compiled[key]


@dataclass(frozen=True)
class Judged:
    """What the localiser said of a trace, and how that is scored. `seconds` is CPU time of all threads."""

    predicted: list[str]
    seconds: float
    score: Score


def judge(trace: Trace, threshold: float, table: Table | None = None) -> Judged:
    """Localise blind, then score."""
    known = compiled(trace.fabric)
    table = table_of(trace, known) if table is None else table
    start = time.process_time()
    suspects = localise.localise_table(table, known.components, threshold=threshold)
    seconds = time.process_time() - start
    predicted = entries(suspects, trace.fabric)
    return Judged(predicted, seconds, _scored(trace, predicted, table))


def _scored(trace: Trace, predicted: Sequence[str], table: Table) -> Score:
    classes = any("|" in name for name in predicted)
    same = signatures(table, compiled(trace.fabric).element, trace.fabric) if classes else None
    return score(trace, predicted, same)


def paper_scores(trace: Trace) -> list[Score]:
    """The paper's rule, for each of `VOTES`. An anomalous RNIC is named as the link to it (in round trips by cable)."""
    fabric = trace.fabric
    hops = np.concatenate([fabric.hops(p) for p in (trace.path, trace.rpath)], axis=1)
    out = []
    for least in VOTES:
        named = paper_rule(
            len(fabric.links), hops, trace.kind, trace.src, trace.dst, trace.sent, trace.lost, least=least
        )
        links = {(int(fabric.tor[r]), int(r)) for r in named.rnics} | {
            (a, b) for a, b in fabric.links[named.links].tolist()
        }
        out.append(score(trace, [f"{a}>{b}" for a, b in sorted(links)]))
    return out


def best_votes(scores: Sequence[Sequence[Score]]) -> int:
    """Which of `VOTES` has the highest mean F over traces."""
    return int(np.argmax(np.mean([[s.f for s in row] for row in scores], axis=0)))
