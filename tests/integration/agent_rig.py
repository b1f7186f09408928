"""A broker and two agents that probe each other over one cable; run by `test_agent_service.py` inside `unshare`.

The broker, and h1's agent, live in the rig's own network namespace; h2's agent in the namespace `h2`. Prints one JSON
object of what was seen; all times in seconds.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from pingmesh import topics
from pingmesh.bus import Bus
from pingmesh.config import BrokerSettings
from pingmesh.lab import namespaces
from pingmesh.messages import (
    PROBER_COLUMNS,
    RESPONDER_COLUMNS,
    WINDOW_NS,
    AgentState,
    Answer,
    Ask,
    Confirm,
    ConfirmResult,
    Exceptions,
    Flow,
    Message,
    Paths,
    Peer,
    ProbeClass,
    ProbeList,
    Register,
    Report,
    RnicInfo,
    decode,
    encode,
    unpack_columns,
)

M = TypeVar("M", bound=Message)
WORK = Path("/run/rig")
BROKER = "10.254.0.1"


def build() -> None:
    namespaces.ip_batch(["link set lo up", "netns add h2"])
    namespaces.ip_batch(
        [
            "link add rnic0 type veth peer name rnic0 netns h2",
            "link add mgmt0 type veth peer name mgmt0 netns h2",
            "addr add 10.0.0.1/24 dev rnic0",
            f"addr add {BROKER}/24 dev mgmt0",
            "link set rnic0 up",
            "link set mgmt0 up",
        ]
    )
    namespaces.ip_batch(
        [
            "link set lo up",
            "addr add 10.0.0.2/24 dev rnic0",
            "addr add 10.254.0.2/24 dev mgmt0",
            "link set rnic0 up",
            "link set mgmt0 up",
        ],
        "h2",
    )


class Rig:
    def __init__(self) -> None:
        self.seen: list[tuple[float, Message, bool]] = []
        self.news = asyncio.Event()
        self.bus = Bus(BrokerSettings(host=BROKER, reconnect_max_s=0.1), "rig", ["pingmesh/v1/lab/#"], self.take)
        self.broker: subprocess.Popen[bytes] | None = None

    def take(self, topic: topics.Topic, payload: bytes) -> None:
        self.seen.append((time.monotonic(), decode(payload, Message, topic.host, topic.cluster), topic.retained))
        self.news.set()

    async def wait(self, kind: type[M], test: Callable[[M], bool], since: float = 0.0) -> M:
        """The first message of a kind since a time that passes a test."""
        async with asyncio.timeout(15):
            while True:
                for at, m, _ in self.seen:
                    if at >= since and isinstance(m, kind) and test(m):
                        return m
                self.news.clear()
                await self.news.wait()

    def start_broker(self) -> None:
        config = WORK / "mosquitto.conf"
        config.write_text(f"listener 1883 {BROKER}\nallow_anonymous true\nuser root\n")
        self.broker = subprocess.Popen(["mosquitto", "-c", str(config)], stderr=subprocess.DEVNULL)

    def stop_broker(self) -> None:
        assert self.broker is not None
        self.broker.terminate()
        self.broker.wait(5)

    def agent(self, host: str, devices: str) -> subprocess.Popen[bytes]:
        code = "from pingmesh.cli.main import entry; entry()"
        argv = [sys.executable, "-c", code, "agent", "--host", host, "--devices", devices, "--cluster", "lab"]
        argv += ["--broker", f"{BROKER}:1883"]
        with (WORK / f"{host}.log").open("ab") as log:
            return subprocess.Popen(namespaces.entering("h2", argv) if host == "h2" else argv, stderr=log)

    async def say(self, kind: str, m: Message, device: str | None = None) -> None:
        retain = device is not None
        await self.bus.publish(topics.Topic("lab", m.host, kind, device), encode(m), qos=1, retain=retain)


def probe_list(host: str, number: int, other: int, to: RnicInfo) -> ProbeList:
    return ProbeList(
        cluster="lab",
        host=host,
        device="rnic0",
        number=number,
        list_version=1,
        classes=[ProbeClass()],
        flows=[Flow(i, other, 50000 + i, 0, 0, 50_000, 1) for i in range(2)],
        peers=[Peer(other, "x/rnic0", to.gid, to.qpn, to.qkey, to.epoch, to.mtu)],
        trace_rate=10.0,
    )


async def session() -> dict[str, Any]:
    out: dict[str, Any] = {}
    rig = Rig()
    rig.start_broker()
    keeping = asyncio.create_task(rig.bus.run())
    await rig.bus.connected.wait()
    h1, h2 = rig.agent("h1", "rnic0,late0"), rig.agent("h2", "rnic0")
    r1, r2 = [await rig.wait(Register, lambda m, h=h: m.host == h) for h in ("h1", "h2")]  # type: ignore[misc]
    out["addresses"] = [r1.rnics[0].address, r2.rnics[0].address]
    for host in ("h1", "h2"):
        await rig.wait(AgentState, lambda m, h=host: m.host == h and m.state == "online")  # type: ignore[misc]

    # Lists: probing both ways, reports by window.
    await rig.say("list", probe_list("h1", 1, 2, r2.rnics[0]), "rnic0")
    await rig.say("list", probe_list("h2", 2, 1, r1.rnics[0]), "rnic0")
    await rig.wait(Paths, lambda m: {(p.role, p.rnic) for p in m.paths} >= {(0, 1), (1, 2)})
    report = await rig.wait(Report, lambda m: m.host == "h1" and bool(m.prober) and bool(m.responder))
    columns = unpack_columns(PROBER_COLUMNS, report.prober[0].columns)
    out["counts"] = [sum(columns[1]) > 0, sum(columns[1]) == sum(columns[2]), report.prober[0].window]
    window = report.prober[0].window

    # A message that is none, then questions while a confirmation runs.
    await rig.bus.publish("pingmesh/v1/lab/h1/ask", b"\xff\x00nonsense")
    await rig.say(
        "ask",
        Confirm(cluster="lab", host="h1", id=5, rnic=1, list_version=1, indexes=[0], count=10, interval_us=50_000),
    )
    asked = time.monotonic()
    await rig.say("ask", Ask(cluster="lab", host="h1", id=6, windows=[(2, r2.rnics[0].epoch, 1, window)]))
    answer = await rig.wait(Answer, lambda m: m.id == 6)
    out["answered_in"] = time.monotonic() - asked
    out["totals"] = sum(unpack_columns(RESPONDER_COLUMNS, answer.responder)[5])
    result = await rig.wait(ConfirmResult, lambda m: m.id == 5)
    confirmed = unpack_columns(PROBER_COLUMNS, result.columns)
    out["confirmed"] = [list(confirmed[1]), list(confirmed[2])]
    out["confirmed_in"] = time.monotonic() - asked

    # A device that comes late, and one that is made anew.
    began = time.monotonic()
    namespaces.ip_batch(["link add late0 type veth peer name late1", "addr add 10.0.9.1/24 dev late0"])
    namespaces.ip_batch(["link set late0 up", "link set late1 up"])
    late = await rig.wait(Register, lambda m: len(m.rnics) == 2 and m.rnics[1].up, began)
    namespaces.ip_batch(
        ["link del late0", "link add late0 type veth peer name late1", "addr add 10.0.9.1/24 dev late0"]
    )
    namespaces.ip_batch(["link set late0 up", "link set late1 up"])
    again = await rig.wait(Register, lambda m: len(m.rnics) == 2 and m.rnics[1].epoch != late.rnics[1].epoch, began)
    out["late"] = [late.rnics[1].device, again.rnics[1].device, again.rnics[0].epoch == r1.rnics[0].epoch]

    # A link goes down and up.
    for up in (False, True):
        began = time.monotonic()
        namespaces.ip_batch([f"link set rnic0 {'up' if up else 'down'}"], "h2")
        await rig.wait(Register, lambda m, up=up: m.host == "h1" and m.rnics[0].up is up, began)  # type: ignore[misc]

        def tells(m: Exceptions, up: bool = up) -> bool:
            # One that was on its way before may still say how it was.
            return m.host == "h1" and m.health is not None and m.health.rnics[0].up is up

        told = await rig.wait(Exceptions, tells, began)
        assert told.health is not None
        out[f"link_{up}"] = [time.monotonic() - began, told.health.rnics[0].up, told.health.rnics[0].flaps]

    # The broker goes away for more than a window.
    rig.stop_broker()
    began = time.monotonic()
    await asyncio.sleep(WINDOW_NS / 1e9 + 1)
    # The agents held for a moment, lest they register before the rig listens again.
    for agent in (h1, h2):
        os.kill(agent.pid, signal.SIGSTOP)
    rig.start_broker()
    async with asyncio.timeout(10):
        await rig.bus.connected.wait()
    for agent in (h1, h2):
        os.kill(agent.pid, signal.SIGCONT)
    for host in ("h1", "h2"):
        await rig.wait(Register, lambda m, h=host: m.host == h, began)  # type: ignore[misc]
    await rig.wait(Report, lambda m: m.host == "h1", began + 7)
    await asyncio.sleep(1.5)
    out["seqs"] = sorted(m.seq for _, m, _ in rig.seen if isinstance(m, Report) and m.host == "h1")

    # A kill is told by the broker, a stop by the agent.
    began = time.monotonic()
    os.kill(h2.pid, signal.SIGKILL)
    await rig.wait(AgentState, lambda m: m.host == "h2" and m.state == "died", began)
    out["killed"] = [m.boot == r2.boot for _, m, _ in rig.seen if isinstance(m, AgentState) and m.state == "died"]
    began = time.monotonic()
    h1.terminate()
    await rig.wait(AgentState, lambda m: m.host == "h1" and m.state == "stopped", began)
    code = await asyncio.to_thread(h1.wait, 5)
    out["stopped"] = [code, time.monotonic() - began]
    await asyncio.sleep(0.3)
    out["last_states"] = {m.host: m.state for _, m, _ in rig.seen if isinstance(m, AgentState)}

    # With a broker that hangs, a stop takes no longer.
    h1 = rig.agent("h1", "rnic0")
    await rig.wait(AgentState, lambda m: m.host == "h1" and m.state == "online", began)
    assert rig.broker is not None
    rig.broker.send_signal(signal.SIGSTOP)
    began = time.monotonic()
    h1.terminate()
    out["stopped_alone"] = [await asyncio.to_thread(h1.wait, 5), time.monotonic() - began]
    rig.broker.send_signal(signal.SIGCONT)
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)
    rig.stop_broker()
    out["log"] = (WORK / "h1.log").read_text()
    return out


def main() -> None:
    namespaces.execute(["mount", "-t", "tmpfs", "tmpfs", "/run"])
    WORK.mkdir()
    namespaces.NETNS_DIRECTORY.mkdir()
    build()
    try:
        print(json.dumps(asyncio.run(session())))
    except BaseException:
        for log in WORK.glob("*.log"):
            print(f"--- {log.name}\n{log.read_text()}", file=sys.stderr)
        raise


if __name__ == "__main__":
    main()
