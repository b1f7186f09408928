"""`pingmesh controller`: registry, probe lists, incidents and the HTTP API of one cluster."""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal

from controller.api import ListenError
from controller.database import DatabaseError
from pingmesh.config import ConfigError, load
from pingmesh.logs import set_up

HELP = "run the controller: registry, probe lists, incidents and HTTP API"
EXAMPLE = "example: pingmesh controller --topology fabric.yaml --broker 10.0.0.1:1883 --listen 127.0.0.1:8470"

log = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags; each overrides the configuration file and the environment."""
    parser.epilog = EXAMPLE
    parser.add_argument("--config", metavar="FILE", help="configuration file (YAML)")
    parser.add_argument("--cluster", help="name of the cluster, part of every MQTT topic")
    parser.add_argument("--broker", metavar="HOST:PORT", help="the MQTT broker")
    parser.add_argument("--log-level", choices=["debug", "info", "warning", "error"])
    parser.add_argument("--topology", metavar="FILE", help="topology file")
    parser.add_argument("--database", metavar="FILE", help="SQLite file that keeps registry, lists and incidents")
    parser.add_argument("--listen", metavar="ADDRESS", help="HTTP API: unix:PATH or HOST:PORT")


def run(args: argparse.Namespace) -> int:
    """Run until SIGINT or SIGTERM."""
    settings = load(
        args.config,
        {
            "cluster": args.cluster,
            "broker": args.broker,
            "log_level": args.log_level,
            "topology": args.topology,
            "controller.database": args.database,
            "controller.listen": args.listen,
        },
    )
    set_up(settings.log_level)
    from controller import service
    from topology.files import TopologyError

    try:
        asyncio.run(_until_told(service.run(settings)))
    except* (DatabaseError, ListenError, TopologyError, service.NoTopologyError) as errors:
        raise ConfigError(str(errors.exceptions[0])) from None
    return 0


async def _until_told(work: object) -> None:
    assert asyncio.iscoroutine(work)
    task = asyncio.ensure_future(work)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, task.cancel)
    try:
        await task
    except asyncio.CancelledError:
        log.info("controller stopped")
