"""What hosts say and do not say: host down, agent dead, host starved, RNIC without carrier.

These come before localisation: probes to a host that is gone, stalled or restarting are no evidence about the
fabric, and an RNIC is blamed only if its agent was heard after the losses.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from pingmesh.analyzer.hosts import Host, HostBook
from pingmesh.analyzer.samples import Sample
from pingmesh.messages import FindingReport, Verdict
from topology.model import Topology

SECOND = 1_000_000_000
SILENT_NS = 1 * SECOND
SILENT_QUESTIONS = 3
DIED_GRACE_NS = 1 * SECOND
"""Time for an agent whose connection broke to come back."""
UNPROBED_NS = 15 * SECOND
"""The same where nothing shows yet whether it answers probes: a retained will may be an old one."""
STARVED_NS = 5 * SECOND
SETTLE_REBOOT_NS = 3 * SECOND
CARRIER_GRACE_NS = SECOND // 2
"""Carrier reports of a ToR's RNICs arrive spread over this time."""


@dataclass
class HostView:
    """Verdicts about hosts and RNIC carriers, and which hosts and RNICs give no evidence about the fabric."""

    verdicts: list[Verdict] = field(default_factory=list)
    findings: list[FindingReport] = field(default_factory=list)
    excluded: set[str] = field(default_factory=set)
    undecided: set[str] = field(default_factory=set)
    """Silent, but not for long enough to say so: ask again soon."""
    dark: set[str] = field(default_factory=set)
    """RNICs without carrier."""


TOR_RETURN_NS = 5 * SECOND
LOOK_BACK_NS = SECOND
"""Packets sent this long before a host is known to be gone may have been lost with it."""
REPORT_NS = 6 * SECOND
"""A stall that a report tells of may have been at any time since the report before it."""


Reached = Callable[[str], Iterable[Sample]]
"""Samples of probes, and of round trips, to a host."""


def judge_hosts(book: HostBook, topology: Topology, samples: Iterable[Sample] | Reached, now: int) -> HostView:
    """Apply the host rules to the samples of the last seconds: all of them, or a way to look up those to a host."""
    view = HostView()
    reached = samples if callable(samples) else _by_host(samples)
    for host in book.hosts.values():
        if host.name not in topology.hosts:
            continue  # nobody probes it, and a node that was taken out is no fault
        _judge_host(host, book, reached, now, view)
    _judge_carriers(book, topology, now, view)
    for name in view.excluded:
        _excuse(book.get(name), now)
    return view


def _by_host(samples: Iterable[Sample]) -> Reached:
    found: dict[str, list[Sample]] = defaultdict(list)
    for s in samples:
        if s.role != 1:
            found[s.flow.dst_host].append(s)
    return lambda host: found.get(host, ())


def _excuse(host: Host, now: int) -> None:
    """Remember for good when packets to and from a host were no evidence."""
    starts = [at - REPORT_NS for at, _ in host.stalls if now - at < STARVED_NS]
    if host.silent_since:
        starts.append(host.silent_since - LOOK_BACK_NS)
    if host.state != "online":
        starts.append(host.state_since - LOOK_BACK_NS)
    if now - host.rebooted < SETTLE_REBOOT_NS:
        starts.append(host.rebooted - LOOK_BACK_NS)
    host.excuse(min(starts, default=now), now + SECOND // 2)


def _answers(reached: Iterable[Sample], since: int) -> tuple[int, int]:
    """(probes sent, probes that came back or arrived) since a time."""
    counts = [(s.sent, s.lost) for s in reached if s.start >= since]
    sent, lost = sum(n for n, _ in counts), sum(k for _, k in counts)
    return sent, max(0, sent - lost)


def _judge_host(host: Host, book: HostBook, reached: Reached, now: int, view: HostView) -> None:
    if host.state == "stopped":
        view.excluded.add(host.name)
        return
    if now - host.rebooted < SETTLE_REBOOT_NS:
        view.excluded.add(host.name)
    if host.state == "died":
        view.excluded.add(host.name)
        sent, arrived = _answers(reached(host.name), host.state_since)
        if arrived:
            view.findings.append(_unreachable(host, "its agent's connection to the broker broke"))
        elif now - host.state_since >= (DIED_GRACE_NS if sent else UNPROBED_NS):
            view.verdicts.append(_agent_down(host, sent))
        else:
            view.undecided.add(host.name)
        return
    if not book.heard_in_session(host, now):
        # Since our connection is new it has not spoken: it may be looking for the broker, or be gone. Neither its
        # silence nor the losses of its RNICs say anything yet.
        view.excluded.add(host.name)
        return
    if host.unanswered and host.silent_since:
        _judge_silent(host, reached, now, view)
        return
    _judge_starved(host, now, view)


def _judge_silent(host: Host, reached: Reached, now: int, view: HostView) -> None:
    view.excluded.add(host.name)
    sent, arrived = _answers(reached(host.name), host.silent_since)
    if host.unanswered < SILENT_QUESTIONS or now - host.silent_since < SILENT_NS or not sent:
        view.undecided.add(host.name)
    elif arrived:
        view.findings.append(_unreachable(host, "its agent answers probes but nothing else"))
    else:
        view.verdicts.append(
            Verdict(
                component=host.name,
                component_type="host",
                symptom="host_down",
                rate=1.0,
                confidence=0.95,
                since_ns=host.silent_since,
                evidence={
                    "summary": f"{host.name} answers neither probes nor questions over the management network",
                    "questions_unanswered": host.unanswered,
                    "probes_sent": sent,
                    "probes_answered": 0,
                },
            )
        )


def _judge_starved(host: Host, now: int, view: HostView) -> None:
    stalls = [(at, ms) for at, ms in host.stalls if at >= now - STARVED_NS]
    if not stalls:
        return
    view.excluded.add(host.name)
    worst = max(ms for _, ms in stalls)
    spread = stalls[-1][0] - stalls[0][0]
    if (len(stalls) >= 2 and spread >= SECOND // 2) or worst >= 1000:
        view.verdicts.append(
            Verdict(
                component=host.name,
                component_type="host",
                symptom="cpu_overload",
                confidence=0.9,
                since_ns=stalls[0][0],
                evidence={
                    "summary": f"the agent on {host.name} was stalled for up to {worst:.0f} ms: "
                    "probes to and from it time out on the host, not in the network",
                    "worst_stall_ms": round(worst, 1),
                    "stalls": len(stalls),
                    "throttled_ms": round(host.health.throttled, 1),
                    "cpu_pressure": host.health.cpu_pressure,
                },
            )
        )
    else:
        view.undecided.add(host.name)


def _agent_down(host: Host, sent: int) -> Verdict:
    return Verdict(
        component=host.name,
        component_type="host",
        symptom="agent_down",
        confidence=0.95,
        since_ns=host.state_since,
        evidence={
            "summary": f"the agent process on {host.name} ended without a goodbye; the broker saw its connection break",
            "probes_sent_since": sent,
            "probes_answered": 0,
        },
    )


def _unreachable(host: Host, why: str) -> FindingReport:
    return FindingReport(
        kind="management_unreachable",
        subject=host.name,
        since_ns=host.silent_since or host.state_since,
        text=f"{why}, while probes over the fabric reach it: look at the management network of {host.name}.",
    )


def _judge_carriers(book: HostBook, topology: Topology, now: int, view: HostView) -> None:
    down: dict[str, int] = {}
    for host in book.hosts.values():
        if host.state == "stopped":
            continue
        for device, since in host.down.items():
            name = f"{host.name}/{device}"
            if name in topology.rnics:
                down[name] = since
    view.dark.update(down)
    by_tor: dict[str, list[str]] = defaultdict(list)
    for name in down:
        by_tor[topology.rnics[name].legs[0].switch].append(name)
    for tor, names in by_tor.items():
        since = min(down[n] for n in names)
        if now - max(down[n] for n in names) < CARRIER_GRACE_NS:
            view.undecided.update(n.split("/")[0] for n in names)
            continue
        mates = [r.name for r in topology.rnics_under(tor)]
        speaking = [m for m in mates if m in down or book.get(m.split("/")[0]).state == "online"]
        if len(names) >= 2 and len(names) == len(speaking):
            book.dark_tors[tor] = now
            view.verdicts.append(_tor_down(tor, names, since))
            continue
        if now - book.dark_tors.get(tor, -TOR_RETURN_NS) < TOR_RETURN_NS:
            continue  # the ToR is coming back, and its RNICs one after the other
        for name in names:
            alternatives = [tor] if len(mates) == 1 else []
            view.verdicts.append(_rnic_down(name, tor, alternatives, down[name]))


def _tor_down(tor: str, rnics: list[str], since: int) -> Verdict:
    return Verdict(
        component=tor,
        component_type="switch",
        symptom="switch_down",
        rate=1.0,
        confidence=0.95,
        since_ns=since,
        evidence={
            "summary": f"all {len(rnics)} RNICs under {tor} lost their link together",
            "rnics_without_link": sorted(rnics),
        },
    )


def _rnic_down(name: str, tor: str, alternatives: list[str], since: int) -> Verdict:
    return Verdict(
        component=name,
        component_type="rnic",
        direction="both",
        ends=[name, tor],
        symptom="rnic_down",
        rate=1.0,
        confidence=0.98 if not alternatives else 0.8,
        alternatives=alternatives,
        since_ns=since,
        evidence={
            "summary": f"the agent reports no link on {name}; the other RNICs under {tor} have theirs"
            if not alternatives
            else f"the agent reports no link on {name}, the only RNIC under {tor}"
        },
    )
