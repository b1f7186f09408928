"""`pingmesh analyzer`."""

from __future__ import annotations

import argparse
import asyncio
import signal
from contextlib import suppress

from pingmesh import config, footprint, logs

SMALL = 2_000
"""RNICs of a fabric whose arrays are so small that the heap, not their size, decides what memory they need."""
HELP = "turn what the agents report into incidents"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the analyzer."""
    parser.epilog = "example: pingmesh analyzer --cluster prod --topology fabric.yaml --broker 10.0.0.1:1883"
    parser.add_argument("--config", metavar="FILE", help="configuration file")
    parser.add_argument("--cluster", help="cluster name")
    parser.add_argument("--topology", metavar="FILE", help="topology file")
    parser.add_argument("--broker", metavar="HOST:PORT", help="MQTT broker")
    parser.add_argument("--log-level", metavar="LEVEL", help="debug, info, warning or error")


def run(args: argparse.Namespace) -> int:
    """Run until SIGTERM or Ctrl-C."""
    # Imported here: numpy is heavy and --help must not load it.
    from pingmesh.analyzer import service
    from topology import files

    settings = config.load(
        args.config,
        {
            "cluster": args.cluster,
            "topology": args.topology,
            "broker": args.broker,
            "log_level": args.log_level,
        },
    )
    logs.set_up(settings.log_level)
    if not settings.topology:
        raise config.ConfigError(
            "analyzer: no topology file: give --topology FILE or set `topology` in the configuration"
        )
    topology = files.load(settings.topology)
    if len(topology.rnics) <= SMALL:
        footprint.give_back()

    async def main() -> None:
        task = asyncio.ensure_future(service.run(settings, topology))
        for sig in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(sig, task.cancel)
        with suppress(asyncio.CancelledError):
            await task

    asyncio.run(main())
    return 0
