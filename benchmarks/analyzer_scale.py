"""What an analyzer costs by size of the fabric: all that its agents send in 20 s, through broker and MQTT client.

    benchmarks/analyzer_scale.py [--quick] [--sizes 1000,4000] [--json FILE] [--svg FILE] [--direct]

For each size a process of its own runs the product's analyzer: its MQTT session, handlers, join and judgement. Agents'
messages (`agents_at_scale.py`: windows of 5 s at default rates, with background loss) come through a mosquitto of our
own from this process; `--direct` leaves broker and client out. Time is replayed, not waited for: the analyzer's clock
is set to when each window's reports leave. CPU seconds are those of the analyzer's process: receiving,
decoding and taking in, joining both ends, one look (host rules, evidence, verdicts) after each window; then a look at a
fabric with a link that loses 10 %. Lists and traces from before are given to the analyzer's handler first (above 20,000
RNICs as columns: `known_flows.py`), and not counted. `--quick`: 1,000 and 4,000 RNICs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import platform
import resource
import socket
import struct
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from ctypes import c_uint64
from multiprocessing.connection import Connection
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any

from agents_at_scale import CLUSTER, EARLY_S, Agents, Sent, Shape, check_packing
from growth_chart import growth_svg

from pingmesh import topics
from pingmesh.broker import find_mosquitto, mosquitto_configuration
from pingmesh.messages import WINDOW_NS

SIZES: dict[int, Shape] = {
    1_000: (4, 8, 4, 16, 4, 8),
    4_000: (8, 8, 8, 64, 8, 8),
    16_000: (16, 16, 8, 64, 8, 8),
    100_000: (49, 32, 8, 64, 8, 8),
}
WINDOWS = 4
FIRST_WINDOW = 360_000_000
LOSS = 1e-6
"""Background, a packet and hop."""
FAULTY, RATE = "p1-agg1->core1", 0.1
SECOND = 1_000_000_000
MOST_LISTS = 20_000
"""RNICs up to which the analyzer is given its lists and traces as messages."""
AHEAD = 2000
"""Messages that may be on their way: no queue may overflow."""

Figures = dict[str, Any]

# ---------------------------------------------------------------- the analyzer's process


class Replay:
    """An analyzer whose clock is set from outside."""

    def __init__(self, shape: Shape, port: int, received: Synchronized[int]) -> None:
        from pingmesh.analyzer.service import Analyzer
        from pingmesh.config import BrokerSettings, Settings
        from topology.generate import clos3

        settings = Settings(cluster=CLUSTER, broker=BrokerSettings(host="127.0.0.1", port=port or 1))
        self.analyzer = a = Analyzer(settings, clos3(*shape))
        self.now = FIRST_WINDOW * WINDOW_NS - 60 * SECOND
        a._clock.now = lambda: self.now  # type: ignore[method-assign]
        self.received = received
        self.count = self.target = 0
        self.there = asyncio.Event()
        handle = a._bus.handler

        def counted(topic: topics.Topic, payload: bytes) -> object:
            self.count += 1
            if self.count % 100 == 0:
                received.value = self.count
            if self.count == self.target:
                self.there.set()
            return handle(topic, payload)

        a._bus.handler = counted  # type: ignore[assignment]

    def give(self, messages: Iterable[tuple[str, bytes]]) -> None:
        for topic, payload in messages:
            self.analyzer._bus.handler(topics.parse(topic), payload)

    async def until(self, count: int) -> None:
        self.target = count
        if self.count < count:
            self.there.clear()
            await self.there.wait()
        self.received.value = self.count

    async def look(self) -> float:
        """One look at the evidence, as the analyzer takes; CPU seconds."""
        self.analyzer._quiet_until = 0
        began = time.process_time()
        with suppress(ConnectionError):  # the session may have been lost in a long look
            await self.analyzer._look_once()
        return time.process_time() - began


async def _replay(pipe: Connection, shape: Shape, port: int, received: Synchronized[int], profile: str) -> None:
    began = time.process_time()
    replay = Replay(shape, port, received)
    a = replay.analyzer
    figures: Figures = {"start_s": time.process_time() - began}
    session = None
    if not port:
        a._bus.connected.set()

        async def nobody(topic: object, payload: bytes, *, qos: int = 0, retain: bool = False) -> None:
            pass

        a._bus.publish = nobody  # type: ignore[method-assign]
    loop = asyncio.get_running_loop()
    pipe.send("ready")
    looks: list[float] = []
    profiler = None
    while True:
        command, argument = await loop.run_in_executor(None, pipe.recv)
        began = time.process_time()
        if command == "setup":
            replay.give(_read(Path(argument)))
            figures["setup_s"] = figures.get("setup_s", 0.0) + time.process_time() - began
            figures["rss_before_mb"] = _rss_mb()
            answer: object = replay.count
            received.value = replay.count
        elif command == "fill":
            from known_flows import fill

            fill(a.book, Agents(shape), argument)
            figures["setup_s"] = time.process_time() - began
            figures["rss_before_mb"] = _rss_mb()
            answer = 0
        elif command == "connect":
            session = asyncio.create_task(a._bus.run())
            await a._bus.connected.wait()
            answer = None
        elif command == "clock":
            replay.now = argument
            answer = None
        elif command == "profile":
            import cProfile

            profiler = cProfile.Profile()
            profiler.enable()
            answer = None
        elif command == "receive":
            if isinstance(argument, str):
                replay.give(_read(Path(argument)))
            else:
                await replay.until(argument)
            answer = time.process_time() - began
        elif command == "look":
            a._confirmations.episode = None
            looks.append(await replay.look())
            verdicts = [(v.component, v.direction) for v in a._judgement.verdicts]
            answer = (looks[-1], verdicts)
        else:
            break
        pipe.send(answer)
    if profiler is not None:
        profiler.disable()
        profiler.dump_stats(profile)
    figures["rejected"] = sum(a._bus.rejected.values())
    figures["max_rss_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    pipe.send(figures)
    if session is not None:
        session.cancel()
        await asyncio.gather(session, return_exceptions=True)


def _analyzer(pipe: Connection, shape: Shape, port: int, received: Synchronized[int], profile: str) -> None:
    asyncio.run(_replay(pipe, shape, port, received, profile))


def _rss_mb() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() >> 20


# ---------------------------------------------------------------- from here to there


def _write(file: Path, messages: Iterable[Sent]) -> tuple[int, int]:
    """(messages, bytes of payload)."""
    count = size = 0
    with file.open("wb") as f:
        for topic, payload, qos in messages:
            name = topic.encode()
            f.write(struct.pack("<IIB", len(name), len(payload), qos) + name + payload)
            count += 1
            size += len(payload)
    return count, size


def _read_all(file: Path) -> Iterator[Sent]:
    with file.open("rb") as f:
        while head := f.read(9):
            name, payload, qos = struct.unpack("<IIB", head)
            yield f.read(name).decode(), f.read(payload), qos


def _read(file: Path) -> Iterator[tuple[str, bytes]]:
    return ((topic, payload) for topic, payload, _ in _read_all(file))


class Publisher:
    """A bare MQTT client that only publishes, no faster than the analyzer takes in."""

    def __init__(self, port: int, received: Synchronized[int]) -> None:
        self._received = received
        self._socket = socket.create_connection(("127.0.0.1", port))
        body = b"\x00\x04MQTT\x04\x02\x00\x00" + b"\x00\x05agent"
        self._socket.sendall(b"\x10" + bytes([len(body)]) + body)
        self._socket.recv(4)
        self._id = 0
        self.sent = 0

    def publish(self, messages: Iterable[Sent]) -> None:
        batch: list[bytes] = []
        for topic, payload, qos in messages:
            self._id = self._id % 0xFFFF + 1
            name = topic.encode()
            ident = struct.pack(">H", self._id) if qos else b""
            size = 2 + len(name) + len(ident) + len(payload)
            batch.append(
                bytes([0x30 | qos << 1]) + _varint(size) + struct.pack(">H", len(name)) + name + ident + payload
            )
            self.sent += 1
            if len(batch) == 100:
                self._flush(batch)
        self._flush(batch)

    def _flush(self, batch: list[bytes]) -> None:
        self._socket.sendall(b"".join(batch))
        batch.clear()
        self._socket.setblocking(False)
        try:
            while self._socket.recv(1 << 16):
                pass
        except BlockingIOError:
            pass
        self._socket.setblocking(True)
        while self.sent - self._received.value > AHEAD:
            time.sleep(0.001)


def _varint(n: int) -> bytes:
    out = bytearray()
    while True:
        n, low = divmod(n, 128)
        out.append(low | (128 if n else 0))
        if not n:
            return bytes(out)


@contextmanager
def _broker(folder: Path) -> Iterator[int]:
    """A mosquitto of our own; yields its port."""
    mosquitto = find_mosquitto()
    if mosquitto is None:
        raise SystemExit("mosquitto is not installed; --direct measures without it")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = int(s.getsockname()[1])
    file = folder / "mosquitto.conf"
    file.write_text(mosquitto_configuration("127.0.0.1", port))
    process = subprocess.Popen([mosquitto, "-c", str(file)])
    try:
        for _ in range(100):
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except OSError:
                time.sleep(0.05)
        yield port
    finally:
        process.terminate()
        process.wait()


# ---------------------------------------------------------------- one size


def measure(shape: Shape, direct: bool, profile: str = "") -> Figures:
    """All figures of one size."""
    agents = Agents(shape)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if direct:
            return _measure(agents, folder, 0, profile)
        with _broker(folder) as port:
            return _measure(agents, folder, port, profile)


def _measure(agents: Agents, folder: Path, port: int, profile: str) -> Figures:
    context = multiprocessing.get_context("spawn")
    received: Synchronized[int] = context.Value(c_uint64, 0)
    ours, theirs = context.Pipe()
    process = context.Process(target=_analyzer, args=(theirs, agents.shape, port, received, profile))
    process.start()

    def ask(command: str, argument: object = None) -> Any:
        ours.send((command, argument))
        return ours.recv()

    assert ours.recv() == "ready"
    start = FIRST_WINDOW * WINDOW_NS - 50 * SECOND
    file = folder / "messages"
    before = [agents.registrations(start, 60.0)]
    if len(agents.names) <= MOST_LISTS:
        before = [agents.lists(), agents.known_paths(start), *before]
    else:
        ask("fill", start)
    for messages in before:
        _write(file, messages)
        expected = ask("setup", str(file))
    publisher = Publisher(port, received) if port else None
    if publisher is not None:
        ask("connect")
        publisher.sent = expected
    counts = [agents.count(loss=LOSS) for _ in range(WINDOWS)]
    counts += [agents.count(loss=LOSS, faulty=FAULTY, rate=RATE) for _ in range(3)]
    figures: Figures = {"rnics": len(agents.names), "hosts": len(agents.hosts), "flows": len(agents.flows.src)}
    figures["flows_per_rnic"] = round(len(agents.flows.src) / len(agents.names), 1)
    figures["trace_rate"] = agents.trace_rate
    sent: dict[str, list[int]] = {}
    receive = looks = 0.0
    wall = 0.0
    for n in range(WINDOWS + 2):
        window = FIRST_WINDOW + n
        leaves = (window + 1) * WINDOW_NS + int((EARLY_S + 0.05) * 1e9)
        kinds = {
            "reports": agents.reports(window, counts[n], counts[n + 1]),
            "exceptions": agents.exceptions(window, counts[n]),
            "paths": agents.retraced(leaves, 5.0),
            "registrations and states": agents.registrations(leaves, 5.0),
        }
        parts = []
        for kind, messages in kinds.items():
            part = folder / kind
            count, size = _write(part, messages)
            parts.append(part)
            expected += count
            if n < WINDOWS:
                total = sent.setdefault(kind, [0, 0])
                total[0] += count
                total[1] += size
        ask("clock", leaves)
        if profile and n == 0:
            ask("profile")
        began = time.perf_counter()
        cpu = 0.0
        if publisher is None:
            for part in parts:
                cpu += ask("receive", str(part))
        else:
            ours.send(("receive", expected))
            for part in parts:
                publisher.publish(_read_all(part))
            cpu += ours.recv()
        wall += time.perf_counter() - began
        look, verdicts = ask("look")
        print(
            f"  window {n}: received in {cpu:.2f} CPU s, look {look:.2f} s, {[f'{c} {d}' for c, d in verdicts][:4]}",
            flush=True,
        )
        if n < WINDOWS:
            receive += cpu
            looks += look
        if n == WINDOWS - 1:
            figures["wall_s"] = round(wall, 2)
            figures["look_again_s"] = round(ask("look")[0], 3)
        figures["look_clean_s" if n < WINDOWS else "look_faulty_s"] = round(look, 3)
        if n >= WINDOWS:
            figures["named"] = [f"{c} {d}" for c, d in verdicts]
    figures |= ask("end")
    process.join()
    rows = sum(int((c.sent > 0).sum()) for c in counts[:WINDOWS])
    figures["prober_rows"] = rows
    figures["responder_rows"] = rows + sum(int(c.early.sum()) for c in counts[1 : WINDOWS + 1])
    figures["messages"] = {k: v[0] for k, v in sent.items()}
    figures["bytes"] = {k: v[1] for k, v in sent.items()}
    figures["all_messages"] = sum(v[0] for v in sent.values())
    figures["all_mb"] = round(sum(v[1] for v in sent.values()) / 1e6, 1)
    figures["receive_s"], figures["looks_s"] = round(receive, 2), round(looks, 2)
    figures["total_s"] = round(receive + looks, 2)
    return figures


# ---------------------------------------------------------------- report

COLUMNS = {
    "rnics": "RNICs",
    "flows": "flows",
    "all_messages": "messages",
    "prober_rows": "prober rows",
    "responder_rows": "responder rows",
    "all_mb": "MB",
    "receive_s": "receive and decode, s",
    "looks_s": "four joins and looks, s",
    "total_s": "both, s",
    "look_again_s": "a look without news, s",
    "look_faulty_s": "a look at a fault, s",
    "max_rss_mb": "peak RSS, MB",
}


def table(rows: Iterable[Figures]) -> str:
    """Markdown."""
    out = ["| " + " | ".join(COLUMNS.values()) + " |", "|" + "---|" * len(COLUMNS)]
    for r in rows:
        cells = (r[c] for c in COLUMNS)
        out.append("| " + " | ".join(f"{v:,}" if isinstance(v, int) else f"{v:g}" for v in cells) + " |")
    return "\n".join(out)


def _sizes(text: str) -> list[int]:
    wanted = text.split(",")
    known = {str(size): size for size in SIZES}
    if unknown := [w for w in wanted if w not in known]:
        raise argparse.ArgumentTypeError(f"no fabric of {', '.join(unknown)}; give some of {','.join(known)}")
    return [known[w] for w in wanted]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--sizes", type=_sizes, metavar="N,N", help=f"of {', '.join(map(str, SIZES))} (default: all)")
    add("--quick", action="store_true", help="1,000 and 4,000 RNICs only")
    add("--direct", action="store_true", help="give messages to the handler: no broker, no MQTT client")
    add("--json", type=Path, metavar="FILE", help="write the figures there too")
    add("--svg", type=Path, metavar="FILE", help="draw the growth")
    add("--profile", default="", metavar="FILE", help="profile the analyzer's process (one size only)")
    args = parser.parse_args()
    check_packing()
    sizes = args.sizes or list(SIZES)[: 2 if args.quick else None]
    rows = []
    for size in sizes:
        print(f"{size} RNICs", flush=True)
        rows.append(measure(SIZES[size], args.direct, args.profile))
        print(json.dumps(rows[-1]), flush=True)
    print(table(rows))
    if args.svg:
        series = {"all of 20 s": "total_s", "receive and decode": "receive_s", "one look at a fault": "look_faulty_s"}
        args.svg.write_text(growth_svg({n: [(r["rnics"], r[k]) for r in rows] for n, k in series.items()}))
    if args.json:
        machine = {"cpus": os.cpu_count(), "python": platform.python_version(), "load": os.getloadavg()[0]}
        args.json.write_text(json.dumps({"machine": machine, "sizes": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
