"""Reading hops the short way gives what looking at all paths gives."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pingmesh.analyzer.hops import HopReader
from topology.generate import clos3, leaf_spine, rail_optimised
from topology.model import Topology
from topology.paths import ecmp_paths, path_from_hops

FABRICS = {
    "three tiers": clos3(3, 2, 2, 4, 1, 1),
    "three tiers, two cables": clos3(2, 2, 2, 2, 1, 1, parallel=2),
    "leaf-spine": leaf_spine(3, 2, 1, 1),
    "rails": rail_optimised(2, 2, 2, 2),
    "IPv6": clos3(2, 2, 2, 2, 1, 1, family=6),
}


@pytest.mark.parametrize("name", FABRICS)
def test_every_path_is_read_from_its_first_hops(name: str) -> None:
    t = FABRICS[name]
    reader = HopReader(t)
    tors = [s for s in t.switches if t.switches[s].tier == 1]
    for a in tors:
        for b in tors:
            for path in ecmp_paths(t, a, b):
                for n in range(1, len(path) + 1):
                    hops = [(i + 2, d.target_address) for i, d in enumerate(path[:n])]
                    assert set(reader.paths(a, b, hops)) == set(path_from_hops(t, a, b, hops))


def addresses(t: Topology) -> list[str | None]:
    return [
        None,
        "192.0.2.1",
        *(d.target_address for d in t.directed_links),
        *(s.loopback for s in t.switches.values()),
    ]


@pytest.mark.parametrize("name", FABRICS)
@settings(deadline=None)
@given(st.data())
def test_any_hops_are_read_alike(name: str, data: st.DataObject) -> None:
    t = FABRICS[name]
    tors = st.sampled_from([s for s in t.switches if t.switches[s].tier == 1])
    a, b = data.draw(tors), data.draw(tors)
    hops = data.draw(st.lists(st.tuples(st.integers(1, 6), st.sampled_from(addresses(t))), max_size=4))
    assert set(HopReader(t).paths(a, b, hops)) == set(path_from_hops(t, a, b, hops))
