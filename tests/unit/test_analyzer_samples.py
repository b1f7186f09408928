"""Counts of both ends become one-way samples; late ACKs are taken back; unknown is never "not received"."""

from pingmesh.analyzer.flows import ACK, PROBE, FlowBook
from pingmesh.analyzer.samples import ROUND_TRIP, SampleStore
from pingmesh.messages import (
    PROBER_COLUMNS,
    RESPONDER_COLUMNS,
    WINDOW_NS,
    Flow,
    Peer,
    ProbeClass,
    ProbeList,
    ProberRows,
    pack_columns,
)
from topology.generate import leaf_spine

TOPOLOGY = leaf_spine(2, 2, 2, 1)
W = 1000
END = (W + 1) * WINDOW_NS


def book() -> FlowBook:
    b = FlowBook(TOPOLOGY)
    b.add_list(
        ProbeList(
            cluster="lab",
            host="h1",
            device="rnic0",
            number=1,
            list_version=7,
            classes=[ProbeClass()],
            flows=[Flow(0, 3, 50000, 0, 1, 100_000, 2)],
            peers=[Peer(3, "h3/rnic0", "::ffff:10.0.0.1", 20, 1, 1, 4096)],
        )
    )
    return b


def prober(**counts: int) -> ProberRows:
    order = ("index", "sent", "arrived", "ack1", "ack2", "lost", "late", "excluded", "send_error", "rtt_sum", "rtt_max")
    return ProberRows(
        rnic=1,
        epoch=5,
        list_version=7,
        window=W,
        columns=pack_columns(PROBER_COLUMNS, [[counts.get(k, 0)] for k in order]),
    )


def responder(received: int, ack1: int, ack2: int) -> bytes:
    return pack_columns(RESPONDER_COLUMNS, [[1], [5], [7], [W], [0], [received], [ack1], [ack2], [0]])


def test_losses_are_counted_in_the_direction_where_they_happened() -> None:
    store = SampleStore(book())
    store.add_prober(prober(sent=50, arrived=41, ack1=36, ack2=35, lost=9), 0, END)
    store.add_responder(responder(45, 45, 45), END + 1)
    forward, reverse = store.join(END + 2, lambda host: END + WINDOW_NS)
    assert (forward.role, forward.sent, forward.lost) == (PROBE, 50, 5)
    assert (reverse.role, reverse.sent, reverse.lost) == (ACK, 90, 19)


def test_a_window_waits_for_the_responders_report() -> None:
    store = SampleStore(book())
    store.add_prober(prober(sent=50, arrived=50, ack1=50, ack2=50), 0, END)
    assert store.join(END, lambda host: END) == []
    store.add_responder(responder(50, 50, 50), END)
    assert [s.lost for s in store.join(END, lambda host: END + WINDOW_NS)] == [0, 0]


def test_without_a_responders_report_the_direction_is_unknown() -> None:
    store = SampleStore(book())
    store.add_prober(prober(sent=50, arrived=40, ack1=40, ack2=40, lost=10), 0, END)
    (sample,) = store.join(END + 13 * 10**9, lambda host: 0)
    assert (sample.role, sample.sent, sample.lost) == (ROUND_TRIP, 50, 10)


def test_a_responder_that_reports_without_the_flow_received_nothing() -> None:
    store = SampleStore(book())
    store.add_prober(prober(sent=50, lost=50), 0, END)
    (forward,) = store.join(END, lambda host: END + WINDOW_NS)
    assert (forward.role, forward.sent, forward.lost) == (PROBE, 50, 50)


def test_a_late_ack_takes_the_loss_back() -> None:
    store = SampleStore(book())
    store.add_prober(prober(sent=10, arrived=8, ack1=8, ack2=8, lost=2), 0, END)
    store.add_responder(responder(10, 10, 10), END)
    store.join(END, lambda host: END + WINDOW_NS)
    store.add_prober(prober(arrived=2, ack1=2, ack2=2, lost=-2, late=2), 0, END)
    store.join(END + 1, lambda host: END + WINDOW_NS)
    assert sum(s.lost for s in store.samples) == 0
    assert sum(s.sent for s in store.samples) == 10 + 20


def test_windows_from_before_an_outage_are_no_evidence_for_now() -> None:
    store = SampleStore(book())
    now = END + 3600 * 10**9
    store.add_prober(prober(sent=10, lost=10), 0, now)
    assert store.join(now, lambda host: now) == []


def test_the_probers_clock_is_turned_into_ours() -> None:
    store = SampleStore(book())
    hour = 3600 * 10**9
    store.add_prober(prober(sent=10, arrived=10, ack1=10, ack2=10), -hour, END - hour)
    store.add_responder(responder(10, 10, 10), END - hour)
    samples = store.join(END - hour, lambda host: END - hour + WINDOW_NS)
    assert {s.end for s in samples} == {END - hour}


def test_whether_there_is_anything_recent() -> None:
    for lost in (0, 5):
        store = SampleStore(book())
        assert not store.has_any(END - 60 * WINDOW_NS)
        store.add_prober(prober(sent=50, arrived=50 - lost, ack1=50 - lost, ack2=50 - lost, lost=lost), 0, END)
        assert not store.has_any(END - 60 * WINDOW_NS), "nothing is joined yet"
        store.add_responder(responder(50 - lost, 50 - lost, 50 - lost), END)
        store.join(END, lambda host: END + WINDOW_NS)
        assert store.has_any(END - 1)
        assert not store.has_any(END)
