"""What befalls a verbs agent's device: it goes on without a restart, under a new epoch, and nothing is left over."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
import routed
import vm_lab

from agent import service
from agent.interfaces import Netlink
from pingmesh.config import AgentSettings, BrokerSettings, Settings
from pingmesh.messages import Peer

pytestmark = pytest.mark.timeout(600)

REOPENINGS = 20
PATIENCE_S = 60.0


@pytest.fixture(scope="module", autouse=True)
def fabric() -> Iterator[None]:
    routed.tear_down()
    routed.build()
    yield
    routed.tear_down()


class Running:
    """An agent on the verbs RNIC, without a broker, and a soft RNIC that probes it."""

    def __init__(self, agent: service.Agent, soft: routed.End) -> None:
        self.agent = agent
        self.soft = soft
        self._version = 0

    def peer(self) -> Peer:
        (i,) = self.agent.engine.infos()
        return Peer(1, i.device, i.gid, i.qpn, i.qkey, i.epoch, i.mtu)

    @property
    def ready(self) -> bool:
        """Whether the device is open and its port up."""
        opened = self.agent._open.get("rnic0")
        return opened is not None and opened[0]._refusal is None  # type: ignore[attr-defined]

    async def until(self, what: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not what():  # noqa: ASYNC110 (nothing tells)
                await asyncio.sleep(0.1)

    async def reopened(self, before: Peer) -> None:
        """Wait for another epoch."""
        await self.until(lambda: self.ready and self.peer().epoch != before.epoch)

    async def renewed(self, before: Peer) -> Peer:
        """Wait for another epoch, and for probes to be answered under it."""
        await self.reopened(before)
        await self.answers()
        return self.peer()

    async def answers(self) -> None:
        """Wait until a probe of the soft RNIC is answered; it is told of each new epoch, as by a controller."""
        ledger = self.soft.rnic.prober.ledger
        aimed: Peer | None = None

        def answered() -> bool:
            nonlocal aimed
            if aimed != self.peer():
                aimed = self.peer()
                self._probe(aimed)
            rows = ledger.take_rows(ledger._clock.monotonic_ns(), last=True)
            return routed.added_up(rows, b"")["ack2"] > 0

        await self.until(answered)
        self._probe(None)

    def _probe(self, to: Peer | None) -> None:
        self._version += 1
        self.soft.probe(to, self._version)


@contextlib.asynccontextmanager
async def running() -> AsyncIterator[Running]:
    settings = Settings(
        cluster="rig",
        broker=BrokerSettings(port=9),
        agent=AgentSettings(host="h", transport="verbs", devices=[f"rnic0={routed.DEVICE}"], cpu_budget=1.0),
    )
    stop = asyncio.Event()
    with Netlink() as netlink:
        agent = service.Agent(settings, list(settings.agent.devices or ()), netlink)
        task = asyncio.create_task(agent.run(stop), name="agent")
        soft = routed.soft_end(2)
        try:
            it = Running(agent, soft)
            await it.answers()
            yield it
        finally:
            soft.engine.close()
            stop.set()
            await task


def sh(command: str) -> None:
    vm_lab.sh(*command.split())


async def test_a_port_that_flaps() -> None:
    async with running() as it:
        before = it.peer()
        sh(f"ip link set {routed.INTERFACE} down")
        await it.until(lambda: not it.ready)
        sh(f"ip link set {routed.INTERFACE} up")
        routed.add_route()
        after = await it.renewed(before)
        assert after.gid == before.gid
        assert after.qpn != before.qpn
        assert it.agent.links.states["rnic0"].flaps >= 2


async def test_a_gid_that_moves_to_another_index() -> None:
    async with running() as it:
        before = it.peer()
        index = vm_lab.gid_index(routed.INTERFACE, routed.VERBS)
        try:
            sh(f"ip addr del {routed.VERBS}/31 dev {routed.INTERFACE}")
            sh(f"ip addr add 10.99.0.9/32 dev {routed.INTERFACE}")
            sh(f"ip addr add {routed.VERBS}/31 dev {routed.INTERFACE}")
            routed.add_route()
            after = await it.renewed(before)
        finally:
            sh(f"ip addr del 10.99.0.9/32 dev {routed.INTERFACE}")
        assert vm_lab.gid_index(routed.INTERFACE, routed.VERBS) not in (None, index)
        assert after.gid == before.gid


async def test_a_device_that_is_taken_away_and_given_back() -> None:
    async with running() as it:
        before = it.peer()
        # It returns when nobody has the device open any more: the agent has to let go by itself.
        taking = await asyncio.create_subprocess_exec("rdma", "link", "del", routed.DEVICE)
        async with asyncio.timeout(PATIENCE_S):
            assert await taking.wait() == 0
        await it.until(lambda: not it.agent._open)
        sh(f"rdma link add {routed.DEVICE} type rxe netdev {routed.INTERFACE}")
        await it.renewed(before)


async def test_an_interface_that_is_deleted_and_made_again() -> None:
    async with running() as it:
        before = it.peer()
        await asyncio.to_thread(subprocess.run, ["ip", "link", "del", routed.INTERFACE], check=True)
        await it.until(lambda: not it.agent._open)
        await asyncio.to_thread(routed.connect)
        await it.renewed(before)


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def test_descriptors_after_many_reopenings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "REOPEN_GAP_S", 0.0)
    async with running() as it:
        found = []
        for _ in range(REOPENINGS):
            before = it.peer()
            it.agent._trouble(it.agent._open["rnic0"][0], "a test")
            await it.reopened(before)
            found.append(descriptors())
        await it.answers()
        assert max(found) - min(found) <= 2, found
        assert found[-1] <= found[0], found
