"""`pingmesh record`: what agents report, as record files."""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from pingmesh import config, logs
from pingmesh.cli.exits import Exit
from pingmesh.config import ConfigError

if TYPE_CHECKING:
    from pingmesh.config import Settings
    from pingmesh.offline.capture import Capture
    from pingmesh.records.spool import Spool
    from topology.model import Topology

HELP = (
    "Listen to what the agents of a running system report, and write every window to record files, for "
    "`pingmesh analyze` and for other tools. Nothing is asked of the agents; the analyzer goes on beside it."
)
MOST_ROWS = 500_000
"""A file is written at the latest when so many rows wait."""
_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86_400}
_SIZES = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `pingmesh record`."""
    parser.add_argument("--out", metavar="DIR", required=True, help="directory for the files; made if it is missing")
    parser.add_argument(
        "--for", dest="duration", metavar="DURATION", help="how long (90s, 10m, 2h); default: until Ctrl-C"
    )
    parser.add_argument("--rotate", metavar="DURATION", default="60s", help="a new file so often (default 60s)")
    parser.add_argument(
        "--max-bytes",
        metavar="SIZE",
        default="10G",
        help="disk that the files may take (500M, 10G); the oldest go first",
    )
    parser.add_argument("--format", choices=("parquet", "arrow"), default="parquet", help="default: parquet")
    parser.add_argument("--config", metavar="FILE", help="configuration file")
    parser.add_argument("--cluster", help="cluster name")
    parser.add_argument("--topology", metavar="FILE", help="topology file")
    parser.add_argument("--broker", metavar="HOST:PORT", help="MQTT broker")
    parser.add_argument("--log-level", metavar="LEVEL", help="debug, info, warning or error")
    parser.add_argument("--json", action="store_true", help="print what was written as JSON at the end")


def seconds(flag: str, text: str) -> float:
    """`90s`, `10m`, `2h`, `1d` or bare seconds, above 0.

    Raises:
        ConfigError: it is none of these.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text.strip())
    if match is None or float(match[1]) <= 0:
        raise ConfigError(f"{flag}: {text!r} is no duration; write for example 90s, 10m or 2h.")
    return float(match[1]) * _UNITS[match[2]]


def size(flag: str, text: str) -> int:
    """`500M`, `10G` or bare bytes, 1 or more.

    Raises:
        ConfigError: it is none of these.
    """
    match = re.fullmatch(r"(\d+)([KMGT]?)", text.strip())
    if match is None or int(match[1]) == 0:
        raise ConfigError(f"{flag}: {text!r} is no size; write for example 500M or 10G.")
    return int(match[1]) * _SIZES[match[2]]


def run(args: argparse.Namespace) -> int:
    """Record until the time is up or a signal comes."""
    from pingmesh.records.schema import pyarrow
    from topology import files

    pyarrow("pingmesh record")
    duration = seconds("--for", args.duration) if args.duration else None
    rotate, most = seconds("--rotate", args.rotate), size("--max-bytes", args.max_bytes)
    flags = {k: getattr(args, k) for k in ("cluster", "topology", "broker", "log_level")}
    settings = config.load(args.config, flags)
    logs.set_up(settings.log_level)
    if not settings.topology:
        raise ConfigError("record: no topology file: give --topology FILE or set `topology` in the configuration.")
    topology = files.load(settings.topology)
    out = Path(args.out)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out: {out} cannot be made ({error.strerror}); choose another directory.") from None

    from pingmesh.messages import WINDOW_NS
    from pingmesh.records.spool import Spool

    about = {"cluster": settings.cluster, "source": "record", "window_ns": str(WINDOW_NS)}
    spool = Spool(out, most, about, f".{args.format}")
    late = asyncio.run(_record(settings, topology, spool, rotate, duration))
    done = spool.done
    answer = {
        "out": str(out),
        "files": done.files,
        "rows": done.rows,
        "bytes": done.bytes,
        "files_removed": done.removed,
    }
    if args.json:
        print(json.dumps({**answer, "amendments_too_late": late}, indent=2))
    else:
        print(f"{out}: {done.rows} rows in {done.files} files, {done.bytes} bytes; {done.removed} old files removed")
    return Exit.HEALTHY if done.rows else Exit.NOT_ENOUGH_DATA


async def _record(settings: Settings, topology: Topology, spool: Spool, rotate: float, duration: float | None) -> int:
    """Listen and write; returns the amendments that came too late."""
    # Imported here: numpy is heavy and --help must not load it.
    from pingmesh.analyzer.samples import Sample
    from pingmesh.analyzer.service import Analyzer
    from pingmesh.offline.capture import Capture

    analyzer = Analyzer(settings, topology)
    capture = Capture(topology, analyzer.book, analyzer.hosts)
    loop = asyncio.get_running_loop()
    due = loop.time() + rotate

    def heard(samples: list[Sample], now: int) -> None:
        nonlocal due
        capture.add(samples, now)
        if loop.time() >= due or len(capture) >= MOST_ROWS:
            due = loop.time() + rotate
            _write(capture, spool, now)
        last.append(now)
        del last[:-1]

    last: list[int] = [0]
    task = asyncio.ensure_future(analyzer.listen(heard))
    for sig in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(sig, task.cancel)
    if duration is not None:
        loop.call_later(duration, task.cancel)
    with suppress(asyncio.CancelledError):
        await task
    _write(capture, spool, last[0])
    return capture.too_late


def _write(capture: Capture, spool: Spool, now: int) -> None:
    facts = capture.take_facts()
    records = capture.take()
    if records is None and not facts:
        return
    for path in spool.write(records, facts, now):
        print(path, file=sys.stderr, flush=True)
