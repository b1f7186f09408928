"""Hysteresis: when a verdict becomes an open incident, and when an open one is over."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum

import msgspec

from pingmesh.analyzer.host_rules import SECOND
from pingmesh.messages import Verdict

HOST_SYMPTOMS = frozenset({"host_down", "agent_down", "cpu_overload"})
STATES = HOST_SYMPTOMS | {"link_down", "switch_down", "rnic_down", "high_rtt"}
"""Symptoms that hold as long as the judge says so, where nobody counted packets; the others, and a switch that is found
to let nothing through, are counts of what is past."""
FLAPPING = frozenset({"link_down", "blackhole", "rnic_down", "flap"})
FLAP_GAP_NS = 3 * SECOND
"""A down that is only looked at once a second is still one down."""
FLAP_MEMORY_NS = 120 * SECOND
LOOKS_UNSURE = 3
"""Evaluations with new evidence before an ambiguous or unsettled verdict opens all the same."""
COUNTED = frozenset({"drop", "class_drop", "large_packet_drop"})
"""Symptoms that a burst of losses may look like, which hits the rounds of one class alone where it is short."""
SURE_RATE = 0.5
"""Below this rate a loss must show again: a burst that meets a round of confirmation looks like a fault of some %."""
FEW_TUPLES = 6
"""A loss of fewer 5-tuples than these may have more than the broken component in common, as an ACL's first ones do."""
AGAIN = 0.3
"""Part of the rate at first that what is counted later must have at least."""
ELSEWHERE, LEAST_ELSEWHERE = 0.5, 3
"""Part of the whole rate, and losses, that there must be outside the worst moment: whatever a burst takes of a round of
confirmation, the loss that started it is another moment's."""
PAST_NS = 20 * SECOND
"""Losses that were all longer ago open nothing: they did not when they were news, and what has been sent since makes
the rates of what they have in common differ. A report comes at most 10 s after its window began."""
CLOSED_REPEAT_NS = 10 * SECOND


class Phase(Enum):
    """pending -> open -> closed."""

    PENDING = "pending"
    OPEN = "open"


@dataclass
class Track:
    """One component under suspicion or in an open incident."""

    verdict: Verdict
    elements: frozenset[str]
    first: int
    last_bad: int
    last_seen: int
    phase: Phase = Phase.PENDING
    looks: int = 0
    told: int = 0
    """`last_bad` when the verdict was last taken over: without anything bad since, a look only dilutes it."""
    bursts: list[int] = field(default_factory=list)
    counted_since: int = 0
    """From when on the packets count that the last look told of."""
    counted: tuple[int, int, int] | None = None
    """(time, sent, lost) when the loss was first thought of as certain."""


class Tracker:
    """All tracks by component."""

    def __init__(self, open_confidence: float, close_after_ns: int) -> None:
        self._open_confidence = open_confidence
        self._close_after = close_after_ns
        self.tracks: dict[str, Track] = {}
        self._closed: dict[str, int] = {}

    def adopt(self, verdict: Verdict, elements: frozenset[str], now: int) -> None:
        """Go on with an incident that an analyzer before us had opened, unless it is one that we have just closed."""
        if verdict.component not in self.tracks and verdict.component not in self._closed:
            self.tracks[verdict.component] = Track(verdict, elements, now, now, now, Phase.OPEN)

    def dismiss(self, component: str, now: int) -> None:
        """Say that an incident is over whose component is no more."""
        if component not in self.tracks:
            self._closed[component] = now

    def update(
        self,
        verdicts: Iterable[Verdict],
        elements: dict[str, frozenset[str]],
        unsettled: set[str],
        now: int,
        new_look: bool,
    ) -> list[Verdict]:
        """Take over what holds now; returns the verdicts that opened. `new_look`: there is new evidence."""
        opened = []
        seen = set()
        for v in verdicts:
            if self._is_part_of_open(v, elements[v.component]):
                continue
            seen.add(v.component)
            track = self.tracks.get(v.component)
            if track is None:
                track = self.tracks[v.component] = Track(v, elements[v.component], now, now, now)
            self._refresh(track, v, elements[v.component], now)
            track.looks += new_look
            if track.phase is Phase.PENDING and self._may_open(track, v.component in unsettled, now):
                track.phase = Phase.OPEN
                self._absorb(track, now)
                self._closed.pop(v.component, None)
                opened.append(track.verdict)
        for name in [n for n, t in self.tracks.items() if t.phase is Phase.PENDING and n not in seen]:
            if now - self.tracks[name].last_seen > 2 * SECOND:
                del self.tracks[name]
        return opened

    def _is_part_of_open(self, v: Verdict, elements: frozenset[str]) -> bool:
        """Whether a larger component is in an open incident: its parts fail, and come back, with it.

        What a host below a sick switch says itself is no part of it.
        """
        return v.symptom not in HOST_SYMPTOMS and any(
            t.verdict.component != v.component and elements < t.elements for t in self.open
        )

    def _refresh(self, track: Track, v: Verdict, elements: frozenset[str], now: int) -> None:
        old = track.verdict
        track.last_seen = now
        track.counted_since = v.since_ns
        is_state = v.symptom in STATES and not isinstance(v.evidence.get("sent"), int)
        is_news = is_state or track.last_bad > track.told
        if track.phase is not Phase.OPEN or (is_news and not _is_vaguer(v, old)):
            if old.symptom == "flap" and v.symptom in FLAPPING:
                v = msgspec.structs.replace(v, symptom="flap")
            track.verdict = msgspec.structs.replace(v, since_ns=min(old.since_ns or v.since_ns, v.since_ns))
            track.elements = elements
        if is_state:
            self.bad(track, now, now)
        track.told = track.last_bad

    def _absorb(self, track: Track, now: int) -> None:
        """A larger component's verdict takes the place of its parts' that opened just before."""
        if track.verdict.component_type not in ("switch", "host"):
            return
        for name, other in list(self.tracks.items()):
            if other is track or other.verdict.symptom in HOST_SYMPTOMS:
                continue
            if other.elements < track.elements and now - other.first < 20 * SECOND:
                del self.tracks[name]
                if other.phase is Phase.OPEN:
                    self._closed[name] = now

    def _may_open(self, track: Track, unsettled: bool, now: int) -> bool:
        v = track.verdict
        if unsettled and track.looks < LOOKS_UNSURE:
            return False
        if 0 < _last_lost(v) < now - PAST_NS:
            return False
        if v.symptom == "high_rtt":
            return True  # the watch over delays has looked more than once before it says so
        heavy = (v.rate or 0.0) >= SURE_RATE
        # The first dead tuples may have more than the broken link in common.
        vague = v.symptom == "flow_blackhole" or (heavy and _few_tuples(v))
        if (vague or v.confidence < self._open_confidence) and track.looks < LOOKS_UNSURE:
            return False
        return v.symptom not in COUNTED or heavy or _shows_again(track, now)

    def bad(self, track: Track, start: int, end: int) -> None:
        """Something was wrong with the component at some time between these two."""
        if start - track.last_bad > FLAP_GAP_NS or not track.bursts:
            track.bursts.append(start)
            track.bursts = [b for b in track.bursts if start - b < FLAP_MEMORY_NS]
        track.last_bad = max(track.last_bad, end)
        if len(track.bursts) >= 2 and track.phase is Phase.OPEN and track.verdict.symptom in FLAPPING:
            track.verdict = msgspec.structs.replace(track.verdict, symptom="flap")

    def close(self, is_clean: Callable[[Track], bool], now: int) -> list[str]:
        """Close what has been clean, by evidence, for long enough; returns the components."""
        done = []
        for name, t in list(self.tracks.items()):
            wait = self._close_after if t.verdict.symptom not in HOST_SYMPTOMS else self._close_after // 2
            if t.verdict.symptom == "flap":
                wait *= 3
            if t.phase is Phase.OPEN and now - t.last_bad >= wait and is_clean(t):
                del self.tracks[name]
                self._closed[name] = now
                done.append(name)
        return done

    @property
    def open(self) -> list[Track]:
        """Open incidents."""
        return [t for t in self.tracks.values() if t.phase is Phase.OPEN]

    def closed(self, now: int) -> list[str]:
        """Components closed in the last seconds: said more than once, since a message may be lost."""
        self._closed = {n: at for n, at in self._closed.items() if now - at < CLOSED_REPEAT_NS}
        return sorted(n for n in self._closed if n not in self.tracks or self.tracks[n].phase is not Phase.OPEN)


def _last_lost(v: Verdict) -> int:
    """When the last packet was lost that surely crossed it; 0 where nobody knows."""
    last = v.evidence.get("last_lost_ns")
    return last if isinstance(last, int) else 0


def _few_tuples(v: Verdict) -> bool:
    """Whether few 5-tuples lost packets; False where nobody counted them, and where nobody knows their paths."""
    tuples = v.evidence.get("lossy_tuples")
    return isinstance(tuples, int) and 0 < tuples < FEW_TUPLES


def _shows_again(track: Track, now: int) -> bool:
    """Whether packets went on to be lost after the look that first told of it, and not only in one moment; True where
    nobody counted.
    """
    evidence = track.verdict.evidence
    sent, lost = evidence.get("sent"), evidence.get("lost")
    if not isinstance(sent, int) or not isinstance(lost, int):
        return True
    if track.counted is None:
        track.counted = now, sent, lost
        return False
    at, before_sent, before_lost = track.counted
    more_sent, more_lost = sent - before_sent, lost - before_lost
    if 0 < at <= track.counted_since:  # another window: all of it came later
        more_sent, more_lost = sent, lost
    elif more_sent < 0:  # counted anew: a new episode, or a shorter span
        track.counted = now, sent, lost
        return False
    if more_lost < max(1.0, AGAIN * before_lost / max(before_sent, 1) * more_sent):
        return False
    m = evidence.get("moments")
    return not isinstance(m, dict) or shows_elsewhere(m)


def shows_elsewhere(moments: Mapping[str, int]) -> bool:
    """Whether enough was lost outside the worst moment (`sum_up`); True where nobody knows when it was.

    A burst is remembered for a minute, and a stray loss comes soon.
    """
    m = moments
    if not m.get("lost"):
        return True
    other_sent, other_lost = m["sent"] - m["worst_sent"], m["lost"] - m["worst_lost"]
    return other_lost >= max(LEAST_ELSEWHERE, ELSEWHERE * m["lost"] / m["sent"] * other_sent)


def _is_vaguer(new: Verdict, old: Verdict) -> bool:
    """Whether a later look says less than the open incident does: it must not undo a refinement."""
    stronger = {"link_down", "switch_down", "host_down", "rnic_down"}
    if old.symptom in stronger and new.symptom not in stronger | HOST_SYMPTOMS:
        return True
    return old.symptom == "host_down" and new.symptom in ("agent_down", "cpu_overload")
