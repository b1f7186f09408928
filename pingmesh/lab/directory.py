"""Where a lab keeps its files, for the lab and for commands that look for one: imports nothing of the lab's."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def default_directory(environ: Mapping[str, str] = os.environ) -> Path:
    """`PINGMESH_LAB_DIR`, else a directory of this user in /tmp."""
    return Path(environ.get("PINGMESH_LAB_DIR") or f"/tmp/pingmesh-lab-{os.getuid()}").absolute()  # noqa: S108
