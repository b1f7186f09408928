"""The responder's histories and its bounds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plane_fakes import CLUSTER, Fabric, FakeTransport, S

from agent import responder as module
from agent.responder import IncomingFlow, Responder
from pingmesh import probe


def header(**changes: int) -> probe.Header:
    fields = dict.fromkeys(probe.Header._fields, 0)
    fields |= {"magic": probe.MAGIC, "version": 1, "cluster": CLUSTER, "source": 1, "epoch": 5, "target_epoch": 9}
    return probe.Header(**(fields | {"seq": 1, "list_version": 1, "sport": 0xC000, "window": 3} | changes))


def feed(responder: Responder, head: probe.Header, now: int = 0) -> None:
    responder.on_probe(head, memoryview(probe.encode(head)), "10.0.0.1", 77, head.dscp, 0, now)


@given(st.lists(st.integers(1, 300), min_size=1, max_size=60, unique=True))
def test_the_history_tells_exactly_what_arrived(arrivals: list[int]) -> None:
    flow = IncomingFlow(header())
    seen: set[int] = set()
    for seq in arrivals:
        history = flow.note(seq)
        assert history is not None
        newest = max(seen, default=seq)
        for bit in range(64):
            told = bool(history >> bit & 1)
            if told:
                assert seq - 1 - bit in seen
            elif seq - 1 - bit > newest - 64:
                assert seq - 1 - bit not in seen
        seen.add(seq)


@given(st.lists(st.integers(0, 0xFFFFFFFF), min_size=2, max_size=30))
def test_no_sequence_makes_the_history_grow(arrivals: list[int]) -> None:
    flow = IncomingFlow(header())
    for seq in arrivals:
        history = flow.note(seq)
        assert history is None or 0 <= history <= probe.HISTORY_MASK
        assert 0 <= flow.history <= probe.HISTORY_MASK


def test_a_sequence_seen_before_is_a_duplicate() -> None:
    flow = IncomingFlow(header())
    assert [flow.note(s) for s in (5, 5, 7, 6, 6, 5)] == [0, None, 0b10, 0b1, None, None]


def test_totals_stay_and_increments_go() -> None:
    responder = Responder(FakeTransport(Fabric(), "rnic1", "10.0.0.1"), 9)
    feed(responder, header(seq=1))
    feed(responder, header(seq=2))
    assert [row[5:] for row in responder.take(0)] == [(2, 2, 2, 0)]
    feed(responder, header(seq=3))
    assert [row[5:] for row in responder.take(0)] == [(1, 1, 1, 0)]
    assert responder.take(0) == []
    assert responder.totals([(1, 5, 1, 3), (1, 5, 1, 4)]) == [(1, 5, 1, 3, 0, 3, 3, 3, 0)]


def test_windows_and_flows_are_forgotten_after_a_minute() -> None:
    responder = Responder(FakeTransport(Fabric(), "rnic1", "10.0.0.1"), 9)
    for second in range(300):
        feed(responder, header(seq=second, window=second // 5, flow_index=second % 7), second * S)
        responder.take(second * S)
    assert len(responder._windows) <= 14
    responder.take(1000 * S)
    assert not responder._windows
    assert not responder._touched
    assert not list(responder.flows())
    assert responder._rows == 0


def test_a_flood_of_made_up_flows_is_answered_but_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_ROWS", 50)
    monkeypatch.setattr(module, "MAX_FLOWS", 20)
    fabric = Fabric()
    responder = Responder(FakeTransport(fabric, "rnic1", "10.0.0.1"), 9)
    for i in range(500):
        feed(responder, header(source=i, window=i, epoch=i))
    assert len(responder._flows) == 20
    assert responder._rows == len(responder._windows) == len(responder._touched) == 50
    assert responder.overflow == 450
    assert len(responder.take(0)) == 50
    assert len(fabric.packets) == 1000


def test_an_answer_to_an_unreachable_family_is_an_error_and_no_crash() -> None:
    responder = Responder(FakeTransport(Fabric(), "rnic1", "10.0.0.1"), 9)
    for epoch in (9, 8):
        head = header(target_epoch=epoch)
        responder.on_probe(head, memoryview(probe.encode(head)), "fd00::1", 77, 0, 0, 0)
    assert responder.send_errors == 2
    assert responder.stale == 1
