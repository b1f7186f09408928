"""A soft RNIC and a verbs one probe each other over a router: what each counts, what the wire shows, what ICRCs do.

The Soft-RoCE device is in the first network namespace, where alone it works; router and soft host are namespaces.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import capture
import pytest

from agent.devices import open_transport
from agent.engine import Engine
from agent.flow import Phase
from agent.interfaces import Netlink
from agent.transport.base import Transport
from agent.transport.soft import SoftTransport
from pingmesh import probe
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

pytestmark = pytest.mark.timeout(300)

VERBS, SOFT = "10.97.0.1", "10.97.0.3"
ROUTER, HOST = "pmvr", "pmvs"
INTERFACE = "pmvi"
CLASSES = [ProbeClass(), ProbeClass(name="large", dscp=10, size=4096)]
FLOWS, INTERVAL_US = 8, 400_000
SECONDS = 5.0
SETTINGS = AgentSettings(timeout_ms=4000, overdue_ms=2000, max_rate=1000, transport="verbs")
PROBER = ("sent", "arrived", "ack1", "ack2", "lost", "late", "excluded", "send_error")
RESPONDER = ("received", "acks1", "acks2", "mismatched")
HEADERS = 20 + 8 + 12 + 8
DELAY_AT = HEADERS + 56
"""Of an IPv4 packet: a field of the probe that no responder looks at."""


def build() -> None:
    namespaces.ip_batch([f"netns add {n}" for n in (ROUTER, HOST)])
    namespaces.ip_batch(
        [
            f"link add {INTERFACE} mtu 4200 type veth peer name to-verbs mtu 4200 netns {ROUTER}",
            f"link add to-soft mtu 4200 netns {ROUTER} type veth peer name eth0 mtu 4200 netns {HOST}",
            f"addr add {VERBS}/31 dev {INTERFACE}",
            f"link set {INTERFACE} up",
        ]
    )
    lines = ["addr add 10.97.0.0/31 dev to-verbs", "addr add 10.97.0.2/31 dev to-soft"]
    namespaces.ip_batch([*lines, "link set to-verbs up", "link set to-soft up"], ROUTER)
    lines = [f"addr add {SOFT}/31 dev eth0", "link set eth0 up", "link set lo up", "route add default via 10.97.0.2"]
    namespaces.ip_batch(lines, HOST)
    namespaces.ip_batch([f"route add 10.97.0.2/31 via 10.97.0.0 dev {INTERFACE}"])
    namespaces.inside(ROUTER, lambda: namespaces.write_sysctls({"net/ipv4/ip_forward": "1"}))
    soft_roce.load_modules()
    soft_roce.add([INTERFACE])


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


@dataclass
class Run:
    """What was counted; the first of each pair are the verbs end's probes."""

    clean: tuple[Counts, Counts]
    spoiled: tuple[Counts, Counts]
    after: tuple[Counts, Counts]
    bad: int
    """Frames that the soft end refused while the router spoiled them."""
    rejected: tuple[int, int]
    packets: list[bytes] = field(repr=False)


def spoil() -> None:
    """The router writes over a byte that no responder looks at, in all RoCE packets: only the ICRC is wrong then."""
    at = (DELAY_AT - 20) * 8
    script = (
        "table ip spoil {\n chain c {\n type filter hook forward priority 0;\n"
        f" udp dport 4791 @th,{at},8 set 0xee\n }}\n}}\n"
    )
    namespaces.run(ROUTER, ["nft", "-f", "-"], text=script)


async def whole() -> Run:
    with Netlink() as netlink:
        verbs = open_transport(SETTINGS, netlink, f"rnic0={soft_roce.device_name(INTERFACE)}")
    soft = namespaces.inside(HOST, lambda: SoftTransport("eth0", SOFT))
    ends = End(1, verbs), End(2, soft)
    try:
        for attempt in range(5):
            # The first packets find the neighbours.
            counts = await phase(ends, 100 + 2 * attempt, 1.0)
            if all(c["sent"] == c["ack2"] > 0 for c in counts):
                break
        sniffer = namespaces.inside(ROUTER, lambda: capture.Sniffer("to-verbs"))
        clean = await phase(ends, 200)
        packets = sniffer.packets()
        sniffer.close()
        spoil()
        bad = soft.bad_frames
        spoiled = await phase(ends, 210)
        bad = soft.bad_frames - bad
        namespaces.run(ROUTER, ["nft", "delete", "table", "ip", "spoil"])
        after = await phase(ends, 220)
        return Run(
            clean,
            spoiled,
            after,
            bad,
            (ends[0].rnic.rejected, ends[1].rnic.rejected),
            packets,
        )
    finally:
        for end in ends:
            end.engine.close()


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    tear_down()
    build()
    try:
        yield asyncio.run(whole())
    finally:
        tear_down()


DIRECTIONS = pytest.mark.parametrize("direction", [0, 1], ids=["verbs-to-soft", "soft-to-verbs"])


@DIRECTIONS
def test_every_probe_is_answered_and_both_ends_count_the_same(run: Run, direction: int) -> None:
    c = run.clean[direction]
    assert c["sent"] >= 0.5 * FLOWS * SECONDS * 1e6 / INTERVAL_US
    assert c["sent"] == c["arrived"] == c["ack1"] == c["ack2"]
    assert c["sent"] == c["received"] == c["acks1"] == c["acks2"]
    assert c["lost"] == c["excluded"] == c["send_error"] == c["mismatched"] == 0


@DIRECTIONS
def test_a_packet_whose_icrc_is_wrong_is_not_taken(run: Run, direction: int) -> None:
    c = run.spoiled[direction]
    assert c["sent"] > 0
    assert c["received"] == c["arrived"] == 0
    assert c["lost"] == c["sent"]
    assert run.rejected == (0, 0)  # none came as far as being read as a probe
    assert run.after[direction]["sent"] == run.after[direction]["ack2"] > 0


def test_the_soft_end_counts_the_frames_that_it_refused(run: Run) -> None:
    assert run.bad == run.spoiled[0]["sent"]


Key = tuple[str, int, int]
"""(who sent it, PROBE, ACK1 or ACK2, length of the packet)."""


def by_kind(packets: list[bytes]) -> dict[Key, bytes]:
    """One packet of each kind."""
    names = {VERBS: "verbs", SOFT: "soft"}
    found: dict[Key, bytes] = {}
    for p in packets:
        source = ".".join(str(b) for b in p[12:16])
        if source in names and len(p) > HEADERS + probe.SIZE:
            found.setdefault((names[source], probe.decode(p[HEADERS:]).kind, len(p)), p)
    return found


# What tells one sender, flow or packet from another, by tshark's names. All else has to be equal.
OWN = {
    *("ip.src", "ip.addr", "ip.src_host", "ip.host", "ip.dst", "ip.dst_host", "ip.checksum", "ip.id", "ip.ttl"),
    *("udp.srcport", "udp.port", "udp.stream", "udp.payload", "udp.time_relative", "udp.time_delta"),
    *("infiniband.bth", "infiniband.bth.destqp", "infiniband.bth.psn", "infiniband.deth", "infiniband.deth.q_key"),
    *("infiniband.deth.srcqp", "infiniband.invariant.crc", "data.data"),
}


def test_frames_of_both_decode_alike(run: Run, tmp_path: Path) -> None:
    kinds = by_kind(run.packets)
    sizes = {kind: {n for s, k, n in kinds if (s, k) == ("verbs", kind)} for kind in (probe.PROBE, probe.ACK1)}
    assert len(sizes[probe.PROBE]) == 2
    assert {k[1:] for k in kinds if k[0] == "verbs"} == {k[1:] for k in kinds if k[0] == "soft"}
    pcap = tmp_path / "both.pcap"
    capture.write_pcap(pcap, list(kinds.values()))
    decoded = dict(zip(kinds, capture.decode(pcap), strict=True))
    for (source, kind, size), layers in decoded.items():
        if source == "soft":
            continue
        other = decoded["soft", kind, size]
        assert list(layers) == list(other)
        assert layers["infiniband"]["infiniband.bth.opcode"] == "100"
        for name in ("ip", "udp", "infiniband", "data"):
            assert told(layers[name]) == told(other[name]), (name, kind, size)


def told(layer: dict[str, Any], own: Callable[[str], bool] = OWN.__contains__) -> dict[str, Any]:
    """All fields by name; values only of those that have to be equal."""
    return {name: None if own(name) else value for name, value in layer.items()}
