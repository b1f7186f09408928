"""Malformed input, fuzzed for a minute each: topology, configuration, MQTT messages, probe packets, ICMP answers.

Runs the fuzz tests of each target again and again, each time with another seed and as many examples as fit, until the
time is spent on generated examples (imports and collecting do not count). Each test asserts that nothing but the
documented exception escapes, that refusals are counted, and that what was accepted before stays. Prints the examples
run, those that failed, and the time; exits 1 if any failed.

    benchmarks/fuzz.py [--seconds 60] [--only NAME,NAME] [--seed N] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TESTS = ROOT / "tests" / "unit"
TARGETS = {
    "topology": ["test_topology_fuzz.py"],
    "configuration": ["test_config_fuzz.py"],
    "messages": ["test_messages_fuzz.py"],
    "bus": ["test_bus_fuzz.py"],
    "agent inbox": ["test_agent_inbox_fuzz.py"],
    "controller": ["test_controller_fuzz.py"],
    "analyzer": ["test_analyzer_fuzz.py"],
    "probe header": ["test_probe.py"],
    "RoCE frames": ["test_agent_frames.py::test_any_bytes_are_counted_and_no_more"],
    "ICMP answers": ["test_agent_icmp.py"],
}
FIRST_EXAMPLES = 50
SLICE_S = 20.0
"""Seconds of one run: a new seed now and then finds more than a long run with one."""
PHASE = re.compile(
    r"during \w+ phase \(([\d.]+) seconds\).*?"
    r"(\d+) passing(?: examples)?, (\d+) failing(?: examples)?,(?: and)? (\d+) invalid",
    re.DOTALL,
)


@dataclass
class Tally:
    """What became of one target. `invalid`: examples that a strategy gave up on."""

    examples: int = 0
    failed: int = 0
    invalid: int = 0
    seconds: float = 0.0
    runs: int = 0
    seeds: list[int] = field(default_factory=list)
    """Of the runs that failed: give one to `--hypothesis-seed` to see it again."""
    output: str = ""


def run_once(tests: list[str], examples: int, seed: int, tally: Tally) -> bool:
    """One run of a target's tests; False if one failed."""
    with tempfile.TemporaryDirectory() as directory:
        done = subprocess.run(
            [
                *(sys.executable, "-m", "pytest", "-q", "--show-capture=no", "-p", "no:cacheprovider"),
                *("--timeout=0", f"--basetemp={directory}/pytest"),
                *("--hypothesis-show-statistics", f"--hypothesis-seed={seed}", *tests),
            ],
            cwd=TESTS,
            env={**os.environ, "PINGMESH_FUZZ_EXAMPLES": str(examples), "CI": ""},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
    for seconds, passing, failing, invalid in PHASE.findall(done.stdout):
        tally.seconds += float(seconds)
        tally.examples += int(passing) + int(failing)
        tally.failed += int(failing)
        tally.invalid += int(invalid)
    tally.runs += 1
    if done.returncode:
        tally.seeds.append(seed)
        tally.output = done.stdout
    return done.returncode == 0


def fuzz(tests: list[str], seconds: float, rng: random.Random) -> Tally:
    """Spend `seconds` on a target, or less if it fails."""
    tally = Tally()
    examples = FIRST_EXAMPLES
    while tally.seconds < seconds:
        before = tally.seconds
        if not run_once(tests, examples, rng.randrange(1 << 32), tally):
            break
        spent = tally.seconds - before
        if spent <= 0:
            tally.output = "no examples were counted"
            tally.failed += 1
            break
        left = seconds - tally.seconds
        # At most four times as many as before: the first run's pace is that of a cold start.
        examples = max(FIRST_EXAMPLES, min(4 * examples, round(examples / spent * min(left * 1.05, SLICE_S))))
    return tally


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="for each target (default 60)")
    parser.add_argument("--only", metavar="NAME,NAME", help=f"some of: {', '.join(TARGETS)}")
    parser.add_argument("--seed", type=int, help="for the same seeds again")
    parser.add_argument("--json", metavar="FILE", help="write the figures here")
    args = parser.parse_args()
    names = [n.strip() for n in args.only.split(",")] if args.only else list(TARGETS)
    if unknown := set(names) - TARGETS.keys():
        parser.error(f"unknown target {', '.join(sorted(unknown))}; known: {', '.join(TARGETS)}")
    seed = random.SystemRandom().randrange(1 << 32) if args.seed is None else args.seed
    rng = random.Random(seed)
    print(f"{'target':<15} {'seconds':>8} {'examples':>9} {'failed':>7}", flush=True)
    tallies: dict[str, Tally] = {}
    for name in names:
        t = tallies[name] = fuzz(TARGETS[name], args.seconds, rng)
        print(f"{name:<15} {t.seconds:8.0f} {t.examples:9,} {t.failed:7,}", flush=True)
        if t.output:
            print(t.output)
    if args.json:
        result = {"python": platform.python_version(), "seed": seed, "seconds_each": args.seconds}
        targets = {name: {k: v for k, v in asdict(t).items() if k != "output"} for name, t in tallies.items()}
        Path(args.json).write_text(json.dumps(result | {"targets": targets}, indent=2) + "\n")
    return int(any(t.failed or t.seeds for t in tallies.values()))


if __name__ == "__main__":
    sys.exit(main())
