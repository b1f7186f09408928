"""What `lab up` was asked for."""

from __future__ import annotations

import msgspec

from topology.generate import clos3, leaf_spine
from topology.model import Topology


class LabOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of the fabric (unless a topology is given) and what runs in it."""

    leaves: int = 4
    """Leaves; with `pods`, leaves of each pod."""
    spines: int = 4
    """Spines; with `pods`, cores in all."""
    hosts_per_leaf: int = 4
    rnics_per_host: int = 1
    pods: int | None = None
    """A three-tier fabric of so many pods."""
    aggs: int = 2
    """With `pods`: aggregation switches of each pod."""
    family: int = 4
    seed: int | None = None
    """Makes the routers' hash seeds; None: drawn."""
    hashing: str | None = None
    """`kernel` or `nft`; None: what this kernel has."""
    agents: bool = True
    """False: the fabric only, without broker, controller, analyzer and agents."""
    log_level: str = "info"
    transport: str = "soft"
    """`soft`: a namespace per host. `verbs`: Soft-RoCE devices, with all hosts in the machine's own namespace."""

    def generate(self) -> Topology:
        """The fabric of that shape. Raises ValueError for a shape that cannot be."""
        if self.pods is not None:
            return clos3(
                self.pods,
                self.leaves,
                self.aggs,
                self.spines,
                self.hosts_per_leaf,
                self.rnics_per_host,
                family=self.family,
            )
        return leaf_spine(self.leaves, self.spines, self.hosts_per_leaf, self.rnics_per_host, family=self.family)
