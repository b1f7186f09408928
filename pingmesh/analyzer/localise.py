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
from pingmesh.analyzer.likelihood import Fit, Likelihood, Part
from pingmesh.analyzer.scan import Scan, mean_hops, set_elements

__all__ = ["Candidate", "Localiser", "Observation", "Suspect", "candidates_of", "localise", "localise_evidence"]

BASE_COST = 5.0
"""Prior log odds (nats) against any fault at all, on top of the logarithm of the number of simple candidates."""
EXTRA_COST = {"rnic": 2.5, "leg": 2.0, "link": 3.0, "host": 3.5, "switch": 4.0}
"""Nats by which a group of elements must beat its best member (for links, RNICs and legs: `both`)."""
MIN_PART_SCORE = 4.0
"""Nats of its own that each direction needs before `both` are named."""
MIN_LOST = 2.5
"""Expected losses at a component below which nothing is named, however unlikely they are by chance."""
PRIOR_LOST = 0.25
"""Losses that the prior of the background rate stands for."""
MARGIN = 3.0
"""Nats within which the evidence cannot tell two candidates apart."""
MAX_SUSPECTS = 32
SLACK = 5.0
"""Nats by which a bound from the scan may fall short of an exact score."""


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


@dataclass(frozen=True, slots=True, eq=False)
class _Choice:
    """A candidate with its parts in numbers: each part is a set of element numbers with a rate of its own."""

    candidate: Candidate
    parts: tuple[tuple[int, ...], ...]
    cost: float

    @property
    def elements(self) -> frozenset[int]:
        return frozenset(e for p in self.parts for e in p)


@dataclass(frozen=True, slots=True, eq=False)
class _Chosen:
    choice: _Choice
    parts: tuple[Part, ...]
    score: float
    """Given the suspects that it was fitted beside."""


class _Search:
    """One run over one body of evidence with a given background rate."""

    def __init__(
        self, evidence: Evidence, candidates: Sequence[Candidate], background: float, tolerated: float
    ) -> None:
        self.evidence = evidence
        self.model = Likelihood(evidence, background, tolerated)
        self.scan = Scan(evidence, background, tolerated)
        index = {e: i for i, e in enumerate(evidence.elements)}
        simple = max(sum(len(c.elements) == 1 for c in candidates), 1)
        self.single_cost = math.log(simple) + BASE_COST
        self.choices: list[_Choice] = []
        for c in sorted(candidates, key=lambda c: c.order):
            parts = tuple(tuple(sorted(index[e] for e in part if e in index)) for part in c.parts())
            if all(parts):
                is_simple = len(parts) == 1 and c.direction is not None
                self.choices.append(_Choice(c, parts, self.single_cost + (0 if is_simple else EXTRA_COST[c.type])))
        self.by_element: dict[int, list[_Choice]] = {}
        for choice in self.choices:
            for e in choice.elements:
                self.by_element.setdefault(e, []).append(choice)

    def fit(self, choice: _Choice, given: Sequence[Part]) -> tuple[float, tuple[Part, ...]]:
        """Score of a candidate given lossy parts, and its own parts at their best rates; 0 and none if not offered."""
        score, fitted = 0.0, list[Part]()
        for elements in choice.parts:
            f: Fit = self.model.fit(elements, [*given, *fitted], shares=choice.candidate.direction is not None)
            if len(choice.parts) > 1 and f.score < MIN_PART_SCORE:
                return 0.0, ()
            score += f.score
            fitted.append(self.model.part(elements, f.rate, f.share))
        return score, tuple(fitted)

    def is_lossy(self, parts: Sequence[Part], given: Sequence[Part]) -> bool:
        """Whether each part lost enough packets of its own to be named."""
        return all(
            self.model.attributed(p, [*given, *(q for q in parts if q is not p)])[2].sum() >= MIN_LOST for p in parts
        )

    def optimistic(self, choices: Sequence[_Choice], chosen: Sequence[_Chosen]) -> list[float]:
        """About the most that each candidate can score beside the chosen ones, from the scan alone."""
        unexplained = self.evidence.lost.copy()
        caps = np.full(len(unexplained), np.inf)
        parts = [p for x in chosen for p in x.parts]
        for part in parts:
            _, groups, own = self.model.attributed(part, [p for p in parts if p is not part])
            unexplained[groups] -= own / self.evidence.flows[groups]
            lossy = groups[self.evidence.lost[groups] > 0]
            caps[lossy] = self.model.unlikeliness(lossy, parts)
        score, lost = self.scan.beside(np.maximum(unexplained, 0.0), caps)
        out = []
        for c in choices:
            elements = list(c.elements)
            total = float(score[elements].sum())
            if len(c.parts) > 1 and min(score[list(p)].sum() for p in c.parts) < MIN_PART_SCORE - SLACK / 2:
                total = 0.0
            if c.candidate.type == "switch":
                # A packet that crosses a switch crosses two of its elements.
                n, k = float(self.scan.sent[elements].sum()) / 2, float(lost[elements].sum()) / 2
                rate = min(k / max(n, 1e-9), 1.0)
                total = min(total, k * math.log1p(rate / (2 * self.scan.background)) + 10)
            out.append(total)
        return out

    def best(self, pool: Sequence[_Choice], chosen: Sequence[_Chosen], least: float = 0.0) -> _Chosen | None:
        """The candidate that is worth most beside the chosen ones; None if none is worth its cost and `least` more."""
        given = [p for x in chosen for p in x.parts]
        bounds = [b + SLACK - c.cost for c, b in zip(pool, self.optimistic(pool, chosen), strict=True)]
        best, worth = None, least
        for i in sorted(range(len(pool)), key=lambda i: (-bounds[i], i)):
            if bounds[i] <= worth:
                break
            score, parts = self.fit(pool[i], given)
            if score - pool[i].cost > worth + 1e-9 and self.is_lossy(parts, given):
                best, worth = _Chosen(pool[i], parts, score), score - pool[i].cost
        return best

    def greedy(self, chosen: Sequence[_Chosen], members: Sequence[_Choice] | None = None) -> list[_Chosen]:
        """Add the best candidate until none is worth its cost; a group only if its members do not explain as much.

        With `members`, only those are tried, and groups are not divided.
        """
        out = list(chosen)
        pool = list(self.choices if members is None else members)
        while len(out) < MAX_SUSPECTS and (found := self.best(pool, out)) is not None:
            is_group = members is None and len(found.choice.elements) > 1
            if is_group and self.members_worth(out, found.choice) >= found.score - found.choice.cost:
                pool.remove(found.choice)
            else:
                out.append(found)
        return out

    def members_worth(self, chosen: list[_Chosen], group: _Choice) -> float:
        """What the best explanation by members of a group is worth: scores less costs."""
        within = {id(c): c for e in group.elements for c in self.by_element[e] if c.elements < group.elements}
        found = self.greedy(chosen, sorted(within.values(), key=lambda c: c.candidate.order))
        return self.worth(found[: len(chosen)], found[len(chosen) :])

    def worth(self, given: Sequence[_Chosen], added: Sequence[_Chosen]) -> float:
        """Scores less costs of `added`, one after the other."""
        parts = [p for x in given for p in x.parts]
        total = 0.0
        for x in added:
            score, fitted = self.fit(x.choice, parts)
            total += score - x.choice.cost
            parts += fitted
        return total

    def refit(self, chosen: Sequence[_Chosen]) -> list[_Chosen]:
        """Estimate all rates again, each given the others; drop what the others explain."""
        out = list(chosen)
        for x in sorted(chosen, key=lambda x: x.choice.candidate.order):
            others = [p for y in out if y is not x for p in y.parts]
            score, parts = self.fit(x.choice, others)
            i = next(i for i, y in enumerate(out) if y is x)
            if score <= x.choice.cost or not self.is_lossy(parts, others):
                del out[i]
            else:
                out[i] = _Chosen(x.choice, parts, score)
        return out

    def complete(self, chosen: Sequence[_Chosen]) -> list[_Chosen]:
        """Re-estimate; where a suspect fell (what accused it was another's doing), look again for what it leaves."""
        out = self.refit(chosen)
        return out if len(out) == len(chosen) else self.refit(self.greedy(out))

    def merge(self, chosen: Sequence[_Chosen]) -> list[_Chosen]:
        """Replace suspects by a group that holds at least two of them and explains as much for less."""
        out = list(chosen)
        groups = {
            id(g): g for x in chosen for e in x.choice.elements for g in self.by_element[e] if len(g.elements) > 1
        }
        for group in sorted(groups.values(), key=lambda g: (len(g.elements), g.candidate.order)):
            members = [x for x in out if x.choice.elements < group.elements]
            if len(members) < 2:
                continue
            rest = [x for x in out if x not in members]
            given = [p for x in rest for p in x.parts]
            score, parts = self.fit(group, given)
            if parts and score - group.cost > self.worth(rest, members):
                out = [*rest, _Chosen(group, parts, score)]
        return out

    def rivals(self, chosen: _Chosen, others: Sequence[Part]) -> list[_Chosen]:
        """Candidates that touch most of a suspect's losses and could stand in for it, best first; without itself."""
        e = self.evidence
        lost = np.zeros(len(e.lost))
        for part in chosen.parts:
            _, groups, own = self.model.attributed(part, [*others, *(p for p in chosen.parts if p is not part)])
            lost[groups] += own
        groups = np.flatnonzero(lost)
        owner, elements, _ = set_elements(e, e.group_set[groups])
        touching = np.bincount(elements, weights=lost[groups][owner], minlength=len(e.elements))
        near = {
            id(c): c
            for i in np.flatnonzero(touching > 0)
            for c in self.by_element.get(int(i), ())
            if touching[list(c.elements)].sum() >= 0.6 * lost.sum() and c is not chosen.choice
        }
        return [
            _Chosen(c, parts, score)
            for c in sorted(near.values(), key=lambda c: c.candidate.order)
            for score, parts in (self.fit(c, others),)
            if parts and score > 0
        ]

    def settle(self, chosen: Sequence[_Chosen]) -> list[_Chosen]:
        """Exchange each suspect for a better rival, given all others, until nothing moves (at most three rounds)."""
        out = self.merge(self.complete(chosen))
        for _ in range(3):
            moved = False
            for i, x in enumerate(out):
                others = [p for y in out if y is not x for p in y.parts]
                worth = self.fit(x.choice, others)[0] - x.choice.cost
                better = [r for r in self.rivals(x, others) if r.score - r.choice.cost > worth + 1e-6]
                better = [r for r in better if self.is_lossy(r.parts, others)]
                if better:
                    out[i] = max(better, key=lambda r: r.score - r.choice.cost)
                    moved = True
            if not moved:
                break
            out = self.merge(self.complete(out))
        return out

    def suspect(self, x: _Chosen, chosen: Sequence[_Chosen]) -> Suspect:
        """What the evidence says of one chosen candidate, given the others."""
        others = [p for y in chosen if y is not x for p in y.parts]
        score, parts = self.fit(x.choice, others)
        sent = lost = 0.0
        for p in parts:
            n, _, own = self.model.attributed(p, [*others, *(q for q in parts if q is not p)])
            sent, lost = sent + n, lost + float(own.sum())
        lost = min(lost, sent)
        rivals = self.rivals(x, others)
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

    def doubtful(self, total: float) -> float:
        """Losses of the strongest candidate, if it is worth its cost once its own losses do not count as noise.

        With few losses in all, a component that has them all raises the very background that it is held against. The
        background has a gamma prior, and integrating over it gives the candidate what it costs the noise to explain
        its losses one by one.
        """
        strongest = self.best(self.choices, [], -self.single_cost)
        if strongest is None:
            return 0.0
        lost = sum(float(self.model.attributed(p, [])[2].sum()) for p in strongest.parts)
        relief = lost * math.log(total + PRIOR_LOST)
        relief += math.lgamma(max(total - lost, 0.0) + PRIOR_LOST) - math.lgamma(total + PRIOR_LOST)
        return lost if strongest.score + relief > strongest.choice.cost else 0.0

    def unexplained(self, chosen: Sequence[_Chosen]) -> float:
        """Losses that no suspect explains."""
        lost = self.evidence.lost * self.evidence.flows
        total = float(lost.sum())
        for x in chosen:
            for p in x.parts:
                others = [q for y in chosen for q in y.parts if q is not p]
                total -= float(self.model.attributed(p, others)[2].sum())
        return max(total, 0.0)


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

    unexplained = total = float(np.sum(evidence.lost * evidence.flows))
    rate = background(total)
    chosen: list[_Chosen] = []
    for _ in range(5):
        search = _Search(evidence, candidates, rate, max(noise, 1.5 * rate))
        chosen = search.settle(search.greedy([]))
        if chosen or unexplained < total:
            unexplained = search.unexplained(chosen)
        else:
            unexplained -= search.doubtful(total)
        again = background(unexplained)
        if 0.7 < again / rate < 1.4:
            break
        rate = again
    found = [search.suspect(x, chosen) for x in chosen]
    return sorted(found, key=lambda s: (-round(s.score, 6), s.candidate.order))
