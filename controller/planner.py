"""When to change probe lists: wait for registrations to settle, build up coverage, then keep still."""

from __future__ import annotations

import enum
import logging
import time
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

from controller.book import Book
from controller.coverage import CoverageReport, measure
from controller.pinglist import Draft, Entry, start, top_up, tor_mesh, twins
from controller.rates import RatePlan, intervals, trace_rates
from controller.reach import Reach
from controller.rotation import rotate
from pingmesh.messages import INTER_TOR, TOR_MESH

log = logging.getLogger(__name__)

SETTLE_QUIET_NS = 1_000_000_000
SETTLE_LIMIT_NS = 5_000_000_000
ROUND_NS = 5_000_000_000
TRACED_SHARE = 0.9
EXPECT_NS = 120_000_000_000
"""A tuple that is untraced for longer is expected to walk nothing."""
EXPECT_SAMPLE = 2_000
"""Of more untraced tuples than that, a sample stands for all."""
FRUITLESS_ROUNDS = 6
"""So many rounds in which a link gained nothing, and it is left to the slow loop: it may be down."""
UNTRACED_ROUND = 0.2
"""How much a round counts for that while traces are still missing: they may show a gain."""
UNWALKED_NS = 60_000_000_000
AWAY_NS = 3_600_000_000_000
"""Entries of an RNIC away for longer are dropped; until then it finds them again when it comes back."""
SLOWEST_NS = 3_600_000_000_000
SLICES = 12
"""A rotation is spread over its period in so many parts."""
SPARE_TUPLES = 4
"""Above the wanted tuples of a link before any is given up."""


class Phase(enum.Enum):
    """SETTLING: registrations come in. BUILDING: rounds of top-up. STEADY: lists change for good reason only."""

    SETTLING = "settling"
    BUILDING = "building"
    STEADY = "steady"


@dataclass
class Lacking:
    """A link that is not covered: since when, with how many tuples, and when the slow loop may act again."""

    since_ns: int
    best: int = 0
    rounds: float = 0
    retries: int = 0
    next_ns: int = 0


@dataclass
class Planner:
    """Decides what the book holds. Times are nanoseconds of one clock, passed in.

    `classes`: for each class above 0, how many tuples every link shall carry in it.
    """

    reach: Reach
    book: Book
    plan: RatePlan
    classes: dict[int, int]
    rotation_ns: int
    rotation_share: float
    seed: int = 0
    phase: Phase = Phase.SETTLING
    rounds: int = 0
    listed: frozenset[str] = frozenset()
    walking: frozenset[str] = frozenset()
    """Hosts whose agents run."""
    coverage: CoverageReport = field(default_factory=lambda: CoverageReport(None, (), (), {}))
    trace: tuple[float, float] = (1.0, 5.0)
    stale: bool = True
    """Something changed since coverage was measured."""
    _joined: frozenset[str] | None = None
    _absent: dict[str, int] = field(default_factory=dict)
    _missed: set[str] = field(default_factory=set)
    _measure_ns: int = 0
    _measured_ns: int = 0
    _first_ns: int = 0
    _last_ns: int = 0
    _round_ns: int = 0
    _slice_ns: int = 0
    _lacking: dict[str, Lacking] = field(default_factory=dict)
    _capped: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.measure()

    def registered(self, now_ns: int) -> None:
        """A new RNIC registered: wait for others."""
        self._first_ns = self._first_ns or now_ns
        self._last_ns = now_ns

    def active(self, name: str) -> list[Entry]:
        """The entries of one list whose both ends are listed now."""
        if name not in self.listed or name not in self.book.sheets:
            return []
        return [
            Entry(name, x.target, x.sport, x.kind, x.cls)
            for x in self.book.sheets[name].lines.values()
            if x.target in self.listed
        ]

    def flows(self, name: str) -> dict[Entry, int]:
        """The entries of one list as they are to be probed now, with intervals in microseconds."""
        out, factor = intervals(self.active(name), self.plan)
        if factor < 1:
            self._capped[name] = factor
        else:
            self._capped.pop(name, None)
        return out

    def tick(self, now_ns: int, listed: Collection[str], walking: Collection[str]) -> None:
        """Look at what changed and change the book; call it a few times a second."""
        self._membership(frozenset(n for n in listed if n in self.reach.unit_of), now_ns)
        if self.walking != walking:
            self.walking = frozenset(walking)
            self.stale = True
        if self._settled(now_ns):
            self._first_ns = self._last_ns = 0
            self._join(now_ns)
        elif not self._first_ns and self._joined is not None:
            if self.listed != self._joined:
                self._join_mesh(now_ns)  # a mate's absence is made up for at once, other tuples only if it lasts
            self._forget(now_ns)
        if self.phase is not Phase.SETTLING and now_ns >= self._measure_ns:
            began = time.perf_counter_ns()
            self._cover(now_ns)
            # In a large fabric a look at everything takes its time: never more than a tenth of it.
            self._measure_ns = now_ns + 10 * (time.perf_counter_ns() - began)
        # Published, it is not dirty any more when we look again: then tuples just added would count as never tried.
        self.stale = self.stale or bool(self.book.dirty)

    def _membership(self, listed: frozenset[str], now_ns: int) -> None:
        for name in self.listed ^ listed:
            self.book.dirty.add(name)
            self.book.dirty.update(self.book.probers.get(name, ()))
            self.stale = True
            if name in listed:
                self._absent.pop(name, None)
            else:
                self._absent[name] = now_ns
        self.listed = listed

    def _settled(self, now_ns: int) -> bool:
        if not self._first_ns or not self.listed:
            return False
        return now_ns - self._last_ns >= SETTLE_QUIET_NS or now_ns - self._first_ns >= SETTLE_LIMIT_NS

    def _forget(self, now_ns: int) -> None:
        """Replace what a lasting absence took away, and drop the entries of those away for good."""
        missed = [n for n, at in self._absent.items() if n not in self._missed and now_ns - at > UNWALKED_NS]
        if missed:
            self._missed.update(missed)
            self._join(now_ns)
        self._missed &= self._absent.keys()
        for name in [n for n, at in self._absent.items() if now_ns - at > AWAY_NS]:
            del self._absent[name]
            self.book.drop([e for e in self.book.where if name in (e.source, e.target)])

    def _draft(self) -> Draft:
        self.rounds += 1
        return Draft.of(self.reach, self.listed, f"{self.seed}/{self.rounds}", self.book.where)

    def _join(self, now_ns: int) -> None:
        """Bring the lists in line with who is there: ToR-mesh anew (it is stable), Eq. (1) where tuples lack."""
        self._join_mesh(now_ns)
        new = start(self._draft())
        self.book.add(new, now_ns)
        if new or self.phase is Phase.SETTLING:
            # The first round of top-up need not wait for traces: what Eq. (1) will leave open is known on average.
            self.phase, self._round_ns = Phase.BUILDING, now_ns - ROUND_NS
        log.info("lists follow registrations", extra={"rnics": len(self.listed), "new_tuples": len(new)})

    def _join_mesh(self, now_ns: int) -> None:
        self._joined = self.listed
        mesh = set(tor_mesh(self.reach, self.listed))
        old = {e for e in self.book.where if e.kind == TOR_MESH and e.source in self.listed and e.target in self.listed}
        self.book.drop(old - mesh)
        self.book.add(sorted(mesh - old), now_ns)

    # ------------------------------------------------------------ coverage

    def measure(self) -> CoverageReport:
        """Coverage of what is being probed now by agents that run."""
        self.stale = False
        probed: dict[Entry, int] = {}
        for name in self.book.sheets:
            if name.split("/")[0] in self.walking:
                probed.update(self.flows(name))
        reasons = {n: "its agent has not registered" for n in self.reach.unit_of if n not in self.listed}
        for name in self.listed:
            unit = self.reach.unit_of[name]
            if not any(
                self.reach.topology.may_probe(self.reach.topology.rnics[name], self.reach.topology.rnics[o])
                for u in self.reach.partners(unit)[:64]
                for o in self.reach.members[u][:4]
            ):
                reasons[name] = "no other RNIC of its fabric, group and address family exists"
        for name, factor in self._capped.items():
            reasons[name] = f"the cap of {self.plan.max_rate:g} probes/s lowers its rates to {factor:.0%}"
        self.coverage = measure(
            probed,
            self.book.paths,
            self.reach.pairs_over.keys(),
            link_rate=self.plan.link_rate,
            link_tuples=self.plan.link_tuples,
            rnics=self.reach.unit_of,
            reasons=reasons,
        )
        return self.coverage

    def _cover(self, now_ns: int) -> None:
        if self.stale or self.book.dirty or now_ns - self._measured_ns > ROUND_NS:
            self.measure()
            self._measured_ns = now_ns
        elif self.phase is Phase.STEADY:
            return
        have = {w.link: w.flows for w in self.coverage.links}
        gaps = {w.link for w in self.coverage.links if not w.covered}
        for link in [k for k in self._lacking if k not in gaps]:
            del self._lacking[link]
        for link in gaps:
            lack = self._lacking.setdefault(link, Lacking(now_ns, have[link]))
            if have[link] > lack.best:
                lack.best, lack.rounds, lack.retries, lack.next_ns = have[link], 0, 0, 0
        if self.phase is Phase.BUILDING:
            self._build(now_ns)
        else:
            self._keep(now_ns)

    def _build(self, now_ns: int) -> None:
        cov = self.coverage
        leaving = self.book.leaving()
        gaps = {k for k, x in self._lacking.items() if x.rounds < FRUITLESS_ROUNDS}
        gaps |= self._without(leaving)
        if not gaps:
            if not cov.untraced or now_ns - self._round_ns > 4 * ROUND_NS:
                self.book.drop(leaving)
                self._twin(now_ns)
                self._set_steady(now_ns)
            return
        traced = not cov.tuples or 1 - cov.untraced / cov.tuples >= TRACED_SHARE
        if traced or now_ns - self._round_ns >= ROUND_NS:
            if self._round(gaps, now_ns):
                for link in gaps & self._lacking.keys():
                    self._lacking[link].rounds += UNTRACED_ROUND if cov.untraced else 1
            elif not cov.untraced:
                for link in gaps & self._lacking.keys():  # nobody can add anything: leave it to the slow loop
                    self._lacking[link].rounds = FRUITLESS_ROUNDS
                if gaps <= self._without(leaving):
                    self.book.drop(leaving)
            self._twin(now_ns)

    def _set_steady(self, now_ns: int) -> None:
        self.phase = Phase.STEADY
        self._slice_ns = now_ns
        log.info(
            "coverage built",
            extra={"share": self.coverage.share, "tuples": self.coverage.tuples, "rounds": self.rounds},
        )

    def _without(self, leaving: Collection[Entry]) -> set[str]:
        """Links that would lack tuples once these have left."""
        if not leaving:
            return set()
        gone: Counter[str] = Counter()
        for e in leaving:
            if e.cls == 0:
                gone.update(self.book.paths.get(e.tuple5, ()))
        have = {w.link: w.flows for w in self.coverage.links}
        return {k for k, n in gone.items() if have.get(k, 0) >= self.plan.link_tuples > have.get(k, 0) - n}

    def _round(self, gaps: Collection[str], now_ns: int) -> int:
        """One round of top-up for these links; how many tuples it added."""
        self._round_ns = now_ns
        need: dict[str, float] = {}
        gone: Counter[str] = Counter()
        for e in self.book.leaving():
            gone.update(self.book.paths.get(e.tuple5, ()))
        for w in self.coverage.links:
            if w.link in gaps:
                need[w.link] = self.plan.link_tuples - w.flows + gone[w.link]
                if self._has_room(w.link):
                    need[w.link] = max(need[w.link], (self.plan.link_rate - w.rate) / self.plan.flow_rate)
        draft = self._draft()
        waiting = list(self.book.pending.items())
        sample = waiting if len(waiting) <= EXPECT_SAMPLE else draft.rng.sample(waiting, EXPECT_SAMPLE)
        weight = len(waiting) / len(sample) if sample else 1.0
        for (source, target, _), since_ns in sample:
            ends = source in self.listed and target in self.listed and source.split("/")[0] in self.walking
            if ends and now_ns - since_ns < EXPECT_NS:
                a, b = self.reach.unit_of[source], self.reach.unit_of[target]
                for link, share in self.reach.shares(a, b).items():
                    if link in need:
                        need[link] -= share * weight
        new = top_up(draft, need)
        self.book.add(new, now_ns)
        return len(new)

    def _has_room(self, link: str) -> bool:
        """Whether more tuples over a link would mean more probes: not where the cap binds for all who could send."""
        sources = {a for a, _ in self.reach.pairs_over[link]}
        return any(n in self.listed and n not in self._capped for a in sources for n in self.reach.members[a])

    def _twin(self, now_ns: int) -> None:
        if self.classes:
            active = [e for n in self.book.sheets for e in self.active(n) if e.kind == INTER_TOR]
            self.book.add(twins(active, self.book.paths, self.classes), now_ns)

    def _keep(self, now_ns: int) -> None:
        """The slow loop: a link unwalked for a minute is topped up, each time after a longer wait; else rotation."""
        due = {k for k, x in self._lacking.items() if now_ns - x.since_ns > UNWALKED_NS and now_ns >= x.next_ns}
        if due and now_ns - self._round_ns >= UNWALKED_NS:
            for link in due:
                lack = self._lacking[link]
                lack.retries += 1
                lack.next_ns = now_ns + min(UNWALKED_NS << min(lack.retries, 6), SLOWEST_NS)
            self._round(due, now_ns)
        elif not self._lacking and now_ns - self._slice_ns >= self.rotation_ns // SLICES:
            self._slice_ns = now_ns
            self._rotate(now_ns)

    def _rotate(self, now_ns: int) -> None:
        """Replace a slice of the tuples; the old ones leave when every link does without them."""
        slice_ = rotate(
            self._draft(),
            self.book.paths,
            Counter({w.link: w.flows for w in self.coverage.links}),
            keep=self.plan.link_tuples + SPARE_TUPLES,
            share=self.rotation_share / SLICES,
        )
        self.book.drop(slice_.spare)
        self.book.leave(slice_.old)
        self.book.add(slice_.new, now_ns)
        if slice_.old:
            self.phase, self._round_ns = Phase.BUILDING, now_ns

    def trace_budget(self) -> tuple[float, float]:
        """Tracing rates for the lists as they are."""
        self.trace = trace_rates(self.reach, (e for n in self.book.sheets for e in self.active(n)))
        return self.trace
