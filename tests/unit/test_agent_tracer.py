from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from agent.icmp import Quoted
from agent.trace_queue import LOSS_ROUND_S, ROUND_S, Bucket, FlowKey, TraceFlow
from agent.tracer import HOP_TIMEOUT_S, OVERHEAD, SUSPICION_S, DeviceTracer, ttl_of
from pingmesh.messages import TracedPath


@dataclass
class Wire:
    """A transport and the fabric behind it: `routes[remote, sport, ttl]` answers, after `step`s of a made-up clock."""

    device: str = "rnic0"
    address: str = "10.0.0.1"
    now: float = 1000.0
    sent: list[tuple[float, str, int, int, int]] = field(default_factory=list)
    broken: bool = False

    def send_limited(self, address: str, sport: int, dscp: int, ttl: int, payload: bytes, qpn: int = 0) -> None:
        if self.broken:
            raise OSError(101, "Network is unreachable")
        self.sent.append((self.now, address, sport, ttl, len(payload)))

    def quoted(self, at: int, router: str, **changes: object) -> Quoted:
        _, address, sport, _, size = self.sent[at]
        fields = {"source": self.address, "target": address, "sport": sport, "dport": 4791, "length": size + OVERHEAD}
        return Quoted(router=router, **(fields | changes))  # type: ignore[arg-type]


def tracer(wire: Wire, quiet: float = 10.0) -> tuple[DeviceTracer, list[TracedPath]]:
    paths: list[TracedPath] = []
    t = DeviceTracer(wire, lambda path, _: paths.append(path), lambda: int(wire.now * 1e9), lambda: wire.now)
    t.bucket = Bucket(quiet=quiet, suspicion=50.0, tokens=max(1.0, quiet), filled_at=wire.now)
    return t, paths


def flow(index: int, sport: int, mask: int = 0b10, *, role: int = 0, remote: str = "10.0.0.2") -> TraceFlow:
    return TraceFlow((role, 1, 3, index), "rnic0", remote, sport, 26, 77, mask)


def run(t: DeviceTracer, wire: Wire, seconds: float, answer: str | None = None) -> None:
    """Let time pass; every packet is answered at once by `answer`."""
    until = wire.now + seconds
    while wire.now < until:
        seen = len(wire.sent)
        delay = t.step()
        if answer is not None:
            for at in range(seen, len(wire.sent)):
                assert t.answer(wire.quoted(at, answer))
        wire.now += min(max(delay, 0.001), until - wire.now) or 0.001


def test_a_path_is_told_once_all_its_hops_have_answered() -> None:
    wire = Wire()
    t, paths = tracer(wire)
    t.set_flows([flow(0, 50000, 0b110)])
    t.step()
    assert [(s[2], s[3]) for s in wire.sent] == [(50000, 2), (50000, 3)]
    assert t.answer(wire.quoted(1, "10.9.0.3"))
    assert paths == []
    wire.now += 0.01
    assert t.answer(wire.quoted(0, "10.9.0.2"))
    assert paths == [TracedPath(0, 1, 3, 0, 50000, [(2, "10.9.0.2"), (3, "10.9.0.3")], 1000 * 10**9)]


def test_flows_that_share_the_port_they_really_have_are_traced_once_and_told_by_the_port_listed() -> None:
    wire = Wire()
    t, paths = tracer(wire)
    t.set_flows([TraceFlow((0, 1, 3, i), "rnic0", "10.0.0.2", 57236, 26, 77, 0b10, 50000 + i) for i in range(2)])
    t.step()
    assert [s[2] for s in wire.sent] == [57236]
    assert t.answer(wire.quoted(0, "10.9.0.2"))
    assert [(p.index, p.sport) for p in paths] == [(0, 50000), (1, 50001)]


def test_answers_are_matched_by_the_whole_quoted_tuple_and_the_ttl() -> None:
    wire = Wire()
    t, paths = tracer(wire)
    t.set_flows([flow(0, 50000, 0b110), flow(1, 50001, 0b10)])
    t.step()
    wrong = [
        wire.quoted(0, "10.9.0.1", source="10.0.0.9"),
        wire.quoted(0, "10.9.0.1", target="10.0.0.9"),
        wire.quoted(0, "10.9.0.1", sport=50009),
        wire.quoted(0, "10.9.0.1", dport=4790),
        wire.quoted(0, "10.9.0.1", length=OVERHEAD + 7),
        wire.quoted(0, "10.9.0.1", length=OVERHEAD + 4 * 5),
    ]
    assert [t.answer(q) for q in wrong] == [False] * len(wrong)
    assert t.unmatched == len(wrong)
    by_tuple = {(s[2], s[3]): i for i, s in enumerate(wire.sent)}
    assert t.answer(wire.quoted(by_tuple[50001, 2], "10.9.1.2"))
    assert [p.index for p in paths] == [1]
    assert not t.answer(wire.quoted(by_tuple[50001, 2], "10.9.1.2")), "a second answer to one packet"
    assert t.answer(wire.quoted(by_tuple[50000, 3], "10.9.0.3"))
    assert t.answer(wire.quoted(by_tuple[50000, 2], "10.9.0.2"))
    assert paths[1].hops == [(2, "10.9.0.2"), (3, "10.9.0.3")]


def test_flows_that_share_a_tuple_share_the_trace() -> None:
    wire = Wire()
    t, paths = tracer(wire)
    t.set_flows([flow(0, 50000, 0b10), flow(9, 50000, 0b110, role=1)])
    run(t, wire, 1.0, "10.9.0.2")
    assert len(wire.sent) == 2
    assert [(p.role, p.index, [ttl for ttl, _ in p.hops]) for p in paths] == [(0, 0, [2]), (1, 9, [2, 3])]


def test_a_missing_answer_is_asked_for_once_more_and_then_none() -> None:
    wire = Wire()
    t, paths = tracer(wire)
    t.set_flows([flow(0, 50000)])
    run(t, wire, 3 * HOP_TIMEOUT_S)
    assert len(wire.sent) == 2
    assert wire.sent[1][0] - wire.sent[0][0] > HOP_TIMEOUT_S - 1e-6
    assert [p.hops for p in paths] == [[(2, None)]]


def test_what_cannot_be_sent_is_none_at_once() -> None:
    wire = Wire(broken=True)
    t, paths = tracer(wire)
    t.set_flows([flow(0, 50000)])
    t.step()
    assert [p.hops for p in paths] == [[(2, None)]]
    assert t.send_errors == 1


def test_the_budget_holds_retries_included() -> None:
    wire = Wire()
    t, _ = tracer(wire, quiet=2.0)
    t.set_flows([flow(i, 50000 + i) for i in range(100)])
    run(t, wire, 20.0)
    assert 38 <= len(wire.sent) <= 2 * 20 + 2


def test_no_budget_means_no_packet() -> None:
    wire = Wire()
    t, _ = tracer(wire, quiet=0.0)
    t.bucket.tokens = 0.0
    t.set_flows([flow(0, 50000)])
    run(t, wire, 100.0)
    assert wire.sent == []


def test_a_retrace_goes_first_at_the_higher_rate_and_for_ten_seconds() -> None:
    wire = Wire()
    t, _ = tracer(wire, quiet=1.0)
    t.set_flows([flow(i, 50000 + i) for i in range(2000)])
    run(t, wire, 3.0, "10.9.0.2")
    before = len(wire.sent)
    asked: list[FlowKey] = [(0, 1, 3, 700), (0, 1, 3, 800), (0, 1, 3, 5555)]
    assert t.ask(asked) == 2
    run(t, wire, SUSPICION_S, "10.9.0.2")
    after = wire.sent[before:]
    assert {s[2] for s in after[:2]} == {50700, 50800}
    assert 480 <= len(after) <= 510
    before = len(wire.sent)
    run(t, wire, 10.0, "10.9.0.2")
    assert 9 <= len(wire.sent) - before <= 60, "what the bucket held, then the quiet rate again"


def test_lossy_flows_go_before_new_ones_and_new_ones_before_old_ones() -> None:
    wire = Wire()
    t, _ = tracer(wire, quiet=1.0)
    t.set_flows([flow(0, 50000), flow(1, 50001), flow(2, 50002)])
    run(t, wire, 1.5, "10.9.0.2")
    assert {s[2] for s in wire.sent} == {50000, 50001}
    t.set_flows([flow(i, 50000 + i) for i in range(5)])
    assert t.lost((0, 1, 3, 4))
    assert not t.lost((0, 1, 3, 4)), "known already"
    assert not t.lost((0, 1, 3, 77)), "no such flow"
    run(t, wire, 4.0, "10.9.0.2")
    assert [s[2] for s in wire.sent[2:5]] == [50004, 50002, 50003]


def test_a_flow_that_keeps_losing_does_not_eat_the_whole_budget() -> None:
    wire = Wire()
    t, _ = tracer(wire, quiet=5.0)
    t.set_flows([flow(0, 50000), flow(1, 50001)])
    for _ in range(120):
        t.lost((0, 1, 3, 0))
        run(t, wire, 0.1, "10.9.0.2")
    of_lossy = [s for s in wire.sent if s[2] == 50000]
    assert 3 <= len(of_lossy) <= 12 / LOSS_ROUND_S + 1


def test_a_known_path_is_confirmed_each_round_and_no_more_often() -> None:
    wire = Wire()
    t, paths = tracer(wire)
    t.set_flows([flow(0, 50000)])
    run(t, wire, 3 * ROUND_S + 1, "10.9.0.2")
    assert len(paths) == 4
    assert [b.at_ns - a.at_ns >= ROUND_S * 1e9 for a, b in itertools.pairwise(paths)] == [True] * 3


def test_only_news_is_urgent() -> None:
    wire = Wire()
    told: list[tuple[list[tuple[int, str | None]], bool]] = []
    t = DeviceTracer(wire, lambda p, news: told.append((p.hops, news)), lambda: 0, lambda: wire.now)
    t.set_flows([flow(0, 50000)])
    run(t, wire, ROUND_S, "10.9.0.2")
    run(t, wire, ROUND_S, "10.9.0.2")
    run(t, wire, ROUND_S, "10.9.0.9")
    t.ask([(0, 1, 3, 0)])
    run(t, wire, 1.0, "10.9.0.9")
    a, b = [(2, "10.9.0.2")], [(2, "10.9.0.9")]
    assert told == [(a, True), (a, False), (b, True), (b, True)]


def test_a_new_list_version_makes_known_tuples_new() -> None:
    wire = Wire()
    t, paths = tracer(wire)
    t.set_flows([flow(0, 50000)])
    run(t, wire, 1.0, "10.9.0.2")
    f = flow(0, 50000)
    t.set_flows([TraceFlow((0, 1, 4, 0), f.device, f.remote, f.sport, f.dscp, f.qpn, f.mask)])
    run(t, wire, 1.0, "10.9.0.2")
    assert [p.list_version for p in paths] == [3, 4]


def test_new_tuples_go_before_those_that_only_have_a_new_list_version() -> None:
    wire = Wire()
    t, _ = tracer(wire)
    known = [flow(i, 50000 + i) for i in range(20)]
    t.set_flows(known)
    run(t, wire, 5.0, "10.9.0.2")
    again = [TraceFlow((0, 1, 4, f.key[3]), f.device, f.remote, f.sport, f.dscp, f.qpn, f.mask) for f in known]
    seen = len(wire.sent)
    t.set_flows([*again, *(TraceFlow((0, 1, 4, i), "rnic0", "10.0.0.2", 50000 + i, 26, 77, 0b10) for i in (20, 21))])
    run(t, wire, 5.0, "10.9.0.2")
    ports = [s[2] for s in wire.sent[seen:]]
    assert set(ports[:2]) == {50020, 50021}
    assert len(set(ports)) == 22


def test_flows_that_go_while_traced_are_not_told() -> None:
    wire = Wire()
    t, paths = tracer(wire)
    t.set_flows([flow(0, 50000)])
    t.step()
    t.set_flows([])
    assert t.answer(wire.quoted(0, "10.9.0.2"))
    run(t, wire, 20.0)
    assert paths == []
    assert len(wire.sent) == 1


def test_lengths_tell_the_ttl() -> None:
    assert [ttl_of(n) for n in (-4, 0, 1, 4, 8, 32, 36)] == [0, 0, 0, 1, 2, 8, 0]
