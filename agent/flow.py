"""A flow as its prober drives it, and one probe of it in flight."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import NamedTuple

from agent.counts import ProberRow
from agent.transport.base import Target
from pingmesh.messages import UNKNOWN, Flow, Peer


class Phase(enum.Enum):
    """Where a probe stands.

    WAITING -> OVERDUE -> LOST by time; any of them -> ANSWERED by the first ACK; ANSWERED -> DONE by the second, and
    any -> DONE when the probe is found to be no evidence or memory of it ends.
    """

    WAITING = 0
    OVERDUE = 1
    LOST = 2
    ANSWERED = 3
    DONE = 4


class ProbingFlow:
    """One entry of the probe list: its next probe, its schedule and what its ACKs said."""

    __slots__ = (
        "acked_history",
        "acked_seq",
        "baseline_ns",
        "dscp",
        "due_ns",
        "flow",
        "interval_ns",
        "list_version",
        "missing",
        "peer",
        "quiet_until",
        "row",
        "seen_ns",
        "seq",
        "size",
        "slot_ns",
        "target",
        "template",
        "window",
    )

    def __init__(self, flow: Flow, list_version: int, template: bytearray, size: int, dscp: int) -> None:
        self.flow = flow
        self.list_version = list_version
        self.template = template
        self.size = size
        self.dscp = dscp
        self.interval_ns = max(flow.interval_us, 1) * 1000
        self.peer: Peer | None = None
        self.target: Target | None = None
        self.seq = 0
        self.slot_ns = 0
        """Start of the current slot of the schedule; the probe leaves somewhere near it."""
        self.due_ns = 0
        """When the next probe leaves; 0: not scheduled yet."""
        self.row: ProberRow | None = None
        self.window = -1
        """Window of `row`."""
        self.acked_seq = 0
        self.acked_history = 0
        self.missing: list[Outstanding] = []
        """Overdue probes of which nobody knows yet where they were lost."""
        self.baseline_ns = 0.0
        self.quiet_until = 0
        """No SLOW or SEND_ERROR event of this flow before (monotonic)."""
        self.seen_ns = 0

    def heard(self, seq: int, history: int) -> None:
        """Remember the newest ACK's history."""
        if seq >= self.acked_seq:
            self.acked_seq = seq
            self.acked_history = history

    def arrived(self, seq: int) -> bool | None:
        """Whether probe `seq` had arrived when the newest ACK was sent; None: it does not tell."""
        back = self.acked_seq - 1 - seq
        if back < 0:
            return None
        return bool(self.acked_history >> back & 1) if back < 64 else None


class Outstanding:
    """One probe in flight, or lost but still remembered."""

    __slots__ = (
        "acks",
        "confirmation",
        "delay",
        "direction",
        "flow",
        "phase",
        "quiet",
        "row",
        "rx_ns",
        "sent_ns",
        "seq",
        "tx_ns",
    )

    def __init__(
        self, flow: ProbingFlow, seq: int, sent_ns: int, row: ProberRow, confirmation: Confirmation | None
    ) -> None:
        self.flow = flow
        self.seq = seq
        self.sent_ns = sent_ns
        """Monotonic."""
        self.row = row
        self.confirmation = confirmation
        """The confirmation that waits for it."""
        self.quiet = confirmation is not None
        """No events of it."""
        self.tx_ns = 0
        """Stamps of the transport's clock: the probe left, ACK1 came."""
        self.rx_ns = 0
        self.delay = -1
        """The responder's, from ACK2."""
        self.acks = 0
        """Bit 0: ACK1 came, bit 1: ACK2."""
        self.phase = Phase.WAITING
        self.direction = UNKNOWN

    def stamped(self, ns: int) -> None:
        """The transport knows when the probe left."""
        self.tx_ns = ns

    def resolve(self) -> None:
        """Nothing more is waited for: a confirmation may go on without it."""
        confirmation = self.confirmation
        if confirmation is not None:
            self.confirmation = None
            confirmation.open -= 1
            confirmation.check()


class Shot(NamedTuple):
    """How a confirmation probes one flow, perhaps in another class than its own."""

    flow: ProbingFlow
    template: bytearray
    size: int
    dscp: int


class Confirmation:
    """Extra probes on some flows in turn, in a window of their own. `on_done` is called once, when all are resolved."""

    __slots__ = ("due_ns", "finished", "give_up_ns", "on_done", "open", "sent", "shots", "step_ns", "total", "window")

    def __init__(
        self, shots: list[Shot], window: int, count: int, interval_ns: int, now: int, on_done: Callable[[], None]
    ) -> None:
        self.shots = shots
        self.window = window
        self.total = count * len(shots)
        self.step_ns = interval_ns // len(shots)
        self.due_ns = now
        self.sent = 0
        """Turns taken, whether or not the packet left."""
        self.open = 0
        """Probes sent and not yet resolved."""
        self.give_up_ns = now + 2 * count * interval_ns + 1_000_000_000
        """Where the rate cap leaves too little, no more are sent after this."""
        self.on_done = on_done
        self.finished = False

    def check(self) -> None:
        """Call `on_done`, once, when everything is sent and resolved."""
        if not self.finished and not self.sending and not self.open:
            self.finished = True
            self.on_done()

    @property
    def sending(self) -> bool:
        """Whether there is more to send."""
        return self.sent < self.total
