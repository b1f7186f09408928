"""RNICs in memory on a fabric whose losses, delays and clocks a test decides."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from agent.prober import Prober
from agent.rnic import Rnic
from agent.transport.base import Receiver, Stamped, Target, gid_of
from pingmesh import probe
from pingmesh.messages import (
    PROBER_COLUMNS,
    RESPONDER_COLUMNS,
    Event,
    Flow,
    Peer,
    ProbeClass,
    ProbeList,
    ProberRows,
    unpack_columns,
)

MS = 1_000_000
S = 1_000_000_000
LATENCY = 20_000
START = 1_800_000_000 * S + 1  # just after the start of a window
CLUSTER = probe.cluster_hash("test")
NAMES = ("sent", "arrived", "ack1", "ack2", "lost", "late", "excluded", "send_error", "rtt_sum", "rtt_max")


class FakeClock:
    """Monotonic time goes where the fabric says; the wall clock the kernel stamps with may step."""

    def __init__(self) -> None:
        self.now = 1000 * S
        self.step = 0

    def monotonic_ns(self) -> int:
        return self.now

    def wall_ns(self, monotonic: int) -> int:
        return START + monotonic - 1000 * S

    def stamp(self) -> int:
        return self.wall_ns(self.now) + self.step


@dataclass(frozen=True)
class Packet:
    """What the fabric is asked about."""

    kind: int
    header: probe.Header
    size: int
    dscp: int
    sport: int


@dataclass(frozen=True)
class FakeTarget:
    address: str
    qpn: int
    qkey: int


Fate = Callable[[Packet], int | None]
"""Latency in ns of a packet, None if it is lost."""


class FakeTransport:
    """An RNIC on the fabric. `late_stamps`: send stamps come with the next event, as from a CQ."""

    kind = "fake"
    source_port_honoured: Literal["yes", "no", "unknown"] = "yes"
    clock: Literal["hardware", "software", "kernel"] = "kernel"
    members = 1
    legs = ()

    def __init__(self, fabric: Fabric, device: str, address: str) -> None:
        self.fabric = fabric
        self.device = self.interface = device
        self.address = address
        self.gid = gid_of(address)
        self.mtu = 4096
        self.qpn = self.qkey = 0
        self.rx_dropped = self.bad_frames = self.foreign = self.receives_missing = 0
        self.polled = False
        self.late_stamps = False
        self.fails: OSError | None = None
        self.receiver: Receiver | None = None
        self.sent: Counter[int] = Counter()
        self.renew()
        fabric.transports[address] = self

    def renew(self) -> None:
        self.qpn = next(self.fabric.qpns)
        self.qkey = self.qpn * 3

    def start(self, loop: asyncio.AbstractEventLoop, receiver: Receiver) -> None:
        self.receiver = receiver

    def spin(self) -> None:
        raise AssertionError("only `pingmesh ping --busy` spins")

    def target(self, address: str, qpn: int, qkey: int) -> FakeTarget:
        if ":" in address:
            raise ValueError("another family")
        return FakeTarget(address, qpn, qkey)

    def send(self, target: Target, sport: int, dscp: int, payload: bytes | bytearray, size: int, stamp: bool) -> int:
        if self.fails is not None:
            raise self.fails
        assert isinstance(target, FakeTarget)
        self.sent[probe.decode(payload).kind] += 1
        self.fabric.carry(self, target, bytes(payload).ljust(size, b"\0"), sport, dscp)
        return 0 if self.late_stamps or not stamp else self.fabric.clock.stamp()

    def await_stamp(self, waiter: Stamped) -> None:
        self.fabric.after(1000, lambda: waiter.stamped(self.fabric.clock.stamp()))

    def send_limited(self, address: str, sport: int, dscp: int, ttl: int, payload: bytes, qpn: int = 0) -> None:
        raise NotImplementedError

    def source_port(self, sport: int) -> int:
        return sport

    def take_read_delay(self) -> int:
        return 0

    def watch(self, on_trouble: Callable[[str], None]) -> None:
        pass

    def close(self) -> None:
        self.receiver = None


class Fabric:
    """Delivers packets and ticks probers in the order of time."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.transports: dict[str, FakeTransport] = {}
        self.qpns = itertools.count(100)
        self.fate: Fate = lambda packet: LATENCY
        self.rnics: list[Rnic] = []
        self.events: list[Event] = []
        self.packets: list[Packet] = []
        self._order = itertools.count()
        self._pending: list[tuple[int, int, Callable[[], None]]] = []

    def after(self, delay: int, call: Callable[[], None]) -> None:
        heapq.heappush(self._pending, (self.clock.now + delay, next(self._order), call))

    def carry(self, source: FakeTransport, target: FakeTarget, payload: bytes, sport: int, dscp: int) -> None:
        header = probe.decode(payload)
        packet = Packet(header.kind, header, len(payload), dscp, sport)
        self.packets.append(packet)
        latency = self.fate(packet)
        if latency is None:
            return
        source_qpn = source.qpn

        def deliver() -> None:
            to = self.transports[target.address]
            if to.receiver is None or target.qpn != to.qpn or target.qkey != to.qkey:
                to.foreign += 1
                return
            view = memoryview(payload)
            to.receiver.receive(view, source.address, source_qpn, sport, dscp, 61, self.clock.stamp())

        self.after(latency, deliver)

    def add(self, number: int, *, max_rate: float = 1000.0) -> Rnic:
        """An RNIC `rnicN` at 10.0.0.N."""

        def make(rnic: Rnic) -> Prober:
            return Prober(
                rnic.transport,
                CLUSTER,
                rnic.epoch,
                self.clock,
                self.events.append,
                overdue_ns=100 * MS,
                timeout_ns=500 * MS,
                max_rate=max_rate,
            )

        rnic = Rnic(FakeTransport(self, f"rnic{number}", f"10.0.0.{number}"), CLUSTER, self.clock, make)
        transport(rnic).receiver = rnic
        self.rnics.append(rnic)
        return rnic

    def run(self, ns: int) -> None:
        """Let time pass."""
        end = self.clock.now + ns
        while True:
            probers = [(r.prober.next_ns, r.prober) for r in self.rnics]
            at, prober = min(probers, key=lambda p: p[0])
            if self._pending and self._pending[0][0] <= at:
                at, _, call = self._pending[0]
                if at > end:
                    break
                heapq.heappop(self._pending)
                self.clock.now = max(self.clock.now, at)
                call()
            else:
                if at > end:
                    break
                self.clock.now = max(self.clock.now, at)
                prober.tick(self.clock.now)
        self.clock.now = end

    def kinds(self, kind: int) -> list[Event]:
        return [e for e in self.events if e.kind == kind]


def transport(rnic: Rnic) -> FakeTransport:
    assert isinstance(rnic.transport, FakeTransport)
    return rnic.transport


def peer(number: int, rnic: Rnic) -> Peer:
    t = rnic.transport
    return Peer(number, f"h{number}/{t.device}", t.gid, t.qpn, t.qkey, rnic.epoch, t.mtu)


def make_list(
    number: int,
    peers: list[Peer],
    *,
    flows: int = 1,
    interval_ms: float = 10,
    version: int = 1,
    classes: list[ProbeClass] | None = None,
    max_rate: float = 1000.0,
) -> ProbeList:
    """`flows` flows to each peer, source ports from 0xC000 on, classes in turn."""
    classes = classes or [ProbeClass()]
    entries = [
        Flow(i, p.number, 0xC000 + i, i % len(classes), 0, round(interval_ms * 1000), 0)
        for i, p in enumerate(p for p in peers for _ in range(flows))
    ]
    return ProbeList(
        cluster="test",
        host="h",
        device=f"rnic{number}",
        number=number,
        list_version=version,
        classes=classes,
        flows=entries,
        peers=peers,
        max_rate=max_rate,
    )


def stop(rnic: Rnic, fabric: Fabric, version: int = 99) -> None:
    """No flows any more; what is in flight goes on."""
    rnic.prober.apply_list(make_list(rnic.prober.number, [], version=version), fabric.clock.now)


def total(rows: list[ProberRows]) -> dict[str, int]:
    """Sums over all rows (`rtt_max`: the maximum), by column name."""
    sums = dict.fromkeys(NAMES, 0)
    for row in rows:
        for name, column in zip(NAMES, unpack_columns(PROBER_COLUMNS, row.columns)[1:], strict=True):
            sums[name] = max(sums[name], *column) if name == "rtt_max" else sums[name] + sum(column)
    return sums


def take(rnic: Rnic, fabric: Fabric) -> dict[str, int]:
    """Everything the prober has counted and not reported, as if all windows were complete."""
    return total(rnic.prober.ledger.take_rows(fabric.clock.now, last=True))


def responder_total(packed: bytes) -> dict[str, int]:
    """Sums over RESPONDER_COLUMNS."""
    columns = unpack_columns(RESPONDER_COLUMNS, packed)
    return dict(zip(("received", "ack1", "ack2", "mismatched"), (sum(c) for c in columns[5:]), strict=True))
