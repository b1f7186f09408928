"""What the prober and the responder count, and the events they tell, when packets get lost, late or doubled."""

from __future__ import annotations

import errno
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plane_fakes import (
    LATENCY,
    MS,
    Fabric,
    Packet,
    S,
    make_list,
    peer,
    responder_total,
    stop,
    take,
    transport,
)

from agent.counts import pack_responder
from agent.rnic import Rnic
from pingmesh import messages, probe
from pingmesh.messages import FORWARD, REVERSE, UNKNOWN, ProbeClass


def pair() -> tuple[Fabric, Rnic, Rnic]:
    fabric = Fabric()
    return fabric, fabric.add(1), fabric.add(2)


def probe_for(fabric: Fabric, a: Rnic, b: Rnic, seconds: float, *, flows: int = 1, interval_ms: float = 50) -> None:
    """Probe for a time, then let everything in flight settle."""
    a.prober.apply_list(make_list(1, [peer(2, b)], flows=flows, interval_ms=interval_ms), fabric.clock.now)
    fabric.run(round(seconds * S))
    stop(a, fabric)
    fabric.run(7 * S)


def counted(b: Rnic, fabric: Fabric) -> dict[str, int]:
    return responder_total(pack_responder(b.responder.take(fabric.clock.now)) or pack_responder([(0,) * 9]))


def lose(*which: tuple[int, int]) -> Callable[[Packet], int | None]:
    """Lose the packets of these (kind, sequence)."""
    return lambda packet: None if (packet.kind, packet.header.seq) in which else LATENCY


def kinds(fabric: Fabric) -> list[tuple[int, int, int]]:
    return [(e.kind, e.seq, e.direction) for e in fabric.events]


def test_a_clean_fabric_loses_nothing_and_both_ends_agree() -> None:
    fabric, a, b = pair()
    probe_for(fabric, a, b, 1.0, flows=3)
    mine, theirs = take(a, fabric), counted(b, fabric)
    assert 55 <= mine["sent"] <= 65
    assert mine["sent"] == mine["arrived"] == mine["ack1"] == mine["ack2"]
    assert mine["lost"] == mine["late"] == mine["excluded"] == mine["send_error"] == 0
    assert theirs == {"received": mine["sent"], "ack1": mine["sent"], "ack2": mine["sent"], "mismatched": 0}
    assert mine["rtt_max"] == 2 * LATENCY // 100
    assert mine["rtt_sum"] == mine["sent"] * 2 * LATENCY // 100
    assert fabric.events == []
    assert len(a.prober.ledger) == 0


def test_send_stamps_that_come_later_change_nothing() -> None:
    fabric, a, b = pair()
    for rnic in (a, b):
        transport(rnic).late_stamps = True
    probe_for(fabric, a, b, 1.0)
    mine = take(a, fabric)
    assert mine["sent"] == mine["ack2"] > 15
    # Each of the two send stamps is 1 us after the sending here.
    assert mine["rtt_max"] == (2 * LATENCY - 2000) // 100


def test_a_lost_probe_is_overdue_then_placed_then_lost() -> None:
    fabric, a, b = pair()
    fabric.fate = lose((probe.PROBE, 5))
    probe_for(fabric, a, b, 1.0)
    mine, theirs = take(a, fabric), counted(b, fabric)
    assert (mine["lost"], mine["sent"] - mine["arrived"]) == (1, 1)
    assert theirs["received"] == mine["sent"] - 1
    # 50 ms apart: the ACK of the next probe has told by the time the first is overdue.
    assert kinds(fabric) == [(messages.OVERDUE, 5, FORWARD), (messages.LOST, 5, FORWARD)]


def test_events_come_at_their_time() -> None:
    fabric, a, b = pair()
    fabric.fate = lambda packet: None
    a.prober.apply_list(make_list(1, [peer(2, b)], interval_ms=10_000), fabric.clock.now)
    while not fabric.packets:
        fabric.run(MS)
    assert fabric.events == []
    fabric.run(98 * MS)
    assert fabric.events == []
    fabric.run(3 * MS)
    assert kinds(fabric) == [(messages.OVERDUE, 1, UNKNOWN)]
    fabric.run(397 * MS)
    assert len(fabric.events) == 1
    fabric.run(3 * MS)
    assert kinds(fabric)[1:] == [(messages.LOST, 1, UNKNOWN)]
    sent = fabric.clock.wall_ns(fabric.clock.now) - fabric.events[0].sent_ns
    assert 499 * MS <= sent <= 503 * MS


def test_a_lost_pair_of_acks_is_a_loss_on_the_way_back() -> None:
    fabric, a, b = pair()
    fabric.fate = lose((probe.ACK1, 5), (probe.ACK2, 5))
    probe_for(fabric, a, b, 1.0)
    mine, theirs = take(a, fabric), counted(b, fabric)
    assert mine["lost"] == 1
    assert theirs["received"] == theirs["ack1"] == theirs["ack2"] == mine["sent"]
    assert kinds(fabric) == [(messages.OVERDUE, 5, REVERSE), (messages.LOST, 5, REVERSE)]


def test_direction_is_told_again_when_it_becomes_known() -> None:
    fabric, a, b = pair()
    fabric.fate = lose((probe.PROBE, 2), (probe.ACK1, 3), (probe.ACK2, 3))
    probe_for(fabric, a, b, 5.0, interval_ms=1000)
    two = [(e.kind, e.direction) for e in fabric.events if e.seq == 2]
    three = [(e.kind, e.direction) for e in fabric.events if e.seq == 3]
    assert two == [(messages.OVERDUE, UNKNOWN), (messages.LOST, UNKNOWN), (messages.LOST, FORWARD)]
    assert three == [(messages.OVERDUE, UNKNOWN), (messages.LOST, UNKNOWN), (messages.LOST, REVERSE)]


@pytest.mark.parametrize(("kind", "column"), [(probe.ACK1, "ack1"), (probe.ACK2, "ack2")])
def test_one_ack_of_two_is_no_lost_probe(kind: int, column: str) -> None:
    fabric, a, b = pair()
    fabric.fate = lose((kind, 5))
    probe_for(fabric, a, b, 1.0)
    mine = take(a, fabric)
    assert mine["lost"] == 0
    assert mine["arrived"] == mine["sent"]
    assert mine[column] == mine["sent"] - 1
    assert [(e.kind, e.seq) for e in fabric.events] == [(messages.NO_RTT, 5)]


def test_a_late_ack_amends_the_loss_after_it_was_reported() -> None:
    fabric, a, b = pair()
    fabric.fate = lambda packet: 3 * S if (packet.kind, packet.header.seq) == (probe.PROBE, 5) else LATENCY
    a.prober.apply_list(make_list(1, [peer(2, b)], interval_ms=50), fabric.clock.now)
    fabric.run(round(1.5 * S))
    first = take(a, fabric)
    assert (first["lost"], first["late"]) == (1, 0)
    stop(a, fabric)
    fabric.run(7 * S)
    second = take(a, fabric)
    assert (second["lost"], second["late"], second["arrived"] > 0) == (-1, 1, True)
    assert first["sent"] + second["sent"] == first["arrived"] + second["arrived"]
    assert [e.kind for e in fabric.events if e.seq == 5] == [messages.OVERDUE, messages.LOST, messages.LATE]


def test_an_ack_after_five_seconds_is_stray() -> None:
    fabric, a, b = pair()
    fabric.fate = lambda packet: 6 * S if (packet.kind, packet.header.seq) == (probe.PROBE, 5) else LATENCY
    probe_for(fabric, a, b, 1.0)
    assert take(a, fabric)["lost"] == 1
    assert a.prober.ledger.stray == 2


def test_slow_probes_are_told_within_a_limit() -> None:
    fabric, a, b = pair()
    a.prober.apply_list(make_list(1, [peer(2, b)], flows=30, interval_ms=100), fabric.clock.now)
    fabric.run(1 * S)
    assert fabric.events == []
    fabric.fate = lambda packet: 5 * MS if packet.kind == probe.PROBE else LATENCY
    fabric.run(1 * S)
    slow = fabric.kinds(messages.SLOW)
    assert 10 <= len(slow) <= 20
    assert all(e.rtt_us == 5020 for e in slow)


def test_a_wall_clock_step_makes_probes_in_flight_invalid_and_nothing_else() -> None:
    for step in (3600 * S, -3600 * S):
        fabric, a, b = pair()
        fabric.fate = lambda packet: 10 * MS
        a.prober.apply_list(make_list(1, [peer(2, b)], interval_ms=50, flows=4), fabric.clock.now)
        fabric.run(1 * S)
        while len(a.prober.ledger) < 2:
            fabric.run(MS)
        windows = {p.header.window for p in fabric.packets}
        fabric.clock.step = step
        fabric.run(1 * S)
        stop(a, fabric)
        fabric.run(7 * S)
        mine = take(a, fabric)
        assert mine["excluded"] >= 1
        assert mine["lost"] == 0
        assert mine["sent"] == mine["arrived"] == mine["ack1"] == mine["ack2"]
        assert mine["rtt_max"] == 20 * MS // 100
        assert {e.kind for e in fabric.events} <= {messages.INVALID, messages.SLOW}
        assert {p.header.window for p in fabric.packets} == windows


def test_an_impossible_delay_of_the_responder_is_invalid() -> None:
    fabric, a, b = pair()
    steps = iter([0] * 6 + [-S] + [0] * 1000)

    def fate(packet: Packet) -> int:
        if packet.kind == probe.ACK1:
            # The responder's own clock goes back between arrival and ACK1's stamp.
            fabric.clock.step = next(steps)
        return LATENCY

    fabric.fate = fate
    probe_for(fabric, a, b, 1.0)
    mine = take(a, fabric)
    assert mine["excluded"] >= 1
    assert mine["lost"] == 0
    assert mine["sent"] == mine["arrived"]


def test_a_restarted_peer_answers_stale_and_costs_no_loss() -> None:
    fabric, a, b = pair()
    a.prober.apply_list(make_list(1, [peer(2, b)], interval_ms=50), fabric.clock.now)
    fabric.run(1 * S)
    b.new_epoch()  # the same queue pair number and key
    fabric.run(1 * S)
    a.prober.apply_peers([peer(2, b)])
    fabric.run(1 * S)
    stop(a, fabric)
    fabric.run(7 * S)
    mine = take(a, fabric)
    assert mine["lost"] == 0
    assert mine["excluded"] == b.responder.stale == len(fabric.kinds(messages.STALE))
    assert 15 <= mine["excluded"] <= 25
    assert mine["sent"] == mine["arrived"] == mine["ack2"]


def test_losses_to_a_queue_pair_that_is_gone_are_taken_back_when_the_peer_names_its_new_one() -> None:
    fabric, a, b = pair()
    a.prober.apply_list(make_list(1, [peer(2, b)], interval_ms=50), fabric.clock.now)
    fabric.run(1 * S)
    transport(b).renew()
    b.new_epoch()
    fabric.run(1 * S)
    assert len(fabric.kinds(messages.LOST)) > 5
    before = take(a, fabric)
    assert before["lost"] > 5
    a.prober.apply_peers([peer(2, b)])
    fabric.run(1 * S)
    stop(a, fabric)
    fabric.run(7 * S)
    after = take(a, fabric)
    assert before["lost"] + after["lost"] == 0
    assert after["excluded"] == transport(b).foreign


def test_a_failed_send_is_a_send_error_and_no_probe() -> None:
    fabric, a, b = pair()
    a.prober.apply_list(make_list(1, [peer(2, b)], interval_ms=50), fabric.clock.now)
    fabric.run(1 * S)
    transport(a).fails = OSError(errno.ENETUNREACH, "Network is unreachable")
    fabric.run(2 * S)
    transport(a).fails = None
    stop(a, fabric)
    fabric.run(7 * S)
    mine = take(a, fabric)
    assert 35 <= mine["send_error"] <= 45
    assert mine["sent"] == mine["arrived"]
    assert mine["lost"] == 0
    # Told once a second per flow, counted each time.
    assert 2 <= len(fabric.kinds(messages.SEND_ERROR)) <= 3


def test_a_failing_responder_counts_only_what_left() -> None:
    fabric, a, b = pair()
    a.prober.apply_list(make_list(1, [peer(2, b)], interval_ms=50), fabric.clock.now)
    fabric.run(1 * S)
    transport(b).fails = OSError(errno.EPERM, "Operation not permitted")
    fabric.run(1 * S)
    transport(b).fails = None
    stop(a, fabric)
    fabric.run(7 * S)
    mine, theirs = take(a, fabric), counted(b, fabric)
    assert theirs["received"] == mine["sent"]
    assert theirs["ack1"] == theirs["ack2"] == mine["arrived"] == mine["sent"] - mine["lost"]
    assert 15 <= mine["lost"] <= 25


def test_doubled_packets_count_once() -> None:
    fabric, a, b = pair()
    plain = fabric.carry

    def twice(*args: object) -> None:
        plain(*args)  # type: ignore[arg-type]
        plain(*args)  # type: ignore[arg-type]

    fabric.carry = twice  # type: ignore[method-assign]
    probe_for(fabric, a, b, 1.0)
    mine, theirs = take(a, fabric), counted(b, fabric)
    assert mine["sent"] == mine["arrived"] == mine["ack1"] == mine["ack2"] == theirs["received"]
    assert b.responder.duplicates == mine["sent"]
    assert a.prober.ledger.stray == 2 * mine["sent"]


def test_the_ack_rides_the_probes_port_and_class_and_stays_small() -> None:
    fabric, a, b = pair()
    classes = [ProbeClass(), ProbeClass(name="large", dscp=10, size=100_000)]
    message = make_list(1, [peer(2, b)], flows=2, interval_ms=50, classes=classes)
    a.prober.apply_list(message, fabric.clock.now)
    fabric.run(1 * S)
    probes = {(p.header.flow_index, p.dscp, p.sport, p.size) for p in fabric.packets if p.kind == probe.PROBE}
    acks = {(p.header.flow_index, p.dscp, p.sport, p.size) for p in fabric.packets if p.kind != probe.PROBE}
    assert probes == {(0, 26, 0xC000, 64), (1, 10, 0xC001, 4096)}
    assert acks == {(0, 26, 0xC000, 64), (1, 10, 0xC001, 64)}


def test_a_changed_class_on_the_way_is_counted() -> None:
    fabric, a, b = pair()
    receive = b.receive

    def recoloured(payload: memoryview, source: str, qpn: int, sport: int, dscp: int, ttl: int, ns: int) -> None:
        receive(payload, source, qpn, sport, 0, ttl, ns)

    b.receive = recoloured  # type: ignore[method-assign]
    probe_for(fabric, a, b, 1.0)
    assert counted(b, fabric)["mismatched"] == take(a, fabric)["sent"]
    assert {p.header.dscp for p in fabric.packets if p.kind == probe.ACK1} == {0}


def test_a_restart_of_the_own_queue_pair_reports_what_was_and_loses_nothing() -> None:
    fabric, a, b = pair()
    fabric.fate = lambda packet: 10 * MS
    a.prober.apply_list(make_list(1, [peer(2, b)], interval_ms=50, flows=4), fabric.clock.now)
    fabric.run(1 * S)
    while not len(a.prober.ledger):
        fabric.run(MS)
    old = a.epoch
    a.retire(fabric.clock.now)
    transport(a).renew()
    a.new_epoch()
    assert a.epoch != old
    a.prober.apply_list(make_list(1, [peer(2, b)], interval_ms=50, flows=4), fabric.clock.now)
    fabric.run(1 * S)
    stop(a, fabric)
    fabric.run(7 * S)
    assert {r.epoch for r in a.retired} == {old}
    assert take(a, fabric)["lost"] == 0
    assert not fabric.kinds(messages.LOST)


def test_windows_are_taken_when_complete_and_by_the_time_of_sending() -> None:
    fabric, a, b = pair()
    a.prober.apply_list(make_list(1, [peer(2, b)], interval_ms=50), fabric.clock.now)
    fabric.run(5 * S + 400 * MS)
    assert a.prober.ledger.take_rows(fabric.clock.now) == []
    fabric.run(200 * MS)
    (row,) = a.prober.ledger.take_rows(fabric.clock.now)
    assert row.window == fabric.packets[0].header.window
    by_window = [p.header.window for p in fabric.packets if p.kind == probe.PROBE]
    assert messages.unpack_columns(messages.PROBER_COLUMNS, row.columns)[1][0] == by_window.count(row.window)
    assert a.prober.ledger.take_rows(fabric.clock.now) == []


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.sampled_from(["ok", "ok", "ok", "probe", "ack1", "ack2", "acks", "late", "ack2 first"]),
        min_size=1,
        max_size=40,
    )
)
def test_counts_follow_every_packet(fates: list[str]) -> None:
    """Any mixture of losses: the counts are what a bookkeeper with a view of every packet would write."""
    fabric, a, b = pair()

    def fate(packet: Packet) -> int | None:
        seq = packet.header.seq
        what = fates[seq - 1] if seq <= len(fates) else "ok"
        if packet.kind == probe.PROBE:
            return {"probe": None, "late": S}.get(what, LATENCY)
        if packet.kind == probe.ACK1:
            return {"ack1": None, "acks": None, "ack2 first": 2 * LATENCY}.get(what, LATENCY)
        return {"ack2": None, "acks": None}.get(what, LATENCY)

    fabric.fate = fate
    a.prober.apply_list(make_list(1, [peer(2, b)], interval_ms=30), fabric.clock.now)
    while a.prober.sent < len(fates):
        fabric.run(MS)
    stop(a, fabric)
    fabric.run(7 * S)
    mine, theirs = take(a, fabric), counted(b, fabric)
    n = len(fates)
    assert mine["sent"] == n
    assert mine["lost"] == fates.count("probe") + fates.count("acks")
    assert mine["arrived"] == n - mine["lost"]
    assert mine["ack1"] == mine["arrived"] - fates.count("ack1")
    assert mine["ack2"] == mine["arrived"] - fates.count("ack2")
    assert mine["late"] == fates.count("late")
    assert mine["excluded"] == 0
    assert theirs["received"] == theirs["ack1"] == theirs["ack2"] == n - fates.count("probe")
    assert len(fabric.kinds(messages.NO_RTT)) == fates.count("ack1") + fates.count("ack2")
    placed = {e.seq: e.direction for e in fabric.events if e.kind in (messages.OVERDUE, messages.LOST)}
    for seq, direction in placed.items():
        what = fates[seq - 1]
        if direction == FORWARD:
            assert what in ("probe", "late")
        elif direction == REVERSE:
            assert what == "acks"
    assert len(a.prober.ledger) == 0
