"""What there is to trace from one RNIC, in which order, and how fast."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

ROUND_S = 10.0
"""A quiet flow is traced at most this often."""
LOSS_ROUND_S = 3.0
"""A lossy flow likewise, and one whose routers have not answered."""
MAX_TTL = 8

FlowKey = tuple[int, int, int, int]
"""Role, the prober's RNIC number, list version, index."""


@dataclass(frozen=True, slots=True)
class TraceFlow:
    """A flow to trace, by the tuple its packets have when they leave from `device`."""

    key: FlowKey
    device: str
    remote: str
    sport: int
    dscp: int
    qpn: int
    mask: int
    """Bit t-1: trace the hop at TTL t."""
    listed: int = 0
    """The source port that the probe list asks for, where packets leave from another; 0: the same."""


class Urgency(enum.IntEnum):
    """The order in which tuples are traced."""

    ASKED = 0
    LOSSY = 1
    NEVER = 2
    UNTOLD = 3
    """The path is known, but not under the flow's newest name: those who follow the lists know it all the same."""
    OLDEST = 4


@dataclass(slots=True, eq=False)
class Tuple5:
    """One 5-tuple of a device and the flows that use it."""

    remote: str
    sport: int
    dscp: int
    qpn: int
    flows: dict[FlowKey, int] = field(default_factory=dict)
    """Trace mask by flow."""
    traced_at: float | None = None
    asked: bool = False
    lossy: bool = False
    busy: bool = False
    waiting: int = 0
    urgent: bool = False
    """Whether somebody waits for the path now being traced."""
    last_hops: dict[int, str | None] = field(default_factory=dict)
    hops: dict[int, str | None] = field(default_factory=dict)
    answered_ns: int = 0
    """When the last packet of this trace left that was answered."""

    @property
    def mask(self) -> int:
        """All hops that one of the flows wants."""
        mask = 0
        for m in self.flows.values():
            mask |= m
        return mask

    def rank(self, now: float) -> tuple[Urgency, float] | None:
        """Where it stands in the queue, least first; None when there is nothing to do now."""
        if self.busy:
            return None
        at = self.traced_at
        if self.asked:
            return Urgency.ASKED, at or 0.0
        if self.lossy and (at is None or now - at >= LOSS_ROUND_S):
            return Urgency.LOSSY, at or 0.0
        if not any(self.hops.values()) and (at is None or now - at >= LOSS_ROUND_S):
            # Nothing answered yet: nobody knows the path, as if it had never been traced.
            return Urgency.NEVER, at or 0.0
        if at is None:
            return Urgency.UNTOLD, 0.0
        return (Urgency.OLDEST, at) if now - at >= ROUND_S else None


@dataclass(slots=True)
class Bucket:
    """A token bucket, one second deep (at least one packet). Rates in packets/s."""

    quiet: float = 1.0
    suspicion: float = 5.0
    suspicious_until: float = 0.0
    tokens: float = 1.0
    filled_at: float = 0.0

    def rate(self, now: float) -> float:
        """The rate that holds now."""
        return self.suspicion if now < self.suspicious_until else self.quiet

    def delay(self, now: float) -> float:
        """Seconds until a packet may leave."""
        rate = self.rate(now)
        if rate <= 0:
            return 60.0
        self.tokens = min(max(1.0, rate), self.tokens + max(0.0, now - self.filled_at) * rate)
        self.filled_at = now
        return max(0.0, (1.0 - self.tokens) / rate)
