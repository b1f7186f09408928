"""`--topology FILE` or `--generate 'SHAPE ...'`, for commands that work without a running system."""

from __future__ import annotations

import argparse
import shlex
from typing import TYPE_CHECKING, NoReturn

from pingmesh.config import ConfigError

if TYPE_CHECKING:
    from topology.model import Topology


def add_fabric_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the two flags; one of them must be given."""
    group = parser.add_mutually_exclusive_group(required=True)
    group.add_argument("--topology", metavar="FILE", help="topology file")
    group.add_argument(
        "--generate",
        metavar="'SHAPE ...'",
        help="a regular fabric, in the words of `pingmesh topology generate`: 'clos3 --pods 4 --cores 8'",
    )


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"--generate: {message}; `pingmesh topology generate --help` shows the shapes.")


def fabric_of(args: argparse.Namespace) -> Topology:
    """The topology that the flags name.

    Raises:
        ConfigError: the words after --generate make no fabric.
        TopologyError: the file cannot be used.
    """
    from topology import cli, files

    if args.topology is not None:
        return files.load(args.topology)
    parser = _Parser(prog="--generate", add_help=False, exit_on_error=False)
    cli.add_arguments(parser)
    try:
        return cli.generate(parser.parse_args(["generate", *shlex.split(args.generate)]))
    except (ValueError, argparse.ArgumentError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"--generate: {error}.") from None
