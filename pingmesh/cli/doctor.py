"""`pingmesh doctor`: does this machine have what pingmesh needs?"""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import get_args

from pingmesh.cli.check import Check, Role
from pingmesh.cli.checks import checks
from pingmesh.cli.endpoint import add_controller_argument, controller_address
from pingmesh.cli.exits import Exit
from pingmesh.config import load

HELP = (
    "Look at this machine: interpreter, privileges, programs, kernel, devices, RDMA, broker, controller. With a role, "
    "what that role cannot do without is a failure (exit code 1); without one it is a warning."
)
MARKS = {"ok": "ok     ", "warning": "warning", "failed": "FAILED "}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `pingmesh doctor`."""
    parser.add_argument("--role", choices=get_args(Role), help="what this machine is to be; default: everything")
    parser.add_argument("--config", metavar="FILE", help="configuration file")
    add_controller_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Exit code 1 if a check failed."""
    found = checks(load(args.config), args.role, controller_address(args.controller))
    failed = any(c.state == "failed" for c in found)
    print(
        json.dumps({"ok": not failed, "checks": [dataclasses.asdict(c) for c in found]}, indent=2)
        if args.json
        else text(found)
    )
    return Exit.FAULT if failed else Exit.HEALTHY


def text(found: list[Check]) -> str:
    """One line a check, its remedy below."""
    width = max(len(c.name) for c in found)
    lines = []
    for c in found:
        lines.append(f"{MARKS[c.state]}  {c.name:<{width}}  {c.seen}")
        if c.remedy:
            lines.append(f"{'':<{width + 11}}-> {c.remedy}")
    return "\n".join(lines)
