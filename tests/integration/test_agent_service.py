"""The whole agent with a real broker: registration, lists, questions, outages, last will and goodbye."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

RIG = Path(__file__).with_name("agent_rig.py")


def unshare() -> list[str]:
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    return ["unshare", *user, "--mount", "--net", "--pid", "--mount-proc", "--fork", "--kill-child", "--"]


@pytest.mark.lab
def test_an_agent_through_everything() -> None:
    if shutil.which("mosquitto") is None:
        pytest.skip("mosquitto is not installed: there is no broker to test the agent with")
    if subprocess.run([*unshare(), "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("namespaces cannot be made here: run as root or allow unprivileged user namespaces")
    done = subprocess.run(
        [*unshare(), sys.executable, str(RIG)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    out = json.loads(done.stdout)

    assert out["addresses"] == ["10.0.0.1", "10.0.0.2"], "read from the interfaces, told to nobody"
    sent_something, all_arrived, _ = out["counts"]
    assert sent_something
    assert all_arrived
    assert out["answered_in"] < 0.3
    assert out["totals"] > 0
    assert out["confirmed"] == [[10], [10]]
    assert 0.4 <= out["confirmed_in"] < 3
    assert out["late"] == ["late0", "late0", True], "only the device that was made anew gets a new epoch"
    for up, flaps in ((False, 1), (True, 2)):
        seconds, told, counted = out[f"link_{up}"]
        assert seconds < 1
        assert (told, counted) == (up, flaps)
    assert out["seqs"] == list(range(len(out["seqs"]))), "no report was lost in the outage, none came twice"
    assert len(out["seqs"]) >= 3
    assert out["killed"][-1] is True
    code, seconds = out["stopped"]
    assert code == 0
    assert seconds < 1
    assert out["last_states"] == {"h1": "stopped", "h2": "died"}
    code, seconds = out["stopped_alone"]
    assert code == 0
    assert seconds < 1.2, "a broker that hangs does not keep the agent"
    assert "Traceback" not in out["log"]
    assert "never retrieved" not in out["log"]
