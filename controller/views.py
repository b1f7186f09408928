"""What the API shows of the controller's state, as plain JSON values."""

from __future__ import annotations

import datetime
import re
from collections.abc import Collection
from typing import TYPE_CHECKING

from controller import clock
from controller.registry import Presence
from pingmesh.incidents import rfc3339
from topology.model import Topology

if TYPE_CHECKING:
    from controller.service import Controller

_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}


def parse_since(text: str, now_ns: int | None = None) -> int:
    """Nanoseconds of ages (`10m`, or a bare number of seconds), RFC 3339 times or empty (0).

    Raises ValueError with a remedy.

    >>> parse_since("10m", now_ns=1_000_000_000_000)
    400000000000
    """
    if not text:
        return 0
    age = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text.strip())
    if age:
        return (clock.now_ns() if now_ns is None else now_ns) - round(float(age[1]) * _UNITS[age[2]] * 1e9)
    try:
        at = datetime.datetime.fromisoformat(text.strip().replace(" ", "+"))
    except ValueError:
        raise ValueError(
            f"since is {text!r}: give an age such as 10m or 2h, or a time such as 2026-01-31T03:00:00Z"
        ) from None
    if at.tzinfo is None:
        at = at.replace(tzinfo=datetime.UTC)
    return round(at.timestamp() * 1e9)


def status(c: Controller) -> dict[str, object]:
    """The answer to "is all well?": `healthy` is that no incident is open and that there is data to say so."""
    now = clock.now_ns()
    summary = c.fresh_summary(now)
    agents = c.agents(now)
    analyzer = c.analyzer_alive(now)
    enough = analyzer and c.enough_data and bool(agents["online"])
    return {
        "cluster": c.settings.cluster,
        "healthy": enough and not c.store.open,
        "enough_data": enough,
        "coverage": c.planner.coverage.share,
        "agents": agents,
        "open_incidents": len(c.store.open),
        "findings": len(c.store.findings()),
        "rtt_us": summary.rtt_us if summary else {},
        "probes": {
            "span_s": summary.span_s if summary else None,
            "sent": sum(r.sent for r in summary.rnics) if summary else None,
            "rejected_messages": (summary.rejected if summary else 0) + c.bus.rejected.total(),
        },
        "analyzer": {"alive": analyzer, "heard_at": rfc3339(c.verdicts_ns or None)},
        "lists": {
            "phase": c.planner.phase.value,
            "tuples": c.planner.coverage.tuples,
            "untraced": c.planner.coverage.untraced,
        },
        "at": rfc3339(now),
    }


def coverage(c: Controller) -> dict[str, object]:
    """Which directed links are walked, how, and why others are not."""
    r = c.planner.coverage
    return {
        "share": r.share,
        "links": [{"link": w.link, "flows": w.flows, "rate": w.rate, "covered": w.covered} for w in r.links],
        "uncovered_rnics": list(r.uncovered_rnics),
        "reasons": dict(r.reasons),
        "tuples": r.tuples,
        "untraced": r.untraced,
        "phase": c.planner.phase.value,
    }


def rnics(c: Controller, names: Collection[str] = ()) -> list[dict[str, object]]:
    """Every RNIC known, or those of these names that are, by number."""
    now = clock.now_ns()
    listed = c.registry.listed(now)
    out: list[dict[str, object]] = []
    wanted = [r for n in names if (r := c.registry.rnics.get(n))] if names else c.registry.rnics.values()
    for r in sorted(wanted, key=lambda r: r.number):
        agent = c.registry.agents.get(r.host)
        sheet = c.book.sheets.get(r.name)
        flows = sheet.flows if sheet else []
        out.append(
            {
                "name": r.name,
                "number": r.number,
                "address": r.info.address,
                "gid": r.info.gid,
                "qpn": r.info.qpn,
                "qkey": r.info.qkey,
                "epoch": r.info.epoch,
                "mtu": r.info.mtu,
                "up": r.info.up,
                "transport": r.info.transport,
                "agent": (agent.presence if agent else Presence.DIED).value,
                "in_topology": r.name in c.topology.rnics,
                "listed": r.name in listed,
                "since": rfc3339(r.since_ns),
                "list_version": c.book.versions.get(r.name),
                "flows": len(flows),
                "rate": round(sum(1e6 / f.interval_us for f in flows), 3),
            }
        )
    return out


def topology(t: Topology) -> dict[str, object]:
    """The fabric, for drawing it."""
    return {
        "cluster": t.cluster,
        "switches": [{"name": s.name, "tier": s.tier} for s in t.switches.values()],
        "rnics": [
            {"name": r.name, "host": r.host, "tors": [leg.switch for leg in r.legs], "rail": r.rail, "group": r.group}
            for r in t.rnics.values()
        ],
        "links": [{"name": k.name, "a": k.a, "b": k.b} for k in t.links],
    }
