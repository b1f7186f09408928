"""aiomqtt without what none of our connections uses.

paho, below it, imports `urllib.request`, and with it HTTP, e-mail and temporary files: 3 MB in each process, a
thirteenth of an agent. It calls it only where PySocks is installed, to find a proxy.
"""

from __future__ import annotations

import importlib.util
from contextlib import nullcontext

from pingmesh.left_out import left_out

with nullcontext() if importlib.util.find_spec("socks") is not None else left_out("urllib.request"):
    import aiomqtt

__all__ = ["aiomqtt"]
