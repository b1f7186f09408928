"""Which directed switch links are walked, by how many tuples, how often; and what keeps the rest from it. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from controller.pinglist import Entry

TOLERANCE = 0.02
"""A link at 98 % of its rate counts as covered: intervals are whole microseconds and quantised caps."""


@dataclass(frozen=True)
class LinkWalk:
    """One directed switch link: distinct traced 5-tuples over it and their probes/s (class 0, no ACKs)."""

    link: str
    flows: int
    rate: float
    covered: bool


@dataclass(frozen=True)
class CoverageReport:
    """`share` is that of covered links among those that some allowed pair can cross; None without such links."""

    share: float | None
    links: tuple[LinkWalk, ...]
    uncovered_rnics: tuple[str, ...]
    reasons: Mapping[str, str]
    untraced: int = 0
    """Inter-ToR tuples whose path is not known (yet); they count for no link."""
    tuples: int = 0
    below: tuple[str, ...] = field(default=())
    """Links that are not covered."""


def measure(
    intervals: Mapping[Entry, int],
    paths: Mapping[tuple[str, str, int], tuple[str, ...]],
    crossable: Collection[str],
    *,
    link_rate: float,
    link_tuples: int,
    rnics: Iterable[str] = (),
    reasons: Mapping[str, str] | None = None,
) -> CoverageReport:
    """Count what the lists ask for along the paths that were traced.

    Args:
        intervals: microseconds between probes of each entry that is really being probed.
        paths: by tuple, the directed links it was seen to take; a tuple without a path counts for nobody.
        crossable: directed links that some allowed pair can cross.
        link_rate: probes/s that a covered link carries, within `TOLERANCE`.
        link_tuples: distinct 5-tuples that a covered link carries.
        rnics: all RNICs of the topology; those that nobody probes are named.
        reasons: why an RNIC or a link is not covered, where it is known beforehand.

    Complexity: O(entries x hops).
    """
    flows: Counter[str] = Counter()
    rate: dict[str, float] = {}
    untraced = tuples = 0
    probed: set[str] = set()
    for entry, interval_us in intervals.items():
        probed.add(entry.target)
        if entry.cls or not entry.kind:
            continue
        tuples += 1
        links = paths.get(entry.tuple5)
        if links is None:
            untraced += 1
            continue
        for link in links:
            flows[link] += 1
            rate[link] = rate.get(link, 0.0) + 1e6 / interval_us
    walks = tuple(
        LinkWalk(
            link,
            flows[link],
            round(rate.get(link, 0.0), 3),
            flows[link] >= link_tuples and rate.get(link, 0.0) >= link_rate * (1 - TOLERANCE),
        )
        for link in sorted(crossable)
    )
    why = dict(reasons or {})
    below = tuple(w.link for w in walks if not w.covered)
    for w in walks:
        if not w.covered and w.link not in why:
            why[w.link] = _lack(w, untraced, link_rate, link_tuples)
    unprobed = tuple(sorted(n for n in rnics if n not in probed))
    for name in unprobed:
        why.setdefault(name, "nobody probes it")
    share = sum(w.covered for w in walks) / len(walks) if walks else None
    return CoverageReport(share, walks, unprobed, why, untraced, tuples, below)


def _lack(w: LinkWalk, untraced: int, link_rate: float, link_tuples: int) -> str:
    if w.flows < link_tuples:
        wait = f"; {untraced} tuples are not traced yet" if untraced else ""
        return f"{w.flows} of {link_tuples} tuples take it{wait}"
    return f"{w.rate:.1f} of {link_rate:g} probes/s: the rate cap of its RNICs binds"
