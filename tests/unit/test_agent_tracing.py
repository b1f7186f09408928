from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import cast

import pytest

from agent.engine import TracedFlow
from agent.tracing import Tracing
from agent.transport.base import Transport
from pingmesh.messages import LOST, SLOW, Event, TracedPath


class Wire:
    """A transport whose packets come back at once as the answers of one router, to the socket that listens for them."""

    def __init__(self, device: str, address: str, answers: socket.socket) -> None:
        self.device = self.interface = device
        self.address = address
        self.sent: list[tuple[str, int, int]] = []
        self._answers = answers

    def send_limited(self, address: str, sport: int, dscp: int, ttl: int, payload: bytes, qpn: int = 0) -> None:
        self.sent.append((address, sport, ttl))
        self._answers.send(b"not an answer")
        udp = sport.to_bytes(2) + (4791).to_bytes(2) + (32 + len(payload)).to_bytes(2) + bytes(2)
        inner = bytes.fromhex("450000000000400001110000") + socket.inet_aton(self.address) + socket.inet_aton(address)
        outer = bytes.fromhex("450000000000000040010000") + socket.inet_aton("127.0.0.1") * 2
        self._answers.send(outer + bytes([11, 0, 0, 0, 0, 0, 0, 0]) + inner + udp)


Rig = tuple[Tracing, list[Wire], list[TracedFlow], list[TracedPath]]


@pytest.fixture
async def rig(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Rig]:
    flows: list[TracedFlow] = []
    paths: list[TracedPath] = []
    tracing = Tracing(lambda: flows, lambda path, _: paths.append(path), lambda: 5)
    wires = []
    sockets = []
    for device, address in (("rnic0", "10.0.0.1"), ("rnic1", "10.0.1.1")):
        hears = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        hears.bind(("127.0.0.1", 0))
        hears.setblocking(False)
        says = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        says.connect(hears.getsockname())
        sockets.append(says)
        monkeypatch.setattr("agent.tracing.icmp.open_socket", lambda d, f, s=hears: s)
        wires.append(Wire(device, address, says))
        tracing.add(wires[-1])
        tracing.set_budget(device, 100.0, 100.0)
    yield tracing, wires, flows, paths
    tracing.close()
    for s in sockets:
        s.close()


def flow(wire: Wire, index: int, *, role: int = 0, rnic: int = 1, version: int = 1, sport: int = 0) -> TracedFlow:
    transport = cast(Transport, wire)
    return TracedFlow(role, rnic, version, index, transport, "10.0.9.1", 77, sport or 50000 + index, 26, 0b10, 0)


async def run(tracing: Tracing, seconds: float) -> None:
    task = asyncio.create_task(tracing.run())
    await asyncio.sleep(seconds)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_each_rnic_traces_its_own_tuples_even_where_ports_are_the_same(rig: Rig) -> None:
    tracing, wires, flows, paths = rig
    flows += [flow(wires[0], 0), flow(wires[1], 4, rnic=2, sport=50000)]
    await run(tracing, 0.15)
    assert [w.sent for w in wires] == [[("10.0.9.1", 50000, 2)]] * 2
    assert sorted((p.rnic, p.index, p.hops) for p in paths) == [(1, 0, [(2, "127.0.0.1")]), (2, 4, [(2, "127.0.0.1")])]
    assert tracing.counters() == {"sent": 2, "answered": 2, "unmatched": 2, "send_errors": 0}


async def test_what_a_prober_no_longer_probes_is_not_traced(rig: Rig) -> None:
    tracing, wires, flows, paths = rig
    flows += [flow(wires[0], i, role=1, rnic=7, version=v) for v, i in ((3, 0), (4, 1), (4, 2))]
    flows += [flow(wires[0], 5, role=1, rnic=8, version=2)]
    await run(tracing, 0.2)
    assert sorted((p.rnic, p.list_version, p.index) for p in paths) == [(7, 4, 1), (7, 4, 2), (8, 2, 5)]


async def test_asking_and_losing_reach_the_flow(rig: Rig) -> None:
    tracing, wires, flows, paths = rig
    flows += [flow(wires[0], 0), flow(wires[0], 1, role=1, rnic=7)]
    await run(tracing, 0.15)
    paths.clear()
    assert tracing.ask([(1, 7, 1, 1), (0, 9, 9, 9)]) == 1
    tracing.event(Event(SLOW, 1, 1, 0, 1, 0, 0, 0))
    tracing.event(Event(LOST, 9, 1, 0, 1, 0, 0, 0))
    await run(tracing, 0.15)
    assert [(p.role, p.index) for p in paths] == [(1, 1)], "slow is no loss, and 9 is not our RNIC"


async def test_a_device_that_goes_takes_its_flows_along(rig: Rig) -> None:
    tracing, wires, flows, paths = rig
    flows += [flow(wires[0], 0), flow(wires[1], 1)]
    tracing.remove("rnic0")
    tracing.remove("rnic0")
    await run(tracing, 0.15)
    assert [p.index for p in paths] == [1]
