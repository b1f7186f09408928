"""Two agents' data planes in namespaces with a router between them. Run by `test_agent_plane.py` inside `unshare`.

`python plane_rig.py FAMILY PCAP` prints one JSON object: what each end counted and what the router's rules counted,
for a clean fabric, for losses in either direction, for garbage, and with the link down. PCAP gets what crossed the
router in the clean part.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import socket
import struct
import sys
from pathlib import Path

from agent import frames
from agent.engine import Engine
from agent.transport import sockets
from agent.transport.soft import SoftTransport
from pingmesh.config import AgentSettings
from pingmesh.lab import namespaces
from pingmesh.messages import (
    PROBER_COLUMNS,
    RESPONDER_COLUMNS,
    Confirm,
    Event,
    Flow,
    Peer,
    ProbeClass,
    ProbeList,
    unpack_columns,
)

ADDRESS = {4: ("10.0.1.1", "10.0.2.1"), 6: ("fd00:1::1", "fd00:2::1")}
GATEWAY = {4: ("10.0.1.2", "10.0.2.2"), 6: ("fd00:1::2", "fd00:2::2")}
BITS = {4: 24, 6: 64}
CLASSES = [ProbeClass(), ProbeClass(name="large", dscp=10, size=4096)]
FLOWS, INTERVAL_US = 20, 100_000
NAMES = ("sent", "arrived", "ack1", "ack2", "lost", "late", "excluded", "send_error")


def build(family: int) -> None:
    nodes = ("a", "b")
    namespaces.ip_batch([f"netns add {n}" for n in ("a", "r", "b")])
    namespaces.ip_batch(
        [f"link add to-{n} mtu 4200 netns r type veth peer name eth0 mtu 4200 netns {n}" for n in nodes]
    )
    nodad = " nodad" if family == 6 else ""
    for node, own, gateway in zip(nodes, ADDRESS[family], GATEWAY[family], strict=True):
        namespaces.ip_batch([f"addr add {gateway}/{BITS[family]} dev to-{node}{nodad}", f"link set to-{node} up"], "r")
        six = "-6 " if family == 6 else ""
        lines = [f"addr add {own}/{BITS[family]} dev eth0{nodad}", "link set eth0 up", "link set lo up"]
        namespaces.ip_batch(lines, node)
        namespaces.ip_batch([f"{six}route add default via {gateway}"], node)
    values = {"net/ipv4/ip_forward": "1", "net/ipv6/conf/all/forwarding": "1", "net/ipv4/icmp_ratelimit": "0"}
    namespaces.inside("r", lambda: namespaces.write_sysctls(values))


def rule(text: str) -> None:
    """The router's one rule; it drops and counts."""
    script = f"table inet t {{\n chain c {{\n type filter hook forward priority 0;\n {text} counter drop\n }}\n }}\n"
    namespaces.run("r", ["nft", "-f", "-"], text=script)


def dropped() -> int:
    """What the rule dropped, and remove it."""
    listing = namespaces.run("r", ["nft", "list", "table", "inet", "t"])
    namespaces.run("r", ["nft", "delete", "table", "inet", "t"])
    found = re.search(r"counter packets (\d+)", listing)
    assert found is not None
    return int(found[1])


class Sniffer:
    """Everything that crosses the router on a's side."""

    def __init__(self) -> None:
        self.socket = namespaces.inside("r", self._open)
        self.packets: list[bytes] = []

    def _open(self) -> socket.socket:
        s = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(3))
        s.bind(("to-a", 3))
        s.setblocking(False)
        return s

    def drain(self) -> None:
        while True:
            try:
                packet = self.socket.recv(9000)
            except BlockingIOError:
                return
            self.packets.append(packet)

    def write(self, path: str) -> None:
        raw_ip = 101
        data = struct.pack("<IHHiIII", 0xA1B2C3D4, 2, 4, 0, 0, 65535, raw_ip)
        for p in self.packets:
            if p[0] >> 4 in (4, 6):
                data += struct.pack("<IIII", 0, 0, len(p), len(p)) + p
        Path(path).write_bytes(data)


class End:
    """One host's data plane."""

    def __init__(self, node: str, number: int, address: str, loop: asyncio.AbstractEventLoop) -> None:
        self.number = number
        self.transport = namespaces.inside(node, lambda: SoftTransport("eth0", address))
        self.events: list[Event] = []
        self.engine = Engine(
            AgentSettings(max_rate=1000), "rig", node, [self.transport], on_event=self.events.append, loop=loop
        )
        self.engine.start()

    def peer(self) -> Peer:
        (i,) = self.engine.infos()
        return Peer(self.number, f"{i.device}", i.gid, i.qpn, i.qkey, i.epoch, i.mtu)

    def probe(self, to: Peer | None, version: int) -> None:
        flows = [Flow(i, to.number, 0xC000 + 7 * i, i % 2, 0, INTERVAL_US, 3) for i in range(FLOWS)] if to else []
        message = ProbeList(
            cluster="rig",
            host="h",
            device="eth0",
            number=self.number,
            list_version=version,
            classes=CLASSES,
            flows=flows,
            peers=[to] if to else [],
            max_rate=1000,
        )
        assert self.engine.apply_list(message)


def counts(a: End, b: End) -> dict[str, int]:
    """What both counted since the last call; windows not complete yet included."""
    out = dict.fromkeys([*NAMES, "received", "acks1", "acks2", "mismatched"], 0)
    (prober,) = a.engine._rnics.values()
    for row in prober.prober.ledger.take_rows(prober.prober._clock.monotonic_ns(), last=True):
        for name, column in zip(NAMES, unpack_columns(PROBER_COLUMNS, row.columns)[1:], strict=False):
            out[name] += sum(column)
    _, packed, _ = b.engine.take_report()
    columns = unpack_columns(RESPONDER_COLUMNS, packed)[5:]
    for name, column in zip(("received", "acks1", "acks2", "mismatched"), columns, strict=True):
        out[name] += sum(column)
    return out


async def phase(a: End, b: End, version: int, seconds: float = 1.0) -> dict[str, int]:
    """Probe for a while, and let everything in flight settle."""
    a.probe(b.peer(), version)
    await asyncio.sleep(seconds)
    a.probe(None, version + 1)
    await asyncio.sleep(0.6)
    return counts(a, b)


async def run(family: int, pcap: str) -> dict[str, object]:
    loop = asyncio.get_running_loop()
    a = End("a", 1, ADDRESS[family][0], loop)
    b = End("b", 2, ADDRESS[family][1], loop)
    out: dict[str, object] = {}
    for attempt in range(10):
        # Fresh links and neighbours take a while, over IPv6 seconds.
        if (await phase(a, b, 100 + 2 * attempt, 0.5))["lost"] == 0:
            break
    a.events.clear()

    sniffer = Sniffer()
    loop.add_reader(sniffer.socket.fileno(), sniffer.drain)
    out["clean"] = await phase(a, b, 200)
    out["events"] = len(a.events)
    a.probe(b.peer(), 210)
    confirm = Confirm(
        cluster="rig", host="h", id=5, rnic=1, list_version=210, indexes=[0, 1], count=10, interval_us=5000
    )
    epoch, packed = await a.engine.confirm(confirm)
    out["confirmed"] = [list(c) for c in unpack_columns(PROBER_COLUMNS, packed)[:6]]
    window = (1, epoch, 210, 0x8000_0005)
    out["confirmed_there"] = [list(c) for c in unpack_columns(RESPONDER_COLUMNS, b.engine.responder_totals([window]))]
    out["own_flows"] = len(list(a.engine.own_flows()))
    out["incoming_flows"] = sorted({f.sport for f in b.engine.incoming_flows()})
    a.probe(None, 211)
    await asyncio.sleep(0.1)
    loop.remove_reader(sniffer.socket.fileno())
    sniffer.drain()
    sniffer.write(pcap)
    counts(a, b)

    for name, towards, version in (("forward", "to-b", 300), ("reverse", "to-a", 310)):
        rule(f"oifname {towards} udp dport 4791 numgen random mod 100 < 30")
        out[name] = {**await phase(a, b, version, 2.0), "dropped": dropped()}
    rule("oifname to-b udp length > 2000")
    out["large"] = {**await phase(a, b, 320), "dropped": dropped()}

    before = b.engine.rnic_health()[0]
    rng = random.Random(1)
    source = namespaces.inside("a", lambda: sockets.open_raw("eth0", ADDRESS[family][0], family))
    for i in range(300):
        junk = rng.randbytes(rng.randrange(0, 200))
        if i % 3 == 0:
            # Right down to the ICRC, but nobody's queue pair.
            target = a.transport.target(ADDRESS[family][1], 3, 4)
            head, crc = a.transport._head(target, 0xC000, len(junk) & ~3)
            frame = bytearray(head + junk[: len(junk) & ~3] + bytes(frames.TAIL))
            frames.put_icrc(frame, memoryview(frame), crc)
            if family == 6:
                frames.add_checksum6(frame, target.pseudo)
        else:
            frame = bytearray(struct.pack("!HHHH", 0xC000, 4791, 8 + len(junk), 0) + junk)
        source.sendto(frame, (ADDRESS[family][1], 0))
        if i % 20 == 0:
            await asyncio.sleep(0.01)
    for ttl in (1, 2, 5):
        a.transport.send_limited(ADDRESS[family][1], 0xC001, 26, ttl, b"trace", 5)
    await asyncio.sleep(0.1)
    source.close()
    after = b.engine.rnic_health()[0]
    out["junk"] = {"bad": after.bad_frames, "foreign": after.foreign, "before": before.bad_frames + before.foreign}
    out["after_junk"] = await phase(a, b, 330)

    a.events.clear()
    namespaces.ip_batch(["link set eth0 down"], "a")
    down = await phase(a, b, 340)
    namespaces.ip_batch(["link set eth0 up"], "a")
    gateway = GATEWAY[family][0]
    if family == 6:
        namespaces.ip_batch([f"addr replace {ADDRESS[6][0]}/64 dev eth0 nodad"], "a")
    namespaces.ip_batch([f"{'-6 ' if family == 6 else ''}route replace default via {gateway}"], "a")
    out["down"] = {**down, "events": sorted({e.kind for e in a.events})}
    out["up_again"] = await phase(a, b, 350, 2.0)
    a.engine.close()
    b.engine.close()
    a.engine.close()
    return out


def main() -> None:
    family = int(sys.argv[1])
    namespaces.execute(["mount", "-t", "tmpfs", "tmpfs", "/run"])
    namespaces.execute(["mkdir", "-p", "/run/netns"])
    build(family)
    print(json.dumps(asyncio.run(run(family, sys.argv[2]))))


if __name__ == "__main__":
    main()
