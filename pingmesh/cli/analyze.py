"""`pingmesh analyze`: recorded probes to incidents, with the analyzer's own inference."""

from __future__ import annotations

import argparse
import json
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pingmesh.cli import render
from pingmesh.cli.exits import Exit
from pingmesh.cli.fabrics import add_fabric_arguments, fabric_of
from pingmesh.config import ConfigError

if TYPE_CHECKING:
    from pingmesh.offline.analysis import Analysis
    from pingmesh.offline.recording import Recording

HELP = (
    "Name what is broken in recorded probes: files of `pingmesh record` or `pingmesh sim`, or another system's ping "
    "records with --columns. Exit code 0: nothing is; 1: a fault; 3: not enough data."
)
CODES = {
    "network": Exit.FAULT,
    "host": Exit.FAULT,
    "innocent": Exit.HEALTHY,
    "insufficient_data": Exit.NOT_ENOUGH_DATA,
}
PROGRESS_S = 2.0
SHOWN_NAMES = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `pingmesh analyze`."""
    add_fabric_arguments(parser)
    parser.add_argument(
        "--records",
        nargs="+",
        required=True,
        metavar="FILE",
        help=".parquet, .arrow or .csv files, or directories of them",
    )
    parser.add_argument(
        "--columns",
        metavar="MAP",
        help="which column is what in another system's files: src=COLUMN,dst=COLUMN,time=COLUMN[:ns|us|ms|s],"
        "latency=COLUMN[:UNIT, default us],lost=COLUMN and, if there, sent, sport, class",
    )
    parser.add_argument("--window", type=float, default=5.0, metavar="S", help="seconds of a window (default 5)")
    parser.add_argument(
        "--noise", type=float, default=1e-4, help="loss rate below which nothing is named (default 0.0001)"
    )
    parser.add_argument(
        "--clock",
        choices=("hardware", "kernel", "software"),
        default="software",
        help="what stamped the round trips: hardware tells delays of microseconds (RNICs), kernel those of a link from "
        "some hundred on, software (default) only milliseconds",
    )
    parser.add_argument("--json", action="store_true", help="machine-readable output")


def run(args: argparse.Namespace) -> int:
    """Read, judge, print."""
    if not 0.1 <= args.window <= 86_400 or not 0 < args.noise < 1:
        raise ConfigError("--window must be from 0.1 to 86400 s, --noise above 0 and below 1.")
    from pingmesh.offline.analysis import Analyst
    from pingmesh.records.columns import ColumnMapError, parse_map

    try:
        columns = parse_map(args.columns) if args.columns else None
    except ColumnMapError as error:
        raise ConfigError(str(error)) from None
    paths = _files(args.records)
    analyst = Analyst(fabric_of(args), round(args.window * 1e9), noise=args.noise, clock=args.clock)
    recording = analyst.recording()
    progress = _Progress()
    for number, path in enumerate(paths, 1):
        for rows in _read(path, columns, round(args.window * 1e9)):
            if isinstance(rows, list):
                recording.add_facts(rows)
            else:
                recording.add(rows)
            progress.say(f"file {number} of {len(paths)}: {recording.counted.rows} rows read")
    analysis = analyst.analyse(
        recording,
        lambda done, of: progress.say(f"window {done} of {of} judged"),
        lambda done, of: progress.say(f"{done} of {of} pairs looked up"),
    )
    answer = to_json(analysis, recording)
    print(json.dumps(answer, indent=2) if args.json else "\n".join(lines(answer)))
    return CODES[analysis.verdict]


def _files(given: list[str]) -> list[Path]:
    from pingmesh.records.errors import shown

    out: list[Path] = []
    for name in given:
        path = Path(name)
        try:
            found = sorted(p for p in path.iterdir() if p.suffix in (".parquet", ".arrow", ".csv"))
        except NotADirectoryError:
            out.append(path)
            continue
        except FileNotFoundError:
            raise ConfigError(f"--records: {name}: there is no such file or directory; correct the path.") from None
        except OSError as error:
            what = error.strerror
            raise ConfigError(f"--records: {shown(name)} cannot be read ({what}); name files or directories.") from None
        if not found:
            raise ConfigError(f"--records: {name} holds no .parquet, .arrow or .csv file; name the files.")
        out += found
    return out


def _read(path: Path, columns: Any, window_ns: int) -> Any:
    from pingmesh.records import files
    from pingmesh.records.columns import read_mapped

    if columns is not None:
        return read_mapped(path, columns, window_ns)
    if path.suffix not in (".parquet", ".arrow"):
        raise ConfigError(
            f"{path}: only .parquet and .arrow files carry our schema; for other files say which column is which with "
            "--columns."
        )
    return files.read(path)


class _Progress:
    """Lines on stderr, for runs that take long."""

    def __init__(self) -> None:
        self._start = self._said = time.monotonic()

    def say(self, text: str) -> None:
        now = time.monotonic()
        if now - self._said >= PROGRESS_S:
            self._said = now
            print(f"{now - self._start:6.0f} s  {text}", file=sys.stderr, flush=True)


def to_json(a: Analysis, recording: Recording) -> dict[str, Any]:
    """The whole answer as plain data."""
    from pingmesh.incidents import rfc3339
    from pingmesh.offline.analysis import unknown_names

    counted = recording.counted
    return {
        "verdict": a.verdict,
        "why": a.why or None,
        "incidents": [i.public() for i in a.incidents],
        "windows": [
            {
                "start": rfc3339(w.start_ns),
                "end": rfc3339(w.end_ns),
                "sent": w.sent,
                "lost": w.lost,
                "suspects": [
                    {
                        "component": v.component,
                        "component_type": v.component_type,
                        "direction": v.direction,
                        "symptom": v.symptom,
                        "class": v.cls,
                        "rate": v.rate,
                        "confidence": v.confidence,
                        "alternatives": v.alternatives,
                    }
                    for v in w.verdicts
                ],
            }
            for w in a.windows
        ],
        "findings": [
            {"kind": f.kind, "subject": f.subject, "since": rfc3339(f.since_ns), "text": f.text} for f in a.findings
        ],
        "coverage": a.coverage,
        "counted": {
            "rows": counted.rows,
            "evidence": counted.evidence,
            "packets": a.packets,
            "lost": a.lost,
            "set_aside": dict(counted.set_aside),
            "not_in_topology": sum(recording.names.unknown.values()),
            "names_not_in_topology": dict(unknown_names(recording, SHOWN_NAMES)),
            "paths_not_in_topology": counted.strange_paths,
            "flows_without_path": counted.no_path,
        },
    }


def lines(answer: dict[str, Any]) -> list[str]:
    """The same for people."""
    windows, counted = answer["windows"], answer["counted"]
    end = render.parse_time(windows[-1]["end"]) if windows else None
    out = [render.VERDICTS[answer["verdict"]] + (f": {answer['why']}" if answer["why"] else "")]
    if answer["incidents"]:
        out += render.incident_lines(answer["incidents"], end or datetime.now(UTC))
        out += [f"   {i['component']}: {i['evidence'].get('summary', '')}" for i in answer["incidents"]]
        out += render.alternatives_lines(answer["incidents"])
    out += [f"finding: {f['text']}" for f in answer["findings"]]
    if windows:
        out.append(f"{len(windows)} windows from {windows[0]['start']} to {windows[-1]['end']}")
    out.append(
        f"{counted['rows']} rows, of which {counted['evidence']} are evidence: {counted['packets']} packets, "
        f"{counted['lost']} lost"
    )
    out += [f"set aside: {rows} rows, {reason}" for reason, rows in counted["set_aside"].items()]
    if counted["not_in_topology"]:
        names = ", ".join(f"{n} ({rows})" for n, rows in counted["names_not_in_topology"].items())
        out.append(f"not in the topology: ends in {counted['not_in_topology']} rows, most of {names}")
    if counted["paths_not_in_topology"]:
        out.append(f"paths with elements that are not in the topology: {counted['paths_not_in_topology']} rows")
    if counted["flows_without_path"]:
        out.append(f"flows whose ends nothing in the topology joins: {counted['flows_without_path']}")
    if answer["coverage"] is not None:
        out.append(f"known paths cross {render.percent(answer['coverage'])} of the directed switch links")
    return out
