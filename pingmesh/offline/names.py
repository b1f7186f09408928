"""RNICs by whatever name or address a record gives them."""

from __future__ import annotations

import ipaddress
from collections import Counter

import numpy as np

from pingmesh.analyzer.table import Ints
from pingmesh.records.model import Coded
from topology.model import Topology


def plain_address(text: str) -> str | None:
    """An address as the topology writes it: IPv4-mapped ones as IPv4, without a zone, port or prefix length.

    >>> [plain_address(t) for t in ("::ffff:10.0.0.1", "10.0.0.1:4791", "10.0.0.1/31", "[fd00::1]:5", "FD00:0::1")]
    ['10.0.0.1', '10.0.0.1', '10.0.0.1', 'fd00::1', 'fd00::1']
    """
    text = text.strip().split("/")[0].split("%")[0]
    if text.startswith("["):
        text = text[1:].split("]")[0]
    elif text.count(":") == 1:
        text = text.split(":")[0]
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    mapped = getattr(address, "ipv4_mapped", None)
    return str(mapped or address)


class Names:
    """Numbers of RNICs, in the topology's order, by `host/device`, address, or host where it has one RNIC.

    `unknown` counts the rows of each name that none has.
    """

    def __init__(self, topology: Topology) -> None:
        self.rnics = tuple(topology.rnics)
        self._numbers = {name: i for i, name in enumerate(self.rnics)}
        for host, rnics in topology.hosts.items():
            if len(rnics) == 1:
                self._numbers.setdefault(host, self._numbers[rnics[0].name])
        self._by_address: dict[str, int] = {}
        for i, rnic in enumerate(topology.rnics.values()):
            for leg in rnic.legs:
                address = plain_address(leg.address) if leg.address else None
                if address is not None:
                    self._by_address.setdefault(address, i)
        self.unknown: Counter[str] = Counter()

    def number(self, name: str) -> int:
        """The RNIC's number; -1 if there is none of that name."""
        known = self._numbers.get(name)
        if known is not None:
            return known
        address = plain_address(name)
        return -1 if address is None else self._by_address.get(address, -1)

    def numbers(self, names: Coded, addresses: Coded) -> Ints:
        """Per row, by name or else by address; -1 and counted where neither is known. O(rows + names)."""
        by_name = np.array([*(self.number(n) for n in names.names), -1], np.int64)[names.codes]
        if np.all(by_name >= 0):
            return by_name
        by_address = np.array([*(self.number(n) for n in addresses.names), -1], np.int64)[addresses.codes]
        out = np.where(by_name >= 0, by_name, by_address)
        lost = names.codes[out < 0]
        for code, rows in zip(*np.unique(lost, return_counts=True), strict=True):
            self.unknown[names.names[code] if code >= 0 else "(no name)"] += int(rows)
        return out
