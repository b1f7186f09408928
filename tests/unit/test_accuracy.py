"""The accuracy study's scores, and its watch on one fault."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import accuracy
import accuracy_page

LINK = {"component": "a--b", "component_type": "link", "direction": "a->b", "rate": 0.1}


def opened(component: str, at_s: float = 12.0, **more: Any) -> dict[str, Any]:
    base = {"at_s": at_s, "component": component, "type": "link", "direction": "a->b", "symptom": "drop"}
    return {**base, "confidence": 0.99, "alternatives": [], "of_noise": False, **more}


def run(
    *incidents: dict[str, Any], paper: tuple[str, ...] = (), truth: tuple[dict[str, Any], ...] = (LINK,)
) -> dict[str, Any]:
    return {
        "scenario": "x",
        "seed": 0,
        "start_s": 10.0,
        "truth": list(truth),
        "opened": list(incidents),
        "paper": list(paper),
    }


SCENARIO = accuracy.Scenario("x", (), within_s=5)


def test_scores() -> None:
    runs = [
        run(opened("a--b"), paper=("a--b", "c--d")),
        run(opened("a--b", 17.0), opened("c--d")),
        run(opened("c--d", alternatives=["a--b"], direction=None)),
        run(opened("a--b", 9.0), opened("h1", of_noise=True)),
    ]
    s = accuracy.score(SCENARIO, runs)
    assert (s["recall"], s["recall_60"], s["exact"]) == (0.5, 0.75, 0.5)
    assert (s["opened"], s["wrong"], s["precision"]) == (5, 2, 0.6)  # before it began nothing is right
    assert s["median_s"] == 2.0
    assert (s["paper_recall"], s["paper_precision"]) == (0.25, 0.5)


def test_calibration_counts_the_component_only() -> None:
    (row,) = accuracy.calibration([run(opened("a--b"), opened("c--d", alternatives=["a--b"]))])
    assert (row["n"], row["right"]) == (2, 0.5)


def test_confusion_tells_another_link_from_the_right_one() -> None:
    assert accuracy.confusion([run(opened("a--b")), run(opened("c--d")), run()]) == {
        "link": {"link": 1, "another link": 1, "nothing": 1}
    }


def test_the_page_keeps_what_is_written_around_its_figures(tmp_path: Path) -> None:
    page = tmp_path / "accuracy.md"
    result = {
        "scores": [accuracy.score(SCENARIO, [run(opened("a--b"))])],
        "calibration": [],
        "confusion": {},
        "cpu_s_per_run": 1.0,
        "python": "3",
        "numpy": "2",
    }
    accuracy_page.write(page, result)
    page.write_text(page.read_text() + "by hand\n")
    accuracy_page.write(page, result)
    text = page.read_text()
    assert text.startswith("# How well faults are named")
    assert text.endswith("by hand\n")
    assert text.count("| x | 1 | 1.000 (0.21–1.00) in 5 s |") == 1


@pytest.mark.parametrize("seed", [3, 4])
def test_the_watch_names_a_black_hole(seed: int) -> None:
    scenario = next(s for s in accuracy.SCENARIOS if s.name == "2 RNICs a ToR: link 10 %")
    hole = accuracy.Scenario("hole", (accuracy.Part("loss", "link", (1.0,)),), fabric=scenario.fabric)
    r = accuracy.one_run(hole, seed)
    (truth,) = r["truth"]
    hits = [o for o in r["opened"] if truth["component"] in accuracy.names_of(o)]
    assert hits
    assert 0 <= hits[0]["at_s"] - r["start_s"] <= 5
