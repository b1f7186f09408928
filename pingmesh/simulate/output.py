"""Simulated counts as record files, with the truth beside them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pingmesh.analyzer.table import Bools, Ints, pointer
from pingmesh.records import files
from pingmesh.records.model import (
    ACK,
    PROBE,
    ROUND_TRIP,
    UNKNOWN,
    VALIDITIES,
    Coded,
    HostFact,
    PathColumn,
    Records,
    concat,
)
from pingmesh.simulate.fabric import Fabric, Small
from pingmesh.simulate.faults import Placed
from pingmesh.simulate.probes import CLASSES
from pingmesh.simulate.world import BACK, THERE, Counts, World

SECOND = 1_000_000_000
EPOCH_NS = 1_767_225_600 * SECOND
"""Simulated time begins with 2026."""
_VALID, _PROBER, _TARGET, _DARK = range(len(VALIDITIES))


class RecordMaker:
    """Turns the counts of one world into records; name columns are shared between windows."""

    def __init__(self, world: World, epoch_ns: int = EPOCH_NS) -> None:
        self._world = world
        self._epoch = epoch_ns
        rnics = world.fabric.topology.rnics.values()
        addresses = [r.address for r in rnics]
        known = [a for a in addresses if a is not None]
        self._addresses = tuple(dict.fromkeys(known))
        index = {a: i for i, a in enumerate(self._addresses)}
        self._address_of = np.array([-1 if a is None else index[a] for a in addresses], np.int32)

    def records(self, c: Counts) -> Records:
        """One row a flow and role with packets: both directions where both ends counted, else round trips."""
        w = self._world
        both, alone = c.both, ~c.both
        rtt = (c.answered, c.rtt_sum_ns)
        parts = [
            self._rows(c, PROBE, both, c.sent, c.sent - c.received, c.known_there, [w.told[THERE]], rtt),
            self._rows(c, ACK, both, c.acks_sent, c.acks_sent - c.acks_back, c.known_back, [w.told[BACK]], None),
            self._rows(c, ROUND_TRIP, alone, c.sent, c.sent - c.answered, c.known_there & c.known_back, w.told, rtt),
        ]
        return concat([p for p in parts if len(p)] or parts[:1])

    def _rows(
        self,
        c: Counts,
        role: int,
        wanted: Bools,
        sent: Ints,
        lost: Ints,
        known: Bools,
        paths: Sequence[Small],
        rtt: tuple[Ints, Ints] | None,
    ) -> Records:
        f, fabric = self._world.flows, self._world.fabric
        at = np.flatnonzero(wanted & (sent > 0))
        rows = c.flows[at]
        n = len(at)
        validity = np.where(c.prober_aside[at], _PROBER, np.where(c.target_aside[at], _TARGET, _VALID))
        validity = np.where(c.dark[at], _DARK, validity)
        src, dst = f.src[rows].astype(np.int32), f.dst[rows].astype(np.int32)
        none = np.full(n, UNKNOWN)
        return Records(
            start_ns=np.full(n, self._epoch + round(c.start_s * SECOND)),
            end_ns=np.full(n, self._epoch + round(c.end_s * SECOND)),
            role=np.full(n, role),
            prober=Coded(src, fabric.rnics),
            target=Coded(dst, fabric.rnics),
            prober_address=Coded(self._address_of[src], self._addresses),
            target_address=Coded(self._address_of[dst], self._addresses),
            source_port=f.sport[rows],
            cls=Coded(f.cls[rows].astype(np.int32), CLASSES),
            sent=sent[at],
            lost=lost[at],
            overdue=none,
            rtts=rtt[0][at] if rtt else np.zeros(n, np.int64),
            rtt_sum_ns=rtt[1][at] if rtt else np.zeros(n, np.int64),
            rtt_p50_ns=none,
            rtt_p99_ns=none,
            rtt_max_ns=none,
            path=self._path(np.concatenate([p[rows] for p in paths], axis=1), known[at]),
            validity=Coded(validity.astype(np.int32), VALIDITIES),
            confirmed=np.zeros(n, bool),
        )

    def _path(self, paths: Small, known: Bools) -> PathColumn:
        there = (paths >= 0) & known[:, None]
        elements = Coded(paths[there], self._world.fabric.element_names)
        return PathColumn(pointer(there.sum(axis=1)), elements, known)

    def facts(self, start_s: float, end_s: float) -> list[HostFact]:
        """What is known of every host at the end of a window."""
        w = self._world
        hosts = tuple(w.fabric.topology.hosts)
        t = w.troubles
        stall_ms = 1e3 * t.stalls.longest(start_s, end_s, len(hosts))
        aside = t.set_aside(start_s, end_s, len(hosts))
        out = []
        changes: dict[int, dict[str, Any]] = {}
        columns = (t.restarts.what, t.restarts.start, t.restarts.end, t.crashes)
        for what, a, b, crashed in zip(*(c.tolist() for c in columns), strict=True):
            if a < end_s <= b:
                state = "died" if crashed else "stopped"
                changes[what] = {"state": state, "state_since_ns": self._at(a), "heard_ns": self._at(a)}
            elif b < end_s:
                changes[what] = {"rebooted_ns": self._at(b)}
        for p in w.faults:
            if not p.active(start_s, end_s):
                continue
            for rnic in p.rnics.tolist():
                self._of_fault(p, rnic, start_s, end_s, changes.setdefault(int(w.fabric.host_of[rnic]), {}))
        for i, host in enumerate(hosts):
            fact: dict[str, Any] = {
                "heard_ns": self._at(end_s),
                "stall_ms": float(stall_ms[i]),
                "set_aside": bool(aside[i]),
            }
            fact |= changes.get(i, {})
            fact["set_aside"] = fact["set_aside"] or "state" in fact or fact["stall_ms"] >= 250.0
            out.append(HostFact(start_ns=self._at(start_s), end_ns=self._at(end_s), host=host, **fact))
        return out

    def _of_fault(self, p: Placed, rnic: int, start_s: float, end_s: float, fact: dict[str, Any]) -> None:
        since = self._at(p.fault.start_s)
        if p.how.is_silent:
            fact |= {"unanswered": 3, "silent_since_ns": since, "heard_ns": since, "set_aside": True}
        if p.how.stall_ms:
            fact["stall_ms"] = p.how.stall_ms * float(self._world.rng.uniform(0.5, 1.5))
        if p.how.is_dark and p.active(max(start_s, end_s - 1.0), end_s):
            device = self._world.fabric.rnics[rnic].partition("/")[2]
            fact["dark"] = (*fact.get("dark", ()), device)

    def _at(self, seconds: float) -> int:
        return self._epoch + round(seconds * SECOND)


def write_windows(
    world: World,
    out: Path,
    windows: int,
    about: dict[str, str],
    *,
    window_s: float = 5.0,
    suffix: str = ".parquet",
    done: Callable[[int, int], None] = lambda window, rows: None,
) -> int:
    """Simulate `windows` and write each as `flows-N` and `hosts-N`, both or neither. Returns the rows written.

    Raises:
        RecordsError: pyarrow is missing.
        OSError: the directory cannot be written.
    """
    maker = RecordMaker(world)
    total = 0
    about = {"source": "sim", "window_ns": str(round(window_s * SECOND)), **about}
    for n in range(windows):
        start, end = n * window_s, (n + 1) * window_s
        records = maker.records(world.step(start, end))
        pair = [out / f"{kind}-{n:06d}{suffix}" for kind in ("flows", "hosts")]
        try:
            files.write(pair[0], records, about)
            files.write(pair[1], maker.facts(start, end), about)
        except BaseException:  # Ctrl-C too: flows without their hosts' facts would be judged otherwise
            for path in pair:
                path.unlink(missing_ok=True)
            raise
        total += len(records)
        done(n + 1, len(records))
    return total


def truth(fabric: Fabric, faults: Sequence[Placed], about: dict[str, object]) -> dict[str, object]:
    """What `truth.json` holds: the faults in the words of incidents, and how the files were made."""
    return {
        "cluster": fabric.topology.cluster,
        "epoch_ns": EPOCH_NS,
        **about,
        "faults": [p.truth(EPOCH_NS) for p in faults],
    }


def write_truth(path: Path, content: dict[str, object]) -> None:
    """Write it as JSON, whole or not at all. Raises OSError."""
    write_text(path, json.dumps(content, indent=1) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a file, whole or not at all. Raises OSError."""
    part = path.with_name(f".{path.name}.part")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
