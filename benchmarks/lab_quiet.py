"""A lab without faults, and one whose own parts are killed, paused and starved: no link, switch or RNIC may be blamed.

benchmarks/lab_quiet.py [--quick] [--minutes 10] [--chaos] [--json FILE] [--running]
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import platform
import random
import time
from collections.abc import Iterator
from pathlib import Path

import fault_rounds
from fault_rounds import started

from pingmesh.lab.client import Lab
from pingmesh.lab.judge import FABRIC

READY_S = 120.0
QUICK_MINUTES = 0.4
SETTLE_S = 30.0
"""After the last trouble: what it causes must have shown by then."""


def troubles(rng: random.Random, hosts: list[str]) -> Iterator[tuple[str, list[str], float]]:
    """(what, arguments of `lab fault add`, seconds until it is taken back), each kind in turn, for ever."""
    kinds = [
        ("agent", "--restart", 0.0),
        ("agent", "--kill", 6.0),
        ("host", "--starve 15", 15.0),
        ("agent", "--stop", 6.0),
        ("host", "--pause 8", 9.0),
        ("broker", "--restart", 0.0),
        ("analyzer", "--restart", 0.0),
        ("controller", "--restart", 0.0),
    ]
    for target, option, seconds in itertools.cycle(kinds):
        host = [rng.choice(hosts)] if target in ("agent", "host") else []
        argv = [target, *host, *option.split()]
        yield " ".join(argv), argv, seconds


class Watch:
    """Counts the incidents that opened since the start, by component type."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab
        self._before = {str(i["id"]) for i in fault_rounds.incidents(lab)}
        self._said: set[str] = set()

    def new(self) -> list[fault_rounds.Json]:
        """Incidents since the start; each is printed once."""
        found = [i for i in fault_rounds.incidents(self._lab) if str(i["id"]) not in self._before]
        for i in found:
            if str(i["id"]) not in self._said:
                self._said.add(str(i["id"]))
                print(f"  {'FALSE: ' if i['component_type'] in FABRIC else ''}{fault_rounds.name(i)}: {i['symptom']}")
        return found

    def sleep(self, seconds: float) -> None:
        """Watch for a time."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            time.sleep(min(1.0, left))
            self.new()


def pause_central(lab: Lab, name: str, watch: Watch, seconds: float) -> None:
    """Freeze the broker, the controller or the analyzer for a time."""
    lab.process("pause", name)
    try:
        # The controller may be the one that is frozen: nothing is asked meanwhile.
        time.sleep(seconds)
    finally:
        lab.process("resume", name)
    watch.sleep(2.0)


def chaos(lab: Lab, watch: Watch, seconds: float, rng: random.Random) -> list[str]:
    """Trouble one after the other; returns what was done."""
    done: list[str] = []
    end = time.monotonic() + seconds
    central = itertools.cycle(
        ["kill broker", "pause analyzer", "kill analyzer", "pause controller", "kill controller", "pause broker"]
    )
    for n, (what, argv, hold) in enumerate(troubles(rng, sorted(lab.topology.hosts))):
        if time.monotonic() > end:
            return done
        if n % 3 == 2:
            action, _, name = (text := next(central)).partition(" ")
            done.append(text)
            print(f"[{end - time.monotonic():.0f} s left] {text}", flush=True)
            if action == "pause":
                pause_central(lab, name, watch, 5.0)
            else:
                lab.process("kill", name)
                time.sleep(2.0)
                lab.process("start", name)
                watch.sleep(2.0)
        done.append(what)
        print(f"[{end - time.monotonic():.0f} s left] {what}", flush=True)
        lab.fault_add(argv)
        watch.sleep(hold + 1.0)
        lab.fault_clear()
        watch.sleep(4.0)
    return done


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small lab for 25 s")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument(
        "--chaos", action="store_true", help="kill, pause, restart and starve hosts and pingmesh's parts"
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--running", action="store_true", help="use the lab that runs")
    parser.add_argument("--seed", type=int, default=1, help="draws the hosts")
    args = parser.parse_args()
    seconds = 60 * (QUICK_MINUTES if args.quick else args.minutes)
    shape = {"leaves": 3, "spines": 2, "hosts_per_leaf": 2} if args.quick else {}
    done: list[str] = []
    with contextlib.ExitStack() as stack:
        lab = Lab() if args.running else stack.enter_context(started(shape))
        if not lab.wait_ready(READY_S, print):
            raise SystemExit("The lab did not reach full coverage; see `pingmesh status`.")
        watch = Watch(lab)
        start = time.monotonic()
        if args.chaos:
            done = chaos(lab, watch, seconds, random.Random(args.seed))
            watch.sleep(0 if args.quick else SETTLE_S)
        else:
            watch.sleep(seconds)
        found = watch.new()
        lasted = time.monotonic() - start
        hosts = len(lab.topology.hosts)
    blamed = [i for i in found if i["component_type"] in FABRIC]
    print(f"{lasted:.0f} s, {len(done)} troubles: {len(blamed)} link, switch or RNIC incidents, {len(found)} in all")
    if args.json:
        result = {
            "seconds": lasted,
            "hosts": hosts,
            "troubles": done,
            "fabric_incidents": len(blamed),
            "incidents": found,
            "beside": {"cpus": os.cpu_count(), "kernel": platform.release(), "load": os.getloadavg()},
        }
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if blamed else 0


if __name__ == "__main__":
    raise SystemExit(main())
