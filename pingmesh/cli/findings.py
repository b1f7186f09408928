"""`pingmesh findings`: what is wrong but no fault of the fabric."""

from __future__ import annotations

import argparse
import json

from pingmesh.cli import ask, render
from pingmesh.cli.endpoint import add_controller_argument, controller_address
from pingmesh.cli.exits import Exit

HELP = "List what is wrong but no fault of the fabric: unknown RNICs, clock steps, other versions. Never an alarm."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `pingmesh findings`."""
    add_controller_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Exit code 0: a finding is no fault."""
    found = ask.get(controller_address(args.controller), "/findings")
    print(json.dumps(found, indent=2) if args.json else "\n".join(render.finding_lines(found, ask.now())))
    return Exit.HEALTHY
