"""`pingmesh incidents`: the faults, open ones or all, once or as they come and go."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from pingmesh.cli import ask, render
from pingmesh.cli.endpoint import add_controller_argument, controller_address
from pingmesh.cli.exits import Exit

HELP = "List the faults of the fabric and its hosts. Exit code 1 if one is open."
POLL_S = 0.5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `pingmesh incidents`."""
    parser.add_argument("--state", choices=("open", "closed", "all"), default="all", help="default: all")
    parser.add_argument(
        "--since", metavar="WHEN", help="only those open since then: an age (10m, 2h, 1d) or an RFC 3339 time"
    )
    parser.add_argument(
        "--follow",
        action="store_true",
        help="go on and print each opening, change and closing (JSON: one object a line)",
    )
    add_controller_argument(parser)


def run(args: argparse.Namespace) -> int:
    """List, or follow until Ctrl-C."""
    address = controller_address(args.controller)
    # Whoever follows wants to see the closing too.
    state = None if args.state == "all" or args.follow else args.state

    def fetch() -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = ask.get(address, "/incidents", state=state, since=args.since)
        return found

    if args.follow:
        for incident in follow(patient(fetch)):
            print(json.dumps(incident) if args.json else render.follow_line(incident), flush=True)
    found = fetch()
    print(json.dumps(found, indent=2) if args.json else "\n".join(render.incident_lines(found, ask.now())))
    return Exit.FAULT if any(i["state"] == "open" for i in found) else Exit.HEALTHY


def patient(fetch: Callable[[], list[dict[str, Any]]]) -> Iterator[Sequence[dict[str, Any]]]:
    """Answers twice a second; a controller that restarts is waited for, one that never was there is an error."""
    yield fetch()
    away = False
    while True:
        time.sleep(POLL_S)
        try:
            yield fetch()
            away = False
        except ConnectionError as error:
            if not away:
                print(f"pingmesh: {error} (waiting for it)", file=sys.stderr)
            away = True


def follow(answers: Iterator[Sequence[dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    """What is open at first, then every incident that is new or says something else than before."""
    seen: dict[str, tuple[object, ...]] = {}
    for n, answer in enumerate(answers):
        for incident in sorted(answer, key=lambda i: str(i["opened_at"])):
            now = tuple(incident.get(k) for k in ("state", "component", "direction", "symptom"))
            if seen.get(incident["id"]) != now:
                seen[incident["id"]] = now
                if n or incident["state"] == "open":
                    yield incident
