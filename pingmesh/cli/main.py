"""The `pingmesh` command: a table of subcommands, of which only the one asked for is imported."""

from __future__ import annotations

import argparse
import errno
import importlib
import os
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NoReturn, Protocol

from pingmesh.cli.exits import Exit


class CommandModule(Protocol):
    """What a module that owns a subcommand provides."""

    HELP: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare flags and arguments."""

    def run(self, args: argparse.Namespace) -> int:
        """Do it; returns the exit code."""


@dataclass(frozen=True)
class Command:
    """A line of the table: where the subcommand lives, one line about it, an example for its `--help`."""

    module: str
    help: str
    example: str


COMMANDS = {
    "up": Command(
        "pingmesh.up",
        "run broker, controller and analyzer on this machine",
        "pingmesh up --topology fabric.yaml",
    ),
    "agent": Command(
        "agent.main",
        "run the agent of this host",
        "pingmesh agent --broker 10.0.0.1:1883 --devices eth1,eth2",
    ),
    "controller": Command(
        "controller.main",
        "run the controller",
        "pingmesh controller --topology fabric.yaml --broker 10.0.0.1:1883 --listen 127.0.0.1:8470",
    ),
    "analyzer": Command(
        "pingmesh.analyzer.main",
        "run the analyzer",
        "pingmesh analyzer --topology fabric.yaml --broker 10.0.0.1:1883",
    ),
    "status": Command("pingmesh.cli.status", "is the fabric healthy, and how well is it watched?", "pingmesh status"),
    "incidents": Command("pingmesh.cli.incidents", "list faults, or follow them", "pingmesh incidents --follow"),
    "findings": Command(
        "pingmesh.cli.findings", "list what is wrong but no fault of the fabric", "pingmesh findings --json"
    ),
    "diagnose": Command(
        "pingmesh.cli.diagnose",
        "is the network to blame for what these hosts see?",
        "pingmesh diagnose --hosts h1,h14 --since 10m",
    ),
    "ping": Command(
        "pingmesh.cli.ping",
        "measure the round trip between two RNICs, now",
        "pingmesh ping h1/rnic0 h4/rnic0 --count 100",
    ),
    "record": Command(
        "pingmesh.cli.record",
        "write what agents report to record files",
        "pingmesh record --topology fabric.yaml --broker 10.0.0.1:1883 --out recorded --for 10m",
    ),
    "analyze": Command(
        "pingmesh.cli.analyze",
        "name what is broken in recorded probes",
        "pingmesh analyze --topology fabric.yaml --records recorded",
    ),
    "sim": Command(
        "pingmesh.cli.sim",
        "write record files of a simulated fabric, with the truth",
        "pingmesh sim --generate 'leaf-spine --leaves 4 --spines 4' --faults faults.yaml --out simulated",
    ),
    "topology": Command(
        "topology.cli", "check, show or generate a topology file", "pingmesh topology check fabric.yaml"
    ),
    "config": Command(
        "pingmesh.cli.config", "check a configuration, or show all settings", "pingmesh config check pingmesh.yaml"
    ),
    "doctor": Command("pingmesh.cli.doctor", "does this machine have what pingmesh needs?", "pingmesh doctor"),
    "lab": Command(
        "pingmesh.lab.cli",
        "a whole fabric in network namespaces on this machine",
        "pingmesh lab up --leaves 4 --spines 4 --hosts-per-leaf 4",
    ),
}

# By name, so that nothing is imported just to be caught.
USER_ERRORS = {
    "pingmesh.config.ConfigError": Exit.USAGE,
    "topology.files.TopologyError": Exit.USAGE,
    "pingmesh.lab.namespaces.LabError": Exit.USAGE,
    "pingmesh.lab.faults.errors.FaultError": Exit.USAGE,
    "pingmesh.records.errors.RecordsError": Exit.USAGE,
    "pingmesh.simulate.script.ScriptError": Exit.USAGE,
    "controller.client.BadRequestError": Exit.USAGE,
    "controller.client.ControllerUnreachableError": Exit.INTERNAL,
}

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def _columns() -> int:
    """Of the terminal. `shutil` tells it as well, and brings every compressor into an agent's memory."""
    told = os.environ.get("COLUMNS", "")
    if told.isdecimal() and int(told):
        return int(told)
    try:
        return os.get_terminal_size(sys.__stdout__.fileno()).columns or 100  # type: ignore[union-attr]
    except (AttributeError, ValueError, OSError):
        return 100


class _Formatter(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30, width=min(110, _columns()))
        # argparse forgets the indentation of subcommands when it measures them, and wraps the longest one.
        self._action_max_length = 14


class _Version(argparse.Action):
    def __call__(self, *_: object) -> NoReturn:
        # Reading the metadata takes longer than parsing: not on every start.
        from importlib.metadata import version

        print(f"pingmesh {version('pingmesh')}")
        sys.exit(0)


def build_parser(chosen: str | None) -> argparse.ArgumentParser:
    """The parser with every subcommand's name and help, and the arguments of the chosen one only."""
    parser = argparse.ArgumentParser(
        prog="pingmesh",
        description="Tells whether the host or the network is at fault, and names the broken part.",
        epilog="exit codes: 0 healthy, 1 fault found, 2 usage or configuration, 3 not enough data, 4 internal error\n"
        "example: pingmesh lab demo",
        formatter_class=_Formatter,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    sub = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        p = sub.add_parser(
            name,
            help=command.help,
            description=command.help,
            epilog=f"example: {command.example}",
            formatter_class=_Formatter,
        )
        if name == chosen:
            module = load(command)
            p.description = module.HELP
            module.add_arguments(p)
            p.set_defaults(run=module.run)
    return parser


@contextmanager
def _dying_of_interrupts() -> Iterator[None]:
    """Ctrl-C ends the process at once: while modules are imported, Python may lose a KeyboardInterrupt."""
    ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if ours:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        if ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def load(command: Command) -> CommandModule:
    """Import the module that owns a subcommand."""
    module: CommandModule = importlib.import_module(command.module)
    return module


def _drop_output() -> None:
    """The interpreter's last flush would fail again."""
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115, PTH123 - stays open to the end


def _flush_or_drop_output() -> None:
    try:
        sys.stdout.flush()
    except OSError:
        _drop_output()


def main(argv: Sequence[str]) -> int:
    """Run one command; returns the exit code. Errors of the user end in one clear sentence on stderr."""
    chosen = next((a for a in argv if not a.startswith("-")), None)
    try:
        with _dying_of_interrupts():
            args = build_parser(chosen).parse_args(argv)
        code: int = args.run(args)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader has gone (`pingmesh incidents | head`); the rest is for nobody. Not 0: no verdict was delivered.
        _drop_output()
        return 128 + signal.SIGPIPE
    except Exception as error:
        if isinstance(error, OSError) and error.errno in NO_ROOM:
            print(
                f"pingmesh: the output cannot be written ({os.strerror(error.errno)}); make room for it.",
                file=sys.stderr,
            )
            _flush_or_drop_output()
            return int(Exit.USAGE)
        for cls in type(error).__mro__:
            if (known := USER_ERRORS.get(f"{cls.__module__}.{cls.__qualname__}")) is not None:
                print(f"pingmesh: {error}", file=sys.stderr)
                return int(known)
        traceback.print_exc()
        print(f"pingmesh: internal error in `pingmesh {chosen}`: {error!r}; please report it.", file=sys.stderr)
        return int(Exit.INTERNAL)
    return int(code)


def entry() -> NoReturn:
    """The console script."""
    sys.exit(main(sys.argv[1:]))
