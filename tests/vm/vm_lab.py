"""What the tests in the machine share: its lab, and asking it."""

from __future__ import annotations

import ipaddress
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pingmesh.lab import judge
from pingmesh.lab.client import Lab
from pingmesh.lab.state import StateDirectory

DIRECTORY = Path("/tmp/pingmesh-vm-lab")
SHAPE: dict[str, Any] = {"leaves": 2, "spines": 2, "hosts_per_leaf": 2, "seed": 7, "transport": "verbs"}
SLOW = {
    # The processor is emulated: a round trip takes 5 to 100 ms, and eight Python processes share it.
    "PINGMESH_AGENT__TIMEOUT_MS": "3000",
    "PINGMESH_AGENT__OVERDUE_MS": "1500",
    "PINGMESH_AGENT__CPU_BUDGET": "1",
    "PINGMESH_ANALYZER__CONFIRM_INTERVAL_MS": "800",
    "PINGMESH_CONTROLLER__TOR_MESH_RATE": "2",
    "PINGMESH_CONTROLLER__LINK_RATE": "2",
    "PINGMESH_CONTROLLER__LINK_TUPLES": "4",
    "PINGMESH_CONTROLLER__CLASSES": "[]",
}


def start(*, agents: bool) -> Lab:
    os.environ.update(SLOW)
    return Lab.up(directory=DIRECTORY, agents=agents, progress=lambda t: print(f"lab: {t}", flush=True), **SHAPE)


def attach() -> Lab:
    return Lab(StateDirectory(DIRECTORY))


def sh(*argv: str) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{argv}: {done.stdout}{done.stderr}"
    return done.stdout


def raw_ping(lab: Lab, source: str, target: str, count: int = 5) -> dict[str, Any]:
    """UD messages between two RNICs (by `host/device`) of the lab."""
    ends: list[str] = []
    for name in (source, target):
        rnic = lab.topology.rnics[name]
        ends += [f"rxe_{rnic.host}-{rnic.device}", str(rnic.address)]
    script = Path(__file__).with_name("raw_ping.py")
    return json.loads(sh("/usr/bin/python3", str(script), *ends, str(count)))  # type: ignore[no-any-return]


def until(what: Callable[[], bool], patience: float, message: Callable[[], object] = lambda: "") -> None:
    deadline = time.monotonic() + patience
    while not what():
        assert time.monotonic() < deadline, f"not within {patience} s: {message()}"
        time.sleep(0.5)


def machine_state() -> dict[str, Any]:
    """What of this machine's network a lab must leave as it was."""
    return {
        "rules": json.loads(sh("ip", "-j", "rule", "show")),
        "links": sorted(link["ifname"] for link in json.loads(sh("ip", "-j", "link", "show"))),
        "rdma": sorted(link["ifname"] for link in json.loads(sh("rdma", "-j", "link", "show") or "[]")),
        "routes": json.loads(sh("ip", "-j", "route", "show", "table", "main")),
        "nft": sh("nft", "list", "ruleset"),
        "sysctls": {
            p.name: p.read_text() for p in sorted(Path("/proc/sys/net/ipv4/conf/all").iterdir()) if readable(p)
        },
    }


def gid_index(device: str, address: str) -> int | None:
    """At which index an RNIC's GID table has an IPv4 address; None where it has it not."""
    mapped = ipaddress.IPv6Address(f"::ffff:{address}").exploded
    for path in Path(f"/sys/class/infiniband/rxe_{device}/ports/1/gids").iterdir():
        if readable(path) and path.read_text().strip() == mapped:
            return int(path.name)
    return None


def tails(lab: Lab, lines: int = 5) -> str:
    """The end of every log, for a failure's report."""
    logs = sorted((lab.directory / "logs").glob("*.log"))
    return "\n".join(f"--- {p.name}\n" + "\n".join(p.read_text().splitlines()[-lines:]) for p in logs)


def keep_logs(lab: Lab) -> None:
    """Copy the logs to where they outlive the machine, if `tools/vm.py --share DIRECTORY` said where."""
    share = os.environ.get("PINGMESH_VM_SHARE")
    if share:
        shutil.copytree(lab.directory / "logs", Path(share) / "logs", dirs_exist_ok=True)


def readable(path: Path) -> bool:
    try:
        path.read_text()
    except OSError:
        return False
    return True


def cli(*argv: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PINGMESH_LAB_DIR": str(DIRECTORY)}
    return subprocess.run(
        [sys.executable, "-m", "pingmesh", *argv], capture_output=True, text=True, check=False, env=env
    )


def fabric_incidents(lab: Lab, state: str | None = None) -> list[dict[str, Any]]:
    """Those that blame a part of the fabric."""
    return [i for i in lab.incidents(state=state) if i["component_type"] in judge.FABRIC]


def named(
    lab: Lab, truth: dict[str, Any], since: set[str], patience: float, equals: dict[str, str | None]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Wait until a fault is named; returns the incident, and all that blame something else of the fabric.

    `equals`: components that see the very packets that the broken one does, each with the direction that is right for
    it. One of them may be named if the broken one is among its alternatives, and nothing but these is. That hosts are
    short of CPU is true here.
    """

    def fresh() -> list[dict[str, Any]]:
        return [i for i in fabric_incidents(lab) if i["id"] not in since]

    def fits(i: dict[str, Any]) -> bool:
        candidates = {i["component"], *i["alternatives"]}
        if i["component"] in equals:
            symptom = i["component_type"] == "switch" or judge.is_symptom(truth, i)
            right = symptom and i["direction"] == equals[i["component"]] and truth["component"] in candidates
        else:
            right = judge.matches(truth, i)
        return right and candidates <= equals.keys() | {truth["component"]}

    until(lambda: any(fits(i) for i in fresh()), patience, lambda: f"{fresh()}\n{tails(lab, 12)}")
    found = fresh()
    incident = next(i for i in found if fits(i))
    known = equals.keys() | {truth["component"]}
    return incident, [i for i in found if i["component"] not in known]
