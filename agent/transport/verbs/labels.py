"""Which UDP source port a UD packet leaves from, by provider: it decides the ECMP path (Liu et al. 2024, §4.1)."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Literal

FIRST_PORT = 0xC000
_LOW = 0x3FFF
_LABEL_OF_FIRST = 0x4001
"""Label 0 means a random port; this one folds to 0xC000 as well."""
_RXE_VENDOR = 0xFFFFFF
_GOLDEN = 0x61C88647


class Provider(enum.Enum):
    """How a provider picks the port."""

    LABEL = "label"
    """mlx5 and hns: from the flow label of the address handle."""
    QPN = "qpn"
    """rxe: from the own QPN; labels are ignored."""
    UNKNOWN = "unknown"

    @property
    def honoured(self) -> Literal["yes", "no", "unknown"]:
        """Whether a wanted port can be had."""
        return {Provider.LABEL: "yes", Provider.QPN: "no"}.get(self, "unknown")  # type: ignore[return-value]


def provider_of(device: str, vendor: int, sysfs: Path = Path("/sys/class/infiniband")) -> Provider:
    """By the driver that the device's PCI function has, or the vendor of Soft-RoCE."""
    if vendor == _RXE_VENDOR:
        return Provider.QPN
    try:
        driver = (sysfs / device / "device/driver").resolve(strict=True).name
    except OSError:
        driver = device
    return Provider.LABEL if driver.startswith(("mlx5", "hns")) else Provider.UNKNOWN


def port_of_label(label: int) -> int:
    """The port that mlx5 and hns make of a label other than 0.

    >>> port_of_label(0x00001) == port_of_label(0x04000) == 0xC001
    True
    """
    label &= 0xFFFFF
    return FIRST_PORT | ((label & _LOW) ^ (label >> 14))


def label_of_port(port: int) -> int:
    """A label whose port has the same low 14 bits as `port`; never 0.

    >>> port_of_label(label_of_port(0xC000)) == 0xC000, port_of_label(label_of_port(0xFFFF)) == 0xFFFF
    (True, True)
    """
    return port & _LOW or _LABEL_OF_FIRST


def port_of_qpn(qpn: int) -> int:
    """The port of all UD packets of an rxe queue pair.

    >>> port_of_qpn(17), port_of_qpn(18)
    (57236, 63494)
    """
    return FIRST_PORT + ((qpn * _GOLDEN & 0xFFFFFFFF) >> 18)
