"""Active confirmation: probe the doubtful flows and their neighbours harder, ask both ends what arrived.

A round is sent within some tenths of a second, and is judged when its last probes have come back or timed out. The
first ones of an episode overlap: the next is sent meanwhile.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from pingmesh.analyzer.clock import Clock
from pingmesh.analyzer.counts import ResponderCounts, Sample, one_way, prober_rows, responder_rows
from pingmesh.analyzer.flows import LEAST_SPARE, PROBE, FlowBook
from pingmesh.analyzer.hosts import HostBook
from pingmesh.analyzer.questions import Questions, ask_all
from pingmesh.analyzer.suspicion import Episode, Request, plan
from pingmesh.messages import CONFIRM_BIT, Answer, BadMessageError, ConfirmResult

COUNTS = (10, 15, 20)
"""Probes a flow in the first, second and further rounds of an episode."""
RETRACED_LINKS = 6
RETRACED_TUPLES = 240
"""At most so many a round: what agents may trace in about two seconds under suspicion."""


@dataclass
class Begun:
    """A round whose probes are on their way."""

    began: int
    number: int
    """Of the episode, from 1."""
    noted: int
    """What the episode had noted until then."""
    requests: list[Request]
    elements: list[str]
    started: list[tuple[Request, int, asyncio.Task[ConfirmResult | None]]]
    sending_s: float
    """How long the agents take to send it."""


@dataclass
class RoundResult:
    """What one round brought."""

    began: int
    samples: list[Sample] = field(default_factory=list)
    silent: set[str] = field(default_factory=set)
    elements: list[str] = field(default_factory=list)

    @property
    def lost(self) -> int:
        """Packets lost in the round, both directions."""
        return sum(s.lost for s in self.samples)


class Rounds:
    """Runs confirmations."""

    def __init__(self, book: FlowBook, hosts: HostBook, questions: Questions, clock: Clock, interval_us: int) -> None:
        self._book = book
        self._hosts = hosts
        self._questions = questions
        self._clock = clock
        self._interval_us = interval_us

    def begin(self, episode: Episode) -> Begun:
        """Plan the episode's next round and have it sent."""
        usable = {h.name for h in self._hosts.hosts.values() if h.state == "online" and h.unanswered < 3}
        requests, elements = plan(self._book, episode, usable)
        count = COUNTS[min(episode.rounds, len(COUNTS) - 1)]
        episode.rounds += 1
        began = self._clock.now()
        started = [(r, *self._start(r, count)) for r in requests]
        sending_s = self._sending_s(requests, count)
        return Begun(began, episode.rounds, episode.noted, requests, elements, started, sending_s)

    def _sending_s(self, requests: list[Request], count: int) -> float:
        """Until the slowest RNIC has sent its probes: those that its rate cap does not leave room for take longer."""
        least = count * self._interval_us / 1e6
        probes: Counter[int] = Counter()
        for r in requests:
            probes[r.rnic] += count * len(r.indexes)
        longest = max((n / self._book.spare_rate.get(rnic, LEAST_SPARE) for rnic, n in probes.items()), default=0.0)
        return max(least, min(longest, 2 * least))

    async def finish(self, begun: Begun, episode: Episode) -> RoundResult:
        """Wait for what a round brings."""
        result = RoundResult(begun.began, elements=begun.elements)
        await self.retrace([e for e in begun.elements if "->" in e][:RETRACED_LINKS], episode.onset())
        await self._find_silent(self._involved(begun.requests, episode), result)
        confirmed = await self._collect(begun.started, result.silent)
        counts = await self._responders(confirmed, result)
        for request, window, answer in confirmed:
            self._samples(request, window, answer, counts, result)
        return result

    def _start(self, request: Request, count: int) -> tuple[int, asyncio.Task[ConfirmResult | None]]:
        host = self._book.rnic_names[request.rnic].split("/")[0]
        return self._questions.start_confirm(host, request, count, self._interval_us)

    def _involved(self, requests: list[Request], episode: Episode) -> set[str]:
        involved = {d.flow.dst_host for d in episode.doubts.values()}
        for r in requests:
            involved.add(self._book.rnic_names[r.rnic].split("/")[0])
            involved.update(
                f.dst_host for i in r.indexes if (f := self._book.flows.get((r.rnic, r.list_version, i))) is not None
            )
        return {h for h in involved if self._hosts.get(h).state == "online"}

    async def _find_silent(self, hosts: set[str], result: RoundResult) -> None:
        answers = await ask_all(self._questions, sorted(hosts))
        # One unanswered question proves nothing: ask again before anyone is called silent.
        quiet = [h for h, a in answers.items() if a is None]
        again = await ask_all(self._questions, quiet)
        for host, answer in again.items():
            if answer is None and self._hosts.get(host).heard < result.began:
                self._hosts.on_unanswered(host, result.began)
                result.silent.add(host)

    async def retrace(self, links: Sequence[str], before: int, most: int = RETRACED_TUPLES) -> None:
        """Have the tuples traced again that cross or crossed these links, either way, and were not since a time.

        Those of the first links come first, so that the most doubtful cable is known within a second.
        """
        rank: dict[str, int] = {}
        for i, link in enumerate(links):
            rank.setdefault(link, i)
            rank.setdefault("->".join(reversed(link.split("->"))), i)
        due = []
        for role, flow, crossed in self._book.traced_through(rank):
            record = self._book.record(flow, role)
            if record is not None and record.confirmed <= before:
                due.append((min(rank[e] for e in crossed), record.confirmed, role, flow))
        due.sort(key=lambda d: d[:2])
        by_host: dict[str, list[tuple[int, int, int, int]]] = {}
        for _, _, role, flow in due[:most]:
            by_host.setdefault(flow.src_host if role == PROBE else flow.dst_host, []).append((role, *flow.key))
        await self._questions.retrace(by_host)

    async def _collect(
        self, started: list[tuple[Request, int, asyncio.Task[ConfirmResult | None]]], silent: set[str]
    ) -> list[tuple[Request, int, ConfirmResult]]:
        tasks = set()
        for request, _, task in started:
            if self._book.rnic_names[request.rnic].split("/")[0] in silent:
                task.cancel()
            else:
                tasks.add(task)
        while tasks:
            # A straggler holds up the verdict only while others are still coming in.
            _, tasks = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if tasks and len(tasks) <= len(started) // 8:
                _, tasks = await asyncio.wait(tasks, timeout=self._questions.waits.straggler_s)
                break
        for task in tasks:
            task.cancel()
        out = []
        for request, ident, task in started:
            if task.done() and not task.cancelled() and (answer := task.result()) is not None:
                out.append((request, CONFIRM_BIT | ident, answer))
        return out

    async def _responders(
        self, confirmed: list[tuple[Request, int, ConfirmResult]], result: RoundResult
    ) -> dict[tuple[str, int, int], ResponderCounts]:
        """(host, window, index) -> counts, of the hosts that answered; their zeroes are filled in by `_samples`."""
        windows: dict[str, list[tuple[int, int, int, int]]] = {}
        for request, window, answer in confirmed:
            for host in {
                f.dst_host
                for i in request.indexes
                if (f := self._book.flows.get((request.rnic, request.list_version, i))) is not None
            }:
                windows.setdefault(host, []).append((request.rnic, answer.epoch, request.list_version, window))
        asked = [h for h in windows if h not in result.silent]
        answers = await asyncio.gather(*(self._questions.ask(h, windows[h]) for h in asked))
        counts: dict[tuple[str, int, int], ResponderCounts] = {}
        for host, given in zip(asked, answers, strict=True):
            if not isinstance(given, Answer):
                continue
            try:
                rows = list(responder_rows(given.responder))
            except BadMessageError as error:
                self._questions.reject(given, error)
                continue
            for rnic, epoch, version, window in windows[host]:
                del rnic, epoch, version
                counts[host, window, -1] = ResponderCounts()  # this host has spoken about this window
            for key, index, c in rows:
                counts[host, key[3], index] = c
        return counts

    def _samples(
        self,
        request: Request,
        window: int,
        answer: ConfirmResult,
        counts: dict[tuple[str, int, int], ResponderCounts],
        result: RoundResult,
    ) -> None:
        now = self._clock.now()
        try:
            rows = list(prober_rows(answer.columns))
        except BadMessageError as error:
            self._questions.reject(answer, error)
            return
        classes = self._book.classes[request.rnic]
        if request.cls >= len(classes):
            return  # the RNIC was given other classes meanwhile
        for index, p in rows:
            flow = self._book.flows.get((request.rnic, request.list_version, index))
            if flow is None or p.sent <= 0:
                continue
            cls = flow.cls_name if request.cls < 0 else classes[request.cls]
            spoken = (flow.dst_host, window, -1) in counts
            r = counts.get((flow.dst_host, window, index), ResponderCounts()) if spoken else None
            result.samples += one_way(flow, cls, p, r, result.began, now, True)
