"""Next hops as the kernel tells them, in a network of its own."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.lab

SCRIPT = """
import json, subprocess, time
from agent.transport.verbs.neighbours import NetlinkResolver

def ip(line):
    subprocess.run(["ip", *line.split()], check=True)

def shown(address):
    hop = resolver.look(address)
    return [hop.address, hop.mac.hex(), hop.dead]

for line in (
    "link add rnic0 type veth peer name far", "link set rnic0 up", "link set far up", "addr add 10.0.0.1/24 dev rnic0",
    "route add 10.1.0.0/16 via 10.0.0.254", "route add 10.2.0.0/16 via 10.0.0.253",
    "route add unreachable 10.3.0.0/16",
    "neigh add 10.0.0.254 lladdr 02:00:00:00:00:fe dev rnic0 nud permanent",
):
    ip(line)
resolver = NetlinkResolver("rnic0", "10.0.0.1")
asked = {"routed": "10.1.2.3", "no route": "192.0.2.1", "refused": "10.3.0.1", "unknown": "10.2.0.1"}
out = {what: shown(address) for what, address in asked.items()}
began = time.monotonic()
for _ in range(100):
    resolver.nudge(resolver.look("10.2.0.1"))
out["blocked_s"] = time.monotonic() - began
until = time.monotonic() + 10
while shown("10.2.0.1") != ["10.0.0.253", "", True] and time.monotonic() < until:
    time.sleep(0.05)
out["asked in vain"] = shown("10.2.0.1")
ip("neigh replace 10.0.0.253 lladdr 02:00:00:00:00:fd dev rnic0 nud stale")
out["known"] = shown("10.2.0.1")
resolver.close()
print(json.dumps(out))
"""


def test_next_hops_and_what_is_known_of_them() -> None:
    argv = ["unshare", "--user", "--map-root-user", "--net", sys.executable, "-c", SCRIPT]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    out = json.loads(done.stdout)
    assert out.pop("blocked_s") < 1
    assert out == {
        "routed": ["10.0.0.254", "0200000000fe", False],
        # Told the interface, the kernel takes what no route leads to for a neighbour, which will not answer.
        "no route": ["192.0.2.1", "", False],
        "refused": ["10.3.0.1", "", False],
        "unknown": ["10.0.0.253", "", False],
        "asked in vain": ["10.0.0.253", "", True],
        "known": ["10.0.0.253", "0200000000fd", False],
    }
