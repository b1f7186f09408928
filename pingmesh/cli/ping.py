"""`pingmesh ping`: one RNIC to another, now, with every delay on its own."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import secrets
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import msgspec

from agent.ping import Pinger, Plan
from agent.ping_probe import PingProbe, PingResult
from agent.ping_server import PingServer
from agent.transport.base import Transport
from agent.transport.verbs import labels
from pingmesh import probe
from pingmesh.cli import ask, ping_ends, ping_lab, ping_render
from pingmesh.cli.endpoint import add_controller_argument, controller_address
from pingmesh.cli.exits import Exit
from pingmesh.cli.ping_ends import Destination, PingError, Source
from pingmesh.cli.ping_render import probe_json
from pingmesh.config import AgentSettings, Settings, load

HELP = (
    "Measure the round trip between two RNICs: of the network, of the prober and of the responder, apart. SRC is an "
    "RNIC of this host (h1/rnic0), a device or an address of it; DST an RNIC's name, whose agent answers, or what "
    "`pingmesh ping --serve` printed there. In a lab any host of it may be SRC. Exit code 1: nothing was answered."
)
DEFAULT_TRAFFIC_CLASS = 104


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `pingmesh ping`."""
    parser.add_argument("ends", nargs="*", metavar="SRC DST", help="SRC may be left out where --device is given")
    parser.add_argument("--device", help="device to send from, as the transport names it")
    parser.add_argument("--transport", choices=("soft", "verbs"), help="default: that of SRC's agent")
    parser.add_argument("--gid-index", type=int, metavar="N", help="verbs: this GID instead of the one chosen by rule")
    parser.add_argument(
        "--traffic-class", type=int, default=DEFAULT_TRAFFIC_CLASS, metavar="N", help="DSCP x 4 (default %(default)s)"
    )
    parser.add_argument("--flow-label", type=lambda t: int(t, 0), metavar="N", help="gives the UDP source port")
    parser.add_argument("--sport", type=int, metavar="PORT", help="UDP source port (default: drawn)")
    parser.add_argument("--count", "-c", type=int, default=10, metavar="N", help="probes; 0: until Ctrl-C (default 10)")
    parser.add_argument(
        "--interval",
        "-i",
        type=float,
        default=0.1,
        metavar="SECONDS",
        help="between probes; 0: each as soon as the one before is answered (default 0.1)",
    )
    parser.add_argument("--timeout", type=float, default=1.0, metavar="SECONDS", help="per probe (default 1)")
    parser.add_argument("--size", type=int, default=probe.SIZE, metavar="BYTES", help="UD payload (default 64)")
    parser.add_argument("--verbose", "-v", action="store_true", help="a line for each probe, however fast")
    parser.add_argument("--busy", action="store_true", help="wait with a busy core: waking up is not measured then")
    parser.add_argument("--serve", action="store_true", help="be the far end: print what the near end takes")
    parser.add_argument("--cluster", help="whose agents are probed (default: the controller's, else as configured)")
    parser.add_argument("--config", metavar="FILE", help="configuration file")
    parser.add_argument("--shown-as", nargs=2, help=argparse.SUPPRESS)
    add_controller_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Exit code 0 if anything was answered, 1 if nothing was, 2 if it could not be tried."""
    try:
        check(args)
        settings = load(args.config)
        return _serve(args, settings) if args.serve else _ping(args, settings)
    except PingError as error:
        print(f"pingmesh: {error}", file=sys.stderr)
        return Exit.USAGE


def check(args: argparse.Namespace) -> None:
    """What argparse cannot see. Raises PingError."""
    limits = (
        ("--count", args.count, 0, 10_000_000),
        ("--interval", args.interval, 0, 3600),
        ("--timeout", args.timeout, 0.001, 60),
        ("--traffic-class", args.traffic_class, 0, 255),
        ("--flow-label", args.flow_label, 0, (1 << 20) - 1),
        ("--sport", args.sport, 1, 65535),
        ("--gid-index", args.gid_index, 0, 65535),
    )
    for flag, value, low, high in limits:
        if value is not None and not low <= value <= high:
            raise PingError(f"{flag} {value} is not allowed: give {low} to {high}")
    if args.traffic_class % 4:
        raise PingError(
            f"--traffic-class {args.traffic_class}: its lowest two bits are ECN, which is the network's: give a "
            f"multiple of 4, such as {args.traffic_class & ~3}"
        )
    if args.size < probe.SIZE or args.size % 4:
        raise PingError(f"--size {args.size} is not allowed: give a multiple of 4 from {probe.SIZE}")
    if args.sport is not None and args.flow_label is not None:
        raise PingError("--flow-label gives the source port: leave out --sport or --flow-label")
    if args.serve and len(args.ends) > 1:
        raise PingError("--serve takes one end: the device, address or RNIC of this host to answer from")
    if not args.serve and len(args.ends) not in ((1, 2) if args.device else (2,)):
        raise PingError("give SRC and DST: pingmesh ping h1/rnic0 h4/rnic0")


def drawn_port() -> int:
    """Any of the RoCE source ports."""
    return labels.FIRST_PORT | secrets.randbelow(0x4000)


def _ping(args: argparse.Namespace, settings: Settings) -> int:
    controller = controller_address(args.controller)
    text = args.ends[0] if len(args.ends) == 2 else None
    known, cluster = look_up(controller, text, args.ends[-1])
    target = ping_ends.destination(args.ends[-1], known, controller)
    agent = agent_settings(args, settings, known.get(text or ""))
    source = ping_ends.source(text, args.device, known, ping_ends.local_addresses(agent.transport))
    cluster = args.cluster or cluster or settings.cluster
    if source is None:
        assert text is not None
        address = known[text]["address"] if text in known else None
        return ping_lab.enter(args, text, address, target, cluster, controller)
    if args.shown_as:
        source, target = source._replace(name=args.shown_as[0]), target._replace(name=args.shown_as[1])
    transport = open_transport(agent, source)
    try:
        plan = _plan(args, transport, target, cluster)
        return asyncio.run(_measure(args, source, target, transport, plan, controller))
    finally:
        transport.close()


def look_up(controller: str, source: str | None, target: str) -> tuple[dict[str, dict[str, Any]], str | None]:
    """What the controller knows of the RNICs named, and its cluster's name. It is asked only if it has to be."""
    names = [n for n in (source, target) if n is not None and ping_ends.is_name(n)]
    if not names:
        return {}, None
    try:
        known = ping_ends.registered(controller, names)
        return known, str(ask.get(controller, "/status")["cluster"])
    except ConnectionError:
        if ping_ends.is_name(target):
            raise
        return {}, None


def agent_settings(args: argparse.Namespace, settings: Settings, entry: dict[str, Any] | None) -> AgentSettings:
    """The transport: as asked for, else that of the RNIC's agent, else as configured."""
    kind = args.transport or (entry or {}).get("transport") or settings.agent.transport
    if args.gid_index is not None and kind != "verbs":
        raise PingError("--gid-index is for the verbs transport: leave it out, or add --transport verbs")
    index = settings.agent.gid_index if args.gid_index is None else args.gid_index
    return msgspec.structs.replace(settings.agent, transport=kind, gid_index=index)


def open_transport(agent: AgentSettings, source: Source) -> Transport:
    """A transport of our own for the source. Raises PingError."""
    # Imported here: `--help` should not wait for a transport.
    from agent import devices
    from agent.interfaces import Netlink

    try:
        if agent.transport == "soft" and source.address is not None:
            from agent.transport.soft import SoftTransport

            return SoftTransport(source.device, source.address)
        with Netlink() as netlink:
            return devices.open_transport(agent, netlink, source.device)
    except (OSError, ValueError) as error:
        raise PingError(str(error)) from None


def host_clock(transport: Transport) -> tuple[Callable[[], int], bool]:
    """The host's clock to read at posting and reading, and whether the transport's stamps are of it."""
    return (time.time_ns if transport.clock == "kernel" else time.perf_counter_ns), transport.clock != "hardware"


def _plan(args: argparse.Namespace, transport: Transport, target: Destination, cluster: str) -> Plan:
    largest = min(transport.mtu, target.mtu or transport.mtu)
    if args.size > largest:
        raise PingError(f"--size {args.size} is more than the {largest} bytes that fit the MTU of both ends")
    sport = args.sport or (labels.port_of_label(args.flow_label) if args.flow_label else drawn_port())
    interval, timeout = int(args.interval * 1e9), int(args.timeout * 1e9)
    return Plan(args.count, interval, timeout, args.size, args.traffic_class >> 2, sport, cluster, args.busy)


async def _measure(
    args: argparse.Namespace,
    source: Source,
    target: Destination,
    transport: Transport,
    plan: Plan,
    controller: str,
) -> int:
    clock, same_clock = host_clock(transport)
    probes: list[PingProbe] = []
    every = not args.json and (args.verbose or args.interval >= ping_render.LINES_FROM_S)

    def settled(p: PingProbe) -> None:
        if not args.json:
            live.settled(p)
        elif not p.late:  # else the list has it
            probes.append(p)

    pinger = Pinger(transport, target.aim, plan, settled, clock)
    live = ping_render.Live(pinger.result, plan.count, every, same_clock)
    if not args.json:
        print(ping_render.header(source, target, transport, plan), flush=True)
    stop_on_signals(pinger.stop)
    try:
        result = await pinger.run()
    except (ValueError, OSError) as error:
        raise PingError(f"{target.aim.address} cannot be reached from {source.device}: {error}") from None
    live.clear()
    if args.json:
        about = ping_render.header_json(source, target, transport, plan, same_clock)
        print(json.dumps(about | ping_render.summary_json(result) | {"probes": list(map(probe_json, probes))}))
    else:
        print(ping_render.summary(result), flush=True)
    if not result.answered and ping_ends.is_name(target.name):
        with contextlib.suppress(ConnectionError, PingError):
            target = ping_ends.again(target, controller)
    return verdict(result, target)


def verdict(result: PingResult, target: Destination) -> Exit:
    """What it means for a script; where nothing was answered, a word on why on stderr."""
    if result.answered > result.stale:
        return Exit.HEALTHY
    if result.stale or target.renewed:
        print(f"pingmesh: {target.name} has started anew since it was looked up: try again", file=sys.stderr)
        return Exit.NOT_ENOUGH_DATA
    if not result.sent and not result.send_errors:
        return Exit.NOT_ENOUGH_DATA
    if target.presence != "online":
        print(f"pingmesh: the agent of {target.name} is not online ({target.presence}): start it", file=sys.stderr)
    elif not target.up:
        print(f"pingmesh: {target.name} has no link, as its agent says", file=sys.stderr)
    return Exit.FAULT


def stop_on_signals(stop: Callable[[], object]) -> None:
    """Ctrl-C and SIGTERM end a run in good order, with its summary."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)


# ---------------------------------------------------------------- the far end


def _serve(args: argparse.Namespace, settings: Settings) -> int:
    text = args.ends[0] if args.ends else None
    controller = controller_address(args.controller)
    known, cluster = look_up(controller, text, "")
    agent = agent_settings(args, settings, known.get(text or ""))
    source = ping_ends.source(text, args.device, known, ping_ends.local_addresses(agent.transport))
    if source is None:
        raise PingError(f"{text} is not on this machine: run `pingmesh ping --serve` on its host")
    transport = open_transport(agent, source)
    try:
        return asyncio.run(_answer(args, transport, args.cluster or cluster or settings.cluster))
    finally:
        transport.close()


async def _answer(args: argparse.Namespace, transport: Transport, cluster: str) -> int:
    server = PingServer(transport, cluster, args.busy)
    if args.json:
        print(json.dumps({"target": str(server.aim), "cluster": cluster} | server.aim._asdict()), flush=True)
    else:
        print(f"answering on {transport.device}; on the near end:", flush=True)
        print(f"  pingmesh ping --device DEVICE --cluster {cluster} {server.aim}", flush=True)
    task = asyncio.create_task(server.run(), name="ping-server")
    stop_on_signals(task.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await task
    if not args.json:
        print(f"{server.answered} probes answered")
    return Exit.HEALTHY
