"""verbs_cost.py [--quick] [--json FILE]: what the agent's RDMA hot loop costs, beside a bare loop of the same calls.

Boots the virtual machine of `make test-vm` and builds a fabric with two hosts of eight Soft-RoCE RNICs in it. Measured
there: user and system CPU per probe of an engine (schedule, accounting, two ACKs) that only probes and of one that
only answers, each in a process of its own, beside `verbs_loop.py --events --acks 2`, which makes the same calls and
keeps no books; and the memory of a process with an engine of eight devices.

The share of a core at 8 x 150 probes/s is an *estimate*: the processor is emulated, so CPU per probe is divided by how
much slower one fixed piece of Python runs there than on the machine outside. What the kernel's Soft-RoCE does in
system calls is in it, and an RNIC does that itself: real hardware costs less.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from verbs_rtt import Pair, in_machine

from pingmesh import probe

RATE, DEVICES = 150.0, 8
FLOWS = 60
CLUSTER = "bench"
GOAL = 1.5


def calibrate(rounds: int = 20_000) -> float:
    """CPU seconds of a fixed piece of work like the hot loop's: headers coded and decoded, rows kept in a dict."""
    header = probe.Header(probe.MAGIC, probe.VERSION, *[0] * 19)
    rows: dict[int, list[int]] = {}
    began = time.process_time_ns()
    for i in range(rounds):
        buffer = probe.encode(header)
        probe.stamp_probe(buffer, i, 1)
        row = rows.setdefault(probe.decode(buffer).seq & 63, [0, 0])
        row[0] += 1
    return (time.process_time_ns() - began) / 1e9


def cpu_s() -> float:
    """User and system CPU of this process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def memory() -> dict[str, float]:
    """RSS and PSS of this process in MiB."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    return {f"{name.lower()}_mib": round(int(fields[name].split()[0]) / 1024, 1) for name in ("Rss", "Pss")}


async def worker(devices: list[str], rate: float, seconds: float) -> None:
    """An engine on these devices. Prints its RNICs; reads the peers; probes and answers; prints CPU and counts."""
    from agent.devices import open_transport
    from agent.engine import Engine
    from agent.interfaces import Netlink
    from pingmesh.config import AgentSettings
    from pingmesh.messages import Flow, Peer, ProbeClass, ProbeList

    settings = AgentSettings(transport="verbs", timeout_ms=4000, overdue_ms=2000, max_rate=max(rate, 1.0))
    with Netlink() as netlink:
        transports = [open_transport(settings, netlink, d) for d in devices]
    loop = asyncio.get_running_loop()
    engine = Engine(settings, CLUSTER, "bench", transports, on_event=lambda event: None, loop=loop)
    engine.start()
    infos = [[i.gid, i.qpn, i.qkey, i.epoch, i.mtu, i.device] for i in engine.infos()]
    print(json.dumps({"rnics": infos, "memory": memory()}), flush=True)
    peers = json.loads(await loop.run_in_executor(None, sys.stdin.readline))
    if rate:
        for k, (info, (gid, qpn, qkey, epoch, mtu, name)) in enumerate(zip(infos, peers, strict=True)):
            flows = [Flow(i, 1000 + k, 0xC001 + i, 0, 1, int(FLOWS / rate * 1e6), 0) for i in range(FLOWS)]
            message = ProbeList(
                cluster=CLUSTER,
                host="bench",
                device=str(info[5]),
                number=1 + k,
                list_version=1,
                classes=[ProbeClass()],
                flows=flows,
                peers=[Peer(1000 + k, f"far/{name}", gid, qpn, qkey, epoch, mtu)],
                max_rate=rate,
            )
            engine.apply_list(message)
    await asyncio.sleep(3)
    engine.take_report()
    sent, cpu = sum(engine.probes_sent().values()), cpu_s()
    await asyncio.sleep(seconds)
    said = {"sent": sum(engine.probes_sent().values()) - sent, "cpu_s": cpu_s() - cpu, "memory": memory()}
    print(json.dumps(said), flush=True)
    # Who answers goes on until the other has measured.
    await loop.run_in_executor(None, sys.stdin.readline)
    engine.close()


class Worker:
    """A `worker` in a process of its own."""

    def __init__(self, devices: list[str], rate: float, seconds: float) -> None:
        argv = [sys.executable, __file__, "--worker", ",".join(devices), "--rate", str(rate), "--seconds", str(seconds)]
        self._child = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.about = self.read()

    def read(self) -> dict[str, Any]:
        """The next thing it says."""
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        if not line:
            raise RuntimeError("the worker has ended: see above")
        return json.loads(line)  # type: ignore[no-any-return]

    def say(self, what: object) -> None:
        """Tell it something."""
        assert self._child.stdin is not None
        self._child.stdin.write(json.dumps(what) + "\n")
        self._child.stdin.flush()

    def end(self) -> None:
        """Let it go."""
        self.say("done")
        self._child.wait(30)


def engines(near: list[str], far: list[str], rate: float, seconds: float) -> dict[str, float]:
    """CPU per probe of who probes and of who answers, in microseconds, and their memory."""
    prober, responder = Worker(near, rate, seconds), Worker(far, 0.0, seconds)
    responder.say(prober.about["rnics"])
    prober.say(responder.about["rnics"])
    probed, answered = prober.read(), responder.read()
    prober.end()
    responder.end()
    sent = max(1, probed["sent"])
    return {
        "probes": probed["sent"],
        "probes_per_s": probed["sent"] / seconds,
        "prober_us": probed["cpu_s"] / sent * 1e6,
        "responder_us": answered["cpu_s"] / sent * 1e6,
        "prober_rss_mib": probed["memory"]["rss_mib"],
        "prober_pss_mib": probed["memory"]["pss_mib"],
    }


def measure(quick: bool, outside_s: float) -> dict[str, Any]:
    """All of it, in the machine."""
    from pingmesh.lab.client import Lab

    seconds = 10.0 if quick else 40.0
    with Lab.up(
        directory=Path("/tmp/pingmesh-verbs-cost"),
        agents=False,
        transport="verbs",
        leaves=1,
        spines=1,
        hosts_per_leaf=2,
        rnics_per_host=DEVICES,
        seed=7,
        progress=lambda text: print(f"lab: {text}", flush=True),
    ) as lab:
        rnics = lab.topology.rnics
        sides = [[f"rxe_{h}-rnic{i}" for i in range(DEVICES)] for h in ("h1", "h2")]
        first, second = [
            (side[0], str(rnics[f"{h}/rnic0"].address)) for side, h in zip(sides, ("h1", "h2"), strict=True)
        ]
        pair = Pair(first, second, 300 if quick else 1500)
        bare = pair.loop("--events", "--acks", "2")
        print("bare loop", json.dumps(bare), flush=True)
        one = engines(sides[0][:1], sides[1][:1], RATE, seconds)
        print("one device", json.dumps(one), flush=True)
        # The emulated processor cannot carry 8 x 150 probes/s; what eight devices hold does not depend on the rate.
        eight = engines(sides[0], sides[1], 5.0, seconds)
        print("eight devices", json.dumps(eight), flush=True)
    inside_s = calibrate()
    factor = inside_s / outside_s
    both = one["prober_us"] + one["responder_us"]
    return {
        "bare_loop": bare,
        "one_device": one,
        "eight_devices": eight,
        "ratio_prober": one["prober_us"] / bare["cpu_us_per_probe"],
        "ratio_responder": one["responder_us"] / bare["server_cpu_us_per_probe"],
        "memory_eight_devices_mib": eight["prober_rss_mib"],
        "calibration_s": {"inside": inside_s, "outside": outside_s, "factor": factor},
        "estimate_share_of_core_8x150": both / factor * RATE * DEVICES / 1e6,
        "derivation": "(prober_us + responder_us) / factor * 8 * 150 / 1e6: each RNIC probes and answers 150 a second",
    }


def main() -> int:
    """Exit code 1: dearer than 1.5 x the bare loop, or over 40 MB."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--outside", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--rate", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        asyncio.run(worker(args.worker.split(","), args.rate, args.seconds))
        return 0
    if os.environ.get("PINGMESH_VM") != "1":
        argv = ["--outside", str(calibrate()), *(["--quick"] if args.quick else [])]
        return in_machine(Path(__file__), argv, args.json, 900)
    figures = measure(args.quick, args.outside)
    if args.json:
        Path(args.json).write_text(json.dumps(figures, indent=2) + "\n")
    print(json.dumps(figures, indent=2))
    within = figures["ratio_prober"] <= GOAL and figures["ratio_responder"] <= GOAL
    return 0 if within and figures["memory_eight_devices_mib"] <= 40 else 1


if __name__ == "__main__":
    sys.exit(main())
