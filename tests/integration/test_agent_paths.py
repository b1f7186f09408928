"""The tracer on real packets, through two routers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

RIG = Path(__file__).with_name("tracer_rig.py")


def unshare() -> list[str]:
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    return ["unshare", *user, "--mount", "--net", "--pid", "--fork", "--kill-child", "--"]


@pytest.mark.lab
@pytest.mark.parametrize(("family", "routers"), [(4, ["10.0.1.2", "10.0.2.2"]), (6, ["fd00:1::2", "fd00:2::2"])])
def test_both_routers_name_themselves_and_silence_is_none(family: int, routers: list[str]) -> None:
    if subprocess.run([*unshare(), "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("namespaces cannot be made here: run as root or allow unprivileged user namespaces")
    done = subprocess.run(
        [*unshare(), sys.executable, str(RIG), str(family)], capture_output=True, text=True, timeout=50, check=False
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["paths"] == {
        "0": [[1, routers[0]], [2, routers[1]]],
        "1": [[2, routers[1]]],
        "2": [[3, None]],
        "3": [[2, routers[1]]],
    }
    # Three hops that answer and, twice, the one that does not.
    assert result["counters"] == {"sent": 5, "answered": 3, "unmatched": 0, "send_errors": 0}
