"""`pingmesh diagnose`: is the network to blame for what these hosts see?"""

from __future__ import annotations

import argparse
import json

from pingmesh.cli import ask, render
from pingmesh.cli.endpoint import add_controller_argument, controller_address
from pingmesh.cli.exits import Exit
from pingmesh.config import ConfigError

HELP = (
    "Is the network to blame for what these hosts see? The answer first, then the evidence, then what to do. "
    "Exit code 0: not the network; 1: a fault of the network or of a host; 3: not enough data."
)
CODES = {
    "network": Exit.FAULT,
    "host": Exit.FAULT,
    "innocent": Exit.HEALTHY,
    "insufficient_data": Exit.NOT_ENOUGH_DATA,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `pingmesh diagnose`."""
    parser.add_argument("--hosts", required=True, metavar="H1,H2", help="hosts as named in the topology")
    parser.add_argument(
        "--since",
        metavar="WHEN",
        default="10m",
        help="how far to look back: an age (90s, 10m, 2h; default 10m) or an RFC 3339 time",
    )
    add_controller_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Ask for a verdict and print it."""
    hosts = list(dict.fromkeys(h.strip() for h in args.hosts.split(",") if h.strip()))
    if not hosts:
        raise ConfigError("--hosts: names no host; write for example --hosts h1,h14.")
    answer = ask.get(controller_address(args.controller), "/diagnose", hosts=",".join(hosts), since=args.since)
    print(json.dumps(answer, indent=2) if args.json else "\n".join(render.diagnosis_lines(answer, hosts, ask.now())))
    return CODES[answer["verdict"]]
