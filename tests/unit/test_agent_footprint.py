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
