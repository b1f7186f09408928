"""One probe of `pingmesh ping` with its six timestamps, and what many of them add up to."""

from __future__ import annotations

import enum
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field


class Outcome(enum.StrEnum):
    """How a probe fared. NO_RTT: the first ACK came and the second, with the responder's delay, did not."""

    WAITING = "waiting"
    ANSWERED = "answered"
    NO_RTT = "no_rtt"
    LOST = "lost"
    STALE = "stale_target"
    INVALID = "invalid"
    SEND_ERROR = "send_error"


@dataclass(slots=True)
class PingProbe:
    """One probe. All times in ns; 0 (of `responder_ns`: -1) while not known.

    The six timestamps of Liu et al. 2024, §4.2: `t1` post and `t6` read by us are of the host's clock, `t2` sent and
    `t5` first ACK received are of the clock that stamps this RNIC's packets. `t3` and `t4` are the responder's: only
    their difference is known here, from the second ACK.
    """

    seq: int
    t1: int = 0
    t2: int = 0
    t5: int = 0
    t6: int = 0
    responder_ns: int = -1
    sport: int = 0
    """UDP source port that the first ACK says it left from."""
    dscp: int = -1
    """DSCP that the probe arrived with, as the ACK says; -1: the responder could not see it."""
    ttl: int = -1
    """TTL that the ACK arrived with; -1: not seen."""
    outcome: Outcome = Outcome.WAITING
    late: bool = False
    """Answered after it was given up."""
    polled: bool = False
    """The responder's delay contains the wait for its poll timer."""
    arrived: bool | None = None
    """Of a lost probe: whether later ACKs say that it had arrived."""
    error: str = ""

    def stamped(self, ns: int) -> None:
        """The transport knows when the probe left."""
        self.t2 = ns

    @property
    def network_ns(self) -> int:
        """Round trip without both ends' delays: (t5-t2)-(t4-t3)."""
        return self.t5 - self.t2 - self.responder_ns

    @property
    def prober_ns(self) -> int:
        """This host's share, (t6-t5)+(t2-t1), as a difference on one clock less a difference on the other."""
        return (self.t6 - self.t1) - (self.t5 - self.t2)

    def settle(self, absurd_ns: int) -> None:
        """Both ACKs and the send stamp are here: measured, unless a clock did what clocks must not."""
        sane = 0 <= self.network_ns <= absurd_ns and 0 <= self.responder_ns <= absurd_ns
        self.outcome = Outcome.ANSWERED if sane and -absurd_ns <= self.prober_ns <= absurd_ns else Outcome.INVALID


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Of one duration, in ns; the quantiles are values that were measured, as perftest's are."""

    min: int
    median: int
    p99: int
    p999: int
    max: int
    mean: float

    @classmethod
    def of(cls, values: Sequence[int]) -> Quantiles | None:
        """None of nothing.

        >>> Quantiles.of([30, 10, 20])
        Quantiles(min=10, median=20, p99=30, p999=30, max=30, mean=20.0)
        """
        if not values:
            return None
        ordered = sorted(values)
        last = len(ordered) - 1

        def at(share: float) -> int:
            return ordered[min(last, int(share * len(ordered)))]

        return cls(ordered[0], at(0.5), at(0.99), at(0.999), ordered[last], sum(ordered) / len(ordered))


@dataclass(slots=True)
class PingResult:
    """All probes of one run. Loss counts probes that left and of which no ACK came, on their way or on the way back."""

    network: array[int] = field(default_factory=lambda: array("q"))
    prober: array[int] = field(default_factory=lambda: array("q"))
    responder: array[int] = field(default_factory=lambda: array("q"))
    sent: int = 0
    """Probes that left and are settled; those in flight when the run was interrupted are not counted."""
    answered: int = 0
    """At least one ACK came."""
    no_rtt: int = 0
    lost: int = 0
    lost_there: int = 0
    """Of the lost: known, by the history in later ACKs, not to have arrived."""
    lost_back: int = 0
    """Of the lost: known to have arrived."""
    late: int = 0
    stale: int = 0
    invalid: int = 0
    send_errors: int = 0
    in_flight: int = 0
    prober_polled: bool = False
    responder_polled: bool = False
    """Whether the delays of this end and of the other contain the wait for a poll timer."""
    last_error: str = ""
    cpu_ns: int = 0
    """CPU time of this process, user and system, from the first probe to the last answer."""
    elapsed_ns: int = 0

    @property
    def loss(self) -> float | None:
        """Share of the probes that were lost; None when none left."""
        return self.lost / self.sent if self.sent else None

    def count(self, probe: PingProbe) -> None:
        """A probe is settled (again: a late one was counted as lost before)."""
        if probe.outcome is Outcome.SEND_ERROR:
            self.send_errors += 1
            self.last_error = probe.error
            return
        if probe.late:
            self.late += 1
            self.lost -= 1
        else:
            self.sent += 1
        if probe.outcome is Outcome.LOST:
            self.lost += 1
            return
        self.answered += 1
        self.responder_polled |= probe.polled
        match probe.outcome:
            case Outcome.ANSWERED:
                self.network.append(probe.network_ns)
                self.prober.append(probe.prober_ns)
                self.responder.append(probe.responder_ns)
            case Outcome.NO_RTT:
                self.no_rtt += 1
            case Outcome.STALE:
                self.stale += 1
            case _:
                self.invalid += 1
