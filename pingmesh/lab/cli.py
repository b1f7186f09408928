"""`pingmesh lab`: a whole fabric in network namespaces on this machine."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from pingmesh.lab import launcher
from pingmesh.lab.client import Lab
from pingmesh.lab.faults.errors import FaultError
from pingmesh.lab.faults.spec import add_fault_arguments, spec_from_args
from pingmesh.lab.hashing import HashKind
from pingmesh.lab.namespaces import LabError

HELP = (
    "Build a fabric of network namespaces with a real agent on every host, break parts of it and see whether they are "
    "named. Runs as root, or unprivileged where the system allows user namespaces."
)
_PROCESS_ACTIONS = ("start", "stop", "kill", "restart", "pause", "resume")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the subcommands."""
    sub = parser.add_subparsers(dest="lab_command", metavar="COMMAND", required=True)

    up = _command(sub, "up", "build the fabric and start everything", "pingmesh lab up --leaves 2 --spines 2")
    up.add_argument("--leaves", type=int, default=4, help="leaves (with --pods: of each pod; default 4)")
    up.add_argument("--spines", type=int, default=4, help="spines (with --pods: core switches in all; default 4)")
    up.add_argument("--hosts-per-leaf", type=int, default=4, help="default 4")
    up.add_argument("--rnics-per-host", type=int, default=1, help="default 1")
    up.add_argument("--pods", type=int, metavar="N", help="three tiers, with N pods")
    up.add_argument("--aggs", type=int, default=2, help="with --pods: aggregation switches of each pod (default 2)")
    up.add_argument("--family", type=int, choices=(4, 6), default=4, help="IPv4 or IPv6 on the fabric")
    up.add_argument(
        "--transport",
        choices=("soft", "verbs"),
        default="soft",
        help="verbs: RDMA over Soft-RoCE, in a virtual machine that is there for this (default soft)",
    )
    up.add_argument("--topology", type=Path, metavar="FILE", help="build this topology instead")
    up.add_argument("--seed", type=int, help="makes the routers' hash seeds (default: drawn)")
    up.add_argument(
        "--hash",
        choices=[k.value for k in HashKind],
        default=os.environ.get("PINGMESH_LAB_HASH"),
        help="who hashes packets onto next hops (default: $PINGMESH_LAB_HASH, else what this kernel can seed)",
    )
    up.add_argument("--no-agents", action="store_true", help="the fabric only")
    up.add_argument(
        "--wait", type=float, default=60.0, metavar="SECONDS", help="wait so long for full coverage (default 60)"
    )
    up.add_argument(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        default="info",
        help="of agents, controller and analyzer (default info)",
    )

    _command(sub, "status", "what runs in the lab, and which faults are in effect", "pingmesh lab status --json")

    down = _command(sub, "down", "end the lab and remove what it made", "pingmesh lab down")
    down.add_argument("--keep-logs", action="store_true", help="leave the logs in the state directory")

    run_on = _command(sub, "exec", "run a command on a node", "pingmesh lab exec h1 -- ip route")
    run_on.add_argument("node", help="a switch or host, or mgmt for the management network")
    run_on.add_argument("argv", nargs=argparse.REMAINDER, metavar="CMD", help="the command, after --")

    logs = _command(sub, "logs", "show the log of a process", "pingmesh lab logs agent:h1 --follow")
    logs.add_argument("name", help="broker, controller, analyzer, supervisor or agent:HOST")
    logs.add_argument("--follow", action="store_true", help="go on as it grows")

    for action in _PROCESS_ACTIONS:
        one = _command(sub, action, f"{action} one process", f"pingmesh lab {action} agent:h1")
        one.add_argument("name", help="broker, controller, analyzer or agent:HOST")

    fault = sub.add_parser("fault", help="break parts of the fabric", description="Break parts of the fabric.")
    faults = fault.add_subparsers(dest="fault_command", metavar="COMMAND", required=True)
    add = _command(faults, "add", "inject a fault", "pingmesh lab fault add link leaf1 spine2 --loss 30%")
    add_fault_arguments(add)
    for kind in _leaf_parsers(add):
        _add_json(kind, default=argparse.SUPPRESS)
    _command(faults, "list", "the faults that are not cleared", "pingmesh lab fault list")
    clear = _command(faults, "clear", "undo a fault, or all", "pingmesh lab fault clear f1")
    clear.add_argument("id", nargs="?", help="default: all")

    demo = sub.add_parser("demo", help="break things at random and see whether they are named")
    importlib.import_module("pingmesh.lab.demo").add_arguments(demo)


def _command(
    sub: argparse._SubParsersAction[argparse.ArgumentParser], name: str, text: str, example: str
) -> argparse.ArgumentParser:
    parser = sub.add_parser(
        name,
        help=text,
        description=f"{text[:1].upper()}{text[1:]}.",
        epilog=f"example: {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_json(parser)
    return parser


def _add_json(parser: argparse.ArgumentParser, default: Any = False) -> None:
    parser.add_argument("--json", action="store_true", default=default, help="machine-readable output")


def _leaf_parsers(parser: argparse.ArgumentParser) -> Sequence[argparse.ArgumentParser]:
    """The parsers of the kinds of fault, so that --json may stand at the end of the line."""
    return [
        p
        for action in parser._actions
        if isinstance(action, argparse._SubParsersAction)
        for p in dict.fromkeys(action.choices.values())
    ]


def run(args: argparse.Namespace) -> int:
    """Do it: 0 when done, 2 when it cannot be (said in one sentence), 3 when coverage was not reached in time."""
    commands = {"up": _up, "status": _status, "down": _down, "exec": _exec, "logs": _logs, "fault": _fault}
    try:
        if args.lab_command == "demo":
            code: int = importlib.import_module("pingmesh.lab.demo").run(args)
            return code
        if args.lab_command in _PROCESS_ACTIONS:
            return _process(args)
        return commands[args.lab_command](args)
    except (LabError, FaultError) as error:
        print(f"pingmesh: {error}", file=sys.stderr)
        return 2


def _up(args: argparse.Namespace) -> int:
    began = time.monotonic()

    def progress(text: str) -> None:
        # With --json, standard output is for the summary alone.
        print(f"[{time.monotonic() - began:5.1f} s] {text}", file=sys.stderr if args.json else sys.stdout, flush=True)

    launcher.end_on_signals()
    try:
        lab = Lab.up(
            args.topology,
            wait=args.wait,
            progress=progress,
            leaves=args.leaves,
            spines=args.spines,
            hosts_per_leaf=args.hosts_per_leaf,
            rnics_per_host=args.rnics_per_host,
            pods=args.pods,
            aggs=args.aggs,
            family=args.family,
            seed=args.seed,
            hashing=args.hash,
            agents=not args.no_agents,
            log_level=args.log_level,
            transport=args.transport,
        )
    except KeyboardInterrupt:
        print("pingmesh: interrupted; the lab was removed", file=sys.stderr)
        raise
    except ValueError as error:
        if isinstance(error, FaultError):
            raise
        raise LabError(str(error)) from error
    covered = args.no_agents or args.wait <= 0 or lab.wait_ready(0.0)
    status = lab.lab_status()
    if args.json:
        print(json.dumps(status | {"covered": covered, "controller": lab.controller}))
    else:
        print(f"lab ready after {time.monotonic() - began:.1f} s: {_size(status)}; state in {status['directory']}")
        if not covered:
            print("not every link is covered yet: see `pingmesh status` and `pingmesh lab status`")
        if not args.no_agents:
            print(f"next: `pingmesh status`, `pingmesh lab fault add {_example(lab)}`, `pingmesh incidents`")
    return 0 if covered else 3


def _status(args: argparse.Namespace) -> int:
    status = Lab().lab_status()
    crashed = [p["name"] for p in status["processes"] if p["state"] == "crashed"]
    if args.json:
        print(json.dumps(status))
        return 1 if crashed else 0
    age = (time.time_ns() - status["started_ns"]) / 1e9
    print(f"lab {status['state']} for {age:.0f} s: {_size(status)}; state in {status['directory']}")
    for p in status["processes"]:
        since = f"pid {p['pid']}" if p["pid"] else f"exit {p['exit_code']}"
        print(f"  {p['name']:<16} {p['state']:<8} {since:<10} starts {p['starts']}")
    for f in status["faults"]:
        print(f"  fault {f['id']}: {f['fault']} ({f['state']}); expected: {f['expected']}")
    return 1 if crashed else 0


def _example(lab: Lab) -> str:
    """A fault that this lab can have."""
    if not lab.topology.links:
        return f"rnic {next(iter(lab.topology.rnics))} --loss 30%"
    k = lab.topology.links[0]
    ends = (f"{k.a}:{k.a_port}", f"{k.b}:{k.b_port}") if k.parallel else (k.a, k.b)
    return f"link {ends[0]} {ends[1]} --loss 30%"


def _size(status: dict[str, Any]) -> str:
    return ", ".join(f"{status[k]} {k}" for k in ("switches", "links", "hosts", "rnics")).replace("rnics", "RNICs")


def _down(args: argparse.Namespace) -> int:
    existed = Lab().down(keep_logs=args.keep_logs)
    if args.json:
        print(json.dumps({"existed": existed}))
    else:
        print("lab removed" if existed else "no lab was there")
    return 0


def _exec(args: argparse.Namespace) -> int:
    argv = args.argv[1:] if args.argv[:1] == ["--"] else args.argv
    if not argv:
        raise LabError(f"say which command to run on {args.node}: pingmesh lab exec {args.node} -- ip route")
    command = Lab().command(args.node, argv)
    sys.stdout.flush()
    os.execvp(command[0], command)  # noqa: S606 - the user's command, as typed


def _logs(args: argparse.Namespace) -> int:
    path = Lab().log(args.name)
    with path.open(errors="replace") as log:
        while True:
            for line in log:
                print(json.dumps({"name": args.name, "line": line.rstrip("\n")}) if args.json else line.rstrip("\n"))
            if not args.follow:
                return 0
            sys.stdout.flush()
            time.sleep(0.25)


def _process(args: argparse.Namespace) -> int:
    result = Lab().process(args.lab_command, args.name)
    print(json.dumps(result) if args.json else f"{result['name']} is {result['state']}")
    return 0


def _fault(args: argparse.Namespace) -> int:
    lab = Lab()
    match args.fault_command:
        case "add":
            spec = msgspec.to_builtins(spec_from_args(args))
            shown: Any = lab.ask("fault", action="add", spec=spec)
            faults = [shown]
        case "list":
            shown = faults = lab.fault_list()
        case _:
            shown = faults = lab.fault_clear(args.id)
    if args.json:
        print(json.dumps(shown))
    else:
        for f in faults:
            print(f"{f['id']}: {f['fault']} ({f['state']}); expected: {f['expected']}")
        if not faults:
            print("no faults")
    return 0
