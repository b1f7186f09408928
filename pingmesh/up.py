"""`pingmesh up`: broker, controller and analyzer on one machine, as children of one process that ends with them."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import json
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pingmesh.config import ConfigError, Settings, load

HELP = (
    "Run the broker, the controller and the analyzer on this machine. The broker is mosquitto where it is installed, "
    "else amqtt. Ctrl-C stops all of them; when one dies the others are stopped too (exit code 4)."
)
DIED = 4
STOP_GRACE_S = 8.0
_FORMED = ("time", "level", "logger", "message", "exception", "color_message")
"""Fields of a log record that have their place in the line, or (uvicorn's coloured copy) none."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `pingmesh up`."""
    parser.add_argument("--topology", metavar="FILE", help="topology file (pingmesh topology check FILE)")
    parser.add_argument("--config", metavar="FILE", help="configuration file")
    parser.add_argument("--cluster", help="cluster name in MQTT topics")
    parser.add_argument(
        "--bind",
        metavar="ADDRESS",
        default="127.0.0.1",
        help="address of the broker; for agents on other "
        "machines the one of the management network (the broker asks nobody for a password)",
    )
    parser.add_argument("--port", type=int, help="port of the broker (default 1883)")
    parser.add_argument("--listen", metavar="HOST:PORT|unix:PATH", help="HTTP API (default 127.0.0.1:8470)")
    parser.add_argument(
        "--state", metavar="DIR", default="pingmesh-state", help="database and broker files (default ./pingmesh-state)"
    )
    parser.add_argument("--log-level", choices=("debug", "info", "warning", "error"))
    parser.add_argument("--json", action="store_true", help="logs as JSON lines with the part's name in `part`")


@dataclass(frozen=True)
class Part:
    """A child process."""

    name: str
    command: tuple[str, ...]
    address: tuple[str, int] | str | None = None
    """Where it accepts connections when it is ready: (host, port) or the path of a unix socket."""


def run(args: argparse.Namespace) -> int:
    """Until Ctrl-C (0) or until a part dies (4)."""
    settings = load(
        args.config,
        {
            "topology": args.topology,
            "cluster": args.cluster,
            "broker.port": args.port,
            "controller.listen": args.listen,
            "log_level": args.log_level,
        },
    )
    parts = plan(settings, args.bind, Path(args.state), args.config)
    show = json_line if args.json else text_line
    return asyncio.run(supervise(parts, welcome(parts), lambda part, line: print(show(part, line), flush=True)))


def plan(settings: Settings, bind: str, state: Path, config: str | None) -> list[Part]:
    """The children to start, in order. Raises ConfigError for what would fail them all."""
    from pingmesh.broker import broker_command
    from topology import files

    if settings.topology is None:
        raise ConfigError("up: no topology; name a file with --topology (pingmesh topology generate makes an example).")
    files.load(settings.topology)
    port = settings.broker.port
    _check_free("broker", bind, port, "another --port or stop what listens there (often the distribution's mosquitto)")
    try:
        (state / "broker").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"up: {state} cannot be made: {error.strerror}; choose another --state.") from None
    reach = "127.0.0.1" if bind in ("0.0.0.0", "::") else bind  # noqa: S104
    common = [
        *(("--config", config) if config else ()),
        *("--cluster", settings.cluster),
        *("--broker", f"{reach}:{port}"),
        *("--topology", settings.topology),
        *("--log-level", settings.log_level),
    ]
    this = (sys.executable, "-m", "pingmesh")
    listen = settings.controller.listen
    endpoint = _endpoint(listen)
    if not isinstance(endpoint, str):
        _check_free("API", *endpoint, "another --listen or stop what listens there (another pingmesh up?)")
    database = settings.controller.database
    return [
        Part("broker", tuple(broker_command(bind, port, state / "broker")), (reach, port)),
        Part(
            "controller",
            (*this, "controller", *common, "--listen", listen, "--database", str(state / database)),
            endpoint,
        ),
        Part("analyzer", (*this, "analyzer", *common)),
    ]


def _endpoint(listen: str) -> tuple[str, int] | str:
    if listen.startswith("unix:"):
        return listen.removeprefix("unix:")
    host, _, port = listen.rpartition(":")
    if not port.isdigit():
        raise ConfigError(f"controller.listen: {listen!r} is neither HOST:PORT nor unix:PATH.")
    return host.strip("[]") or "127.0.0.1", int(port)


def _check_free(what: str, host: str, port: int, choice: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"up: the {what} cannot listen on {host}:{port}: {error.strerror}; choose {choice}."
            ) from None


# ---------------------------------------------------------------- running them


async def supervise(parts: Sequence[Part], greeting: str, emit: Callable[[str, str], None]) -> int:
    """Start the parts in order, each once the one before accepts connections; stop all when one ends or on a signal.

    `emit(part, line)` gets their output, and `greeting` once all run. Returns 0, or 4 if a part ended by itself.
    """
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    running: dict[str, asyncio.subprocess.Process] = {}
    watchers: list[asyncio.Task[None]] = []
    stopped = asyncio.create_task(stop.wait(), name="signal")
    code = 0
    try:
        ends: dict[asyncio.Task[int], str] = {}
        for part in parts:
            process = await asyncio.create_subprocess_exec(
                *part.command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,  # the terminal's Ctrl-C goes to us alone, so that they stop in order
                preexec_fn=_die_with_parent,
            )
            running[part.name] = process
            watchers.append(asyncio.create_task(_copy(part.name, process, emit), name=f"log {part.name}"))
            ends[asyncio.create_task(process.wait(), name=f"end {part.name}")] = part.name
            ready = asyncio.create_task(_accepts(part.address), name=f"ready {part.name}")
            await asyncio.wait({ready, stopped, *ends}, return_when=asyncio.FIRST_COMPLETED)
            ready.cancel()
            if stop.is_set() or any(e.done() for e in ends):
                break
        else:
            emit("up", greeting)
            await asyncio.wait({stopped, *ends}, return_when=asyncio.FIRST_COMPLETED)
        dead = [name for end, name in ends.items() if end.done()]
        if dead and not stop.is_set():
            code = DIED
            others = [name for name in running if name not in dead]
            status = running[dead[0]].returncode
            how = (
                f"was killed by signal {-status}"
                if status is not None and status < 0
                else f"ended with exit code {status}"
            )
            await asyncio.sleep(0.1)  # its last words first
            emit("up", f"{dead[0]} {how} (its last lines are above); stopping {' and '.join(others) or 'nothing else'}")
    finally:
        stopped.cancel()
        for name in reversed(running):
            await _end(running[name])
        await asyncio.wait(watchers, timeout=2) if watchers else None
    return code


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        async with asyncio.timeout(STOP_GRACE_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


async def _copy(name: str, process: asyncio.subprocess.Process, emit: Callable[[str, str], None]) -> None:
    assert process.stdout is not None
    while True:
        try:
            line = await process.stdout.readline()
        except ValueError:  # longer than the reader's limit: what was read is gone, the rest follows
            continue
        if not line:
            return
        emit(name, line.decode(errors="replace").rstrip("\n"))


async def _accepts(address: tuple[str, int] | str | None) -> None:
    """Return once a connection is accepted at `address`."""
    while address is not None:
        try:
            if isinstance(address, str):
                _, writer = await asyncio.open_unix_connection(address)
            else:
                _, writer = await asyncio.open_connection(*address)
        except OSError:
            await asyncio.sleep(0.1)
            continue
        writer.close()
        return


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: nothing stays when we are killed


# ---------------------------------------------------------------- printing


def welcome(parts: Sequence[Part]) -> str:
    """What runs where, and what to do next."""
    broker, controller = parts[0], parts[1]
    kind = (
        "mosquitto"
        if Path(broker.command[0]).name == "mosquitto"
        else "amqtt, good for 200 agents and a single analyzer; install mosquitto for more"
    )
    assert isinstance(broker.address, tuple)
    host, port = broker.address
    api = controller.address
    where = f"unix:{api}" if isinstance(api, str) else f"http://{api[0]}:{api[1]}" if api else ""
    agents = f"on each host: pingmesh agent --broker {host}:{port}"
    if host in ("127.0.0.1", "::1", "localhost"):
        agents = "pingmesh agent on this machine, or pingmesh up --bind ADDRESS for agents on others"
    return f"ready: broker {host}:{port} ({kind}), API {where}; next, {agents}"


def text_line(part: str, line: str) -> str:
    """`part | level logger: message`; lines that are no JSON log stay as they are."""
    with contextlib.suppress(ValueError):
        d = json.loads(line)
        if isinstance(d, dict) and {"level", "logger", "message"} <= d.keys():
            rest = " ".join(f"{k}={v}" for k, v in d.items() if k not in _FORMED)
            line = f"{str(d.get('time', ''))[11:19]} {d['level']:<7} {d['logger']}: {d['message']} {rest}".rstrip()
            if "exception" in d:
                line += "\n" + str(d["exception"])
    return "\n".join(f"{part:<10} | {piece}" for piece in line.split("\n"))


def json_line(part: str, line: str) -> str:
    """The log line as JSON with `part`; other text becomes `message`."""
    try:
        d = json.loads(line)
    except ValueError:
        d = None
    return json.dumps({"part": part, **d} if isinstance(d, dict) else {"part": part, "message": line})
