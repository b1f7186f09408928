"""What processes ask of kernel and C library."""

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


RETURNED = """
import ctypes, sys
from pingmesh import footprint

class Info(ctypes.Structure):
    _fields_ = [(str(i), ctypes.c_size_t) for i in range(10)]

library = ctypes.CDLL(None)
if not hasattr(library, "mallinfo2"):
    sys.exit()
library.mallinfo2.restype = Info

def mapped():
    return getattr(library.mallinfo2(), "3")

before = mapped()
inside = [bytearray(100_000) for _ in range(20)]
assert mapped() == before
footprint.give_back()
apart = [bytearray(100_000) for _ in range(20)]
assert mapped() > before + 15  # what fits into what is free in the heap goes there
del apart
assert mapped() == before
"""


def test_what_is_large_is_not_in_the_heap_of_a_small_analyzer() -> None:
    subprocess.run([sys.executable, "-c", RETURNED], check=True)
