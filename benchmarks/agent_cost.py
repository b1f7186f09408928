"""What probing costs: the agent's data plane against a bare blocking loop of the same packets at the same pace.

Both run over veth pairs between two network namespaces made for the purpose. Measured per probe: user and system CPU
of *both* ends (sending the probe, answering it twice, taking both ACKs). The bare loop only patches a sequence
number into a ready frame: no ICRC, no stamps, no accounting, no schedule. The agent does all of it under asyncio and
makes and encodes its report every five seconds. The MQTT client is not in the figures.

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
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

WARM_UP_S = 2.0
FLOWS_PER_RNIC = 60
CLUSTER = "bench"
REPORT_S = 5.0


def address(side: int, rnic: int) -> str:
    return f"10.9.{rnic}.{side}"


def device(side: int, rnic: int) -> str:
    return f"{'ab'[side]}{rnic}"


# ---------------------------------------------------------------- the parts that run in the namespaces


def cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def memory() -> dict[str, float]:
    """RSS and PSS of this process in MiB."""
    fields = dict(
        line.split(":", 1) for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:] if ":" in line
    )
    return {name.lower(): int(fields[name].split()[0]) / 1024 for name in ("Rss", "Pss")}


def say(**what: object) -> None:
    print(json.dumps(what), flush=True)


def bare_frame() -> bytearray:
    from agent import frames
    from pingmesh import probe

    length = frames.HEAD + probe.SIZE + frames.TAIL
    head, _ = frames.head(0, length, 0xC000, 0x123, 1, 0x456)
    return bytearray(head + bytes(probe.SIZE + frames.TAIL))


def bare_prober(rate: float, seconds: float) -> None:
    from agent.transport.sockets import open_quiet

    quiet = open_quiet(device(0, 0), address(0, 0), 4)
    s = bare_socket(0)
    frame = bare_frame()
    to = (address(1, 0), 0)
    step = 1 / rate
    sent = lost = 0
    start = due = time.monotonic()
    cpu0, counted = cpu_s(), False
    while due < start + WARM_UP_S + seconds:
        if not counted and due >= start + WARM_UP_S:
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


def bare_responder(rate: float, seconds: float) -> None:
    from agent.transport.sockets import open_quiet

    quiet = open_quiet(device(1, 0), address(1, 0), 4)
    s = bare_socket(1)
    s.settimeout(2.0)
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
        if not cpu0 and time.monotonic() >= start + WARM_UP_S:
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


def agent(side: int, rnics: int, rate: float, seconds: float, profile: bool) -> None:
    asyncio.run(run_agent(side, rnics, rate, seconds, profile))


async def run_agent(side: int, rnics: int, rate: float, seconds: float, profile: bool) -> None:
    from agent.engine import Engine
    from agent.transport.soft import SoftTransport
    from pingmesh.config import AgentSettings
    from pingmesh.messages import (
        PROBER_COLUMNS,
        Flow,
        Peer,
        ProbeClass,
        ProbeList,
        Report,
        encode,
        unpack_columns,
    )

    loop = asyncio.get_running_loop()
    transports = [SoftTransport(device(side, i), address(side, i)) for i in range(rnics)]
    events: list[object] = []
    settings = AgentSettings(max_rate=max(150.0, rate))
    engine = Engine(settings, CLUSTER, f"h{side}", transports, on_event=events.append, loop=loop)
    engine.start()
    say(infos=[[i.gid, i.qpn, i.qkey, i.epoch] for i in engine.infos()])
    others = json.loads(await loop.run_in_executor(None, sys.stdin.readline))
    interval_us = round(1e6 * FLOWS_PER_RNIC / rate)
    for i in range(rnics):
        number, peer = 1 + side * rnics + i, 1 + (1 - side) * rnics + i
        engine.apply_list(
            ProbeList(
                cluster=CLUSTER,
                host=f"h{side}",
                device=device(side, i),
                number=number,
                list_version=1,
                classes=[ProbeClass()],
                flows=[Flow(f, peer, 0xC000 + f, 0, 0, interval_us, 0) for f in range(FLOWS_PER_RNIC)],
                peers=[Peer(peer, f"x/{i}", *others[i], 4096)],
                max_rate=max(150.0, rate),
            )
        )
    await asyncio.sleep(WARM_UP_S)
    columns: list[bytes] = []
    traffic = 0
    profiler = cProfile.Profile()
    if profile:
        profiler.enable()
    # What left between the two moments, not what is in complete windows: so ask the transports.
    before = sum(engine.probes_sent().values())
    cpu0, wall0 = cpu_s(), time.monotonic()
    reports = 0
    while (left := wall0 + seconds - time.monotonic()) > 0:
        await asyncio.sleep(min(REPORT_S, left))
        rows, responder, until = engine.take_report()
        reports += 1
        report = Report(
            cluster=CLUSTER,
            host=f"h{side}",
            boot=1,
            seq=reports,
            now_ns=engine.wall_ns(),
            until_ns=until,
            prober=rows,
            responder=responder,
        )
        traffic += len(encode(report))
        columns += [r.columns for r in rows]
    cpu, wall = cpu_s() - cpu0, time.monotonic() - wall0
    sent = sum(engine.probes_sent().values()) - before
    profiler.disable()
    rtt_sum = measured = lost = 0
    for packed in columns:
        c = unpack_columns(PROBER_COLUMNS, packed)
        measured += sum(c[4])
        lost += sum(c[5])
        rtt_sum += sum(c[9])
    top = ""
    if profile:
        text = io.StringIO()
        pstats.Stats(profiler, stream=text).sort_stats("tottime").print_stats(22)
        top = text.getvalue()
    say(
        cpu=cpu,
        wall=wall,
        probes=sent,
        lost=lost,
        rtt_us=rtt_sum / 10 / measured if measured else None,
        report_bytes=traffic / max(1, reports),
        events=len(events),
        profile=top,
        **memory(),
    )
    # The other side may still be measuring: keep answering.
    await loop.run_in_executor(None, sys.stdin.readline)
    engine.close()


# ---------------------------------------------------------------- the rig


class Rig:
    """Two namespaces (this process's own and another) and veth pairs between them."""

    def __init__(self, rnics: int) -> None:
        self.other = subprocess.Popen(
            ["unshare", "--net", "--kill-child", "sleep", "infinity"], stdout=subprocess.DEVNULL
        )
        time.sleep(0.3)
        self.enter = ["nsenter", f"--net=/proc/{self.other.pid}/ns/net"]
        run = subprocess.run
        for i in range(rnics):
            a, b = device(0, i), device(1, i)
            run(["ip", "link", "add", a, "mtu", "4200", "type", "veth", "peer", "name", b, "mtu", "4200"], check=True)
            run(["ip", "link", "set", b, "netns", str(self.other.pid)], check=True)
            for side, name, prefix in ((0, a, []), (1, b, self.enter)):
                run([*prefix, "ip", "addr", "add", f"{address(side, i)}/31", "dev", name], check=True)
                run([*prefix, "ip", "link", "set", name, "up"], check=True)

    def spawn(self, side: int, *argv: object) -> subprocess.Popen[str]:
        prefix = self.enter if side else []
        return subprocess.Popen(
            [*prefix, sys.executable, __file__, "--part", *map(str, argv)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def close(self) -> None:
        self.other.kill()
        self.other.wait()


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


def measure_bare(rig: Rig, rate: float, seconds: float) -> dict[str, float]:
    responder = rig.spawn(1, "bare_responder", rate, seconds)
    read(responder)
    prober = rig.spawn(0, "bare_prober", rate, seconds)
    p, r = read(prober), read(responder)
    prober.wait()
    responder.wait()
    per = number(p, "cpu") / number(p, "probes") + number(r, "cpu") / number(r, "probes")
    return {"us_per_probe": per * 1e6, "rate": number(p, "probes") / seconds, "lost": number(p, "lost")}


def measure_agents(rig: Rig, rnics: int, rate: float, seconds: float, profile: bool = False) -> dict[str, object]:
    """Two agents that probe each other; `rate` per RNIC. Each answers as much as it sends."""
    pair = [rig.spawn(side, "agent", side, rnics, rate, seconds, int(profile and side == 0)) for side in (0, 1)]
    infos = [read(p)["infos"] for p in pair]
    for p, other in zip(pair, reversed(infos), strict=True):
        assert p.stdin is not None
        p.stdin.write(json.dumps(other) + "\n")
        p.stdin.flush()
    figures = [read(p) for p in pair]
    for p in pair:
        p.communicate("\n")
    probes = sum(number(f, "probes") for f in figures)
    cpu = sum(number(f, "cpu") for f in figures)
    return {
        "us_per_probe": cpu / probes * 1e6,
        "rate": number(figures[0], "probes") / number(figures[0], "wall"),
        "core_share": cpu / sum(number(f, "wall") for f in figures),
        "lost": sum(number(f, "lost") for f in figures),
        "rtt_us": figures[0]["rtt_us"],
        "report_bytes": figures[0]["report_bytes"],
        "rss_mib": max(number(f, "rss") for f in figures),
        "pss_mib": max(number(f, "pss") for f in figures),
        "profile": figures[0]["profile"],
    }


def show(label: str, figures: dict[str, object]) -> None:
    us, rate, lost = figures["us_per_probe"], figures["rate"], figures["lost"]
    print(f"  {label:<34} {us:7.0f} us CPU per probe, both ends, at {rate:.0f} probes/s; {lost:.0f} lost", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="shorter runs, under 50 s in all")
    parser.add_argument("--json", metavar="FILE", help="write the figures here")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--part", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        name, *rest = args.part
        parts: dict[str, Callable[[], None]] = {
            "bare_prober": lambda: bare_prober(float(rest[0]), float(rest[1])),
            "bare_responder": lambda: bare_responder(float(rest[0]), float(rest[1])),
            "agent": lambda: agent(int(rest[0]), int(rest[1]), float(rest[2]), float(rest[3]), rest[4] == "1"),
        }
        parts[name]()
        return 0
    if not args.inside:
        if shutil.which("unshare") is None or shutil.which("nsenter") is None:
            print("unshare and nsenter are needed (Debian: util-linux)", file=sys.stderr)
            return 2
        own_user = [] if os.geteuid() == 0 else ["--map-root-user"]
        argv = ["unshare", *own_user, "--net", sys.executable, __file__, "--inside", *sys.argv[1:]]
        return subprocess.run(argv, check=False).returncode

    seconds = 4.0 if args.quick else 30.0
    rig = Rig(8)
    try:
        result: dict[str, object] = {"python": platform.python_version(), "kernel": platform.release()}
        result |= {
            "cores": os.cpu_count(),
            "load_before": os.getloadavg()[0],
            "seconds": seconds,
            "mqtt": "not included",
        }
        print("100 probes/s, one RNIC")
        bare_slow = measure_bare(rig, 100, seconds)
        show("bare loop", dict(bare_slow))
        slow = measure_agents(rig, 1, 100, seconds)
        show("agent", slow)
        ratio_slow = number(slow, "us_per_probe") / bare_slow["us_per_probe"]
        print(f"  ratio {ratio_slow:.2f} (target 2.5)")
        print("1,200 probes/s per agent, one RNIC")
        bare_fast = measure_bare(rig, 1200, seconds)
        show("bare loop", dict(bare_fast))
        fast = measure_agents(rig, 1, 1200, seconds)
        show("agent", fast)
        ratio_fast = number(fast, "us_per_probe") / bare_fast["us_per_probe"]
        print(f"  ratio {ratio_fast:.2f} (target 1.5)")
        print("1,200 probes/s per agent, 8 RNICs at 150 each")
        eight = measure_agents(rig, 8, 150, seconds)
        show("agent", eight)
        ratio_eight = number(eight, "us_per_probe") / bare_fast["us_per_probe"]
        print(f"  ratio {ratio_eight:.2f} to the bare loop on one socket")
        share = number(eight, "core_share")
        print(f"  one agent, probing and answering: {share:.1%} of a core (target 20 %)")
        print(f"  RSS {eight['rss_mib']:.1f} MiB, PSS {eight['pss_mib']:.1f} MiB (target 40 RSS, MQTT not loaded)")
        profiled = measure_agents(rig, 8, 150, 5.0, profile=True)
        print("where it goes (cProfile, side that probes and answers 1,200/s; the profiler itself costs much):")
        print(profiled["profile"])
        for figures in (slow, fast, eight):
            del figures["profile"]
        result |= {
            "bare_100": bare_slow,
            "agent_100": slow,
            "ratio_100": ratio_slow,
            "bare_1200": bare_fast,
            "agent_1200": fast,
            "ratio_1200": ratio_fast,
            "agent_8x150": eight,
            "ratio_8x150": ratio_eight,
            "core_share_8x150": share,
            "load_after": os.getloadavg()[0],
        }
        if args.json:
            Path(args.json).write_text(json.dumps(result, indent=2) + "\n")
    finally:
        rig.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
