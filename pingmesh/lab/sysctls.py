"""The kernel settings of the lab's namespaces."""

from __future__ import annotations

from pathlib import Path

from pingmesh.lab import namespaces
from pingmesh.lab.hashing import SEED_SYSCTL

# The topology's limit, by nft, is the only one: the kernel's own are opened wide.
_COMMON = {
    "net/ipv4/conf/all/ignore_routes_with_linkdown": "1",
    "net/ipv4/conf/default/ignore_routes_with_linkdown": "1",
    "net/ipv4/conf/all/rp_filter": "0",
    "net/ipv4/conf/default/rp_filter": "0",
    "net/ipv4/icmp_ratelimit": "0",
    "net/ipv4/icmp_ratemask": "0",
    "net/ipv4/icmp_msgs_per_sec": "100000",
    "net/ipv4/icmp_msgs_burst": "10000",
    "net/ipv6/conf/all/ignore_routes_with_linkdown": "1",
    "net/ipv6/conf/default/ignore_routes_with_linkdown": "1",
    "net/ipv6/conf/all/accept_dad": "0",
    "net/ipv6/conf/default/accept_dad": "0",
    "net/ipv6/conf/default/accept_ra": "0",
    "net/ipv6/conf/all/keep_addr_on_down": "1",
    "net/ipv6/conf/default/keep_addr_on_down": "1",
    "net/ipv6/icmp/ratelimit": "0",
}
_SWITCH = {
    "net/ipv4/ip_forward": "1",
    "net/ipv4/fib_multipath_hash_policy": "1",
    "net/ipv4/icmp_errors_use_inbound_ifaddr": "1",
    "net/ipv6/conf/all/forwarding": "1",
    "net/ipv6/conf/default/forwarding": "1",
    "net/ipv6/fib_multipath_hash_policy": "1",
}
_HOST = {
    "net/ipv4/conf/all/accept_local": "1",
    "net/ipv4/conf/default/accept_local": "1",
    "net/ipv4/conf/all/arp_ignore": "1",
    "net/ipv4/conf/default/arp_ignore": "1",
    "net/ipv4/conf/all/arp_announce": "2",
    "net/ipv4/conf/default/arp_announce": "2",
}
# Read-only outside the first network namespace on older kernels, which then limit all namespaces together.
_OPTIONAL = {"net/ipv4/icmp_msgs_per_sec", "net/ipv4/icmp_msgs_burst"}


def write(*, is_switch: bool, seed: int | None, with_ipv6: bool) -> None:
    """Configure the calling thread's namespace; before it has devices, since a device takes the defaults it is made in.

    `seed` is a router's multipath hash seed, where the kernel hashes. Without `with_ipv6` a kernel may lack IPv6.
    Raises LabError for a setting that matters and is refused.
    """
    values = dict(_COMMON) | (_SWITCH if is_switch else _HOST)
    if seed is not None:
        values[SEED_SYSCTL] = str(seed)
    optional = _OPTIONAL if with_ipv6 else _OPTIONAL | {k for k in values if k.startswith("net/ipv6")}
    namespaces.write_sysctls(values, optional=optional)


def host_values() -> dict[str, str]:
    """The IPv4 settings of a namespace that holds hosts."""
    return {k: v for k, v in (_COMMON | _HOST).items() if k.startswith("net/ipv4")}


def read(key: str) -> str | None:
    """A setting of the calling thread's namespace; None where the kernel lacks it."""
    try:
        return Path("/proc/sys", key).read_text().strip()
    except OSError:
        return None


def keep_neighbours(pattern: str = "*") -> None:
    """Let the neighbours of all devices here stay known however long nothing is sent to them.

    Per device (whose names match `pattern`), since a network namespace has no default for these.
    """
    devices = [d for family in ("ipv4", "ipv6") for d in Path(f"/proc/sys/net/{family}/neigh").glob(pattern)]
    for device in devices:
        (device / "base_reachable_time_ms").write_text("3600000")
        (device / "gc_stale_time").write_text("86400")
