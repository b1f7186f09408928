"""What is odd about a topology without being wrong: the likely slips of the pen, as sentences."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from topology.model import Topology
from topology.paths import tops

NAMED = 5
"""Names that a warning lists before it only counts."""


def warnings(t: Topology) -> tuple[str, ...]:
    """All warnings, each one sentence with its remedy.

    Complexity: O(switches + links + RNICs) plus one comparison per pair of distinct sets of top switches (pods).
    """
    return (*_unjoined(t), *_separate_fabrics(t), *_no_way(t), *_empty_tors(t), *_lonely_rnics(t))


def names(items: Iterable[str]) -> str:
    """`a, b, c` or `a, b, c, d, e and 7 more`."""
    every = list(items)
    more = f" and {len(every) - NAMED} more" if len(every) > NAMED else ""
    return ", ".join(every[:NAMED]) + more


def _unjoined(t: Topology) -> Iterator[str]:
    if len(t.switches) == 1:
        return
    for switch, links in t.out_links.items():
        if not links:
            count = sum(1 for _ in t.rnics_under(switch))
            yield f"{switch} has no link to another switch, so its {count} RNICs reach nobody outside; add its links"


def _separate_fabrics(t: Topology) -> Iterator[str]:
    parts = [part for part in t.fabrics if len(part) > 1]
    if len(parts) < 2 or all(t.switches[s].fabric for part in parts for s in part):
        return
    told = "; ".join(names(s for s in t.switches if s in part) for part in parts)
    yield (
        f"{len(parts)} separate fabrics ({told}), between which nothing is probed; "
        "if they are one, add the missing link, else give their switches a `fabric:` name"
    )


def _no_way(t: Topology) -> Iterator[str]:
    """ToR pairs that are connected, but by no path that first goes up and then down."""
    groups: dict[frozenset[str], list[str]] = {}
    for switch in t.switches:
        if any(True for _ in t.rnics_under(switch)):
            groups.setdefault(tops(t, switch), []).append(switch)
    known = list(groups.items())
    for i, (reach, tors) in enumerate(known):
        for other_reach, others in known[i + 1 :]:
            if t.fabric_of[tors[0]] == t.fabric_of[others[0]] and not reach & other_reach:
                yield (
                    f"there is no way up and down between {names(tors)} and {names(others)}; "
                    "add the missing links or correct the `tier:` of the switches between them"
                )


def _empty_tors(t: Topology) -> Iterator[str]:
    empty = [s.name for s in t.switches.values() if s.tier == 1 and not any(True for _ in t.rnics_under(s.name))]
    if empty:
        yield f"no RNIC is joined to {names(empty)}, so nobody probes from there; add their hosts"


def _lonely_rnics(t: Topology) -> Iterator[str]:
    """RNICs whose group, fabric and address family hold no second host."""
    circles: dict[tuple[str | None, int, bool | None], set[str]] = {}

    def keys(name: str) -> set[tuple[str | None, int, bool | None]]:
        rnic = t.rnics[name]
        # Without an address any family is possible.
        families = (None, False, True) if rnic.address is None else (":" in rnic.address,)
        return {(rnic.group, t.fabric_of[leg.switch], family) for leg in rnic.legs for family in families}

    for name, rnic in t.rnics.items():
        for key in keys(name):
            circles.setdefault(key, set()).add(rnic.host)
    lonely = [name for name in t.rnics if all(len(circles[key]) == 1 for key in keys(name))]
    if lonely:
        yield (
            f"{names(lonely)} may probe nobody: "
            "no other host has an RNIC of the same group, fabric and address family; check `group:` and the addresses"
        )
