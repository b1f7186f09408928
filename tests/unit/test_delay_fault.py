"""The delay of a link, where there is netem and where there is none."""

from __future__ import annotations

import pytest

from pingmesh.lab.faults import FaultError, FaultManager, parse
from pingmesh.lab.namespaces import CommandError
from topology.generate import leaf_spine
from topology.model import Topology


class FakeFabric:
    """Remembers what is run; its kernel may lack netem, or fail on a device."""

    def __init__(self, stderr: str = "", failing: str = "") -> None:
        self.topology: Topology = leaf_spine(2, 2, 1, 1)
        self.ran: list[tuple[str, str]] = []
        self._stderr = stderr
        self._failing = failing

    def run(self, node: str, *argv: str) -> str:
        if self._stderr and self._failing in argv:
            raise CommandError(node, argv, self._stderr)
        self.ran.append((node, " ".join(argv)))
        return ""

    def interface(self, node: str, port: str) -> str:
        return port


def manager(fabric: FakeFabric) -> FaultManager:
    return FaultManager(fabric, None)  # type: ignore[arg-type]


async def test_a_delay_is_put_before_the_sending_port_and_taken_back() -> None:
    fabric = FakeFabric()
    faults = manager(fabric)
    asked = "link leaf1 spine2 --delay 20 --jitter 2.5 --direction reverse"
    truth = await faults.add(parse(asked.split()))
    assert truth.spec.text == asked
    netem = "tc qdisc add dev leaf1 root netem limit 100000 delay 20ms 2.5ms"
    assert fabric.ran == [("spine2", netem)]
    await faults.clear(truth.id)
    assert fabric.ran == [("spine2", netem), ("spine2", "tc qdisc del dev leaf1 root")]


async def test_a_kernel_without_netem_is_told_in_a_sentence() -> None:
    faults = manager(FakeFabric("Error: Specified qdisc kind is unknown.", "netem"))
    with pytest.raises(FaultError, match="no netem, so packets cannot be delayed: load or build its module sch_netem"):
        await faults.add(parse(["link", "leaf1", "spine2", "--delay", "20"]))
    assert await faults.faults() == []


async def test_half_a_delay_is_taken_back() -> None:
    fabric = FakeFabric("Error: Exclusivity flag on, cannot modify.", "leaf1")
    with pytest.raises(CommandError, match="Exclusivity"):
        await manager(fabric).add(parse(["link", "leaf1", "spine2", "--delay", "20"]))
    assert [node for node, _ in fabric.ran] == ["leaf1", "leaf1"]
    assert fabric.ran[1][1].endswith("del dev spine2 root")
