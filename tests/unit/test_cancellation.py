"""A part that is told to end does so, also when what it waits for comes in the same instant."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from controller import database
from controller.service import Controller
from pingmesh.bus import Bus
from pingmesh.config import BrokerSettings, Settings
from topology.generate import leaf_spine

T = leaf_spine(2, 2, 2, 1)


async def ended(task: asyncio.Task[Any]) -> bool:
    await asyncio.wait([task], timeout=2)
    return task.cancelled()


async def test_planning_that_is_woken_and_cancelled_at_once_ends() -> None:
    c = Controller(Settings(cluster="lab"), T, database.connect(":memory:"))
    for _ in range(20):
        task = asyncio.create_task(c.loop())
        await asyncio.sleep(0.01)
        c.wake.set()  # as a registration does
        task.cancel()
        assert await ended(task)


class Client:
    """Waits as aiomqtt does: what it waits for is there in the instant of the cancellation."""

    def __init__(self) -> None:
        self.arrived = asyncio.get_running_loop().create_future()

    async def publish(self, *args: object, **options: object) -> None:
        await asyncio.wait_for(self.arrived, 5)  # noqa: TID251 - the very thing


async def test_publishing_that_is_confirmed_and_cancelled_at_once_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    bus = Bus(BrokerSettings(), "test", [], lambda topic, payload: None)
    client = Client()
    monkeypatch.setattr(bus, "_client", client)

    async def talk() -> None:
        await bus.publish("pingmesh/x", b"")
        await asyncio.sleep(30)

    task = asyncio.create_task(talk())
    await asyncio.sleep(0.01)
    client.arrived.set_result(None)
    task.cancel()
    assert await ended(task)


async def test_a_part_that_ends_may_still_say_goodbye(monkeypatch: pytest.MonkeyPatch) -> None:
    bus = Bus(BrokerSettings(), "test", [], lambda topic, payload: None)
    client = Client()
    monkeypatch.setattr(bus, "_client", client)
    said = []

    async def talk() -> None:
        try:
            await asyncio.sleep(30)
        finally:
            await bus.publish("pingmesh/x", b"")
            said.append("goodbye")

    task = asyncio.create_task(talk())
    await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.sleep(0.01)
    client.arrived.set_result(None)
    assert await ended(task)
    assert said == ["goodbye"]
