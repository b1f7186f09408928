"""The agent: one process per host. Registers, takes its lists, probes, answers, traces, reports, says goodbye.

It keeps what it was told last: without a controller it probes on, without a broker it spools its reports.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import secrets
import signal
import socket
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, Literal

from agent import icmp
from agent.devices import Opener, find_devices, has_gid, interface_of, named_devices, node_of, open_transport
from agent.engine import Engine, TracedFlow
from agent.health import HealthMonitor
from agent.inbox import Inbox
from agent.interfaces import Netlink, NetlinkEvents
from agent.links import LinkState, LinkWatcher
from agent.publisher import Publisher, Sender
from agent.tracing import Tracing
from agent.transport.base import Transport
from pingmesh import topics
from pingmesh.bus import Bus, Will
from pingmesh.config import Settings
from pingmesh.messages import WINDOW_NS, AgentState, Event, Register, Report, RnicHealth, encode
from pingmesh.version import VERSION

log = logging.getLogger(__name__)

REGISTER_S = 60.0
DEVICE_RETRY_S, DEVICE_CHECK_S = 1.0, 5.0
"""How often devices are looked at: while one is missing, and in case the kernel's word of a change was lost."""
REOPEN_GAP_S = 3.0
"""A device that fails again so soon waits a little before it is opened anew."""
DEVICE_GAP_S = 0.05
"""A node whose containers come and go has link events all the time."""
GOODBYE_S = 0.4
CLOSE_S = 0.3
REPORT_MARGIN_S = 0.05
REPORT_SPREAD_S = 0.3

State = Literal["online", "stopped", "died"]


class NoDevicesError(ValueError):
    """Nothing to probe from."""

    def __init__(self) -> None:
        super().__init__(
            "no device to probe from was found (what reaches the broker does not count); name them with --devices"
        )


async def run(settings: Settings) -> None:
    """Run the agent of this host until SIGTERM or SIGINT.

    Raises icmp.NoRawSocketError without CAP_NET_RAW, NoDevicesError, UnknownTransportError, DeviceNameError,
    TransportError where devices are to be found and there is no RDMA.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    icmp.check_allowed()
    with Netlink() as netlink:
        devices = settings.agent.devices or find_devices(settings.agent, netlink, settings.broker.host)
        if not devices:
            raise NoDevicesError
        await Agent(settings, devices, netlink).run(stop)


class Agent:
    """The parts of the agent, put together."""

    def __init__(self, settings: Settings, devices: list[str], netlink: Netlink) -> None:
        self.host = settings.agent.host or socket.gethostname()
        self.boot = secrets.randbits(32)
        self._settings = settings
        self._spread = random.uniform(0, REPORT_SPREAD_S)
        self._register_due = asyncio.Event()
        self._devices_changed = asyncio.Event()
        system = named_devices(devices)
        self.links = LinkWatcher(netlink, system, self._link_changed, lambda d: interface_of(settings.agent, system[d]))
        self._netlink = netlink
        self._opener = Opener(
            list(system),
            lambda device: open_transport(
                settings.agent, netlink, f"{device}={system[device]}", self._gids.get(device, "")
            ),
        )
        self._system = system
        self._gids: dict[str, str] = {}
        """Under which each RNIC was known first; while that is away, another is a makeshift."""
        self._open: dict[str, tuple[Transport, int]] = {}
        self._nodes: dict[str, Path | None] = {}
        self._opened_at: dict[str, float] = {}
        loop = asyncio.get_running_loop()
        transports = self._opener.attempt(loop.time())
        self.engine = Engine(settings.agent, settings.cluster, self.host, transports, on_event=self._event, loop=loop)
        self.engine.on_late = lambda seconds: self.health.late(seconds)
        self._started_ns = self.engine.wall_ns()
        sender = Sender(settings.cluster, self.host, self.boot, self._send, self.engine.wall_ns)
        self.health = HealthMonitor(
            settings.agent.cpu_budget,
            rnics=self._rnic_health,
            read_delay=lambda: self.engine.take_read_delay() / 1e9,
            on_factor=self._set_rate,
            on_stall=self._stalled,
        )
        self.publisher = Publisher(sender, settings.agent.spool_reports, self.health.peek)
        self.health.spooled = lambda: (len(self.publisher.spool), self.publisher.spool.dropped)
        self.tracing = Tracing(self._flows, self.publisher.path, self.engine.wall_ns)
        self.inbox = Inbox(sender, self.engine, self.tracing, self.health.peek, self._register_due.set)
        self._sender = sender
        self.bus = Bus(
            settings.broker,
            f"agent-{self.host}",
            self.inbox.subscriptions(),
            self.inbox.handle,
            on_connect=self._connected,
            on_disconnect=self.publisher.disconnected,
            will=Will(str(sender.topic(topics.STATE)), encode(self._state("died"))),
        )
        for transport in transports:
            self._opened(transport)

    # ---- life

    async def run(self, stop: asyncio.Event) -> None:
        """Run until `stop`; the goodbye takes at most a second."""
        self.engine.start()
        log.info("agent starts", extra={"host": self.host, "devices": list(self.links.states)})
        try:
            async with asyncio.timeout(None) as deadline, asyncio.TaskGroup() as session:
                bus = session.create_task(self.bus.run(), name="bus")
                state: State = "died"
                try:
                    await self._work(stop)
                    state = "stopped"
                finally:
                    await self._goodbye(state)
                    # The broker may hang: what waits for it is cancelled a second time at the deadline.
                    deadline.reschedule(asyncio.get_running_loop().time() + CLOSE_S)
                    bus.cancel()
        except TimeoutError:
            log.warning("the broker did not answer the goodbye")
        finally:
            self.tracing.close()
            self.engine.close()
        log.info("agent stopped", extra={"host": self.host})

    async def _work(self, stop: asyncio.Event) -> None:
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(work, name=name)
                for name, work in (
                    ("health", self.health.run()),
                    ("publisher", self.publisher.run()),
                    ("tracing", self.tracing.run()),
                    ("reports", self._run_reports()),
                    ("registration", self._run_registration()),
                    ("devices", self._run_devices()),
                )
            ]
            await stop.wait()
            for task in tasks:
                task.cancel()
        await self.inbox.close()

    async def _goodbye(self, state: State) -> None:
        last: list[Coroutine[Any, Any, object]] = []
        if state == "stopped" and not len(self.publisher.spool):
            # What our responder received till now tells the others which way their last probes were lost.
            last.append(self._sender.publish(topics.REPORT, self._make_report()))
        # Both leave at once: after a clean end without a goodbye, for want of time, we would seem to be there, silent.
        last.append(self._publish_state(state))
        with contextlib.suppress(ConnectionError, TimeoutError):
            async with asyncio.timeout(GOODBYE_S):
                await asyncio.gather(*last)

    # ---- broker

    async def _send(self, topic: topics.Topic, payload: bytes, qos: int) -> None:
        await self.bus.publish(topic, payload, qos=qos)

    async def _connected(self) -> None:
        await self._register()
        await self._publish_state("online")
        self.publisher.connected()

    def _state(self, state: State) -> AgentState:
        return AgentState(
            cluster=self._settings.cluster,
            host=self.host,
            boot=self.boot,
            state=state,
            at_ns=self.engine.wall_ns(),
            epochs={r.device: r.epoch for r in self.engine.infos()} if state == "online" else {},
        )

    async def _publish_state(self, state: State) -> None:
        await self.bus.publish(self._sender.topic(topics.STATE), encode(self._state(state)), qos=1, retain=True)

    async def _register(self) -> None:
        message = Register(
            cluster=self._settings.cluster,
            host=self.host,
            boot=self.boot,
            started_ns=self._started_ns,
            rnics=self.engine.infos(),
            software=_software(),
        )
        await self._sender.publish(topics.REGISTER, message, qos=1)

    async def _run_registration(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(REGISTER_S * random.uniform(0.8, 1.2)):
                    await self._register_due.wait()
            self._register_due.clear()
            try:
                await self._register()
                await self._publish_state("online")
            except ConnectionError:
                pass  # on connecting we register anyway
            await asyncio.sleep(0.05)

    # ---- reports

    async def _run_reports(self) -> None:
        lag = int((self._settings.agent.timeout_ms / 1e3 + REPORT_MARGIN_S + self._spread) * 1e9)
        while True:
            now = self.engine.wall_ns()
            due = ((now - lag) // WINDOW_NS + 1) * WINDOW_NS + lag
            await asyncio.sleep((due - now) / 1e9)
            self.publisher.report(self._make_report())

    def _make_report(self) -> Report:
        rows, responder, until_ns = self.engine.take_report()
        return Report(
            cluster=self._settings.cluster,
            host=self.host,
            boot=self.boot,
            seq=self.publisher.spool.next_seq(),
            now_ns=self.engine.wall_ns(),
            until_ns=until_ns,
            prober=rows,
            responder=responder,
            health=self.health.take(),
        )

    # ---- data plane

    def _event(self, event: Event) -> None:
        self.publisher.event(event)
        self.tracing.event(event)

    def _flows(self) -> Iterator[TracedFlow]:
        yield from self.engine.own_flows()
        yield from self.engine.incoming_flows()

    def _set_rate(self, factor: float) -> None:
        self.engine.rate_factor = factor

    def _stalled(self) -> None:
        self.publisher.tell_health()

    def _rnic_health(self, peek: bool) -> list[RnicHealth]:
        rnics = self.engine.rnic_health(peek=peek)
        for rnic in rnics:
            link = self.links.states[rnic.device]
            rnic.up, rnic.flaps = link.up, link.flaps
        return rnics

    def _link_changed(self, device: str, state: LinkState) -> None:
        if device in self._open:
            self.engine.set_link(device, state.up)
        else:
            self._opener.hurry(device)
        self._register_due.set()
        self.publisher.tell_health()

    # ---- devices

    def _opened(self, transport: Transport) -> None:
        device = transport.device
        interface = self._netlink.interface(transport.interface)
        self._open[device] = (transport, interface.index if interface is not None else 0)
        self._opened_at[device] = asyncio.get_running_loop().time()
        self._gids.setdefault(device, transport.gid)
        self._nodes[device] = node_of(self._settings.agent, self._system[device])
        transport.watch(lambda reason: self._trouble(transport, reason))
        self.engine.set_link(device, self.links.up(device))
        try:
            self.tracing.add(transport)
        except OSError as error:
            log.warning("paths cannot be traced: %s", error, extra={"device": device})
        self.inbox.apply_kept(device)
        self._register_due.set()

    def _trouble(self, transport: Transport, reason: str) -> None:
        """A transport is of no more use: it is opened anew, under a new epoch, which is registered at once."""
        device = transport.device
        if self._open.get(device, (None, 0))[0] is not transport:
            return
        log.warning("opened anew: %s", reason, extra={"device": device})
        self.tracing.remove(device)
        del self._open[device]
        transport.close()
        now = asyncio.get_running_loop().time()
        if now - self._opened_at[device] < REOPEN_GAP_S:
            self._opener.wait(device, now)
        else:
            self._opener.hurry(device)
        self._devices_changed.set()

    async def _run_devices(self) -> None:
        changed = self._devices_changed
        events = NetlinkEvents(changed, asyncio.get_running_loop())
        try:
            while True:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(DEVICE_RETRY_S if self._opener.missing else DEVICE_CHECK_S):
                        await changed.wait()
                changed.clear()
                try:
                    self._look_at_devices()
                except OSError as error:
                    log.warning("devices cannot be looked at: %s", error)
                await asyncio.sleep(DEVICE_GAP_S)
        finally:
            events.close()

    def _look_at_devices(self) -> None:
        self.links.poll()
        for device in [d for d, (t, index) in self._open.items() if self._replaced(t, index)]:
            log.warning("device came back or changed its address: opened anew", extra={"device": device})
            self.tracing.remove(device)
            self._open.pop(device)[0].close()
            self._opener.hurry(device)
        for transport in self._opener.attempt(asyncio.get_running_loop().time()):
            self.engine.add(transport)
            self._opened(transport)
            log.info("device opened", extra={"device": transport.device, "address": transport.address})

    def _replaced(self, transport: Transport, index: int) -> bool:
        """Whether what we opened of this device is of no more use; addresses that are gone may come back."""
        node = self._nodes[transport.device]
        if node is not None and not node.exists():
            return True
        first = self._gids[transport.device]
        if transport.gid != first and has_gid(self._settings.agent, self._system[transport.device], first):
            return True
        interface = self._netlink.interface(transport.interface)
        if interface is None:
            # An RDMA device is held in being, half dead, by whoever has it open.
            return transport.kind == "verbs"
        addresses = [str(p.ip) for p in self._netlink.prefixes(transport.interface)]
        return bool(addresses) and (interface.index != index or transport.address not in addresses)


def _software() -> str:
    return f"pingmesh {VERSION}"
