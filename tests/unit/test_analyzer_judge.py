"""The judge on a simulated 4x4x16 fabric: flows with traced paths, packets lost where a fault says so."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from pingmesh.analyzer.flows import ACK, PROBE, FlowBook
from pingmesh.analyzer.hosts import HostBook
from pingmesh.analyzer.judge import Judge, Wholes
from pingmesh.analyzer.localise import localise
from pingmesh.analyzer.observe import Walked, walked_since
from pingmesh.analyzer.samples import Sample, SampleStore
from pingmesh.analyzer.tracker import Tracker
from pingmesh.messages import Flow, Peer, ProbeClass, ProbeList, RnicHealth, TracedPath, Verdict
from topology.generate import leaf_spine
from topology.model import Topology

S = 10**9
T = 1000 * S
CLASSES = [ProbeClass(), ProbeClass(name="large", size=4000)]

Lose = Callable[[str, int, str], float]
"""Loss probability on an element for (element, source port, class)."""


class Fabric:
    def __init__(self, topology: Topology, seed: int) -> None:
        self.rng = random.Random(seed)
        self.topology = topology
        self.book = FlowBook(topology)
        self.hosts = HostBook()
        self.hosts.session_started(T - 100 * S)
        self.store = SampleStore(self.book)
        self.judge = Judge(topology, self.book, self.hosts, self.store, localise, 1e-4, lambda: frozenset({"large"}))
        names = list(topology.rnics)
        peers = [Peer(i, n, "", 1, 1, 1, 4096) for i, n in enumerate(names)]
        for i, name in enumerate(names):
            host, device = name.split("/")
            self.hosts.on_message(host, 1, T - 50 * S, T)
            self.hosts.get(host).rebooted = 0
            flows = []
            for j in range(24):
                peer = self.rng.choice([k for k in range(len(names)) if k != i])
                flows.append(Flow(j, peer, 50000 + j, j % 4 == 3, 1, 10**6, 2))
            self.book.add_list(
                ProbeList(
                    cluster="lab",
                    host=host,
                    device=device,
                    number=i,
                    list_version=1,
                    classes=CLASSES,
                    flows=flows,
                    peers=peers,
                )
            )
        self.avoid: set[str] = set()
        self.trace(T - 20 * S)

    def trace(self, at: int) -> None:
        """Every tuple walks a random one of its paths that is not avoided."""
        inbound = {d.name: d.target_address for d in self.topology.directed_links}
        for flow in self.book.current():
            for role in (PROBE, ACK):
                a, b = (flow.src, flow.dst) if role == PROBE else (flow.dst, flow.src)
                paths = [p for p in self.book.path_set(a, b) if self.avoid.isdisjoint(p)]
                path = self.rng.choice(paths)
                if len(path) > 2:
                    hops = [(2, inbound[path[1]])]
                    self.book.add_path(TracedPath(role, *flow.key, flow.sport, hops, at), at)

    def probe(self, lose: Lose, packets: int = 20, at: int = T) -> None:
        for flow in self.book.current():
            counts = []
            sent = packets
            for role in (PROBE, ACK):
                path = self.book.paths_at(flow, role, at)[0]
                lost = sum(
                    any(self.rng.random() < lose(e, flow.sport + role, flow.cls_name) for e in path)
                    for _ in range(sent)
                )
                counts.append(Sample(at, at + S, flow, flow.cls_name, role, sent, lost, confirmed=True))
                sent -= lost
            self.store.add(s for s in counts if s.sent)

    def verdicts(self) -> list[Verdict]:
        return self.judge.judge(T + 2 * S, T, T).verdicts


@pytest.fixture(params=[1, 2])
def fabric(request: pytest.FixtureRequest) -> Fabric:
    return Fabric(leaf_spine(4, 4, 4, 1), request.param)


def only(verdicts: list[Verdict]) -> tuple[str, str | None, str, str | None]:
    assert len(verdicts) == 1, [(v.component, v.direction, v.symptom) for v in verdicts]
    v = verdicts[0]
    return v.component, v.direction, v.symptom, v.cls


def on(*elements: str, rate: float) -> Lose:
    return lambda e, sport, cls: rate if e in elements else 0.0


def test_a_healthy_fabric(fabric: Fabric) -> None:
    fabric.probe(on(rate=0.0))
    assert fabric.verdicts() == []


@pytest.mark.parametrize(("rate", "symptom"), [(0.1, "drop"), (0.3, "drop"), (1.0, "blackhole")])
def test_one_direction_of_a_link(fabric: Fabric, rate: float, symptom: str) -> None:
    fabric.probe(on("leaf2->spine3", rate=rate))
    assert only(fabric.verdicts()) == ("leaf2--spine3", "leaf2->spine3", symptom, None)


@pytest.mark.parametrize(("rate", "symptom"), [(0.7, "drop"), (1.0, "blackhole")])
def test_an_episode_that_began_before_the_fault_does_not_make_it_partial(
    fabric: Fabric, rate: float, symptom: str
) -> None:
    """Late packets of a busy host had opened it; one round saw all well, the fault came in the middle of the next."""
    link = "leaf2->spine3"
    fabric.probe(on(rate=0.0))
    fabric.probe(on(link, rate=0.5 * rate), at=T + S // 10)
    fabric.probe(on(link, rate=rate), packets=10, at=T + S // 5)
    assert only(fabric.verdicts()) == ("leaf2--spine3", link, symptom, None)


def test_a_verdict_tells_of_its_worst_moment(fabric: Fabric) -> None:
    link = "leaf2->spine3"
    fabric.probe(on(link, rate=0.02))
    fabric.probe(on(link, rate=0.5), at=T + S // 5)
    fabric.probe(on(link, rate=0.02), at=T + S // 2)
    (verdict,) = fabric.verdicts()
    evidence = verdict.evidence
    m = evidence["moments"]
    assert (m["sent"], m["lost"]) == (evidence["sent"], evidence["lost"])
    assert m["worst_sent"] == pytest.approx(m["sent"] / 3, rel=0.1)
    assert 0.4 < m["worst_lost"] / m["worst_sent"] < 0.6


def test_a_verdict_tells_when_the_last_packet_was_lost(fabric: Fabric) -> None:
    """What is judged again later, beside clean packets, opens no incident by losses of long ago."""
    link = "leaf2->spine3"
    fabric.probe(on(link, rate=1.0))
    fabric.probe(on(rate=0.0), at=T + 40 * S)
    judged = fabric.judge.judge(T + 45 * S, T, T)
    (verdict,) = judged.verdicts
    assert verdict.evidence["last_lost_ns"] == T + S
    for now, opens in ((T + 5 * S, True), (T + 45 * S, False)):
        tracker = Tracker(0.5, 20 * S)
        opened = [tracker.update([verdict], judged.elements, set(), now, True) for _ in range(4)]
        assert any(opened) is opens


def test_a_verdict_tells_how_many_tuples_lost_packets(fabric: Fabric) -> None:
    link = "leaf2->spine3"
    fabric.probe(on(link, rate=1.0))
    (verdict,) = fabric.verdicts()
    crossing = fabric.judge.evidence(0, ()).crossings(frozenset({link}))
    assert verdict.evidence["lossy_tuples"] == len({(c.flow.key, c.role) for c in crossing}) > 6


def test_both_directions_of_a_link(fabric: Fabric) -> None:
    fabric.probe(on("leaf2->spine3", "spine3->leaf2", rate=0.3))
    assert only(fabric.verdicts()) == ("leaf2--spine3", "both", "drop", None)


def test_an_rnics_receive_side(fabric: Fabric) -> None:
    fabric.probe(on("h7/rnic0 rx", rate=0.4))
    assert only(fabric.verdicts()) == ("h7/rnic0", "rx", "drop", None)


def test_a_switch(fabric: Fabric) -> None:
    fabric.probe(lambda e, sport, cls: 0.16 if "spine3" in e else 0.0)
    assert only(fabric.verdicts()) == ("spine3", None, "drop", None)


def test_parts_of_one_switch_that_lose_at_once_wait_for_one_more_look() -> None:
    wholes = Wholes(
        {
            ("leaf1", "switch"): frozenset({"leaf1->spine1", "spine1->leaf1", "h1/rnic0 tx", "h1/rnic0 rx"}),
            ("spine1", "switch"): frozenset({"leaf1->spine1", "spine1->leaf1", "leaf2->spine1", "spine1->leaf2"}),
        }
    )
    one, two = frozenset({"leaf1->spine1"}), frozenset({"leaf2->spine1", "spine1->leaf2"})
    elements = {"leaf1--spine1": one, "leaf2--spine1": two, "h1/rnic0": frozenset({"h1/rnic0 tx", "h1/rnic0 rx"})}
    elements |= {"far": frozenset({"leaf9->spine9"})}

    def waiting(**symptoms: str) -> set[str]:
        types = {"h1/rnic0": "rnic"}
        return wholes.parts_at_once(
            [Verdict(component=c, component_type=types.get(c, "link"), symptom=s) for c, s in symptoms.items()],
            elements,
        )

    assert waiting(**{"leaf1--spine1": "drop", "leaf2--spine1": "blackhole"}) == {"leaf1--spine1", "leaf2--spine1"}
    assert waiting(**{"leaf1--spine1": "drop", "h1/rnic0": "drop"}) == {"leaf1--spine1", "h1/rnic0"}
    assert waiting(**{"leaf2--spine1": "drop", "h1/rnic0": "drop", "far": "drop"}) == set()
    assert waiting(**{"leaf1--spine1": "drop", "h1/rnic0": "rnic_down"}) == set(), "a link that is down is known to be"
    both = {"leaf1--spine1", "leaf2--spine1"}
    assert waiting(**{"leaf1--spine1": "link_down", "leaf2--spine1": "link_down"}) == both
    assert waiting(**{"leaf1--spine1": "high_rtt", "leaf2--spine1": "drop"}) == set()


def test_a_share_of_the_tuples(fabric: Fabric) -> None:
    fabric.probe(lambda e, sport, cls: float(e == "leaf2->spine3" and sport % 4 == 0))
    component, direction, symptom, _ = only(fabric.verdicts())
    assert (component, direction, symptom) == ("leaf2--spine3", "leaf2->spine3", "flow_blackhole")


def test_only_large_packets(fabric: Fabric) -> None:
    fabric.probe(lambda e, sport, cls: float(e == "leaf2->spine3" and cls == "large"))
    assert only(fabric.verdicts()) == ("leaf2--spine3", "leaf2->spine3", "large_packet_drop", "large")


def test_the_losses_of_a_stalled_host_are_not_the_fabrics(fabric: Fabric) -> None:
    fabric.probe(on("h7/rnic0 rx", rate=0.4))
    fabric.hosts.get("h7").stalls.append((T, 900.0))
    fabric.hosts.get("h7").stalls.append((T + S, 900.0))
    assert [(v.component, v.symptom) for v in fabric.verdicts()] == [("h7", "cpu_overload")]


def test_a_dark_rnic_leaves_the_others_in_peace(fabric: Fabric) -> None:
    fabric.probe(on("h7/rnic0 rx", "h7/rnic0 tx", rate=1.0))
    health = fabric.hosts.get("h7").health
    health.rnics = [RnicHealth(device="rnic0", up=False)]
    fabric.hosts.on_health("h7", health, T)
    assert only(fabric.verdicts()) == ("h7/rnic0", "both", "rnic_down", None)


def test_a_link_that_nobody_walks_any_more_is_down_though_all_is_well(fabric: Fabric) -> None:
    fabric.judge.judge(T, T - 30 * S, T - 30 * S)
    fabric.avoid = {"leaf2->spine3", "spine3->leaf2"}
    fabric.trace(T + S)
    fabric.probe(on(rate=0.0))
    assert only(fabric.verdicts()) == ("leaf2--spine3", "both", "link_down", None)


def test_a_spine_that_nobody_walks_any_more(fabric: Fabric) -> None:
    fabric.judge.judge(T, T - 30 * S, T - 30 * S)
    fabric.avoid = {d.name for d in fabric.topology.directed_links if "spine3" in (d.source, d.target)}
    fabric.trace(T + S)
    fabric.probe(on(rate=0.0))
    assert only(fabric.verdicts()) == ("spine3", None, "switch_down", None)


def test_a_rehash_that_leaves_every_link_walked_is_nothing(fabric: Fabric) -> None:
    fabric.judge.judge(T, T - 30 * S, T - 30 * S)
    fabric.trace(T + S)
    fabric.probe(on(rate=0.0))
    assert fabric.verdicts() == []


def test_few_tuples_traced_since_are_not_enough_to_call_a_link_down(fabric: Fabric) -> None:
    fabric.judge.judge(T, T - 30 * S, T - 30 * S)
    flow = next(f for f in fabric.book.current() if "leaf1" in str(fabric.book.paths_at(f, PROBE, T)))
    fabric.book.add_path(TracedPath(PROBE, *flow.key, flow.sport, [(2, None)], T + S), T + S)
    assert fabric.verdicts() == []


def test_the_only_rnic_of_a_tor_cannot_be_told_from_its_tor() -> None:
    fabric = Fabric(leaf_spine(3, 2, 1, 1), 1)
    fabric.probe(on("h2/rnic0 rx", rate=0.3))
    (v,) = fabric.verdicts()
    assert {v.component, *v.alternatives} >= {"h2/rnic0", "leaf2"}


def test_what_speaks_for_a_component_that_was_bad(fabric: Fabric) -> None:
    broken = frozenset({"leaf2->spine3"})
    fabric.probe(on(rate=0.0))

    def seen(since: int) -> Walked:
        return walked_since(fabric.book, [s for s in fabric.store.samples if s.start >= since], broken)

    well = seen(T)
    assert (well.sent > 100, well.last_lost, well.delayed) == (True, 0, 0)
    fabric.probe(on("leaf2->spine3", rate=0.3), at=T + 5 * S)
    assert seen(T).last_lost == T + 6 * S
    fabric.probe(on(rate=0.0), at=T + 8 * S)
    assert seen(T + 6 * S) == well
