"""The search for the set of broken components that explains the evidence best: greedy, then exchanged and merged."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from pingmesh.analyzer.candidates import Candidate
from pingmesh.analyzer.evidence import Evidence, Floats
from pingmesh.analyzer.likelihood import Fit, Likelihood, Part
from pingmesh.analyzer.scan import Scan, set_elements

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
MAX_SUSPECTS = 32
SLACK = 5.0
"""Nats by which a bound from the scan may fall short of an exact score."""


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """A candidate with its parts in numbers: each part is a set of element numbers with a rate of its own."""

    number: int
    candidate: Candidate
    parts: tuple[tuple[int, ...], ...]
    cost: float
    elements: frozenset[int]
    """Of all parts."""


class Choices:
    """The candidates that the evidence says anything of, in an order that does not depend on how they were given."""

    def __init__(self, evidence: Evidence, candidates: Sequence[Candidate]) -> None:
        index = {e: i for i, e in enumerate(evidence.elements)}
        self.single_cost = math.log(max(sum(len(c.elements) == 1 for c in candidates), 1)) + BASE_COST
        self.items: list[Choice] = []
        self.by_element: dict[int, list[Choice]] = {}
        for c in sorted(candidates, key=lambda c: c.order):
            parts = tuple(tuple(sorted(index[e] for e in part if e in index)) for part in c.parts())
            if not all(parts):
                continue
            is_simple = len(parts) == 1 and c.direction is not None
            cost = self.single_cost + (0.0 if is_simple else EXTRA_COST[c.type])
            choice = Choice(len(self.items), c, parts, cost, frozenset(e for p in parts for e in p))
            self.items.append(choice)
            for e in choice.elements:
                self.by_element.setdefault(e, []).append(choice)
        self.costs = np.array([c.cost for c in self.items])
        self.is_switch = np.array([c.candidate.type == "switch" for c in self.items], bool)
        flat = [p for c in self.items for p in c.parts]
        self._elements = np.array([e for p in flat for e in p], np.int64)
        self._part_starts = np.cumsum([0, *(len(p) for p in flat)])[:-1]
        self._starts = np.cumsum([0, *(len(c.parts) for c in self.items)])[:-1]
        self._is_divided = np.array([len(c.parts) > 1 for c in self.items], bool)

    def sums(self, values: Floats, least: float | None = None) -> Floats:
        """Sum of per-element values for each choice; 0 where one of several parts falls short of `least`."""
        by_part = np.add.reduceat(values[self._elements], self._part_starts)
        total = np.add.reduceat(by_part, self._starts)
        if least is not None:
            total[self._is_divided & (np.minimum.reduceat(by_part, self._starts) < least)] = 0.0
        return total


@dataclass(frozen=True, slots=True, eq=False)
class Chosen:
    """A suspect in the making: a candidate with the rates of its parts."""

    choice: Choice
    parts: tuple[Part, ...]
    score: float
    """Given the suspects that it was fitted beside."""


class Search:
    """One run over one body of evidence with a given background rate."""

    def __init__(self, evidence: Evidence, choices: Choices, background: float, tolerated: float) -> None:
        self.evidence = evidence
        self.choices = choices
        self.model = Likelihood(evidence, background, tolerated)
        self.scan = Scan(evidence, background, tolerated)

    def fit(self, choice: Choice, given: Sequence[Part]) -> tuple[float, tuple[Part, ...]]:
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

    def bounds(self, chosen: Sequence[Chosen]) -> Floats:
        """About the most that each choice can score beside the chosen ones, from the scan alone."""
        unexplained = self.evidence.lost.copy()
        caps = np.full(len(unexplained), np.inf)
        parts = [p for x in chosen for p in x.parts]
        for part in parts:
            _, groups, own = self.model.attributed(part, [p for p in parts if p is not part])
            unexplained[groups] -= own / self.evidence.flows[groups]
            lossy = groups[self.evidence.lost[groups] > 0]
            caps[lossy] = self.model.unlikeliness(lossy, parts)
        score, lost = self.scan.beside(np.maximum(unexplained, 0.0), caps)
        total = self.choices.sums(score, MIN_PART_SCORE - SLACK / 2)
        # A packet that crosses a switch crosses two of its elements.
        s = self.choices.is_switch
        n, k = self.choices.sums(self.scan.sent)[s] / 2, self.choices.sums(lost)[s] / 2
        rate = np.minimum(k / np.maximum(n, 1e-9), 1.0)
        total[s] = np.minimum(total[s], k * np.log1p(rate / (2 * self.scan.background)) + 10)
        return total

    def best(self, pool: Sequence[Choice], chosen: Sequence[Chosen], least: float = 0.0) -> Chosen | None:
        """The choice that is worth most beside the chosen ones; None if none is worth its cost and `least` more."""
        if not pool:
            return None
        given = [p for x in chosen for p in x.parts]
        numbers = np.array([c.number for c in pool])
        bounds = (self.bounds(chosen) - self.choices.costs)[numbers] + SLACK
        best, worth = None, least
        for i in np.argsort(-bounds, kind="stable"):
            if bounds[i] <= worth:
                break
            score, parts = self.fit(pool[i], given)
            if score - pool[i].cost > worth + 1e-9 and self.is_lossy(parts, given):
                best, worth = Chosen(pool[i], parts, score), score - pool[i].cost
        return best

    def greedy(self, chosen: Sequence[Chosen], members: Sequence[Choice] | None = None) -> list[Chosen]:
        """Add the best candidate until none is worth its cost; a group only if its members do not explain as much.

        With `members`, only those are tried, and groups are not divided.
        """
        out = list(chosen)
        pool = list(self.choices.items if members is None else members)
        while len(out) < MAX_SUSPECTS and (found := self.best(pool, out)) is not None:
            is_group = members is None and len(found.choice.elements) > 1
            if is_group and self.members_worth(out, found.choice) >= found.score - found.choice.cost:
                pool = [c for c in pool if c is not found.choice]
            else:
                out.append(found)
        return out

    def members_worth(self, chosen: list[Chosen], group: Choice) -> float:
        """What the best explanation by members of a group is worth: scores less costs."""
        by_element = self.choices.by_element
        within = {c.number: c for e in group.elements for c in by_element[e] if c.elements < group.elements}
        found = self.greedy(chosen, [within[i] for i in sorted(within)])
        return self.worth(found[: len(chosen)], found[len(chosen) :])

    def worth(self, given: Sequence[Chosen], added: Sequence[Chosen]) -> float:
        """Scores less costs of `added`, one after the other."""
        parts = [p for x in given for p in x.parts]
        total = 0.0
        for x in added:
            score, fitted = self.fit(x.choice, parts)
            total += score - x.choice.cost
            parts += fitted
        return total

    def refit(self, chosen: Sequence[Chosen]) -> list[Chosen]:
        """Estimate all rates again, each given the others; drop what the others explain."""
        out = list(chosen)
        for x in sorted(chosen, key=lambda x: x.choice.candidate.order):
            others = [p for y in out if y is not x for p in y.parts]
            score, parts = self.fit(x.choice, others)
            i = next(i for i, y in enumerate(out) if y is x)
            if score <= x.choice.cost or not self.is_lossy(parts, others):
                del out[i]
            else:
                out[i] = Chosen(x.choice, parts, score)
        return out

    def complete(self, chosen: Sequence[Chosen]) -> list[Chosen]:
        """Re-estimate; where a suspect fell (what accused it was another's doing), look again for what it leaves."""
        out = self.refit(chosen)
        return out if len(out) == len(chosen) else self.refit(self.greedy(out))

    def merge(self, chosen: Sequence[Chosen]) -> list[Chosen]:
        """Replace suspects by a group that holds at least two of them and explains as much for less."""
        out = list(chosen)
        by_element = self.choices.by_element
        groups = {g.number: g for x in chosen for e in x.choice.elements for g in by_element[e] if len(g.elements) > 1}
        for group in sorted(groups.values(), key=lambda g: (len(g.elements), g.candidate.order)):
            members = [x for x in out if x.choice.elements < group.elements]
            if len(members) < 2:
                continue
            rest = [x for x in out if x not in members]
            given = [p for x in rest for p in x.parts]
            score, parts = self.fit(group, given)
            if parts and score - group.cost > self.worth(rest, members):
                out = [*rest, Chosen(group, parts, score)]
        return out

    def rivals(self, chosen: Chosen, others: Sequence[Part]) -> list[Chosen]:
        """Candidates that touch most of a suspect's losses and could stand in for it."""
        e = self.evidence
        lost = np.zeros(len(e.lost))
        for part in chosen.parts:
            _, groups, own = self.model.attributed(part, [*others, *(p for p in chosen.parts if p is not part)])
            lost[groups] += own
        groups = np.flatnonzero(lost)
        owner, elements, _ = set_elements(e, e.group_set[groups])
        touching = np.bincount(elements, weights=lost[groups][owner], minlength=len(e.elements)).astype(np.float64)
        near = np.flatnonzero(self.choices.sums(touching) >= 0.6 * lost.sum())
        out = []
        for choice in (self.choices.items[i] for i in near):
            if choice is not chosen.choice:
                score, parts = self.fit(choice, others)
                if parts and score > 0:
                    out.append(Chosen(choice, parts, score))
        return out

    def settle(self, chosen: Sequence[Chosen]) -> list[Chosen]:
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

    def doubtful(self, total: float) -> float:
        """Losses of the strongest candidate, if it is worth its cost once its own losses do not count as noise.

        With few losses in all, a component that has them all raises the very background that it is held against. The
        background has a gamma prior, and integrating over it gives the candidate what it costs the noise to explain
        its losses one by one.
        """

        def relief(lost: float) -> float:
            rest = max(total - lost, 0.0) + PRIOR_LOST
            return lost * math.log(total + PRIOR_LOST) + math.lgamma(rest) - math.lgamma(total + PRIOR_LOST)

        most = min(float(self.scan.lost.max(initial=0.0)), total)
        strongest = self.best(self.choices.items, [], -relief(most))
        if strongest is None:
            return 0.0
        lost = sum(float(self.model.attributed(p, [])[2].sum()) for p in strongest.parts)
        return lost if strongest.score + relief(lost) > strongest.choice.cost else 0.0

    def rest(self, chosen: Sequence[Chosen], background: Callable[[float], float]) -> float:
        """The background rate (a function of the losses that no suspect explains) at which it reproduces itself."""
        total = float((self.evidence.lost * self.evidence.flows).sum())
        parts = [p for x in chosen for p in x.parts]
        rate, model = self.scan.background, self.model
        for _ in range(10):
            explained = sum(float(model.attributed(p, [q for q in parts if q is not p])[2].sum()) for p in parts)
            last, rate = rate, background(max(total - explained, 0.0))
            if 0.8 < rate / last < 1.25:
                break
            model = model.at(rate)
        return rate
