"""A small fabric without agents in namespaces of its own, driven over JSON lines; run by `test_lab_faults.py`.

`python fault_rig.py FAMILY` inside `unshare --mount --net --pid --fork`. Each line of standard input is
`{"op": name, ...}`; the answer is `{"ok": result}` or `{"error": text}`.
"""

from __future__ import annotations

import asyncio
import json
import select
import socket
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from pingmesh.lab import namespaces
from pingmesh.lab.fabric import Fabric
from pingmesh.lab.faults import FaultError, FaultManager, parse
from pingmesh.lab.hosts import NamespaceHosts
from pingmesh.lab.processes import Processes
from topology.generate import leaf_spine

PORT = 4791
SNAPSHOT = """
ip -o addr; ip -o link; ip route show table all; ip -6 route show table all; nft -s list ruleset; tc qdisc
"""


class Rig:
    """2 leaves, 2 spines, 2 hosts a leaf (h1, h2 under leaf1), with `sleep` where agents would be."""

    def __init__(self, family: int) -> None:
        # The names of namespaces live in /run: the machine's own stay as they are.
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "/run"], check=True)
        self.topology = leaf_spine(2, 2, 2, 1, family=family)
        self.fabric = Fabric(self.topology, NamespaceHosts())
        self.fabric.build()
        self.processes = Processes(None)
        self.faults = FaultManager(self.fabric, self.processes)
        self.family = socket.AF_INET6 if family == 6 else socket.AF_INET

    async def start(self) -> None:
        log = Path(tempfile.mkdtemp()) / "log"
        for host in self.topology.hosts:
            self.processes.add(f"agent:{host}", lambda: ["sleep", "1000"], log)
            await self.processes.start(f"agent:{host}")

    def _address(self, host: str) -> str:
        return str(self.topology.hosts[host][0].address)

    def _socket(self, host: str, port: int, dscp: int = 0, ttl: int = 64) -> socket.socket:
        def make() -> socket.socket:
            s = socket.socket(self.family, socket.SOCK_DGRAM)
            s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
            if self.family == socket.AF_INET6:
                s.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_TCLASS, dscp << 2)
                s.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_UNICAST_HOPS, ttl)
            else:
                s.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, dscp << 2)
                s.setsockopt(socket.IPPROTO_IP, socket.IP_TTL, ttl)
            s.bind((self._address(host), port))
            return s

        return namespaces.inside(host, make)

    def op_send(
        self, src: str, dst: str, flows: int = 32, count: int = 10, size: int = 60, dscp: int = 0, ttl: int = 64
    ) -> dict[str, Any]:
        """Send `count` packets on each of `flows` source ports; what arrived by source port."""
        receiver = self._socket(dst, PORT)
        senders = [self._socket(src, 50_000 + i, dscp, ttl) for i in range(flows)]
        refused = 0
        got = dict.fromkeys(range(flows), 0)
        try:
            for _ in range(count):
                for s in senders:
                    try:
                        s.sendto(bytes(size), (self._address(dst), PORT))
                    except OSError:
                        refused += 1
                self._drain(receiver, got, 0.0)
            self._drain(receiver, got, 0.15)
        finally:
            for s in (receiver, *senders):
                s.close()
        return {"sent": flows * count - refused, "received": sum(got.values()), "by_flow": list(got.values())}

    def _drain(self, receiver: socket.socket, got: dict[int, int], patience: float) -> None:
        while select.select([receiver], [], [], patience)[0]:
            _, source = receiver.recvfrom(9000)
            got[source[1] - 50_000] += 1

    def op_rtt(self, src: str, dst: str, flows: int = 16, count: int = 5) -> dict[str, Any]:
        """Round trips on each source port, one after the other; the median by flow in milliseconds."""
        responder = self._socket(dst, PORT)
        lost, medians = 0, []
        for i in range(flows):
            with self._socket(src, 50_000 + i) as s:
                times = []
                for _ in range(count):
                    t = time.monotonic()
                    s.sendto(bytes(60), (self._address(dst), PORT))
                    if not select.select([responder], [], [], 0.5)[0]:
                        lost += 1
                        continue
                    data, back = responder.recvfrom(100)
                    responder.sendto(data, back)
                    if not select.select([s], [], [], 0.5)[0]:
                        lost += 1
                        continue
                    s.recv(100)
                    times.append(1000 * (time.monotonic() - t))
                medians.append(sorted(times)[len(times) // 2] if times else None)
        responder.close()
        return {"lost": lost, "medians": medians}

    def op_ping(self, src: str, dst: str, count: int = 5) -> int:
        """How many ICMP echoes were answered."""
        protocol, request, reply = (58, 128, 129) if self.family == socket.AF_INET6 else (1, 8, 0)
        answered = 0
        with namespaces.inside(src, lambda: socket.socket(self.family, socket.SOCK_RAW, protocol)) as s:
            s.bind((self._address(src), 0))
            for number in range(count):
                body = struct.pack("!HH", 4711, number)
                # The kernel fills in the checksum of ICMPv6 only.
                total = sum(struct.unpack("!4H", struct.pack("!BBH", request, 0, 0) + body))
                checksum = ~((total & 0xFFFF) + (total >> 16)) & 0xFFFF
                s.sendto(struct.pack("!BBH", request, 0, checksum) + body, (self._address(dst), 0))
                while select.select([s], [], [], 0.1)[0]:
                    data = s.recv(2000)[20 if protocol == 1 else 0 :]
                    if data[0] == reply and data[4:8] == body:
                        answered += 1
                        break
        return answered

    def op_snapshot(self) -> dict[str, list[str]]:
        """All that a fault may change, by node; counters are left out."""
        out = {}
        for node in (*self.topology.switches, *self.topology.hosts):
            # Multipath routes of IPv6 list their members in the order of adding.
            lines = sorted(self.fabric.run(node, "sh", "-c", SNAPSHOT).replace("\\", "").splitlines())
            out[node] = [" ".join(line.split()) for line in lines]
        out["management"] = sorted(
            subprocess.run(["ip", "-o", "link"], capture_output=True, text=True).stdout.splitlines()
        )
        return out

    def op_family(self) -> int:
        """4 or 6."""
        return 6 if self.family == socket.AF_INET6 else 4

    def op_agents(self) -> dict[str, str]:
        """State of each agent."""
        return {n: self.processes.get(n).state.value for n in self.processes.names}

    async def op_sleep(self, seconds: float) -> None:
        """Let background work go on."""
        await asyncio.sleep(seconds)

    async def op_add(self, argv: list[str]) -> dict[str, object]:
        """Inject."""
        return (await self.faults.add(parse(argv))).public()

    async def op_list(self) -> list[dict[str, object]]:
        """Faults with counters."""
        return [t.public() for t in await self.faults.faults()]

    async def op_clear(self, id: str | None = None) -> list[dict[str, object]]:
        """Take back."""
        return [t.public() for t in await self.faults.clear(id)]

    async def op_clear_amid(self, src: str, dst: str, count: int) -> dict[str, Any]:
        """Take back while packets are on their way, as `send` sends them; what was sent is told as well."""
        sending = asyncio.create_task(asyncio.to_thread(self.op_send, src, dst, count=count))
        await asyncio.sleep(0.1)
        cleared = await self.op_clear()
        still_sending = not sending.done()
        return {"cleared": cleared, "still_sending": still_sending, "sent": await sending}


async def main() -> None:
    rig = await asyncio.to_thread(Rig, int(sys.argv[1]))
    await rig.start()
    print(json.dumps({"ok": "ready"}), flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        request = json.loads(line)
        try:
            operation = getattr(rig, f"op_{request.pop('op')}")
            if asyncio.iscoroutinefunction(operation):
                result = await operation(**request)
            else:
                result = await asyncio.to_thread(operation, **request)
            answer = {"ok": result}
        except FaultError as error:
            answer = {"error": str(error)}
        except Exception as error:
            answer = {"error": f"unexpected: {error!r}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
