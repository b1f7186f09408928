"""The probe's header: round trip, its layout, and whatever bytes may come."""

from __future__ import annotations

import pytest
from fuzzing import fuzz
from hypothesis import given
from hypothesis import strategies as st
from plane_fakes import CLUSTER, LATENCY, MS, Fabric, FakeTransport, make_list, peer, stop, take

from pingmesh import probe

U8, U16, U32, U64 = (st.integers(0, (1 << bits) - 1) for bits in (8, 16, 32, 64))
HEADERS = st.builds(
    probe.Header,
    magic=st.just(probe.MAGIC),
    version=st.just(probe.VERSION),
    kind=st.sampled_from([probe.PROBE, probe.ACK1, probe.ACK2]),
    cls=U8,
    flags=U8,
    trace_mask=U8,
    dscp=U8,
    cluster=U32,
    source=U32,
    epoch=U32,
    target_epoch=U32,
    seq=U32,
    list_version=U32,
    flow_index=U16,
    sport=U16,
    window=U32,
    left=U16,
    reserved=U16,
    qkey=U32,
    history=U64,
    delay=U64,
)


@fuzz(100)
@given(HEADERS, st.binary(max_size=100))
def test_round_trip_whatever_padding_follows(header: probe.Header, padding: bytes) -> None:
    packed = probe.encode(header)
    assert len(packed) == probe.SIZE == 64
    assert probe.decode(packed) == header
    assert probe.decode(memoryview(packed + padding)) == header


def test_the_layout_is_fixed() -> None:
    header = probe.Header(
        *(probe.MAGIC, 1, 2, 3, 4, 5, 6), 0x0708090A, 0x0B0C0D0E, 0x0F101112, 0x13141516, 0x1718191A, 0x1B1C1D1E,
        *(0x1F20, 0x2122, 0x23242526, 0x2728, 0x292A, 0x2B2C2D2E, 0x2F30313233343536, 0x3738393A3B3C3D3E),
    )  # fmt: skip
    assert probe.encode(header) == b"PM\x01\x02\x03\x04\x05\x06" + bytes(range(7, 63))


@given(HEADERS, U32, U32, U32, U16, U64, U64)
def test_changes_in_place_change_what_they_say(
    header: probe.Header, epoch: int, seq: int, window: int, left: int, history: int, delay: int
) -> None:
    buffer = probe.encode(header)
    probe.aim(buffer, epoch)
    probe.stamp_probe(buffer, seq, window)
    sent = header._replace(target_epoch=epoch, seq=seq, window=window)
    assert probe.decode(buffer) == sent
    probe.answer(buffer, sent, flags=probe.STALE, dscp=7, left=left, history=history)
    first = sent._replace(
        kind=probe.ACK1, flags=probe.STALE, dscp=7, left=left, reserved=0, qkey=0, history=history, delay=0
    )
    assert probe.decode(buffer) == first
    probe.answer_again(buffer, delay)
    assert probe.decode(buffer) == first._replace(kind=probe.ACK2, delay=delay)


def test_a_negative_delay_becomes_an_absurd_one() -> None:
    buffer = probe.encode(probe.Header(probe.MAGIC, 1, 1, *[0] * 18))
    probe.answer_again(buffer, -5)
    assert probe.decode(buffer).delay == 2**64 - 5


@pytest.mark.parametrize(
    ("change", "reason"),
    [(slice(63, None), "short"), ((0, 0), "magic"), ((2, 2), "version"), ((3, 3), "kind")],
    ids=["short", "magic", "version", "kind"],
)
def test_each_reason_to_refuse(change: slice | tuple[int, int], reason: str) -> None:
    buffer = probe.encode(probe.Header(probe.MAGIC, 1, 0, *[0] * 18))
    if isinstance(change, slice):
        del buffer[change]
    else:
        buffer[change[0]] = change[1]
    with pytest.raises(probe.BadProbeError) as caught:
        probe.decode(buffer)
    assert caught.value.reason == reason


@fuzz(500)
@given(st.one_of(st.binary(max_size=200), st.binary(max_size=200).map(lambda b: b"PM\x01" + b)))
def test_any_bytes_reach_an_rnic_without_harm(payload: bytes) -> None:
    """Refused and counted, stray, stale or answered: nothing else, and nothing raised."""
    fabric = Fabric()
    rnic = fabric.add(1)
    rnic.receive(memoryview(payload), "10.0.0.9", 5, 0xC000, 0, 60, 0)
    responder, ledger = rnic.responder, rnic.prober.ledger
    answered = len(list(responder.flows()))
    assert rnic.rejected + ledger.stray + responder.stale + responder.send_errors + answered == 1


@fuzz(300)
@given(HEADERS)
def test_any_header_of_our_cluster_reaches_an_rnic_without_harm(header: probe.Header) -> None:
    fabric = Fabric()
    rnic = fabric.add(1)
    ours = header._replace(cluster=rnic._cluster, target_epoch=rnic.epoch)
    rnic.receive(memoryview(probe.encode(ours)), "10.0.0.9", 5, 0xC000, 0, 60, 0)
    if header.kind == probe.PROBE:
        assert [row[5] for row in rnic.responder.take(0)] == [1]
    else:
        assert rnic.prober.ledger.stray == 1


@fuzz(100)
@given(
    st.lists(
        st.binary(max_size=100)
        | st.binary(max_size=100).map(lambda b: b"PM\x01" + b)
        | HEADERS.map(lambda h: bytes(probe.encode(h)))
        | st.builds(
            lambda h, seq: bytes(probe.encode(h._replace(cluster=CLUSTER, source=1, list_version=1, seq=seq))),
            HEADERS,
            st.integers(1 << 31, (1 << 32) - 1),
        ),
        min_size=1,
        max_size=20,
    )
)
def test_nothing_is_lost_in_a_hail_of_other_packets(packets: list[bytes]) -> None:
    """The prober's and the responder's counts of what they really exchanged stay exact."""
    fabric = Fabric()
    a, b = fabric.add(1), fabric.add(2)
    FakeTransport(fabric, "far", "10.0.0.9")  # where the hail comes from
    a.prober.apply_list(make_list(1, [peer(2, b)], flows=3), fabric.clock.now)
    fabric.run(20 * MS)
    for packet in packets:
        fabric.run(3 * MS)
        for rnic in (a, b):
            rnic.receive(memoryview(packet), "10.0.0.9", 5, 0xC000, 0, 60, fabric.clock.stamp())
    stop(a, fabric)
    fabric.run(600 * MS)
    counts = take(a, fabric)
    assert counts["sent"] > 0
    assert counts["sent"] == counts["arrived"] == counts["ack1"] == counts["ack2"]
    assert not fabric.events
    ours = [row for row in b.responder.take(fabric.clock.now) if row[0] == 1 and row[1] == a.epoch]
    assert sum(row[5] for row in ours) == counts["sent"]
    assert counts["rtt_max"] * 100 < 10 * LATENCY


@fuzz(200)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 30), st.sampled_from([probe.ACK1, probe.ACK2]), U8, U8, U16, U64, st.integers(0, 10**7) | U64
        ),
        max_size=30,
    )
)
def test_answers_full_of_nonsense(answers: list[tuple[int, int, int, int, int, int, int]]) -> None:
    """Real probes, answered with any history, delay, flags and ports: each is counted once and can be reported."""
    fabric = Fabric()
    a, b = fabric.add(1), fabric.add(2)
    fabric.fate = lambda packet: None
    a.prober.apply_list(make_list(1, [peer(2, b)], flows=3), fabric.clock.now)
    fabric.run(100 * MS)
    sent = [p.header for p in fabric.packets]
    for which, kind, flags, dscp, left, history, delay in answers:
        ack = sent[which % len(sent)]._replace(
            kind=kind, flags=flags, dscp=dscp, left=left, qkey=0, history=history, delay=delay
        )
        a.receive(memoryview(probe.encode(ack)), "10.0.0.2", 5, 0xC000, 0, 60, fabric.clock.stamp())
    stop(a, fabric)
    fabric.run(600 * MS)
    counts = take(a, fabric)
    assert counts["sent"] + counts["excluded"] == len(sent)
    assert counts["arrived"] + counts["lost"] == counts["sent"]
    assert counts["rtt_max"] * 100 <= 700 * MS
