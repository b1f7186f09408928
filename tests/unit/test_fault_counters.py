"""What a fault has dropped: counted at each of its rules, and read when none drops any more."""

from __future__ import annotations

import json
import re
from dataclasses import replace

from pingmesh.lab.faults import FaultManager, parse
from topology.generate import leaf_spine
from topology.model import Topology


def bonded() -> Topology:
    """h1/rnic0 hangs on both leaves."""
    t = leaf_spine(2, 2, 2, 1)
    rnic = t.rnics["h1/rnic0"]
    legs = (*rnic.legs, replace(rnic.legs[0], switch="leaf2", port="eth99"))
    return Topology(t.cluster, t.switches, {**t.rnics, rnic.name: replace(rnic, legs=legs)}, t.links)


class CountingFabric:
    """Each rule has dropped 7 packets, 5 of them probes; no counter may be read while one of a node still drops."""

    def __init__(self) -> None:
        self.topology = bonded()
        self.dropping: dict[str, set[str]] = {}
        self.keys: dict[str, set[str]] = {}

    def interface(self, node: str, port: str) -> str:
        return port

    def nft(self, node: str, script: str) -> None:
        for key in re.findall(r"add chain inet pmfault (\w+)_hook", script):
            self.keys.setdefault(node, set()).add(key)
            self.dropping.setdefault(node, set()).add(key)
        self.dropping[node] -= set(re.findall(r"flush chain inet pmfault (\w+)_hook", script))

    def run(self, node: str, *argv: str) -> str:
        assert argv[-2:] == ("inet", "pmfault")
        assert not self.dropping[node], "packets are dropped that the counters do not have yet"
        counters = [
            {"counter": {"name": f"{key}_{what}", "packets": n, "bytes": 0}}
            for key in sorted(self.keys[node])
            for what, n in (("dropped", 7), ("probes", 5))
        ]
        return json.dumps({"nftables": counters})


async def test_the_legs_of_an_rnic_are_counted_together_after_both_stopped() -> None:
    faults = FaultManager(CountingFabric(), None)  # type: ignore[arg-type]
    await faults.add(parse(["rnic", "h1/rnic0", "--loss", "30%"]))
    (cleared,) = await faults.clear()
    assert cleared.counters == {way: {"dropped": 14, "probes": 10} for way in ("tx", "rx")}
