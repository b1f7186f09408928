"""A simulated fabric in time: probes cross it, faults and noise take their share, both ends count.

Loss is drawn per row (flow and direction), never per probe: binomial by the row's survival over all its elements, in
bad spells (Gilbert-Elliott) with their own rate. Everything is O(rows x hops) numpy a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from pingmesh.analyzer.table import Bools, Floats, Ints
from pingmesh.simulate.fabric import Distances, Fabric, NoPathError, Small, distances, draw_paths
from pingmesh.simulate.faults import Placed
from pingmesh.simulate.probes import CLASSES, INTER_TOR, Flows
from pingmesh.simulate.troubles import Troubles

THERE, BACK = 0, 1
ACKS = 2
"""ACKs that answer one probe; they leave together, and one of them suffices to show that the probe arrived."""
STALL_LOSS = (0.3, 0.5)
"""Of what meets a stalled agent: the share that its queue overflows with, and that it answers or reads too late."""
BASE_RTT_NS, HOP_RTT_NS, JITTER_NS = 4_000.0, 600.0, 800.0
TRACE_S = 6.0
"""Mean time until a tuple that moved is traced again."""
UNSTABLE_S = 60.0
"""For so long after a tuple was seen to move, its path is not taken for known (pingmesh/analyzer/flows.py)."""


@dataclass(frozen=True, slots=True, eq=False)
class Counts:
    """What both ends counted of some flows over [start, end) seconds; columns are (flows,).

    `answered`: probes of which at least one ACK came. `both` False: the responder's counts are missing.
    `valid` False: an end was set aside.
    """

    start_s: float
    end_s: float
    flows: Ints
    sent: Ints
    received: Ints
    acks_sent: Ints
    acks_back: Ints
    answered: Ints
    rtt_sum_ns: Ints
    both: Bools
    valid: Bools
    prober_aside: Bools
    target_aside: Bools
    dark: Bools
    known_there: Bools
    known_back: Bools
    as_class: Ints | None = None
    """The class that the flows were probed in, where it was not their own."""


@dataclass(eq=False)
class World:
    """Fabric, lists, faults and noise; `step` moves through time. Time only grows.

    `flows.there` and `flows.back` stay what they were when drawn; `now` are the true paths now and `told` those that
    tracing has found, [there, back], (flows, hops).
    """

    fabric: Fabric
    flows: Flows
    faults: Sequence[Placed]
    troubles: Troubles
    rng: np.random.Generator
    spray: bool = False
    """Every packet takes a path of its own."""
    now: list[Small] = field(init=False)
    told: list[Small] = field(init=False)
    moved_seen: list[Floats] = field(init=False)
    """[there, back]: when tracing last saw the tuple move; -inf: never, (flows,)."""
    _due: list[Floats] = field(init=False)
    _crossing: dict[tuple[int, int], Bools] = field(default_factory=dict)
    _dead: Bools = field(init=False)
    _sent_phase: Floats = field(init=False)
    _hash: Floats = field(init=False)

    def __post_init__(self) -> None:
        n = len(self.flows)
        self.now = [self.flows.there.copy(), self.flows.back.copy()]
        self.told = [self.flows.there, self.flows.back]
        self.moved_seen = [np.full(n, -np.inf), np.full(n, -np.inf)]
        self._due = [np.full(n, np.inf), np.full(n, np.inf)]
        self._dead = np.zeros(self.fabric.links, bool)
        self._sent_phase = self.rng.random(n)
        self._hash = np.stack([_hashed(self.flows, role) for role in (THERE, BACK)])

    # ------------------------------------------------------------ time

    def step(self, start_s: float, end_s: float) -> Counts:
        """What the lists' probes of [start, end) brought."""
        rows = np.arange(len(self.flows))
        due = self.flows.rate * np.array([[start_s], [end_s]]) + self._sent_phase
        sent = np.diff(np.floor(due), axis=0)[0].astype(np.int64)
        return self.probe(rows, sent, start_s, end_s)

    def probe(self, rows: Ints, sent: Ints, start_s: float, end_s: float, cls: Ints | None = None) -> Counts:
        """What `sent` probes of some flows (in another class than their own, if `cls` is given) bring."""
        self._route(start_s)
        self._trace(start_s)
        f, rng = self.flows, self.rng
        as_class, cls = cls, f.cls[rows] if cls is None else cls
        hosts = len(self.fabric.topology.hosts)
        src_host, dst_host = self.fabric.host_of[f.src[rows]], self.fabric.host_of[f.dst[rows]]
        stalled = self._stalled(start_s, end_s, hosts)
        gone = self.troubles.restarts.overlap(start_s, end_s, hosts)
        for p in self.faults:
            if not p.how.sends and (share := p.active(start_s, end_s)):
                sent = np.where(np.isin(f.src[rows], p.rnics), rng.binomial(sent, 1 - share), sent)
        sent = rng.binomial(sent, 1 - gone[src_host]) if gone.any() else sent
        lost_there = self._lost(rows, THERE, sent, 1, start_s, end_s, cls)[0]
        if stalled.any() or gone.any():
            at_target = STALL_LOSS[0] * stalled[dst_host] + gone[dst_host]
            lost_there = np.minimum(sent, lost_there + rng.binomial(sent - lost_there, np.minimum(at_target, 1.0)))
        received = sent - lost_there
        lost_acks, unanswered = self._lost(rows, BACK, received, ACKS, start_s, end_s, cls)
        if stalled.any():
            late = np.maximum(stalled[src_host], stalled[dst_host]) * STALL_LOSS[1]
            more = rng.binomial(received - unanswered, late)
            lost_acks = np.minimum(ACKS * received, lost_acks + ACKS * more)
            unanswered = unanswered + more
        answered = received - unanswered
        aside = self._aside(start_s, end_s, hosts)
        dark = np.zeros(len(self.fabric.rnics), bool)
        for p in self.faults:
            if p.how.is_dark and p.active(start_s - 2.0, end_s):
                dark[p.rnics] = True
        missing = rng.random(hosts) < self.troubles.missing_report
        unknown = dark[f.src[rows]] | dark[f.dst[rows]]
        return Counts(
            start_s=start_s,
            end_s=end_s,
            flows=rows,
            sent=sent,
            received=received,
            acks_sent=ACKS * received,
            acks_back=ACKS * received - lost_acks,
            answered=answered,
            rtt_sum_ns=self._rtt_sums(rows, answered, start_s, end_s),
            both=~(missing | (gone > 0) | self._silent(start_s, end_s, hosts))[dst_host],
            valid=~(aside[src_host] | aside[dst_host] | unknown),
            prober_aside=aside[src_host],
            target_aside=aside[dst_host],
            dark=unknown,
            known_there=self._known(THERE, rows, start_s),
            known_back=self._known(BACK, rows, start_s),
            as_class=as_class,
        )

    def retrace(self, rows: Ints, at_s: float) -> None:
        """Have some flows traced now, both ways."""
        for role in (THERE, BACK):
            due = self._due[role]
            waiting = rows[np.isfinite(due[rows])]
            due[waiting] = np.minimum(due[waiting], at_s)

    # ------------------------------------------------------------ loss

    def _lost(
        self, rows: Ints, role: int, packets: Ints, copies: int, start_s: float, end_s: float, cls: Ints
    ) -> tuple[Ints, Ints]:
        """Packets lost of `packets` x `copies`, and packets of which all copies were, (rows,)."""
        rng = self.rng
        if self.spray:
            return self._lost_sprayed(rows, role, packets, copies, start_s, end_s, cls)
        paths = self.now[role][rows]
        log_survival = self._sum(paths, np.log1p(-self.troubles.hop_loss))
        bad_share = np.zeros(len(rows))
        bad_loss = 0.0
        elements = len(self.fabric.element_names)
        bursts = self.troubles.bursts.overlap(start_s, end_s, elements)
        if bursts.any():
            bad_share += self._sum(paths, bursts)
            bad_loss = self.troubles.burst_loss
        for number, p in enumerate(self.faults):
            share = p.active(start_s, end_s)
            if share == 0.0 or p.how.rate == 0.0:
                continue
            hit = self._hit(number, p, rows, role, cls)
            if p.how.burst_s is not None:
                spells = self._bad_spells(p.how.rate, p.how.burst_s, end_s - start_s)
                bad_share += hit * share * spells
                bad_loss = max(bad_loss, BAD_LOSS)
            else:
                log_survival += np.where(hit, np.log1p(-min(share * p.how.rate, 1 - 1e-12)), 0.0)
        q = -np.expm1(log_survival)
        if not bad_loss:
            return _copies(rng, packets, q, copies)
        in_bad = np.zeros(len(rows), np.int64)
        some = np.flatnonzero(bad_share > 0)
        in_bad[some] = rng.binomial(packets[some], np.minimum(bad_share[some], 1.0))
        lost, whole = _copies(rng, packets - in_bad, q, copies)
        more = _copies(rng, in_bad[some], 1 - (1 - q[some]) * (1 - bad_loss), copies)
        lost[some] += more[0]
        whole[some] += more[1]
        return lost, whole

    def _lost_sprayed(
        self, rows: Ints, role: int, packets: Ints, copies: int, start_s: float, end_s: float, cls: Ints
    ) -> tuple[Ints, Ints]:
        """`_lost` where every packet is on a path of its own. O(packets x hops x ports)."""
        each = np.repeat(np.arange(len(rows)), packets * copies)
        planned = self.now[role][rows[each]]
        last = planned[np.arange(len(each)), (planned >= 0).sum(axis=1) - 1]
        legs = (np.stack((planned[:, 0], last)).astype(np.int64) - self.fabric.links) // 2
        paths = draw_paths(self.fabric, legs[0], legs[1], self.rng)
        log_survival = self._sum(paths, np.log1p(-self.troubles.hop_loss))
        for p in self.faults:
            share = p.active(start_s, end_s)
            if share and p.how.rate:
                flag = np.zeros(len(self.fabric.element_names) + 1, bool)
                flag[p.elements] = True
                hit = flag[paths].any(axis=1) & np.array([c in p.how.classes for c in CLASSES])[cls[each]]
                log_survival += np.where(hit, np.log1p(-min(share * p.how.rate, 1 - 1e-12)), 0.0)
        lost = self.rng.random(len(each)) < -np.expm1(log_survival)
        number = np.cumsum(packets * copies)[each] - np.arange(len(each)) - 1
        first = np.cumsum(packets) - packets
        packet = first[each] + number // copies
        whole = np.bincount(packet, weights=lost, minlength=int(packets.sum())) == copies
        total = np.bincount(each, weights=lost, minlength=len(rows)).astype(np.int64)
        owner = np.repeat(np.arange(len(rows)), packets)
        return total, np.bincount(owner, weights=whole, minlength=len(rows)).astype(np.int64)

    def _sum(self, paths: Small, values: Floats) -> Floats:
        """Sum of a value over each path's elements; `values` is (elements,)."""
        padded = np.append(values, 0.0)
        out = padded[paths[:, 0]]
        for hop in range(1, paths.shape[1]):
            out = out + padded[paths[:, hop]]
        return out

    def _hit(self, number: int, p: Placed, rows: Ints, role: int, cls: Ints) -> Bools:
        """Which rows a fault concerns: those that cross it, in its classes, of its share of the tuples."""
        if (number, role) not in self._crossing:
            flag = np.zeros(len(self.fabric.element_names) + 1, bool)
            flag[p.elements] = True
            crossing: Bools = np.any(flag[self.now[role]], axis=1)
            if p.how.far_only:
                crossing = crossing & (self.flows.kind == INTER_TOR)
            if p.how.share < 1:
                crossing = crossing & ((self._hash[role] + 0.618034 * number) % 1.0 < p.how.share)
            self._crossing[number, role] = crossing
        of_class = np.array([c in p.how.classes for c in CLASSES])
        out: Bools = self._crossing[number, role][rows] & of_class[cls]
        return out

    def _bad_spells(self, rate: float, mean_s: float, seconds: float) -> float:
        """The share of a span that is spent in bad spells, which lose `BAD_LOSS` and make `rate` in the long run."""
        share = min(rate / BAD_LOSS, 1.0)
        spells = self.rng.poisson(share * seconds / mean_s)
        return float(min(self.rng.exponential(mean_s, spells).sum() / seconds, 1.0))

    def _rtt_sums(self, rows: Ints, answered: Ints, start_s: float, end_s: float) -> Ints:
        hops = (self.now[THERE][rows] >= 0).sum(axis=1) + (self.now[BACK][rows] >= 0).sum(axis=1)
        total = answered * (BASE_RTT_NS + HOP_RTT_NS * hops) + self.rng.standard_gamma(answered) * JITTER_NS
        for number, p in enumerate(self.faults):
            share = p.active(start_s, end_s)
            if share and p.how.delay_us:
                for role in (THERE, BACK):
                    hit = self._hit(number, p, rows, role, self.flows.cls[rows])
                    slowed = self.rng.binomial(np.where(hit, answered, 0), share)
                    total = total + self.rng.standard_gamma(slowed) * p.how.delay_us * 1e3
        out: Ints = total.astype(np.int64)
        return out

    # ------------------------------------------------------------ hosts

    def _stalled(self, start_s: float, end_s: float, hosts: int) -> Floats:
        out = self.troubles.stalled(start_s, end_s, hosts)
        for p in self.faults:
            if p.how.stall_ms and (share := p.active(start_s, end_s)):
                out[self.fabric.host_of[p.rnics]] = np.maximum(out[self.fabric.host_of[p.rnics]], 0.5 * share)
        return out

    def _silent(self, start_s: float, end_s: float, hosts: int) -> Bools:
        out = np.zeros(hosts, bool)
        for p in self.faults:
            if p.how.is_silent and p.active(start_s, end_s):
                out[self.fabric.host_of[p.rnics]] = True
        return out

    def _aside(self, start_s: float, end_s: float, hosts: int) -> Bools:
        """Hosts set aside: noise, and faults of hosts, which their own facts tell."""
        out = self.troubles.set_aside(start_s, end_s, hosts)
        for p in self.faults:
            if (p.how.is_silent or p.how.stall_ms) and p.active(start_s - 1.0, end_s + 1.0):
                out[self.fabric.host_of[p.rnics]] = True
        return out

    # ------------------------------------------------------------ routes

    def _route(self, at_s: float) -> None:
        """Take links in and out of routing that are due, and move the tuples concerned."""
        dead = np.zeros(self.fabric.links, bool)
        for p in self.faults:
            if p.how.reroute_s is not None and p.fault.start_s + p.how.reroute_s <= at_s < p.fault.end_s:
                dead[p.elements[p.elements < self.fabric.links]] = True
        spans = self.troubles.reroutes
        for i in np.flatnonzero((spans.start <= at_s) & (at_s < spans.end)):
            cable = int(spans.start[i] * 1e6) % max(self.fabric.links // 2, 1)
            dead[[2 * cable, 2 * cable + 1]] = True
        if np.array_equal(dead, self._dead):
            return
        self._dead = dead
        ways = distances(self.fabric, dead) if dead.any() else self.fabric.intact
        for role, planned in ((THERE, self.flows.there), (BACK, self.flows.back)):
            self._move(role, planned, ways, at_s)
        self._crossing.clear()

    def _move(self, role: int, planned: Small, ways: Distances, at_s: float) -> None:
        """Tuples whose own path is dead hash anew over what is left; those whose path is back return to it."""
        flag = np.append(ways.dead, np.zeros(len(self.fabric.element_names) - self.fabric.links + 1, bool))
        blocked = flag[planned].any(axis=1)
        new = planned.copy()
        rows = np.flatnonzero(blocked)
        if len(rows):
            first = (planned[rows, 0] - self.fabric.links) // 2
            last = planned[rows, (planned[rows] >= 0).sum(axis=1) - 1]
            try:
                paths = draw_paths(self.fabric, first, (last - self.fabric.links) // 2, self.rng, ways)
            except NoPathError:
                return  # nothing is left to reroute to: packets stay on the dead link
            if paths.shape[1] > new.shape[1]:
                return
            new[rows] = -1
            new[rows, : paths.shape[1]] = paths
        changed = (new != self.now[role]).any(axis=1)
        self._due[role][changed] = at_s + self.rng.exponential(TRACE_S, int(changed.sum()))
        self.now[role] = new

    def _trace(self, at_s: float) -> None:
        for role in (THERE, BACK):
            due = np.flatnonzero(self._due[role] <= at_s)
            if len(due):
                if self.told[role] is self.flows.there or self.told[role] is self.flows.back:
                    self.told[role] = self.told[role].copy()
                self.told[role][due] = self.now[role][due]
                self.moved_seen[role][due] = at_s
                self._due[role][due] = np.inf

    def _known(self, role: int, rows: Ints, at_s: float) -> Bools:
        if self.spray:
            return np.zeros(len(rows), bool)
        known: Bools = self.moved_seen[role][rows] < at_s - UNSTABLE_S
        return known


def _hashed(flows: Flows, role: int) -> Floats:
    """A number in [0, 1) that all classes of a tuple share, as a rule that matches addresses and ports would."""
    mixed = np.zeros(len(flows), np.uint64)
    for part in (flows.src, flows.dst, flows.sport, np.full(len(flows), role)):
        mixed = (mixed ^ part.astype(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
        mixed ^= mixed >> np.uint64(29)
    return mixed / 2.0**64


BAD_LOSS = 0.5
"""Share of packets lost in the bad spells of a fault whose losses come in bursts."""


def _copies(rng: np.random.Generator, packets: Ints, q: Floats, copies: int) -> tuple[Ints, Ints]:
    """Copies lost and packets of which every copy was, each lost with probability `q` on its own."""
    if copies == 1:
        lost = rng.binomial(packets, q).astype(np.int64)
        return lost, lost.copy()
    assert copies == ACKS
    both = rng.binomial(packets, q * q).astype(np.int64)
    one = rng.binomial(packets - both, np.minimum(2 * q / (1 + q), 1.0)).astype(np.int64)
    return 2 * both + one, both
