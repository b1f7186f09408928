"""A verbs RNIC and a soft one with a router between them, and an agent's data plane on either.

The Soft-RoCE device is in the first network namespace, where alone it works; router and soft host are namespaces.
"""

from __future__ import annotations

import asyncio

from agent.devices import open_transport
from agent.engine import Engine
from agent.flow import Phase
from agent.interfaces import Netlink
from agent.transport.base import Transport
from agent.transport.soft import SoftTransport
from pingmesh.config import AgentSettings
from pingmesh.lab import namespaces, soft_roce
from pingmesh.messages import (
    PROBER_COLUMNS,
    RESPONDER_COLUMNS,
    Flow,
    Peer,
    ProbeClass,
    ProbeList,
    ProberRows,
    unpack_columns,
)

VERBS, SOFT = "10.97.0.1", "10.97.0.3"
ROUTER, HOST = "pmvr", "pmvs"
INTERFACE = "pmvi"
DEVICE = soft_roce.device_name(INTERFACE)
CLASSES = [ProbeClass(), ProbeClass(name="large", dscp=10, size=4096)]
FLOWS, INTERVAL_US = 8, 400_000
SECONDS = 5.0
SETTINGS = AgentSettings(timeout_ms=4000, overdue_ms=2000, max_rate=1000, transport="verbs")
PROBER = ("sent", "arrived", "ack1", "ack2", "lost", "late", "excluded", "send_error")
RESPONDER = ("received", "acks1", "acks2", "mismatched")


def build() -> None:
    namespaces.ip_batch([f"netns add {n}" for n in (ROUTER, HOST)])
    namespaces.ip_batch([f"link add to-soft mtu 4200 netns {ROUTER} type veth peer name eth0 mtu 4200 netns {HOST}"])
    namespaces.ip_batch(["addr add 10.97.0.2/31 dev to-soft", "link set to-soft up"], ROUTER)
    lines = [f"addr add {SOFT}/31 dev eth0", "link set eth0 up", "link set lo up", "route add default via 10.97.0.2"]
    namespaces.ip_batch(lines, HOST)
    namespaces.inside(ROUTER, lambda: namespaces.write_sysctls({"net/ipv4/ip_forward": "1"}))
    soft_roce.load_modules()
    connect()


def connect() -> None:
    """The verbs RNIC and its cable."""
    cable = f"link add {INTERFACE} mtu 4200 type veth peer name to-verbs mtu 4200 netns {ROUTER}"
    namespaces.ip_batch([cable, f"addr add {VERBS}/31 dev {INTERFACE}", f"link set {INTERFACE} up"])
    namespaces.ip_batch(["addr add 10.97.0.0/31 dev to-verbs", "link set to-verbs up"], ROUTER)
    add_route()
    soft_roce.add([INTERFACE])


def add_route() -> None:
    """The way to the soft host; it goes when the interface does."""
    namespaces.ip_batch([f"route replace {SOFT}/32 via 10.97.0.0 dev {INTERFACE}"])


def tear_down() -> None:
    for command in (["ip", "link", "del", INTERFACE], ["ip", "netns", "del", ROUTER], ["ip", "netns", "del", HOST]):
        namespaces.execute(command, check=False)


class End:
    """One host's data plane, with one RNIC."""

    def __init__(self, number: int, transport: Transport) -> None:
        self.number = number
        self.transport = transport
        loop = asyncio.get_running_loop()
        self.engine = Engine(SETTINGS, "rig", "h", [transport], on_event=lambda _: None, loop=loop)
        (self.rnic,) = self.engine._rnics.values()
        self.engine.start()

    def peer(self) -> Peer:
        (i,) = self.engine.infos()
        return Peer(self.number, i.device, i.gid, i.qpn, i.qkey, i.epoch, i.mtu)

    def probe(self, to: Peer | None, version: int) -> None:
        flows = [Flow(i, to.number, 0xC000 + 7 * i, i % 2, 0, INTERVAL_US, 0) for i in range(FLOWS)] if to else []
        message = ProbeList(
            cluster="rig",
            host="h",
            device=self.transport.device,
            number=self.number,
            list_version=version,
            classes=CLASSES,
            flows=flows,
            peers=[to] if to else [],
            max_rate=1000,
        )
        assert self.engine.apply_list(message)

    def take(self) -> tuple[list[ProberRows], bytes]:
        """Rows of all windows, those that are not complete yet too, and what was answered."""
        ledger = self.rnic.prober.ledger
        return ledger.take_rows(ledger._clock.monotonic_ns(), last=True), self.engine.take_report()[1]


def soft_end(number: int) -> End:
    return End(number, namespaces.inside(HOST, lambda: SoftTransport("eth0", SOFT)))


def verbs_end(number: int) -> End:
    with Netlink() as netlink:
        return End(number, open_transport(SETTINGS, netlink, f"rnic0={DEVICE}"))


Counts = dict[str, int]


def added_up(rows: list[ProberRows], responder: bytes) -> Counts:
    """What a prober counted, and what the responder at the other end did."""
    out = dict.fromkeys([*PROBER, *RESPONDER], 0)
    for row in rows:
        for name, column in zip(PROBER, unpack_columns(PROBER_COLUMNS, row.columns)[1:], strict=False):
            out[name] += sum(column)
    for name, column in zip(RESPONDER, unpack_columns(RESPONDER_COLUMNS, responder)[5:], strict=True):
        out[name] += sum(column)
    return out


async def phase(ends: tuple[End, End], version: int, seconds: float = SECONDS) -> tuple[Counts, Counts]:
    """Both probe each other for a while, and all in flight settles. Counts of the first's probes, of the second's."""
    a, b = ends
    a.probe(b.peer(), version)
    b.probe(a.peer(), version)
    await asyncio.sleep(seconds)
    for end in ends:
        end.probe(None, version + 1)
    for _ in range(SETTINGS.timeout_ms // 50):
        if not any(_unresolved(end) for end in ends):
            break
        await asyncio.sleep(0.1)
    (rows_a, answered_a), (rows_b, answered_b) = a.take(), b.take()
    return added_up(rows_a, answered_b), added_up(rows_b, answered_a)


def _unresolved(end: End) -> bool:
    return any(
        r.phase in (Phase.WAITING, Phase.OVERDUE, Phase.ANSWERED) for r in end.rnic.prober.ledger._outstanding.values()
    )
