"""From samples to verdicts: hosts first, then localisation, then what tracing says about links nobody walks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from pingmesh.analyzer.candidates import Candidate, candidates_of
from pingmesh.analyzer.components import compile_components
from pingmesh.analyzer.delay_feed import DelayFeed
from pingmesh.analyzer.delay_watch import DelayWatch, verdict_of
from pingmesh.analyzer.delays import delay_candidates
from pingmesh.analyzer.evidence import Evidence, Moment, Numbers, evidence_since, reaching
from pingmesh.analyzer.flows import ACK, FlowBook, Walk
from pingmesh.analyzer.host_rules import SECOND, HostView, judge_hosts
from pingmesh.analyzer.hosts import HostBook
from pingmesh.analyzer.localise import Localiser, Suspect
from pingmesh.analyzer.samples import SampleStore
from pingmesh.analyzer.symptoms import Crossing, is_dead_since, lossy_tuples, per_class, symptom_of
from pingmesh.analyzer.tracker import HOST_SYMPTOMS
from pingmesh.analyzer.waits import USUAL, Waits
from pingmesh.messages import FindingReport, Verdict
from topology.model import Link, Topology

HOST_EVIDENCE_NS = 15 * SECOND
WINDOW_MARGIN_NS = SECOND // 4
"""Windows that began so long before an episode count in it: at most a twentieth of their packets is older than the
fault, so that a black hole is not taken for a part's loss."""
WALK_NS = 5 * SECOND
"""While nothing moves, what is walked is only noted so often."""
UNWALKED_LOG_CHANCE = math.log(1e-4)
MIN_LOST = 3
ITS_OWN = HOST_SYMPTOMS | {"rnic_down", "high_rtt"}
"""Symptoms that are known of the part itself, whatever its switch does."""
SHOWN_FLOWS = 6


@dataclass
class Judgement:
    """What holds now."""

    verdicts: list[Verdict] = field(default_factory=list)
    elements: dict[str, frozenset[str]] = field(default_factory=dict)
    """Elements of each verdict's component, for telling whether later losses are explained."""
    findings: list[FindingReport] = field(default_factory=list)
    view: HostView = field(default_factory=HostView)
    unsettled: set[str] = field(default_factory=set)
    """Components that one more look may fold into a larger one."""


class Judge:
    """Pure over the books it is given; a localiser may be put in the plain one's place."""

    def __init__(
        self,
        topology: Topology,
        book: FlowBook,
        hosts: HostBook,
        store: SampleStore,
        localiser: Localiser,
        noise: float,
        large_classes: Callable[[], frozenset[str]],
        waits: Waits = USUAL,
    ) -> None:
        self._topology = topology
        self._book = book
        self._hosts = hosts
        self._store = store
        self._localiser = localiser
        self._noise = noise
        self._large = large_classes
        candidates = candidates_of(topology)
        self._components = compile_components(candidates)
        self._numbers = Numbers(self._components)
        self._delay_watch = DelayWatch(
            compile_components(delay_candidates(topology)), len(topology.rnics), waits.slow_ns
        )
        self._feed = DelayFeed(topology, book, hosts, self._delay_watch)
        self._late: set[tuple[str, str]] = set()
        """What was slow at the last look."""
        self._walked: dict[str, int] = {}
        self._walk_at, self._walk_of = -WALK_NS, -1
        self.elements_of: dict[tuple[str, str], frozenset[str]] = {}
        for c in candidates:
            key = (c.component, c.type)
            self.elements_of[key] = self.elements_of.get(key, frozenset()) | c.elements
        self._wholes = Wholes(self.elements_of)

    def judge(self, now: int, since: int, traced_since: int) -> Judgement:
        """Judge the samples since one time and the tuples traced since another."""
        out = Judgement()
        out.view = judge_hosts(self._hosts, self._topology, reaching(self._store, now - HOST_EVIDENCE_NS), now)
        out.findings += out.view.findings
        for v in out.view.verdicts:
            self._put(out, v)
        evidence = self.evidence(since, out.view.dark)
        suspects = self._losses(evidence, since, out)
        self._unwalked(now, traced_since, suspects, out)
        self._delays(evidence, since, now, suspects, out)
        out.unsettled |= self._wholes.parts_at_once(out.verdicts, out.elements)
        return out

    def _put(self, out: Judgement, verdict: Verdict) -> None:
        out.verdicts.append(verdict)
        elements = self.elements_of.get((verdict.component, verdict.component_type))
        if elements is None:  # a host with one RNIC is no candidate of its own
            elements = frozenset(
                f"{r.name} {side}" for r in self._topology.hosts.get(verdict.component, ()) for side in ("tx", "rx")
            )
        out.elements[verdict.component] = elements

    # ------------------------------------------------------------ losses

    def evidence(self, since: int, dark: Collection[str]) -> Evidence:
        """Samples since a time that speak of the fabric: no end was silent, stalled, gone, new or without link."""
        return evidence_since(self._store, self._hosts.hosts.values(), since, WINDOW_MARGIN_NS, dark)

    def _losses(self, evidence: Evidence, since: int, out: Judgement) -> list[Suspect]:
        if not evidence.has_loss:
            return []
        table = evidence.table(self._numbers)
        suspects = [s for s in self._localiser(table, self._components, noise=self._noise) if s.lost >= MIN_LOST]
        for s in suspects:
            elements = s.candidate.elements
            self._put(out, self._verdict(s, evidence.crossings(elements), evidence.moments(elements), since))
        return suspects

    def _verdict(self, s: Suspect, crossed: list[Crossing], moments: list[Moment], since: int) -> Verdict:
        c = s.candidate
        rate, low, high = s.rate, s.rate_low, s.rate_high
        sent, lost = after_onset(moments)
        if is_dead_since(sent, lost):
            rate, high = max(rate, lost / sent), 1.0
        symptom, cls = symptom_of(c.type, rate, crossed, self._large())
        classes = per_class(crossed)
        if cls is not None:
            sent, lost = classes[cls]
            rate, low, high = lost / sent, low, 1.0
        return Verdict(
            component=c.component,
            component_type=c.type,
            direction=s.direction,
            ends=ends_of(self._topology, c),
            symptom=symptom,
            cls=cls,
            rate=round(rate, 4),
            rate_low=round(low, 4),
            rate_high=round(high, 4),
            confidence=round(s.confidence, 3),
            alternatives=sorted(({a.component for a in s.alternatives} | self._inseparable(c)) - {c.component}),
            since_ns=since,
            evidence={
                "summary": f"{s.lost} of {s.sent} packets across {c.component} were lost",
                "sent": s.sent,
                "lost": s.lost,
                "lossy_tuples": lossy_tuples(crossed),
                "moments": sum_up(moments),
                "last_lost_ns": max((m.last_lost_ns for m in moments), default=0),
                "classes": {k: {"sent": v[0], "lost": v[1]} for k, v in classes.items()},
                "flows": _shown(crossed),
            },
        )

    def _inseparable(self, c: Candidate) -> set[str]:
        """A ToR and its only RNIC see the same packets: no evidence can tell them apart."""
        tor = c.component
        if c.type == "rnic":
            tor = self._book.tor(c.component) or ""
        elif c.type != "switch":
            return set()
        under = list(self._topology.rnics_under(tor))
        return {tor, under[0].name} if len(under) == 1 else set()

    # ------------------------------------------------------------ links that nobody walks any more

    def _unwalked(self, now: int, since: int, suspects: list[Suspect], out: Judgement) -> None:
        if not self._book.has_moved(since):
            # No tuple has left any link: it only has to be noted which are walked.
            if self._walk_of == self._book.changes or 0 <= now - self._walk_at < WALK_NS:
                return
            self._walk_of = self._book.changes
        self._walk_at = now
        walk = self._book.walk(since)
        for e, w in walk.items():
            if w.walkers >= 2:
                self._walked[e] = now
        # In an episode the first tuples traced anew may be the only ones known: what was walked before counts.
        dead = {e for s in suspects if s.rate >= 0.8 for e in s.candidate.elements}

        def gone(element: str) -> float:
            """Log probability that a sound link would look so deserted; 0 if it does not."""
            w = walk.get(element)
            if element not in self._walked or w is None or w.walkers or not w.left or w.left < 2 * w.unseen:
                return 0.0
            return w.log_chance

        down: list[Link] = []
        for link in self._topology.links:
            ends = (link.forward.name, link.reverse.name)
            chances = [gone(e) for e in ends]
            is_gone = all(chances) or any(e in dead for e, g in zip(ends, chances, strict=True) if not g)
            if is_gone and sum(chances) < UNWALKED_LOG_CHANCE:
                down.append(link)
        for switch, links in self._whole_switches(down).items():
            self._fold(out, [k.name for k in links], self._switch_verdict(switch, links, since))
            down = [k for k in down if k not in links]
        for link in down:
            if any(self._may_be_whole(end, walk) for end in (link.a, link.b)):
                out.unsettled.add(link.name)
            tuples = sum(walk[e].left for e in (link.forward.name, link.reverse.name) if e in walk)
            self._fold(out, [], self._down_verdict(link, since, tuples))

    def _whole_switches(self, down: list[Link]) -> dict[str, list[Link]]:
        touching = Counter(end for k in down for end in (k.a, k.b))
        every = Counter(end for k in self._topology.links for end in (k.a, k.b))
        whole = {}
        for switch, n in touching.items():
            under = list(self._topology.rnics_under(switch))
            if n >= 2 and n == every[switch] and not under:
                whole[switch] = [k for k in down if switch in (k.a, k.b)]
        return whole

    def _may_be_whole(self, switch: str, walk: Mapping[str, Walk]) -> bool:
        """Whether no link of a switch is known to be walked still: it may be down as a whole."""
        if any(True for _ in self._topology.rnics_under(switch)):
            return False
        walked = (walk[d.name].walkers for d in self._topology.out_links[switch] if d.name in walk)
        return not any(walked)

    def _fold(self, out: Judgement, parts: list[str], verdict: Verdict) -> None:
        """Put a verdict in the place of those about the same component or its parts."""
        replaced = {verdict.component, *parts}
        out.verdicts[:] = [v for v in out.verdicts if v.component not in replaced]
        self._put(out, verdict)

    def _down_verdict(self, link: Link, since: int, tuples: int) -> Verdict:
        return Verdict(
            component=link.name,
            component_type="link",
            direction="both",
            ends=[link.a, link.b],
            symptom="link_down",
            rate=1.0,
            confidence=0.95,
            since_ns=since,
            evidence={
                "summary": f"all {tuples} 5-tuples traced again have left {link.name}, and nobody walks it",
                "tuples_left": tuples,
            },
        )

    def _switch_verdict(self, switch: str, links: list[Link], since: int) -> Verdict:
        return Verdict(
            component=switch,
            component_type="switch",
            symptom="switch_down",
            rate=1.0,
            confidence=0.95,
            since_ns=since,
            evidence={
                "summary": f"all {len(links)} links of {switch} were walked before and are walked by nobody now",
                "links": [k.name for k in links],
            },
        )

    # ------------------------------------------------------------ delay

    def _delays(self, evidence: Evidence, since: int, now: int, suspects: list[Suspect], out: Judgement) -> None:
        """What is late. While something is lost, packets wait for routes and neighbours, and flows move before their
        traces do: then only what was known to be slow before is said.
        """
        self._feed.take(evidence)
        quick = [] if suspects else self._feed.quick(evidence, since, now)
        slow = self._delay_watch.merged(self._delay_watch.fine(), quick)
        if suspects:
            slow = [s for s in slow if (s.candidate.component, s.candidate.type) in self._late]
        self._late = {(s.candidate.component, s.candidate.type) for s in slow}
        taken = frozenset[str]().union(*out.elements.values())
        for s in slow:
            if taken.isdisjoint(s.candidate.elements):
                self._put(out, verdict_of(s, ends_of(self._topology, s.candidate)))


def ends_of(topology: Topology, c: Candidate) -> list[str]:
    """What a link joins; an RNIC or leg and its switch; nothing for others."""
    if c.type == "link":
        link = next((k for k in topology.links if k.name == c.component), None)
        return [link.a, link.b] if link else []
    if c.type in ("rnic", "leg"):
        rnic = topology.rnics.get(c.component.split("@")[0])
        return [c.component, rnic.legs[0].switch] if rnic else []
    return []


def after_onset(moments: Sequence[Moment]) -> tuple[int, int]:
    """(sent, lost) in the confirmations after the first that lost packets.

    An episode may have begun with something else, and a round while all was still well.
    """
    rounds = [m for m in moments if m.confirmed]
    bad = next((i for i, m in enumerate(rounds) if m.lost), len(rounds))
    later = rounds[bad + 1 :]
    return sum(m.sent for m in later), sum(m.lost for m in later)


def sum_up(moments: Sequence[Moment]) -> dict[str, int]:
    """Packets of all moments, and of that in which most was lost: a burst has no other. Losses that other suspects
    explain are among them."""
    worst = max(moments, key=lambda m: m.lost, default=Moment(False))
    sent, lost = sum(m.sent for m in moments), sum(m.lost for m in moments)
    return {"sent": sent, "lost": lost, "worst_sent": worst.sent, "worst_lost": worst.lost}


class Wholes:
    """Which switches have which parts: links, RNICs, legs and hosts whose every element they hold."""

    def __init__(self, elements_of: Mapping[tuple[str, str], frozenset[str]]) -> None:
        self._of: dict[str, set[str]] = {}
        for (name, kind), elements in elements_of.items():
            if kind == "switch":
                for e in elements:
                    self._of.setdefault(e, set()).add(name)

    def parts_at_once(self, verdicts: Iterable[Verdict], elements: Mapping[str, frozenset[str]]) -> set[str]:
        """Parts of a switch of which two or more lose packets, or are down, at once: it may be the switch, which is
        worth one more look before any of them is named."""
        whole: dict[str, set[str]] = {}
        for v in verdicts:
            if v.component_type != "switch" and v.symptom not in ITS_OWN and elements[v.component]:
                whole[v.component] = set.intersection(*(self._of.get(e, set()) for e in elements[v.component]))
        parts = Counter(switch for switches in whole.values() for switch in switches)
        return {name for name, switches in whole.items() if any(parts[s] >= 2 for s in switches)}


def _shown(crossed: list[Crossing]) -> list[dict[str, object]]:
    """The flows that tell most: those that lost most, and some that did not."""
    bad = sorted((c for c in crossed if c.lost), key=lambda c: -c.lost)[:SHOWN_FLOWS]
    good = sorted((c for c in crossed if not c.lost), key=lambda c: -c.sent)[: SHOWN_FLOWS // 2]
    out: list[dict[str, object]] = []
    for c in bad + good:
        there, back = (c.flow.src, c.flow.dst) if c.role != ACK else (c.flow.dst, c.flow.src)
        out.append(
            {
                "from": there,
                "to": back,
                "packets": "ACKs" if c.role == ACK else "probes",
                "source_port": c.flow.sport,
                "class": c.cls,
                "path": list(c.paths[0]) if len(c.paths) == 1 else None,
                "sent": c.sent,
                "lost": c.lost,
            }
        )
    return out
