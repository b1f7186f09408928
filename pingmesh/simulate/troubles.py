"""What goes wrong in a healthy fabric: background loss, bursts, starved hosts, restarts, lost reports, reroutes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from pingmesh.analyzer.table import Bools, Floats, Ints
from pingmesh.simulate.fabric import Fabric

STALL_KNOWN_MS = 250.0
"""Agents' stalls from here on set their probes aside (pingmesh/analyzer/waits.py)."""
REPORT_S = 6.0
"""A stall that a report tells of may have been at any time since the report before it."""
RESTART_S = (1.0, 3.0)
SETTLE_S = 3.0
LOOK_BACK_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """How noisy a healthy fabric is. Rates are events/s, each of its own kind of thing."""

    hop_loss: float = 1e-4
    """Every directed element loses U(0, this) of its packets."""
    burst_rate: float = 1 / 600
    """Bursts of each element: `burst_s` long, losing `burst_loss`."""
    burst_s: float = 0.005
    burst_loss: float = 0.5
    stall_rate: float = 1 / 300
    """Stalls of each host's agent, of exponential length with this mean; short ones lose nothing."""
    stall_s: float = 0.3
    restart_rate: float = 1 / 1800
    """Restarts of each host's agent; one in four is a crash, the others say goodbye first."""
    missing_report: float = 0.002
    """Share of (host, window) whose responder's counts never arrive."""
    reroute_rate: float = 0.0
    """Cables that leave routing without losing anything (maintenance), in the whole fabric; each for 30 s."""


QUIET = Noise(hop_loss=0.0, burst_rate=0.0, stall_rate=0.0, restart_rate=0.0, missing_report=0.0)


@dataclass(frozen=True, slots=True, eq=False)
class Spans:
    """Events as columns: what (element, host or cable), from, to (s)."""

    what: Ints
    start: Floats
    end: Floats

    def overlap(self, start_s: float, end_s: float, size: int) -> Floats:
        """The share of [start, end) that the events of each thing fill, (size,)."""
        part = np.minimum(self.end, end_s) - np.maximum(self.start, start_s)
        some = part > 0
        filled = np.bincount(self.what[some], weights=part[some] / (end_s - start_s), minlength=size)
        return np.minimum(filled.astype(np.float64), 1.0)

    def longest(self, start_s: float, end_s: float, size: int) -> Floats:
        """Seconds of the longest event of each thing that ends in [start, end), (size,)."""
        out = np.zeros(size)
        ended = (self.end >= start_s) & (self.end < end_s)
        np.maximum.at(out, self.what[ended], (self.end - self.start)[ended])
        return out


NO_SPANS = Spans(np.empty(0, np.int64), np.empty(0), np.empty(0))


def draw_spans(
    rng: np.random.Generator, things: int, rate: float, length_s: Floats | float, seconds: float, *, exponential: bool
) -> Spans:
    """Poisson events of `things` over `seconds`; lengths are exponential with the mean, or U of the two given."""
    n = int(rng.poisson(things * rate * seconds)) if rate > 0 else 0
    start = rng.random(n) * seconds
    if exponential:
        length = rng.exponential(float(np.mean(length_s)), n)
    else:
        low, high = np.broadcast_to(length_s, (2,))
        length = rng.uniform(low, high, n)
    return Spans(rng.integers(0, max(things, 1), n), start, start + length)


@dataclass(frozen=True, slots=True, eq=False)
class Troubles:
    """All that noise does over one simulated span of time."""

    hop_loss: Floats
    """(elements,)"""
    bursts: Spans
    burst_loss: float
    stalls: Spans
    """What meets them is lost up to `STALL_KNOWN_MS` before their end: what comes later is answered in time."""
    restarts: Spans
    reroutes: Spans
    missing_report: float

    @property
    def crashes(self) -> Bools:
        """Which restarts come without a goodbye."""
        crashes: Bools = (self.restarts.start * 1e6).astype(np.int64) % 4 == 0
        return crashes

    def stalled(self, start_s: float, end_s: float, hosts: int) -> Floats:
        """The share of [start, end) in which what meets each host's agent may be lost, (hosts,)."""
        late = replace(self.stalls, end=self.stalls.end - STALL_KNOWN_MS / 1e3)
        return late.overlap(start_s, end_s, hosts)

    def set_aside(self, start_s: float, end_s: float, hosts: int) -> Bools:
        """Hosts whose packets of [start, end) are no evidence, by the analyzer's host rules, (hosts,)."""
        known = 1e3 * (self.stalls.end - self.stalls.start) >= STALL_KNOWN_MS
        spans = (
            (self.stalls.what[known], self.stalls.start[known] - REPORT_S, self.stalls.end[known] + 0.5),
            (self.restarts.what, self.restarts.start - LOOK_BACK_S, self.restarts.end + SETTLE_S),
        )
        out = np.zeros(hosts, bool)
        for what, a, b in spans:
            out[what[(a < end_s) & (b > start_s)]] = True
        return out


def expected_events(fabric: Fabric, noise: Noise, seconds: float) -> float:
    """How many events `draw_troubles` will draw, on average."""
    of_elements = len(fabric.element_names) * noise.burst_rate
    of_hosts = len(fabric.topology.hosts) * (noise.stall_rate + noise.restart_rate)
    return seconds * (of_elements + of_hosts + noise.reroute_rate)


def draw_troubles(fabric: Fabric, noise: Noise, seconds: float, rng: np.random.Generator) -> Troubles:
    """Draw all noise of a span of time. O(elements + events)."""
    elements, hosts = len(fabric.element_names), len(fabric.topology.hosts)
    return Troubles(
        hop_loss=rng.random(elements) * noise.hop_loss,
        bursts=draw_spans(rng, elements, noise.burst_rate, noise.burst_s, seconds, exponential=True),
        burst_loss=noise.burst_loss,
        stalls=draw_spans(rng, hosts, noise.stall_rate, noise.stall_s, seconds, exponential=True),
        restarts=draw_spans(rng, hosts, noise.restart_rate, np.array(RESTART_S), seconds, exponential=False),
        reroutes=draw_spans(rng, 1, noise.reroute_rate, np.array([30.0, 30.0]), seconds, exponential=False),
        missing_report=noise.missing_report,
    )
