"""Packet drops as nftables rules in table `pmfault` of a switch, each with counters of what it dropped."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import Enum

TABLE = "inet pmfault"
SCALE = 100_000
"""Losses are drawn with this resolution: 0.001 %."""
PRIORITY = -310
"""Before the lab's own hash and route rules, so that a dropped packet costs nothing else."""
TRACER_TTL = 32
"""Packets with a TTL up to this belong to the path tracer: no probes and no ACKs."""
ROCE_PORT = 4791


class Hook(Enum):
    """Where the packets are caught."""

    INPUT = "iifname"
    """Received by the port."""
    OUTPUT = "oifname"
    """Sent by the port, the switch's own packets included."""


_CHAIN_HOOK = {Hook.INPUT: "prerouting", Hook.OUTPUT: "postrouting"}


@dataclass(frozen=True, slots=True)
class Drop:
    """One rule: at `node`, packets through `port` (None: any but the loopback), narrowed by the rest.

    `key` names chains and counters: letters, digits and underscores. `loss` and `flows` are shares 0..1;
    `seed` picks which 5-tuples a share of flows means.
    """

    key: str
    node: str
    hook: Hook
    port: str | None
    loss: float = 1.0
    larger_than: int | None = None
    flows: float | None = None
    dscp: int | None = None
    seed: int = 0

    def install(self) -> str:
        """The nft script that adds the rule.

        Neighbour discovery passes, as ARP does: else a loss in one direction would stop the other as well.
        A length is that of the whole IP packet. Packets other than UDP belong to no share of flows.
        """
        t, key = TABLE, self.key
        port = f'"{self.port}"' if self.port is not None else '"lo"'
        other = "!=" if self.port is not None else "=="
        lines = [
            f"add table {t}",
            f"add counter {t} {key}_dropped",
            f"add counter {t} {key}_probes",
            f"add chain {t} {key}_drop",
        ]
        if self.loss < 1:
            lines.append(f"add rule {t} {key}_drop numgen random mod {SCALE} >= {round(self.loss * SCALE)} return")
        for ttl in ("ip ttl", "ip6 hoplimit"):
            lines.append(
                f"add rule {t} {key}_drop udp dport {ROCE_PORT} {ttl} > {TRACER_TTL} counter name {key}_probes"
            )
        lines += [
            f"add rule {t} {key}_drop counter name {key}_dropped drop",
            f"add chain {t} {key}_hook {{ type filter hook {_CHAIN_HOOK[self.hook]} priority {PRIORITY}; }}",
            f"add rule {t} {key}_hook {self.hook.value} {other} {port} accept",
            f"add rule {t} {key}_hook icmpv6 type {{ nd-router-solicit, nd-router-advert, nd-neighbor-solicit, "
            "nd-neighbor-advert, nd-redirect } accept",
        ]
        for ip, header in (("ip", 0), ("ip6", 40)):
            match = [f"meta nfproto ipv{4 if ip == 'ip' else 6}"]
            if self.larger_than is not None:
                match.append(f"{ip} length > {self.larger_than - header}")
            if self.dscp is not None:
                match.append(f"{ip} dscp {self.dscp}")
            if self.flows is not None:
                tuple5 = f"{ip} saddr . {ip} daddr . udp sport"
                match.append(f"jhash {tuple5} mod {SCALE} seed {self.seed:#x} < {round(self.flows * SCALE)}")
            lines.append(f"add rule {t} {key}_hook {' '.join(match)} jump {key}_drop")
        return "\n".join(lines) + "\n"

    def stop(self) -> str:
        """The nft script after which no packet is dropped and none counted; the counters are still there to be read."""
        return f"flush chain {TABLE} {self.key}_hook\n"

    def remove(self, last: bool) -> str:
        """The nft script that takes the rule away again; `last`: the whole table goes."""
        if last:
            return f"delete table {TABLE}\n"
        lines = [f"delete chain {TABLE} {self.key}_{chain}" for chain in ("hook", "drop")]
        return "\n".join(lines + [f"delete counter {TABLE} {self.key}_{c}" for c in ("dropped", "probes")]) + "\n"


def parse_counters(text: str) -> dict[str, int]:
    """Packets by counter name, from `nft -j list counters table inet pmfault`."""
    rows = json.loads(text)["nftables"]
    return {row["counter"]["name"]: int(row["counter"]["packets"]) for row in rows if "counter" in row}
