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
from pingmesh.analyzer.components import Components, compile_components
from pingmesh.analyzer.hazards import Hazards
from pingmesh.analyzer.search import MARGIN, Chosen, Search
from pingmesh.analyzer.table import Observation, Table, table_of

__all__ = ["Candidate", "Localiser", "Observation", "Suspect", "candidates_of", "localise", "localise_table"]

THRESHOLD = 6.0
"""Prior log odds (nats) against any fault at all, on top of the logarithm of the number of single elements."""
FURTHER = 4.5
"""Nats by which another fault costs less where there is one already."""
EQUAL = 0.01
"""Nats by which equally good explanations may differ: hidden paths are drawn over sets, sums are rounded."""
BURSTS = 1e-5
"""Share of the flows that lose several packets in one burst."""


@dataclass(frozen=True, slots=True)
class Suspect:
    """A component that loses packets, with what the evidence says of it.

    `sent` packets crossed it and `lost` of them were lost there (expected counts where paths are uncertain or several
    components lose); `rate` is their ratio with a 95 % Wilson interval. `score` is the log likelihood ratio (nats) of
    this component being at fault against not, given the other suspects. `confidence` is its posterior share (where its
    directions explain it equally well, of both) against `alternatives`, other rivals and chance. `alternatives` are
    what the evidence can hardly tell apart from it, `equals` those of them that explain it exactly as well.
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
    equals: tuple[Candidate, ...] = ()

    @property
    def direction(self) -> str | None:
        """The candidate's; None where another way through the same component explains the losses as well."""
        c = self.candidate
        return None if any(a.is_same_component(c) for a in self.equals) else c.direction


class Localiser(Protocol):
    """What names suspects from observations; suspects come with the highest score first."""

    def __call__(
        self, observations: Sequence[Observation] | Table, components: Components, *, noise: float = 1e-4
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
    return max(0.0, min(p, (middle - half) / scale)), min(1.0, max(p, (middle + half) / scale))


def localise(
    observations: Sequence[Observation] | Table, components: Components | Sequence[Candidate], *, noise: float = 1e-4
) -> list[Suspect]:
    """Name the components that explain the losses, highest score first; none where chance explains them.

    A table's elements are numbered as in the components' `index`, others above those.
    `noise` is the loss rate up to which a component is healthy. One lost packet among a thousand names nothing; nor do
    losses too few to be more than chance. Cost: see `localise_table`.

    >>> a_b = Candidate("a--b", "link", "a->b", frozenset({"a->b"}))
    >>> tx, rx = (Candidate("h/0", "rnic", s, frozenset({f"h/0 {s}"})) for s in ("tx", "rx"))
    >>> counts = [(31, ("a->b",)), (28, ("h/0 tx", "a->b")), (0, ("h/0 tx",))]
    >>> seen = [Observation(100, lost, (path,)) for lost, path in counts]
    >>> [(s.candidate.direction, s.lost) for s in localise(seen, [a_b, tx, rx])]
    [('a->b', 59)]
    """
    if not isinstance(components, Components):
        components = compile_components(components)
    if not isinstance(observations, Table):
        observations = table_of(observations, dict(components.index))
    return localise_table(observations, components, noise=noise, further=0.0)


def localise_table(
    table: Table,
    components: Components,
    *,
    noise: float = 1e-6,
    threshold: float = THRESHOLD,
    further: float = FURTHER,
) -> list[Suspect]:
    """`localise` on arrays: O(rows x hops) sums, then about the flows with losses times what they may touch.

    `threshold` is the prior log odds (nats) against a fault anywhere: higher means fewer false names, and more faults
    missed.
    """
    if not np.any(table.lost) or not components.singles:
        return []
    search = Search(Hazards(table, components, noise, BURSTS), threshold, further)
    chosen = search.run()
    found = [_suspect(search, chosen, i) for i in range(len(chosen))]
    return sorted(found, key=lambda s: (-round(s.score, 6), s.candidate.order))


def _suspect(search: Search, chosen: Sequence[Chosen], i: int) -> Suspect:
    """What the evidence says of one of the chosen, given the others."""
    h, x = search.hazards, chosen[i]
    others = [*chosen[:i], *chosen[i + 1 :]]
    lost = sum(float(own.sum()) for _, own in search.losses(others, x))
    sent = sum(h.crossed(search.given(chosen), s) for s in x.singles)
    lost = min(lost, sent)
    rivals = search.rivals(others, x)
    # What the search merged may be worth less than one of its parts by itself, and is no less likely for it.
    masses = [math.exp(min(r.worth - x.worth, 0.0)) for r in rivals]
    candidate, named = h.components.named(x.singles), [h.components.named(r.singles) for r in rivals]
    equal = [abs(r.score - x.score) < EQUAL for r in rivals]
    own = 1 + sum(m for m, e, c in zip(masses, equal, named, strict=True) if e and c.is_same_component(candidate))
    low, high = wilson(lost, sent)
    return Suspect(
        candidate=candidate,
        rate=lost / sent if sent else 0.0,
        rate_low=low,
        rate_high=high,
        sent=round(sent),
        lost=round(lost),
        score=x.score,
        confidence=own / (1 + sum(masses) + math.exp(min(-x.worth, 50.0))),
        alternatives=tuple(c for c, r in zip(named, rivals, strict=True) if r.score >= x.score - MARGIN),
        equals=tuple(c for c, e in zip(named, equal, strict=True) if e),
    )
