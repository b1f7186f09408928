"""What `pingmesh ping` measures: probes to one queue pair, over a transport of its own beside a running agent.

The target's ordinary responder answers. It counts by (source number, list version); ours are nobody's, so that its
reports of our probes are evidence for nothing and about nobody.
"""

from __future__ import annotations

import asyncio
import errno
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

from agent.clock import AnchoredClock, window_of
from agent.ping_probe import Outcome, PingProbe, PingResult
from agent.transport.base import Target, Transport
from pingmesh import probe

NOBODY: Final = 0xFFFFFFFF
"""Source number and list version of probes sent by hand: the registry counts from 1 and never comes here."""
ABSURD_NS: Final = 60_000_000_000
RESOLVE_S: Final = 3.0
RESOLVE_STEP_S: Final = 0.05
STAMP_PATIENCE_S: Final = 0.006
_REMEMBERED: Final = 4096
_SEQ_MASK: Final = 0xFFFFFFFF


class Aim(NamedTuple):
    """The queue pair to probe. The epoch tells it from a later one of the same number."""

    address: str
    qpn: int
    qkey: int
    epoch: int

    def __str__(self) -> str:
        """As `pingmesh ping` takes it."""
        return f"{self.address},{self.qpn},{self.qkey},{self.epoch}"

    @classmethod
    def parse(cls, text: str) -> Aim:
        """`ADDRESS,QPN,QKEY,EPOCH`; numbers may be hexadecimal. Raises ValueError.

        >>> Aim.parse("10.0.0.2,17,0x11111111,7")
        Aim(address='10.0.0.2', qpn=17, qkey=286331153, epoch=7)
        """
        parts = [p.strip() for p in text.split(",")]
        if len(parts) != 4:
            raise ValueError(f"{text!r} is not ADDRESS,QPN,QKEY,EPOCH")
        try:
            qpn, qkey, epoch = (int(p, 0) for p in parts[1:])
        except ValueError:
            raise ValueError(f"{text!r}: QPN, Q_Key and epoch are numbers") from None
        if not 0 <= epoch < 1 << 32:
            raise ValueError(f"{text!r}: epoch {epoch} does not fit into 32 bits")
        return cls(parts[0], qpn, qkey, epoch)


@dataclass(frozen=True, slots=True)
class Plan:
    """What to send. `count` 0: until stopped; `interval_ns` 0: each probe as soon as the one before is answered."""

    count: int
    interval_ns: int
    timeout_ns: int
    size: int
    dscp: int
    sport: int
    cluster: str
    busy: bool = False
    """Keep a core busy while waiting, so that waking up is not measured."""


class Pinger:
    """Sends the probes of a plan and tells `on_probe` of each as it is settled, twice of one that is answered late.

    `clock_ns` is the host's clock of t1 and t6: that of the transport's stamps where they are the host's own.
    """

    def __init__(
        self,
        transport: Transport,
        aim: Aim,
        plan: Plan,
        on_probe: Callable[[PingProbe], None],
        clock_ns: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self.transport = transport
        self.result = PingResult()
        self.epoch = secrets.randbits(32) | 1
        self._aim = aim
        self._plan = plan
        self._on_probe = on_probe
        self._clock_ns = clock_ns
        self._wall = AnchoredClock()
        self._cluster = probe.cluster_hash(plan.cluster)
        self._template = probe.encode(self._header())
        self._open: dict[int, tuple[PingProbe, float]] = {}
        """Not settled, with the time (of the loop) at which each is given up; oldest first."""
        self._given_up: dict[int, PingProbe] = {}
        self._seq = 0
        self._news = asyncio.Event()
        """A probe is settled, or we were stopped."""
        self._due = asyncio.Event()
        """The next probe is due, or we were stopped."""
        self._stopped = False
        self._patience = 0.0
        self._expiry: asyncio.TimerHandle | None = None

    def _header(self) -> probe.Header:
        plan = self._plan
        return probe.Header(
            magic=probe.MAGIC,
            version=probe.VERSION,
            kind=probe.PROBE,
            cls=0,
            flags=0,
            trace_mask=0,
            dscp=plan.dscp,
            cluster=self._cluster,
            source=NOBODY,
            epoch=self.epoch,
            target_epoch=self._aim.epoch,
            seq=0,
            list_version=NOBODY,
            flow_index=0,
            sport=plan.sport,
            window=0,
            left=0,
            reserved=0,
            qkey=self.transport.qkey,
            history=0,
            delay=0,
        )

    def stop(self) -> None:
        """Send no more, and do not wait for what is in flight."""
        self._stopped = True
        self._news.set()
        self._due.set()

    async def run(self) -> PingResult:
        """Send, wait for the answers, add up. Raises ValueError or OSError where the target cannot be resolved."""
        loop = asyncio.get_running_loop()
        self.transport.start(loop, self)
        if self._plan.busy:
            self.transport.spin()
        self.result.prober_polled = self.transport.polled
        self._patience = loop.time() + RESOLVE_S
        target = await self._resolve(loop)
        cpu, began = time.process_time_ns(), time.monotonic_ns()
        due = loop.time()
        while not self._stopped and (not self._plan.count or self._seq < self._plan.count):
            if not self._send(loop, target):
                await asyncio.sleep(RESOLVE_STEP_S)
            elif self._plan.interval_ns:
                # A stall is not made up for: a burst would measure itself.
                due = max(due + self._plan.interval_ns / 1e9, loop.time())
                await self._sleep_until(loop, due)
            else:
                await self._until_settled()
        while self._open and not self._stopped:
            await self._until_settled()
        result = self.result
        result.cpu_ns, result.elapsed_ns = time.process_time_ns() - cpu, time.monotonic_ns() - began
        result.in_flight = len(self._open)
        if self._expiry is not None:
            self._expiry.cancel()
        for one in list(self._given_up.values()):
            if one.t5 or one.responder_ns != -1:
                self._finish(one, Outcome.NO_RTT)
            else:
                self._place(one)
        return result

    async def _resolve(self, loop: asyncio.AbstractEventLoop) -> Target:
        """A neighbour that is not known yet may take a moment."""
        while True:
            try:
                return self.transport.target(self._aim.address, self._aim.qpn, self._aim.qkey)
            except OSError:
                if loop.time() > self._patience or self._stopped:
                    raise
            await asyncio.sleep(RESOLVE_STEP_S)

    async def _sleep_until(self, loop: asyncio.AbstractEventLoop, due: float) -> None:
        self._due.clear()
        timer = loop.call_at(due, self._due.set)
        if not self._stopped:
            await self._due.wait()
        timer.cancel()

    async def _until_settled(self) -> None:
        while self._open and not self._stopped:
            self._news.clear()
            await self._news.wait()

    def _send(self, loop: asyncio.AbstractEventLoop, target: Target) -> bool:
        """Send the next probe; False if the neighbour is not known yet, and may be in a moment."""
        plan = self._plan
        seq = self._seq = (self._seq + 1) & _SEQ_MASK
        probe.stamp_probe(self._template, seq, window_of(self._wall.wall_ns(self._wall.monotonic_ns())))
        one = PingProbe(seq)
        one.t1 = self._clock_ns()
        try:
            tx_ns = self.transport.send(target, plan.sport, plan.dscp, self._template, plan.size, True)
        except OSError as error:
            if seq == 1 and error.errno == errno.EHOSTUNREACH and loop.time() < self._patience:
                self._seq = 0
                return False
            one.outcome, one.error = Outcome.SEND_ERROR, error.strerror or str(error)
            self._settled(one)
            return True
        if tx_ns:
            one.t2 = tx_ns
        else:
            self.transport.await_stamp(one)
        give_up = loop.time() + plan.timeout_ns / 1e9
        self._open[seq] = one, give_up
        if self._expiry is None:
            self._expiry = loop.call_at(give_up, self._expire, loop)
        return True

    # ------------------------------------------------------------ answers

    def receive(self, payload: memoryview, source: str, qpn: int, sport: int, dscp: int, ttl: int, rx_ns: int) -> None:
        """One packet for our queue pair; see `Receiver`."""
        read_ns = self._clock_ns()
        try:
            header = probe.decode(payload)
        except probe.BadProbeError:
            return
        ours = header.cluster == self._cluster and header.epoch == self.epoch and header.source == NOBODY
        if not ours or header.kind == probe.PROBE:
            return
        self._learn(header)
        known = self._open.get(header.seq)
        one = known[0] if known is not None else self._given_up.get(header.seq)
        if one is None:
            return
        if header.kind == probe.ACK1:
            one.t5, one.t6, one.ttl = rx_ns, read_ns, ttl
            one.sport = header.left or sport
            one.dscp = header.dscp if header.dscp < 64 else -1
            one.polled = bool(header.flags & probe.POLLED)
            if header.flags & probe.STALE:
                self._finish(one, Outcome.STALE)
        else:
            one.responder_ns = header.delay if header.delay < 1 << 63 else header.delay - (1 << 64)
        if one.t5 and one.responder_ns != -1:
            # The send stamp may be later than the answer; by the time-out it is there.
            if one.t2:
                self._finish(one, Outcome.ANSWERED)
            else:
                asyncio.get_running_loop().call_later(STAMP_PATIENCE_S, self._finish, one, Outcome.ANSWERED)

    def _learn(self, header: probe.Header) -> None:
        """Later ACKs tell which of those that were given up had arrived."""
        for seq, lost in self._given_up.items():
            back = header.seq - 1 - seq
            if 0 <= back < probe.HISTORY_BITS:
                lost.arrived = bool(header.history >> back & 1) or bool(lost.arrived)
        for seq in [s for s in self._given_up if header.seq - s > _REMEMBERED]:
            self._place(self._given_up.pop(seq))

    def _place(self, lost: PingProbe) -> None:
        if lost.arrived:
            self.result.lost_back += 1
        elif lost.arrived is not None:
            self.result.lost_there += 1

    def _finish(self, one: PingProbe, outcome: Outcome) -> None:
        """Settle a probe, once."""
        given_up = self._given_up.pop(one.seq, None)
        if self._open.pop(one.seq, None) is None and given_up is None:
            return
        one.late = given_up is not None
        one.outcome = outcome
        if outcome is Outcome.ANSWERED:
            one.settle(ABSURD_NS)
        self._settled(one)

    def _settled(self, one: PingProbe) -> None:
        self.result.count(one)
        self._news.set()
        self._on_probe(one)

    def _expire(self, loop: asyncio.AbstractEventLoop) -> None:
        """Give up what is overdue."""
        self._expiry = None
        now = loop.time()
        while self._open:
            seq, (one, give_up) = next(iter(self._open.items()))
            if give_up > now:
                self._expiry = loop.call_at(give_up, self._expire, loop)
                return
            if one.t5 or one.responder_ns != -1:
                self._finish(one, Outcome.NO_RTT)
                continue
            del self._open[seq]
            one.outcome = Outcome.LOST
            if len(self._given_up) >= _REMEMBERED:
                self._place(self._given_up.pop(next(iter(self._given_up))))
            self._given_up[seq] = one
            self._settled(one)
