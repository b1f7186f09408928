"""`pingmesh config`: check a file, or show every setting as it would be used."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass

import msgspec

from pingmesh.cli.exits import Exit
from pingmesh.config import ConfigError, Settings, load
from pingmesh.config_load import dump

HELP = (
    "Check a configuration file together with the environment (PINGMESH_SECTION__KEY, PINGMESH_CLUSTER), or show all "
    "settings that result. Without a file: the environment alone."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`config check [FILE]`, `config dump [FILE]`."""
    sub = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for name, text in (("check", "report every mistake with its place"), ("dump", "print all settings as YAML")):
        p = sub.add_parser(name, help=text, description=text, epilog=f"example: pingmesh config {name} pingmesh.yaml")
        p.add_argument("file", nargs="?", metavar="FILE", help="YAML file; default: $PINGMESH_CONFIG")
        p.add_argument("--json", action="store_true", help="machine-readable output")


@dataclass(frozen=True)
class Checked:
    """Settings, or what is wrong with them."""

    settings: Settings | None
    problems: tuple[str, ...] = ()


def check(path: str | None) -> Checked:
    """Load; mistakes become data."""
    try:
        return Checked(load(path))
    except ConfigError as error:
        return Checked(None, error.problems)


def run(args: argparse.Namespace) -> int:
    """Exit code 2 when the configuration cannot be used."""
    checked = check(args.file)
    if checked.settings is None:
        if args.json:
            print(json.dumps({"ok": False, "problems": checked.problems}, indent=2))
        else:
            print("\n".join(checked.problems))
        return Exit.USAGE
    if args.action == "dump":
        print(
            json.dumps(msgspec.to_builtins(checked.settings), indent=2) if args.json else dump(checked.settings),
            end="\n" if args.json else "",
        )
    elif args.json:
        print(json.dumps({"ok": True, "problems": []}, indent=2))
    else:
        print(f"{args.file or 'environment'}: ok")
    return Exit.HEALTHY
