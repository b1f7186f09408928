"""`pingmesh analyze` on another system's pings: which RNIC got some microseconds slower, and since when."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from pingmesh.cli import main
from topology.generate import leaf_spine

SHAPE = "leaf-spine --leaves 3 --spines 2 --hosts-per-leaf 4 --rnics-per-host 1"
FABRIC = leaf_spine(3, 2, 4, 1)
WINDOW_S = 5
WINDOWS, BEGINS = 84, 66
COLUMNS = "src=from,dst=to,time=at:s,latency=rtt:us"


@pytest.fixture(scope="module")
def pings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = random.Random(1)
    names = list(FABRIC.rnics)
    tor = {n: FABRIC.rnics[n].legs[0].switch for n in names}
    path = tmp_path_factory.mktemp("pings") / "pings.csv"
    lines = ["from,to,at,rtt"]
    for w in range(WINDOWS):
        for a in names:
            for b in names:
                if a == b:
                    continue
                rtt = 6 + 4 * (tor[a] != tor[b]) + rng.gammavariate(5, 0.15)
                rtt += 40 * rng.paretovariate(2) if rng.random() < 0.01 else 0
                rtt += 8 * (w >= BEGINS and "h5/rnic0" in (a, b))
                lines.append(f"{a},{b},{1_700_000_000 + w * WINDOW_S + rng.random() * 4:.3f},{rtt:.2f}")
    path.write_text("\n".join(lines) + "\n")
    return path


def analyze(capsys: pytest.CaptureFixture[str], code: int, *argv: str) -> dict[str, Any]:
    assert main.main(["analyze", "--generate", SHAPE, *argv, "--json"]) == code
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answer


def test_an_rnic_that_got_8_us_slower_is_named_with_when(pings: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answer = analyze(capsys, 1, "--records", str(pings), "--columns", COLUMNS, "--clock", "hardware")
    (incident,) = answer["incidents"]
    assert (incident["component"], incident["symptom"], incident["direction"]) == ("h5/rnic0", "high_rtt", None)
    evidence = incident["evidence"]
    assert evidence["excess_us"] == pytest.approx(8, abs=1)
    assert evidence["kind"] == "slow component"
    began = 1_700_000_000 + BEGINS * WINDOW_S
    clock = f"{began // 3600 % 24:02}:{began // 60 % 60:02}"
    assert f"since {clock}" in evidence["summary"]


def test_stamps_that_are_not_hardwares_do_not_tell_microseconds(
    pings: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert analyze(capsys, 0, "--records", str(pings), "--columns", COLUMNS)["incidents"] == []
    assert analyze(capsys, 0, "--records", str(pings), "--columns", COLUMNS, "--clock", "kernel")["incidents"] == []
