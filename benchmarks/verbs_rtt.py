"""verbs_rtt.py [--quick] [--json FILE]: what `pingmesh ping` measures over RDMA, beside perftest and a bare loop.

Boots the virtual machine of `make test-vm`, builds a 2x2 leaf-spine of Soft-RoCE hosts in it, and measures on the same
two devices: `pingmesh ping --interval 0`, with `--busy` and without, `ib_send_lat -c UD` (x 2: it tells half the round
trip), `ibv_ud_pingpong` and a busy-polling pyverbs loop. Then it delays one cable by 20 ms each way and compares the
medians of each flow with what the traced paths of its probes and ACKs say. The processor is emulated: the ratios mean
something, the microseconds do not.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from agent.ping import Aim, Pinger, Plan
from pingmesh import probe

ROOT = Path(__file__).resolve().parents[1]
GOAL = 1.5
DELAY_MS = 20.0
DELAYED = ("leaf1", "spine1")
PACE_NS = 10_000_000
FLOW_PROBES = 1000
TOLERANCE_MS = 1.0
"""For each crossing of the delayed cable: twice that where the ACK crosses it too."""
LOOP = ROOT / "benchmarks/verbs_loop.py"
PORT = 4791


def in_machine(script: Path, argv: list[str], json_file: str | None, limit: int) -> int:
    """Run a benchmark inside the virtual machine and bring its figures out."""
    venv = ROOT / ".venv"
    if code := subprocess.run(["tools/vm-setup.sh", str(venv)], cwd=ROOT, check=False).returncode:
        return code
    with tempfile.TemporaryDirectory(prefix="pingmesh-bench-") as share:
        inner = [*argv, "--json", f"{share}/figures.json"]
        command = [
            sys.executable,
            str(ROOT / "tools/vm.py"),
            "--venv",
            str(venv),
            "--share",
            share,
            "--limit",
            str(limit),
            "--",
        ]
        code = subprocess.run([*command, "python", str(script), *inner], check=False).returncode
        figures = Path(share) / "figures.json"
        if json_file and figures.exists():
            Path(json_file).write_text(figures.read_text())
    return code


class Pair:
    """Two RNICs of the lab and how to measure between them."""

    def __init__(self, near: tuple[str, str], far: tuple[str, str], count: int) -> None:
        self.near, self.far, self.count = near, far, count

    def together(self, server: list[str], client: list[str], pause: float) -> tuple[str, str, float, float]:
        """(server's output, client's output, CPU seconds of each)."""
        s = subprocess.Popen(server, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        time.sleep(pause)
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        out = subprocess.run(client, capture_output=True, text=True, timeout=300, check=False)
        middle = resource.getrusage(resource.RUSAGE_CHILDREN)
        try:
            told = s.communicate(timeout=60)[0]
        except subprocess.TimeoutExpired:
            s.kill()
            told = s.communicate()[0]
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return told, out.stdout + out.stderr, _cpu(after) - _cpu(middle), _cpu(middle) - _cpu(before)

    def gid_index(self, end: tuple[str, str]) -> str:
        """Index of a device's RoCE v2 GID."""
        from pingmesh.cli import rdma

        return next(
            str(g.index)
            for d in rdma.devices()
            if d.name == end[0]
            for g in d.gids
            if g.version == 2 and g.address == end[1]
        )

    def ping(self, target: str, *more: str) -> dict[str, Any]:
        """One run of `pingmesh ping`."""
        argv = [sys.executable, "-m", "pingmesh", "ping", "--transport", "verbs", "--device", self.near[0], target]
        argv += ["--count", str(self.count), "--interval", "0", "--timeout", "5", "--json", *more]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"pingmesh ping: {done.stderr or done.stdout[-300:]}")
        return json.loads(done.stdout)  # type: ignore[no-any-return]

    def serve(self, *more: str) -> tuple[subprocess.Popen[str], str]:
        """The far end of `pingmesh ping`, and its target."""
        argv = [sys.executable, "-m", "pingmesh", "ping", "--serve", "--transport", "verbs", "--device", self.far[0]]
        s = subprocess.Popen([*argv, "--json", *more], stdout=subprocess.PIPE, text=True)
        assert s.stdout is not None
        return s, json.loads(s.stdout.readline())["target"]

    def pinged(self, *options: str) -> dict[str, Any]:
        """`pingmesh ping` to a far end that is started for it."""
        server, target = self.serve(*options)
        try:
            return told(self.ping(target, *options))
        finally:
            server.terminate()
            server.wait()

    def perftest(self) -> dict[str, float]:
        """Median round trip (twice what is printed) and the client's CPU."""
        common = ["ib_send_lat", "-c", "UD", "-s", "64", "-n", str(self.count), "-F"]
        server = [*common, "-d", self.far[0], "-x", self.gid_index(self.far)]
        client = [*common, "-d", self.near[0], "-x", self.gid_index(self.near), self.far[1]]
        _, told, _, cpu = self.together(server, client, 4.0)
        row = re.search(r"^\s*\d+\s+\d+\s+([\d.]+)\s+([\d.]+)\s+([\d.]+)", told, re.M)
        if row is None:
            raise RuntimeError(f"ib_send_lat: {told[-500:]}")
        return {"rtt_us": 2 * float(row[3]), "cpu_us_per_probe": cpu * 1e6 / self.count}

    def pingpong(self) -> dict[str, float]:
        """Mean round trip."""
        common = ["ibv_ud_pingpong", "-s", "64", "-n", str(self.count)]
        server = [*common, "-d", self.far[0], "-g", self.gid_index(self.far)]
        client = [*common, "-d", self.near[0], "-g", self.gid_index(self.near), self.far[1]]
        _, told, _, cpu = self.together(server, client, 4.0)
        row = re.search(r"= ([\d.]+) usec/iter", told)
        if row is None:
            raise RuntimeError(f"ibv_ud_pingpong: {told[-500:]}")
        return {"rtt_us": float(row[1]), "cpu_us_per_probe": cpu * 1e6 / self.count}

    def paced(self, rate: float, count: int) -> tuple[dict[str, float], dict[str, float]]:
        """What the bare loop's two ends say of their cost at a prober's pace."""
        return self._ends("--events", "--acks", "2", "--rate", str(rate), "--count", str(count))

    def _ends(self, *options: str) -> tuple[dict[str, Any], dict[str, Any]]:
        python = [sys.executable, str(LOOP)]
        s = subprocess.Popen([*python, "server", *self.far, *options], stdout=subprocess.PIPE, text=True)
        assert s.stdout is not None
        address, qpn = s.stdout.readline().split()
        done = subprocess.run(
            [*python, "client", *self.near, address, qpn, *options], capture_output=True, text=True, check=False
        )
        told = s.communicate(timeout=60)[0]
        if done.returncode:
            raise RuntimeError(f"verbs_loop.py: {done.stderr[-500:]}")
        return json.loads(done.stdout), json.loads(told)

    def loop(self, *more: str) -> dict[str, float]:
        """The bare pyverbs loop."""
        near, far = self._ends("--count", str(self.count), *more)
        return {
            "rtt_us": statistics.median(near["whole_ns"]) / 1000,
            "rtt_p10_us": tenth(near["whole_ns"]),
            "network_rtt_us": statistics.median(near["network_ns"]) / 1000,
            "network_rtt_p10_us": tenth(near["network_ns"]),
            "network_rtt_after_us": statistics.median(near["network_after_ns"]) / 1000,
            "negative_after": sum(n < 0 for n in near["network_after_ns"]),
            "cpu_us_per_probe": near["cpu_us"],
            "server_cpu_us_per_probe": far["cpu_us"],
        }


def _cpu(usage: resource.struct_rusage) -> float:
    return usage.ru_utime + usage.ru_stime


def hop(source: str, target: str, sport: int, ttl: int) -> str | None:
    """The address of the hop at which a packet of this 5-tuple dies."""
    from agent import icmp

    with (
        socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP) as ear,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s,
    ):
        ear.settimeout(0.5)
        s.bind((source, sport))
        s.setsockopt(socket.IPPROTO_IP, socket.IP_TTL, ttl)
        for _ in range(8):
            s.sendto(bytes(40), (target, PORT))
            end = time.monotonic() + 0.5
            while time.monotonic() < end:
                try:
                    packet, sender = ear.recvfrom(2048)
                except TimeoutError:
                    break
                quoted = icmp.parse(socket.AF_INET, packet, sender[0])
                if quoted is not None and quoted.sport == sport:
                    return str(sender[0])
    return None


class Ways:
    """Which ways packets between two RNICs take, by tracing their 5-tuples."""

    def __init__(self, topology: Any, link: tuple[str, str]) -> None:
        self._topology = topology
        self._link = set(link)

    def crosses(self, source: str, target: str, sport: int) -> int | None:
        """How often packets from one RNIC to the other cross the link, 0 or 1; None if their way is not known."""
        from topology.paths import path_elements, path_from_hops

        near, far = (self._topology.rnics[n] for n in (source, target))
        spine = hop(str(near.address), str(far.address), sport, 2)
        paths = path_from_hops(self._topology, near.legs[0].switch, far.legs[0].switch, [(2, spine)])
        ways = [path_elements(self._topology, source, target, p) for p in paths]
        found = {any(set(e.split("->")) == self._link for e in way) for way in ways}
        return int(found.pop()) if len(found) == 1 else None


def delays(lab: Any, pair: Pair, names: tuple[str, str], target: str) -> list[dict[str, Any]]:
    """Medians of each flow without and with a delay on leaf1--spine1, and what its paths say they should be.

    Soft-RoCE's source ports follow the queue pairs' numbers: one transport measures before and after, a flow at a time.
    """
    from agent.devices import open_transport
    from agent.interfaces import Netlink
    from pingmesh.config import AgentSettings

    loop = asyncio.new_event_loop()
    with Netlink() as netlink:
        transport = open_transport(AgentSettings(transport="verbs"), netlink, pair.near[0])
    ways = Ways(lab.topology, DELAYED)
    wanted = {transport.source_port(sport): sport for sport in range(0xC001, 0xC041)}

    def measured(sport: int) -> tuple[list[int], set[int]]:
        """(network RTTs in ns, source ports of the ACKs)"""
        ports: set[int] = set()
        plan = Plan(FLOW_PROBES, PACE_NS, 5_000_000_000, probe.SIZE, 26, sport, "default")
        pinger = Pinger(transport, Aim.parse(target), plan, lambda one: ports.add(one.sport))
        return list(loop.run_until_complete(pinger.run()).network), ports - {0}

    out: list[dict[str, Any]] = []
    for real, sport in wanted.items():
        first, ports = measured(sport)
        (back,) = ports
        lab.fault_add(["link", *DELAYED, "--delay", f"{DELAY_MS:g}"])
        second, _ = measured(sport)
        lab.fault_clear()
        crossings = [ways.crosses(*names, real), ways.crosses(*names[::-1], back)]
        known = [c for c in crossings if c is not None]
        expected = sum(known) * DELAY_MS if len(known) == 2 else None
        before, after = statistics.median(first) / 1e6, statistics.median(second) / 1e6
        flow = {"sport": real, "ack_sport": back, "crosses": crossings, "probes": [len(first), len(second)]}
        flow["difference_p10_ms"] = round((tenth(second) - tenth(first)) / 1000, 3)
        flow |= {"before_ms": before, "after_ms": after, "difference_ms": after - before, "expected_ms": expected}
        allowed = TOLERANCE_MS * max(1, sum(known))
        flow["ok"] = expected is not None and abs(after - before - expected) <= allowed
        print("flow", json.dumps(flow), flush=True)
        out.append(flow)
    transport.close()
    loop.close()
    return out


def together(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """The median of each number over the rounds, and all rounds."""
    out: dict[str, Any] = {}
    for name in dict.fromkeys(n for one in rounds for n in one):
        values = [one[name] for one in rounds if isinstance(one.get(name), int | float)]
        if values:
            out[name] = statistics.median(values)
    return out | {"rounds": rounds}


def measure(quick: bool, rounds: int, flows: bool) -> dict[str, Any]:
    """All of it, in the machine."""
    from pingmesh.lab.client import Lab

    count = 200 if quick else 1000
    figures: dict[str, Any] = {"count": count, "delay_ms": DELAY_MS}
    with Lab.up(
        directory=Path("/tmp/pingmesh-verbs-rtt"),
        agents=False,
        transport="verbs",
        leaves=2,
        spines=2,
        hosts_per_leaf=2,
        seed=7,
        progress=lambda text: print(f"lab: {text}", flush=True),
    ) as lab:
        names = ("h1/rnic0", "h3/rnic0")
        ends = [(f"rxe_{n.replace('/', '-')}", str(lab.topology.rnics[n].address)) for n in names]
        pair = Pair(ends[0], ends[1], count)
        runs: dict[str, Callable[[], dict[str, Any]]] = {
            "busy_loop": pair.loop,
            "pingmesh_ping_busy": partial(pair.pinged, "--busy"),
            "event_loop": partial(pair.loop, "--events"),
            "pingmesh_ping": pair.pinged,
            "ib_send_lat_x2": pair.perftest,
            "ibv_ud_pingpong": pair.pingpong,
        }
        done: dict[str, list[dict[str, Any]]] = {name: [] for name in runs}
        # In turn: what else this machine does changes by the minute.
        for _ in range(rounds):
            for name, run in runs.items():
                try:
                    done[name].append(run())
                except (RuntimeError, OSError, subprocess.SubprocessError, ValueError) as error:
                    done[name].append({"failed": str(error)})
                print(name, json.dumps(done[name][-1]), flush=True)
        figures |= {name: together(some) for name, some in done.items()}
        figures["flows"] = []
        if flows:
            server, target = pair.serve()
            try:
                figures["flows"] = delays(lab, pair, names, target)
            finally:
                server.terminate()
                server.wait()
    figures["ratios"] = {
        f"{ours} / {name}": {
            key: round(figures[ours][key] / figures[name][key], 3)
            for key in ("rtt_us", "rtt_p10_us", "network_rtt_us", "network_rtt_p10_us", "cpu_us_per_probe")
            if key in figures[ours] and key in figures[name]
        }
        for ours in ("pingmesh_ping_busy", "pingmesh_ping")
        for name in ("busy_loop", "event_loop", "ib_send_lat_x2", "ibv_ud_pingpong")
    }
    return figures


def told(said: dict[str, Any]) -> dict[str, Any]:
    """Of what `pingmesh ping` said, what is compared."""
    names = ("network_rtt_us", "prober_delay_us", "responder_delay_us")
    counts = ("cpu_us_per_probe", "answered", "lost", "invalid", "clock")
    # As others count it: from the call of post_send till the answer is there, the far end's delay with it.
    whole = [p["t5"] - p["t1"] for p in said["probes"] if p["t5"]]
    network = [p["t5"] - p["t2"] - p["t4_t3"] for p in said["probes"] if p["outcome"] == "answered"]
    out = {n: (said[n] or {}).get("median") for n in names} | {n: said[n] for n in counts}
    tenths = {"rtt_p10_us": tenth(whole), "network_rtt_p10_us": tenth(network)}
    return {"rtt_us": statistics.median(whole) / 1000} | tenths | out


def tenth(values: list[int]) -> float:
    """What a tenth of them stays below, in microseconds: where other load takes the processor away, the rest wait."""
    return sorted(values)[len(values) // 10] / 1000


def main() -> int:
    """Exit code 1: a flow's delay was not what its path says, or the network RTT is over 1.5 x the busy loop's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="200 probes a flow instead of 1000")
    parser.add_argument("--rounds", type=int, help="default 3; with --quick 1")
    parser.add_argument("--no-flows", action="store_true", help="round trips only, without the delay on a cable")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    rounds = args.rounds or (1 if args.quick else 3)
    if os.environ.get("PINGMESH_VM") != "1":
        argv = ["--rounds", str(rounds), *(["--quick"] if args.quick else [])]
        argv += ["--no-flows"] if args.no_flows else []
        return in_machine(Path(__file__), argv, args.json, 1800)
    figures = measure(args.quick, rounds, not args.no_flows)
    if args.json:
        Path(args.json).write_text(json.dumps(figures, indent=2) + "\n")
    print("ratios", json.dumps(figures["ratios"], indent=2))
    within = figures["ratios"]["pingmesh_ping_busy / busy_loop"]["network_rtt_us"] <= GOAL
    return 0 if all(f["ok"] for f in figures["flows"]) and within else 1


if __name__ == "__main__":
    sys.exit(main())
