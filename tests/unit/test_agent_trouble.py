"""A transport of no more use is opened anew: at once, but not in a tight loop, and under a new epoch."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from pathlib import Path

import pytest
from plane_fakes import Fabric, FakeTransport, make_list

from agent import service
from agent.interfaces import Interface
from pingmesh.config import AgentSettings, Settings


class ScriptedNetlink:
    """One interface that is there, with its address."""

    def interface(self, name: str) -> Interface:
        return Interface(name, 7, True, 1, 1500)

    def prefixes(self, name: str) -> list[object]:
        return []


class Opened(FakeTransport):
    def __init__(self, fabric: Fabric) -> None:
        super().__init__(fabric, "rnic1", "10.0.0.1")
        self.closed = False
        self.tell: Callable[[str], None] = lambda _: None

    def watch(self, on_trouble: Callable[[str], None]) -> None:
        self.tell = on_trouble

    def close(self) -> None:
        self.closed = True


class Machine:
    """An agent with one RNIC, and every transport that it opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened: list[Opened] = []
        self.refusal: OSError | None = None
        self.node: Path | None = None
        self.table = ["::ffff:10.0.0.1"]
        monkeypatch.setattr(service, "open_transport", self._open)
        monkeypatch.setattr(service, "node_of", lambda *_: self.node)
        monkeypatch.setattr(service, "has_gid", lambda _, system, gid: gid in self.table)
        settings = Settings(agent=AgentSettings(host="h", devices=["rnic1"]))
        self.agent = service.Agent(settings, ["rnic1"], ScriptedNetlink())  # type: ignore[arg-type]

    def _open(self, _: object, __: object, entry: str, earlier: str) -> Opened:
        if self.refusal is not None:
            raise self.refusal
        self.opened.append(Opened(Fabric()))
        self.opened[-1].gid = earlier if earlier in self.table else self.table[0]
        return self.opened[-1]

    def epoch(self) -> int:
        (info,) = self.agent.engine.infos()
        return info.epoch


@pytest.fixture
async def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


@pytest.fixture
def long_ago(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if all devices had been opened long ago."""
    monkeypatch.setattr(service, "REOPEN_GAP_S", 0.0)


@pytest.mark.usefixtures("long_ago")
async def test_it_is_closed_at_once_and_opened_anew_under_a_new_epoch(machine: Machine) -> None:
    agent, before = machine.agent, machine.epoch()
    agent._register_due.clear()
    machine.opened[0].tell("its GID moved")
    assert machine.opened[0].closed
    assert agent._devices_changed.is_set()
    agent._look_at_devices()
    assert len(machine.opened) == 2
    assert machine.epoch() != before
    assert agent._register_due.is_set()


@pytest.mark.usefixtures("long_ago")
async def test_it_probes_by_the_list_that_it_had(machine: Machine) -> None:
    agent = machine.agent
    wanted = make_list(1, [])
    agent.inbox.lists["rnic1"] = wanted
    machine.opened[0].tell("a queue failed")
    agent._look_at_devices()
    (rnic,) = agent.engine._rnics.values()
    assert (rnic.transport, rnic.prober.list_version) == (machine.opened[1], wanted.list_version)


async def test_one_that_fails_at_once_again_waits_a_little(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = machine.agent
    machine.opened[0].tell("a send failed")
    agent._look_at_devices()
    assert machine.opened[0].closed
    assert len(machine.opened) == 1
    later = asyncio.get_running_loop().time() + 2.0
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: later)
    agent._look_at_devices()
    assert len(machine.opened) == 2


@pytest.mark.usefixtures("long_ago")
async def test_what_an_old_transport_says_is_not_about_the_new_one(machine: Machine) -> None:
    agent = machine.agent
    old = machine.opened[0]
    old.tell("a send failed")
    agent._look_at_devices()
    old.tell("a receive failed")
    assert not machine.opened[1].closed
    agent._look_at_devices()
    assert len(machine.opened) == 2


@pytest.mark.usefixtures("long_ago")
async def test_a_device_that_went_away_is_opened_when_it_is_back(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = machine.agent
    machine.refusal = OSError(errno.ENODEV, "gone")
    machine.opened[0].tell("the device failed or was taken away")
    agent._look_at_devices()
    assert agent._opener.missing == ["rnic1"]
    machine.refusal = None
    later = asyncio.get_running_loop().time() + 2.0
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: later)
    agent._look_at_devices()
    assert agent._opener.missing == []
    assert len(machine.opened) == 2


@pytest.mark.usefixtures("long_ago")
async def test_a_device_whose_node_is_gone_is_let_go(machine: Machine, tmp_path: Path) -> None:
    """Its driver may wait for that, and tell nobody."""
    agent = machine.agent
    machine.node = tmp_path / "uverbs0"
    machine.node.mkdir()
    machine.opened[0].tell("a queue failed")
    agent._look_at_devices()
    agent._look_at_devices()
    assert not machine.opened[1].closed
    machine.node.rmdir()
    machine.node = tmp_path
    machine.refusal = OSError(errno.ENODEV, "gone")
    agent._look_at_devices()
    assert machine.opened[1].closed
    assert agent._opener.missing == ["rnic1"]


@pytest.mark.usefixtures("long_ago")
async def test_the_first_gid_is_taken_up_again_when_it_is_back(machine: Machine) -> None:
    """While a port flaps, an address may be away for a moment, and another is there."""
    agent = machine.agent
    first, other = machine.table[0], "::ffff:10.9.9.9"
    machine.table = [other]
    machine.opened[0].tell(f"its GID {first} is gone")
    agent._look_at_devices()
    assert machine.opened[1].gid == other
    agent._look_at_devices()
    assert not machine.opened[1].closed
    machine.table = [other, first]
    agent._look_at_devices()
    assert machine.opened[1].closed
    assert machine.opened[2].gid == first
    agent._look_at_devices()
    assert len(machine.opened) == 3
