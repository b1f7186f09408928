"""A soft RNIC and a verbs one probe each other over a router: what each counts, what the wire shows, what ICRCs do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import capture
import pytest
import routed
from routed import SOFT, VERBS, Counts, phase

from pingmesh import probe
from pingmesh.lab import namespaces

pytestmark = pytest.mark.timeout(600)

HEADERS = 20 + 8 + 12 + 8
"""Bytes of IPv4, UDP, BTH and DETH before the payload."""
DELAY_AT = HEADERS + 56
"""Of a packet: a field of the probe that no responder looks at."""


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
    namespaces.run(routed.ROUTER, ["nft", "-f", "-"], text=script)


async def whole() -> Run:
    ends = routed.verbs_end(1), routed.soft_end(2)
    soft = ends[1].transport
    try:
        for attempt in range(5):
            # The first packets find the neighbours.
            counts = await phase(ends, 100 + 2 * attempt, 1.0)
            if all(c["sent"] == c["ack2"] > 0 for c in counts):
                break
        sniffer = namespaces.inside(routed.ROUTER, lambda: capture.Sniffer("to-verbs"))
        clean = await phase(ends, 200)
        packets = sniffer.packets()
        sniffer.close()
        spoil()
        bad = soft.bad_frames
        spoiled = await phase(ends, 210)
        bad = soft.bad_frames - bad
        namespaces.run(routed.ROUTER, ["nft", "delete", "table", "ip", "spoil"])
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
    routed.tear_down()
    routed.build()
    try:
        yield asyncio.run(whole())
    finally:
        routed.tear_down()


DIRECTIONS = pytest.mark.parametrize("direction", [0, 1], ids=["verbs-to-soft", "soft-to-verbs"])


@DIRECTIONS
def test_every_probe_is_answered_and_both_ends_count_the_same(run: Run, direction: int) -> None:
    c = run.clean[direction]
    assert c["sent"] >= 0.5 * routed.FLOWS * routed.SECONDS * 1e6 / routed.INTERVAL_US
    assert c["sent"] == c["arrived"] == c["ack1"] == c["ack2"]
    assert c["sent"] + c["excluded"] == c["received"] == c["acks1"] == c["acks2"]
    assert c["lost"] == c["send_error"] == c["mismatched"] == 0
    # A process that is interrupted between sending and stamping tells of a delay longer than the round trip took.
    assert c["excluded"] <= c["sent"] / 5


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


Key = tuple[str, int, int, int]
"""(who sent it, PROBE, ACK1 or ACK2, traffic class, length of the packet)."""


def by_kind(packets: list[bytes]) -> dict[Key, bytes]:
    """One packet of each kind."""
    names = {VERBS: "verbs", SOFT: "soft"}
    found: dict[Key, bytes] = {}
    for p in packets:
        source = ".".join(str(b) for b in p[12:16])
        if source in names and len(p) > HEADERS + probe.SIZE:
            found.setdefault((names[source], probe.decode(p[HEADERS:]).kind, p[1], len(p)), p)
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
    assert len({k[1:] for k in kinds}) == 6  # probes and both ACKs of two classes
    assert {k[1:] for k in kinds if k[0] == "verbs"} == {k[1:] for k in kinds if k[0] == "soft"}
    pcap = tmp_path / "both.pcap"
    capture.write_pcap(pcap, list(kinds.values()))
    decoded = dict(zip(kinds, capture.decode(pcap), strict=True))
    for key, layers in decoded.items():
        if key[0] == "soft":
            continue
        other = decoded["soft", *key[1:]]
        assert list(layers) == list(other)
        assert layers["infiniband"]["infiniband.bth.opcode"] == "100"
        for name in ("ip", "udp", "infiniband", "data"):
            assert told(layers[name]) == told(other[name]), (name, key)


def told(layer: dict[str, Any], own: Callable[[str], bool] = OWN.__contains__) -> dict[str, Any]:
    """All fields by name; values only of those that have to be equal."""
    return {name: None if own(name) else value for name, value in layer.items()}
