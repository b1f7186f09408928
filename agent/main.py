"""`pingmesh agent`."""

# ruff: noqa: E402
from __future__ import annotations

from pingmesh import footprint
from pingmesh.left_out import left_out

footprint.keep_small()  # before most of what an agent is made of is imported
with left_out("typing_extensions"):  # msgspec would load it where some package has brought it, and does without
    import msgspec  # noqa: F401

import argparse
import asyncio
import sys

from agent import service
from agent.devices import DeviceNameError, UnknownTransportError
from agent.icmp import NoRawSocketError
from agent.transport.base import TransportError
from agent.transport.verbs.gids import GidIndexError
from pingmesh import config, logs

HELP = "run the agent of this host: probe, answer, trace and report"
EXIT_USAGE = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `pingmesh agent`."""
    parser.add_argument("--config", metavar="FILE", help="configuration file (YAML)")
    parser.add_argument("--cluster", help="name of the cluster")
    parser.add_argument("--broker", metavar="HOST:PORT", help="MQTT broker on the management network")
    parser.add_argument("--host", help="this host's name in the topology (default: the machine's host name)")
    parser.add_argument("--devices", metavar="A,B", help="devices to probe from, each DEVICE or NAME=DEVICE")
    parser.add_argument("--transport", choices=("soft", "verbs"), help="sockets (the default), or RDMA")
    parser.add_argument("--log-level", choices=("debug", "info", "warning", "error"))


def run(args: argparse.Namespace) -> int:
    """Run until SIGTERM; returns 0, or 2 when it cannot start as configured. Raises config.ConfigError."""
    flags: dict[str, object] = {
        "cluster": args.cluster,
        "broker": args.broker,
        "agent.host": args.host,
        "agent.devices": [d.strip() for d in args.devices.split(",") if d.strip()] if args.devices else None,
        "agent.transport": args.transport,
        "log_level": args.log_level,
    }
    settings = config.load(args.config, flags)
    logs.set_up(settings.log_level)
    try:
        asyncio.run(service.run(settings))
    except (
        NoRawSocketError,
        UnknownTransportError,
        DeviceNameError,
        GidIndexError,
        TransportError,
        service.NoDevicesError,
    ) as error:
        print(f"pingmesh agent: {error}", file=sys.stderr)
        return EXIT_USAGE
    return 0
