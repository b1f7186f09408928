"""Totals of the last minute, and whose a loss is."""

from pingmesh.analyzer.flows import ACK, PROBE, FlowBook
from pingmesh.analyzer.hosts import HostBook
from pingmesh.analyzer.samples import Sample
from pingmesh.analyzer.summary import summarise
from pingmesh.messages import Flow, Peer, ProbeClass, ProbeList, Summary, TracedPath
from topology.generate import leaf_spine

S = 10**9
T = 1000 * S


def summary(*broken: frozenset[str]) -> Summary:
    topology = leaf_spine(2, 2, 2, 1)
    book = FlowBook(topology)
    book.add_list(
        ProbeList(
            cluster="lab",
            host="h1",
            device="rnic0",
            number=1,
            list_version=1,
            classes=[ProbeClass()],
            flows=[Flow(0, 3, 50000, 0, 1, 10**5, 2)],
            peers=[Peer(3, "h3/rnic0", "", 1, 1, 1, 4096)],
        )
    )
    inbound = next(d.target_address for d in topology.directed_links if d.name == "leaf1->spine1")
    book.add_path(TracedPath(PROBE, 1, 1, 0, 50000, [(2, inbound)], T), T)
    flow = book.flows[1, 1, 0]
    samples = [
        Sample(T, T + S, flow, "small", PROBE, 100, 7, rtt_ns=20_000, rtts=93),
        Sample(T, T + S, flow, "small", ACK, 186, 0),
    ]
    return summarise("lab", book, samples, HostBook(), T + S, 0, broken)


def test_a_loss_nobody_is_known_to_cause_is_shown_along_its_path() -> None:
    s = summary()
    assert {(k.component, k.sent, k.lost) for k in s.links} == {("leaf1->spine1", 100, 7), ("spine1->leaf2", 100, 7)}
    assert {(k.component, k.sent, k.lost) for k in s.rnics} == {("h1/rnic0", 100, 7), ("h3/rnic0", 100, 7)}
    assert s.rtt_us["p50"] == 20.0


def test_a_loss_across_a_broken_link_is_that_links() -> None:
    s = summary(frozenset({"leaf1->spine1"}), frozenset({"leaf2->spine2"}))
    assert {k.component: k.lost for k in s.links} == {"leaf1->spine1": 7, "spine1->leaf2": 0}
    assert {k.component: k.lost for k in s.rnics} == {"h1/rnic0": 0, "h3/rnic0": 0}
