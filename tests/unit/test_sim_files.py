"""`pingmesh sim`: fault scripts, the files it writes, and its truth."""

from __future__ import annotations

import errno
import itertools
import json
import re
import shlex
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from pingmesh.cli import main
from pingmesh.records import files
from pingmesh.records.model import HostFact, Records, concat
from pingmesh.simulate import script
from pingmesh.simulate.fabric import Fabric
from pingmesh.simulate.faults import Places
from topology.generate import leaf_spine

SHAPE = "leaf-spine --leaves 3 --spines 2 --hosts-per-leaf 2"


def sim(tmp_path: Path, text: str, *more: str) -> Path:
    faults = tmp_path / "faults.yaml"
    faults.write_text(text)
    out = tmp_path / "out"
    code = main.main(["sim", "--generate", SHAPE, "--faults", str(faults), "--out", str(out), "--windows", "3", *more])
    assert code == 0
    return out


def flows(out: Path) -> Records:
    return concat([b for p in sorted(out.glob("flows-*")) for b in files.read(p) if isinstance(b, Records)])


def test_files_and_truth(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = """
faults:
  - {kind: blackhole, component: leaf1--spine1, direction: leaf1->spine1, start_s: 5, end_s: 10}
  - {kind: host_down, component: h3, start_s: 10}
noise: {hop_loss: 0, burst_rate: 0, stall_rate: 0, restart_rate: 0, missing_report: 0}
"""
    out = sim(tmp_path, text, "--json")
    truth = json.loads(capsys.readouterr().out)
    assert truth == json.loads((out / "truth.json").read_text())
    assert [f["component"] for f in truth["faults"]] == ["leaf1--spine1", "h3"]
    r = flows(out)
    assert truth["rows"] == len(r)
    windows = np.unique(r.start_ns)
    assert len(windows) == 3
    crossing = np.array(["leaf1->spine1" in (r.path.value(i) or ()) for i in range(len(r))])
    assert np.array_equal(
        r.lost, np.where(crossing & (r.start_ns == windows[1]), r.sent, r.lost * (r.start_ns == windows[2]))
    )
    last = r.take(r.start_ns == windows[2])
    probers = {last.prober.value(i) for i in range(len(last))}
    assert "h3/rnic0" not in probers
    to_h3 = [i for i in range(len(last)) if last.target.value(i) == "h3/rnic0"]
    assert {last.validity.value(i) for i in to_h3} == {"target_set_aside"}
    assert {int(last.role[i]) for i in to_h3} == {2}
    (facts,) = [b for b in files.read(out / "hosts-000002.parquet") if isinstance(b, list)]
    (h3,) = [f for f in facts if f.host == "h3"]
    assert (h3.unanswered, h3.set_aside, h3.silent_since_ns) == (3, True, truth["faults"][1]["opened_at_ns"])
    assert not [f for f in facts if f.set_aside and f.host != "h3"]
    assert main.main(["topology", "check", str(out / "topology.yaml")]) == 0


def test_the_same_seed_gives_the_same_files(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    a, b = (sim(tmp_path / n, "faults: [{kind: loss, count: 2}]", "--seed", "7") for n in ("a", "b"))
    assert (a / "truth.json").read_text() == (b / "truth.json").read_text()
    assert np.array_equal(flows(a).lost, flows(b).lost)


def test_arrow_files(tmp_path: Path) -> None:
    out = sim(tmp_path, "", "--format", "arrow")
    assert len(list(out.glob("flows-*.arrow"))) == 3
    assert len(flows(out))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("faults: [{kind: loss, rat: 1}]", "unknown field `rat`"),
        ("faults: [{kind: loss, rate: 2}]", r"<= 1.*faults\[0\]\.rate"),
        ("faults: [{component: h1}]", "missing required field `kind`"),
        ("faults: [{kind: loss, start_s: 5, end_s: 5}]", "fault 1: end_s 5 is not after start_s 5"),
        ("faults: [{kind: rnic_down, component: spine1}]", "rnic_down does not happen to a switch"),
        ("faults: [{kind: rnic_down, place: link}]", "rnic_down does not happen to a link"),
        ("faults: [{kind: loss, direction: rx}]", "a direction needs a component"),
        ("faults: [{kind: loss}, {kind: lag}]", "fault 2: kind 'lag' is unknown"),
        ("a: [", "line 1: this is no YAML"),
        ("noise: {stall_rate: -1}", "stall_rate"),
        (f"faults: [{{kind: loss, component: {'x' * 5000}}}]", r"component 'x{59}\.\.\. \(5002 characters\) is not in"),
        ("noise: {burst_rate: 1.0e+12}", r"<= 10.* - at `\$\.noise\.burst_rate"),
        ("lists: {link_rate: .inf}", r"<= 1000000.* - at `\$\.lists\.link_rate"),
        ("faults: [{kind: pfc_headroom, burst_s: 1.0e-300}]", r">= 0.0001 .*burst_s"),
        ("lists: {mates: 1000000000000}", "<= 10000 "),
        ("faults: [{kind: incast, delay_us: .inf}]", r"<= 1000000.*delay_us"),
        ("faults: [{kind: incast, delay_us: .nan}]", "delay_us"),
        ("faults: [{kind: loss, start_s: 1.0e+300}]", r"<= 1000000000.*start_s"),
        ("faults: [{kind: loss, component: h1, count: 3}]", "fault 1: 'count' 3 is for random places; leave it or"),
        ("faults: [{kind: loss, component: h1, place: host}]", "fault 1: 'place' is for a random place; leave it or"),
        ("faults: [{kind: loss, delay_us: 9}]", "'delay_us' is not for the kind loss, which adds no delay; leave it"),
        ("faults: [{kind: loss, burst_s: 9}]", "'burst_s' is not for the kind loss, which does not come in bursts"),
        ("faults: [{kind: incast, share: 0.5}]", "'share' is not for the kind incast, which loses nothing"),
        ("faults: [{kind: incast, rate: 0.5}]", "'rate' is not for the kind incast, which loses nothing; leave it out"),
        ("faults: [{kind: blackhole, rate: 0.5}]", "'rate' is not for the kind blackhole, which loses all that it"),
        (
            "faults: [{kind: loss, component: spine1, direction: tx}]",
            "'tx' of spine1 .*; a switch has none, leave it out",
        ),
    ],
)
def test_bad_scripts_end_in_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    faults = tmp_path / "faults.yaml"
    faults.write_text(text)
    code = main.main(["sim", "--generate", SHAPE, "--faults", str(faults), "--out", str(tmp_path / "out")])
    error = capsys.readouterr().err
    assert code == 2
    assert error.startswith(f"pingmesh: {faults}: ")
    assert error.count("\n") == 1
    assert re.search(message, error), error


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ("ring --n 3", "invalid choice: 'ring'"),
        ("clos3 --aggs 2 --cores 3", "cannot be shared out"),
        ("clos3 --pods x", "pods"),
    ],
)
def test_bad_shapes(tmp_path: Path, capsys: pytest.CaptureFixture[str], shape: str, message: str) -> None:
    assert main.main(["sim", "--generate", shape, "--out", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err


def test_keys_of_a_kind_are_taken() -> None:
    text = """
faults:
  - {kind: pfc_headroom, rate: 0.1, burst_s: 0.1, delay_us: 5}
  - {kind: blackhole, component: spine2--leaf1, direction: spine2->leaf1, rate: 1}
"""
    places = Places(Fabric(leaf_spine(3, 2, 2, 1)))
    _, swapped = script.place_all(script.parse(text), places, np.random.default_rng(1))
    assert (swapped.candidate.component, swapped.candidate.direction) == ("leaf1--spine2", "spine2->leaf1")
    assert script.place_all(script.parse("faults: [{kind: class_drop, rate: 0.3}]"), places, np.random.default_rng(1))
    assert swapped.truth()["component"] == "leaf1--spine2"


def test_a_directory_with_records_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = sim(tmp_path, "")
    assert main.main(["sim", "--generate", SHAPE, "--out", str(out)]) == 2
    assert "holds records already" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["truth.json", "topology.yaml", "hosts-000000.arrow"])
def test_nothing_is_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    (tmp_path / name).write_text("mine")
    assert main.main(["sim", "--generate", SHAPE, "--out", str(tmp_path)]) == 2
    assert re.search(r" holds .* already; choose another directory\.\n$", capsys.readouterr().err)
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [(name, "mine")]


def test_a_bad_script_leaves_no_directory(tmp_path: Path) -> None:
    (tmp_path / "faults.yaml").write_text("faults: [{kind: loss, component: nowhere}]")
    faults, out = str(tmp_path / "faults.yaml"), tmp_path / "a" / "b"
    assert main.main(["sim", "--generate", SHAPE, "--faults", faults, "--out", str(out)]) == 2
    assert [p.name for p in tmp_path.iterdir()] == ["faults.yaml"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--windows", "100000000000"], "--windows must be from 1 to 1000000,"),
        (["--windows", "1000000", "--faults", "{tmp}/noisy.yaml"], "--windows: the noise of 1000000 windows would be"),
        (["--out", "x" * 5000], "cannot be used (File name too long); choose"),
        (["--out", "{tmp}/noisy.yaml"], "cannot be used (Not a directory); choose"),
        (["--out", "{tmp}/noisy.yaml/x"], "cannot be used (Not a directory); choose"),
    ],
)
def test_bad_flags(tmp_path: Path, capsys: pytest.CaptureFixture[str], argv: list[str], message: str) -> None:
    (tmp_path / "noisy.yaml").write_text("noise: {burst_rate: 10}")
    argv = [a.replace("{tmp}", str(tmp_path)) for a in argv]
    assert main.main(["sim", "--generate", SHAPE, "--out", str(tmp_path / "out"), *argv]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def failing(monkeypatch: pytest.MonkeyPatch, at: int, action: Callable[[], object]) -> None:
    """Let the `at`-th record file's write end in something else."""
    write, calls = files.write, itertools.count(1)

    def instead(path: Path, what: Records | Sequence[HostFact], about: Mapping[str, str]) -> int:
        if next(calls) == at:
            action()
        return write(path, what, about)

    monkeypatch.setattr(files, "write", instead)


@pytest.mark.parametrize(("sign", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_stopped_run_leaves_whole_windows_and_their_truth(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, sign: signal.Signals, code: int
) -> None:
    failing(monkeypatch, 6, lambda: signal.raise_signal(sign))
    out = tmp_path / "out"
    before = signal.getsignal(signal.SIGTERM)
    assert main.main(["sim", "--generate", SHAPE, "--out", str(out)]) == code
    assert signal.getsignal(signal.SIGTERM) is before
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(f"pingmesh: stopped; {out} holds 2 of 12 windows, with their truth in truth.json;")
    assert sorted(p.name for p in out.iterdir()) == [
        *(f"{kind}-00000{n}.parquet" for kind in ("flows", "hosts") for n in range(2)),
        "topology.yaml",
        "truth.json",
    ]
    truth = json.loads((out / "truth.json").read_text())
    assert (truth["windows"], truth["rows"]) == (2, len(flows(out)))


def test_a_full_disk_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    failing(monkeypatch, 4, full)
    assert main.main(["sim", "--generate", SHAPE, "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "out cannot be written: No space left on device; " in error
    assert "holds 1 of 12 windows, with their truth in truth.json; make room, or choose another directory." in error


def test_a_fault_that_no_probe_can_show_is_warned_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sim(tmp_path, "faults: [{kind: loss}, {kind: class_drop}]")
    warning = "fault 2 (class_drop) hits only classes that no probe has; set other_share in the script's lists."
    assert warning in capsys.readouterr().err


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda v: (
        st.lists(v, max_size=3)
        | st.dictionaries(st.sampled_from(["kind", "rate", "count", "x", "start_s"]), v, max_size=3)
    ),
    max_leaves=8,
)


@given(data=st.fixed_dictionaries({}, optional={"faults": VALUES | st.lists(VALUES), "noise": VALUES, "lists": VALUES}))
@settings(max_examples=200, deadline=None)
def test_any_script_is_read_or_refused(data: object) -> None:
    try:
        assert isinstance(script.parse(yaml.safe_dump(data)), script.Script)
    except script.ScriptError as error:
        assert str(error).startswith("<script>: ")  # noqa: PT017 - some are scripts


@given(text=st.text(max_size=60))
@settings(max_examples=200, deadline=None)
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        assert isinstance(script.parse(text), script.Script)
    except script.ScriptError as error:
        assert str(error).startswith("<script>: ")  # noqa: PT017 - the empty text is a script


def test_the_documented_example_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (Path(__file__).parents[2] / "docs" / "records.md").read_text()
    text = text[text.index("## Simulating") :]
    (tmp_path / "faults.yaml").write_text(text.split("```yaml\n")[1].split("```")[0])
    sim_line, analyze_line = re.findall(r"^    \$ pingmesh (.*)", text, re.M)
    monkeypatch.chdir(tmp_path)
    assert main.main(shlex.split(sim_line.replace("--windows 60", "--windows 18"))) == 0
    capsys.readouterr()
    assert main.main([*shlex.split(analyze_line), "--json"]) == 1
    named = {i["component"] for i in json.loads(capsys.readouterr().out)["incidents"]}
    assert "p1-agg2--p1-leaf1" in named
