"""Host a, two routers, host b in namespaces; traces from a. Run by `test_agent_paths.py` inside `unshare`.

`python tracer_rig.py FAMILY` prints one JSON object: the paths found, by flow index, and the tracer's counters.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
import sys
import time
from collections.abc import Iterator

from agent.engine import TracedFlow
from agent.tracing import Tracing
from agent.transport.soft import SoftTransport
from pingmesh.lab import namespaces
from pingmesh.messages import TracedPath

PREFIX = {4: "10.0.{}.{}/24", 6: "fd00:{}::{}/64"}
VIA = {4: "10.0.{}.{}", 6: "fd00:{}::{}"}


def build(family: int) -> None:
    """a (.1) net 1 (.2) r1 (.1) net 2 (.2) r2 (.1) net 3 (.2) b."""
    chain = ["a", "r1", "r2", "b"]
    namespaces.ip_batch([f"netns add {n}" for n in chain])
    links = []
    for left, right in itertools.pairwise(chain):
        links.append(f"link add right netns {left} type veth peer name left netns {right}")
    namespaces.ip_batch(links)
    for i, node in enumerate(chain):
        lines = ["link set lo up"]
        nodad = " nodad" if family == 6 else ""
        if i > 0:
            lines += [f"addr add {PREFIX[family].format(i, 2)} dev left{nodad}", "link set left up"]
        if i < 3:
            lines += [f"addr add {PREFIX[family].format(i + 1, 1)} dev right{nodad}", "link set right up"]
        namespaces.inside(node, lambda: sysctls(family))
        namespaces.ip_batch(lines, node)
    routes = {
        "a": [("default", 1, 2)],
        "r1": [(net(family, 3), 2, 2)],
        "r2": [(net(family, 1), 2, 1)],
        "b": [("default", 3, 1)],
    }
    for node, entries in routes.items():
        six = "-6 " if family == 6 else ""
        namespaces.ip_batch([f"{six}route add {to} via {VIA[family].format(n, h)}" for to, n, h in entries], node)


def net(family: int, number: int) -> str:
    return f"10.0.{number}.0/24" if family == 4 else f"fd00:{number}::/64"


def sysctls(family: int) -> None:
    values = {
        "net/ipv4/ip_forward": "1",
        "net/ipv6/conf/all/forwarding": "1",
        "net/ipv4/icmp_ratelimit": "0",
        "net/ipv6/icmp/ratelimit": "0",
    }
    namespaces.write_sysctls(values)


def warm_up(family: int) -> None:
    """Wait till b's kernel refuses a packet: fresh links and neighbours take a second over IPv6."""
    with socket.socket(socket.AF_INET if family == 4 else socket.AF_INET6, socket.SOCK_DGRAM) as s:
        s.settimeout(0.2)
        s.connect((VIA[family].format(3, 2), 9))
        for _ in range(50):
            try:
                s.send(b"x")
                s.recv(1)
            except TimeoutError:
                continue
            except ConnectionRefusedError:
                return
    raise SystemExit("a does not reach b")


async def trace(family: int) -> dict[str, object]:
    source, target = VIA[family].format(1, 1), VIA[family].format(3, 2)
    transport = SoftTransport("right", source)
    # Flow 2 goes nowhere that answers; flow 3 has flow 0's tuple in the other role and wants another hop.
    wanted = [(0, 0, 50000, 0b11, target), (0, 1, 50001, 0b10, target), (0, 2, 50002, 0b100, target)]
    wanted += [(1, 3, 50000, 0b10, target)]

    def flows() -> Iterator[TracedFlow]:
        for role, index, sport, mask, remote in wanted:
            yield TracedFlow(role, 1, 1, index, transport, remote, 99, sport, 26, mask, 0)

    paths: dict[int, TracedPath] = {}
    complete = asyncio.Event()

    def on_path(path: TracedPath, news: bool) -> None:
        paths[path.index] = path
        if len(paths) == len(wanted):
            complete.set()

    tracing = Tracing(flows, on_path, time.time_ns)
    tracing.add(transport)
    tracing.set_budget("right", 50.0, 50.0)
    task = asyncio.create_task(tracing.run())
    async with asyncio.timeout(5):
        await complete.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    counters = tracing.counters()
    tracing.close()
    transport.close()
    return {"paths": {i: p.hops for i, p in sorted(paths.items())}, "counters": counters}


def main() -> None:
    family = int(sys.argv[1])
    namespaces.execute(["mount", "-t", "tmpfs", "tmpfs", "/run"])
    namespaces.execute(["mkdir", "-p", "/run/netns"])
    build(family)
    namespaces.enter_thread("a")
    warm_up(family)
    print(json.dumps(asyncio.run(trace(family))))


if __name__ == "__main__":
    main()
