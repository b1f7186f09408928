"""The machine's own network, as far as a lab borrows it; noted in a file, so that even a killed lab gives it back."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from pingmesh.lab import namespaces, sysctls
from pingmesh.lab.namespaces import CommandError

log = logging.getLogger(__name__)

LOCAL_PREFERENCE = 300
"""Where the rule `lookup local` goes, behind the rules of the RNICs."""
MANAGEMENT_TABLE = "inet pmmgmt"


class Borrowed(msgspec.Struct, frozen=True, kw_only=True):
    """What the lab makes and changes in the machine's first network namespace."""

    devices: list[str]
    rules: list[int]
    """Preferences of IPv4 rules."""
    sysctls: dict[str, str]
    """What these were before."""


class SharedNetwork:
    """Borrows and gives back. All methods block."""

    def __init__(self, record: Path) -> None:
        """`record`: the file that remembers what there is to give back."""
        self._record = record

    def borrow(self, devices: Sequence[str], rules: Sequence[int]) -> None:
        """Note devices and rules that are going to be made, then set this namespace up to hold many hosts."""
        wanted = sysctls.host_values()
        before = {key: value for key in wanted if (value := sysctls.read(key)) is not None}
        self._record.write_bytes(
            msgspec.json.encode(Borrowed(devices=list(devices), rules=list(rules), sysctls=before))
        )
        namespaces.write_sysctls({key: wanted[key] for key in before}, optional=before.keys())

    def give_back(self) -> None:
        """Remove the devices and rules, and set everything as it was. Does nothing where nothing was borrowed."""
        try:
            borrowed = msgspec.json.decode(self._record.read_bytes(), type=Borrowed)
        except (OSError, msgspec.DecodeError):
            return
        # Without `lookup local` no machine talks to itself: the old rule is back before the new one goes.
        present = {rule["priority"] for rule in json.loads(namespaces.execute(["ip", "-j", "rule", "show"]))}
        lines = [] if 0 in present else ["rule add pref 0 lookup local"]
        lines += [f"rule del pref {number}" for number in borrowed.rules if number in present]
        _each(lines)
        existing = {link["ifname"] for link in json.loads(namespaces.execute(["ip", "-j", "link", "show"]))}
        _each(f"link del {device}" for device in borrowed.devices if device in existing)
        namespaces.execute(["nft", "delete", "table", *MANAGEMENT_TABLE.split()], check=False)
        namespaces.write_sysctls(borrowed.sysctls, optional=borrowed.sysctls.keys())
        self._record.unlink(missing_ok=True)


def _each(lines: Iterable[str]) -> None:
    for line in lines:
        try:
            namespaces.execute(["ip", *line.split()])
        except CommandError as error:
            log.warning("%s", error)
