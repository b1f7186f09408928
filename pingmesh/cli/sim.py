"""`pingmesh sim`: record files of a simulated fabric, with the truth beside them."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from pingmesh.cli.exits import Exit
from pingmesh.cli.fabrics import add_fabric_arguments, fabric_of
from pingmesh.config import ConfigError

HELP = (
    "Simulate a fabric's probes, with faults and noise, and write what both ends would count: record files for "
    "`pingmesh analyze`, and truth.json with what was broken."
)
WRITTEN_UP_TO = 20_000
"""RNICs up to which a generated topology is written beside the records: larger files take minutes to read."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `pingmesh sim`."""
    add_fabric_arguments(parser)
    parser.add_argument(
        "--faults", metavar="SCRIPT", help="what breaks, where and when (docs/records.md); default: nothing"
    )
    parser.add_argument("--out", metavar="DIR", required=True, help="directory for the files; made if it is missing")
    parser.add_argument("--windows", type=int, default=12, metavar="N", help="windows of 5 s (default 12)")
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same files (default 0)")
    parser.add_argument("--format", choices=("parquet", "arrow"), default="parquet", help="default: parquet")
    parser.add_argument("--json", action="store_true", help="print truth.json's content at the end")


def run(args: argparse.Namespace) -> int:
    """Simulate and write; progress on stderr."""
    import numpy as np

    from pingmesh.records.schema import pyarrow
    from pingmesh.simulate import script as scripts
    from pingmesh.simulate.fabric import Fabric
    from pingmesh.simulate.faults import Places
    from pingmesh.simulate.output import truth, write_truth, write_windows
    from pingmesh.simulate.probes import draw_probes
    from pingmesh.simulate.troubles import draw_troubles
    from pingmesh.simulate.world import World

    pyarrow("pingmesh sim")
    if args.windows < 1 or args.seed < 0:
        raise ConfigError("--windows must be 1 or more, --seed 0 or more.")
    script = scripts.load(args.faults) if args.faults else scripts.Script()
    topology = fabric_of(args)
    out = Path(args.out)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out: {out} cannot be made ({error.strerror}); choose another directory.") from None
    if any(out.glob("flows-*")):
        raise ConfigError(f"--out: {out} holds records already; choose another directory.")
    start = time.monotonic()
    rng = np.random.default_rng(args.seed)
    fabric = Fabric(topology)
    faults = scripts.place_all(script, Places(fabric), rng, str(args.faults)) if script.faults else []
    flows = draw_probes(fabric, rng, script.list_settings())
    _say(f"{len(fabric.rnics)} RNICs, {fabric.links} directed links, {len(flows)} flows: drawn", start)
    troubles = draw_troubles(fabric, script.noise_settings(), 5.0 * args.windows, rng)
    world = World(fabric, flows, faults, troubles, rng, spray=script.spray)

    def done(window: int, rows: int) -> None:
        _say(f"window {window} of {args.windows}: {rows} rows", start)

    about = {"cluster": topology.cluster}
    rows = write_windows(world, out, args.windows, about, suffix=f".{args.format}", done=done)
    made = {"seed": args.seed, "windows": args.windows, "rows": rows, "generate": args.generate}
    content = truth(fabric, faults, made)
    write_truth(out / "truth.json", content)
    if args.generate and len(fabric.rnics) <= WRITTEN_UP_TO:
        from topology import files

        (out / "topology.yaml").write_text(files.dump(topology), encoding="utf-8")
    print(
        json.dumps(content, indent=2) if args.json else f"{out}: {rows} rows in {args.windows} windows, and truth.json"
    )
    return Exit.HEALTHY


def _say(text: str, start: float) -> None:
    print(f"{time.monotonic() - start:6.1f} s  {text}", file=sys.stderr, flush=True)
