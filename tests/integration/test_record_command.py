"""`pingmesh record` beside a running lab: what it writes has the fault in it, and `pingmesh analyze` names it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from loop_rig import Since, closes, poll, ready, running, shown, without

from pingmesh.cli import main
from pingmesh.lab.client import Lab
from pingmesh.lab.fabric import MANAGEMENT_ADDRESS
from pingmesh.lab.supervisor import BROKER_PORT
from pingmesh.records import files
from pingmesh.records.model import Records, concat
from topology.files import dump
from topology.generate import leaf_spine

pytestmark = pytest.mark.lab

FABRIC = without(leaf_spine(3, 3, 2, 1), "h6")


def record(lab: Lab, topology: Path, out: Path) -> subprocess.Popen[str]:
    argv = [sys.executable, "-m", "pingmesh", "record", "--cluster", FABRIC.cluster, "--topology", str(topology)]
    argv += [
        "--broker",
        f"{MANAGEMENT_ADDRESS}:{BROKER_PORT}",
        "--out",
        str(out),
        "--rotate",
        "5s",
        "--for",
        "60s",
        "--json",
    ]
    return subprocess.Popen(lab.command("mgmt", argv), stdout=subprocess.PIPE, text=True)


def flows(out: Path) -> Records | None:
    found = [b for p in sorted(out.glob("flows-*")) for b in files.read(p) if isinstance(b, Records)]
    return concat(found) if found else None


def test_a_recording_of_a_lab(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    topology, out = tmp_path / "fabric.yaml", tmp_path / "recorded"
    topology.write_text(dump(FABRIC))
    with running(FABRIC) as lab:
        ready(lab)
        recording = record(lab, topology, out)
        poll(lambda: out.is_dir() and flows(out) is not None, 40, lambda: "nothing was recorded")
        since = Since(lab)
        lab.fault_add(["link", "leaf1", "spine2", "--loss", "50%", "--direction", "forward"])
        poll(since.new, 20, lambda: "the lab's own analyzer named nothing")
        written, _ = recording.communicate(timeout=120)
        assert recording.returncode == 0
        lab.fault_clear()
        closes(since, lambda: None)
        # Two who listen disturb no one; a machine that is short of CPU may starve agents.
        blamed = [i for i in since.new() if i["component_type"] != "host"]
        assert {i["component"] for i in blamed} == {"leaf1--spine2"}, shown(blamed)
    told = json.loads(written)
    r = flows(out)
    assert r is not None
    assert told["rows"] == len(r) > 100
    assert told["files"] == len(list(out.iterdir()))
    assert {FABRIC.rnics[n].address for n in r.prober.names} <= set(r.prober_address.names)
    assert r.path.known.mean() > 0.3  # traced since the recording began; inside a ToR known at once
    one_way = r.role < 2
    assert one_way.mean() > 0.5
    argv = ["analyze", "--topology", str(topology), "--records", str(out), "--json"]
    assert main.main(argv) == 1
    answer = json.loads(capsys.readouterr().out)
    fabric = [i for i in answer["incidents"] if i["component_type"] != "host"]
    assert [(i["component"], i["direction"]) for i in fabric] == [("leaf1--spine2", "leaf1->spine2")]
