"""One fault in a running lab from injection to quiet, and whether the analyzer's answer was right."""

from __future__ import annotations

import datetime
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from pingmesh.lab.client import Lab
from pingmesh.lab.faults.draw import KINDS
from pingmesh.lab.judge import is_component, is_direction, is_symptom, is_wrong
from pingmesh.lab.namespaces import LabError

Json = dict[str, Any]

POLL_S = 0.2
JUDGE_AFTER_S = 2.0
DWELL_S = 4.0
"""How long the fault stays after it was judged: what is blamed late counts too."""
CLOSE_WITHIN_S = 40.0
RESTART_WATCH_S = 15.0
"""How long a fault that must bring no incident is watched."""
PATIENCE_S = {"link-1%": 90.0, "link-partial": 60.0, "link-congest": 60.0}
"""By pool, how long to wait for an incident; else DEFAULT_PATIENCE_S."""
DEFAULT_PATIENCE_S = 30.0


@dataclass
class Round:
    """`blamed`: incidents opened until judgement that name what was not broken; `blamed_later`: after it."""

    kind: str
    pool: str
    fault: str
    truth: Json
    opened_s: float | None = None
    seen_s: float | None = None
    closed_s: float | None = None
    component_right: bool = False
    direction_right: bool = False
    symptom_right: bool = False
    blamed: list[str] = field(default_factory=list)
    blamed_later: list[str] = field(default_factory=list)
    incidents: list[Json] = field(default_factory=list)
    left_open: list[str] = field(default_factory=list)
    """Incidents that were open before the fault."""

    @property
    def right(self) -> bool:
        """Component and direction as injected, and nothing else blamed."""
        return self.component_right and self.direction_right and not self.blamed

    def record(self) -> Json:
        """As JSON."""
        return {**asdict(self), "right": self.right}

    @staticmethod
    def of(record: Mapping[str, Any]) -> Round:
        """From `record()`."""
        return Round(**{k: v for k, v in record.items() if k != "right"})


def wilson(hits: int, n: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's score interval of a share (95 % by default); (0, 1) without trials."""
    if n == 0:
        return 0.0, 1.0
    p = hits / n
    centre = p + z * z / (2 * n)
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    scale = 1 + z * z / n
    return max(0.0, (centre - half) / scale), min(1.0, (centre + half) / scale)


def quantile(values: Sequence[float], q: float) -> float | None:
    """The value below which a share `q` lies (nearest rank); None without values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, math.ceil(q * len(ordered)) - 1))] if ordered else None


def name(incident: Mapping[str, Any]) -> str:
    """An incident in a few words."""
    direction = incident.get("direction")
    return f"{incident['component_type']} {incident['component']}" + (f" {direction}" if direction else "")


def incidents(lab: Lab) -> list[Json]:
    """All incidents; none while the controller is away."""
    try:
        return lab.incidents()
    except ConnectionError:
        return []


def open_incidents(lab: Lab) -> list[Json] | None:
    """Those open; None while the controller is away."""
    try:
        return [i for i in lab.incidents() if i["state"] == "open"]
    except ConnectionError:
        return None


def until(done: Callable[[], bool], seconds: float, pause: float = POLL_S) -> float | None:
    """Seconds until it became true; None if it did not in time."""
    start = time.monotonic()
    while not done():
        if time.monotonic() - start > seconds:
            return None
        time.sleep(pause)
    return time.monotonic() - start


def quiet(lab: Lab) -> bool:
    """All agents online, nearly every link walked as often as wanted, nothing open."""
    try:
        status = lab.status()
    except ConnectionError:
        return False
    agents = status.get("agents", 0)
    online = agents.get("online", 0) if isinstance(agents, dict) else agents
    coverage = status.get("coverage")
    covered = not lab.topology.links or (coverage or 0.0) >= 0.9
    return online >= len(lab.topology.hosts) and covered and open_incidents(lab) == []


def score(round_: Round, seen: Sequence[Json]) -> None:
    """Judge the incidents that opened since the injection."""
    truth = round_.truth
    named = next((i for i in seen if is_component(truth, i)), None)
    if truth["symptom"] is None:
        round_.component_right = round_.direction_right = round_.symptom_right = True
    elif named is not None:
        round_.component_right = True
        round_.direction_right = is_direction(truth, named)
        round_.symptom_right = is_symptom(truth, named)
    round_.blamed = [f"{name(i)} ({i['symptom']})" for i in seen if is_wrong(truth, i)]


def run(lab: Lab, kind: str, argv: Sequence[str], *, hurry: bool = False) -> Round:
    """Inject, wait, judge, clear, wait until closed. `hurry` neither dwells nor waits for the close."""
    pool = KINDS[kind].pool
    before = {str(i["id"]) for i in incidents(lab)}

    def new() -> list[Json]:
        return [i for i in incidents(lab) if str(i["id"]) not in before]

    left_open = [name(i) for i in open_incidents(lab) or []]
    start = time.monotonic()
    truth = lab.fault_add(argv)
    result = Round(kind, pool, str(truth["fault"]), truth, left_open=left_open)
    patience = RESTART_WATCH_S if pool == "restart" else PATIENCE_S.get(pool, DEFAULT_PATIENCE_S)
    found = until(lambda: bool(new()), patience)
    if found is not None:
        result.seen_s = time.monotonic() - start
        time.sleep(JUDGE_AFTER_S)
    seen = new()
    score(result, seen)
    if seen:
        first = min(parse_time(i["opened_at"]) for i in seen)
        result.opened_s = max(0.0, first - parse_time(truth["injected_at"]))
    if not hurry:
        time.sleep(DWELL_S)
    cleared = time.monotonic()
    result.truth = next((t for t in lab.fault_clear() if t["id"] == truth["id"]), truth)
    if hurry:
        return result
    if until(lambda: open_incidents(lab) == [], CLOSE_WITHIN_S) is not None:
        result.closed_s = time.monotonic() - cleared
    judged = {str(i["id"]) for i in seen}
    result.incidents = new()
    result.blamed_later = [
        f"{name(i)} ({i['symptom']})" for i in result.incidents if str(i["id"]) not in judged and is_wrong(truth, i)
    ]
    return result


def started(shape: Mapping[str, int]) -> Lab:
    """A new lab of that shape; ends the benchmark with a sentence where there can be none."""
    try:
        return Lab.up(progress=print, **shape)
    except LabError as error:
        raise SystemExit(str(error)) from None


def parse_time(text: str) -> float:
    """Seconds since the epoch of an RFC 3339 time."""
    return datetime.datetime.fromisoformat(text).timestamp()
