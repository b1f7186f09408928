"""The planner on a simulated clock over a simulated ECMP fabric: convergence, calm, restarts."""

from __future__ import annotations

import sqlite3
from collections import Counter

import pytest
from controller_fakes import EcmpFabric

from controller import database
from controller.book import Book
from controller.coverage import CoverageReport
from controller.planner import Phase, Planner
from controller.rates import RatePlan
from controller.reach import Reach
from pingmesh.messages import Flow, TracedPath
from topology.generate import clos3, leaf_spine, rail_optimised
from topology.model import Topology

S = 1_000_000_000


class Simulation:
    """Planner, book and agents that trace at once what is published; `traces_per_s` limits how fast."""

    def __init__(
        self,
        t: Topology,
        *,
        plan: RatePlan | None = None,
        db: sqlite3.Connection | None = None,
        classes: dict[int, int] | None = None,
        traces_per_s: int = 10_000,
        rotation_s: int = 3600,
        seed: int = 7,
    ) -> None:
        self.t = t
        self.fabric = EcmpFabric(t)
        self.db = db or database.connect(":memory:")
        self.reach = Reach(t)
        self.book = Book(self.db, self.reach, ["small", "large"])
        self.planner = Planner(self.reach, self.book, plan or RatePlan(), classes or {}, rotation_s * S, 0.2, seed=seed)
        self.numbers = {n: i for i, n in enumerate(sorted(t.rnics), 1)}
        self.now = 1_000 * S
        self.listed = set(t.rnics)
        self.walking = set(t.hosts)
        self.traces_per_s = traces_per_s
        self.traced: set[tuple[str, str, int]] = set()
        self.published: Counter[str] = Counter()
        self.planner.registered(self.now)

    def run(self, seconds: float, step: float = 0.5) -> CoverageReport:
        for _ in range(round(seconds / step)):
            self.now += round(step * S)
            self.planner.tick(self.now, self.listed, self.walking)
            self.publish()
            self._trace(max(round(self.traces_per_s * step), 1))
        return self.planner.measure()

    def publish(self) -> None:
        for name in sorted(self.book.dirty):
            self.published[name] += self.book.compose(name, self.numbers.get, self.planner.flows(name))
        self.book.save()

    def _trace(self, budget: int) -> None:
        for source, target, sport in sorted(set(self.book.pending) - self.traced)[:budget]:
            if source.split("/")[0] in self.walking and source in self.listed:
                self.trace(source, target, sport)

    def trace(self, source: str, target: str, sport: int) -> bool:
        peer = self.numbers[target]
        flow = next((f for f in self.book.sheets[source].flows if (f.peer, f.sport) == (peer, sport)), None)
        if flow is None:
            return False
        hops = self.fabric.hops(source, target, sport, flow.trace_mask)
        self.traced.add((source, target, sport))
        version = self.book.versions[source]
        fresh = self.book.traced(
            source, TracedPath(0, self.numbers[source], version, flow.index, sport, hops, self.now)
        )
        self.planner.stale |= fresh
        return fresh

    def retrace_all(self) -> None:
        for source, target, sport in sorted(self.book.paths):
            self.trace(source, target, sport)

    def lists(self) -> dict[str, tuple[int, list[Flow]]]:
        return {n: (self.book.versions[n], list(s.flows)) for n, s in self.book.sheets.items()}

    def true_walks(self) -> Counter[str]:
        """Tuples that really cross each link, by the fabric's own account."""
        out: Counter[str] = Counter()
        for e in self.book.where:
            if e.cls == 0 and e.kind and {e.source, e.target} <= self.listed:
                out.update(d.name for d in self.fabric.path(*e.tuple5))
        return out


@pytest.mark.parametrize("seed", range(4))
def test_coverage_is_built_while_traces_come_late(seed: int) -> None:
    """Tuples that are published and not traced yet are awaited: that no more are added means nothing meanwhile."""
    sim = Simulation(leaf_spine(3, 3, 2, 1), seed=seed)
    for _ in range(20):
        for _ in range(7):
            sim.now += S // 4
            sim.planner.tick(sim.now, sim.listed, sim.walking)
            sim.publish()
        sim.run(0.25, 0.25)
        if sim.planner.phase is Phase.STEADY:
            break
    assert (sim.planner.phase, sim.planner.measure().share) == (Phase.STEADY, 1.0), sim.planner.coverage.reasons


@pytest.mark.parametrize(
    "t",
    [
        leaf_spine(4, 4, 4, 1),
        leaf_spine(2, 2, 2, 1),
        leaf_spine(4, 4, 1, 1),
        leaf_spine(2, 2, 2, 1, parallel=2),
        leaf_spine(2, 1, 1, 1),
        clos3(2, 2, 2, 4, 2, 1),
        rail_optimised(2, 2, 2, 2),
    ],
    ids=["4x4x16", "2x2x2", "one host a leaf", "parallel", "one spine", "three tiers", "rails"],
)
def test_top_up_converges(t: Topology) -> None:
    sim = Simulation(t, classes={1: 4})
    report = sim.run(40)
    assert report.share == 1.0, report.reasons
    assert sim.planner.phase is Phase.STEADY
    assert report.untraced == 0
    walked = sim.true_walks()
    assert all(walked[d.name] == w.flows >= 16 for w in report.links for d in t.directed_links if d.name == w.link)
    assert not report.uncovered_rnics
    large = Counter(k for e in sim.book.where if e.cls for k in sim.book.paths[e.tuple5])
    assert all(large[d.name] >= 4 for d in t.directed_links)
    for name in t.rnics:
        assert sum(1e6 / us for us in sim.planner.flows(name).values()) <= 150


def test_convergence_costs_few_tuples_and_few_versions() -> None:
    sim = Simulation(leaf_spine(4, 4, 4, 1), traces_per_s=27)
    report = sim.run(60)
    assert report.share == 1.0
    assert report.tuples <= 2 * 4 * 4 * 16
    assert max(sim.published.values()) <= 10


def test_one_leaf_has_no_links_and_no_coverage_number() -> None:
    report = Simulation(leaf_spine(1, 2, 3, 1)).run(20)
    assert (report.share, report.links, report.tuples, report.uncovered_rnics) == (None, (), 0, ())


def test_a_cap_that_binds_is_kept_and_said() -> None:
    sim = Simulation(leaf_spine(2, 8, 1, 1), plan=RatePlan(max_rate=50))
    report = sim.run(60)
    assert report.share is not None
    assert report.share < 1
    assert report.reasons["h1/rnic0"].startswith("the cap of 50 probes/s lowers its rates to")
    assert "the rate cap of its RNICs binds" in report.reasons["leaf1->spine1"]
    for name in sim.t.rnics:
        assert sum(1e6 / us for us in sim.planner.flows(name).values()) <= 50
    before = sim.lists()
    sim.run(20)
    assert sim.lists() == before  # does not go on adding what cannot help


def test_lists_wait_for_registrations_to_settle() -> None:
    sim = Simulation(leaf_spine(2, 2, 2, 1))
    sim.listed = set()
    for name in sorted(sim.t.rnics):
        sim.listed.add(name)
        sim.planner.registered(sim.now)
        sim.run(0.5)
        assert sim.planner.phase is Phase.SETTLING
    sim.run(1.5)
    assert sim.planner.phase is not Phase.SETTLING


def test_nothing_changes_without_cause() -> None:
    sim = Simulation(leaf_spine(4, 4, 4, 1))
    sim.run(40)
    before = sim.lists()
    sim.run(120)
    assert sim.lists() == before


def test_a_link_down_is_topped_up_late_and_ever_more_rarely() -> None:
    sim = Simulation(leaf_spine(2, 4, 2, 1))
    sim.run(40)
    before = sim.lists()
    sim.fabric.broken = {"leaf1->spine1", "spine1->leaf1"}
    sim.retrace_all()
    report = sim.run(50)
    assert report.share == 12 / 16  # with two leaves, nothing else crosses spine1
    assert "leaf1->spine1" in report.below
    assert sim.lists() == before
    sim.run(30)
    first = sum(len(flows) for _, flows in sim.lists().values())
    assert first > sum(len(flows) for _, flows in before.values())
    sim.run(600, step=2)
    rounds = sim.planner._lacking["leaf1->spine1"].retries
    assert 2 <= rounds <= 4
    sim.fabric.broken = set()
    sim.retrace_all()
    assert sim.run(10).share == 1.0


def test_an_rnic_that_leaves_and_returns_finds_its_tuples_again() -> None:
    sim = Simulation(leaf_spine(4, 4, 4, 1))
    sim.run(40)
    before = {n: flows for n, (_, flows) in sim.lists().items()}
    sim.listed.discard("h1/rnic0")
    sim.run(10)
    away = {n: flows for n, (_, flows) in sim.lists().items()}
    assert away["h1/rnic0"] == []
    number = sim.numbers["h1/rnic0"]
    assert all(f.peer != number for flows in away.values() for f in flows)
    sim.listed.add("h1/rnic0")
    sim.run(10)
    assert {n: flows for n, (_, flows) in sim.lists().items()} == before


def test_a_lasting_absence_is_made_up_for() -> None:
    sim = Simulation(leaf_spine(2, 2, 2, 1))
    sim.run(40)
    sim.listed.discard("h1/rnic0")
    sim.walking.discard("h1")
    report = sim.run(300)
    assert report.share == 1.0
    assert report.reasons["h1/rnic0"] == "its agent has not registered"
    sim.run(4000, step=20)
    assert all("h1/rnic0" not in (e.source, e.target) for e in sim.book.where)


def test_a_dead_agent_covers_nothing_but_stays_probed() -> None:
    sim = Simulation(leaf_spine(2, 2, 1, 1))
    sim.run(40)
    sim.walking.discard("h1")
    report = sim.run(5)
    assert {w.link for w in report.links if not w.covered} == {
        "leaf1->spine1",
        "leaf1->spine2",
        "spine1->leaf2",
        "spine2->leaf2",
    }
    assert any(f.peer == sim.numbers["h1/rnic0"] for f in sim.book.sheets["h2/rnic0"].flows)


def test_rotation_replaces_tuples_and_keeps_coverage() -> None:
    sim = Simulation(leaf_spine(4, 4, 4, 1), rotation_s=1200, classes={1: 4})
    sim.run(40)
    before = {e for e in sim.book.where if e.kind and not e.cls}
    shares = [sim.run(2, step=0.5).share for _ in range(620)]
    after = {e for e in sim.book.where if e.kind and not e.cls}
    assert min(s for s in shares if s is not None) == 1.0
    replaced = 1 - len(before & after) / len(before)
    assert 0.1 <= replaced <= 0.5
    assert len(after) <= 1.3 * len(before)
    assert all(e.cls == 0 or any(b.tuple5 == e.tuple5 and b.cls == 0 for b in after) for e in sim.book.where if e.kind)


def test_same_seed_same_lists() -> None:
    t = clos3(2, 2, 2, 4, 1, 1)
    one, other, third = (Simulation(t, seed=s) for s in (3, 3, 4))
    for sim in (one, other, third):
        sim.run(40)
    assert one.lists() == other.lists()
    assert one.lists() != third.lists()


def test_a_restart_keeps_lists_versions_and_paths() -> None:
    sim = Simulation(leaf_spine(4, 4, 4, 1), classes={1: 4})
    sim.run(40)
    before, paths = sim.lists(), dict(sim.book.paths)
    sim.book.save()
    again = Simulation(sim.t, db=sim.db, classes={1: 4})
    assert again.lists() == before
    assert again.book.paths == paths
    report = again.run(30)
    assert again.lists() == before
    assert report.share == 1.0


def test_restart_with_another_topology_drops_what_is_gone() -> None:
    sim = Simulation(leaf_spine(4, 2, 2, 1))
    sim.run(40)
    smaller = Simulation(leaf_spine(3, 2, 2, 1), db=sim.db)
    report = smaller.run(40)
    assert report.share == 1.0
    gone = set(sim.t.rnics) - set(smaller.t.rnics)
    assert gone
    assert all(not {e.source, e.target} & gone for e in smaller.book.where)
    assert all(smaller.book.sheets[n].flows == [] for n in gone)


def test_a_trace_of_an_older_entry_at_the_same_index_is_not_believed() -> None:
    sim = Simulation(leaf_spine(2, 2, 1, 1))
    sim.run(3)
    source = "h1/rnic0"
    entry = next(e for e in sim.book.where if e.source == source and e.kind)
    index, version = sim.book.where[entry], sim.book.versions[source]
    hops = sim.fabric.hops(source, entry.target, entry.sport, 2)
    sim.book.drop([entry])
    again = type(entry)(entry.source, entry.target, entry.sport + 1)
    sim.book.add([again], sim.now)
    assert sim.book.where[again] == index
    assert not sim.book.traced(source, TracedPath(0, 1, version, index, entry.sport, hops, 1))
    assert not sim.book.traced(source, TracedPath(0, 1, version, index, again.sport, hops, 1))
    sim.publish()
    assert sim.book.traced(source, TracedPath(0, 1, sim.book.versions[source], index, again.sport, hops, 1))


def test_traces_that_fit_no_path_change_nothing() -> None:
    sim = Simulation(leaf_spine(2, 2, 1, 1))
    sim.run(3)
    source, target, sport = next(iter(sim.book.paths))
    known = sim.book.paths[source, target, sport]
    index = next(i for e, i in sim.book.where.items() if e.tuple5 == (source, target, sport))
    version = sim.book.versions[source]
    for hops in ([(2, "203.0.113.9")], [(2, None)], [], [(99, "x")], [(-3, "10.0.0.1")]):
        assert not sim.book.traced(source, TracedPath(0, 1, version, index, sport, hops, 1))
        assert sim.book.paths[source, target, sport] == known
