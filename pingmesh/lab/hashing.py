"""A multipath hash seed of its own for every router.

With one seed for all, every ACK retraces its probe's path (the hash is symmetric) and a three-tier fabric polarises.
"""

from __future__ import annotations

import enum
import hashlib
from pathlib import Path

from pingmesh.lab.routes import BUCKET_TABLE, BUCKETS

SEED_SYSCTL = "net/ipv4/fib_multipath_hash_seed"
HASH_TABLE = "pmhash"


class HashKind(enum.Enum):
    """Who hashes a packet onto a next hop."""

    KERNEL = "kernel"
    """The kernel's multipath hash, seeded by a sysctl (Linux 6.11 and later; over IPv6 it changes nothing)."""
    NFT = "nft"
    """nft's jhash over the 5-tuple picks a bucket; each bucket has a routing table."""

    @classmethod
    def available(cls, families: set[int]) -> HashKind:
        """The kernel's where it can be seeded for these address families, else nft's."""
        seeded = families == {4} and Path("/proc/sys", SEED_SYSCTL).exists()
        return cls.KERNEL if seeded else cls.NFT

    @property
    def buckets(self) -> int:
        """How many routing tables the routers need beside the main one."""
        return BUCKETS if self is HashKind.NFT else 0


def router_seed(lab_seed: int, switch: str) -> int:
    """A router's seed, 1..2**32-1, from the lab's and its name."""
    digest = hashlib.blake2b(f"{lab_seed}/{switch}".encode(), digest_size=4).digest()
    return int.from_bytes(digest) or 1


def nft_hash(seed: int) -> str:
    """The nft script that marks each UDP packet with its bucket, 1..BUCKETS."""
    return f"""\
table inet {HASH_TABLE} {{
  chain choose {{
    type filter hook prerouting priority mangle; policy accept;
    meta nfproto ipv4 meta l4proto udp meta mark set \
jhash ip saddr . ip daddr . udp sport . udp dport mod {BUCKETS} seed {seed:#x} offset 1
    meta nfproto ipv6 meta l4proto udp meta mark set \
jhash ip6 saddr . ip6 daddr . udp sport . udp dport mod {BUCKETS} seed {seed:#x} offset 1
  }}
}}
"""


def bucket_rules(family: int) -> list[str]:
    """`ip -batch` lines: a bucket's mark looks up its table. Where that has no live route, the main table decides."""
    flag = "-6 " if family == 6 else ""
    return [
        f"{flag}rule add pref {BUCKET_TABLE + bucket} fwmark {bucket} lookup {BUCKET_TABLE + bucket}"
        for bucket in range(1, BUCKETS + 1)
    ]
