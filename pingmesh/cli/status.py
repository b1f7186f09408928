"""`pingmesh status`: is the fabric healthy, and how well is it watched?"""

from __future__ import annotations

import argparse
import json
from typing import Any

from pingmesh.cli import ask, render
from pingmesh.cli.endpoint import add_controller_argument, controller_address
from pingmesh.cli.exits import Exit

HELP = "Is the fabric healthy, and how well is it watched? Exit code 1: open incidents; 3: not enough data to tell."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `pingmesh status`."""
    add_controller_argument(parser)


def code(status: dict[str, Any]) -> Exit:
    """What the status means for a script."""
    if status.get("open_incidents"):
        return Exit.FAULT
    return Exit.HEALTHY if status.get("healthy") else Exit.NOT_ENOUGH_DATA


def run(args: argparse.Namespace) -> int:
    """One question, one answer."""
    address = controller_address(args.controller)
    status = ask.get(address, "/status")
    if args.json:
        print(json.dumps(status, indent=2))
    else:
        if status.get("open_incidents"):
            status["incidents"] = ask.get(address, "/incidents", state="open")
        print("\n".join(render.status_lines(status, ask.now())))
    return code(status)
