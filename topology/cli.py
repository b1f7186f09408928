"""`pingmesh topology`: check, show and generate topology files."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

from topology import files
from topology.generate import clos3, leaf_spine, rail_optimised
from topology.model import Topology
from topology.paths import ecmp_paths
from topology.schema import NAME_PATTERN, NAME_RULE
from topology.warnings import names, warnings

HELP = "check, show or generate a topology file"

OK = 0
USAGE = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare `check FILE`, `show FILE` and `generate SHAPE`."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    check = _action(actions, "check", "report every mistake with its line", "pingmesh topology check fabric.yaml")
    show = _action(actions, "show", "say what a file describes", "pingmesh topology show fabric.yaml --json")
    for parser_ in (check, show):
        parser_.add_argument("file", metavar="FILE", help="topology file")
        parser_.add_argument("--json", action="store_true", help="print JSON")
    generate = _action(
        actions,
        "generate",
        "write the file of a regular fabric",
        "pingmesh topology generate leaf-spine --leaves 4 --spines 4 -o fabric.yaml",
    )
    shapes = generate.add_subparsers(dest="shape", metavar="SHAPE", required=True)
    for name, shape in SHAPES.items():
        example = f"pingmesh topology generate {name} {shape.example} -o fabric.yaml"
        p = _action(shapes, name, shape.help, example)
        for flag, (default, text) in shape.counts.items():
            p.add_argument(f"--{flag}", type=int, default=default, metavar="N", help=f"{text} (default {default})")
        p.add_argument("--family", type=int, choices=(4, 6), default=4, help="IPv4 or IPv6 addresses (default 4)")
        p.add_argument("--parallel", type=int, default=1, metavar="N", help="cables between two switches (default 1)")
        p.add_argument("--cluster", default="lab", help="name of the cluster (default lab)")
        p.add_argument("-o", "--output", metavar="FILE", help="where to write (default: standard output)")
        p.add_argument("--json", action="store_true", help="write JSON, which is read back like YAML")


def _action(
    actions: argparse._SubParsersAction[argparse.ArgumentParser], name: str, text: str, example: str
) -> argparse.ArgumentParser:
    return actions.add_parser(name, help=text, description=text, epilog=f"example: {example}")


@dataclass(frozen=True)
class Shape:
    """A generator on the command line: its counts with default and meaning."""

    help: str
    example: str
    counts: dict[str, tuple[int, str]]


_HOSTS = {
    "hosts-per-leaf": (4, "hosts on a leaf"),
    "rnics-per-host": (1, "RNICs of a host"),
}

SHAPES = {
    "leaf-spine": Shape(
        "two tiers: every leaf joined to every spine",
        "--leaves 4 --spines 4",
        {"leaves": (4, "leaves (ToRs)"), "spines": (4, "spines"), **_HOSTS},
    ),
    "clos3": Shape(
        "three tiers: pods of leaves and aggregation switches, joined by planes of cores",
        "--pods 2 --leaves 2 --aggs 2 --cores 4",
        {
            "pods": (2, "pods"),
            "leaves": (2, "leaves in a pod"),
            "aggs": (2, "aggregation switches in a pod"),
            "cores": (4, "cores in all, a multiple of the aggregation switches in a pod"),
            **_HOSTS,
        },
    ),
    "rail": Shape(
        "rail-optimised: RNIC i of every host of a group on the group's leaf for rail i",
        "--groups 1 --spines 2 --rnics-per-host 8",
        {
            "groups": (1, "groups of hosts"),
            "spines": (2, "spines"),
            "hosts-per-group": (4, "hosts in a group"),
            "rnics-per-host": (8, "RNICs of a host, which is the number of rails"),
        },
    ),
}


def generate(args: argparse.Namespace) -> Topology:
    """The topology that the arguments of `generate` describe; ValueError if there is none."""
    if re.fullmatch(NAME_PATTERN, args.cluster) is None:
        raise ValueError(f"{args.cluster!r} is no valid cluster name; {NAME_RULE}")
    common = {"family": args.family, "cluster": args.cluster, "parallel": args.parallel}
    if args.shape == "leaf-spine":
        return leaf_spine(args.leaves, args.spines, args.hosts_per_leaf, args.rnics_per_host, **common)
    if args.shape == "clos3":
        return clos3(args.pods, args.leaves, args.aggs, args.cores, args.hosts_per_leaf, args.rnics_per_host, **common)
    return rail_optimised(args.groups, args.spines, args.hosts_per_group, args.rnics_per_host, **common)


def summary(t: Topology) -> dict[str, object]:
    """The counts of a topology: `{cluster, switches, hosts, rnics, links, fabrics, groups, addresses}`."""
    families = Counter(
        "none" if r.address is None else "IPv6" if ":" in r.address else "IPv4" for r in t.rnics.values()
    )
    return {
        "cluster": t.cluster,
        "switches": len(t.switches),
        "hosts": len(t.hosts),
        "rnics": len(t.rnics),
        "links": len(t.links),
        "fabrics": len(t.fabrics),
        "groups": sorted({r.group for r in t.rnics.values() if r.group}),
        "addresses": dict(families),
    }


def describe(t: Topology) -> dict[str, object]:
    """All of a topology by its public names, as `show --json` prints it."""
    return {
        "summary": summary(t),
        "fabrics": [[s for s in t.switches if s in part] for part in t.fabrics],
        "switches": [asdict(s) for s in t.switches.values()],
        "rnics": [{"name": r.name, **asdict(r)} for r in t.rnics.values()],
        "links": [{"name": k.name, **asdict(k)} for k in t.links],
        "warnings": list(warnings(t)),
    }


def run(args: argparse.Namespace) -> int:
    """Run `topology ACTION`; the exit code is 0, or 2 if the file or the arguments are wrong."""
    if args.action == "generate":
        return _run_generate(args)
    try:
        t = files.load(args.file)
    except files.TopologyError as e:
        if args.json:
            print(json.dumps({"ok": False, "problems": [asdict(p) for p in e.problems], "warnings": []}, indent=2))
        else:
            count = len(e.problems)
            print(f"{e}\n{args.file}: {count} problem{'s' if count > 1 else ''}", file=sys.stderr)
        return USAGE
    if args.action == "show":
        print(json.dumps(describe(t), indent=2) if args.json else _show(t))
        return OK
    odd = warnings(t)
    if args.json:
        print(json.dumps({"ok": True, "problems": [], "warnings": odd, "summary": summary(t)}, indent=2))
    else:
        for text in odd:
            print(f"{args.file}: warning: {text}")
        print(f"{args.file}: ok, {counts(t)}")
    return OK


def _run_generate(args: argparse.Namespace) -> int:
    try:
        t = generate(args)
    except ValueError as e:
        print(f"topology generate: {e}", file=sys.stderr)
        return USAGE
    text = json.dumps(files.content(t), indent=2) + "\n" if args.json else files.dump(t)
    if args.output is None:
        sys.stdout.write(text)
        return OK
    try:
        Path(args.output).write_text(text, encoding="utf-8")
    except OSError as e:
        print(f"topology generate: {args.output} cannot be written ({e.strerror}); choose another -o", file=sys.stderr)
        return USAGE
    print(f"{args.output}: {counts(t)}")
    return OK


def counts(t: Topology) -> str:
    """`4 switches, 3 hosts, ...`: the size in words."""
    parts = [
        (len(t.switches), "switch", "switches"),
        (len(t.hosts), "host", "hosts"),
        (len(t.rnics), "RNIC", "RNICs"),
        (len(t.links), "link", "links"),
        (len(t.fabrics), "fabric", "fabrics"),
    ]
    return ", ".join(f"{n} {one if n == 1 else many}" for n, one, many in parts)


def _show(t: Topology) -> str:
    lines = [f"cluster {t.cluster}: {counts(t)}"]
    for i, part in enumerate(t.fabrics, 1):
        inside = [s for s in t.switches.values() if s.name in part]
        claim = names(sorted({s.fabric for s in inside if s.fabric}))
        lines.append(f"fabric {i}{f' ({claim})' if claim else ''}")
        for tier in sorted({s.tier for s in inside}):
            lines.append(f"  tier {tier}: {names(s.name for s in inside if s.tier == tier)}")
        tors = [s.name for s in inside if any(True for _ in t.rnics_under(s.name))]
        for tor in tors:
            lines.append(f"  under {tor}: {names(r.name for r in t.rnics_under(tor))}")
        if len(tors) > 1:
            lines.append(f"  ECMP paths {tors[0]} to {tors[-1]}: {len(ecmp_paths(t, tors[0], tors[-1]))}")
    groups = Counter(r.group for r in t.rnics.values())
    if set(groups) != {None}:
        lines.append("groups: " + ", ".join(f"{group or 'none'} ({n} RNICs)" for group, n in groups.items()))
    return "\n".join([*lines, *(f"warning: {text}" for text in warnings(t))])
