"""Fault scripts: YAML that says what breaks where and when, and how noisy the fabric is."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import yaml
from msgspec import Meta

from pingmesh.simulate.faults import Fault, FaultError, Kind, Placed, Places
from pingmesh.simulate.probes import Lists
from pingmesh.simulate.troubles import Noise

Positive = Annotated[float, Meta(gt=0, le=1_000_000)]
"""Of a rate in probes/s, or of a delay in us: beyond these nothing is simulated."""
Seconds = Annotated[float, Meta(ge=0.0001, le=3600)]
"""Of a burst or stall; as many as fit into a window may be drawn."""
Rate = Annotated[float, Meta(ge=0, le=10)]
"""Events/s of each element or agent."""
Number = Annotated[int, Meta(ge=1, le=10_000)]
Time = Annotated[float, Meta(ge=0, le=1_000_000_000)]
End = Annotated[float, Meta(gt=0, le=1_000_000_000)]
Share = Annotated[float, Meta(ge=0, le=1)]

_WHOLE = frozenset({"blackhole", "flow_blackhole", "flap", "link_down", "switch_down", "rnic_down", "host_down"})
"""Symptoms of losing everything: with a `rate` the truth would not be true."""


class FaultEntry(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """One fault. Without `component` it is put at a random place (of the sort `place`), `count` times."""

    kind: str
    component: str | None = None
    place: Literal["link", "rnic", "leg", "switch", "host"] | None = None
    count: Number = 1
    direction: str | None = None
    start_s: Time = 0.0
    end_s: End | None = None
    rate: Share | None = None
    share: Share | None = None
    delay_us: Positive | None = None
    burst_s: Seconds | None = None


class NoiseEntry(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """See `pingmesh.simulate.troubles.Noise`; what is left out has its default."""

    hop_loss: Share | None = None
    burst_rate: Rate | None = None
    burst_s: Seconds | None = None
    burst_loss: Share | None = None
    stall_rate: Rate | None = None
    stall_s: Seconds | None = None
    restart_rate: Rate | None = None
    missing_report: Share | None = None
    reroute_rate: Rate | None = None


class ListsEntry(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """See `pingmesh.simulate.probes.Lists`."""

    link_rate: Positive | None = None
    link_tuples: Number | None = None
    mesh_rate: Positive | None = None
    mates: Number | None = None
    large_share: Share | None = None
    other_share: Share | None = None


class Script(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A whole file."""

    faults: list[FaultEntry] = []
    noise: NoiseEntry = msgspec.field(default_factory=NoiseEntry)
    lists: ListsEntry = msgspec.field(default_factory=ListsEntry)
    spray: bool = False

    def noise_settings(self) -> Noise:
        """Noise with the file's values."""
        return Noise(**_given(self.noise))

    def list_settings(self) -> Lists:
        """Lists with the file's values."""
        return Lists(**_given(self.lists))


class ScriptError(ValueError):
    """A fault script that cannot be used."""

    def __init__(self, source: str, problem: str) -> None:
        self.source = source
        super().__init__(f"{source}: {problem}")


def _given(entry: msgspec.Struct) -> dict[str, Any]:
    return {k: v for k, v in msgspec.structs.asdict(entry).items() if v is not None}


def load(path: str | Path) -> Script:
    """Read a script. Raises ScriptError with the key that is wrong."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ScriptError(
            str(path), f"cannot be read ({getattr(error, 'strerror', None) or error}); give the path of a script"
        ) from None
    return parse(text, str(path))


def parse(text: str, source: str = "<script>") -> Script:
    """Read the text of a script. Raises ScriptError."""
    try:
        data = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f"line {mark.line + 1}: " if mark is not None else ""
        raise ScriptError(source, f"{line}this is no YAML; mend the text there") from None
    try:
        return msgspec.convert(data if data is not None else {}, Script)
    except msgspec.ValidationError as error:
        raise ScriptError(source, f"{error}; docs/records.md shows the form") from None


def place_all(script: Script, places: Places, rng: np.random.Generator, source: str = "<script>") -> list[Placed]:
    """Every fault of a script at its place. Raises ScriptError."""
    out: list[Placed] = []
    for number, entry in enumerate(script.faults, 1):
        try:
            for _ in range(entry.count):
                out.append(places.place(_fault(entry, places, rng)))
        except FaultError as error:
            raise ScriptError(source, f"fault {number}: {error}") from None
    return out


def _check_keys(entry: FaultEntry, how: Kind) -> None:
    """Refuse keys that would do nothing, or make something else of the kind. Raises FaultError."""
    if entry.component is not None:
        if entry.place is not None:
            raise FaultError("'place' is for a random place; leave it or 'component' out")
        if entry.count != 1:
            raise FaultError(f"'count' {entry.count} is for random places; leave it or 'component' out")
    elif entry.direction is not None:
        raise FaultError("a direction needs a component")
    for key, applies, remedy in (
        ("rate", how.rate > 0, "loses nothing"),
        ("rate", how.symptom not in _WHOLE or entry.rate == how.rate, "loses all that it hits"),
        ("share", how.rate > 0 or entry.share == how.share, "loses nothing"),
        ("delay_us", how.delay_us > 0, "adds no delay"),
        ("burst_s", how.burst_s is not None, "does not come in bursts"),
    ):
        if getattr(entry, key) is not None and not applies:
            raise FaultError(f"{key!r} is not for the kind {entry.kind}, which {remedy}; leave it out")


def _fault(entry: FaultEntry, places: Places, rng: np.random.Generator) -> Fault:
    end = float("inf") if entry.end_s is None else entry.end_s
    if end <= entry.start_s:
        raise FaultError(f"end_s {end:g} is not after start_s {entry.start_s:g}")
    _check_keys(entry, places.kind(entry.kind))
    numbers = {"start_s": entry.start_s, "end_s": end}
    optional = {"rate": entry.rate, "share": entry.share, "delay_us": entry.delay_us, "burst_s": entry.burst_s}
    numbers |= {k: v for k, v in optional.items() if v is not None}
    if entry.component is None:
        return places.draw(entry.kind, rng, entry.place, **numbers)
    return Fault(kind=entry.kind, component=entry.component, direction=entry.direction, **numbers)
