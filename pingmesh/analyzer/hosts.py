"""What the analyzer knows of each agent: alive, silent, dead, stopped, starved."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from pingmesh.analyzer.waits import USUAL, Waits
from pingmesh.messages import AgentState, Health

_SECOND = 1_000_000_000

OFFSET_SPAN_NS = 30 * _SECOND

COME_BACK_NS = 30 * _SECOND
"""Time for every agent to find the broker again after an outage."""


@dataclass(slots=True)
class Host:
    """One agent. Times are the analyzer's nanoseconds."""

    name: str
    boot: int = 0
    state: str = "online"
    state_since: int = 0
    heard: int = 0
    health: Health = field(default_factory=Health)
    health_at: int = 0
    stalls: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=64))
    """(when, milliseconds) of stalls reported or seen as late answers."""
    excused: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=64))
    """Spans in which it was silent, stalled, gone or new: packets to and from it then are no evidence, now or later."""
    unanswered: int = 0
    silent_since: int = 0
    """When the first question that is still unanswered was asked; 0: none."""
    rebooted: int = 0
    seqs: deque[int] = field(default_factory=lambda: deque(maxlen=32))
    """Reports taken lately: one that got no acknowledgement is sent again."""
    offset: int = 0
    """Analyzer's clock minus the agent's, from the message that took the least time of the last minutes: a report that
    waited for the broker says nothing of the clocks."""
    offsets: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=8))
    """(span, least offset seen in it)."""
    down: dict[str, int] = field(default_factory=dict)
    """Devices whose link is down, and since when we know."""
    dark: deque[tuple[str, int, int]] = field(default_factory=lambda: deque(maxlen=64))
    """(device, from, to) of the times without link that are over: what was lost then is explained."""

    def note_clock(self, now: int, agent_now: int) -> None:
        """Take in the agent's clock as a message tells it."""
        span, offset = now // OFFSET_SPAN_NS, now - agent_now
        if self.offsets and self.offsets[-1][0] == span:
            offset = min(offset, self.offsets.pop()[1])
        self.offsets.append((span, offset))
        self.offset = min(o for _, o in self.offsets)

    def starved(self, since: int) -> float:
        """Longest stall reported since a time, in milliseconds; 0 if none was."""
        return max((ms for at, ms in self.stalls if at >= since), default=0.0)

    def set_link(self, device: str, up: bool, now: int) -> None:
        """What the agent says of a device's link."""
        if not up:
            self.down.setdefault(device, now)
        elif (since := self.down.pop(device, None)) is not None:
            self.dark.append((device, since - 2 * _SECOND, now + 2 * _SECOND))

    def was_dark(self, device: str, start: int, end: int) -> bool:
        """Whether a device was without link in this span."""
        return any(d == device and a < end and start < b for d, a, b in self.dark)

    def excuse(self, start: int, end: int) -> None:
        """Nothing between these times is evidence."""
        if self.excused and start <= self.excused[-1][1]:
            last = self.excused.pop()
            start, end = min(start, last[0]), max(end, last[1])
        self.excused.append((start, end))

    def is_excused(self, start: int, end: int) -> bool:
        """Whether packets of this span may have met one of those times."""
        return any(a < end and start < b for a, b in self.excused)


class HostBook:
    """All hosts heard of."""

    def __init__(self, waits: Waits = USUAL) -> None:
        self._waits = waits
        self.hosts: dict[str, Host] = {}
        self.dark_tors: dict[str, int] = {}
        """When all RNICs of a ToR were last seen without link together."""
        self.clocks: dict[str, str] = {}
        """What stamps the packets of each RNIC, as its agent registered it."""
        self.clock_changes = 0
        self.session_since = 0
        """Start of our own broker session: silence before it means nothing."""

    def get(self, name: str) -> Host:
        """The host, made on first sight."""
        host = self.hosts.get(name)
        if host is None:
            host = self.hosts[name] = Host(name)
        return host

    def on_state(self, message: AgentState, now: int, retained: bool) -> None:
        """An online, stopped or died message. A retained one says nothing about *now*."""
        host = self.get(message.host)
        if message.state == "died" and host.boot not in (0, message.boot):
            return  # the will of an earlier process
        if message.state != host.state:
            host.state_since = now
        if message.state == "online":
            self.on_message(message.host, message.boot, now, message.at_ns, retained)
        host.state = message.state
        host.boot = message.boot

    def on_message(self, name: str, boot: int, now: int, agent_now: int, retained: bool = False) -> None:
        """Anything else from an agent proves that it lives."""
        host = self.get(name)
        is_new = host.boot != boot
        if is_new:
            host.boot = boot
            host.rebooted = now
            host.stalls.clear()
            host.seqs.clear()
            host.offsets.clear()
        if retained:
            return
        was_silent = bool(host.silent_since) and now - host.silent_since > 2e6 * self._waits.stall_ms
        if was_silent and not is_new and not self._most_are_silent():
            # It was silent and is the same process: it was stalled, not dead.
            host.stalls.append((now, (now - host.silent_since) / 1e6))
        host.heard = now
        host.unanswered = 0
        host.silent_since = 0
        if agent_now:
            host.note_clock(now, agent_now)
        if host.state != "online":
            host.state = "online"
            host.state_since = now

    def _most_are_silent(self) -> bool:
        """Whether it is rather the broker that kept everybody waiting."""
        online = [h for h in self.hosts.values() if h.state == "online"]
        silent = sum(1 for h in online if h.silent_since)
        return silent >= 3 and 2 * silent > len(online)

    def on_health(self, name: str, health: Health, now: int) -> None:
        """Health from a report, an exception or an answer."""
        host = self.get(name)
        host.health = health
        host.health_at = now
        for r in health.rnics:
            if not r.up or host.down:
                host.set_link(r.device, r.up, now)
        stall = max(health.loop_lag_max, health.read_delay_max)
        if stall >= self._waits.stall_ms:
            host.stalls.append((now, stall))

    def set_clock(self, rnic: str, clock: str) -> None:
        """What an agent says of the clock behind an RNIC's delays."""
        if self.clocks.get(rnic) != clock:
            self.clocks[rnic] = clock
            self.clock_changes += 1

    def on_unanswered(self, name: str, asked: int) -> None:
        """A question got no answer in time."""
        host = self.get(name)
        if host.heard > asked:
            return
        host.unanswered += 1
        if not host.silent_since:
            host.silent_since = asked

    def session_started(self, now: int) -> None:
        """Our connection is new: everything about silence starts again."""
        self.session_since = now
        for host in self.hosts.values():
            host.unanswered = 0
            host.silent_since = 0
            if host.state == "died":
                # A broker that is stopped gives out everybody's will: who is really dead will not speak again.
                host.state = "online"

    def heard_in_session(self, host: Host, now: int) -> bool:
        """Whether silence of this host can mean anything yet."""
        if not self.session_since:
            return False
        return host.heard >= self.session_since or now - self.session_since > COME_BACK_NS
