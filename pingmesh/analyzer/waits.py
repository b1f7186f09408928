"""How long the analyzer waits, and what it calls slow: in proportion to the time after which agents count a probe lost.

Where probes take long (agents far apart, an emulated processor) `agent.timeout_ms` is raised, and all that was made to
go with half a second goes with it.
"""

from __future__ import annotations

from dataclasses import dataclass

_USUAL_S = 0.5


@dataclass(frozen=True, slots=True)
class Waits:
    """What goes with a time-out of half a second; `waits_for` has those of others."""

    answer_s: float = 0.3
    """For the answer to a question, over the management network: no less where probes time out sooner."""
    confirm_s: float = 2.5
    """For the result of a confirmation, after its last probe was due."""
    straggler_s: float = 0.25
    """For the last few results of a round."""
    settle_ns: int = 600_000_000
    """Time-out and a margin: after it a responder's counts of a window are whole."""
    slow_ns: int = 2_000_000
    """Round trips that took longer are slow, whatever the baseline."""
    stall_ms: float = 250.0
    """Stalls from here on take packets with them: probes time out after twice as long."""


USUAL = Waits()


def waits_for(timeout_ms: int) -> Waits:
    """The waits that go with a probe time-out in milliseconds.

    >>> waits_for(500) == USUAL, waits_for(2000).settle_ns, waits_for(100).answer_s
    (True, 2400000000, 0.3)
    """
    seconds = timeout_ms / 1e3
    longer = max(1.0, seconds / _USUAL_S)
    return Waits(
        answer_s=USUAL.answer_s * longer,
        confirm_s=USUAL.confirm_s * longer,
        straggler_s=seconds / 2,
        settle_ns=timeout_ms * 1_200_000,
        slow_ns=timeout_ms * 4_000,
        stall_ms=timeout_ms / 2,
    )
