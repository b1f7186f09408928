from __future__ import annotations

import argparse
import asyncio
import errno
import io
from collections.abc import Callable
from typing import Any, cast

import pytest

from agent.clock import window_of
from agent.ping import NOBODY, Aim, Pinger, Plan
from agent.ping_probe import Outcome, PingProbe, PingResult, Quantiles
from agent.transport.base import Receiver, Stamped, Target, Transport
from pingmesh import probe
from pingmesh.analyzer.flows import FlowBook
from pingmesh.analyzer.samples import SampleStore
from pingmesh.cli import ask, main, ping, ping_ends, ping_lab, ping_render
from pingmesh.cli.exits import Exit
from pingmesh.cli.ping_ends import Destination, PingError, Source
from pingmesh.messages import RESPONDER_COLUMNS, pack_columns
from topology.generate import leaf_spine

AIM = Aim("10.0.0.2", 17, 99, 7)
DELAY, FLIGHT = 3_000, 500
"""The responder's delay and the network's, both ways, in ns."""


class Wire:
    """A transport to a responder that does as its script says: `fate(seq)` names the packets that get through."""

    device = interface = "e0"
    address, gid, kind, clock = "10.0.0.1", "::ffff:10.0.0.1", "soft", "kernel"
    qpn, qkey, mtu = 5, 6, 1024
    source_port_honoured = "yes"
    polled = False

    def __init__(self, fate: Callable[[int], str] = lambda seq: "12", stale: bool = False) -> None:
        self.fate = fate
        self.stale = stale
        self.far_polled = False
        self.sent: list[probe.Header] = []
        self.refuse: list[OSError] = []
        self.now = 1_000_000
        self._arrived = 0

    def read(self) -> int:
        self.now += 100
        return self.now

    def start(self, loop: asyncio.AbstractEventLoop, receiver: Receiver) -> None:
        self._loop, self._receiver = loop, receiver

    def target(self, address: str, qpn: int, qkey: int) -> Target:
        assert (address, qpn, qkey) == AIM[:3]
        return cast(Target, object())

    def source_port(self, sport: int) -> int:
        return sport

    def send(self, target: Target, sport: int, dscp: int, payload: bytes | bytearray, size: int, stamp: bool) -> int:
        if self.refuse:
            raise self.refuse.pop(0)
        header = probe.decode(payload)
        self.sent.append(header)
        sent = self.read()
        fate = self.fate(header.seq)
        if fate == "lost":
            return sent
        history = self._arrived
        self._arrived |= 1 << header.seq
        if "1" in fate or "2" in fate:
            seen = sum(1 << i for i in range(min(64, header.seq)) if history >> (header.seq - 1 - i) & 1)
            self._loop.call_soon(self._answer, bytes(payload), header, sent, fate, seen)
        return sent

    def await_stamp(self, waiter: Stamped) -> None:
        raise AssertionError("every send is stamped")

    def _answer(self, payload: bytes, header: probe.Header, sent: int, fate: str, history: int) -> None:
        ack = bytearray(payload)
        flags = (probe.STALE if self.stale else 0) | (probe.POLLED if self.far_polled else 0)
        probe.answer(ack, header, flags=flags, dscp=header.dscp, left=header.sport, history=history)
        receive = self._receiver.receive
        if "1" in fate:
            arrived = sent + FLIGHT + DELAY
            self.now = arrived + 200
            receive(memoryview(bytes(ack)), "10.0.0.2", 17, header.sport, header.dscp, 62, arrived)
        if "2" in fate:
            probe.answer_again(ack, DELAY)
            receive(memoryview(bytes(ack)), "10.0.0.2", 17, header.sport, header.dscp, 62, self.now)


def plan(count: int, timeout_ms: int = 30, interval_ns: int = 0) -> Plan:
    return Plan(count, interval_ns, timeout_ms * 1_000_000, probe.SIZE, 26, 50_000, "lab")


def measure(wire: Wire, what: Plan) -> tuple[PingResult, list[PingProbe]]:
    seen: list[PingProbe] = []

    async def run() -> PingResult:
        pinger = Pinger(cast(Transport, wire), AIM, what, seen.append, wire.read)
        return await pinger.run()

    return asyncio.run(run()), seen


def test_six_timestamps_make_three_delays() -> None:
    result, seen = measure(Wire(), plan(5))
    assert (result.sent, result.answered, result.lost) == (5, 5, 0)
    assert set(result.network) == {FLIGHT}
    assert set(result.responder) == {DELAY}
    for p in seen:
        assert p.prober_ns == (p.t2 - p.t1) + (p.t6 - p.t5) == 100 + 300
        assert p.t1 < p.t2 < p.t5 < p.t6
        assert (p.ttl, p.dscp, p.sport) == (62, 26, 50_000)


@pytest.mark.parametrize(("here", "there"), [(False, False), (True, False), (False, True)])
def test_delays_that_contain_a_poll_timer_are_marked(here: bool, there: bool) -> None:
    wire = Wire()
    wire.polled, wire.far_polled = here, there
    result, _ = measure(wire, plan(2))
    said = ping_render.summary_json(result)
    assert (said["prober_delay_polled"], said["responder_delay_polled"]) == (here, there)
    marked = {line.split("*")[0].strip() for line in ping_render.summary(result).splitlines() if " * " in line}
    assert ("prober delay" in marked, "responder delay" in marked) == (here, there)
    assert (ping_render.POLLED in ping_render.summary(result)) == (here or there)


def test_probes_name_nobody_and_the_epoch_meant() -> None:
    wire = Wire()
    measure(wire, plan(2))
    for h in wire.sent:
        assert (h.source, h.list_version, h.target_epoch, h.trace_mask) == (NOBODY, NOBODY, AIM.epoch, 0)
        assert h.window < 1 << 31


def test_loss_is_told_by_direction_where_later_answers_tell() -> None:
    fates = {2: "lost", 3: "arrived", 4: "1", 6: "2"}
    result, seen = measure(Wire(lambda seq: fates.get(seq, "12")), plan(7))
    assert (result.sent, result.lost, result.lost_there, result.lost_back) == (7, 2, 1, 1)
    assert (result.answered, result.no_rtt, len(result.network)) == (5, 2, 3)
    assert [p.outcome for p in seen] == [
        Outcome.ANSWERED,
        Outcome.LOST,
        Outcome.LOST,
        Outcome.NO_RTT,
        Outcome.ANSWERED,
        Outcome.NO_RTT,
        Outcome.ANSWERED,
    ]
    assert "2 lost (28.57%): 1 on the way there, 1 on the way back" in ping_render.summary(result)


def test_clock_trouble_is_invalid_and_a_restarted_target_stale() -> None:
    p = PingProbe(1, t1=100, t2=200, t5=300, t6=400, responder_ns=5_000)
    p.settle(10**9)
    assert p.outcome is Outcome.INVALID  # a network that took -4900 ns
    result, _ = measure(Wire(stale=True), plan(2))
    assert (result.stale, result.lost, len(result.network)) == (2, 0, 0)
    assert ping.verdict(result, Destination("h2/rnic0", AIM)) is Exit.NOT_ENOUGH_DATA


def test_a_neighbour_that_is_not_known_yet_is_waited_for() -> None:
    wire = Wire()
    wire.refuse = [OSError(errno.EHOSTUNREACH, "No route to host")] * 2
    result, _ = measure(wire, plan(2))
    assert (result.sent, result.send_errors, [h.seq for h in wire.sent]) == (2, 0, [1, 2])
    wire.refuse = [OSError(errno.ENETDOWN, "Network is down")]
    result, _ = measure(wire, plan(1))
    assert (result.sent, result.send_errors, result.loss) == (0, 1, None)
    assert "1 did not leave (Network is down)" in ping_render.summary(result)


def test_stopping_does_not_count_what_is_in_flight() -> None:
    wire = Wire(lambda seq: "12" if seq < 3 else "lost")

    async def run() -> PingResult:
        pinger = Pinger(cast(Transport, wire), AIM, plan(0, 5_000), lambda p: None, wire.read)
        asyncio.get_running_loop().call_later(0.05, pinger.stop)
        return await pinger.run()

    result = asyncio.run(run())
    assert (result.sent, result.answered, result.lost, result.in_flight) == (2, 2, 0, 1)


def test_an_answer_that_comes_late_was_not_lost() -> None:
    result = PingResult()
    late = PingProbe(1, outcome=Outcome.LOST)
    result.count(late)
    assert (result.lost, result.answered) == (1, 0)
    late = PingProbe(1, t1=1, t2=2, t5=9, t6=10, responder_ns=3, outcome=Outcome.ANSWERED, late=True)
    result.count(late)
    assert (result.sent, result.lost, result.answered, result.late) == (1, 0, 1, 1)
    assert ping_render.probe_line(late, same_clock=False).endswith("[t6-t1 0.0  t5-t2 0.0  t4-t3 0.0]")


def test_quantiles_are_values_that_were_measured() -> None:
    q = Quantiles.of(list(range(1, 2001)))
    assert q is not None
    assert (q.min, q.median, q.p99, q.p999, q.max) == (1, 1001, 1981, 1999, 2000)
    assert Quantiles.of([]) is None


def test_what_a_responder_counts_of_our_probes_is_evidence_for_nothing() -> None:
    store = SampleStore(FlowBook(leaf_spine(2, 2, 1, 1)))
    now = 1_000_000_000_000
    row = (NOBODY, 12345, NOBODY, window_of(now), 0, 900, 900, 900, 900)
    store.add_responder(pack_columns(RESPONDER_COLUMNS, [(v,) for v in row]), now)
    assert store.join(now + 10**9, lambda host: now + 10**12) == []
    assert not store.mismatched
    assert not store.samples


# ---------------------------------------------------------------- the command


def arguments(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    ping.add_arguments(parser)
    return parser.parse_args(argv)


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["h1/rnic0"], "give SRC and DST"),
        (["--serve", "a", "b"], "--serve takes one end"),
        (["a", "b", "--traffic-class", "105"], "a multiple of 4, such as 104"),
        (["a", "b", "--size", "66"], "multiple of 4 from 64"),
        (["a", "b", "--size", "32"], "multiple of 4 from 64"),
        (["a", "b", "--count", "-1"], "--count -1 is not allowed"),
        (["a", "b", "--interval", "-1"], "--interval -1.0 is not allowed"),
        (["a", "b", "--sport", "0"], "--sport 0 is not allowed"),
        (["a", "b", "--sport", "50000", "--flow-label", "1"], "leave out --sport or --flow-label"),
        (["a", "b", "--flow-label", "0x100000"], "--flow-label 1048576 is not allowed"),
        (["e0", "h4"], "neither an RNIC's name"),
        (["e0", "10.0.0.2,17,99"], "is not ADDRESS,QPN,QKEY,EPOCH"),
        (["e0", "10.0.0.2,17,x,1"], "are numbers"),
        (["e0", "somewhere,17,1,1"], "somewhere"),
        (["192.0.2.77", "192.0.2.1,17,1,1"], "SRC 192.0.2.77 is no address of this machine"),
        (["pm-none0", "192.0.2.1,17,1,1"], "pm-none0 does not exist"),
        (["pm-none0", "192.0.2.1,17,1,1", "--gid-index", "3"], "--gid-index is for the verbs transport"),
    ],
)
def test_bad_input_ends_in_one_sentence(argv: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["ping", *argv]) == 2
    out, err = capsys.readouterr()
    assert text in err
    assert err.count("\n") == 1
    assert not out


ENTRY = {
    "name": "h4/rnic0",
    "address": "10.2.0.3",
    "gid": "::ffff:10.2.0.3",
    "qpn": 44,
    "qkey": 55,
    "epoch": 66,
    "mtu": 1024,
    "agent": "online",
    "up": True,
    "transport": "soft",
}


def test_the_target_is_looked_up_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ask, "get", lambda *_, **__: [ENTRY])
    known = ping_ends.registered("x", ["h4/rnic0"])
    assert ping_ends.destination("h4/rnic0", known, "x").aim == Aim("10.2.0.3", 44, 55, 66)
    with pytest.raises(PingError, match="did you mean h4/rnic0"):
        ping_ends.destination("h5/rnic0", ping_ends.registered("x", ["h5/rnic0"]), "x")
    older = {k: v for k, v in ENTRY.items() if k != "qkey"}
    with pytest.raises(PingError, match="earlier version"):
        ping_ends.destination("h4/rnic0", {"h4/rnic0": older}, "x")
    monkeypatch.setattr(ask, "get", lambda *_, **__: [ENTRY | {"epoch": 67, "agent": "died"}])
    now = ping_ends.again(Destination("h4/rnic0", Aim("10.2.0.3", 44, 55, 66)), "x")
    assert (now.renewed, now.presence) == (True, "died")


def test_source_is_found_by_the_address_it_registered() -> None:
    known: dict[str, dict[str, Any]] = {"h4/rnic0": ENTRY}
    assert ping_ends.source("h4/rnic0", None, known, {"10.2.0.3": "eth7"}) == Source("h4/rnic0", "eth7", "10.2.0.3")
    assert ping_ends.source("h4/rnic0", None, known, {"10.2.0.9": "eth7"}) is None
    assert ping_ends.source("10.2.0.9", None, {}, {"10.2.0.9": "eth7"}) == Source("10.2.0.9", "eth7", "10.2.0.9")
    assert ping_ends.source("eth7", None, {}, {}) == Source("eth7", "eth7")
    with pytest.raises(PingError, match="no SRC"):
        ping_ends.source(None, None, {}, {})


def test_elsewhere_says_where_to_go(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("PINGMESH_LAB_DIR", str(tmp_path / "none"))
    args = arguments("h1/rnic0", "h4/rnic0")
    target = Destination("h4/rnic0", AIM)
    with pytest.raises(PingError, match="run this on h1, in a lab by `pingmesh lab exec h1"):
        ping_lab.enter(args, "h1/rnic0", "10.1.0.1", target, "lab", "unix:/x")
    argv = ping_lab.argv(args, "rnic0", "h1/rnic0", target, "lab", "unix:/x")
    again = arguments(*argv[argv.index("ping") + 1 :])
    assert (again.ends, again.device, again.cluster, again.shown_as) == (
        [str(AIM)],
        "rnic0",
        "lab",
        ["h1/rnic0", "h4/rnic0"],
    )
    ping.check(again)


def test_verdicts(capsys: pytest.CaptureFixture[str]) -> None:
    lost = PingResult(sent=3, lost=3)
    assert ping.verdict(lost, Destination("h2/rnic0", AIM, presence="died")) is Exit.FAULT
    assert "is not online (died)" in capsys.readouterr().err
    assert ping.verdict(lost, Destination("h2/rnic0", AIM, renewed=True)) is Exit.NOT_ENOUGH_DATA
    assert "started anew" in capsys.readouterr().err
    assert ping.verdict(PingResult(sent=3, lost=2, answered=1), Destination("h2/rnic0", AIM)) is Exit.HEALTHY
    assert ping.verdict(PingResult(), Destination("h2/rnic0", AIM)) is Exit.NOT_ENOUGH_DATA


def test_a_terminal_gets_a_line_that_counts_and_the_losses() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    out = Terminal()
    result = PingResult(sent=1)
    live = ping_render.Live(result, 10, every=False, same_clock=True, out=out)
    live.settled(PingProbe(1, t1=1, t2=2, t5=9, t6=10, responder_ns=3, outcome=Outcome.ANSWERED))
    live.settled(PingProbe(2, outcome=Outcome.LOST))
    assert "1 of 10 sent, 0 lost" in out.getvalue()
    assert out.getvalue().endswith("seq 2: no answer\n")
