"""Host facts of a recording put into the analyzer's book of hosts, so that its own rules judge them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pingmesh.analyzer.flows import PROBE, Flow
from pingmesh.analyzer.host_rules import HostView, judge_hosts
from pingmesh.analyzer.hosts import HostBook
from pingmesh.analyzer.samples import Sample
from pingmesh.analyzer.waits import USUAL
from pingmesh.records.model import HostFact
from topology.model import Topology

Reached = Callable[[str, int], tuple[int, int]]
"""(host, window) -> (probes sent to it, probes lost)."""


def by_window(facts: Sequence[HostFact], window_ns: int) -> dict[int, list[HostFact]]:
    """Facts by the window that holds their middle."""
    out: dict[int, list[HostFact]] = {}
    for f in facts:
        out.setdefault((f.start_ns + (f.end_ns - f.start_ns) // 2) // window_ns, []).append(f)
    return out


class HostHistory:
    """Goes through the facts window by window; windows only grow."""

    def __init__(self, topology: Topology, window_ns: int, reached: Reached) -> None:
        self._topology = topology
        self._window_ns = window_ns
        self._reached = reached
        self._book = HostBook()
        self._book.session_since = 1

    def judge(self, window: int, facts: Sequence[HostFact]) -> HostView:
        """What the analyzer's host rules say at the end of a window of which these facts are known."""
        now = (window + 1) * self._window_ns
        for f in facts:
            self._take(f, now)
        odd = [f.host for f in facts if f.state == "died" or f.silent_since_ns]
        samples = [s for host in odd for w in (window - 2, window - 1, window) for s in self._sample(host, w)]
        return judge_hosts(self._book, self._topology, samples, now) if facts else HostView()

    def _take(self, f: HostFact, now: int) -> None:
        host = self._book.get(f.host)
        host.state, host.state_since = f.state, f.state_since_ns
        host.heard = f.heard_ns or now
        host.unanswered, host.silent_since = f.unanswered, f.silent_since_ns
        host.rebooted = f.rebooted_ns
        host.health.cpu_pressure, host.health.throttled = f.cpu_pressure, f.throttled_ms
        if f.stall_ms >= USUAL.stall_ms:
            host.stalls.append((now, f.stall_ms))
        for device in [d for d in host.down if d not in f.dark]:
            host.set_link(device, True, now)
        for device in f.dark:
            # The rules wait for the other RNICs of a ToR: in a recording all of a window are there.
            host.set_link(device, False, f.start_ns)

    def _sample(self, host: str, window: int) -> list[Sample]:
        sent, lost = self._reached(host, window)
        start = window * self._window_ns
        flow = Flow((0, 0, 0), "", f"{host}/", 0, 0, "", 0, 0)
        return [Sample(start, start + self._window_ns, flow, "", PROBE, sent, lost)] if sent else []
