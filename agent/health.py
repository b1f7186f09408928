"""The agent's own health: how late its loop runs, how starved it is, whether its clock jumped, what it costs.

The analyzer reads it to tell a starved host from a lossy network; the agent reads it to slow itself down.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from agent.cgroup import CgroupCpu
from pingmesh.messages import Health, RnicHealth

log = logging.getLogger(__name__)

TICK_S = 0.25
"""How often the loop's lag is looked at here; while probes are sent, their timer looks far more often."""
STALL_S = 0.1
"""A loop this late is told at once, once a second at most: probes will look late or lost for no fault of the fabric."""
CARRIED_S = 1.0
STEP_NS = 1_000_000_000
"""A wall clock that moves by more than this against the monotonic one has been stepped."""


def cpu_seconds() -> float:
    """User and system time of this process so far."""
    t = os.times()
    return t.user + t.system


@dataclass(frozen=True, slots=True)
class Clocks:
    """Where time and cost come from; replaced in tests."""

    monotonic: Callable[[], float] = time.monotonic
    wall_ns: Callable[[], int] = time.time_ns
    cpu: Callable[[], float] = cpu_seconds


class FailSlow:
    """Lowers the probe rate while the agent costs more than its budget, never to nothing.

    Multiplicative decrease at once, slow increase after: over the budget the factor falls in proportion (at least by
    a tenth, at most by half a step), under 80 % of it the factor grows by 5 %.
    """

    FLOOR = 0.1

    def __init__(self, budget: float) -> None:
        self.budget = budget
        self.factor = 1.0

    def update(self, share: float) -> float:
        """Take in the CPU share of the last period (cores); returns the new factor, 0.1..1."""
        if share > self.budget:
            self.factor = max(self.FLOOR, self.factor * min(0.9, max(0.5, self.budget / share)))
        elif share < 0.8 * self.budget:
            self.factor = min(1.0, self.factor * 1.05)
        return self.factor


class HealthMonitor:
    """Gathers health between two reports.

    `rnics` (asked with True: without beginning a new period) and `read_delay` (seconds, the greatest since asked last)
    come from the data plane. `peek` may be asked at
    any time and resets nothing; `take` starts a new period.
    """

    PERIOD_S = 5.0

    def __init__(
        self,
        budget: float,
        *,
        rnics: Callable[[bool], list[RnicHealth]] = lambda _: [],
        read_delay: Callable[[], float] = lambda: 0.0,
        on_factor: Callable[[float], None] = lambda _: None,
        on_stall: Callable[[], None] = lambda: None,
        cgroup: CgroupCpu | None = None,
        clocks: Clocks | None = None,
    ) -> None:
        self._rnics = rnics
        self._read_delay = read_delay
        self._on_factor = on_factor
        self._on_stall = on_stall
        self._cgroup = cgroup or CgroupCpu()
        self._clocks = clocks or Clocks()
        self.fail_slow = FailSlow(budget)
        self.spooled: Callable[[], tuple[int, int]] = lambda: (0, 0)
        """Reports waiting and reports dropped so far."""
        self._loop_lag = 0.0
        self._delay = 0.0
        self._steps = 0
        self._due: float | None = None
        self._stalled, self._told = False, -1.0
        self._last = (-CARRIED_S, 0.0, 0.0)
        self._anchor = self._offset()
        self._began = self._clocks.monotonic()
        self._wait = self._cgroup.read()
        self._cpu = self._clocks.cpu()
        self._costs: deque[tuple[float, float]] = deque([(self._began, self._cpu)])

    def _offset(self) -> int:
        return self._clocks.wall_ns() - int(self._clocks.monotonic() * 1e9)

    async def run(self) -> None:
        """Tick until cancelled: the loop's lag each 250 ms, clock and cost once a second."""
        ticks = 0
        while True:
            self._due = self._clocks.monotonic() + TICK_S
            await asyncio.sleep(TICK_S)
            self.late(self._note_lag())
            ticks += 1
            if ticks % 4 == 0:
                self.second()

    def late(self, seconds: float) -> None:
        """Some timer of the loop fired so late; a stall is told at once, once a second at most."""
        self._loop_lag = max(self._loop_lag, seconds)
        self._stalled |= seconds >= STALL_S
        if self._stalled and (now := self._clocks.monotonic()) - self._told >= 1.0:
            self._stalled, self._told = False, now
            self._on_stall()

    def _note_lag(self) -> float:
        # Also from `peek`: after a stall a question may be answered before the overdue tick runs.
        lag = self._clocks.monotonic() - self._due if self._due is not None else 0.0
        self._loop_lag = max(self._loop_lag, lag)
        return lag

    def second(self) -> None:
        """Once a second: watch the wall clock and the own cost."""
        offset = self._offset()
        if abs(offset - self._anchor) > STEP_NS:
            log.warning("the wall clock was stepped", extra={"seconds": (offset - self._anchor) / 1e9})
            self._steps += 1
            self._anchor = offset
        now, cpu = self._clocks.monotonic(), self._clocks.cpu()
        self._costs.append((now, cpu))
        began, before = self._costs[0]
        if now - began >= self.PERIOD_S:
            self._costs.clear()
            self._costs.append((now, cpu))
            self._apply((cpu - before) / (now - began))

    def _apply(self, share: float) -> None:
        before = self.fail_slow.factor
        factor = self.fail_slow.update(share)
        if factor != before:
            level = logging.WARNING if factor < before else logging.INFO
            log.log(
                level,
                "probe rate lowered: over the CPU budget" if factor < before else "probe rate raised again",
                extra={"rate_factor": round(factor, 3), "cpu_share": round(share, 3), "budget": self.fail_slow.budget},
            )
            self._on_factor(factor)

    def peek(self) -> Health:
        """Health since the last report.

        Maxima of a report less than a second old are told again: the stall that it took with it is why we are asked.
        """
        health = self._health(peek=True)
        at, lag, delay = self._last
        if self._clocks.monotonic() - at < CARRIED_S:
            health.loop_lag_max = max(health.loop_lag_max, lag)
            health.read_delay_max = max(health.read_delay_max, delay)
        return health

    def _health(self, *, peek: bool) -> Health:
        self._note_lag()
        self._delay = max(self._delay, self._read_delay())
        elapsed = max(self._clocks.monotonic() - self._began, 1e-3)
        wait = self._cgroup.read()
        spooled, dropped = self.spooled()
        return Health(
            loop_lag_max=self._loop_lag * 1e3,
            read_delay_max=self._delay * 1e3,
            cpu_pressure=max(0.0, wait.pressure - self._wait.pressure) * 1e3,
            throttled=max(0.0, wait.throttled - self._wait.throttled) * 1e3,
            cpu_share=(self._clocks.cpu() - self._cpu) / elapsed,
            rate_factor=self.fail_slow.factor,
            spooled=spooled,
            dropped_reports=dropped,
            clock_steps=self._steps,
            rnics=self._rnics(peek),
        )

    def take(self) -> Health:
        """Health since the last report; the next period begins."""
        health = self._health(peek=False)
        self._last = (self._clocks.monotonic(), health.loop_lag_max, health.read_delay_max)
        self._loop_lag = self._delay = 0.0
        self._steps = 0
        self._began, self._cpu = self._clocks.monotonic(), self._clocks.cpu()
        self._wait = self._cgroup.read()
        return health
