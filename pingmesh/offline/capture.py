"""What a listening analyzer hears, as records and host facts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from pingmesh.analyzer.flows import FlowBook, FlowKey
from pingmesh.analyzer.host_rules import SILENT_QUESTIONS, judge_hosts
from pingmesh.analyzer.hosts import Host, HostBook
from pingmesh.analyzer.observe import paths_of
from pingmesh.analyzer.samples import Sample
from pingmesh.messages import WINDOW_NS
from pingmesh.records.model import (
    NO_LINK,
    PROBER_SET_ASIDE,
    TARGET_SET_ASIDE,
    UNKNOWN,
    VALID,
    Coded,
    HostFact,
    PathColumn,
    Records,
)
from topology.model import Topology

SILENT_NS = 12_000_000_000
"""An agent that was not heard for so long, two reports and a margin, is silent: a recording asks nobody."""

_Key = tuple[FlowKey, int, int, str]


class Capture:
    """Gathers samples until they are taken; what comes late is put to the sample it belongs to."""

    def __init__(self, topology: Topology, book: FlowBook, hosts: HostBook) -> None:
        self._topology = topology
        self._book = book
        self._hosts = hosts
        self._samples: dict[_Key, list[int]] = {}
        self._of: dict[_Key, Sample] = {}
        self._facts: list[HostFact] = []
        self._facts_until = 0
        self.too_late = 0
        """Amendments whose sample was written already."""

    def __len__(self) -> int:
        return len(self._samples)

    def add(self, samples: Iterable[Sample], now: int) -> None:
        """Take over samples; sets hosts aside by the analyzer's rules as of now."""
        for host in self._hosts.hosts.values():
            if host.state == "online" and host.heard and now - host.heard > SILENT_NS:
                host.unanswered, host.silent_since = SILENT_QUESTIONS, host.silent_since or host.heard
        judge_hosts(self._hosts, self._topology, (), now)
        self._note_facts(now)
        for s in samples:
            key = (s.flow.key, s.role, s.start, s.cls)
            counts = self._samples.get(key)
            if counts is not None:
                counts[0] += s.sent
                counts[1] += s.lost
            elif s.sent > 0:
                self._samples[key] = [s.sent, s.lost]
                self._of[key] = s
            else:
                self.too_late += 1

    def take(self) -> Records | None:
        """The samples gathered, as records; None if there are none."""
        if not self._samples:
            return None
        kept = [(self._of[key], counts) for key, counts in self._samples.items()]
        self._samples, self._of = {}, {}
        samples = [s for s, _ in kept]
        rnics = self._topology.rnics

        def addresses(names: Sequence[str]) -> Coded:
            return Coded.of(r.address if (r := rnics.get(n)) is not None else None for n in names)

        probers, targets = [s.flow.src for s in samples], [s.flow.dst for s in samples]
        none = np.full(len(samples), UNKNOWN)
        return Records(
            start_ns=np.array([s.start for s in samples]),
            end_ns=np.array([s.end for s in samples]),
            role=np.array([s.role for s in samples]),
            prober=Coded.of(probers),
            target=Coded.of(targets),
            prober_address=addresses(probers),
            target_address=addresses(targets),
            source_port=np.array([s.flow.sport for s in samples]),
            cls=Coded.of(s.cls for s in samples),
            sent=np.array([sent for _, (sent, _) in kept]),
            lost=np.array([min(max(lost, 0), sent) for _, (sent, lost) in kept]),
            overdue=none,
            rtts=np.array([s.rtts for s in samples]),
            rtt_sum_ns=np.array([s.rtt_ns * s.rtts for s in samples]),
            rtt_p50_ns=none,
            rtt_p99_ns=none,
            rtt_max_ns=none,
            path=PathColumn.of([self._path(s) for s in samples]),
            validity=Coded.of(self._validity(s) for s in samples),
            confirmed=np.array([s.confirmed for s in samples]),
        )

    def take_facts(self) -> list[HostFact]:
        """Facts of the windows that ended since they were last taken, each as known when it ended."""
        facts, self._facts = self._facts, []
        return facts

    def _note_facts(self, now: int) -> None:
        end = now // WINDOW_NS * WINDOW_NS
        if end > self._facts_until:
            self._facts_until = end
            self._facts += [self._fact(h, end - WINDOW_NS, end) for h in self._hosts.hosts.values()]

    def _path(self, s: Sample) -> Sequence[str] | None:
        paths = paths_of(self._book, s.flow, s.role, s.start)
        return paths[0] if len(paths) == 1 and paths[0] else None

    def _validity(self, s: Sample) -> str:
        for name, reason in ((s.flow.src, PROBER_SET_ASIDE), (s.flow.dst, TARGET_SET_ASIDE)):
            host_name, _, device = name.partition("/")
            host = self._hosts.hosts.get(host_name)
            if host is None:
                continue
            if device in host.down or host.was_dark(device, s.start, s.end):
                return NO_LINK
            if host.is_excused(s.start, s.end):
                return reason
        return VALID

    def _fact(self, h: Host, start: int, end: int) -> HostFact:
        return HostFact(
            start_ns=start,
            end_ns=end,
            host=h.name,
            state=h.state,
            state_since_ns=max(h.state_since, 0),
            heard_ns=h.heard,
            stall_ms=max((ms for at, ms in h.stalls if start <= at < end), default=0.0),
            cpu_pressure=h.health.cpu_pressure,
            throttled_ms=h.health.throttled,
            rebooted_ns=h.rebooted,
            unanswered=h.unanswered,
            silent_since_ns=h.silent_since,
            set_aside=h.is_excused(start, end),
            dark=tuple(sorted(h.down)),
        )
