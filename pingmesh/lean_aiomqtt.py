"""aiomqtt without what none of our connections uses.

paho, below it, imports `urllib.request`, and with it HTTP, e-mail and temporary files: 3 MB in each process, a
thirteenth of an agent. It calls it only where PySocks is installed, to find a proxy.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

UNUSED = "urllib.request"


@contextmanager
def _left_out() -> Iterator[None]:
    """Whoever imports it later gets the real one."""
    if UNUSED in sys.modules or importlib.util.find_spec("socks") is not None:
        yield
        return
    sys.modules[UNUSED] = ModuleType(UNUSED)
    try:
        yield
    finally:
        del sys.modules[UNUSED]


with _left_out():
    import aiomqtt

__all__ = ["aiomqtt"]
