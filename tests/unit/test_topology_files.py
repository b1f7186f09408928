"""Topology files: what is read, and for every rule one bad file with the line, object and remedy it must name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
import yaml

import topology.document
from topology import files
from topology.files import TopologyError
from topology.generate import clos3, leaf_spine
from topology.model import Leg, Link, Topology
from topology.schema import json_schema, json_schema_text

GOOD = """\
version: 1
cluster: prod
switches:
  leaf1: {tier: 1, loopback: 10.255.0.1}
  leaf2: {tier: 1}
  spine1: {tier: 2, icmp_limit: 1000}
hosts:
  h1:
    rnics:
      mlx5_0: {switch: leaf1, port: Ethernet1/1, address: 10.0.0.1, switch_address: 10.0.0.0, rail: 0, group: red}
      mlx5_1: {switch: leaf1}
  h2:
    rnics:
      bond0:
        legs:
          - {switch: leaf1, address: 10.0.0.9}
          - {switch: leaf2, address: 10.0.0.9}
links:
  - {a: spine1, b: leaf1, a_address: 10.1.0.1, b_address: 10.1.0.0}
  - {a: leaf2, b: spine1, a_port: Ethernet49/1, b_port: Ethernet2/1}
  - {a: leaf2, b: spine1, a_port: Ethernet50/1, b_port: Ethernet2/2}
"""


def test_a_file_is_read() -> None:
    t = files.parse(GOOD)
    assert t.cluster == "prod"
    assert t.switches["spine1"].icmp_limit == 1000
    rnic = t.rnics["h1/mlx5_0"]
    assert rnic.legs == (Leg("leaf1", "Ethernet1/1", "10.0.0.1", "10.0.0.0"),)
    assert (rnic.rail, rnic.group) == (0, "red")
    assert t.rnics["h1/mlx5_1"].legs[0].port == "h1-mlx5_1"
    assert [leg.switch for leg in t.rnics["h2/bond0"].legs] == ["leaf1", "leaf2"]
    assert t.links[0] == Link("leaf1", "spine1", "spine1", "leaf1", "10.1.0.0", "10.1.0.1")
    assert [k.name for k in t.links] == [
        "leaf1--spine1",
        "leaf2:Ethernet49/1--spine1:Ethernet2/1",
        "leaf2:Ethernet50/1--spine1:Ethernet2/2",
    ]


def test_dump_is_read_back_equal_and_so_is_its_json() -> None:
    t = files.parse(GOOD)
    assert files.parse(files.dump(t)) == t
    assert files.parse(json.dumps(files.content(t))) == t


def test_names_that_yaml_takes_for_something_else_stay_names() -> None:
    t = files.parse(
        "version: 1\ncluster: 2024\nswitches: {on: {tier: 1}, 1001: {tier: 1}, 0x1f: {tier: 2}}\n"
        "hosts: {1e3: {rnics: {0: {switch: 1001}}}}\nlinks: [{a: on, b: 0x1f}, {a: 1001, b: 0x1f}]\n"
    )
    assert set(t.switches) == {"on", "1001", "0x1f"}
    assert "1e3/0" in t.rnics
    assert files.parse(files.dump(t)) == t


def test_addresses_become_canonical() -> None:
    t = files.parse(GOOD.replace("10.255.0.1", "FD00:0:0::01"))
    assert t.switches["leaf1"].loopback == "fd00::1"


def test_the_shipped_schema_is_that_of_the_reader() -> None:
    shipped = Path(topology.__file__).with_name("schema.json").read_text(encoding="utf-8")
    assert shipped == json_schema_text(), "write json_schema_text() of topology.schema to topology/schema.json"


def test_schema_and_reader_agree() -> None:
    validator = jsonschema.Draft202012Validator(json_schema())
    jsonschema.Draft202012Validator.check_schema(json_schema())
    validator.validate(yaml.safe_load(GOOD))
    validator.validate(files.content(clos3(2, 1, 2, 2, 1, 2)))
    for bad in ("tier: 0", "tier: ten", "tire: 1"):
        text = GOOD.replace("tier: 2", bad)
        assert not validator.is_valid(yaml.safe_load(text))
        with pytest.raises(TopologyError):
            files.parse(text)


# (what to replace in GOOD, by what, line, object, what the message must say: the fault and the remedy)
MISTAKES = [
    ("version: 1", "version: 2", 1, "version", ["must be 1, not 2"]),
    ("version: 1\n", "", 1, "", ["`version` is missing; add it (1)"]),
    ("cluster: prod", "cluster: a/b", 2, "cluster", ["'a/b' is no valid name; use letters"]),
    ("cluster: prod", "cluster:", 2, "cluster", ["must be a name or text, not nothing"]),
    ("cluster: prod", "cluster: [x]", 2, "cluster", ["must be a name or text, not a list"]),
    ("  leaf2: {", "  leaf--2: {", 5, "switches.leaf--2", ["no valid name", "single `-`"]),
    ("  leaf2: {", "  _leaf2: {", 5, "switches._leaf2", ["no valid name", "a letter or digit first"]),
    ("  leaf2: {", "  leaf1: {", 5, "switches.leaf1", ["a second time (first in line 4); remove or rename one"]),
    ("  leaf2: {", "  [leaf2]: {", 5, "switches", ["a key must be a name, not a list"]),
    ("{tier: 1}", "{teir: 1}", 5, "switches.leaf2.teir", ["unknown key; did you mean `tier`? Allowed here: tier, loo"]),
    ("{tier: 1}", "{}", 5, "switches.leaf2", ["`tier` is missing; add it (a whole number from 1 to 9)"]),
    ("{tier: 1}", "{tier: 10}", 5, "switches.leaf2.tier", ["must be a whole number from 1 to 9, not 10"]),
    ("{tier: 1}", "{tier: 1.5}", 5, "switches.leaf2.tier", ["`1.5` must be a whole number"]),
    ("{tier: 1}", "7", 5, "switches.leaf2", ["must be a mapping of `key: value`, not `7`"]),
    ("{tier: 1}", "{tier: 1, colour: 3}", 5, "switches.leaf2.colour", ["unknown key. Allowed here: tier"]),
    ("limit: 1000", "limit: 0", 6, "switches.spine1.icmp_limit", ["a whole number of at least 1, not 0"]),
    ("10.255.0.1", "10.255.0.1/32", 4, "switches.leaf1.loopback", ["no address; leave the prefix length out"]),
    ("10.255.0.1", "leaf1.lan", 4, "switches.leaf1.loopback", ["no address; write an IPv4 or IPv6 address"]),
    ("10.255.0.1", "224.0.0.1", 4, "switches.leaf1.loopback", ["give the port's own address"]),
    ("10.255.0.1", "fe80::1%eth0", 4, "switches.leaf1.loopback", ["give the port's own address"]),
    ("  h2:\n", "  leaf2:\n", 12, "hosts.leaf2", ["is also the name of a switch; rename one of them"]),
    ("{switch: leaf1}", "{switch: laef1}", 11, "hosts.h1.rnics.mlx5_1.switch", ["no switch", "did you mean `leaf1`?"]),
    (
        "{switch: leaf1}",
        "{switch: tor}",
        11,
        "hosts.h1.rnics.mlx5_1.switch",
        ["called `tor`; add it under `switches:`"],
    ),
    ("{switch: leaf1}", "{switch: h2}", 11, "hosts.h1.rnics.mlx5_1.switch", ["`h2` is a host; name a switch"]),
    ("{switch: leaf1}", "{rail: 1}", 11, "hosts.h1.rnics.mlx5_1", ["joined to nothing; add `switch:` with its ToR"]),
    ("{switch: leaf1}", "{switch: }", 11, "hosts.h1.rnics.mlx5_1", ["joined to nothing; add `switch:`"]),
    ("{switch: leaf1}", "{legs: []}", 11, "hosts.h1.rnics.mlx5_1.legs", ["is empty; list at least one"]),
    ("{switch: leaf1}", "{switch: leaf1, port: 'a b'}", 11, "hosts.h1.rnics.mlx5_1.port", ["no valid name"]),
    (
        "{switch: leaf1}",
        "{switch: leaf1, port: Ethernet1/1}",
        11,
        "hosts.h1.rnics.mlx5_1.port",
        ["port `Ethernet1/1` of leaf1 is already taken by hosts.h1.rnics.mlx5_0 (line 10)", "its own `port:`"],
    ),
    (
        "{switch: leaf1}",
        "{switch: leaf1, address: 10.1.0.1}",
        19,
        "links[1].a_address",
        ["address 10.1.0.1 is already that of hosts.h1.rnics.mlx5_1.address (line 11); give each port its own"],
    ),
    (
        "switch_address: 10.0.0.0",
        "switch_address: fd00::1",
        10,
        "hosts.h1.rnics.mlx5_0.switch_address",
        ["different families; use IPv4 or IPv6 at both ends"],
    ),
    (
        "      bond0:\n",
        "      bond0:\n        switch: leaf1\n",
        15,
        "hosts.h2.rnics.bond0.switch",
        ["`switch` and `legs` exclude each other; move it into a leg"],
    ),
    ("- {switch: leaf2, address", "- {address", 17, "hosts.h2.rnics.bond0.legs[2]", ["`switch` is missing; add it"]),
    (
        "    rnics:\n      bond0:",
        "    nics:\n      bond0:",
        13,
        "hosts.h2.nics",
        ["unknown key; did you mean `rnics`?"],
    ),
    ("b: leaf1,", "b: leaf3,", 19, "links[1].b", ["no switch is called `leaf3`; did you mean"]),
    ("b: leaf1,", "b: h1,", 19, "links[1].b", ["`h1` is a host; name a switch (hosts are joined by their RNICs'"]),
    ("b: leaf1,", "b: spine1,", 19, "links[1]", ["joins spine1 to itself; name two different switches"]),
    ("b: leaf1,", "c: leaf1,", 19, "links[1]", ["`b` is missing; add it"]),
    ("b_address: 10.1.0.0", "b_address: fd00::1", 19, "links[1].b_address", ["different families"]),
    (
        "b_port: Ethernet2/2",
        "b_port: Ethernet2/1",
        21,
        "links[3].b_port",
        ["port `Ethernet2/1` of spine1 is already taken by links[2] (line 20); give each cable its own `b_port:`"],
    ),
    ("links:\n", "links: []\nlnks:\n", 19, "lnks", ["unknown key; did you mean `links`?"]),
    ("links:\n", "links: {}\nx:\n", 18, "links", ["must be a list of `- item`, not a mapping"]),
    ("{tier: 1}", "&x {tier: 1}\n  leaf3: *x", 6, "switches.leaf3", ["aliases are not supported; write the value out"]),
    ("{tier: 1}", "{tier: 1, <<: {}}", 5, "switches.leaf2", ["merge keys (`<<`) are not supported; write the keys"]),
    ("{tier: 1}", "{tier: 1", 6, "", ["this is no YAML", "mend the text there"]),
    ("prod", "pr\x07od", 2, "", ["character U+0007 is not allowed in YAML; remove it"]),
    ("prod", "pr\ud800od", 2, "", ["half a surrogate pair", "save the file as UTF-8"]),
    ("hosts:", "---\nhosts:", 7, "", ["this is no YAML", "another document"]),
]


@pytest.fixture(params=["libyaml", "python"])
def loader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both parsers of PyYAML: not every build of it has libyaml."""
    if request.param == "python":
        monkeypatch.setattr(topology.document, "_LOADER", yaml.SafeLoader)


@pytest.mark.usefixtures("loader")
@pytest.mark.parametrize(("old", "new", "line", "where", "says"), MISTAKES)
def test_each_mistake_names_line_object_and_remedy(old: str, new: str, line: int, where: str, says: list[str]) -> None:
    assert old in GOOD
    with pytest.raises(TopologyError) as caught:
        files.parse(GOOD.replace(old, new, 1), "f.yaml")
    found = [p for p in caught.value.problems if p.where == where and all(s in p.text for s in says)]
    assert len(found) == 1, str(caught.value)
    assert found[0].line == line
    assert f"f.yaml:{line}: " in str(caught.value)


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n"])
def test_an_empty_file_says_how_to_begin(text: str) -> None:
    with pytest.raises(TopologyError, match=r"<topology>: the file is empty; begin with `version: 1`"):
        files.parse(text)


@pytest.mark.usefixtures("loader")
@pytest.mark.parametrize("text", ["[" * 100_000, "- " * 100_000, "{a: " * 3000])
def test_endless_nesting_is_refused(text: str) -> None:
    with pytest.raises(TopologyError):
        files.parse(text)


def test_all_mistakes_are_told_at_once_and_each_only_once() -> None:
    bad = """\
version: 1
cluster: c
switches:
  leaf1: {teir: 1}
  spine1: {tier: 2, loopback: nowhere}
hosts:
  h1: {rnics: {r0: {switch: leaf1}, r1: {switch: leaf1, address: 10.0.0.1}}}
  h2: {rnics: {r0: {switch: leaf9, address: 10.0.0.1}}}
links:
  - {a: leaf1, b: spine1}
"""
    with pytest.raises(TopologyError) as caught:
        files.parse(bad)
    # leaf1 is known, though its entry is wrong: nobody who names it is blamed.
    assert [(p.line, p.where) for p in caught.value.problems] == [
        (4, "switches.leaf1"),
        (4, "switches.leaf1.teir"),
        (5, "switches.spine1.loopback"),
        (8, "hosts.h2.rnics.r0.address"),
        (8, "hosts.h2.rnics.r0.switch"),
    ]


def test_a_flood_of_mistakes_is_counted() -> None:
    links = "".join(f"  - {{a: spine1, b: x{i}}}\n" for i in range(60))
    with pytest.raises(TopologyError) as caught:
        files.parse(GOOD + links)
    assert len(caught.value.problems) == 60
    assert str(caught.value).count("\n") == files.SHOWN
    assert str(caught.value).endswith("and 10 problems more")


FABRICS = """\
version: 1
cluster: c
switches:
  a1: {tier: 1, fabric: front}
  a2: {tier: 2, fabric: front}
  b1: {tier: 1, fabric: back}
  b2: {tier: 2, fabric: back}
links:
  - {a: a1, b: a2}
  - {a: b1, b: b2}
"""


def test_fabric_claims_are_checked_against_the_cables() -> None:
    t = files.parse(FABRICS)
    assert [sorted(part) for part in t.fabrics] == [["a1", "a2"], ["b1", "b2"]]
    assert files.parse(files.dump(t)) == t
    with pytest.raises(TopologyError, match=r"<topology>:7: switches.b2.fabric: b2 claims fabric `back`, but no links"):
        files.parse(FABRICS.replace("  - {a: b1, b: b2}\n", ""))
    with pytest.raises(TopologyError, match=r"11: links\[3\]: joins a2 of fabric `front` to b2 of fabric `back`"):
        files.parse(FABRICS + "  - {a: a2, b: b2}\n")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(TopologyError, match=r"cannot be read .*give the path of a topology file"):
        files.load(tmp_path / "none.yaml")
    with pytest.raises(TopologyError, match="cannot be read"):
        files.load(tmp_path)
    path = tmp_path / "latin1.yaml"
    path.write_bytes(b"version: 1\ncluster: caf\xe9\n")
    with pytest.raises(TopologyError, match=r"latin1.yaml:2: is not UTF-8 text"):
        files.load(path)


def test_load_names_the_file_in_errors(tmp_path: Path) -> None:
    path = tmp_path / "fabric.yaml"
    path.write_text(GOOD)
    assert files.load(path) == files.parse(GOOD)
    path.write_text(GOOD.replace("tier: 2", "tier: x"))
    with pytest.raises(TopologyError, match=r"fabric.yaml:6: switches.spine1.tier: `x` must be a whole number"):
        files.load(str(path))


def test_defaults_are_left_out_of_the_file() -> None:
    t: Topology = leaf_spine(1, 1, 1, 1)
    text = files.dump(t)
    assert "port" not in text
    assert "icmp_limit" not in text
    limited = replace(t, switches={**t.switches, "spine1": replace(t.switches["spine1"], icmp_limit=7)})
    assert "spine1: {tier: 2, loopback: 10.255.0.2, icmp_limit: 7}" in files.dump(limited)
