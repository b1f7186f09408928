"""`pingmesh topology`: output, JSON and exit codes."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from topology import cli, files
from topology.generate import clos3, leaf_spine, rail_optimised


def run(*argv: str) -> int:
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    return cli.run(parser.parse_args(argv))


@pytest.fixture
def good(tmp_path: Path) -> str:
    path = tmp_path / "good.yaml"
    path.write_text(files.dump(clos3(2, 2, 2, 4, 1, 2)))
    return str(path)


@pytest.fixture
def bad(tmp_path: Path) -> str:
    path = tmp_path / "bad.yaml"
    path.write_text("version: 1\ncluster: c\nswitches: {a: {teir: 1}}\n")
    return str(path)


def test_check_of_a_good_file(good: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("check", good) == 0
    assert capsys.readouterr().out == f"{good}: ok, 12 switches, 4 hosts, 8 RNICs, 16 links, 1 fabric\n"


def test_check_of_a_bad_file(bad: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("check", bad) == 2
    err = capsys.readouterr().err
    assert f"{bad}:3: switches.a.teir: unknown key; did you mean `tier`?" in err
    assert err.endswith(f"{bad}: 2 problems\n")


def test_check_json(good: str, bad: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("check", good, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["ok"], told["problems"], told["summary"]["links"]) == (True, [], 16)
    assert run("check", bad, "--json") == 2
    told = json.loads(capsys.readouterr().out)
    assert told["ok"] is False
    assert {p["line"] for p in told["problems"]} == {3}
    assert {p["where"] for p in told["problems"]} == {"switches.a", "switches.a.teir"}


def test_check_tells_warnings_but_they_are_no_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "odd.yaml"
    path.write_text("version: 1\ncluster: c\nswitches: {a: {tier: 1}}\n")
    assert run("check", str(path)) == 0
    assert f"{path}: warning: no RNIC is joined to a" in capsys.readouterr().out


def test_show(good: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("show", good) == 0
    out = capsys.readouterr().out
    assert "tier 2: p1-agg1, p1-agg2, p2-agg1, p2-agg2" in out
    assert "under p1-leaf2: h2/rnic0, h2/rnic1" in out
    assert "ECMP paths p1-leaf1 to p2-leaf2: 4" in out


def test_show_json_uses_the_public_names(good: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("show", good, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    t = files.load(good)
    assert [k["name"] for k in told["links"]] == [k.name for k in t.links]
    assert [r["name"] for r in told["rnics"]] == list(t.rnics)
    assert told["fabrics"] == [list(t.switches)]
    assert told["warnings"] == []


def test_show_of_a_bad_file(bad: str) -> None:
    assert run("show", bad) == 2


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["leaf-spine"], leaf_spine(4, 4, 4, 1)),
        (
            ["leaf-spine", "--leaves", "2", "--spines", "1", "--family", "6", "--parallel", "2", "--cluster", "x"],
            leaf_spine(2, 1, 4, 1, family=6, parallel=2, cluster="x"),
        ),
        (["clos3", "--pods", "3", "--rnics-per-host", "2"], clos3(3, 2, 2, 4, 4, 2)),
        (["rail", "--groups", "2", "--hosts-per-group", "3"], rail_optimised(2, 2, 3, 8)),
    ],
)
def test_generate_writes_what_the_generator_makes(
    argv: list[str], expected: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("generate", *argv) == 0
    assert files.parse(capsys.readouterr().out) == expected
    assert run("generate", *argv, "--json") == 0
    text = capsys.readouterr().out
    json.loads(text)
    assert files.parse(text) == expected
    assert run("generate", *argv, "-o", str(tmp_path / "f.yaml")) == 0
    assert files.load(tmp_path / "f.yaml") == expected


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["leaf-spine", "--leaves", "0"], "leaves must be at least 1"),
        (["clos3", "--cores", "3"], "use a multiple"),
        (["rail", "--cluster", "a b"], "'a b' is no valid cluster name; use letters"),
        (["rail", "-o", "/nowhere/f.yaml"], "/nowhere/f.yaml cannot be written"),
    ],
)
def test_generate_refuses_with_a_remedy(argv: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("generate", *argv) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv", [[], ["check"], ["generate"], ["generate", "torus"], ["generate", "rail", "--pods", "2"]]
)
def test_wrong_usage_exits_with_2(argv: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run(*argv)
    assert caught.value.code == 2
