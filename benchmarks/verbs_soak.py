"""verbs_soak.py [--quick] [--minutes 60] [--json FILE] [--seed N]: verbs agents for an hour, with trouble all the time.

Boots the virtual machine of `make test-vm` and builds a 2x2 leaf-spine of four Soft-RoCE hosts in it, with broker,
controller, analyzer and agents. Each minute, at a random moment, one port goes down for some seconds, and the agent of
another host is restarted. Every 15 s: memory and descriptors of every process that is not restarted, and how many of
its receive buffers each agent says the device does not have, and for how long this machine stood still itself. Every
incident is judged as it opens: the RNIC whose port flaps, while it is down, is right; what names it up to 15 s later
is late; that an agent which is being restarted is down (it takes up to half a minute here) is `away`; that a host is
short of CPU is true of an emulated processor; everything else is wrong. All is printed at once.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests/vm"))

import aiomqtt
import vm_lab  # type: ignore[import-not-found]
from verbs_rtt import in_machine

from pingmesh import topics
from pingmesh.lab import judge
from pingmesh.lab.client import Lab
from pingmesh.lab.fabric import MANAGEMENT_ADDRESS
from pingmesh.lab.namespaces import LabError
from pingmesh.lab.supervisor import BROKER_PORT
from pingmesh.messages import Report, decode

FLAPPING, RESTARTED = "h4/rnic0", "h1"
PERIOD_S = 60.0
SAMPLE_S = 15.0
TICK_S = 0.5
READY_S = 900.0
LATE_S = 15.0
AWAY_S = 40.0
SETTLE_S = 30.0
GROWTH_MIB, GROWTH_FDS = 2.0, 0
"""What may be left over after the hour: allocators have their ways, descriptors have not."""


def memory_mib(pid: int) -> float:
    """RSS."""
    line = next(w for w in Path(f"/proc/{pid}/status").read_text().splitlines() if w.startswith("VmRSS"))
    return round(int(line.split()[1]) / 1024, 2)


def descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def ours() -> dict[int, int]:
    """Process ids here by those in the lab's numbering."""
    out = {}
    for status in Path("/proc").glob("[0-9]*/status"):
        with contextlib.suppress(OSError):
            numbers = next(w for w in status.read_text().splitlines() if w.startswith("NSpid")).split()[1:]
            if len(numbers) == 2:
                out[int(numbers[1])] = int(numbers[0])
    return out


class Receives:
    """Receive buffers that are not posted, as agents report them: the latest by RNIC, and the most there ever were."""

    def __init__(self) -> None:
        self.latest: dict[str, int] = {}
        self.most = 0
        self.reports = 0

    async def run(self, cluster: str) -> None:
        """Listen until cancelled. A machine that stands still loses its connections, and this one too."""
        while True:
            try:
                async with aiomqtt.Client(MANAGEMENT_ADDRESS, BROKER_PORT) as client:
                    await client.subscribe(f"{topics.ROOT}/{cluster}/+/{topics.REPORT}", qos=0)
                    async for message in client.messages:
                        assert isinstance(message.payload, bytes)
                        self._note(topics.parse(str(message.topic)).host, decode(message.payload, Report))
            except aiomqtt.MqttError as error:
                print(f"reports are not heard: {error}", flush=True)
                await asyncio.sleep(1)

    def _note(self, host: str, report: Report) -> None:
        self.reports += 1
        for rnic in report.health.rnics:
            self.latest[f"{host}/{rnic.device}"] = rnic.receives_missing
            self.most = max(self.most, rnic.receives_missing)


class Soak:
    """The lab under trouble, what was sampled and what was blamed."""

    def __init__(self, lab: Lab, seed: int) -> None:
        self.lab = lab
        self.receives = Receives()
        self.samples: list[dict[str, Any]] = []
        self.judged: list[dict[str, Any]] = []
        self.flaps: list[tuple[float, float]] = []
        """Wall clock: down, and up again (infinite while it is down)."""
        self.restarts: list[float] = []
        self.stall = 0.0
        self._rng = random.Random(seed)
        self._began = time.monotonic()
        self._seen: set[str] = set()

    async def run(self, seconds: float) -> None:
        """Trouble for so long, then quiet."""
        for incident in await asyncio.to_thread(self.lab.incidents):
            self._seen.add(incident["id"])
        self._began = time.monotonic()
        async with asyncio.TaskGroup() as group:
            watching = [
                group.create_task(self.receives.run(self.lab.topology.cluster), name="receives"),
                group.create_task(self._watch(), name="watch"),
                group.create_task(self._stalls(), name="stalls"),
            ]
            trouble = [
                group.create_task(self._flap(seconds), name="flap"),
                group.create_task(self._restart(seconds), name="restart"),
            ]
            await asyncio.wait(trouble)
            await asyncio.sleep(SETTLE_S)
            for task in watching:
                task.cancel()

    def _left(self, seconds: float) -> float:
        return self._began + seconds - time.monotonic()

    async def _flap(self, seconds: float) -> None:
        while self._left(seconds) > PERIOD_S:
            ends = time.monotonic() + PERIOD_S
            down_for = self._rng.uniform(2.0, 15.0)
            await asyncio.sleep(self._rng.uniform(0.0, PERIOD_S - down_for - 5.0))
            self.flaps.append((time.time(), float("inf")))
            self._say(f"{FLAPPING} down for {down_for:.0f} s")
            await self._do(self.lab.fault_add, ["rnic", FLAPPING, "--down"])
            await asyncio.sleep(down_for)
            await self._do(self.lab.fault_clear)
            self.flaps[-1] = (self.flaps[-1][0], time.time())
            await asyncio.sleep(max(0.0, ends - time.monotonic()))

    async def _restart(self, seconds: float) -> None:
        while self._left(seconds) > PERIOD_S:
            ends = time.monotonic() + PERIOD_S
            await asyncio.sleep(self._rng.uniform(0.0, PERIOD_S / 2))
            self.restarts.append(time.time())
            self._say(f"agent of {RESTARTED} restarted")
            await self._do(self.lab.process, "restart", f"agent:{RESTARTED}")
            await asyncio.sleep(max(0.0, ends - time.monotonic()))

    async def _do(self, what: Callable[..., object], *args: object) -> None:
        try:
            await asyncio.to_thread(what, *args)
        except LabError as error:
            self._say(f"the lab did not answer: {error}")

    async def _watch(self) -> None:
        due = time.monotonic()
        while True:
            try:
                await self._look()
            except (ConnectionError, LabError) as error:
                self._say(f"cannot look: {error}")
            due += SAMPLE_S
            await asyncio.sleep(max(0.0, due - time.monotonic()))

    async def _stalls(self) -> None:
        """How long the machine itself had no processor: whatever is said then may be about that."""
        while True:
            due = time.monotonic() + TICK_S
            await asyncio.sleep(TICK_S)
            self.stall = max(self.stall, time.monotonic() - due)

    async def _look(self) -> None:
        status = await asyncio.to_thread(self.lab.lab_status)
        sample: dict[str, Any] = {"s": round(time.monotonic() - self._began, 1)}
        here = ours()
        for process in status["processes"]:
            if process["name"] not in ("broker", f"agent:{RESTARTED}") and process["pid"]:
                pid = here[process["pid"]]
                sample[process["name"]] = [memory_mib(pid), descriptors(pid)]
        sample["stall_s"], self.stall = round(self.stall, 1), 0.0
        sample["receives_missing"] = sum(self.receives.latest.values())
        self.samples.append(sample)
        print(json.dumps(sample), flush=True)
        for incident in await asyncio.to_thread(self.lab.incidents):
            if incident["id"] not in self._seen:
                self._seen.add(incident["id"])
                self._judge(incident)

    def _judge(self, incident: dict[str, Any]) -> None:
        at = datetime.fromisoformat(incident["opened_at"]).timestamp()
        about = {k: incident[k] for k in ("component", "component_type", "direction", "symptom", "opened_at")}
        about |= {"verdict": self._verdict(incident, at), "alternatives": incident.get("alternatives")}
        down = [at - d for d, _ in self.flaps if d <= at]
        restart = [at - r for r in self.restarts if r <= at]
        about |= {"s_after_down": round(min(down), 1) if down else None}
        about |= {"s_after_restart": round(min(restart), 1) if restart else None}
        self.judged.append(about)
        self._say(f"incident {json.dumps(about)}")

    def _verdict(self, incident: dict[str, Any], at: float) -> str:
        if incident["component"] == FLAPPING:
            if incident["symptom"] == "flap" or any(down <= at <= up for down, up in self.flaps):
                return "right"
            return "late" if any(0 <= at - up <= LATE_S for _, up in self.flaps) else "wrong"
        if (incident["component"], incident["symptom"]) == (RESTARTED, "agent_down"):
            return "away" if any(0 <= at - r <= AWAY_S for r in self.restarts) else "wrong"
        starved = incident["component_type"] not in judge.FABRIC and incident["symptom"] == "cpu_overload"
        return "cpu" if starved else "wrong"

    def _say(self, text: str) -> None:
        print(f"[{time.monotonic() - self._began:.0f} s] {text}", flush=True)

    def growth(self) -> dict[str, dict[str, float]]:
        """By process: medians of memory (MiB) and descriptors in the second and the last tenth of the time."""
        tenth = max(1, len(self.samples) // 10)
        early, late = self.samples[tenth : 2 * tenth], self.samples[-tenth:]
        out = {}
        for name in (n for n in late[-1] if n not in ("s", "stall_s", "receives_missing")):
            (m0, f0), (m1, f1) = (
                [statistics.median(s[name][i] for s in part if name in s) for i in (0, 1)] for part in (early, late)
            )
            out[name] = {"mib": m1, "mib_growth": round(m1 - m0, 2), "fds": f1, "fds_growth": f1 - f0}
        return out


def measure(minutes: float, seed: int) -> dict[str, Any]:
    """All of it, in the machine."""
    with vm_lab.start(agents=True) as lab:
        ready = lab.wait_ready(READY_S, lambda text: print(f"lab: {text}", flush=True))
        if not ready:
            raise SystemExit(f"the lab did not get ready: {lab.status()}\n{vm_lab.tails(lab)}")
        began = [i for i in lab.incidents() if i["state"] == "open"]
        soak = Soak(lab, seed)
        try:
            asyncio.run(soak.run(60 * minutes))
        finally:
            for name in ("analyzer", "agent:h4"):
                print(f"--- {name}\n" + "\n".join(lab.log(name).read_text().splitlines()[-40:]), flush=True)
        left = vm_lab.fabric_incidents(lab, "open")
    verdicts = [i["verdict"] for i in soak.judged]
    return {
        "minutes": minutes,
        "flaps": len(soak.flaps),
        "restarts": len(soak.restarts),
        "incidents": {v: verdicts.count(v) for v in ("right", "late", "away", "cpu", "wrong")},
        "wrong": [i for i in soak.judged if i["verdict"] == "wrong"],
        "open_at_start": len(began),
        "open_at_end": [i["component"] for i in left],
        "growth": soak.growth(),
        "receives_missing_most": soak.receives.most,
        "stall_most_s": max(s["stall_s"] for s in soak.samples),
        "reports": soak.receives.reports,
        "samples": soak.samples,
        "judged": soak.judged,
    }


def main() -> int:
    """Exit code 1: something grew, receives were missing, or an incident was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three minutes")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--seed", type=int, default=1, help="draws the moments")
    args = parser.parse_args()
    minutes = 3.0 if args.quick else args.minutes
    if os.environ.get("PINGMESH_VM") != "1":
        argv = ["--minutes", str(minutes), "--seed", str(args.seed)]
        return in_machine(Path(__file__), argv, args.json, int(60 * minutes) + 600)
    figures = measure(minutes, args.seed)
    if args.json:
        Path(args.json).write_text(json.dumps(figures, indent=2) + "\n")
    print(json.dumps({k: v for k, v in figures.items() if k not in ("samples", "judged")}, indent=2), flush=True)
    grew = any(g["mib_growth"] > GROWTH_MIB or g["fds_growth"] > GROWTH_FDS for g in figures["growth"].values())
    return 1 if grew or figures["receives_missing_most"] or figures["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
