"""Which GID of a port to probe from: by rule, so that no index has to be configured per host."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from typing import Literal

from agent.transport.base import TransportError
from agent.transport.verbs.edge import Gid, Port

Family = Literal["any", "ipv4", "ipv6"]


class GidIndexError(ValueError):
    """A forced GID index that cannot be."""

    def __init__(self, device: str, port: Port, index: int, what: str) -> None:
        self.index = index
        super().__init__(
            f"agent.gid_index {index} of {device} port {port.number} {what} (its table has {port.table} entries); "
            "leave it out to have one chosen"
        )


class NoGidError(TransportError):
    """No entry fits the rule (yet)."""

    def __init__(self, device: str, port: int, family: Family) -> None:
        self.device = device
        wanted = "an IPv4 or a global IPv6" if family == "any" else "an IPv4" if family == "ipv4" else "a global IPv6"
        super().__init__(f"{device} port {port} has no usable RoCE v2 GID: give its network interface {wanted} address")


def rank(entry: Gid, family: Family = "any", link_local: bool = False) -> int | None:
    """How good an entry is, 0 best; None: not to be used.

    >>> rank(Gid(3, "::ffff:10.20.1.11", True)), rank(Gid(1, "fd00::1", True)), rank(Gid(0, "fe80::1", True))
    (0, 1, None)
    """
    address = ipaddress.IPv6Address(entry.gid)
    mapped = address.ipv4_mapped
    local = (mapped or address).is_link_local
    if not entry.v2 or (local and not link_local) or address.is_unspecified or (mapped or address).is_loopback:
        return None
    if (family == "ipv4" and mapped is None) or (family == "ipv6" and mapped is not None):
        return None
    return (0 if mapped is not None else 1) + (2 if local else 0)


def choose(
    device: str,
    port: Port,
    table: Sequence[Gid],
    *,
    index: int | None = None,
    family: Family = "any",
    link_local: bool = False,
) -> Gid:
    """The entry to use: RoCE v2 only, IPv4 first, then IPv6; of equals the lowest index. `index` forces one.

    Raises NoGidError, or GidIndexError for a forced index outside the table.
    """
    if index is not None:
        if not 0 <= index < port.table:
            raise GidIndexError(device, port, index, "is outside the table")
        for entry in table:
            if entry.index == index:
                if not entry.v2:
                    raise GidIndexError(device, port, index, "is not RoCE v2")
                return entry
        raise NoGidError(device, port.number, family)
    ranked = [(r, e.index, e) for e in table if (r := rank(e, family, link_local)) is not None]
    if not ranked:
        raise NoGidError(device, port.number, family)
    return min(ranked, key=lambda item: item[:2])[2]


def find(table: Sequence[Gid], wanted: Gid) -> Gid | None:
    """Where an address is now: the kernel may add it again at another index after a flap."""
    same = [e for e in table if e.v2 and e.gid == wanted.gid]
    return next((e for e in same if e.index == wanted.index), same[0] if same else None)
