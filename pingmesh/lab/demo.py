"""`pingmesh lab demo`: a fabric, a healthy minute, four random faults that nobody tells, verdict beside truth."""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TextIO

from pingmesh.cli import render
from pingmesh.cli.evidence import evidence_lines
from pingmesh.lab import launcher
from pingmesh.lab.client import Lab
from pingmesh.lab.faults.draw import random_spec
from pingmesh.lab.judge import judge
from pingmesh.lab.namespaces import LabError

HELP = (
    "Build a fabric of 8 switches and 16 hosts on this machine, watch it for a healthy minute, then break something at "
    "random four times without telling the analyzer, and set its verdict beside the truth. Under five minutes; exit "
    "code 0 if every fault was named right."
)
ONLINE_WITHIN_S = 60.0
COVERED_WITHIN_S = 120.0
COVERED = 0.99
OPEN_WITHIN_S = 30.0
SETTLE_S = 2.0
"""An incident is judged this long after it opened."""
CLOSED_WITHIN_S = 45.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `pingmesh lab demo`."""
    parser.description = HELP
    parser.epilog = "example: pingmesh lab demo --faults 4"
    parser.add_argument("--faults", type=_faults, default=4, metavar="N", help="how many faults (default 4)")
    parser.add_argument(
        "--healthy", type=_seconds, default=45, metavar="SECONDS", help="least length of the healthy part (default 45)"
    )
    parser.add_argument("--seed", type=int, help="draw the same faults again")
    parser.add_argument("--json", action="store_true", help="summary as JSON on stdout; progress goes to stderr")


def _faults(text: str) -> int:
    if not text.isdigit() or not 1 <= int(text) <= 1000:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of faults: give one from 1 to 1000.")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= 86400:
        raise argparse.ArgumentTypeError(f"{text!r} is no duration: give seconds from 0 to 86400.")
    return seconds


@dataclass(frozen=True)
class Round:
    """One fault and what became of it."""

    fault: str
    truth: str
    verdict: str
    seconds: float | None
    """From injection to the open incident; None if none opened."""
    closed_after: float | None
    """From clearing the fault to the closed incident; None if it was still open when the demo went on."""
    right: bool
    why: str


class NotReadyError(LabError):
    """The lab did not come up: agents missing, links not covered, or something named from the start."""


def run(args: argparse.Namespace) -> int:
    """0 if all faults were named right and the healthy part was quiet, else 1."""
    seed = args.seed if args.seed is not None else random.SystemRandom().randrange(1 << 32)
    out = sys.stderr if args.json else sys.stdout
    launcher.end_on_signals()
    started = time.monotonic()
    demo = Demo(out)
    demo.say(f"building 4 leaves, 4 spines, 16 hosts in network namespaces (faults drawn with --seed {seed})")
    with Lab.up(progress=demo.say, leaves=4, spines=4, hosts_per_leaf=4, rnics_per_host=1) as lab:
        try:
            demo.wait_online(lab)
            false_alarms = demo.watch(lab, args.healthy)
            rng = random.Random(seed)
            rounds = [
                demo.round(lab, n, args.faults, random_spec(rng, lab.topology)) for n in range(1, args.faults + 1)
            ]
            demo.say("cleaning up")
        except KeyboardInterrupt:
            demo.say("interrupted; cleaning up")
            raise
    good = all(r.right for r in rounds) and not false_alarms
    if args.json:
        summary = {"seed": seed, "right": good, "false_alarms": false_alarms, "rounds": [asdict(r) for r in rounds]}
        print(json.dumps(summary, indent=2))
    else:
        print("\n".join(summary_lines(rounds, false_alarms, time.monotonic() - started)))
    return 0 if good else 1


class Demo:
    """The steps; each says what it does."""

    def __init__(self, out: TextIO) -> None:
        self.out = out
        self.started = time.monotonic()

    def say(self, text: str) -> None:
        """A line of progress with the time since the start."""
        elapsed = int(time.monotonic() - self.started)
        print(f"[{elapsed // 60}:{elapsed % 60:02}] {text}", file=self.out, flush=True)

    def wait_online(self, lab: Lab) -> None:
        """Until every agent is online and the analyzer has something to say. Raises NotReadyError."""

        def ready() -> bool:
            status = _status(lab)
            return online(status) >= len(lab.topology.hosts) and bool(status.get("enough_data"))

        if not until(ready, ONLINE_WITHIN_S, 0.5):
            agents = render.agents(_status(lab).get("agents"))
            raise NotReadyError(f"the lab was not ready within {ONLINE_WITHIN_S:.0f} s (agents: {agents})")

    def watch(self, lab: Lab, seconds: float) -> int:
        """The healthy part, until every link is walked at its rate; returns the number of false alarms."""
        self.say(
            f"a healthy fabric, for {seconds:.0f} s at least and until paths are traced and every link is covered:"
        )
        began = time.monotonic()
        while True:
            time.sleep(min(5.0, seconds) if seconds > 0 else 0.5)
            status = lab.status()
            share = status.get("coverage")
            rtt = ", ".join(f"{k} {v:.0f} µs" for k, v in (status.get("rtt_us") or {}).items()) or "not yet measured"
            self.say(
                f"  agents {render.agents(status.get('agents'))}, "
                f"coverage {render.percent(share)}, RTT {rtt}, incidents {status.get('open_incidents')}"
            )
            gone = time.monotonic() - began
            if gone >= seconds and (share is None or share >= COVERED):
                break
            if gone > max(seconds, COVERED_WITHIN_S):
                self.say("  going on with links that are not covered yet: a fault there is found later or not at all")
                break
        opened = lab.incidents()
        if short := [str(i["component"]) for i in opened if starved(i)]:
            self.say(
                f"  this machine is busy: {', '.join(sorted(short))} had too little CPU for a while (no false alarm)"
            )
        alarms = [i for i in opened if not starved(i)]
        for incident in alarms:
            self.say(f"  FALSE ALARM: {render.sentence(incident)}")
        return len(alarms)

    def round(self, lab: Lab, n: int, of: int, spec: list[str]) -> Round:
        """Inject, wait for the verdict, judge, clear, wait for the end."""
        before = {str(i["id"]) for i in lab.incidents()}

        def opened() -> list[dict[str, Any]]:
            return [i for i in lab.incidents() if str(i["id"]) not in before and not starved(i)]

        self.say(f"fault {n} of {of}: something breaks now; the analyzer is not told what")
        truth = lab.fault_add(spec)
        found = until(lambda: bool(opened()), OPEN_WITHIN_S, 0.1)
        if found:
            time.sleep(SETTLE_S)
        incidents = opened()
        judgement = judge(truth, incidents)
        shown = judgement.named or (incidents[0] if incidents else None)
        verdict = render.sentence(shown) if shown else "no incident"
        seconds = _seconds_between(truth, shown) if shown else None
        self.say(f"  verdict: {verdict}" + (f", after {seconds:.1f} s" if seconds is not None else ""))
        for line in evidence_lines(shown.get("evidence") if shown else None)[:6]:
            self.say(f"           {line}")
        self.say(f"  truth:   {describe(truth)}")
        self.say(f"  {'RIGHT' if judgement.right else 'WRONG: ' + judgement.why}")
        lab.fault_clear()
        self.say(f"  mended; up to {CLOSED_WITHIN_S:.0f} s for the incident to close")
        cleared = time.monotonic()
        hosts = len(lab.topology.hosts)

        def over() -> bool:
            return all(i["state"] == "closed" for i in opened()) and online(lab.status()) >= hosts

        closed = until(over, CLOSED_WITHIN_S, 0.5)
        took = time.monotonic() - cleared
        self.say(f"  {'closed' if closed else 'not closed, going on'} after {took:.0f} s")
        return Round(
            fault=str(truth.get("fault", " ".join(spec))),
            truth=describe(truth),
            verdict=verdict,
            seconds=seconds,
            closed_after=round(took, 1) if closed else None,
            right=judgement.right,
            why=judgement.why,
        )


def starved(incident: render.Json) -> bool:
    """Whether it says that a host is short of CPU: no fault that the demo injects, but true of a busy machine."""
    return bool(incident["symptom"] == "cpu_overload")


def _status(lab: Lab) -> dict[str, Any]:
    """The status; empty while the controller starts."""
    try:
        return lab.status()
    except ConnectionError:
        return {}


def until(done: Callable[[], bool], seconds: float, pause: float) -> bool:
    """Whether it became true in time."""
    end = time.monotonic() + seconds
    while not done():
        if time.monotonic() > end:
            return False
        time.sleep(pause)
    return True


def online(status: dict[str, Any]) -> int:
    """Agents online, of a status."""
    agents = status.get("agents")
    return int(agents.get("online", 0)) if isinstance(agents, dict) else int(agents or 0)


def describe(truth: dict[str, Any]) -> str:
    """The truth in the same form as the verdict."""
    fault = f" [{truth['fault']}]" if truth.get("fault") else ""
    return f"{render.subject(truth)}: {truth['symptom']}{fault}"


def _seconds_between(truth: render.Json, incident: render.Json) -> float | None:
    injected, opened = render.parse_time(truth["injected_at"]), render.parse_time(incident["opened_at"])
    return (opened - injected).total_seconds() if injected and opened else None


def summary_lines(rounds: Sequence[Round], false_alarms: int, seconds: float) -> list[str]:
    """The table at the end."""
    rows = [
        (
            str(n),
            r.fault,
            r.verdict,
            f"{r.seconds:.1f} s" if r.seconds is not None else "-",
            f"{r.closed_after:.0f} s" if r.closed_after is not None else "not yet",
            "right" if r.right else r.why,
        )
        for n, r in enumerate(rounds, 1)
    ]
    right = sum(r.right for r in rounds)
    return [
        "",
        *render.table(("#", "WHAT WAS BROKEN", "WHAT THE ANALYZER SAID", "OPENED", "CLOSED", ""), rows),
        "",
        f"{right} of {len(rounds)} faults named right, {false_alarms} false alarms in the healthy part, "
        f"{render.duration(seconds)} in all",
    ]
