"""Where the controller is: flag, environment, a lab that runs on this machine, else this machine's usual address."""

from __future__ import annotations

import argparse
import os
import socket
from collections.abc import Mapping
from pathlib import Path

from pingmesh.lab.directory import default_directory

DEFAULT = "http://127.0.0.1:8470"


def add_controller_argument(parser: argparse.ArgumentParser) -> None:
    """`--controller` and `--json`, which all commands that ask the controller have."""
    parser.add_argument(
        "--controller",
        metavar="ADDRESS",
        help=f"http://HOST:PORT or unix:PATH; default: $PINGMESH_CONTROLLER, a running lab, {DEFAULT}",
    )
    parser.add_argument("--json", action="store_true", help="machine-readable output")


def controller_address(flag: str | None, environ: Mapping[str, str] = os.environ) -> str:
    """The address to ask, in the form that `controller.client.get` takes."""
    if chosen := flag or environ.get("PINGMESH_CONTROLLER"):
        return chosen
    lab = default_directory(environ) / "controller.sock"
    return f"unix:{lab}" if _alive(lab) else DEFAULT


def _alive(path: Path) -> bool:
    try:
        if path.parent.stat().st_uid != os.getuid():
            return False  # /tmp is everybody's: a lab that another user laid there is not ours
    except OSError:
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as s:
        try:
            s.connect(str(path))
        except OSError:
            return False
    return True
