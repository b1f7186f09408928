"""A directed link on which every packet takes longer: the kernel's netem at its sending port."""

from __future__ import annotations

from dataclasses import dataclass

from pingmesh.lab.faults.errors import FaultError
from pingmesh.lab.faults.lab_port import FabricPort
from pingmesh.lab.faults.places import port_at
from pingmesh.lab.namespaces import CommandError
from topology.model import DirectedLink

LIMIT = 100_000
"""Packets that may be under way, so that a long delay never drops any."""


@dataclass(frozen=True, slots=True)
class Delay:
    """Packets of a directed link are held for `delay_ms`, plus or minus up to `jitter_ms`. All methods block."""

    link: DirectedLink
    delay_ms: float
    jitter_ms: float

    def install(self, fabric: FabricPort) -> None:
        """Start delaying. Raises FaultError where the kernel cannot."""
        times = [f"{self.delay_ms:g}ms"] + ([f"{self.jitter_ms:g}ms"] if self.jitter_ms else [])
        options = ["root", "netem", "limit", str(LIMIT), "delay", *times]
        try:
            fabric.run(self.link.source, "tc", "qdisc", "add", "dev", self._port(fabric), *options)
        except CommandError as error:
            if "kind is unknown" not in error.stderr:
                raise
            raise FaultError(
                "This kernel has no netem, so packets cannot be delayed: load or build its module sch_netem, "
                "or use --congest for a delay by a filled queue."
            ) from None

    def remove(self, fabric: FabricPort) -> None:
        """Stop; packets under way are lost."""
        fabric.run(self.link.source, "tc", "qdisc", "del", "dev", self._port(fabric), "root")

    def _port(self, fabric: FabricPort) -> str:
        return fabric.interface(self.link.source, port_at(self.link, self.link.source))
