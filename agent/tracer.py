"""Which way the probes go: TTL-limited packets of the very 5-tuple, and who answers that they expired.

The prober traces its probes' tuples, the responder those of its ACKs, both out of one budget per RNIC that the
controller shares out. Packets differ in length by TTL, and routers quote the UDP header: an answer names its flow
and its TTL, so that answers cannot be mixed up whatever their order (cf. Liu et al. 2024, §4.3, path tracing).
"""

from __future__ import annotations

import logging
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from agent.icmp import Quoted
from agent.trace_queue import MAX_TTL, Bucket, FlowKey, TraceFlow, Tuple5, Urgency
from pingmesh.messages import TracedPath

log = logging.getLogger(__name__)

HOP_TIMEOUT_S = 0.3
SUSPICION_S = 10.0
OUTSTANDING = 64
ROCE_PORT = 4791
OVERHEAD = 8 + 12 + 8 + 4
"""UDP, BTH and DETH headers and ICRC: what the UDP length counts beside the payload."""


class LimitedSender(Protocol):
    """What the tracer needs of a transport."""

    device: str
    interface: str
    address: str

    def send_limited(self, address: str, sport: int, dscp: int, ttl: int, payload: bytes, qpn: int = 0) -> None:
        """Send a packet of a probe's form that no responder will answer. Raises OSError, ValueError."""


@dataclass(slots=True)
class _Shot:
    """A packet on its way."""

    tuple5: Tuple5
    ttl: int
    attempt: int
    due: float
    sent_ns: int


class DeviceTracer:
    """Traces the tuples of one RNIC, both roles.

    `on_path` takes each finished path, and whether it is news: new, changed, or asked for.

    Does no waiting of its own: whoever owns it calls `step` when it asked to be called, and `answer`.
    """

    def __init__(
        self,
        sender: LimitedSender,
        on_path: Callable[[TracedPath, bool], None],
        now_ns: Callable[[], int],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.sender = sender
        self.family = socket.AF_INET6 if ":" in sender.address else socket.AF_INET
        self._on_path = on_path
        self._now_ns = now_ns
        self._monotonic = monotonic
        self.bucket = Bucket(filled_at=monotonic())
        self._tuples: dict[tuple[str, int], Tuple5] = {}
        self._by_flow: dict[FlowKey, Tuple5] = {}
        self._listed: dict[FlowKey, int] = {}
        self._queue: deque[tuple[Tuple5, int, int]] = deque()
        self._shots: dict[tuple[str, int, int], _Shot] = {}
        self.sent = self.answered = self.unmatched = self.send_errors = 0

    def set_flows(self, flows: Iterable[TraceFlow]) -> None:
        """The flows there are now; what is known of tuples that stay is kept."""
        known = set(self._by_flow)
        for t5 in self._tuples.values():
            t5.flows = {}
        self._by_flow = {}
        self._listed = {}
        for f in flows:
            mask = f.mask & ((1 << MAX_TTL) - 1)
            if not mask:
                continue
            t5 = self._tuples.setdefault((f.remote, f.sport), Tuple5(f.remote, f.sport, f.dscp, f.qpn))
            if f.key not in known:
                t5.traced_at = None  # nobody has heard of this flow's path yet
            t5.qpn = f.qpn
            t5.flows[f.key] = mask
            if f.listed:
                self._listed[f.key] = f.listed
            self._by_flow[f.key] = t5
        self._tuples = {k: t for k, t in self._tuples.items() if t.flows or t.busy}

    def ask(self, keys: Iterable[FlowKey]) -> int:
        """Trace these first, at the budget of suspicion. Returns how many of them are known."""
        found = [t5 for key in keys if (t5 := self._by_flow.get(key)) is not None]
        for asked in found:
            asked.asked = True
        if found:
            now = self._monotonic()
            self.bucket.delay(now)  # what was gathered so far was gathered at the old rate
            self.bucket.suspicious_until = now + SUSPICION_S
        return len(found)

    def lost(self, key: FlowKey) -> bool:
        """This flow just lost a packet; True if that makes work."""
        hit = self._by_flow.get(key)
        if hit is None or hit.lossy:
            return False
        hit.lossy = True
        return True

    def step(self) -> float:
        """Do what is due: give up on missing answers, send what the budget allows. Returns seconds until the next."""
        now = self._monotonic()
        for at, shot in [(k, s) for k, s in self._shots.items() if s.due <= now]:
            del self._shots[at]
            self._missed(shot)
        while len(self._shots) < OUTSTANDING:
            # The budget first: what is most urgent is decided when a packet may leave, not before.
            delay = self.bucket.delay(now)
            if delay > 0:
                return min(delay, self._next_timeout(now))
            if not self._queue and not self._begin(now):
                break
            self.bucket.tokens -= 1.0
            self._shoot(*self._queue.popleft(), now)
        return self._next_timeout(now)

    def _next_timeout(self, now: float) -> float:
        return max(0.01, min((s.due for s in self._shots.values()), default=now + 1.0) - now)

    def _begin(self, now: float) -> bool:
        """Take up the most urgent tuple."""
        ranked = [(rank, i, t) for i, t in enumerate(self._tuples.values()) if t.flows and (rank := t.rank(now))]
        if not ranked:
            return False
        (urgency, _), _, t5 = min(ranked)
        t5.urgent = urgency is not Urgency.OLDEST
        t5.last_hops = t5.hops
        t5.busy, t5.asked, t5.lossy = True, False, False
        t5.hops, t5.answered_ns = {}, 0
        ttls = [t + 1 for t in range(MAX_TTL) if t5.mask >> t & 1]
        t5.waiting = len(ttls)
        self._queue.extend((t5, ttl, 0) for ttl in ttls)
        return True

    def _shoot(self, t5: Tuple5, ttl: int, attempt: int, now: float) -> None:
        shot = _Shot(t5, ttl, attempt, now + HOP_TIMEOUT_S, self._now_ns())
        try:
            self.sender.send_limited(t5.remote, t5.sport, t5.dscp, ttl, payload(ttl), t5.qpn)
        except (OSError, ValueError) as error:
            self.send_errors += 1
            log.debug("trace packet not sent: %s", error)
            self._settle(shot, None)
            return
        self.sent += 1
        self._shots[t5.remote, t5.sport, ttl] = shot

    def _missed(self, shot: _Shot) -> None:
        if shot.attempt == 0:
            self._queue.appendleft((shot.tuple5, shot.ttl, 1))
        else:
            self._settle(shot, None)

    def answer(self, quoted: Quoted) -> bool:
        """Take in an answer; False if it is none to a packet of ours that is on its way."""
        ttl = ttl_of(quoted.length - OVERHEAD)
        ours = quoted.source == self.sender.address and quoted.dport == ROCE_PORT
        shot = self._shots.pop((quoted.target, quoted.sport, ttl), None) if ours else None
        if shot is None:
            self.unmatched += 1
            return False
        self.answered += 1
        shot.tuple5.answered_ns = max(shot.tuple5.answered_ns, shot.sent_ns)
        self._settle(shot, quoted.router)
        return True

    def _settle(self, shot: _Shot, router: str | None) -> None:
        t5 = shot.tuple5
        t5.hops[shot.ttl] = router
        t5.waiting -= 1
        if t5.waiting:
            return
        t5.busy = False
        t5.traced_at = self._monotonic()
        at_ns = t5.answered_ns or self._now_ns()
        news = t5.urgent or t5.hops != t5.last_hops
        for key, mask in t5.flows.items():
            role, rnic, version, index = key
            hops = [(ttl, who) for ttl, who in sorted(t5.hops.items()) if mask >> (ttl - 1) & 1]
            if hops:
                sport = self._listed.get(key, t5.sport)
                self._on_path(TracedPath(role, rnic, version, index, sport, hops, at_ns), news)


def payload(ttl: int) -> bytes:
    """A payload whose length tells the TTL."""
    return bytes(4 * ttl)


def ttl_of(length: int) -> int:
    """The TTL that a payload's length tells; 0 if none."""
    return length // 4 if length % 4 == 0 and 0 < length <= 4 * MAX_TTL else 0
