"""The `pmfault` tables of all switches: which fault has rules where, and what they have dropped."""

from __future__ import annotations

import threading

from pingmesh.lab.faults.congestion import Congestion
from pingmesh.lab.faults.drops import TABLE, Drop, parse_counters
from pingmesh.lab.faults.lab_port import FabricPort


class DropTables:
    """Installs and removes rules so that a switch without faults has no table. Blocks; thread-safe."""

    def __init__(self, fabric: FabricPort) -> None:
        self._fabric = fabric
        self._keys: dict[str, set[str]] = {}
        self._lock = threading.Lock()

    def install(self, drop: Drop) -> None:
        """Start dropping."""
        with self._lock:
            self._fabric.nft(drop.node, drop.install())
            self._keys.setdefault(drop.node, set()).add(drop.key)

    def stop(self, drop: Drop) -> None:
        """Stop dropping, and keep the counters: what is read of them from now on is all that was dropped."""
        with self._lock:
            if drop.key in self._keys.get(drop.node, ()):
                self._fabric.nft(drop.node, drop.stop())

    def remove(self, drop: Drop) -> None:
        """Stop dropping. Idempotent."""
        with self._lock:
            if drop.key in self._keys.get(drop.node, ()):
                self._fabric.nft(drop.node, drop.remove(last=self._forget(drop.node, drop.key)))

    def congest(self, congestion: Congestion) -> None:
        """Start a congestion, whose sink is a rule at the far end."""
        with self._lock:
            self._keys.setdefault(congestion.link.target, set()).add(congestion.key)
            congestion.install(self._fabric)

    def relieve(self, congestion: Congestion) -> None:
        """End a congestion. Idempotent."""
        with self._lock:
            node = congestion.link.target
            if congestion.key in self._keys.get(node, ()):
                congestion.remove(self._fabric, last=self._forget(node, congestion.key))

    def counters(self, node: str, key: str) -> dict[str, int]:
        """Packets `dropped` by a rule, and how many of them were `probes` or their ACKs; empty once it is removed."""
        with self._lock:
            if key not in self._keys.get(node, ()):
                return {}
            text = self._fabric.run(node, "nft", "-j", "list", "counters", "table", *TABLE.split())
        counts = parse_counters(text)
        return {what: counts[f"{key}_{what}"] for what in ("dropped", "probes") if f"{key}_{what}" in counts}

    def _forget(self, node: str, key: str) -> bool:
        """Whether the node's table is empty without the key."""
        self._keys[node].discard(key)
        if self._keys[node]:
            return False
        del self._keys[node]
        return True
