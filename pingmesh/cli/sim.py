"""`pingmesh sim`: record files of a simulated fabric, with the truth beside them."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from pingmesh.cli.exits import Exit
from pingmesh.cli.fabrics import add_fabric_arguments, fabric_of
from pingmesh.config import ConfigError

if TYPE_CHECKING:
    from pingmesh.simulate.faults import Placed
    from pingmesh.simulate.probes import Flows

HELP = (
    "Simulate a fabric's probes, with faults and noise, and write what both ends would count: record files for "
    "`pingmesh analyze`, and truth.json with what was broken."
)
WRITTEN_UP_TO = 20_000
"""RNICs up to which a generated topology is written beside the records: larger files take minutes to read."""
MOST_WINDOWS = 1_000_000
MOST_EVENTS = 100_000_000
"""Bursts, stalls and restarts of a run: all are drawn before it begins, some 30 bytes each."""


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
    from pingmesh.simulate.output import truth, write_text, write_truth, write_windows
    from pingmesh.simulate.probes import draw_probes
    from pingmesh.simulate.troubles import draw_troubles, expected_events
    from pingmesh.simulate.world import World

    pyarrow("pingmesh sim")
    if not 1 <= args.windows <= MOST_WINDOWS or args.seed < 0:
        raise ConfigError(f"--windows must be from 1 to {MOST_WINDOWS}, --seed 0 or more.")
    out = Path(args.out)
    _check_free(out, is_topology_written=args.generate is not None)
    script = scripts.load(args.faults) if args.faults else scripts.Script()
    topology = fabric_of(args)
    start = time.monotonic()
    rng = np.random.default_rng(args.seed)
    fabric = Fabric(topology)
    faults = scripts.place_all(script, Places(fabric), rng, str(args.faults)) if script.faults else []
    noise, seconds = script.noise_settings(), 5.0 * args.windows
    if (events := expected_events(fabric, noise, seconds)) > MOST_EVENTS:
        raise ConfigError(
            f"--windows: the noise of {args.windows} windows would be about {events:.1g} events, more than "
            f"{MOST_EVENTS:.1g}; ask for fewer windows, or lower the script's noise rates."
        )
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out: {out} cannot be made ({error.strerror}); choose another directory.") from None
    flows = draw_probes(fabric, rng, script.list_settings())
    _warn_of_classes(faults, flows)
    _say(f"{len(fabric.rnics)} RNICs, {fabric.links} directed links, {len(flows)} flows: drawn", start)
    troubles = draw_troubles(fabric, noise, seconds, rng)
    world = World(fabric, flows, faults, troubles, rng, spray=script.spray)

    content = truth(fabric, faults, {"seed": args.seed, "windows": args.windows, "rows": 0, "generate": args.generate})
    written = [0]

    def done(window: int, rows: int) -> None:
        written.append(rows)
        _say(f"window {window} of {args.windows}: {rows} rows", start)

    def close() -> str:
        """Put into truth.json what was written; returns it in words."""
        content["windows"], content["rows"] = len(written) - 1, sum(written)
        write_truth(out / "truth.json", content)
        return f"{out} holds {len(written) - 1} of {args.windows} windows, with their truth in truth.json"

    try:
        with _stopped_by_sigterm():
            # First what makes the windows useful: whatever ends the run, all that is there can be analysed.
            if args.generate and len(fabric.rnics) <= WRITTEN_UP_TO:
                from topology import files

                write_text(out / "topology.yaml", files.dump(topology))
            write_truth(out / "truth.json", content)
            about = {"cluster": topology.cluster}
            write_windows(world, out, args.windows, about, suffix=f".{args.format}", done=done)
            close()
    except OSError as error:
        why = os.strerror(error.errno) if error.errno else str(error).partition("\n")[0]
        with suppress(OSError):
            why += f"; {close()}"
        raise ConfigError(f"--out: {out} cannot be written: {why}; make room, or choose another directory.") from None
    except KeyboardInterrupt as stop:
        print(f"pingmesh: stopped; {close()}; choose another directory to begin again.", file=sys.stderr)
        return 128 + (signal.SIGTERM if isinstance(stop, _Terminated) else signal.SIGINT)
    rows = content["rows"]
    print(
        json.dumps(content, indent=2) if args.json else f"{out}: {rows} rows in {args.windows} windows, and truth.json"
    )
    return Exit.HEALTHY


class _Terminated(KeyboardInterrupt):
    """SIGTERM, which ends the run as Ctrl-C does."""


@contextmanager
def _stopped_by_sigterm() -> Iterator[None]:
    def stop(*_: object) -> NoReturn:
        raise _Terminated

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _check_free(out: Path, *, is_topology_written: bool) -> None:
    """Nothing is written over. Raises ConfigError."""
    try:
        there = sorted(p.name for p in out.iterdir())
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(f"--out: {out} cannot be used ({error.strerror}); choose another directory.") from None
    if any(name.startswith(("flows-", "hosts-")) for name in there):
        raise ConfigError(f"--out: {out} holds records already; choose another directory.")
    for name in ("truth.json", "topology.yaml") if is_topology_written else ("truth.json",):
        if name in there:
            raise ConfigError(f"--out: {out} holds a {name} already; choose another directory.")


def _warn_of_classes(faults: Sequence[Placed], flows: Flows) -> None:
    """Say which faults nothing can show, because no probe is of the classes that they hit."""
    from pingmesh.simulate.probes import CLASSES

    probed = {CLASSES[c] for c in set(flows.cls.tolist())}
    for number, placed in enumerate(faults, 1):
        if placed.how.classes.isdisjoint(probed):
            missing = " or ".join(f"{c}_share" for c in sorted(placed.how.classes))
            print(
                f"pingmesh: fault {number} ({placed.fault.kind}) hits only classes that no probe has; set {missing} "
                "in the script's lists.",
                file=sys.stderr,
            )


def _say(text: str, start: float) -> None:
    print(f"{time.monotonic() - start:6.1f} s  {text}", file=sys.stderr, flush=True)
