"""Deterministic addresses for generated fabrics, so that a lab and its file always agree."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable


class AddressPlan:
    """Hands out addresses: RNIC cables by ToR, switch links in order, loopbacks in order.

    Both ends of a cable share a /31 (IPv6: a /127); the switch, of two switches the lower, has the even address.

    IPv4: RNICs in 10.1.0.0 to 10.253.255.255 (ToR 7 is 10.7.0.0/16 while there are at most 253 ToRs), links in
    172.16.0.0/12, loopbacks in 10.255.0.0/16. IPv6: fd00:1:TOR::/48, fd00:2::/32 and fd00:ff::/32.

    Args:
        family: 4 or 6.
        tors: how many ToRs there will be.
        rnics_per_tor: how many RNIC cables each takes.

    Raises:
        ValueError: the fabric does not fit into the IPv4 ranges, or `family` is neither 4 nor 6.
    """

    def __init__(self, family: int, tors: int, rnics_per_tor: int) -> None:
        if family not in (4, 6):
            raise ValueError(f"address family {family} does not exist: use 4 or 6")
        self._text: Callable[[int], str]
        if family == 4:
            self._text = lambda n: str(ipaddress.IPv4Address(n))
            self._stride = 1 << 16
            while self._stride > 1 and (tors + 1) * self._stride > 254 << 16:
                self._stride >>= 1
            if 2 * rnics_per_tor > self._stride:
                raise ValueError(f"{tors} ToRs of {rnics_per_tor} RNICs do not fit into 10.0.0.0/8: use IPv6")
            self._rnics, self._links, self._links_end = 10 << 24, 0xAC100000, 0xAC200000
            self._loopbacks, self._loopbacks_end = 0x0AFF0000, 0x0B000000
        else:
            self._text = lambda n: str(ipaddress.IPv6Address(n))
            self._stride = 1 << 80
            self._rnics, self._links, self._links_end = 0xFD000001 << 96, 0xFD000002 << 96, 0xFD000003 << 96
            self._loopbacks, self._loopbacks_end = 0xFD0000FF << 96, 0xFD000100 << 96

    def rnic(self, tor: int, number: int) -> tuple[str, str]:
        """Addresses (of the RNIC, of the switch port) of the cable `number` (from 0) of ToR `tor` (from 1)."""
        base = self._rnics + tor * self._stride + 2 * number
        return self._text(base + 1), self._text(base)

    def link(self) -> tuple[str, str]:
        """Addresses of both ends of the next link."""
        if self._links + 2 > self._links_end:
            raise ValueError("the links do not fit into 172.16.0.0/12: use IPv6")
        self._links += 2
        return self._text(self._links - 2), self._text(self._links - 1)

    def loopback(self) -> str:
        """The next loopback address."""
        self._loopbacks += 1
        if self._loopbacks >= self._loopbacks_end:
            raise ValueError("the switches do not fit into 10.255.0.0/16: use IPv6")
        return self._text(self._loopbacks)
