"""What the model says about itself: who may probe whom, which fabrics there are, who owns an address; and warnings."""

from __future__ import annotations

import pytest

from topology import files
from topology.generate import clos3, leaf_spine, rail_optimised
from topology.warnings import warnings

TENANTS = """\
version: 1
cluster: c
switches:
  leaf1: {tier: 1}
  leaf2: {tier: 1}
  spine1: {tier: 2}
  other1: {tier: 1}
  other2: {tier: 2}
hosts:
  h1:
    rnics:
      red: {switch: leaf1, group: red, address: 10.0.0.1}
      blue: {switch: leaf1, group: blue, address: 10.0.0.3}
      six: {switch: leaf1, group: red, address: 'fd00::1'}
  h2:
    rnics:
      red: {switch: leaf2, group: red, address: 10.0.0.5}
      plain: {switch: leaf2, address: 10.0.0.7}
  h3:
    rnics:
      red: {switch: other1, group: red, address: 10.0.0.9}
      both:
        group: red
        legs: [{switch: other1, address: 10.0.0.11}, {switch: leaf1, address: 10.0.0.13}]
      later: {switch: leaf2, group: red}
links:
  - {a: leaf1, b: spine1}
  - {a: leaf2, b: spine1}
  - {a: other1, b: other2}
"""


@pytest.mark.parametrize(
    ("a", "b", "may"),
    [
        ("h1/red", "h2/red", True),
        ("h1/red", "h1/blue", False),  # one host
        ("h1/blue", "h2/red", False),  # groups
        ("h1/red", "h2/plain", False),  # a group and none
        ("h1/six", "h2/red", False),  # address families
        ("h1/red", "h3/red", False),  # fabrics
        ("h1/red", "h3/both", True),  # one leg in the same fabric is enough
        ("h3/later", "h1/six", True),  # no address known: either family
        ("h3/later", "h1/red", True),
    ],
)
def test_who_may_probe_whom(a: str, b: str, may: bool) -> None:
    t = files.parse(TENANTS)
    assert t.may_probe(t.rnics[a], t.rnics[b]) is may
    assert t.may_probe(t.rnics[b], t.rnics[a]) is may


def test_fabrics_are_joined_by_links_only() -> None:
    t = files.parse(TENANTS)
    assert t.fabrics == (frozenset({"leaf1", "leaf2", "spine1"}), frozenset({"other1", "other2"}))
    assert t.fabric_of["other2"] == 1


def test_owner_of_knows_every_address_of_a_switch_and_no_other() -> None:
    t = leaf_spine(1, 1, 1, 1)
    assert dict(t.owner_of) == {
        "10.255.0.1": "leaf1",
        "10.255.0.2": "spine1",
        "172.16.0.0": "leaf1",
        "172.16.0.1": "spine1",
        "10.1.0.0": "leaf1",
    }


def test_an_rnic_with_two_legs_on_a_tor_is_under_it_once() -> None:
    t = files.parse(
        "version: 1\ncluster: c\nswitches: {a: {tier: 1}}\n"
        "hosts: {h: {rnics: {r: {legs: [{switch: a, port: x}, {switch: a, port: y}]}}}}\n"
    )
    assert [r.name for r in t.rnics_under("a")] == ["h/r"]
    assert list(t.rnics_under("nowhere")) == []


def test_regular_fabrics_raise_no_warning() -> None:
    for t in (leaf_spine(2, 2, 2, 1), clos3(2, 2, 2, 4, 1, 1), rail_optimised(1, 2, 2, 4), leaf_spine(1, 1, 2, 1)):
        assert warnings(t) == ()


BASE = """\
version: 1
cluster: c
switches: {a: {tier: 1}, b: {tier: 1}, s: {tier: 2}, u: {tier: 2}, c: {tier: 1}}
hosts: {h1: {rnics: {r: {switch: a}}}, h2: {rnics: {r: {switch: b}}}, h3: {rnics: {r: {switch: c}}}}
links: [{a: a, b: s}, {a: b, b: s}, {a: b, b: u}, {a: c, b: u}, {a: a, b: u}, {a: c, b: s}]
"""


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (", {a: b, b: u}, {a: c, b: u}, {a: a, b: u}", "", ["u has no link to another switch, so its 0 RNICs"]),
        (
            "{a: b, b: s}, {a: b, b: u}, {a: c, b: u}, {a: a, b: u}, {a: c, b: s}",
            "{a: b, b: u}, {a: c, b: u}",
            [
                "2 separate fabrics (a, s; b, u, c), between which nothing is probed; if they are one, add the missing",
                "h1/r may probe nobody",
            ],
        ),
        (
            ", {a: a, b: u}, {a: c, b: s}",
            "",
            ["there is no way up and down between a and c; add the missing links or correct the `tier:`"],
        ),
        (", h3: {rnics: {r: {switch: c}}}", "", ["no RNIC is joined to c, so nobody probes from there"]),
        ("{switch: c}", "{switch: c, group: x}", ["h3/r may probe nobody...check `group:`"]),
    ],
)
def test_each_oddity_is_one_warning(old: str, new: str, says: list[str]) -> None:
    assert old in BASE
    assert warnings(files.parse(BASE)) == ()
    found = warnings(files.parse(BASE.replace(old, new)))
    assert len(found) == len(says), found
    for text in says:
        assert any(all(part in w for part in text.split("...")) for w in found), found
