"""Injects faults into a running lab and takes them back exactly."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import ParamSpec, TypeVar

from pingmesh.lab.faults import host_faults
from pingmesh.lab.faults.carriers import Carriers, Port
from pingmesh.lab.faults.congestion import Congestion
from pingmesh.lab.faults.delay import Delay
from pingmesh.lab.faults.drop_table import DropTables
from pingmesh.lab.faults.drops import Drop, Hook
from pingmesh.lab.faults.errors import FaultError, UnknownNameError
from pingmesh.lab.faults.lab_port import FabricPort, ProcessPort
from pingmesh.lab.faults.places import find_link, find_rnic, port_at
from pingmesh.lab.faults.spec import Action, FaultSpec, Target
from pingmesh.lab.faults.truth import Truth, expect, loss_directions
from topology.model import Link

log = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")


async def _blocking(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Run in a thread; when cancelled, wait for the thread first, so that nothing happens after the undoing."""
    work = asyncio.ensure_future(asyncio.to_thread(function, *args, **kwargs))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        with contextlib.suppress(Exception):
            await work
        raise


@dataclass
class _Active:
    """A fault in the list: its truth, how to undo it, and which rules count for which direction."""

    truth: Truth
    undo: AsyncExitStack
    drops: list[tuple[str, Drop]] = field(default_factory=list)
    """Rules, and the direction that each counts for: that of an RNIC has one for each leg."""


class FaultManager:
    """The faults of one lab. Use it from one event loop; it calls what blocks in threads."""

    def __init__(self, fabric: FabricPort, processes: ProcessPort, rng: random.Random | None = None) -> None:
        """`rng` draws which 5-tuples a share of flows means."""
        self._fabric = fabric
        self._processes = processes
        self._rng = rng or random.Random()
        self._carriers = Carriers(fabric)
        self._tables = DropTables(fabric)
        self._faults: dict[str, _Active] = {}
        self._count = 0
        self._lock = asyncio.Lock()

    async def add(self, spec: FaultSpec) -> Truth:
        """Inject a fault; it is in effect on return. Raises FaultError, and then nothing has changed."""
        expected = expect(self._fabric.topology, spec)
        async with self._lock:
            for other in self._faults.values():
                if other.truth.ended_at is None and other.truth.expected.component == expected.component:
                    raise FaultError(
                        f"{expected.component} already has a fault ({other.truth.spec.text}); clear it first: "
                        f"`pingmesh lab fault clear {other.truth.id}`."
                    )
            self._count += 1
            truth = Truth(f"f{self._count}", spec, expected, time.time_ns())
            fault = _Active(truth, AsyncExitStack())
            try:
                await self._inject(fault)
            except BaseException:
                await fault.undo.aclose()
                raise
            self._faults[truth.id] = fault
            log.info("fault %s: %s", truth.id, spec.text)
            return truth

    async def faults(self) -> list[Truth]:
        """All faults that were not cleared, with their counters now; those that ended by themselves too."""
        async with self._lock:
            for fault in self._faults.values():
                await self._count_drops(fault)
            return [f.truth for f in self._faults.values()]

    async def clear(self, fault_id: str | None = None) -> list[Truth]:
        """Undo one fault or all; returns them with their last counters. Clearing twice is no error.

        Raises FaultError for an id that never was.
        """
        async with self._lock:
            if fault_id is not None and fault_id not in {f"f{n + 1}" for n in range(self._count)}:
                raise UnknownNameError("fault", fault_id, self._faults)
            chosen = [i for i in reversed(self._faults) if fault_id in (None, i)]
            cleared = []
            for i in chosen:
                fault = self._faults[i]
                for _, drop in fault.drops:
                    await _blocking(self._tables.stop, drop)
                await self._count_drops(fault)
                await fault.undo.aclose()
                del self._faults[i]
                if fault.truth.ended_at is None:
                    fault.truth.ended_at = time.time_ns()
                log.info("fault %s cleared: %s", i, fault.truth.spec.text)
                cleared.append(fault.truth)
            return cleared

    async def _count_drops(self, fault: _Active) -> None:
        counted: dict[str, Counter[str]] = {}
        for direction, drop in fault.drops:
            if counts := await _blocking(self._tables.counters, drop.node, drop.key):
                counted.setdefault(direction, Counter()).update(counts)
        fault.truth.counters |= {direction: dict(counts) for direction, counts in counted.items()}

    # ------------------------------------------------------------ each kind of fault

    async def _inject(self, fault: _Active) -> None:
        spec = fault.truth.spec
        match spec.action:
            case Action.LOSS:
                for direction, drop in self._drops(fault.truth.id, spec):
                    fault.undo.push_async_callback(_blocking, self._tables.remove, drop)
                    fault.drops.append((direction, drop))
                    await _blocking(self._tables.install, drop)
            case Action.CONGEST:
                link = loss_directions(find_link(self._fabric.topology, *spec.names), spec.direction)[0]
                congestion = Congestion(fault.truth.id, link, spec.rate_bps)
                fault.undo.push_async_callback(_blocking, self._tables.relieve, congestion)
                await _blocking(self._tables.congest, congestion)
            case Action.DELAY:
                link = find_link(self._fabric.topology, *spec.names)
                for directed in loss_directions(link, spec.direction):
                    delay = Delay(directed, spec.delay_ms, spec.jitter_ms)
                    await _blocking(delay.install, self._fabric)
                    fault.undo.push_async_callback(_blocking, delay.remove, self._fabric)
            case Action.DOWN if spec.target is Target.HOST:
                await self._host_down(fault)
            case Action.DOWN:
                await self._take_down(fault, *self._cut(spec))
            case Action.FLAP:
                ports, links = self._cut(spec)
                fault.undo.push_async_callback(_blocking, self._carriers.release, fault.truth.id)
                await self._background(fault, self._flap(fault.truth.id, ports, links, spec))
            case Action.STARVE:
                needed = await host_faults.needed_share(self._processes, spec.names[0])
                fault.truth.injected_at = time.time_ns()
                await self._background(fault, host_faults.starve(self._processes, spec.names[0], spec.seconds, needed))
            case Action.PAUSE:
                await self._background(fault, host_faults.pause(self._processes, spec.names[0], spec.seconds))
            case Action.RESTART:
                await self._processes.restart(self._process(spec))
                fault.truth.ended_at = time.time_ns()
            case Action.KILL | Action.STOP:
                name = self._process(spec)
                fault.undo.push_async_callback(self._processes.start, name)
                await (self._processes.kill(name) if spec.action is Action.KILL else self._processes.stop(name))

    def _process(self, spec: FaultSpec) -> str:
        return f"agent:{spec.names[0]}" if spec.target is Target.AGENT else spec.target.value

    def _drops(self, key: str, spec: FaultSpec) -> list[tuple[str, Drop]]:
        """The rules of a loss, by the direction they count for."""
        topology = self._fabric.topology

        def drop(suffix: str, node: str, hook: Hook, port: str | None) -> Drop:
            interface = None if port is None else self._fabric.interface(node, port)
            seed = self._rng.getrandbits(32)
            narrow = {"larger_than": spec.larger_than, "dscp": spec.dscp}
            return Drop(f"{key}_{suffix}", node, hook, interface, loss=spec.loss, flows=spec.flows, seed=seed, **narrow)

        match spec.target:
            case Target.LINK:
                return [
                    (d.name, drop(f"d{n}", d.target, Hook.INPUT, port_at(d, d.target)))
                    for n, d in enumerate(loss_directions(find_link(topology, *spec.names), spec.direction))
                ]
            case Target.RNIC:
                hooks = {"tx": Hook.INPUT, "rx": Hook.OUTPUT}
                return [
                    (way, drop(f"{way}{n}", leg.switch, hook, leg.port))
                    for way, hook in hooks.items()
                    if spec.direction in (way, "both")
                    for n, leg in enumerate(find_rnic(topology, spec.names[0]).legs)
                ]
            case _:
                return [("both", drop("all", spec.names[0], Hook.INPUT, None))]

    def _cut(self, spec: FaultSpec) -> tuple[list[Port], list[Link]]:
        """The ports that a fault takes down, and the cables between switches that this cuts."""
        topology = self._fabric.topology
        match spec.target:
            case Target.LINK:
                links = [find_link(topology, *spec.names).link]
                legs = []
            case Target.SWITCH:
                name = spec.names[0]
                links = [d.link for d in topology.out_links[name]]
                legs = [leg for r in topology.rnics_under(name) for leg in r.legs if leg.switch == name]
            case Target.HOST:
                links = []
                legs = [leg for r in topology.hosts[spec.names[0]] for leg in r.legs]
            case _:
                links = []
                legs = list(find_rnic(topology, spec.names[0]).legs)
        ports = [p for k in links for p in ((k.a, k.a_port), (k.b, k.b_port))]
        return ports + [(leg.switch, leg.port) for leg in legs], links

    async def _take_down(self, fault: _Active, ports: list[Port], links: list[Link]) -> None:
        holder, spec = fault.truth.id, fault.truth.spec
        fault.undo.push_async_callback(_blocking, self._carriers.release, holder)
        await _blocking(self._carriers.down, holder, ports)
        if links and spec.reroute_ms is not None:
            await self._background(fault, self._reroute(holder, links, spec.reroute_ms), ends=False)

    async def _reroute(self, holder: str, links: list[Link], delay_ms: int) -> None:
        await asyncio.sleep(delay_ms / 1000)
        await _blocking(self._carriers.withdraw, holder, links)

    async def _flap(self, holder: str, ports: list[Port], links: list[Link], spec: FaultSpec) -> None:
        """Down and up in turn until cancelled."""
        while True:
            await _blocking(self._carriers.down, holder, ports)
            delay = None if spec.reroute_ms is None else spec.reroute_ms / 1000
            if delay is not None and delay < spec.seconds:
                await asyncio.sleep(delay)
                await _blocking(self._carriers.withdraw, holder, links)
                await asyncio.sleep(spec.seconds - delay)
            else:
                await asyncio.sleep(spec.seconds)
            await _blocking(self._carriers.release, holder)
            await asyncio.sleep(spec.seconds)

    async def _host_down(self, fault: _Active) -> None:
        """Links first: a host that loses power says goodbye to nobody, and its broker hears no connection close."""
        host = fault.truth.spec.names[0]
        fault.undo.push_async_callback(self._processes.start, f"agent:{host}")
        fault.undo.push_async_callback(_blocking, self._fabric.set_management, host, up=True)
        await _blocking(self._fabric.set_management, host, up=False)
        await self._take_down(fault, *self._cut(fault.truth.spec))
        await self._processes.kill(f"agent:{host}")

    async def _background(self, fault: _Active, work: Coroutine[None, None, None], *, ends: bool = True) -> None:
        """Run something in the background until the fault is cleared; if it `ends`, so does the fault."""

        async def body() -> None:
            try:
                await work
                if ends:
                    fault.truth.ended_at = time.time_ns()
            except Exception as error:
                log.exception("fault %s failed", fault.truth.id)
                fault.truth.error = str(error)
                fault.truth.ended_at = time.time_ns()

        task = asyncio.create_task(body(), name=f"fault-{fault.truth.id}")

        async def stop() -> None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

        fault.undo.push_async_callback(stop)
        await asyncio.sleep(0)  # its first step is done when the fault counts as injected
