"""A recording judged: window by window as the analyzer would have, over the minute before, and as a whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from pingmesh.analyzer.candidates import candidates_of
from pingmesh.analyzer.components import Components, compile_components
from pingmesh.analyzer.host_rules import SECOND, HostView
from pingmesh.analyzer.localise import Suspect
from pingmesh.analyzer.symptoms import per_class, symptom_of
from pingmesh.analyzer.tracker import HOST_SYMPTOMS, SURE_RATE, Track, Tracker, shows_elsewhere
from pingmesh.analyzer.waits import USUAL
from pingmesh.incidents import Incident
from pingmesh.messages import FindingReport, Verdict
from pingmesh.offline.delays import RecordedDelays
from pingmesh.offline.evidence import Evidence, Sums
from pingmesh.offline.hosts import HostHistory, by_window
from pingmesh.offline.recording import Recording
from pingmesh.offline.spans import best_span, online
from topology.model import Topology

GATHERED_NS = 60 * SECOND
"""As far back as the analyzer looks without suspicion."""
GATHERED_STEPS = 3
"""The shorter look back is this part of it."""
MIN_LOST = 3
SLOW_FACTOR = 8
SLOW_FLOWS = 3
TIMED_FLOWS = 10
CLOSE_PACKETS = 30
LEAST_PACKETS = 100
"""Fewer are not enough for any verdict."""
LARGE = frozenset({"large"})
"""Classes of large packets, by the name that probe lists give them."""


@dataclass(slots=True)
class WindowResult:
    """What one window alone says."""

    start_ns: int
    end_ns: int
    sent: int
    lost: int
    verdicts: list[Verdict]


@dataclass(slots=True)
class Analysis:
    """The answer. `verdict` is as `pingmesh diagnose` gives it; `why` says so where there is not enough data."""

    verdict: str = "innocent"
    why: str = ""
    incidents: list[Incident] = field(default_factory=list)
    windows: list[WindowResult] = field(default_factory=list)
    findings: list[FindingReport] = field(default_factory=list)
    packets: int = 0
    lost: int = 0
    coverage: float | None = None
    """Share of the directed switch links that known paths cross, with `CLOSE_PACKETS` or more; None without links."""


class Analyst:
    """Judges a recording with the analyzer's parts: localiser, symptoms, host rules, tracker."""

    def __init__(
        self,
        topology: Topology,
        window_ns: int,
        *,
        noise: float = 1e-4,
        open_confidence: float = 0.95,
        close_after_s: float = 20.0,
        clock: str = "software",
    ) -> None:
        self._topology = topology
        self._window_ns = window_ns
        self._noise = noise
        self._clock = clock
        self._delays: RecordedDelays | None = None
        candidates = candidates_of(topology)
        self.components: Components = compile_components(candidates)
        self.index = dict(self.components.index)
        self._elements: dict[tuple[str, str], frozenset[str]] = {}
        for c in candidates:
            key = (c.component, c.type)
            self._elements[key] = self._elements.get(key, frozenset()) | c.elements
        self._open_confidence = open_confidence
        self._tracker = Tracker(open_confidence, int(close_after_s * SECOND))
        self._open: dict[str, Incident] = {}
        self._named: dict[str, list[int]] = {}
        """Windows that name a component by themselves, while it is under suspicion or in an open incident."""
        self._numbered = 0
        self._judged_from = 0

    def recording(self) -> Recording:
        """An empty one that numbers elements as this analyst does."""
        return Recording(self._topology, self.index, self._window_ns)

    def analyse(
        self,
        recording: Recording,
        progress: Callable[[int, int], None] = lambda done, of: None,
        looked_up: Callable[[int, int], None] = lambda done, of: None,
    ) -> Analysis:
        """Judge it all. A look costs O(keys) and an inference; there are three a window and one at the end.

        `progress` is told of windows that are judged, `looked_up` of pairs whose possible paths were looked up.
        """
        out = Analysis()
        evidence = Evidence(recording, self.index, looked_up)
        hosts = HostHistory(self._topology, self._window_ns, recording.reached)
        facts = by_window(recording.facts, self._window_ns)
        windows = evidence.windows.tolist()
        if self._clock != "software":  # whose delays of less than milliseconds say nothing
            self._delays = RecordedDelays(self._topology, evidence, self._window_ns, self._clock)
        span = max(GATHERED_NS // self._window_ns, 1)
        for done, w in enumerate(windows, 1):
            self._window(evidence, hosts.judge(w, facts.get(w, ())), w, span, out)
            progress(done, len(windows))
        if windows:
            for incident in list(self._open.values()):
                self._settle(evidence, incident)
            self._whole(evidence, windows, out)
        self._conclude(evidence, recording, out)
        return out

    # ------------------------------------------------------------ one window

    def _window(self, evidence: Evidence, view: HostView, w: int, span: int, out: Analysis) -> None:
        now = (w + 1) * self._window_ns
        alone = evidence.sums(w, w)
        start = w * self._window_ns
        suspects = self._suspects(evidence, alone)
        own = self._verdicts(evidence, alone, suspects, start)
        out.windows.append(WindowResult(start, now, int(alone.sent.sum()), int(alone.lost.sum()), own))
        out.findings += view.findings
        if self._delays is not None:
            late = self._delays.window(w)
            taken = frozenset[str]().union(*(self._elements_of(v) for v in (*view.verdicts, *own)))
            own += [v for v in late if taken.isdisjoint(self._elements_of(v))]
        for v in own:
            self._named.setdefault(v.component, []).append(w)
        found = {v.component: v for v in [*view.verdicts, *own]}
        for v in self._gathered(evidence, w, span, sum(s.score for s in suspects)):
            found.setdefault(v.component, v)
        elements = {v.component: self._elements_of(v) for v in found.values()}
        for v in (*view.verdicts, *own):
            if v.component in self._tracker.tracks:
                # Bad in two windows that follow each other is bad all the time, not twice.
                self._tracker.bad(self._tracker.tracks[v.component], start, now)
        opened = self._tracker.update(found.values(), elements, set(), now, bool(view.verdicts or own))
        self._note(evidence, alone, w)
        for v in opened:
            self._open_incident(v, max(v.since_ns, start), out)
        self._refresh()
        for name in self._tracker.close(lambda t: self._is_clean(evidence, t, w), now):
            self._judged_from = w + 1  # its losses are history: they must not open it again
            self._close_incident(evidence, name, now)
        for name in self._tracker.closed(now):
            self._close_incident(evidence, name, now)
        self._named = {name: named for name, named in self._named.items() if name in self._tracker.tracks}

    def _suspects(self, evidence: Evidence, sums: Sums) -> list[Suspect]:
        return online(evidence.losses(sums), self.components, noise=self._noise)

    def _gathered(self, evidence: Evidence, w: int, span: int, score: float) -> list[Verdict]:
        """What a longer look back says, if it explains more than the window's own suspects do with their score."""
        firsts = {max(w - n + 1, self._judged_from) for n in (span // GATHERED_STEPS, span)}
        starts = sorted((first for first in firsts if first < w), reverse=True)
        sums = [evidence.sums(first, w) for first in starts]
        at, suspects = best_span((evidence.losses(s) for s in sums), self.components, noise=self._noise)
        if sum(s.score for s in suspects) <= score:
            return []
        since = starts[at] * self._window_ns
        return [self._loss_verdict(evidence, sums[at], s, since) for s in suspects if s.lost >= MIN_LOST]

    def _verdicts(self, evidence: Evidence, sums: Sums, suspects: list[Suspect], since: int) -> list[Verdict]:
        found = [self._loss_verdict(evidence, sums, s, since) for s in suspects if s.lost >= MIN_LOST]
        return found or self._delay_verdicts(evidence, sums, since)

    def _loss_verdict(self, evidence: Evidence, sums: Sums, s: Suspect, since: int) -> Verdict:
        c = s.candidate
        crossed = evidence.crossings(sums, c.elements)
        symptom, cls = symptom_of(c.type, s.rate, crossed, LARGE)
        classes = per_class(crossed)
        return Verdict(
            component=c.component,
            component_type=c.type,
            direction=s.direction,
            symptom=symptom,
            cls=cls,
            rate=round(s.rate, 4),
            rate_low=round(s.rate_low, 4),
            rate_high=round(s.rate_high, 4),
            confidence=round(s.confidence, 3),
            alternatives=sorted({a.component for a in s.alternatives} - {c.component}),
            since_ns=since,
            evidence={
                "summary": f"{s.lost} of {s.sent} packets across {c.component} were lost",
                "sent": s.sent,
                "lost": s.lost,
                "classes": {k: {"sent": v[0], "lost": v[1]} for k, v in classes.items()},
            },
        )

    def _delay_verdicts(self, evidence: Evidence, sums: Sums, since: int) -> list[Verdict]:
        timed = sums.rtts > 0
        if int(timed.sum()) < TIMED_FLOWS:
            return []
        means = sums.rtt_sum_ns[timed] / sums.rtts[timed]
        usual = float(np.quantile(means, 0.25))
        threshold = max(float(USUAL.slow_ns), SLOW_FACTOR * usual)
        if int((means > threshold).sum()) < SLOW_FLOWS:
            return []
        suspects = online(evidence.slow(sums, threshold), self.components, noise=max(self._noise, 0.02))
        out = []
        for s in suspects:
            if s.candidate.type == "link" and s.rate < 0.5:
                continue
            c = s.candidate
            out.append(
                Verdict(
                    component=c.component,
                    component_type=c.type,
                    direction=s.direction,
                    symptom="high_rtt",
                    confidence=round(s.confidence, 3),
                    alternatives=sorted({a.component for a in s.alternatives} - {c.component}),
                    since_ns=since,
                    evidence={
                        "summary": f"round trips across {c.component} take up to {means.max() / 1e6:.1f} ms, "
                        f"elsewhere {usual / 1e6:.3f} ms; nothing is lost: a queue",
                        "rtt_ms": round(float(means.max()) / 1e6, 3),
                        "rtt_elsewhere_ms": round(usual / 1e6, 3),
                    },
                )
            )
        return out

    def _elements_of(self, v: Verdict) -> frozenset[str]:
        known = self._elements.get((v.component, v.component_type))
        if known is not None:
            return known
        rnics = self._topology.hosts.get(v.component, ())  # a host with one RNIC is no candidate of its own
        return frozenset(f"{r.name} {side}" for r in rnics for side in ("tx", "rx"))

    # ------------------------------------------------------------ incidents

    def _note(self, evidence: Evidence, alone: Sums, w: int) -> None:
        """Losses across a suspected component keep its incident open."""
        for track in self._tracker.tracks.values():
            v = track.verdict
            if not track.elements or v.symptom in HOST_SYMPTOMS:
                continue
            crossed = evidence.crossing(track.elements)
            slow = (alone.rtts > 0) & (alone.rtt_sum_ns > USUAL.slow_ns * np.maximum(alone.rtts, 1))
            if np.any(crossed & (slow if v.symptom == "high_rtt" else alone.lost > 0)):
                self._tracker.bad(track, w * self._window_ns, (w + 1) * self._window_ns)

    def _is_clean(self, evidence: Evidence, track: Track, w: int) -> bool:
        """Whether enough packets crossed the component since the last bad moment."""
        if track.verdict.symptom in HOST_SYMPTOMS:
            return True
        since = evidence.sums(track.last_bad // self._window_ns, w)
        return int(since.sent[evidence.crossing(track.elements)].sum()) >= CLOSE_PACKETS

    def _open_incident(self, v: Verdict, at: int, out: Analysis) -> None:
        self._numbered += 1
        incident = Incident(
            id=f"r-{self._numbered}",
            cluster=self._topology.cluster,
            component=v.component,
            component_type=v.component_type,  # type: ignore[arg-type] # made by our own rules
            symptom=v.symptom,  # type: ignore[arg-type]
            opened_at=at,
        )
        _fill(incident, v)
        self._open[v.component] = incident
        out.incidents.append(incident)

    def _refresh(self) -> None:
        for track in self._tracker.open:
            incident = self._open.get(track.verdict.component)
            if incident is not None:
                _fill(incident, track.verdict)

    def _close_incident(self, evidence: Evidence, component: str, now: int) -> None:
        incident = self._open.pop(component, None)
        if incident is not None:
            self._settle(evidence, incident)
            incident.state, incident.closed_at = "closed", now

    def _settle(self, evidence: Evidence, incident: Incident) -> None:
        """Say the rate of the time that it lasted: what was well before and after dilutes what looks across its ends
        say. The first and the last of the windows that name it may be such, too.
        """
        named = self._named.pop(incident.component, [])[1:-1]
        if not named or incident.rate is None:
            return
        sums = evidence.sums(named[0], named[-1])
        for s in self._suspects(evidence, sums):
            v = self._loss_verdict(evidence, sums, s, incident.opened_at)
            if (v.component, v.component_type) == (incident.component, incident.component_type):
                incident.rate, incident.rate_low, incident.rate_high = v.rate, v.rate_low, v.rate_high
                incident.evidence = v.evidence

    # ------------------------------------------------------------ the whole

    def _whole(self, evidence: Evidence, windows: list[int], out: Analysis) -> None:
        """What is too faint for a minute may show over the whole recording."""
        sums = evidence.sums(windows[0], windows[-1])
        named = frozenset[str]().union(
            *(self._elements.get((i.component, i.component_type), frozenset()) for i in out.incidents)
        )
        for s in self._suspects(evidence, sums):
            v = self._loss_verdict(evidence, sums, s, windows[0] * self._window_ns)
            # Components that explain it equally well share the confidence: together they have it.
            alike = {(e.component, e.type) for e in (s.candidate, *s.equals)}
            sure = s.confidence * len(alike) >= self._open_confidence
            told = s.lost >= MIN_LOST and sure and not (self._elements_of(v) & named)
            if told and (s.rate >= SURE_RATE or shows_elsewhere(evidence.moments(s.candidate.elements))):
                self._open_incident(v, v.since_ns, out)
        out.packets, out.lost = int(sums.sent.sum()), int(sums.lost.sum())
        out.coverage = self._coverage(evidence, sums)

    def _coverage(self, evidence: Evidence, sums: Sums) -> float | None:
        links = [self.index[d.name] for d in self._topology.directed_links]
        if not links:
            return None
        k = evidence.keys
        weights = np.repeat(sums.sent, np.diff(k.path_ptr))
        crossed = np.bincount(k.path_elements, weights=weights, minlength=len(self.index))
        return float(np.mean(crossed[links] >= CLOSE_PACKETS))

    def _conclude(self, evidence: Evidence, recording: Recording, out: Analysis) -> None:
        out.findings = list({(f.kind, f.subject): f for f in out.findings}.values())
        since = int(evidence.windows[0]) * self._window_ns if len(evidence.windows) else 0
        out.findings += [FindingReport(kind="paths", subject="records", since_ns=since, text=t) for t in evidence.said]
        counted = recording.counted
        if any(i.symptom not in HOST_SYMPTOMS for i in out.incidents):
            out.verdict = "network"
        elif out.incidents:
            out.verdict = "host"
        elif not counted.rows:
            out.verdict, out.why = "insufficient_data", "the files hold no rows"
        elif out.packets < LEAST_PACKETS:
            out.verdict = "insufficient_data"
            out.why = f"only {out.packets} packets of {counted.rows} rows are evidence"
        elif 2 * counted.no_path > len(evidence.keys):
            out.verdict, out.why = "insufficient_data", "no path of the topology joins most of the pairs"
        elif 2 * (strangers := counted.rows - counted.evidence - counted.set_aside.total()) > counted.rows:
            out.verdict = "insufficient_data"
            out.why = (
                f"{strangers} of {counted.rows} rows are not between two RNICs of the topology: is it this fabric's?"
            )
        elif 2 * counted.strange_paths > counted.rows:
            out.verdict = "insufficient_data"
            out.why = f"{counted.strange_paths} of {counted.rows} paths are not in the topology: is it this fabric's?"


def _fill(incident: Incident, v: Verdict) -> None:
    """Take over what the verdict says now."""
    incident.direction = v.direction
    incident.symptom = v.symptom  # type: ignore[assignment] # made by our own rules
    incident.cls = v.cls
    incident.rate, incident.rate_low, incident.rate_high = v.rate, v.rate_low, v.rate_high
    incident.confidence = v.confidence
    incident.alternatives = v.alternatives
    incident.evidence = v.evidence


def unknown_names(recording: Recording, most: int = 5) -> Iterable[tuple[str, int]]:
    """Names and addresses that no RNIC has, with their rows, most rows first."""
    return recording.names.unknown.most_common(most)
