"""From losses noticed to the flows worth probing harder: what an active confirmation asks for."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from pingmesh.analyzer.flows import ACK, PROBE, Flow, FlowBook, FlowKey
from pingmesh.messages import FORWARD, LATE, LOST, NO_RTT, OVERDUE, REVERSE, SLOW, Event

ELEMENTS_PER_ROUND = 20
FLOWS_PER_ELEMENT = 6
FLOWS_PER_TOP_ELEMENT = 10
TOP_ELEMENTS = 4
OTHER_CLASS_FLOWS = 2
FLOWS_PER_RNIC = 6
FLOWS_PER_ROUND = 80
ONSET_NATS = 5.0
"""Log likelihood ratio from which on the rate of new doubts has risen."""
CLEAN_ROUNDS, MAX_ROUNDS, ROUNDS_AFTER_OPEN = 4, 12, 3
"""So many clean rounds in a row, rounds at all or rounds beside an open incident end an episode."""
QUICK_ROUNDS = 3
"""So many rounds follow one another closely; later ones wait for the last, so that what comes and goes, as a port that
flaps, meets more than one of them in one episode."""
SLOW_WEIGHT = 0.1
"""What a slow round trip counts beside a loss: a busy host makes many of them."""
LEAST_SPAN_NS = 200_000_000
"""Shorter times are as chance has it."""


@dataclass(slots=True)
class Doubt:
    """A flow with a probe that did not come back, or came back slowly."""

    flow: Flow
    first: int
    """When it was first doubted; once something was lost, when that was first."""
    last: int
    losses: int = 0
    slow: int = 0
    direction: int = 0


@dataclass
class Episode:
    """From the first loss noticed until enough clean confirmations: one or more faults are sought."""

    began: int
    doubts: dict[FlowKey, Doubt] = field(default_factory=dict)
    rounds: int = 0
    clean_rounds: int = 0
    rounds_open: int = 0
    """Rounds that ended while an incident was open."""
    noted: int = 0
    """Reasons for doubt so far."""
    quick_until: int = QUICK_ROUNDS
    lossy_since: int | None = None
    """When something was lost for the first time; None: nothing was."""

    def add(self, flow: Flow, event: Event, sent: int) -> bool:
        """Note one event about a flow; `sent` in our clock. Returns whether the next round had better be sent at once:
        something is lost now, where it was only slow until then, or well."""
        d = self.doubts.get(flow.key)
        if d is None:
            d = self.doubts[flow.key] = Doubt(flow, sent, sent)
        d.last = max(d.last, sent)
        hurry = False
        if event.kind == SLOW:
            d.slow += 1
        elif event.kind in (OVERDUE, LOST, NO_RTT):
            hurry = bool(self.noted) and (self.lossy_since is None or self.clean_rounds > 0)
            if self.lossy_since is None:
                self.lossy_since = sent if self.noted else self.began
            if not d.losses:
                d.first = sent
            # OVERDUE and LOST speak of the same probe; either is one more reason, not one more loss to count.
            d.losses += 1
        if event.direction in (FORWARD, REVERSE):
            d.direction = event.direction
        self.noted += 1
        if hurry:
            self.clean_rounds, self.quick_until = 0, self.rounds + QUICK_ROUNDS
        return hurry

    def confirmed(self, lost: int, noted: int) -> None:
        """A round of confirmation is over that lost so many packets; `noted` is what it was when that was planned."""
        self.clean_rounds = 0 if lost or self.noted > noted else self.clean_rounds + 1

    @property
    def is_quick(self) -> bool:
        """Whether the next round is sent while the last waits for what may yet come back."""
        return self.rounds < self.quick_until

    @property
    def is_told(self) -> bool:
        """Whether what an open incident explains is no reason for doubt any more."""
        return self.rounds_open >= ROUNDS_AFTER_OPEN

    @property
    def is_over(self) -> bool:
        """Whether more rounds would tell nothing new."""
        return self.clean_rounds >= CLEAN_ROUNDS or self.rounds >= MAX_ROUNDS or self.is_told or not self.doubts

    def onset(self) -> int:
        """Since when there are so many doubts: from then on evidence counts.

        A stray loss may have begun the episode, and a fault come in the middle of it: what was well until then must not
        speak for what is broken now. The likeliest time at which the rate of new doubts (Poisson) rose, if it clearly
        did, else the beginning. Where something was lost, what was only slow is left out. O(doubts log doubts).
        """
        began = self.began if self.lossy_since is None else self.lossy_since
        first = [d.first for d in self.doubts.values() if d.losses or self.lossy_since is None]
        times = np.sort(np.array(first, np.float64)) - began
        n = len(times)
        if n < 2:
            return began
        span = max(times[-1], LEAST_SPAN_NS)
        before = np.arange(n)
        early, late = np.maximum(times, LEAST_SPAN_NS), np.maximum(span - times, LEAST_SPAN_NS)
        with np.errstate(divide="ignore", invalid="ignore"):
            gain = np.where(before, before * np.log(before / early), 0.0) + (n - before) * np.log((n - before) / late)
        gain = np.where((n - before) * early > before * late, gain - n * math.log(n / span), 0.0)
        best = int(np.argmax(gain))
        return began + max(0, int(times[best])) if gain[best] > ONSET_NATS else began

    def withdraw(self, flow: Flow) -> None:
        """A late ACK came: one reason less."""
        d = self.doubts.get(flow.key)
        if d is not None:
            d.losses = max(0, d.losses - 2)
            if not d.losses and not d.slow:
                del self.doubts[flow.key]


DOUBTFUL = frozenset({OVERDUE, LOST, NO_RTT, SLOW})
WITHDRAWS = frozenset({LATE})


def suspicious_elements(book: FlowBook, doubts: Iterable[Doubt], when: int) -> dict[str, float]:
    """How many doubtful flows may have met each element, both ways, weighted by path certainty; losses count more."""
    weight: dict[str, float] = defaultdict(float)
    for d in doubts:
        counts = 1.0 if d.losses else SLOW_WEIGHT
        for role in (PROBE, ACK):
            if (d.direction, role) in ((FORWARD, ACK), (REVERSE, PROBE)):
                continue
            paths = book.paths_at(d.flow, role, min(d.first, when))
            for path in paths:
                for e in path:
                    weight[e] += counts / len(paths)
    return weight


@dataclass(frozen=True, slots=True)
class Request:
    """One Confirm to send: flows of one RNIC, possibly in another class than their own (-1: their own)."""

    rnic: int
    list_version: int
    indexes: tuple[int, ...]
    cls: int


def plan(book: FlowBook, episode: Episode, usable: set[str]) -> tuple[list[Request], list[str]]:
    """Choose the flows of one round: the doubtful ones, and for each doubtful element others that cross it.

    `usable` are the hosts whose agents can probe. Several flows of many hosts over each element tell the element
    from its neighbours; other classes on the same flows tell a sick class from a sick link. Returns the requests
    and the suspicious elements, most suspicious first.
    """
    doubts = sorted(episode.doubts.values(), key=lambda d: (-d.losses, -d.slow, -d.last))
    weights = suspicious_elements(book, doubts, episode.began)
    elements = [e for e, _ in sorted(weights.items(), key=lambda i: (-i[1], i[0]))[:ELEMENTS_PER_ROUND]]
    per_rnic: Counter[int] = Counter()
    chosen: dict[FlowKey, Flow] = {}

    def take(flow: Flow) -> bool:
        if flow.key in chosen:
            return True
        if flow.src_host not in usable or len(chosen) >= FLOWS_PER_ROUND or per_rnic[flow.key[0]] >= FLOWS_PER_RNIC:
            return False
        if flow.key[1] != book.latest.get(flow.key[0]):
            return False
        chosen[flow.key] = flow
        per_rnic[flow.key[0]] += 1
        return True

    for d in doubts[: FLOWS_PER_ROUND // 3]:
        take(d.flow)
    other: dict[tuple[int, int], set[FlowKey]] = defaultdict(set)
    for rank, e in enumerate(elements):
        wanted = FLOWS_PER_TOP_ELEMENT if rank < TOP_ELEMENTS else FLOWS_PER_ELEMENT
        flows = sorted(book.through(e), key=lambda f: (per_rnic[f.key[0]], f.sport))
        taken: list[Flow] = []
        for f in flows:
            if len(taken) >= wanted:
                break
            if take(f):
                taken.append(f)
        for f in taken[:OTHER_CLASS_FLOWS]:
            for cls in range(len(book.classes.get(f.key[0], ()))):
                if cls != f.cls:
                    other[f.key[0], cls].add(f.key)
    requests = []
    by_rnic: dict[tuple[int, int], list[int]] = defaultdict(list)
    for rnic, version, index in chosen:
        by_rnic[rnic, version].append(index)
    for (rnic, version), indexes in by_rnic.items():
        requests.append(Request(rnic, version, tuple(sorted(indexes)), -1))
    for (rnic, cls), keys in other.items():
        version = book.latest[rnic]
        indexes = sorted(k[2] for k in keys if k[1] == version)[:OTHER_CLASS_FLOWS]
        if indexes:
            requests.append(Request(rnic, version, tuple(indexes), cls))
    return requests, elements
