"""Delays from samples to verdicts: milliseconds at once, microseconds in time, and no false name."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from pingmesh.analyzer.flows import ACK, PROBE, FlowBook
from pingmesh.analyzer.flows import Flow as Walked
from pingmesh.analyzer.hosts import HostBook
from pingmesh.analyzer.judge import Judge
from pingmesh.analyzer.localise import localise
from pingmesh.analyzer.samples import Sample, SampleStore
from pingmesh.messages import (
    PROBER_COLUMNS,
    RESPONDER_COLUMNS,
    WINDOW_NS,
    Flow,
    Peer,
    ProbeClass,
    ProbeList,
    ProberRows,
    TracedPath,
    Verdict,
    pack_columns,
)
from topology.generate import leaf_spine
from topology.model import Topology

S = 10**9
W = WINDOW_NS
START = 200_000 * W
US, MS = 1e3, 1e6
FLOWS = 14
"""Of each RNIC."""

Delay = Callable[[str], float]
"""What an element adds (ns)."""
Own = Callable[[Walked], float]


def nothing(element: str) -> float:
    return 0.0


class Fabric:
    """16 RNICs whose flows are probed ten times a window; `window` lets one pass and looks."""

    def __init__(self, seed: int, clock: str = "hardware", topology: Topology | None = None) -> None:
        self.rng = random.Random(seed)
        self.topology = topology or leaf_spine(4, 4, 4, 1)
        self.book = FlowBook(self.topology)
        self.hosts = HostBook()
        self.hosts.session_started(START - 100 * S)
        self.store = SampleStore(self.book)
        self.judge = Judge(self.topology, self.book, self.hosts, self.store, localise, 1e-4, frozenset)
        self.now = START
        names = list(self.topology.rnics)
        peers = [Peer(i, n, "", 1, 1, 1, 4096) for i, n in enumerate(names)]
        for i, name in enumerate(names):
            host, device = name.split("/")
            self.hosts.on_message(host, 1, START - 50 * S, 0)
            self.hosts.get(host).rebooted = 0
            self.hosts.set_clock(name, clock)
            flows = []
            for j in range(FLOWS):
                peer = self.rng.choice([k for k in range(len(names)) if k != i])
                flows.append(Flow(j, peer, 50000 + j, 0, 1, 10**6, 2))
            self.book.add_list(
                ProbeList(
                    cluster="lab",
                    host=host,
                    device=device,
                    number=i,
                    list_version=1,
                    classes=[ProbeClass()],
                    flows=flows,
                    peers=peers,
                )
            )
        self.trace(START - 200 * S)

    def trace(self, at: int) -> None:
        inbound = {d.name: d.target_address for d in self.topology.directed_links}
        for flow in self.book.current():
            for role in (PROBE, ACK):
                a, b = (flow.src, flow.dst) if role == PROBE else (flow.dst, flow.src)
                path = self.rng.choice(self.book.path_set(a, b))
                if len(path) > 2:
                    self.book.add_path(TracedPath(role, *flow.key, flow.sport, [(2, inbound[path[1]])], at), at)

    def round_trips(self, delay: Delay, own: Own) -> dict[Walked, int]:
        """The mean round trip of each flow."""
        out = {}
        rng = self.rng
        for flow in self.book.current():
            ways = self.book.paths_at(flow, PROBE, self.now)[0] + self.book.paths_at(flow, ACK, self.now)[0]
            rtt = 8_000 + 600 * len(ways) + rng.gammavariate(10, 80) + own(flow)
            rtt += sum(delay(e) * rng.uniform(0.8, 1.2) for e in ways)
            rtt += rng.paretovariate(1.5) * 5e3 if rng.random() < 0.05 else 0
            out[flow] = int(rtt)
        return out

    def report(self, rtts: dict[Walked, int]) -> None:
        """Both ends report a window in which ten probes of each flow came back."""
        window = self.now // W
        by_prober: dict[int, list[tuple[int, int]]] = {}
        for flow, rtt in rtts.items():
            by_prober.setdefault(flow.key[0], []).append((flow.key[2], rtt))
        for number, flows in by_prober.items():
            ten, zero = [10] * len(flows), [0] * len(flows)
            index, sums = [i for i, _ in flows], [rtt // 10 for _, rtt in flows]
            sent = pack_columns(PROBER_COLUMNS, [index, ten, ten, ten, ten, zero, zero, zero, zero, sums, zero])
            rows = ProberRows(rnic=number, epoch=1, list_version=1, window=window, columns=sent)
            self.store.add_prober(rows, 0, self.now + W)
            keys = [[k] * len(flows) for k in (number, 1, 1, window)]
            self.store.add_responder(pack_columns(RESPONDER_COLUMNS, [*keys, index, ten, ten, ten, zero]), self.now + W)

    def warm(self) -> None:
        """Five minutes in which nothing is slow: round trips become usual."""
        for _ in range(5):
            self.window(count=12, every=12)

    def window(self, delay: Delay = nothing, own: Own = lambda f: 0.0, count: int = 1, every: int = 1) -> list[Verdict]:
        """Windows pass, with a look after every one (or some); what the last look says."""
        verdicts: list[Verdict] = []
        for i in range(count):
            self.report(self.round_trips(delay, own))
            self.now += W
            self.store.take_in(self.now + S, lambda host: self.now + S)
            if (i + 1) % every == 0:
                verdicts = self.look(self.now - 60 * S)
        return verdicts

    def confirm(self, delay: Delay, own: Own = lambda f: 0.0) -> list[Verdict]:
        """A round of active confirmation of a second."""
        rtts = self.round_trips(delay, own)
        end = self.now + S
        self.store.add(Sample(self.now, end, f, f.cls_name, PROBE, 10, 0, rtt, 10, True) for f, rtt in rtts.items())
        self.now += S
        return self.look(self.now - 10 * S)

    def look(self, since: int) -> list[Verdict]:
        return self.judge.judge(self.now, since, since).verdicts


def on(element: str, ns: float) -> Delay:
    return lambda e: ns if e == element else 0.0


def named(verdicts: list[Verdict]) -> list[tuple[str, str | None, str]]:
    return [(v.component, v.direction, v.symptom) for v in verdicts]


@pytest.fixture(params=[1, 2])
def fabric(request: pytest.FixtureRequest) -> Fabric:
    return Fabric(request.param)


# ---------------------------------------------------------------- milliseconds, at once


@pytest.mark.parametrize("clock", ["hardware", "kernel", "software"])
def test_a_queue_of_milliseconds_is_named_after_two_rounds_of_confirmation(clock: str) -> None:
    fabric = Fabric(1, clock)
    congested = on("leaf2->spine3", 10 * MS)
    assert fabric.confirm(congested) == []
    (v,) = fabric.confirm(congested)
    assert named([v]) == [("leaf2--spine3", "leaf2->spine3", "high_rtt")]
    assert v.evidence["excess_us"] == pytest.approx(10_000, rel=0.15)
    assert v.ends == ["leaf2", "spine3"]
    assert v.evidence["kind"] == "congestion"
    assert named(fabric.confirm(nothing)) == [], "the newest round trips are quick again"


def test_a_queue_of_milliseconds_is_named_from_windows_alone(fabric: Fabric) -> None:
    congested = on("leaf2->spine3", 10 * MS)
    fabric.window(congested, count=2)
    assert named(fabric.window(congested)) == [("leaf2--spine3", "leaf2->spine3", "high_rtt")]


def test_a_slow_rnic_of_milliseconds_has_no_direction(fabric: Fabric) -> None:
    fabric.confirm(on("h7/rnic0 rx", 10 * MS))
    assert named(fabric.confirm(on("h7/rnic0 rx", 10 * MS))) == [("h7/rnic0", None, "high_rtt")]


def test_one_look_is_not_enough_however_often_it_is_repeated(fabric: Fabric) -> None:
    fabric.confirm(on("leaf2->spine3", 10 * MS))
    assert all(fabric.look(fabric.now - 10 * S) == [] for _ in range(4))


def test_all_round_trips_of_one_prober_are_its_own(fabric: Fabric) -> None:
    for _ in range(4):
        assert fabric.confirm(nothing, lambda f: 20 * MS if f.src == "h5/rnic0" else 0.0) == []


# ---------------------------------------------------------------- microseconds, in time


def test_a_leaf_answers_8_us_later_since_then(fabric: Fabric) -> None:
    fabric.warm()
    began = fabric.now
    leaf = {"leaf2->spine1", "leaf2->spine2", "leaf2->spine3", "leaf2->spine4"}
    leaf |= {f"{r.name} rx" for r in fabric.topology.rnics_under("leaf2")}
    verdicts = fabric.window(lambda e: 4 * US if e in leaf else 0.0, count=12)
    assert named(verdicts) == [("leaf2", None, "high_rtt")]
    evidence = verdicts[0].evidence
    assert evidence["excess_us"] == pytest.approx(8, abs=1)
    assert abs(verdicts[0].since_ns - began) <= 2 * W
    assert "since" in str(evidence["summary"])
    assert evidence["kind"] == "slow component"


def test_microseconds_are_named_and_end(fabric: Fabric) -> None:
    fabric.warm()
    assert named(fabric.window(on("leaf2->spine3", 10 * US), count=8)) == [
        ("leaf2--spine3", "leaf2->spine3", "high_rtt")
    ]
    assert named(fabric.window(count=4)) == []


@pytest.mark.parametrize("clock", ["kernel", "software"])
def test_other_clocks_tell_no_microseconds(clock: str) -> None:
    fabric = Fabric(1, clock)
    fabric.warm()
    for _ in range(20):
        assert fabric.window(on("leaf2->spine3", 100 * US)) == []


def test_without_a_usual_round_trip_nothing_is_slower_than_usual(fabric: Fabric) -> None:
    for _ in range(20):
        assert fabric.window(on("leaf2->spine3", 100 * US)) == []


# ---------------------------------------------------------------- no false names


def test_a_reroute_begins_a_new_baseline(fabric: Fabric) -> None:
    fabric.warm()
    fabric.trace(fabric.now)
    new = {"leaf2->spine3", "spine3->leaf2"}
    assert all(fabric.window(lambda e: 6 * US if e in new else 0.0) == [] for _ in range(24))


def test_a_restarted_agent_begins_a_new_baseline(fabric: Fabric) -> None:
    fabric.warm()
    fabric.hosts.on_message("h7", 2, fabric.now, 0)
    slower = lambda f: 30 * US if "h7/rnic0" in (f.src, f.dst) else 0.0  # noqa: E731
    assert all(fabric.window(own=slower) == [] for _ in range(24))


def test_the_memory_of_agents_that_restart_all_the_time_is_bounded(fabric: Fabric) -> None:
    fabric.warm()
    book, flows = fabric.judge._delay_watch.book, len(list(fabric.book.current()))
    for boot in range(2, 20):
        fabric.hosts.on_message("h7", boot, fabric.now, 0)
        fabric.window(count=12, every=4)
        assert len(book) <= 2 * flows + 60


def test_starved_hosts_are_no_evidence_not_even_what_was_taken_in_before_that_was_known(fabric: Fabric) -> None:
    fabric.warm()
    starved = lambda f: 400 * US if "h7/rnic0" in (f.src, f.dst) else 0.0  # noqa: E731
    for _ in range(12):
        fabric.hosts.get("h7").stalls.append((fabric.now, 300.0))
        found = fabric.window(own=starved)
        assert all(v.symptom != "high_rtt" for v in found), named(found)


def test_confirmation_of_something_else_teaches_nothing(fabric: Fabric) -> None:
    fabric.warm()
    for _ in range(30):
        assert fabric.confirm(lambda e: 60 * US) == []
    assert fabric.window(count=10) == []


def test_where_flows_are_very_many_those_are_watched_that_cross_what_few_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pingmesh.analyzer.delay_feed.ALL_WATCHED", 50)
    monkeypatch.setattr("pingmesh.analyzer.delay_feed.MOST_WATCHED", 120)
    monkeypatch.setattr("pingmesh.analyzer.delay_feed.NEW_A_LOOK", 30)
    monkeypatch.setattr("pingmesh.analyzer.delay_feed.MOST_QUICK", 90)
    fabric = Fabric(1)
    fabric.warm()
    assert fabric.window(count=3) == []
    assert len(fabric.judge._delay_watch.book) == 120
    found = fabric.window(on("leaf2->spine3", 20 * US), count=10)
    assert named(found) == [("leaf2--spine3", "leaf2->spine3", "high_rtt")]
    assert named(fabric.window(on("leaf4->spine1", 10 * MS), count=3)) == [
        ("leaf4--spine1", "leaf4->spine1", "high_rtt")
    ]
