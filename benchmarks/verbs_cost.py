"""verbs_cost.py [--quick] [--json FILE]: what the agent's RDMA hot loop costs, beside a bare loop of the same calls.

Boots the virtual machine of `make test-vm` and builds a fabric with two hosts of eight Soft-RoCE RNICs in it. Measured
there: the memory of whole agents with eight devices; user and system CPU per probe of an engine (schedule, accounting,
two ACKs) that only probes and of one that only answers, each in a process of its own and on one device at 50 probes/s
(`--rate` for others; an emulated processor carries few), in turn with `verbs_loop.py --events --acks 2 --rate 50`.
That makes the same calls and keeps no books; it wakes up at the moments that a prober would draw, sends as many probes
at each and asks for as many completions.

The share of a core at 8 x 150 probes/s is an *estimate*: the processor is emulated, so CPU per probe is divided by how
much slower one fixed piece of Python runs there than on the machine outside. What the kernel's Soft-RoCE does in
system calls is in it, and an RNIC does that itself: real hardware costs less.
"""

from __future__ import annotations

import argparse
import asyncio
import compileall
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests/vm"))

import vm_lab  # type: ignore[import-not-found]
from verbs_loop import FLOWS
from verbs_rtt import ROOT, Pair, in_machine
from verbs_soak import ours

from pingmesh import probe

RATE, GOAL_RATE, DEVICES = 50.0, 150.0, 8
CLUSTER = "bench"
GOAL, MEMORY_MB = 1.5, 40.0
AGENTS_S = 600.0
AGENTS_SETTLE_S = 60.0


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


def cost() -> tuple[float, float]:
    """CPU of this process in seconds: all of it, and what was spent in user space."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime, usage.ru_utime


def memory(pid: int) -> dict[str, float]:
    """RSS and PSS of a process in MB."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    return {f"{name.lower()}_mb": round(int(fields[name].split()[0]) * 1024 / 1e6, 1) for name in ("Rss", "Pss")}


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
    print(json.dumps({"rnics": infos}), flush=True)
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
    sent, before = sum(engine.probes_sent().values()), cost()
    await asyncio.sleep(seconds)
    total, user = (b - a for a, b in zip(before, cost(), strict=True))
    print(json.dumps({"sent": sum(engine.probes_sent().values()) - sent, "cpu_s": total, "user_s": user}), flush=True)
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


def engines(near: str, far: str, seconds: float, rate: float) -> dict[str, float]:
    """CPU per probe of who probes and of who answers, in microseconds."""
    prober, responder = Worker([near], rate, seconds), Worker([far], 0.0, seconds)
    responder.say(prober.about["rnics"])
    prober.say(responder.about["rnics"])
    probed, answered = prober.read(), responder.read()
    prober.end()
    responder.end()
    sent = max(1, probed["sent"])
    out: dict[str, float] = {"probes_per_s": probed["sent"] / seconds}
    for name, said in (("prober", probed), ("responder", answered)):
        out |= {f"{name}_us": said["cpu_s"] / sent * 1e6, f"{name}_user_us": said["user_s"] / sent * 1e6}
    return out


def agents_memory(lab: Any) -> dict[str, dict[str, float]]:
    """Of whole agents that probe and answer, by name; they are stopped afterwards, and what serves them too."""
    deadline = time.monotonic() + AGENTS_S
    while lab.status()["agents"]["online"] < len(lab.topology.hosts):
        if time.monotonic() > deadline:
            raise SystemExit(f"the agents are not there: {lab.status()}")
        time.sleep(1)
    time.sleep(AGENTS_SETTLE_S)
    here = ours()
    processes = [p for p in lab.lab_status()["processes"] if p["pid"]]
    found = {p["name"]: memory(here[p["pid"]]) for p in processes if p["name"].startswith("agent:")}
    for process in reversed(processes):
        lab.process("stop", process["name"])
    return found


def bare(pair: Pair, seconds: float, rate: float) -> dict[str, float]:
    """The same of the bare loop."""
    said = pair.paced(rate, int(rate * seconds))
    if said[1]["answered"] < 0.9 * rate * seconds:
        raise RuntimeError(f"the bare loop answered {said[1]['answered']} of {rate * seconds:.0f}")
    return {
        f"{role}_{name}_us".replace("_cpu", ""): said[i][f"{name}_us"]
        for i, role in enumerate(("prober", "responder"))
        for name in ("cpu", "user")
    }


def measure(quick: bool, rounds: int, outside_s: float, rate: float) -> dict[str, Any]:
    """All of it, in the machine."""
    from pingmesh.lab.client import Lab

    seconds = 10.0 if quick else 20.0
    os.environ.update(vm_lab.SLOW)
    with Lab.up(
        directory=Path("/tmp/pingmesh-verbs-cost"),
        transport="verbs",
        leaves=1,
        spines=1,
        hosts_per_leaf=2,
        rnics_per_host=DEVICES,
        seed=7,
        progress=lambda text: print(f"lab: {text}", flush=True),
    ) as lab:
        agents = agents_memory(lab)
        print("agents", json.dumps(agents), flush=True)
        ends = [(f"rxe_{h}-rnic0", str(lab.topology.rnics[f"{h}/rnic0"].address)) for h in ("h1", "h2")]
        pair = Pair(ends[0], ends[1], 0)
        turns: list[dict[str, dict[str, float]]] = []
        for _ in range(rounds):
            # In turn: what else this machine does changes by the minute.
            turn = {"bare_loop": bare(pair, seconds, rate), "engine": engines(ends[0][0], ends[1][0], seconds, rate)}
            turn["calibration"] = {"inside_s": calibrate()}
            print("round", json.dumps(turn), flush=True)
            turns.append(turn)

    names = ("prober_us", "prober_user_us", "responder_us", "responder_user_us")
    ratios = {
        f"ratio_{n.removesuffix('_us')}": statistics.median(
            t["engine"][n] / max(t["bare_loop"][n], 1e-9) for t in turns
        )
        for n in names
    }

    def share(part: str) -> float:
        """Of a core outside, at 8 x 150 probes/s."""
        return statistics.median(
            (t["engine"][f"prober{part}_us"] + t["engine"][f"responder{part}_us"])
            / (t["calibration"]["inside_s"] / outside_s)
            * GOAL_RATE
            * DEVICES
            / 1e6
            for t in turns
        )

    return {
        "agents_of_eight_devices": agents,
        "rounds": turns,
        "calibration_outside_s": outside_s,
        "factor": statistics.median(t["calibration"]["inside_s"] for t in turns) / outside_s,
        **ratios,
        "share_of_core_8x150": share(""),
        "share_of_core_8x150_user": share("_user"),
        "memory_mb": max(a["rss_mb"] for a in agents.values()),
        "derivation": "(prober_us + responder_us) / factor * 8 * 150 / 1e6: each RNIC probes and answers 150 a second",
    }


def main() -> int:
    """Exit code 1: dearer than 1.5 x the bare loop, or over 40 MB."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rounds", type=int, help="default 5; with --quick 1")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--outside", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--rate", type=float, default=RATE, help="probes/s (default %(default)g)")
    parser.add_argument("--seconds", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        asyncio.run(worker(args.worker.split(","), args.rate, args.seconds))
        return 0
    rounds = args.rounds or (1 if args.quick else 5)
    if os.environ.get("PINGMESH_VM") != "1":
        outside = statistics.median(calibrate() for _ in range(5))
        for folder in ("agent", "pingmesh"):  # as installed: what compiles its modules itself keeps a megabyte of that
            compileall.compile_dir(ROOT / folder, quiet=1)
        argv = [
            "--outside",
            str(outside),
            "--rounds",
            str(rounds),
            "--rate",
            str(args.rate),
            *(["--quick"] if args.quick else []),
        ]
        return in_machine(Path(__file__), argv, args.json, 1800)
    figures = measure(args.quick, rounds, args.outside, args.rate)
    if args.json:
        Path(args.json).write_text(json.dumps(figures, indent=2) + "\n")
    print(json.dumps(figures, indent=2))
    within = figures["ratio_prober"] <= GOAL and figures["ratio_responder"] <= GOAL
    return 0 if within and figures["memory_mb"] <= MEMORY_MB else 1


if __name__ == "__main__":
    sys.exit(main())
