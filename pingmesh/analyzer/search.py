"""The search for the set of broken components that explains the counts best: greedy, then exchanged and merged."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from pingmesh.analyzer.hazards import Given, Hazards, Lossy
from pingmesh.analyzer.nats import burden, relief
from pingmesh.analyzer.table import Bools, Floats, Ints

EXTRA_COST = {"rnic": 2.5, "leg": 2.0, "link": 3.0, "host": 3.5, "switch": 4.0}
"""Nats by which a group of elements, or both directions of a component, must beat the best member."""
SPREAD = 4.0
"""Nats by which each further member must beat a switch that drops a share of the 5-tuples: shares differ from link to
link by more than chance has it, as several rows tell of one tuple."""
MANY, MISFIT = 3, 0.02
"""From so many members on, part of the whole's score by which each further one must beat it: evidence from before the
fault makes the rates of a sick switch's links differ, by more the more there is of it."""
MIN_PART_SCORE = 7.0
"""Nats of its own that each direction needs before both are named."""
MIN_LOST = 2.5
"""Expected losses at a component below which nothing is named, however unlikely they are by chance."""
MAX_SUSPECTS = 64
SLACK = 4.0
"""Nats by which a quick score may fall short of the exact one."""
MARGIN = 3.0
"""Nats within which the evidence cannot tell two components apart."""
NEAR = 0.6
"""Share of a suspect's losses that a rival must touch."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """A suspect in the making: one single, or the two of a pair; `score` (nats) is given those it was fitted beside."""

    parts: tuple[Lossy, ...]
    score: float
    cost: float
    """What it has to earn (nats)."""

    @property
    def worth(self) -> float:
        """Score less cost (nats)."""
        return self.score - self.cost

    @property
    def singles(self) -> tuple[int, ...]:
        """Numbers of its singles, ascending: which component it is."""
        return tuple(x.single for x in self.parts)


class Search:
    """One run over one table.

    `threshold`: prior log odds (nats) against any fault at all; `further`: nats by which another fault costs less
    where there is one already (the number of faults has a heavy tail: a bad day is bad in several places); 0: never.
    """

    def __init__(self, hazards: Hazards, threshold: float, further: float = 0.0) -> None:
        self.hazards, self.further = hazards, further
        c = self.components = hazards.components
        self.is_group = np.zeros(hazards.number, bool)
        self.is_group[c.groups] = True
        self.single_cost = math.log(max(hazards.number - len(c.groups), 1)) + threshold
        self.costs = np.full(hazards.number, self.single_cost)
        for i in c.groups:
            self.costs[i] += EXTRA_COST[c.singles[i].type]
        self.left = hazards.lost
        """Losses that no suspect explains."""
        self.background = hazards.background_of(self.left)
        self._parts: dict[tuple[int, bool, bool, float, float, tuple[Lossy, ...]], tuple[Lossy, float]] = {}

    def run(self) -> list[Chosen]:
        """The suspects, each with its score beside all others."""
        chosen = self.greedy([])
        for _ in range(3):
            before = {x.singles for x in chosen}
            chosen = self.exchange(self.merge(self.prune(chosen)))
            self.estimate(chosen)
            chosen = self.greedy(chosen)
            if {x.singles for x in chosen} == before:
                break
        return self.prune(chosen)

    # ------------------------------------------------------------ what one explanation is worth

    def given(self, chosen: Sequence[Chosen], more: Sequence[Lossy] = ()) -> Given:
        """The state with these taken as broken."""
        return self.hazards.given([*(p for x in chosen for p in x.parts), *more], self.background)

    def fit(self, chosen: Sequence[Chosen], singles: tuple[int, ...], *, new: bool = False) -> Chosen:
        """A single or a pair, fitted beside those that are chosen; a pair one side of which shows nothing scores 0.

        The losses of something `new` are among those that the background stands for.
        """
        parts: list[Lossy] = []
        total, least = 0.0, math.inf
        for s in singles:
            lossy, score = self._part(chosen, parts, s, new=new)
            parts.append(lossy)
            total, least = total + score, min(least, score)
        cost = float(self.costs[singles[0]]) - self.cheaper(len(chosen))
        if len(singles) > 1:
            cost += EXTRA_COST[self.components.singles[singles[0]].type]
            total = total if least >= MIN_PART_SCORE else 0.0
        return Chosen(tuple(parts), total, cost)

    def _part(self, chosen: Sequence[Chosen], parts: Sequence[Lossy], s: int, *, new: bool) -> tuple[Lossy, float]:
        """One single's likeliest hazard and score, beside the chosen and other parts. Each is worked out once, for all
        singles that the evidence cannot tell apart: pairs share their first part with the rival that it is alone."""
        shares = bool(self.components.may_share[s])
        state = (*(p for x in chosen for p in x.parts), *parts)
        key = (self.hazards.alike(s), shares, new, self.background, self.left, state)
        if key not in self._parts:
            given = self.given(chosen, parts)
            fit = self.hazards.fit(given, s, shares=shares)
            group, lost = self.hazards.attributed(given, fit.lossy)
            own = lost @ given.sparse[group]
            if new:
                score = fit.gain - fit.healthy + float(relief(own, self.left))
            else:  # a healthy element, or a background that is higher than we think, whichever is likelier
                score = fit.gain - max(fit.healthy, float(burden(own, self.left)))
            self._parts[key] = fit.lossy, score
        lossy, score = self._parts[key]
        return replace(lossy, single=s), score

    def cheaper(self, others: int) -> float:
        """Nats by which a fault beside others costs less than the first."""
        if not (others and self.further):
            return 0.0
        # Two may be a coincidence. From the third on each comes more easily: it does not matter in which order they do.
        return self.further + max(0.0, math.log((others + 1) / 3))

    def losses(self, chosen: Sequence[Chosen], x: Chosen) -> list[tuple[Ints, Floats]]:
        """For each part of `x`: groups, and what the part lost of them (expected), beside the chosen ones."""
        beside = [(p, [q for q in x.parts if q is not p]) for p in x.parts]
        return [self.hazards.attributed(self.given(chosen, others), p) for p, others in beside]

    def enough(self, chosen: Sequence[Chosen], x: Chosen) -> bool:
        """Whether each part lost enough packets of its own to be named: of flows that cross no other suspect, as far as
        is known. What a flapping link takes in its bad moments is no fault of who sent just then.
        """
        elsewhere = self.elsewhere(chosen, x)
        return all(float(own[elsewhere[group]].sum()) >= MIN_LOST for group, own in self.losses(chosen, x))

    def elsewhere(self, chosen: Sequence[Chosen], x: Chosen) -> Bools:
        """Which groups (probably) cross none of the chosen; of wholes that hold all of `x` nothing can be said."""
        h, c = self.hazards, self.components
        mine = {e for s in x.singles for e in c.of(s)}
        out = np.ones(len(h.group_set), bool)
        given = self.given(chosen)
        for s in (s for y in chosen for s in y.singles):
            if not mine <= set(c.of(s)):
                pairs = slice(int(h.pair_ptr[s]), int(h.pair_ptr[s + 1]))
                out[h.pair_group[pairs][given.weight[pairs] > 0.5]] = False
        return out

    def estimate(self, chosen: Sequence[Chosen]) -> bool:
        """Estimate the background from what the chosen leave; whether it fell so far that scores are out of date."""
        h = self.hazards
        own = np.zeros(len(h.group_set))
        for i, x in enumerate(chosen):
            for group, lost in self.losses([*chosen[:i], *chosen[i + 1 :]], x):
                own[group] += lost
        left = np.maximum(h.lost_of * h.flows - own, 0.0)
        self.left = float(np.minimum(left, h.most * h.flows).sum())
        before, self.background = self.background, h.background_of(self.left)
        return self.background < 0.8 * before

    # ------------------------------------------------------------ greedy

    def greedy(self, chosen: Sequence[Chosen]) -> list[Chosen]:
        """Add the best single until none is worth its cost; a group only if its members do not explain as much."""
        h, out = self.hazards, list(chosen)
        score = h.scan(self.given(out), None, self.left)
        barred = {s for x in out for s in x.singles}
        while len(out) < MAX_SUSPECTS:
            found = self.best(score, barred, out)
            if found is None:
                break
            single = found.singles[0]
            barred.add(single)
            if self.is_group[single] and self.members_worth(out, single, found) >= found.worth:
                continue
            out = self.paired(self.refit([*out, found], beside=single))
            if self.estimate(out):
                score = h.scan(self.given(out), None, self.left)
            else:
                # Others lose by it: those that showed too little before need no second look.
                shown = score > MIN_PART_SCORE - SLACK
                shown[single] = False
                near = h.pair_single[h.touches(single)[h.pair_group] & shown[h.pair_single]]
                touched = np.flatnonzero(np.bincount(near, minlength=h.number))
                score[touched] = h.scan(self.given(out), touched, self.left)
        return out

    def best(self, score: Floats, barred: set[int], chosen: Sequence[Chosen], *, new: bool = True) -> Chosen | None:
        """The single that is worth most by its exact score, among the best by quick scores; None if none is.

        The other direction of what is broken in one already costs less.
        """
        costs, partners = self.costs - self.cheaper(len(chosen)), {}
        for x in chosen:
            other = self.components.partner.get(x.singles[0]) if len(x.parts) == 1 else None
            if other is not None:
                partners[other] = max(EXTRA_COST[self.components.singles[other].type], MIN_PART_SCORE)
        if partners:
            costs[list(partners)] = list(partners.values())
        worth = score - costs
        worth[list(barred)] = -np.inf
        best: Chosen | None = None
        for i in _highest(worth, 8).tolist():
            if worth[i] <= (best.worth if best else 0.0) - SLACK:
                break
            found = replace(self.fit(chosen, (i,), new=new), cost=float(costs[i]))
            if found.worth > (best.worth if best else 0.0) and self.enough(chosen, found):
                best = found
        return best

    def paired(self, chosen: Sequence[Chosen]) -> list[Chosen]:
        """Both directions of one component are one suspect."""
        out = list(chosen)
        for x in chosen:
            other = self.components.partner.get(x.singles[0])
            y = next((y for y in out if y.singles == (other,)), None)
            if len(x.parts) == 1 and y is not None and x in out:
                both = sorted((*x.parts, *y.parts), key=lambda p: p.single)
                out = [z for z in out if z is not x and z is not y]
                out.append(Chosen(tuple(both), x.score + y.score, min(x.cost, y.cost)))
        return out

    def members_worth(self, chosen: Sequence[Chosen], group: int, whole: Chosen) -> float:
        """What the best explanation by single elements of a group is worth, beside the `whole` of it."""
        h, c = self.hazards, self.components
        of_group = c.elements[c.ptr[group] : c.ptr[group + 1]]
        singles = np.unique(np.concatenate([c.singles_of(int(e)) for e in of_group]))
        members = singles[~self.is_group[singles]]
        out, total = list(chosen), 0.0
        barred = {s for x in out for s in x.singles}
        score = np.full(h.number, -np.inf)
        for _ in range(len(members)):
            score[members] = h.scan(self.given(out), members, self.left)
            found = self.best(score, barred, out)
            if found is None:
                break
            out.append(found)
            barred.add(found.singles[0])
            total += found.worth
        return total - _spread(whole, len(out) - len(chosen))

    # ------------------------------------------------------------ afterwards

    def refit(self, chosen: Sequence[Chosen], beside: int | None = None) -> list[Chosen]:
        """Estimate all hazards again, each given the others; with `beside`, of those that share losses with it."""
        h, out = self.hazards, list(chosen)
        lossy = h.touches(beside) & (h.lost_of > 0) if beside is not None else None
        for i, x in enumerate(out):
            if lossy is not None and not any(np.any(lossy & h.touches(s)) for s in x.singles if s != beside):
                continue
            out[i] = self.fit([*out[:i], *out[i + 1 :]], x.singles)
        return out

    def prune(self, chosen: Sequence[Chosen]) -> list[Chosen]:
        """Drop what the others explain, the least worthy first."""
        out = list(chosen)
        while out:
            judged = self.refit(out)
            least = min(range(len(out)), key=lambda i: judged[i].worth)
            others = [x for j, x in enumerate(judged) if j != least]
            if judged[least].worth > 0 and self.enough(others, judged[least]):
                first = max(x.worth for x in judged) - self.cheaper(len(others))
                return judged if first > 0 else []
            sides = [self.fit(others, (s,)) for s in out[least].singles] if len(out[least].parts) > 1 else []
            side = max(sides, key=lambda x: x.worth, default=None)
            out = [*others, side] if side is not None and side.worth > 0 else others
        return out

    def merge(self, chosen: Sequence[Chosen]) -> list[Chosen]:
        """Replace suspects by a group that holds at least two of them and explains as much for less."""
        out, c = list(chosen), self.components
        groups = {int(g) for x in out for s in x.singles for e in c.of(s) for g in c.singles_of(e) if self.is_group[g]}
        for g in sorted(groups, key=lambda g: (len(c.of(g)), g)):
            elements = set(c.of(g))
            members = [x for x in out if {e for s in x.singles for e in c.of(s)} < elements]
            if len(members) < 2:
                continue
            rest = [x for x in out if x not in members]
            whole, apart, added = self.fit(rest, (g,)), 0.0, list(rest)
            for x in members:
                added.append(self.fit(added, x.singles))
                apart += added[-1].worth
            if whole.worth > apart - _spread(whole, len(members)):
                out = [*rest, whole]
        return out

    def exchange(self, chosen: Sequence[Chosen]) -> list[Chosen]:
        """Put a better rival in the place of each suspect, given all others, while there is one."""
        out = list(chosen)
        for _ in range(3):
            moved = False
            for i in range(len(out)):
                others = [*out[:i], *out[i + 1 :]]
                mine = self.fit(others, out[i].singles)
                better = [r for r in self.rivals(others, mine) if r.worth > mine.worth + 1e-6]
                better = [r for r in better if self.enough(others, r)]
                if better:
                    out[i] = max(better, key=lambda r: r.worth)
                    moved = True
            if not moved:
                break
        return out

    def rivals(self, others: Sequence[Chosen], mine: Chosen) -> list[Chosen]:
        """What touches most of a suspect's losses and explains about as much, exactly fitted."""
        h, c = self.hazards, self.components
        own = np.zeros(len(h.group_set))
        for group, lost in self.losses(others, mine):
            own[group] += lost
        if not own.any():
            return []
        touching = np.bincount(h.pair_single, weights=own[h.pair_group], minlength=h.number)
        touching[[s for x in others for s in x.singles]] = 0.0
        least = NEAR * float(own.sum())
        near = np.flatnonzero(touching >= least)
        quick = h.scan(self.given(others), near)
        found = [(int(i),) for i in near[quick > mine.score - MARGIN - 2 * SLACK]]
        lost_at = touching[c.sides]
        both = c.sides[(lost_at > 0).all(axis=1) & (lost_at.sum(axis=1) >= least)].tolist()
        candidates: list[tuple[int, ...]] = [*found, *map(tuple, both)]
        fitting = (x for x in candidates if len(x) == 1 or self._may_be_two(others, x[0], x[1]))
        out = [self.fit(others, singles) for singles in fitting if singles != mine.singles]
        return [r for r in out if r.score > 0]

    def _may_be_two(self, others: Sequence[Chosen], first: int, second: int) -> bool:
        """Whether a pair may score above 0: each side must show enough, and beside its like a side shows nothing."""
        h = self.hazards
        return h.alike(first) != h.alike(second) and self._part(others, (), first, new=False)[1] >= MIN_PART_SCORE


def _spread(whole: Chosen, members: int) -> float:
    """Nats that the members must earn on top, to stand in the place of the whole."""
    each = 0.0 if all(p.share == 1 for p in whole.parts) else SPREAD
    return max(0, members - 1) * max(each, MISFIT * whole.score if members >= MANY else 0.0)


def _highest(values: Floats, count: int) -> Ints:
    """Positions of the highest values, highest first; of equals the first."""
    if len(values) <= count:
        return np.argsort(-values, kind="stable")
    top = np.sort(np.argpartition(-values, count)[:count])
    return top[np.argsort(-values[top], kind="stable")]
