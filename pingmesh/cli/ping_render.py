"""How `pingmesh ping` shows what it measured."""

from __future__ import annotations

import sys
import time
from typing import Any, TextIO

from agent.ping import Plan
from agent.ping_probe import Outcome, PingProbe, PingResult, Quantiles
from agent.transport.base import Transport
from pingmesh.cli.ping_ends import Destination, Source

LINES_FROM_S = 0.05
"""Probes closer together than this are not shown one by one, unless asked for."""
PROGRESS_S = 0.2
_WORDS = {
    Outcome.NO_RTT: "answered, but the second ACK, with the responder's delay, was lost",
    Outcome.LOST: "no answer",
    Outcome.STALE: "answered by a later start of the target (its epoch is another)",
    Outcome.INVALID: "answered, with a clock that went backwards: not counted",
}


POLLED = "* with the wait for a timer: the RNIC stamps packets itself, and its queue is looked at every 1 to 10 ms"


def us(ns: float) -> str:
    """Microseconds.

    >>> us(1234567)
    '1234.6'
    """
    return f"{ns / 1000:.1f}"


def probe_line(p: PingProbe, same_clock: bool) -> str:
    """One probe. `same_clock`: the stamps t2 and t5 are of the clock of t1 and t6."""
    late = "late: " if p.late else ""
    if p.outcome is Outcome.SEND_ERROR:
        return f"seq {p.seq}: did not leave: {p.error}"
    if p.outcome is not Outcome.ANSWERED:
        return f"seq {p.seq}: {late}{_WORDS[p.outcome]}"
    measured = f"network {us(p.network_ns)}  prober {us(p.prober_ns)}  responder {us(p.responder_ns)}"
    if same_clock:
        times = f"t1 0  t2 {us(p.t2 - p.t1)}  t5 {us(p.t5 - p.t1)}  t6 {us(p.t6 - p.t1)}"
    else:
        times = f"t6-t1 {us(p.t6 - p.t1)}  t5-t2 {us(p.t5 - p.t2)}"
    return f"seq {p.seq}: {late}{measured} us   [{times}  t4-t3 {us(p.responder_ns)}]"


def header(source: Source, target: Destination, transport: Transport, plan: Plan) -> str:
    """What is about to be measured, and by whose clocks."""
    port = transport.source_port(plan.sport)
    said = "" if port == plan.sport else f" (not {plan.sport}: {transport.device} draws its own)"
    here = f"{source.name} ({transport.address}, {transport.kind}, {transport.clock} stamps)"
    there = f"{target.name} ({target.aim.address}, QPN {target.aim.qpn})"
    what = f"{plan.size} bytes, traffic class {plan.dscp << 2}, source port {port}{said}"
    return f"{here} -> {there}: {what}"


def header_json(
    source: Source, target: Destination, transport: Transport, plan: Plan, same_clock: bool
) -> dict[str, Any]:
    """The same as data. `same_clock`: t2 and t5 are of the clock of t1 and t6."""
    return {
        "source": {
            "name": source.name,
            "device": transport.device,
            "address": transport.address,
            "gid": transport.gid,
            "transport": transport.kind,
        },
        "target": {"name": target.name} | target.aim._asdict(),
        "size": plan.size,
        "traffic_class": plan.dscp << 2,
        "sport_asked": plan.sport,
        "sport": transport.source_port(plan.sport),
        "source_port_honoured": transport.source_port_honoured,
        "clock": transport.clock,
        "same_clock": same_clock,
    }


class Live:
    """Shows probes as they are settled: each on a line, or on a terminal a line that counts them."""

    def __init__(self, result: PingResult, total: int, every: bool, same_clock: bool, out: TextIO | None = None):
        self._result = result
        self._total = total
        self._every = every
        self._same_clock = same_clock
        self._out = out or sys.stdout
        self._terminal = self._out.isatty()
        self._shown = 0.0
        self._drawn = False

    def settled(self, p: PingProbe) -> None:
        """One more."""
        if self._every or (self._terminal and p.outcome is not Outcome.ANSWERED):
            self.clear()
            print(probe_line(p, self._same_clock), file=self._out, flush=True)
        elif self._terminal and time.monotonic() - self._shown >= PROGRESS_S:
            self._shown, self._drawn = time.monotonic(), True
            r = self._result
            of = f" of {self._total}" if self._total else ""
            last = f"  last {us(p.network_ns)} us" if p.outcome is Outcome.ANSWERED else ""
            print(f"\r{r.sent}{of} sent, {r.lost} lost{last}\x1b[K", end="", file=self._out, flush=True)

    def clear(self) -> None:
        """Take the counting line away."""
        if self._drawn:
            print("\r\x1b[K", end="", file=self._out, flush=True)
            self._drawn = False


def _row(name: str, q: Quantiles) -> str:
    return f"{name:<16}" + "".join(f"{us(v):>10}" for v in (q.min, q.median, q.p99, q.p999, q.max))


def summary(r: PingResult) -> str:
    """perftest's table, for the three durations."""
    lines = [f"{r.sent} probes, {r.answered} answered, {_losses(r)}"]
    counts = (
        (r.no_rtt, "without the second ACK"),
        (r.late, "answered after they were given up"),
        (r.stale, "answered by a later start of the target"),
        (r.invalid, "invalid by their clocks"),
        (r.send_errors, f"did not leave ({r.last_error})"),
        (r.in_flight, "in flight when interrupted, not counted"),
    )
    lines += [f"{n} {text}" for n, text in counts if n]
    rows = [
        (name, q)
        for name, values in (
            ("network RTT", r.network),
            ("prober delay", r.prober),
            ("responder delay", r.responder),
        )
        if (q := Quantiles.of(values)) is not None
    ]
    if rows:
        lines.append(f"{'us':<16}" + "".join(f"{h:>10}" for h in ("min", "median", "p99", "p99.9", "max")))
        polled = {"prober delay": r.prober_polled, "responder delay": r.responder_polled}
        lines += [_row(name + " *" * polled.get(name, False), q) for name, q in rows]
        if any(polled.values()):
            lines.append(POLLED)
    return "\n".join(lines)


def _losses(r: PingResult) -> str:
    if r.loss is None:
        return "0 lost"
    text = f"{r.lost} lost ({r.loss:.2%})"
    if r.lost_there or r.lost_back:
        rest = r.lost - r.lost_there - r.lost_back
        parts = [(r.lost_there, "on the way there"), (r.lost_back, "on the way back"), (rest, "somewhere")]
        text += ": " + ", ".join(f"{n} {where}" for n, where in parts if n)
    return text


def summary_json(r: PingResult) -> dict[str, Any]:
    """The same as data: durations in microseconds, loss 0..1."""

    def quantiles(values: Any) -> dict[str, float] | None:
        q = Quantiles.of(values)
        if q is None:
            return None
        named = {"min": q.min, "median": q.median, "p99": q.p99, "p99_9": q.p999, "max": q.max, "mean": q.mean}
        return {k: round(v / 1000, 3) for k, v in named.items()}

    return {
        "sent": r.sent,
        "answered": r.answered,
        "lost": r.lost,
        "lost_there": r.lost_there,
        "lost_back": r.lost_back,
        "loss": r.loss,
        "late": r.late,
        "no_rtt": r.no_rtt,
        "stale_target": r.stale,
        "invalid": r.invalid,
        "send_errors": r.send_errors,
        "in_flight": r.in_flight,
        "network_rtt_us": quantiles(r.network),
        "prober_delay_us": quantiles(r.prober),
        "responder_delay_us": quantiles(r.responder),
        "prober_delay_polled": r.prober_polled,
        "responder_delay_polled": r.responder_polled,
        "cpu_us_per_probe": round(r.cpu_ns / 1000 / r.sent, 3) if r.sent else None,
        "elapsed_s": round(r.elapsed_ns / 1e9, 6),
    }


def probe_json(p: PingProbe) -> dict[str, Any]:
    """One probe, times in ns; null what is not known."""
    return {
        "seq": p.seq,
        "outcome": p.outcome.value,
        "late": p.late,
        "t1": p.t1 or None,
        "t2": p.t2 or None,
        "t5": p.t5 or None,
        "t6": p.t6 or None,
        "t4_t3": None if p.responder_ns == -1 else p.responder_ns,
        "arrived_dscp": None if p.dscp < 0 else p.dscp,
        "ack_sport": p.sport or None,
        "ack_ttl": None if p.ttl < 0 else p.ttl,
    }
