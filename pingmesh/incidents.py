"""Incidents and findings, as the store keeps them and as users see them."""

from __future__ import annotations

import datetime
from typing import Literal

import msgspec

ComponentType = Literal["host", "rnic", "leg", "link", "switch", "tier"]
Symptom = Literal[
    "drop",
    "blackhole",
    "flow_blackhole",
    "large_packet_drop",
    "class_drop",
    "link_down",
    "flap",
    "high_rtt",
    "rnic_down",
    "switch_down",
    "host_down",
    "agent_down",
    "cpu_overload",
]


def rfc3339(ns: int | None) -> str | None:
    """Nanoseconds since the epoch as RFC 3339 UTC with milliseconds."""
    if ns is None:
        return None
    t = datetime.datetime.fromtimestamp(ns / 1e9, tz=datetime.UTC)
    return t.isoformat(timespec="milliseconds").replace("+00:00", "Z")


class Incident(msgspec.Struct, kw_only=True):
    """One fault over its life. Times are nanoseconds inside and RFC 3339 in `public()`."""

    id: str
    cluster: str
    component: str
    component_type: ComponentType
    symptom: Symptom
    opened_at: int
    ends: list[str] = []
    direction: str | None = None
    cls: str | None = None
    rate: float | None = None
    rate_low: float | None = None
    rate_high: float | None = None
    state: Literal["open", "closed"] = "open"
    closed_at: int | None = None
    confidence: float = 0.0
    priority: Literal["P0", "P1", "P2"] = "P2"
    alternatives: list[str] = []
    evidence: dict[str, object] = {}
    history: list[dict[str, object]] = []

    def public(self) -> dict[str, object]:
        """What `--json`, the API and MQTT show; `cls` is called `class` there."""
        d: dict[str, object] = msgspec.to_builtins(self)
        d["class"] = d.pop("cls")
        d["opened_at"] = rfc3339(self.opened_at)
        d["closed_at"] = rfc3339(self.closed_at)
        d["history"] = [{**h, "at": rfc3339(at) if isinstance(at := h.get("at"), int) else at} for h in self.history]
        return d


class Finding(msgspec.Struct, kw_only=True):
    """What is wrong but is no fault in the fabric."""

    id: str
    kind: str
    subject: str
    since: int
    text: str

    def public(self) -> dict[str, object]:
        """What `--json` and the API show."""
        d: dict[str, object] = msgspec.to_builtins(self)
        d["since"] = rfc3339(self.since)
        return d
