"""What an agent asks of kernel and C library."""

from __future__ import annotations

import subprocess
import sys

ASKED = """
import agent.main, ctypes
print(ctypes.CDLL(None).prctl(42, 0, 0, 0, 0))
"""


def test_an_agent_has_no_huge_pages() -> None:
    done = subprocess.run([sys.executable, "-c", ASKED], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "1"


LOADED = """
import sys
before = set(sys.modules)
import pingmesh.cli.main, agent.main
from pingmesh import config
config.load(None, {"agent.devices": ["eth1"]})
print(*sorted(set(sys.modules) - before))
"""


def test_an_agent_has_nothing_in_memory_that_it_does_not_use() -> None:
    done = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, check=True)
    unused = {"numpy", "networkx", "prometheus_client", "http.client", "shutil", "bz2", "lzma", "difflib", "tempfile"}
    assert unused & set(done.stdout.split()) == set()
