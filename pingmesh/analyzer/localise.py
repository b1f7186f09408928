"""Which components are broken, from one-way packet counts of flows: greedy likelihood ratio.

The model is that of Flock (Harsh et al. 2023) with the loss rate of every suspect estimated instead of fixed, flows
that are hit as a whole (a share of the 5-tuples), and groups of elements (both directions of a cable, a switch, a
host) that must beat the best explanation by their members. Liu et al. 2024, §4.3 votes for the most abnormal link
instead, and calls an RNIC broken when a tenth of its probes fail.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from pingmesh.analyzer.candidates import Candidate, candidates_of
from pingmesh.analyzer.evidence import Evidence, Observation, compile_evidence
from pingmesh.analyzer.scan import mean_hops
from pingmesh.analyzer.search import PRIOR_LOST, Choices, Chosen, Search

__all__ = ["Candidate", "Localiser", "Observation", "Suspect", "candidates_of", "localise", "localise_evidence"]

MARGIN = 3.0
"""Nats within which the evidence cannot tell two candidates apart."""


@dataclass(frozen=True, slots=True)
class Suspect:
    """A component that loses packets, with what the evidence says of it.

    `sent` packets crossed it and `lost` of them were lost there (expected counts where paths are uncertain or several
    components lose); `rate` is their ratio with a 95 % Wilson interval. `score` is the log likelihood ratio (nats) of
    this component being at fault against not, given the other suspects. `confidence` is its posterior share against
    `alternatives`, other rivals and chance. `alternatives` are what the evidence cannot tell apart from it.
    """

    candidate: Candidate
    rate: float
    rate_low: float
    rate_high: float
    sent: int
    lost: int
    score: float
    confidence: float
    alternatives: tuple[Candidate, ...]


class Localiser(Protocol):
    """What names suspects from observations; suspects come with the highest score first."""

    def __call__(
        self, observations: Sequence[Observation], candidates: Sequence[Candidate], *, noise: float = 1e-4
    ) -> list[Suspect]:
        """Name the components that explain the losses."""
        ...


def wilson(lost: float, sent: float) -> tuple[float, float]:
    """The 95 % Wilson interval of a rate; (0, 1) without packets."""
    if sent <= 0:
        return 0.0, 1.0
    z2 = 1.959964**2
    p = lost / sent
    middle, half = p + z2 / (2 * sent), math.sqrt(z2 * (p * (1 - p) / sent + z2 / (4 * sent * sent)))
    scale = 1 + z2 / sent
    return max(0.0, (middle - half) / scale), min(1.0, (middle + half) / scale)


def localise(
    observations: Sequence[Observation], candidates: Sequence[Candidate], *, noise: float = 1e-4
) -> list[Suspect]:
    """Name the components that explain the losses, highest score first; none where chance explains them.

    `noise` is the loss rate up to which a component is healthy. One lost packet among a thousand names nothing; nor do
    losses too few to be more than chance. Cost: O(observations + unique paths x hops), then about the paths of the
    suspects and of what shares flows with them.

    >>> a_b = Candidate("a--b", "link", "a->b", frozenset({"a->b"}))
    >>> tx, rx = (Candidate("h/0", "rnic", s, frozenset({f"h/0 {s}"})) for s in ("tx", "rx"))
    >>> counts = [(31, ("a->b",)), (28, ("h/0 tx", "a->b")), (0, ("h/0 tx",))]
    >>> seen = [Observation(100, lost, (path,)) for lost, path in counts]
    >>> [(s.candidate.direction, s.lost) for s in localise(seen, [a_b, tx, rx])]
    [('a->b', 59)]
    """
    return localise_evidence(compile_evidence(observations), candidates, noise=noise)


def localise_evidence(evidence: Evidence, candidates: Sequence[Candidate], *, noise: float = 1e-4) -> list[Suspect]:
    """`localise` on compiled evidence. The background is estimated with the suspects' losses taken out, until it
    rests: the worst faults come out first, and the fainter ones once those no longer count as noise."""
    exposure = float(np.sum(evidence.sent * evidence.flows * mean_hops(evidence)[evidence.group_set]))
    if not np.any(evidence.lost) or not candidates:
        return []

    def background(lost: float) -> float:
        # A quarter of a loss at a quarter of `noise` as prior: no losses in little evidence are no proof of silence.
        return (lost + PRIOR_LOST) / (exposure + 1 / max(noise, 1e-7))

    total = float(np.sum(evidence.lost * evidence.flows))
    rate = background(total)
    choices = Choices(evidence, candidates)
    if not choices.items:
        return []
    chosen: list[Chosen] = []
    before: list[Candidate] | None = None
    for _ in range(5):
        search = Search(evidence, choices, rate, max(noise, 1.5 * rate))
        chosen = search.settle(search.greedy([]))
        named = sorted((x.choice.candidate for x in chosen), key=lambda c: c.order)
        if chosen:
            again = search.rest(chosen, background)
        elif before is None:
            again = background(total - search.doubtful(total))
        else:
            break
        if 0.7 < again / rate < 1.4 or (named == before and again > rate / 4):
            break
        before, rate = named, again
    found = [_suspect(search, x, chosen) for x in chosen]
    return sorted(found, key=lambda s: (-round(s.score, 6), s.candidate.order))


def _suspect(search: Search, x: Chosen, chosen: Sequence[Chosen]) -> Suspect:
    """What the evidence says of one chosen candidate, given the others."""
    others = [p for y in chosen if y is not x for p in y.parts]
    score, parts = search.fit(x.choice, others)
    sent = lost = 0.0
    for p in parts:
        n, _, own = search.model.attributed(p, [*others, *(q for q in parts if q is not p)])
        sent, lost = sent + n, lost + float(own.sum())
    lost = min(lost, sent)
    rivals = search.rivals(x, others)
    worth = score - x.choice.cost
    mass = sum(math.exp(min(r.score - r.choice.cost - worth, 50.0)) for r in rivals)
    low, high = wilson(lost, sent)
    return Suspect(
        candidate=x.choice.candidate,
        rate=lost / sent if sent else 0.0,
        rate_low=low,
        rate_high=high,
        sent=round(sent),
        lost=round(lost),
        score=score,
        confidence=1 / (1 + mass + math.exp(min(-worth, 50.0))),
        alternatives=tuple(r.choice.candidate for r in rivals if r.score >= score - MARGIN),
    )
