"""The embedded MQTT broker: mosquitto where it is installed, else amqtt as a process of its own."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import sys
from pathlib import Path

from pingmesh import logs

# Debian keeps mosquitto where an ordinary user's PATH does not look.
_SBIN = "/usr/local/sbin:/usr/sbin:/sbin"


def broker_command(listen_host: str, port: int, directory: str | Path) -> list[str]:
    """The command line of a broker that asks nobody for a password and keeps nothing on disk.

    `directory` is made if need be and takes the broker's configuration file.
    """
    mosquitto = find_mosquitto()
    if mosquitto is None:
        return [sys.executable, "-m", "pingmesh.broker", listen_host, str(port)]
    place = Path(directory)
    place.mkdir(parents=True, exist_ok=True)
    file = place / "mosquitto.conf"
    file.write_text(mosquitto_configuration(listen_host, port))
    return [mosquitto, "-c", str(file)]


def find_mosquitto() -> str | None:
    """Where mosquitto is installed."""
    return shutil.which("mosquitto") or shutil.which("mosquitto", path=_SBIN)


def mosquitto_configuration(listen_host: str, port: int) -> str:
    """A configuration for one machine's broker: open, nothing persistent, queues that outlast a stalled analyzer."""
    lines = [
        f"listener {port} {listen_host}",
        "allow_anonymous true",
        "persistence false",
        "max_queued_messages 100000",
        "max_inflight_messages 1000",
        "set_tcp_nodelay true",
        "log_dest stderr",
        "log_type error",
        "log_type warning",
        "log_type notice",
        "connection_messages false",
    ]
    if os.geteuid() == 0 and _is_user_namespace():
        # Only root is mapped there: mosquitto could not become the user that it otherwise runs as.
        lines.append("user root")
    return "\n".join(lines) + "\n"


def _is_user_namespace() -> bool:
    try:
        return Path("/proc/self/uid_map").read_text().split() != ["0", "0", "4294967295"]
    except OSError:
        return False


async def run_amqtt(listen_host: str, port: int) -> None:
    """Run amqtt until SIGTERM or SIGINT."""
    from amqtt.broker import Broker

    host = f"[{listen_host}]" if ":" in listen_host else listen_host
    broker = Broker(
        {
            "listeners": {"default": {"type": "tcp", "bind": f"{host}:{port}", "max_connections": 0}},
            "plugins": {"amqtt.plugins.authentication.AnonymousAuthPlugin": {"allow_anonymous": True}},
        }
    )
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await broker.start()
    await stop.wait()
    await broker.shutdown()


def main() -> None:
    """`python -m pingmesh.broker HOST PORT`."""
    logs.set_up("warning")
    # It reports every client that leaves without a goodbye as an error.
    logging.getLogger("transitions").setLevel(logging.ERROR)
    asyncio.run(run_amqtt(sys.argv[1], int(sys.argv[2])))


if __name__ == "__main__":
    main()
