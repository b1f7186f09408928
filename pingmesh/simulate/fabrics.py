"""Fabrics that `topology.generate` does not make: RNICs on two ToRs."""

from __future__ import annotations

from topology.build import assemble
from topology.generate import leaf_spine
from topology.model import Leg, Rnic, Topology


def dual_tor(pairs: int, spines: int, hosts_per_pair: int, rnics_per_host: int, *, cluster: str = "lab") -> Topology:
    """Leaves in pairs; every RNIC is a bond with one leg to each leaf of its pair, and one address on both.

    Raises:
        ValueError: a count is not positive.
    """
    if hosts_per_pair < 1 or rnics_per_host < 1:
        raise ValueError("hosts per pair and RNICs per host must be at least 1")
    base = leaf_spine(2 * pairs, spines, hosts_per_pair, rnics_per_host, cluster=cluster)
    rnics = []
    for number, single in enumerate(base.rnics.values()):
        pair, rest = divmod(number, hosts_per_pair * rnics_per_host)
        if pair >= pairs:
            break
        host, device = f"h{pair * hosts_per_pair + rest // rnics_per_host + 1}", f"bond{rest % rnics_per_host}"
        legs = tuple(Leg(f"leaf{2 * pair + side}", f"{host}-{device}-{side}", single.address) for side in (1, 2))
        rnics.append(Rnic(host, device, legs))
    return assemble(cluster, base.switches.values(), rnics, base.links)
