"""Words for people: incidents, findings, status and diagnoses as text. Takes the API's JSON, returns lines."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pingmesh.cli.evidence import evidence_lines

Json = Mapping[str, Any]

SYMPTOMS = {
    "drop": "loses {rate} of packets",
    "blackhole": "loses every packet",
    "flow_blackhole": "loses every packet of some flows ({rate} of the 5-tuples), the others pass",
    "large_packet_drop": "drops large packets ({rate}), small ones pass",
    "class_drop": "drops one traffic class{cls} ({rate}), the others pass",
    "link_down": "is down",
    "flap": "goes down and up again and again",
    "high_rtt": "is slow: packets are late, not lost",
    "rnic_down": "is down",
    "switch_down": "is down",
    "host_down": "is down, frozen or cut off",
    "agent_down": "has lost its agent; nothing is known against its network",
    "cpu_overload": "is short of CPU: its agent stalls, its delays are not the network's",
}
"""What follows the component's name."""

VERDICTS = {
    "network": "NETWORK",
    "host": "HOST",
    "innocent": "NOT THE NETWORK",
    "insufficient_data": "NOT ENOUGH DATA",
}

NAMES = {"rnic": "RNIC", "leg": "RNIC leg"}


# ---------------------------------------------------------------- small things


def percent(share: float | None, digits: int = 0) -> str:
    """`30 %`; below one per cent with the digits that matter; `unknown` for None."""
    if share is None:
        return "unknown"
    value = share * 100
    if 0 < value < 1:
        return f"{value:.2g} %"
    return f"{value:.{digits}f} %"


def parse_time(text: object) -> datetime.datetime | None:
    """RFC 3339 back; None for what is none."""
    if not isinstance(text, str):
        return None
    try:
        at = datetime.datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError:
        return None
    return at if at.tzinfo else at.replace(tzinfo=datetime.UTC)


def duration(seconds: float) -> str:
    """`41 s`, `3 min`, `5 h`, `2 days`."""
    for limit, size, unit in ((120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if seconds < limit:
            return f"{max(0, round(seconds / size))} {unit}"
    return f"{round(seconds / 86_400)} days"


def since(text: object, now: datetime.datetime) -> str:
    """`since 14:03:07 UTC (41 s ago)`, with the date when it is not today's; empty if unknown."""
    at = parse_time(text)
    if at is None:
        return ""
    day = "" if at.date() == now.date() else f"{at:%Y-%m-%d} "
    return f"since {day}{at:%H:%M:%S} UTC ({duration((now - at).total_seconds())} ago)"


def when(incident: Json, now: datetime.datetime) -> str:
    """`since 14:03:07 UTC (41 s ago)`, or for one that is over `from ... to ...`."""
    closed = parse_time(incident.get("closed_at"))
    opened = since(incident.get("opened_at"), now)
    if closed is None:
        return opened
    return f"{opened.replace('since', 'from', 1).partition(' UTC')[0]} to {closed:%H:%M:%S} UTC (over)"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Left-aligned columns, two spaces apart."""
    all_rows = [list(head), *map(list, rows)]
    widths = [max(len(r[i]) for r in all_rows) for i in range(len(head))]
    return ["  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)).rstrip() for r in all_rows]


# ---------------------------------------------------------------- incidents


def subject(incident: Json) -> str:
    """`link leaf1->spine2`, `RNIC h3/rnic0, sending side`, `switch spine1`."""
    kind = str(incident["component_type"])
    name = str(incident["component"])
    direction = incident.get("direction")
    word = NAMES.get(kind, kind)
    if kind == "link":
        return (
            f"{word} {direction}"
            if direction and "->" in direction
            else f"{word} {name}, both directions"
            if direction == "both"
            else f"{word} {name}"
        )
    side = {"tx": ", sending side", "rx": ", receiving side"}.get(str(direction), "")
    return f"{word} {name}{side}"


def rate(incident: Json) -> str:
    """`30 % (27-34 %)`; words if no rate is known."""
    value, low, high = (incident.get(k) for k in ("rate", "rate_low", "rate_high"))
    if value is None:
        return "an unknown share"
    if low is None or high is None or high - low < 0.01:
        return percent(value)
    return f"{percent(value)} ({low * 100:.0f}-{percent(high)})"


def sentence(incident: Json) -> str:
    """`link leaf1->spine2 loses 30 % (27-34 %) of packets`."""
    cls = incident.get("class")
    words = SYMPTOMS.get(str(incident["symptom"]), str(incident["symptom"]))
    return f"{subject(incident)} {words.format(rate=rate(incident), cls=f' ({cls})' if cls else '')}"


def incident_lines(incidents: Sequence[Json], now: datetime.datetime) -> list[str]:
    """A table of incidents; a sentence if there are none."""
    if not incidents:
        return ["no incidents"]
    rows = []
    for i in incidents:
        closed = parse_time(i.get("closed_at"))
        opened = parse_time(i["opened_at"])
        open_for = duration(((closed or now) - opened).total_seconds()) if opened else ""
        state = f"closed after {open_for}" if closed else f"open {open_for}"
        rows.append((str(i["id"]), state, str(i["priority"]), sentence(i), percent(i.get("confidence"))))
    return table(("ID", "STATE", "PRIORITY", "WHAT", "CONFIDENCE"), rows)


def follow_line(incident: Json) -> str:
    """One line of `incidents --follow`: when, opened or closed or changed, what."""
    at = parse_time(incident.get("closed_at") or incident["opened_at"])
    when = f"{at:%H:%M:%S} " if at else ""
    sure = percent(incident.get("confidence"))
    return f"{when}{incident['state']:<6} {incident['id']}  {sentence(incident)}  (confidence {sure})"


def finding_lines(findings: Sequence[Json], now: datetime.datetime) -> list[str]:
    """A table of findings; a sentence if there are none."""
    if not findings:
        return ["no findings"]
    rows = [(str(f["kind"]), str(f["subject"]), since(f.get("since"), now), str(f["text"])) for f in findings]
    return table(("KIND", "SUBJECT", "SINCE", "WHAT"), rows)


# ---------------------------------------------------------------- status


def status_lines(status: Json, now: datetime.datetime) -> list[str]:
    """The answer first: healthy, broken, or not known; then how well the fabric is watched."""
    incidents: Sequence[Json] = status.get("incidents") or []
    count = status.get("open_incidents") or 0
    if count:
        lines = [f"BROKEN: {count} open incident{'s' if count != 1 else ''}"]
    elif status.get("healthy"):
        lines = ["HEALTHY: no open incidents"]
    else:
        lines = [f"NOT KNOWN: not enough data ({why_unknown(status)})"]
    lines += [f"  {sentence(i)}, {since(i.get('opened_at'), now)}" for i in incidents]
    lines += [f"  {k:<9} {v}" for k, v in facts(status)]
    return lines


def why_unknown(status: Json) -> str:
    """Why there is no verdict, as far as the status tells."""
    if not (status.get("analyzer") or {}).get("alive", True):
        return "the controller does not hear the analyzer"
    counts = status.get("agents")
    if isinstance(counts, Mapping) and not counts.get("online"):
        return "no agent is online"
    return "the first results have yet to come in"


def facts(status: Json) -> list[tuple[str, str]]:
    """Name and value of what else the status knows."""
    coverage = status.get("coverage")
    covered = (
        percent(coverage, 1) + " of directed switch links walked at their rate"
        if coverage is not None
        else "no switch links"
    )
    out = [("agents", agents(status.get("agents"))), ("coverage", covered)]
    rtt = status.get("rtt_us") or {}
    if rtt:
        out.append(("RTT", ", ".join(f"{k} {v:.0f} µs" for k, v in rtt.items())))
    if status.get("findings"):
        out.append(("findings", f"{status['findings']} (pingmesh findings)"))
    return out


def agents(value: object) -> str:
    """`14 of 16 online; died: h3; silent: h9`."""
    if not isinstance(value, Mapping):
        return "unknown"
    of = f" of {value['expected']}" if "expected" in value else ""
    away = [
        f"; {state}: {', '.join(hosts[:5])}" + (f" and {len(hosts) - 5} more" if len(hosts) > 5 else "")
        for state, hosts in value.items()
        if isinstance(hosts, (list, tuple)) and hosts
    ]
    return f"{value.get('online', 0)}{of} online" + "".join(away)


# ---------------------------------------------------------------- diagnose


def alternatives_lines(incidents: Iterable[Json]) -> list[str]:
    """What the evidence cannot tell apart."""
    return [
        f"  The evidence cannot tell {i['component']} from {', '.join(i['alternatives'])}."
        for i in incidents
        if i.get("alternatives")
    ]


def diagnosis_lines(diagnosis: Json, hosts: Sequence[str], now: datetime.datetime) -> list[str]:
    """The answer, then the evidence, then what to do."""
    verdict = str(diagnosis["verdict"])
    incidents: Sequence[Json] = diagnosis.get("incidents") or []
    between = " and ".join(hosts) if len(hosts) <= 2 else ", ".join(hosts)
    head = VERDICTS.get(verdict, verdict.upper())
    evidence: Json = diagnosis.get("evidence") or {}
    if incidents and verdict in ("network", "host"):
        lines = [f"{head}: {_told(incidents[0], now)}"]
        lines += [f"{'also':>{len(head)}}: {_told(i, now)}" for i in incidents[1:]]
    elif verdict == "innocent":
        lines = [f"{head}: nothing is wrong on the fabric {'around' if len(hosts) == 1 else 'between'} {between}"]
    else:
        why = "; ".join(evidence.get("missing") or ()) or "too little was measured"
        lines = [f"{head} about {between}: {why}"]
    lines += alternatives_lines(incidents)
    body: list[str] = []
    for i in incidents:
        told = evidence_lines(i.get("evidence"))
        body += [f"{i['component']}:", *(f"  {x}" for x in told)] if told and len(incidents) > 1 else told
    body += evidence_lines(evidence)
    if coverage := diagnosis.get("coverage"):
        body.append(coverage_line(coverage))
    lines += ["", "Evidence", *(f"  {x}" for x in body)] if body else []
    if findings := diagnosis.get("findings"):
        lines += ["", "Also noticed (no fault of the fabric)", *(f"  {f['subject']}: {f['text']}" for f in findings)]
    if steps := diagnosis.get("next"):
        lines += ["", "What to do", *(f"  {n}. {s}" for n, s in enumerate(steps, 1))]
    return lines


def _told(incident: Json, now: datetime.datetime) -> str:
    return f"{sentence(incident)}, {when(incident, now)}, confidence {percent(incident.get('confidence'))}"


def coverage_line(coverage: Json) -> str:
    """`coverage: 6 of 8 directed links between them probed as often as wanted (not leaf1->spine2, spine2->leaf2)`."""
    if not coverage.get("links"):
        return "coverage: no switch link lies between them"
    missing = coverage.get("not_covered") or []
    short = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
    return (
        f"coverage: {coverage['covered']} of {coverage['links']} directed links between them probed as often as wanted"
        + (f" (not {short})" if missing else f", each by {coverage.get('fewest_tuples')} 5-tuples or more")
    )
