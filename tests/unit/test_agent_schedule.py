"""When probes leave: intervals, the rate cap, stalls, changes of the list, confirmations."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plane_fakes import LATENCY, MS, Fabric, S, make_list, peer, stop, take, transport

from agent.rnic import Rnic
from pingmesh import messages, probe
from pingmesh.messages import CONFIRM_BIT, PROBER_COLUMNS, Confirm, Flow, Peer, ProbeClass, unpack_columns


def pair(max_rate: float = 1000.0) -> tuple[Fabric, Rnic, Rnic]:
    fabric = Fabric()
    return fabric, fabric.add(1, max_rate=max_rate), fabric.add(2)


def watch(fabric: Fabric) -> list[tuple[int, int]]:
    """(time, flow index) of every probe from now on."""
    seen: list[tuple[int, int]] = []
    fate = fabric.fate

    def noting(packet):  # type: ignore[no-untyped-def]
        if packet.kind == probe.PROBE:
            seen.append((fabric.clock.now, packet.header.flow_index))
        return fate(packet)

    fabric.fate = noting
    return seen


def confirmation(**changes: object) -> Confirm:
    fields: dict[str, object] = {
        "cluster": "test",
        "host": "h",
        "id": 7,
        "rnic": 1,
        "list_version": 1,
        "indexes": [0, 1],
        "count": 20,
        "interval_us": 20_000,
    }
    return Confirm(**(fields | changes))  # type: ignore[arg-type]


def test_the_mean_rate_is_exact_and_flows_do_not_march_in_step() -> None:
    fabric, a, b = pair()
    seen = watch(fabric)
    a.prober.apply_list(make_list(1, [peer(2, b)], flows=20, interval_ms=200), fabric.clock.now)
    fabric.run(20 * S)
    for index in range(20):
        mine = [t for t, i in seen if i == index]
        assert 99 <= len(mine) <= 101
        gaps = [y - x for x, y in itertools.pairwise(mine)]
        assert 155 * MS <= min(gaps) < max(gaps) <= 245 * MS
    first = sorted(next(t for t, i in seen if i == index) for index in range(20))
    assert first[-1] - first[0] > 100 * MS


def test_probes_due_within_a_millisecond_leave_together() -> None:
    fabric, a, b = pair()
    seen = watch(fabric)
    a.prober.apply_list(make_list(1, [peer(2, b)], flows=100, interval_ms=100), fabric.clock.now)
    fabric.run(2 * S)
    assert len({t for t, _ in seen}) < 0.6 * len(seen)


@pytest.mark.parametrize(("own", "asked"), [(150.0, 1000.0), (1000.0, 150.0)])
def test_the_smaller_of_both_caps_holds_in_every_second(own: float, asked: float) -> None:
    fabric, a, b = pair(max_rate=own)
    seen = watch(fabric)
    a.prober.apply_list(
        make_list(1, [peer(2, b)], flows=50, interval_ms=10, max_rate=asked), fabric.clock.now
    )  # 5,000/s
    fabric.run(10 * S)
    assert 0.9 * 1500 <= len(seen) <= 1500 + 20
    start = seen[0][0]
    for second in range(9):
        count = sum(start + second * S <= t < start + (second + 1) * S for t, _ in seen)
        assert count <= 150 + 16
    # Every flow gets its share.
    per_flow = [sum(i == index for _, i in seen) for index in range(50)]
    assert min(per_flow) > 15


def test_the_rate_factor_slows_and_never_stops() -> None:
    fabric, a, b = pair()
    seen = watch(fabric)
    a.prober.apply_list(make_list(1, [peer(2, b)], flows=10, interval_ms=100), fabric.clock.now)
    fabric.run(2 * S)
    a.prober.set_factor(0.1)
    fabric.run(2 * S)
    seen.clear()
    fabric.run(10 * S)
    assert 95 <= len(seen) <= 105


def test_no_burst_after_a_stall() -> None:
    fabric, a, b = pair()
    a.prober.apply_list(make_list(1, [peer(2, b)], flows=100, interval_ms=1000), fabric.clock.now)
    fabric.run(2 * S)
    seen = watch(fabric)
    fabric.clock.now += 10 * S
    a.prober.tick(fabric.clock.now)
    assert len(seen) <= 10
    seen.clear()
    fabric.run(2 * S)
    assert 170 <= len(seen) <= 210


def test_a_new_list_keeps_phases_and_counts_in_flight() -> None:
    fabric, a, b = pair()
    fabric.fate = lambda packet: 30 * MS
    a.prober.apply_list(make_list(1, [peer(2, b)], flows=10, interval_ms=100), fabric.clock.now)
    fabric.run(1 * S)
    while not len(a.prober.ledger):
        fabric.run(MS)
    in_flight = len(a.prober.ledger)
    seen = watch(fabric)
    a.prober.apply_list(make_list(1, [peer(2, b)], flows=10, interval_ms=100, version=2), fabric.clock.now)
    fabric.run(1 * S)
    assert in_flight > 0
    assert 95 <= len(seen) <= 110
    stop(a, fabric)
    fabric.run(7 * S)
    rows = a.prober.ledger.take_rows(fabric.clock.now, last=True)
    assert {row.list_version for row in rows} == {1, 2}
    for row in rows:
        columns = unpack_columns(PROBER_COLUMNS, row.columns)
        assert columns[1] == columns[2] == columns[4]
    assert a.prober.ledger.stray == 0


def test_the_same_list_again_changes_nothing() -> None:
    fabric, a, b = pair()
    message = make_list(1, [peer(2, b)], flows=10, interval_ms=1000)
    a.prober.apply_list(message, fabric.clock.now)
    fabric.run(3 * S)
    seen = watch(fabric)
    for _ in range(50):
        a.prober.apply_list(message, fabric.clock.now)
        fabric.run(100 * MS)
    assert 45 <= len(seen) <= 55
    assert fabric.events == []


def test_flows_without_a_peer_or_of_another_family_wait() -> None:
    fabric, a, b = pair()
    there = peer(2, b)
    elsewhere = Peer(3, "h3/rnic0", "fd00::3", 1, 1, 1, 4096)
    message = make_list(1, [there, elsewhere], interval_ms=50)
    message.peers = [elsewhere]
    a.prober.apply_list(message, fabric.clock.now)
    fabric.run(1 * S)
    assert fabric.packets == []
    a.prober.apply_peers([there, Peer(99, "nobody/asked", "10.0.0.9", 1, 1, 1, 4096)])
    fabric.run(1 * S)
    assert {p.header.flow_index for p in fabric.packets} == {0}
    assert take(a, fabric)["send_error"] == 0


def test_a_confirmation_counts_apart_and_tells_no_events() -> None:
    fabric, a, b = pair()
    a.prober.apply_list(make_list(1, [peer(2, b)], flows=3, interval_ms=500), fabric.clock.now)
    fabric.run(1 * S)
    fabric.fate = lambda p: (
        None if p.header.window & CONFIRM_BIT and p.kind == probe.PROBE and p.header.flow_index == 1 else LATENCY
    )
    finished: list[int] = []
    began = fabric.clock.now
    window = a.prober.confirm(confirmation(), began, lambda: finished.append(fabric.clock.now))
    assert window == CONFIRM_BIT | 7
    fabric.run(3 * S)
    # 20 rounds of 20 ms and the last one's time-out.
    assert 880 * MS <= finished[0] - began <= 920 * MS
    columns = unpack_columns(PROBER_COLUMNS, a.prober.take_confirmed(1, window))
    rows = dict(zip(columns[0], zip(columns[1], columns[2], columns[5], strict=True), strict=True))
    assert rows == {0: (20, 20, 0), 1: (20, 0, 20)}
    assert fabric.events == []
    totals = b.responder.totals([(1, a.epoch, 1, window)])
    assert [(row[4], row[5]) for row in totals] == [(0, 20)]
    # Nothing of it is in the ordinary report.
    assert all(not r.window & CONFIRM_BIT for r in a.prober.ledger.take_rows(fabric.clock.now, last=True))


def test_a_clean_confirmation_ends_with_its_last_ack() -> None:
    fabric, a, b = pair()
    a.prober.apply_list(make_list(1, [peer(2, b)], flows=2, interval_ms=500), fabric.clock.now)
    finished: list[int] = []
    began = fabric.clock.now
    assert a.prober.confirm(confirmation(), began, lambda: finished.append(fabric.clock.now))
    fabric.run(1 * S)
    assert finished[0] - began < 400 * MS


def test_a_confirmation_keeps_the_cap_and_goes_before_the_list() -> None:
    fabric, a, b = pair(max_rate=100)
    a.prober.apply_list(make_list(1, [peer(2, b)], flows=10, interval_ms=100), fabric.clock.now)  # at the cap
    fabric.run(2 * S)
    seen = watch(fabric)
    finished: list[int] = []
    began = fabric.clock.now
    message = confirmation(indexes=list(range(10)), count=10, interval_us=20_000)  # 500/s
    window = a.prober.confirm(message, began, lambda: finished.append(fabric.clock.now))
    assert window is not None
    fabric.run(5 * S)
    assert len([t for t, _ in seen if t < began + S]) <= 100 + 11
    assert finished[0] - began < 1500 * MS
    columns = unpack_columns(PROBER_COLUMNS, a.prober.take_confirmed(1, window))
    assert list(columns[1]) == [10] * 10


def test_a_confirmation_that_the_cap_starves_ends_and_says_what_it_sent() -> None:
    fabric, a, b = pair(max_rate=5)
    a.prober.apply_list(make_list(1, [peer(2, b)], flows=2, interval_ms=5000), fabric.clock.now)
    finished: list[int] = []
    window = a.prober.confirm(confirmation(), fabric.clock.now, lambda: finished.append(fabric.clock.now))
    assert window is not None
    fabric.run(10 * S)
    assert len(finished) == 1
    assert 5 <= sum(unpack_columns(PROBER_COLUMNS, a.prober.take_confirmed(1, window))[1]) < 20


def test_a_confirmation_in_another_class() -> None:
    fabric, a, b = pair()
    classes = [ProbeClass(), ProbeClass(name="large", size=2048, dscp=10)]
    message = make_list(1, [peer(2, b)], flows=1, interval_ms=10_000, classes=classes)
    a.prober.apply_list(message, fabric.clock.now)
    assert a.prober.confirm(confirmation(cls=1, indexes=[0], count=3), fabric.clock.now, lambda: None)
    fabric.run(1 * S)
    sizes = {(p.size, p.dscp, p.header.cls) for p in fabric.packets if p.header.window & CONFIRM_BIT and not p.kind}
    assert sizes == {(2048, 10, 1)}


@pytest.mark.parametrize(
    "changes", [{"list_version": 2}, {"indexes": [77]}, {"indexes": []}, {"count": 0}, {"cls": 5}], ids=str
)
def test_a_confirmation_of_nothing_known_is_refused(changes: dict[str, object]) -> None:
    fabric, a, b = pair()
    a.prober.apply_list(make_list(1, [peer(2, b)]), fabric.clock.now)
    assert a.prober.confirm(confirmation(**changes), fabric.clock.now, lambda: None) is None


def test_a_confirmation_ends_when_its_rnic_restarts() -> None:
    fabric, a, b = pair()
    a.prober.apply_list(make_list(1, [peer(2, b)], flows=2), fabric.clock.now)
    finished: list[int] = []
    assert a.prober.confirm(confirmation(), fabric.clock.now, lambda: finished.append(1))
    fabric.run(50 * MS)
    a.retire(fabric.clock.now)
    assert finished == [1]


def test_memory_of_a_dead_neighbour_is_bounded() -> None:
    fabric, a, b = pair(max_rate=150)
    fabric.fate = lambda packet: None
    a.prober.apply_list(make_list(1, [peer(2, b)], flows=100, interval_ms=500, max_rate=150), fabric.clock.now)
    fabric.run(60 * S)
    assert len(a.prober.ledger) <= 150 * 5 + 30
    assert sum(len(f.missing) for f in a.prober.flows()) <= 150 * 5 + 30
    for _ in range(3):
        a.prober.ledger.take_rows(fabric.clock.now)
    assert len(a.prober.ledger.counts.windows()) <= 3
    assert transport(a).sent[probe.PROBE] == len(fabric.kinds(messages.OVERDUE)) + sum(
        not r.phase.value for r in a.prober.ledger._outstanding.values()
    )


def test_a_raised_rate_factor_counts_from_now() -> None:
    fabric, a, b = pair()
    a.prober.apply_list(make_list(1, [peer(2, b)], flows=10, interval_ms=1000), fabric.clock.now)
    a.prober.set_factor(0.01)
    fabric.run(5 * S)
    seen = watch(fabric)
    a.prober.set_factor(1.0)
    fabric.run(10 * S)
    assert 90 <= len(seen) <= 110


INTEGERS = st.one_of(st.integers(0, 5), st.integers(-(2**40), 2**40))


@settings(max_examples=200, deadline=None)
@given(
    flows=st.lists(st.builds(Flow, *[INTEGERS] * 7), max_size=5),
    peers=st.lists(
        st.builds(
            Peer, INTEGERS, st.text(max_size=3), st.sampled_from(["::ffff:10.0.0.2", "fd00::1", "x"]), *[INTEGERS] * 4
        ),
        max_size=5,
    ),
    classes=st.lists(st.builds(ProbeClass, dscp=INTEGERS, size=INTEGERS), max_size=3),
    changes=st.fixed_dictionaries({"indexes": st.lists(INTEGERS, max_size=4), "count": INTEGERS, "cls": INTEGERS}),
)
def test_any_numbers_in_lists_and_confirmations_do_no_harm(
    flows: list[Flow], peers: list[Peer], classes: list[ProbeClass], changes: dict[str, object]
) -> None:
    fabric, a, b = pair()
    message = make_list(1, [peer(2, b)])
    message.flows, message.peers, message.classes = flows, [*peers, peer(2, b)], classes
    a.prober.apply_list(message, fabric.clock.now)
    a.prober.apply_peers(peers)
    a.prober.confirm(confirmation(**changes), fabric.clock.now, lambda: None)
    fabric.run(300 * MS)
    assert a.prober.sent == transport(a).sent[probe.PROBE] <= 400


def test_flows_that_do_not_fit_are_left_out_and_said(caplog: pytest.LogCaptureFixture) -> None:
    fabric, a, b = pair()
    message = make_list(1, [peer(2, b)], flows=3)
    message.flows[1].sport = 70_000
    a.prober.apply_list(message, fabric.clock.now)
    assert [f.flow.index for f in a.prober.flows()] == [0, 2]
    assert "1 flows" in caplog.text
