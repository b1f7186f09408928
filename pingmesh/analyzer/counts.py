"""What the two ends counted of one flow and window, and the one-way samples that follow from it.

Forward: probes sent against probes received. Reverse: ACKs sent against ACKs received. Without the responder's
count the direction is unknown and the sample is a round trip; it never means "not received".
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pingmesh.analyzer.flows import ACK, PROBE, Flow
from pingmesh.messages import PROBER_COLUMNS, RESPONDER_COLUMNS, unpack_columns

ROUND_TRIP = 2


@dataclass(frozen=True, slots=True)
class Sample:
    """Packets of one flow in one direction over [start, end) of the analyzer's clock.

    `role` is PROBE, ACK or ROUND_TRIP (direction unknown). `rtt_ns` is the mean network RTT over `rtts` probes.
    `confirmed`: from an active confirmation, not from the list's own probes.
    """

    start: int
    end: int
    flow: Flow
    cls: str
    role: int
    sent: int
    lost: int
    rtt_ns: int = 0
    rtts: int = 0
    confirmed: bool = False


@dataclass(slots=True)
class ProberCounts:
    """One flow and window as the prober counted it."""

    sent: int = 0
    arrived: int = 0
    ack1: int = 0
    ack2: int = 0
    lost: int = 0
    late: int = 0
    excluded: int = 0
    send_error: int = 0
    rtt_sum: int = 0
    rtt_max: int = 0

    def add(self, more: ProberCounts) -> None:
        """Add a later report's increments."""
        self.sent += more.sent
        self.arrived += more.arrived
        self.ack1 += more.ack1
        self.ack2 += more.ack2
        self.lost += more.lost
        self.late += more.late
        self.excluded += more.excluded
        self.send_error += more.send_error
        self.rtt_sum += more.rtt_sum
        self.rtt_max = max(self.rtt_max, more.rtt_max)


@dataclass(slots=True)
class ResponderCounts:
    """One flow and window as the responder counted it."""

    received: int = 0
    ack1: int = 0
    ack2: int = 0
    mismatched: int = 0


def prober_rows(columns: bytes) -> Iterator[tuple[int, ProberCounts]]:
    """(index, counts) of each row. Raises BadMessageError."""
    cols = unpack_columns(PROBER_COLUMNS, columns)
    for row in zip(*cols, strict=True):
        yield row[0], ProberCounts(*row[1:])


def responder_rows(columns: bytes) -> Iterator[tuple[tuple[int, int, int, int], int, ResponderCounts]]:
    """((source RNIC, source epoch, list version, window), index, counts) of each row. Raises BadMessageError."""
    cols = unpack_columns(RESPONDER_COLUMNS, columns)
    for row in zip(*cols, strict=True):
        yield (row[0], row[1], row[2], row[3]), row[4], ResponderCounts(*row[5:])


def one_way(
    flow: Flow, cls: str, p: ProberCounts, r: ResponderCounts | None, start: int, end: int, confirmed: bool
) -> list[Sample]:
    """The samples of one flow and window. `r` None: the responder's count is not known."""
    rtts = p.ack2 if p.rtt_sum else 0
    rtt = p.rtt_sum * 100 // rtts if rtts > 0 else 0
    if r is None or r.received < p.arrived:
        # An ACK proves that its probe arrived: a responder that counted fewer has forgotten some (it restarted, had
        # no room, or its report was lost), and what it says is no count.
        return [Sample(start, end, flow, cls, ROUND_TRIP, p.sent, max(0, p.sent - p.arrived), rtt, rtts, confirmed)]
    acks = p.ack1 + p.ack2
    # Probes that are no evidence were answered too, and the prober leaves those ACKs out of its count.
    acks_sent = max(r.ack1 + r.ack2 - 2 * p.excluded, acks)
    return [
        Sample(start, end, flow, cls, PROBE, p.sent, max(0, p.sent - r.received), rtt, rtts, confirmed),
        Sample(start, end, flow, cls, ACK, acks_sent, acks_sent - acks, 0, 0, confirmed),
    ]
