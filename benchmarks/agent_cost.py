"""What the agent costs, against a bare blocking loop of the same packets at the same pace; what `pingmesh up` holds.

All over veth pairs between two network namespaces made for the purpose. Measured per probe: user and system CPU of
*both* ends (sending the probe, answering it twice, taking both ACKs). The bare loop only patches a sequence number
into a ready frame: no ICRC, no stamps, no accounting, no schedule. The agent is the whole `pingmesh agent`: two of them
probe each other and trace, and report to a broker (mosquitto where it is installed, else amqtt) on a network of its
own; this program plays the controller. CPU is read from outside, between two moments, as are the packets on the
cables: three a probe (and a tracing packet per second and RNIC, which the figures count as a third of a probe).

Memory of `pingmesh up` (broker, controller, analyzer) is taken idle, with a fabric of 4 leaves, 4 spines and 16 hosts
and without agents.

    benchmarks/agent_cost.py [--quick] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import io
import json
import os
import platform
import pstats
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from pingmesh import topics
from pingmesh.broker import broker_command, find_mosquitto
from pingmesh.bus import Bus
from pingmesh.config import BrokerSettings
from pingmesh.messages import (
    PROBER_COLUMNS,
    Exceptions,
    Flow,
    Message,
    Peer,
    ProbeClass,
    ProbeList,
    Register,
    Report,
    decode,
    encode,
    unpack_columns,
)

FLOWS_PER_RNIC = 60
CLUSTER = "bench"
BROKER = ("10.8.0.1", 1883)
PACKETS_PER_PROBE = 3
ROUNDS = 5
QUICK_ROUNDS = 2
START_S = 15.0
"""Within this time agents register and the parts of `pingmesh up` run."""


def address(side: int, rnic: int) -> str:
    return f"10.9.{rnic}.{side}"


def device(side: int, rnic: int) -> str:
    return f"{'ab'[side]}{rnic}"


# ---------------------------------------------------------------- the parts that run in the namespaces


def cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def memory(pid: int) -> dict[str, float]:
    """RSS and PSS of a process in MiB."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    return {f"{name.lower()}_mib": int(fields[name].split()[0]) / 1024 for name in ("Rss", "Pss")}


def cpu_of(pid: int) -> float:
    """User and system CPU of another process in seconds, to the nanosecond (its `stat` counts hundredths)."""
    return sum(int((t / "schedstat").read_text().split()[0]) for t in Path(f"/proc/{pid}/task").iterdir()) / 1e9


def packets(rnics: int) -> int:
    """Packets that have crossed the cables, both directions."""
    cables = {device(0, i) for i in range(rnics)}
    lines = (line.split() for line in Path("/proc/net/dev").read_text().splitlines())
    return sum(int(w[2]) + int(w[10]) for w in lines if w[0].rstrip(":") in cables)


def say(**what: object) -> None:
    print(json.dumps(what), flush=True)


def bare_frame() -> bytearray:
    from agent import frames
    from pingmesh import probe

    length = frames.HEAD + probe.SIZE + frames.TAIL
    head, _ = frames.head(0, length, 0xC000, 0x123, 1, 0x456)
    return bytearray(head + bytes(probe.SIZE + frames.TAIL))


def bare_prober(rate: float, warm_up: float, seconds: float) -> None:
    from agent.transport.sockets import open_quiet

    quiet = open_quiet(device(0, 0), address(0, 0), 4)
    s = bare_socket(0)
    frame = bare_frame()
    to = (address(1, 0), 0)
    step = 1 / rate
    sent = lost = 0
    start = due = time.monotonic()
    cpu0, counted = cpu_s(), False
    while due < start + warm_up + seconds:
        if not counted and due >= start + warm_up:
            cpu0, sent, counted = cpu_s(), 0, True
        frame[52:56] = sent.to_bytes(4)
        s.sendto(frame, to)
        sent += 1
        try:
            s.recv(2048)
            s.recv(2048)
        except TimeoutError:
            lost += 1
        due += step
        time.sleep(max(0.0, due - time.monotonic()))
    say(cpu=cpu_s() - cpu0, probes=sent, lost=lost)
    quiet.close()


def bare_responder(warm_up: float) -> None:
    from agent.transport.sockets import open_quiet

    quiet = open_quiet(device(1, 0), address(1, 0), 4)
    s = bare_socket(1)
    s.settimeout(0.5)
    say(ready=True)
    to = (address(0, 0), 0)
    answered = 0
    cpu0 = 0.0
    start: float | None = None
    while True:
        try:
            packet = bytearray(s.recv(2048))
        except TimeoutError:
            if start is not None:
                break
            continue
        if start is None:
            start = time.monotonic()
        if not cpu0 and time.monotonic() >= start + warm_up:
            cpu0, answered = cpu_s(), 0
        frame = packet[20:]
        frame[31] = 1
        s.sendto(frame, to)
        frame[31] = 2
        s.sendto(frame, to)
        answered += 1
    say(cpu=cpu_s() - cpu0, probes=answered, lost=0)
    quiet.close()


def bare_socket(side: int) -> socket.socket:
    from agent.transport import sockets

    s = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_UDP)
    sockets._attach(s, sockets._ROCE4)
    s.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, device(side, 0).encode() + b"\0")
    s.bind((address(side, 0), 0))
    s.settimeout(0.5)
    return s


def profiled_agent(arguments: list[str]) -> None:
    """`pingmesh agent` that profiles itself from SIGUSR1 to SIGUSR2, and then prints what it found."""
    from agent import main as agent_main

    profiler = cProfile.Profile(time.process_time)  # else waiting, ours or for a core, would stand first

    def show_profile(*_: object) -> None:
        profiler.disable()
        text = io.StringIO()
        pstats.Stats(profiler, stream=text).sort_stats("tottime").print_stats(22)
        say(profile=text.getvalue())

    signal.signal(signal.SIGUSR1, lambda *_: profiler.enable())
    signal.signal(signal.SIGUSR2, show_profile)
    parser = argparse.ArgumentParser()
    agent_main.add_arguments(parser)
    sys.exit(agent_main.run(parser.parse_args(arguments)))


# ---------------------------------------------------------------- the rig


class Rig:
    """Two namespaces (this process's own and another), veth pairs between them and a network for the broker."""

    def __init__(self, rnics: int) -> None:
        self.other = subprocess.Popen(
            ["unshare", "--net", "--kill-child", "sleep", "infinity"], stdout=subprocess.DEVNULL
        )
        time.sleep(0.3)
        self.enter = ["nsenter", f"--net=/proc/{self.other.pid}/ns/net"]
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
        self._cable("mgmt0", "mgmt1", BROKER[0], "10.8.0.2", 24)
        for i in range(rnics):
            self._cable(device(0, i), device(1, i), address(0, i), address(1, i), 31)

    def _cable(self, a: str, b: str, a_address: str, b_address: str, bits: int) -> None:
        run = subprocess.run
        run(["ip", "link", "add", a, "mtu", "4200", "type", "veth", "peer", "name", b, "mtu", "4200"], check=True)
        run(["ip", "link", "set", b, "netns", str(self.other.pid)], check=True)
        for name, own, prefix in ((a, a_address, []), (b, b_address, self.enter)):
            run([*prefix, "ip", "addr", "add", f"{own}/{bits}", "dev", name], check=True)
            run([*prefix, "ip", "link", "set", name, "up"], check=True)

    def spawn(self, side: int, *argv: object) -> subprocess.Popen[str]:
        """A part of this program in one of the namespaces."""
        prefix = self.enter if side else []
        return subprocess.Popen(
            [*prefix, sys.executable, __file__, "--part", *map(str, argv)], stdout=subprocess.PIPE, text=True
        )

    def spawn_agent(self, side: int, rnics: int, rate: float, profile: bool) -> subprocess.Popen[str]:
        """An agent, free to use what CPU it needs: its own budget would slow it down."""
        prefix = self.enter if side else []
        program = [__file__, "--part", "profiled_agent"] if profile else ["-m", "pingmesh", "agent"]
        devices = ",".join(device(side, i) for i in range(rnics))
        arguments = ["--host", f"h{side}", "--devices", devices, "--broker", f"{BROKER[0]}:{BROKER[1]}"]
        environment = {
            "PINGMESH_AGENT__CPU_BUDGET": "1",
            "PINGMESH_AGENT__MAX_RATE": str(max(150.0, rate)),
            "PINGMESH_CLUSTER": CLUSTER,
        }
        return subprocess.Popen(
            [*prefix, sys.executable, *program, *arguments, "--log-level", "error"],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | environment,
        )

    def close(self) -> None:
        self.other.kill()
        self.other.wait()


@dataclass
class Heard:
    """What the agents say, by the broker."""

    registered: dict[str, Register] = field(default_factory=dict)
    report_bytes: list[int] = field(default_factory=list)
    lost: int = 0
    rtt_sum: int = 0
    measured: int = 0
    exceptions: int = 0

    def take(self, topic: topics.Topic, payload: bytes) -> None:
        m = decode(payload, Message, topic.host, topic.cluster)
        match m:
            case Register():
                self.registered[m.host] = m
            case Report():
                self.report_bytes.append(len(payload))
                for rows in m.prober:
                    c = unpack_columns(PROBER_COLUMNS, rows.columns)
                    self.measured += sum(c[4])
                    self.lost += sum(c[5])
                    self.rtt_sum += sum(c[9])
            case Exceptions():
                self.exceptions += len(m.events)
            case _:
                pass


@asynccontextmanager
async def controller() -> AsyncIterator[tuple[Bus, Heard]]:
    """This program in the controller's place."""
    heard = Heard()
    settings = BrokerSettings(host=BROKER[0], port=BROKER[1])
    kinds = (topics.REGISTER, topics.REPORT, topics.EXCEPTION)
    bus = Bus(settings, "bench", [f"{topics.ROOT}/{CLUSTER}/+/{k}" for k in kinds], heard.take)
    task = asyncio.create_task(bus.run())
    try:
        async with asyncio.timeout(START_S):
            await bus.connected.wait()
        yield bus, heard
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def read(process: subprocess.Popen[str]) -> dict[str, object]:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise SystemExit("a measured process ended without its figures")
    return dict(json.loads(line))


def number(figures: dict[str, object], name: str) -> float:
    value = figures[name]
    assert isinstance(value, int | float)
    return float(value)


def measure_bare(rig: Rig, rate: float, warm_up: float, seconds: float) -> dict[str, float]:
    responder = rig.spawn(1, "bare_responder", warm_up)
    prober = None
    try:
        read(responder)
        prober = rig.spawn(0, "bare_prober", rate, warm_up, seconds)
        p, r = read(prober), read(responder)
    finally:
        for process in (prober, responder):
            if process is not None:
                process.terminate()
                process.wait()
    per = number(p, "cpu") / number(p, "probes") + number(r, "cpu") / number(r, "probes")
    return {"us_per_probe": per * 1e6, "rate": number(p, "probes") / seconds, "lost": number(p, "lost")}


def probe_list(host: str, own: Register, other: Register, rate: float, i: int, side: int) -> ProbeList:
    """All flows of an RNIC go to the one at the other end of its cable; one of them is traced."""
    rnics = len(own.rnics)
    peer = 1 + (1 - side) * rnics + i
    far = other.rnics[i]
    interval_us = round(1e6 * FLOWS_PER_RNIC / rate)
    return ProbeList(
        cluster=CLUSTER,
        host=host,
        device=device(side, i),
        number=1 + side * rnics + i,
        list_version=1,
        classes=[ProbeClass()],
        flows=[Flow(f, peer, 0xC000 + f, 0, 0, interval_us, 2) for f in range(FLOWS_PER_RNIC)],
        peers=[Peer(peer, f"{other.host}/{far.device}", far.gid, far.qpn, far.qkey, far.epoch, far.mtu)],
        max_rate=max(150.0, rate),
    )


async def measure_agents(
    rig: Rig, rnics: int, rate: float, warm_up: float, seconds: float, profile: bool = False
) -> dict[str, object]:
    """Two agents that probe each other; `rate` per RNIC. Each answers as much as it sends."""
    async with controller() as (bus, heard):
        agents = [rig.spawn_agent(side, rnics, rate, profile and side == 0) for side in (0, 1)]
        pids = [a.pid for a in agents]
        try:
            until = time.monotonic() + START_S
            while len(heard.registered) < 2 or any(len(r.rnics) < rnics for r in heard.registered.values()):
                if time.monotonic() > until or any(a.poll() is not None for a in agents):
                    raise SystemExit("an agent did not register")
                await asyncio.sleep(0.05)
            for side, host in enumerate(("h0", "h1")):
                own, other = heard.registered[host], heard.registered[f"h{1 - side}"]
                for i in range(rnics):
                    message = probe_list(host, own, other, rate, i, side)
                    await bus.publish(topics.Topic(CLUSTER, host, topics.LIST, message.device), encode(message), qos=1)
            await asyncio.sleep(warm_up)
            if profile:
                os.kill(pids[0], signal.SIGUSR1)
            before, cpu0, wall0 = packets(rnics), [cpu_of(p) for p in pids], time.monotonic()
            await asyncio.sleep(seconds)
            wall = time.monotonic() - wall0
            probes = (packets(rnics) - before) / PACKETS_PER_PROBE
            cpu = [cpu_of(p) - c for p, c in zip(pids, cpu0, strict=True)]
            if profile:
                os.kill(pids[0], signal.SIGUSR2)
            held = [memory(p) for p in pids]
        finally:
            for a in agents:
                a.terminate()
            # Their last reports still come.
            said = await asyncio.gather(*(asyncio.to_thread(a.communicate) for a in agents))
    return {
        "us_per_probe": sum(cpu) / probes * 1e6,
        "rate": probes / wall / 2,
        "core_share": sum(cpu) / 2 / wall,
        "lost": heard.lost,
        "exceptions": heard.exceptions,
        "rtt_us": heard.rtt_sum / 10 / heard.measured if heard.measured else None,
        "reports": len(heard.report_bytes),
        "report_bytes": max(heard.report_bytes, default=0),
        "rss_mib": max(h["rss_mib"] for h in held),
        "pss_mib": max(h["pss_mib"] for h in held),
        "profile": json.loads(said[0][0])["profile"] if profile else "",
    }


def measure_up(directory: Path, idle_s: float) -> dict[str, dict[str, float]]:
    """RSS and PSS of each process of `pingmesh up` in MiB, and in all."""
    from topology import files
    from topology.generate import leaf_spine

    fabric = directory / "topology.yaml"
    fabric.write_text(files.dump(leaf_spine(4, 4, 4, 1)))
    argv = ["up", "--topology", str(fabric), "--state", str(directory / "up"), "--port", "1884"]
    up = subprocess.Popen(
        [sys.executable, "-m", "pingmesh", *argv, "--listen", f"unix:{directory}/api.sock", "--log-level", "warning"],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert up.stdout is not None
        for line in up.stdout:
            if "ready:" in line:
                break
        else:
            raise SystemExit("pingmesh up did not come up")
        time.sleep(idle_s)
        children = Path(f"/proc/{up.pid}/task/{up.pid}/children").read_text().split()
        found = {"up": memory(up.pid)}
        for child in map(int, children):
            words = Path(f"/proc/{child}/cmdline").read_text().split("\0")
            name = next((w for w in ("controller", "analyzer") if w in words), "broker")
            found[name] = memory(child)
        assert set(found) == {"up", "broker", "controller", "analyzer"}, found
    finally:
        up.terminate()
        up.communicate()
    found["all"] = {k: sum(m[k] for m in found.values()) for k in ("rss_mib", "pss_mib")}
    return found


def show(label: str, figures: dict[str, object]) -> None:
    us, rate, lost = figures["us_per_probe"], figures["rate"], figures["lost"]
    print(f"  {label:<34} {us:7.0f} us CPU per probe, both ends, at {rate:.0f} probes/s; {lost:.0f} lost", flush=True)


def part(name: str, rest: list[str]) -> None:
    """What runs in a process of its own."""
    parts: dict[str, Callable[[], None]] = {
        "bare_prober": lambda: bare_prober(*map(float, rest)),
        "bare_responder": lambda: bare_responder(float(rest[0])),
        "profiled_agent": lambda: profiled_agent(rest),
    }
    parts[name]()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="shorter runs and no profile, under 50 s in all")
    parser.add_argument("--json", metavar="FILE", help="write the figures here")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--part", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    args = parser.parse_args()
    # Ended by a signal it must take agents, broker and namespaces with it, as it does by Ctrl-C.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    if args.part:
        part(args.part[0], args.part[1:])
        return 0
    if not args.inside:
        if shutil.which("unshare") is None or shutil.which("nsenter") is None:
            print("unshare and nsenter are needed (Debian: util-linux)", file=sys.stderr)
            return 2
        own_user = [] if os.geteuid() == 0 else ["--map-root-user"]
        argv = ["unshare", *own_user, "--net", sys.executable, __file__, "--inside", *sys.argv[1:]]
        os.execvp(argv[0], argv)  # one process: what ends it reaches the part that cleans up
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as directory:
        result = measure(Path(directory), args.quick)
    result |= {"load_before": load_before, "load_after": os.getloadavg()[0]}
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=2) + "\n")
    return 0


def measure(directory: Path, quick: bool) -> dict[str, object]:
    warm_up, seconds = (0.5, 5.0) if quick else (2.0, 60.0)
    broker_name = "mosquitto" if find_mosquitto() else "amqtt (mosquitto is not installed)"
    print(f"broker: {broker_name}; machine: {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    result: dict[str, object] = {
        "python": platform.python_version(),
        "kernel": platform.release(),
        "cores": os.cpu_count(),
        "seconds": seconds,
        "broker": broker_name,
    }
    rig = Rig(8)
    broker = subprocess.Popen(broker_command(*BROKER, directory / "broker"), stderr=subprocess.DEVNULL)
    try:
        result |= measure_rates(rig, warm_up, seconds, QUICK_ROUNDS if quick else ROUNDS)
        if not quick:
            profiled = asyncio.run(measure_agents(rig, 8, 150, warm_up, 5.0, profile=True))
            print("where it goes (cProfile, side that probes and answers 1,200/s; the profiler itself costs much):")
            print(profiled["profile"])
            result["profile"] = profiled["profile"]
        up = measure_up(directory, 2.0 if quick else 10.0)
        print("pingmesh up, idle, 4 leaves x 4 spines x 16 hosts")
        for name, m in up.items():
            print(f"  {name:<34} RSS {m['rss_mib']:6.1f} MiB, PSS {m['pss_mib']:6.1f} MiB")
        result["up"] = up
    finally:
        broker.terminate()
        broker.wait()
        rig.close()
    return result


def measure_rates(rig: Rig, warm_up: float, seconds: float, rounds: int) -> dict[str, object]:
    """Agents and bare loops at the two rates, and an agent of eight RNICs."""
    result: dict[str, object] = {}
    bare_fast = 0.0
    for rate, target in ((100, 2.5), (1200, 1.5)):
        print(f"{rate:,} probes/s per agent, one RNIC, probing and answering")
        bare, one = [], []
        for _ in range(rounds):  # in turn: the machine's speed changes by the minute
            bare.append(measure_bare(rig, rate, warm_up, seconds / rounds))
            one.append(asyncio.run(measure_agents(rig, 1, rate, warm_up, seconds / rounds)))
            show("bare loop", dict(bare[-1]))
            show("agent", one[-1])
            del one[-1]["profile"]
        bare_fast = median([b["us_per_probe"] for b in bare])
        ratio = median([number(o, "us_per_probe") for o in one]) / bare_fast
        print(f"  ratio of the medians {ratio:.2f} (target {target})")
        result |= {f"bare_{rate}": bare, f"agent_{rate}": one, f"ratio_{rate}": ratio}
    print("1,200 probes/s per agent, 8 RNICs at 150 each, probing and answering")
    eight = asyncio.run(measure_agents(rig, 8, 150, warm_up, seconds))
    show("agent", eight)
    ratio = number(eight, "us_per_probe") / bare_fast
    share = number(eight, "core_share")
    print(f"  ratio {ratio:.2f} to the bare loop on one socket")
    print(f"  one agent: {share:.1%} of a core (target 20 %)")
    print(f"  RSS {eight['rss_mib']:.1f} MiB (target 40), PSS {eight['pss_mib']:.1f} MiB")
    del eight["profile"]
    return result | {"agent_8x150": eight, "ratio_8x150": ratio, "core_share_8x150": share}


if __name__ == "__main__":
    sys.exit(main())
