"""Puts links and a whole topology together by the naming rules: ends sorted, parallel cables marked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from topology.model import Link, Rnic, Switch, Topology


def cable(a: str, a_port: str, b: str, b_port: str, a_address: str | None = None, b_address: str | None = None) -> Link:
    """A link between two switches given in any order; its `a` end is the one that sorts first."""
    if b < a:
        a, a_port, a_address, b, b_port, b_address = b, b_port, b_address, a, a_port, a_address
    return Link(a, a_port, b, b_port, a_address, b_address)


def assemble(cluster: str, switches: Iterable[Switch], rnics: Iterable[Rnic], links: Iterable[Link]) -> Topology:
    """A topology of parts that are known to fit; links that join the same two switches become `parallel`."""
    cables = list(links)
    count = Counter((k.a, k.b) for k in cables)
    return Topology(
        cluster,
        {s.name: s for s in switches},
        {r.name: r for r in rnics},
        tuple(replace(k, parallel=True) if count[k.a, k.b] > 1 else k for k in cables),
    )
