"""Is the network to blame for what these hosts see? The data behind `pingmesh diagnose`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from controller.advice import steps
from controller.clock import now_ns
from controller.reach import Reach
from pingmesh.incidents import Incident, rfc3339
from pingmesh.messages import LinkSummary, Summary

if TYPE_CHECKING:
    from controller.service import Controller

COVERED_ENOUGH = 0.9
"""Below this share of covered links nobody is called innocent."""
SHOWN_LINKS = 5


@dataclass(frozen=True)
class Concern:
    """What lies between hosts: everything whose fault they would feel."""

    hosts: frozenset[str]
    rnics: frozenset[str]
    links: frozenset[str]
    """Directed switch links on any ECMP path between their RNICs, both ways."""
    cables: frozenset[str]
    switches: frozenset[str]

    def touches(self, incident: Incident) -> bool:
        """Whether an incident, or one of its alternatives, is in here."""
        return self._is_in(incident.component, incident.direction, incident.component_type) or any(
            self._is_in(name, None, None) for name in incident.alternatives
        )

    def _is_in(self, name: str, direction: str | None, kind: str | None) -> bool:
        if kind == "tier":
            return True
        if name in self.cables:
            return direction is None or "->" not in direction or direction in self.links
        plain = name.removesuffix(" tx").removesuffix(" rx").split("@")[0]
        return plain in self.hosts or plain in self.rnics or plain in self.switches or plain in self.links


def concern(reach: Reach, hosts: Sequence[str]) -> Concern:
    """What lies between these hosts; for a single host, between it and all it may reach."""
    t = reach.topology
    rnics = [r for h in hosts for r in t.hosts[h]]
    units = {reach.unit_of[r.name] for r in rnics}
    links: set[str] = set()
    for a in units:
        for b in units if len(hosts) > 1 else reach.partners(a):
            if a is not b:
                links |= reach.shares(a, b).keys() | reach.shares(b, a).keys()
    directed = [d for d in t.directed_links if d.name in links]
    switches = {leg.switch for r in rnics for leg in r.legs} | {s for d in directed for s in (d.source, d.target)}
    return Concern(
        frozenset(hosts),
        frozenset(r.name for r in rnics),
        frozenset(links),
        frozenset(d.link.name for d in directed),
        frozenset(switches),
    )


def diagnose(c: Controller, hosts: Sequence[str], since_ns: int = 0) -> dict[str, object]:
    """Verdict, incidents, findings, coverage, evidence and next steps for these hosts (names of the topology)."""
    now = now_ns()
    hosts = list(dict.fromkeys(hosts))
    around = concern(c.reach, hosts)
    incidents = [i for i in c.store.incidents(None, since_ns or now) if around.touches(i)]
    incidents.sort(key=lambda i: (i.state != "open", i.symptom == "agent_down", -i.confidence, i.opened_at))
    findings = [f for f in c.store.findings() if f.subject.split("/")[0] in around.hosts or f.subject in around.cables]
    lacking = _lacking(c, around, hosts, now)
    verdict = _verdict(incidents, lacking)
    advice = [s for i in incidents if i.state == "open" for s in steps(i)]
    if not advice:
        advice = _advice(verdict, incidents, lacking)
    return {
        "verdict": verdict,
        "hosts": list(hosts),
        "incidents": [i.public() for i in incidents],
        "findings": [f.public() for f in findings],
        "coverage": _coverage(c, around),
        "evidence": _evidence(c, around, hosts, verdict, lacking, now),
        "next": list(dict.fromkeys(advice)),
        "since": rfc3339(since_ns or None),
        "at": rfc3339(now),
    }


def _verdict(incidents: Sequence[Incident], lacking: Sequence[str]) -> str:
    """Faults of the fabric first, then of hosts; innocent only where everything was watched."""
    kinds = {i.component_type for i in incidents}
    if kinds - {"host"}:
        return "network"
    if any(i.symptom != "agent_down" for i in incidents):
        return "host"
    return "insufficient_data" if lacking or incidents else "innocent"


def _lacking(c: Controller, around: Concern, hosts: Sequence[str], now: int) -> list[str]:
    """What stands against calling the network innocent."""
    out = []
    if not c.analyzer_alive(now):
        out.append("the analyzer has not been heard of for 20 s")
    elif not c.enough_data:
        out.append("the analyzer has not enough data yet")
    elif not (summary := c.fresh_summary(now)) or not _totals(_between(summary, around))[0]:
        out.append("nothing has been measured between them in the last minute")
    running = c.registry.walking()
    out += [f"no agent runs on {h}" for h in hosts if h not in running]
    walks = [w for w in c.planner.coverage.links if w.link in around.links]
    covered = sum(w.covered for w in walks)
    if walks and covered < COVERED_ENOUGH * len(walks):
        out.append(f"only {covered} of {len(walks)} directed links between them are probed as often as wanted")
    return out


def _advice(verdict: str, incidents: Sequence[Incident], lacking: Sequence[str]) -> list[str]:
    if verdict == "innocent":
        return ["Look at the job itself: data loading, stragglers among its processes, NCCL settings, storage."]
    if verdict == "insufficient_data":
        return [f"First mend what is missing: {'; '.join(lacking)}. Then ask again."] if lacking else []
    ended = [f"{i.component} ({i.symptom}) until {rfc3339(i.closed_at)}" for i in incidents]
    return [f"It is over: {'; '.join(ended)}. Check whether the job has recovered since."]


def _coverage(c: Controller, around: Concern) -> dict[str, object]:
    walks = [w for w in c.planner.coverage.links if w.link in around.links]
    covered = sum(w.covered for w in walks)
    return {
        "links": len(walks),
        "covered": covered,
        "share": round(covered / len(walks), 4) if walks else None,
        "fewest_tuples": min((w.flows for w in walks), default=None),
        "lowest_rate": min((w.rate for w in walks), default=None),
        "not_covered": [w.link for w in walks if not w.covered],
    }


def _evidence(
    c: Controller, around: Concern, hosts: Sequence[str], verdict: str, lacking: Sequence[str], now: int
) -> dict[str, object]:
    """Who is watched and what crossed the links between; the incidents carry who could not reach whom."""
    summary = c.fresh_summary(now)
    out: dict[str, object] = {}
    if verdict == "innocent" and summary:
        sent, lost = _totals(_between(summary, around))
        where = f"on the {len(around.links)} directed links between them" if around.links else "to or from their RNICs"
        out["summary"] = f"{lost} of {sent} probes and ACKs were lost {where} in the last {summary.span_s:.0f} s"
    if lacking:
        out["missing"] = list(lacking)
    out["hosts"] = [_host(c, h, now) for h in hosts]
    if summary:
        worst = sorted((x for x in summary.links if x.component in around.links and x.lost), key=lambda x: -x.lost)
        out["links_with_loss"] = [_loss(x, summary.span_s) for x in worst[:SHOWN_LINKS]]
        own = [x for x in summary.rnics if around._is_in(x.component, None, None) and x.lost]
        out["rnics_with_loss"] = [_loss(x, summary.span_s) for x in sorted(own, key=lambda x: -x.lost)[:SHOWN_LINKS]]
        if summary.rtt_us:
            out["network_rtt_us"] = dict(summary.rtt_us)
    return {k: v for k, v in out.items() if v not in ([], {})}


def _host(c: Controller, host: str, now: int) -> str:
    agent = c.registry.agents.get(host)
    if agent is None:
        return f"{host}: its agent never registered"
    heard = (now - agent.seen_ns) / 1e9
    probers = {p for r in c.topology.hosts[host] for p in c.book.probers.get(r.name, ())}
    down = [r.device for r in c.topology.hosts[host] if (x := c.registry.rnics.get(r.name)) and not x.info.up]
    text = f"{host}: agent {agent.presence.value}, last registered {heard:.0f} s ago, probed by {len(probers)} RNICs"
    return f"{text}; link down: {', '.join(down)}" if down else text


def _between(summary: Summary, around: Concern) -> list[LinkSummary]:
    """What crossed the switch links between them; under one ToR, what their RNICs sent and received."""
    if around.links:
        return [x for x in summary.links if x.component in around.links]
    return [x for x in summary.rnics if x.component in around.rnics]


def _totals(rows: Sequence[LinkSummary]) -> tuple[int, int]:
    return sum(x.sent for x in rows), sum(x.lost for x in rows)


def _loss(x: LinkSummary, span_s: float) -> str:
    return f"{x.component}: {x.lost} of {x.sent} lost in {span_s:.0f} s"
