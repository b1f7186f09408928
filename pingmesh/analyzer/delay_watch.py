"""The watch over delays: looks at several spans of time, and says only what lasts, stands out and has no excuse.

Two ways lead to a name. *Quick*: round trips of milliseconds need no baseline; a look at the last samples, those of
active confirmations too, names what delays them, and a second look at later ones confirms it. *Fine*: window by
window, each flow against its own usual round trip (`delay_baselines`), over the last quarter of a minute, minute, two
minutes and five; a component is named when two looks running find it, its delay is larger than what clocks of that
kind can tell, and the history of its flows shows a step.

Samples of hosts that were starved, new, silent or gone are not given to it; what they are known for only afterwards is
taken back (`drop`). What explains delays without a fault of the fabric (see `Cause`) is counted in `excused`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from pingmesh.analyzer.candidates import Candidate
from pingmesh.analyzer.components import Components
from pingmesh.analyzer.delay_baselines import BLOCK, CELLS, DelayBook, Excess
from pingmesh.analyzer.delay_shifts import change_point, is_queue, level
from pingmesh.analyzer.delays import DelaySuspect, explain_delays, stands_out
from pingmesh.analyzer.table import Floats, Ints
from pingmesh.incidents import rfc3339
from pingmesh.messages import WINDOW_NS, Verdict

SPANS = (3, 12, CELLS - 2)
"""Windows that are looked at together."""
STRIDE = 4
"""The longer ones, each time a quarter of them is new."""
LONG_BLOCKS = 5
"""Minutes of the longest look."""
FINE_THRESHOLD = 12.0
"""Nats against any slow component: there are three looks each five seconds."""
LOOKS = 2
"""Looks running that must find a component."""
MEMORY = 3
"""Looks of its kind for which a component stays found."""
LEAST_FLOWS = 3
LEAST_PROBERS = 2
LEAST_SHARE = 0.5
LEAST_TIMED = 10
"""Flows with round trips without which nothing can be said."""
MOST_COMMON = 1_000
"""Flows that tell how the whole fabric changes."""
LEAST_Z = 5.0
LEAST_STEP = 1.5
"""Wanders by which a component's delay must rise."""
STILL = 0.6
"""Share of the delay below which it is over."""
SAME = 0.5
"""Share of the affected flows in common from which two looks speak of the same delay."""
FINEST_NS, FINEST_SHARE = 1_500.0, 0.05
"""Hardware stamps: the least delay told, and the least share of the usual round trip."""
KERNEL_NS, KERNEL_SHARE = 200_000.0, 1.0
"""Kernel stamps, of links: a busy host is late by as much as that, but not all hosts beyond one link."""
SLOW_SHARE = 7.0
"""Anything else must be longer than `slow_ns` and this many usual round trips."""
APART_NS = 300_000_000
"""Samples of two quick looks lie so far apart."""
QUICK_VARYING = 0.05
"""Means of ten probes and more differ less than the depths of a queue that they meet."""
QUICK_NS = 15_000_000_000
"""A quick look holds so long without a further one."""

HARDWARE, KERNEL, SOFTWARE = range(3)
CLOCKS = {"hardware": HARDWARE, "kernel": KERNEL, "software": SOFTWARE}


@dataclass(frozen=True, slots=True)
class Slow:
    """A component that is slow now. Durations in nanoseconds; `excess_ns` is what a round trip takes longer."""

    candidate: Candidate
    direction: str | None
    excess_ns: float
    low_ns: float
    high_ns: float
    usual_ns: float
    share: float
    flows: int
    probers: int
    is_queue: bool
    since_ns: int
    score: float
    confidence: float
    alternatives: tuple[Candidate, ...]


@dataclass(slots=True)
class _Track:
    slow: Slow
    slots: Ints
    hits: int = 0
    last: int = 0
    """Window of the last look that found it."""
    until: int = 0
    """Window until which it stays found."""


@dataclass(slots=True)
class _Quick:
    slow: Slow
    heard: list[int] = field(default_factory=list)
    seen: int = 0


class DelayWatch:
    """One watch over one fabric. RNICs are numbered by whoever makes the slots; `clocks` are codes by that number."""

    def __init__(self, components: Components, rnics: int, slow_ns: int, window_ns: int = WINDOW_NS) -> None:
        self.components = components
        self.book = DelayBook(components)
        self.clocks = np.full(rnics, SOFTWARE, np.int64)
        """HARDWARE, KERNEL or SOFTWARE; what is not known may be anything."""
        self.excused: Counter[str] = Counter()
        """Delays of no component, by cause."""
        self.slow_ns = float(slow_ns)
        self._window_ns = window_ns
        self._single = {c: i for i, c in enumerate(components.singles)}
        self._tracks: dict[tuple[str, str], _Track] = {}
        self._quick: dict[tuple[str, str], _Quick] = {}
        self._holding = False
        self._looked = -1
        self._blocks = -1

    # ------------------------------------------------------------ fine

    def fine(self) -> list[Slow]:
        """Components that are slow against their usual, highest score first. Works once a window, else remembers."""
        if self.book.newest > self._looked:
            self._looked = self.book.newest
            self._evaluate(self._looked - 1)
        slow = [t.slow for t in self._tracks.values() if t.hits >= LOOKS]
        return sorted(slow, key=lambda s: (-round(s.score, 6), s.candidate.order))

    def _evaluate(self, end: int) -> None:
        book = self.book
        looks: list[tuple[Excess, list[DelaySuspect], int]] = []
        recent = book.excess(end - SPANS[0] + 1, end)
        looks.append((recent, self._search(recent), MEMORY))
        for n in SPANS[1:]:
            every = n // STRIDE
            if end % every == 0:
                found = book.excess(end - n + 1, end, least_cells=n // 3)
                looks.append((found, self._search(found), MEMORY * every))
        if book.blocked > self._blocks:
            self._blocks = book.blocked
            found = book.block_excess(LONG_BLOCKS)
            looks.append((found, self._search(found), BLOCK * (MEMORY - 1)))
        for excess, suspect, memory in _distinct(looks):
            self._note(excess, suspect, end, end + memory)
        self._supersede(end)
        for key, t in list(self._tracks.items()):
            if t.until < end or self._is_over(t, recent):
                del self._tracks[key]
        singles = [self._single[t.slow.candidate] for t in self._tracks.values()]
        if singles or self._holding:
            book.hold(book.crossing(np.array(singles, np.int64)))
        self._holding = bool(singles)
        new = book.forget()
        if new is not None:
            for t in self._tracks.values():
                t.slots = new[t.slots][new[t.slots] >= 0]

    def _search(self, found: Excess) -> list[DelaySuspect]:
        if found.table.rows < LEAST_TIMED or not stands_out(found.table, len(self.components.singles)):
            return []
        suspects = explain_delays(found.table, self.components, threshold=FINE_THRESHOLD)
        return [s for s in suspects if self._counts(s) and s.excess_ns >= self._floor(s, found)]

    def _counts(self, s: DelaySuspect) -> bool:
        """Whether a suspect is worth a name; why not is counted."""
        if s.excuses:
            self.excused.update(cause.name.lower() for cause in s.excuses)
            return False
        return len(s.rows) >= LEAST_FLOWS and s.probers >= LEAST_PROBERS and s.share >= LEAST_SHARE

    def _floor(self, s: DelaySuspect, found: Excess) -> float:
        """The least delay that the clocks at the ends of the affected flows can tell."""
        t, usual = found.table, found.usual[s.rows]
        clock = np.maximum(self.clocks[t.prober[s.rows]], self.clocks[t.responder[s.rows]])
        coarse = np.maximum(self.slow_ns, SLOW_SHARE * usual)
        is_link = s.candidate.type == "link"
        kernel = np.maximum(KERNEL_NS, KERNEL_SHARE * usual) if is_link else coarse
        fine = np.maximum(FINEST_NS, FINEST_SHARE * usual)
        return float(np.median(np.select([clock == HARDWARE, clock == KERNEL], [fine, kernel], coarse)))

    def _note(self, found: Excess, s: DelaySuspect, end: int, until: int) -> None:
        key = (s.candidate.component, s.candidate.type)
        slots = found.slots[s.rows]
        track = self._tracks.get(key)
        if track is None:
            windows, history = self.book.history(slots)
            shift = change_point(level(history) - self._common(found.slots, slots), windows)
            if shift is None or not shift.is_sudden or shift.z < LEAST_Z:
                return
            if shift.after - shift.before < LEAST_STEP * shift.wander:
                return
            since = int(windows[shift.at]) * self._window_ns
            slow = _slow(s, float(np.median(found.usual[s.rows])), since, self._is_queue(slots, s, since, end))
            track = self._tracks[key] = _Track(slow, slots)
        else:
            usual, since = float(np.median(found.usual[s.rows])), track.slow.since_ns
            track.slow = _slow(s, usual, since, self._is_queue(slots, s, since, end))
            track.slots = slots
        track.hits += end > track.last
        track.last, track.until = end, max(track.until, until)

    def _common(self, slots: Ints, affected: Ints) -> Floats | float:
        """How all other flows changed over the same time, by an even choice of them; 0 where there are too few."""
        others = np.setdiff1d(slots, affected)
        if len(others) < LEAST_TIMED:
            return 0.0
        return level(self.book.history(others[:: -(-len(others) // MOST_COMMON)])[1])

    def _supersede(self, end: int) -> None:
        """What now has other names, which two looks have found, loses its old one."""
        new = [t for t in self._tracks.values() if t.last == end and t.hits >= LOOKS]
        for key, t in list(self._tracks.items()):
            if t.last < end and any(_common(t.slots, n.slots) > SAME for n in new):
                del self._tracks[key]

    def _is_queue(self, slots: Ints, s: DelaySuspect, since: int, end: int) -> bool:
        first = max(since // self._window_ns + 1, end - CELLS // 2)
        cells = self.book.cells(first, end)[slots].astype(np.float64)
        return is_queue(cells, self.book.noise(slots), s.excess_ns)

    def _is_over(self, t: _Track, recent: Excess) -> bool:
        its = np.isin(recent.slots, t.slots)
        excess, others = recent.table.excess[its], recent.table.excess[~its]
        if len(excess) < LEAST_FLOWS:
            return False  # not enough data to say so
        middle = float(np.median(excess))
        spread = 1.4826 * float(np.median(np.abs(excess - middle)))
        common = float(np.median(others)) if len(others) >= LEAST_TIMED else 0.0
        return bool(middle - common + 2.5 * spread / np.sqrt(len(excess)) < STILL * t.slow.excess_ns)

    # ------------------------------------------------------------ quick

    def quick_latest(self, heard: Sequence[tuple[int, Ints, Floats]], since_ns: int, now_ns: int) -> list[Slow]:
        """`quick` of (when they ended, slots, round trips) of windows and confirmations, oldest first."""
        n = len(self.book) if heard else 0
        last, before, ends = np.full(n, np.nan), np.full(n, np.nan), np.zeros(n, np.int64)
        for end, slots, rtts in heard:
            before[slots] = last[slots]
            last[slots], ends[slots] = rtts, end
        # What was slow once and then quick again is not slow.
        rtt = np.fmin(last, before)
        some = np.flatnonzero(~np.isnan(rtt))
        return self.quick(some, rtt[some], ends[some], since_ns, now_ns)

    def quick(self, slots: Ints, rtt_ns: Floats, heard_ns: Ints, since_ns: int, now_ns: int) -> list[Slow]:
        """Components that delay round trips by milliseconds: slots, their latest round trips, and when they ended.

        Slots without a usual round trip are held against those of as many hops.
        """
        for key in [k for k, q in self._quick.items() if now_ns - q.seen > QUICK_NS]:
            del self._quick[key]
        found = self._quick_search(slots, rtt_ns)
        named = []
        for s, usual in found:
            key = (s.candidate.component, s.candidate.type)
            heard = int(heard_ns[s.rows].max())
            q = self._quick.get(key)
            # Flows at a queue meet it at different depths.
            shape = (rtt_ns[s.rows] - usual)[None, :]
            slow = _slow(s, usual, since_ns, is_queue(shape, np.zeros(1), s.excess_ns, QUICK_VARYING))
            q = self._quick.setdefault(key, _Quick(slow))
            q.slow, q.seen = replace(slow, since_ns=min(q.slow.since_ns, since_ns)), now_ns
            if not q.heard or heard - q.heard[-1] > APART_NS:
                q.heard = [*q.heard[-LOOKS:], heard]
            if len(q.heard) >= LOOKS:
                named.append(q.slow)
        return named

    def _quick_search(self, slots: Ints, rtt_ns: Floats) -> list[tuple[DelaySuspect, float]]:
        if len(slots) < LEAST_TIMED or np.count_nonzero(rtt_ns > self.slow_ns) < LEAST_FLOWS:
            return []
        usual = self.book.usual(self.book.newest - CELLS + 1)[0][slots]
        hops = self.book.hops[slots]
        for n in np.unique(hops):
            alike = hops == n
            of = rtt_ns[alike] if np.count_nonzero(alike) >= LEAST_TIMED else rtt_ns
            usual[alike & np.isnan(usual)] = np.quantile(of, 0.25)
        least = np.maximum(self.slow_ns, SLOW_SHARE * usual)
        if np.count_nonzero(rtt_ns - usual > least) < LEAST_FLOWS:
            return []
        table = self.book.table(slots, rtt_ns - usual, least / 6)
        suspects = explain_delays(table, self.components, least_ns=self.slow_ns / 2)
        return [
            (s, float(np.median(usual[s.rows])))
            for s in suspects
            if self._counts(s) and s.excess_ns >= float(np.median(least[s.rows]))
        ]

    # ------------------------------------------------------------ both

    def merged(self, fine: Sequence[Slow], quick: Sequence[Slow]) -> list[Slow]:
        """One entry a component, the two directions of a link as one; of both ways the finer word."""
        out: dict[tuple[str, str], Slow] = {}
        for s in (*fine, *quick):
            key = (s.candidate.component, s.candidate.type)
            before = out.get(key)
            if before is None:
                out[key] = s
            elif before.direction != s.direction and None not in (before.direction, s.direction):
                out[key] = replace(before, direction="both", since_ns=min(before.since_ns, s.since_ns))
        return list(out.values())


def _slow(s: DelaySuspect, usual: float, since: int, queue: bool) -> Slow:
    c = s.candidate
    # What a round trip crosses there or back, as an RNIC's two sides, it cannot tell apart.
    ways = {a.direction for a in s.equals if a.component == c.component}
    return Slow(
        candidate=c,
        direction=None if ways else c.direction,
        excess_ns=s.excess_ns,
        low_ns=s.low_ns,
        high_ns=s.high_ns,
        usual_ns=usual,
        share=s.share,
        flows=s.flows,
        probers=s.probers,
        is_queue=queue,
        since_ns=since,
        score=s.score,
        confidence=s.confidence,
        alternatives=tuple(a for a in s.alternatives if a.component != c.component),
    )


def _distinct(looks: list[tuple[Excess, list[DelaySuspect], int]]) -> list[tuple[Excess, DelaySuspect, int]]:
    """The suspects of all looks, of those that speak of the same flows only the best look's."""
    ranked = sorted(looks, key=lambda k: -sum(s.score for s in k[1]))
    out: list[tuple[Excess, DelaySuspect, int]] = []
    for excess, suspects, memory in ranked:
        taken = [e.slots[s.rows] for e, s, _ in out]
        for s in suspects:
            mine = excess.slots[s.rows]
            if not any(_common(mine, other) > SAME for other in taken):
                out.append((excess, s, memory))
    return out


def _common(a: Ints, b: Ints) -> float:
    return float(len(np.intersect1d(a, b)) / max(1, min(len(a), len(b))))


def verdict_of(slow: Slow, ends: list[str]) -> Verdict:
    """A slow component in the words of an incident; `ends` are those of a link or RNIC."""
    c, usual = slow.candidate, slow.usual_ns
    since = (rfc3339(slow.since_ns) or "")[11:19]
    kind = "a queue, for it varies" if slow.is_queue else "a constant shift"
    return Verdict(
        component=c.component,
        component_type=c.type,
        direction=slow.direction,
        ends=ends,
        symptom="high_rtt",
        confidence=round(slow.confidence, 3),
        alternatives=sorted({a.component for a in slow.alternatives} - {c.component}),
        since_ns=slow.since_ns,
        evidence={
            "summary": f"since {since} UTC round trips across {c.component} take {in_words(slow.excess_ns)} longer "
            f"({in_words(slow.low_ns)} to {in_words(slow.high_ns)}) than the usual {in_words(usual)}: {kind}; "
            "nothing is lost",
            "kind": "congestion" if slow.is_queue else "slow component",
            "excess_us": round(slow.excess_ns / 1e3, 1),
            "excess_low_us": round(slow.low_ns / 1e3, 1),
            "excess_high_us": round(slow.high_ns / 1e3, 1),
            "usual_us": round(usual / 1e3, 1),
            "share_affected": round(slow.share, 3),
            "flows_crossing": slow.flows,
            "probers_affected": slow.probers,
        },
    )


def in_words(ns: float) -> str:
    """A duration with the digits that matter.

    >>> in_words(8_230.0), in_words(153_900.0), in_words(12_340_000.0)
    ('8.2 µs', '154 µs', '12.3 ms')
    """
    if ns >= 1e6:
        return f"{ns / 1e6:.1f} ms"
    return f"{ns / 1e3:.0f} µs" if ns >= 1e5 else f"{ns / 1e3:.1f} µs"
