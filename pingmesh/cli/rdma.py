"""RDMA devices as sysfs shows them: readable by anyone, without pyverbs."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from pathlib import Path

SYS = Path("/sys")


@dataclass(frozen=True, slots=True)
class GidEntry:
    """A populated entry of a GID table. `version`: of RoCE, 1 or 2; 0: not RoCE, or not told."""

    index: int
    gid: str
    version: int
    interface: str

    @property
    def address(self) -> str | None:
        """The IP address in it; None for link-local ones, which reach nobody behind a router."""
        ip = ipaddress.IPv6Address(self.gid)
        address = ip.ipv4_mapped or ip
        return None if address.is_link_local else str(address)


@dataclass(frozen=True, slots=True)
class RdmaDevice:
    """One port of one device. `state` as `ACTIVE`, `link_layer` as `Ethernet`; `active_mtu` in bytes, 0: unknown."""

    name: str
    port: int
    state: str
    link_layer: str
    rate: str
    interface: str
    active_mtu: int
    table_size: int
    gids: tuple[GidEntry, ...]
    driver: str
    tclass: int | None
    """Traffic class forced on everything that leaves; None: not forced."""
    path: Path


def read(path: Path) -> str:
    """A file of sysfs, stripped; empty where there is none, or the kernel refuses (an empty GID slot does)."""
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def devices(sys: Path | None = None) -> list[RdmaDevice]:
    """Every port of every device, by name."""
    base = (sys or SYS) / "class/infiniband"
    if not base.is_dir():
        return []
    ports = [p for d in base.iterdir() for p in (d / "ports").glob("[0-9]*")]
    return [_port(p) for p in sorted(ports, key=lambda p: (p.parent.parent.name, int(p.name)))]


def _port(path: Path) -> RdmaDevice:
    device = path.parent.parent
    gids = _gids(path)
    return RdmaDevice(
        name=device.name,
        port=int(path.name),
        state=read(path / "state").partition(":")[2].strip() or "unknown",
        link_layer=read(path / "link_layer") or "unknown",
        rate=read(path / "rate"),
        interface=next((g.interface for g in gids if g.interface), "") or read(device / "parent"),
        active_mtu=0,
        table_size=sum(1 for _ in (path / "gids").glob("[0-9]*")),
        gids=gids,
        driver=_driver(device),
        tclass=_tclass(read(device / "tc" / path.name / "traffic_class")),
        path=device,
    )


def _gids(port: Path) -> tuple[GidEntry, ...]:
    found = []
    for entry in sorted((port / "gids").glob("[0-9]*"), key=lambda p: int(p.name)):
        try:
            gid = ipaddress.IPv6Address(read(entry))
        except ValueError:
            continue  # tables are sparse, and empty slots may raise
        if not int(gid) or int(gid) == 0xFE80 << 112:
            continue
        kind = read(port / "gid_attrs/types" / entry.name)
        version = 2 if "v2" in kind else 1 if kind else 0
        text = f"::ffff:{gid.ipv4_mapped}" if gid.ipv4_mapped else str(gid)
        found.append(GidEntry(int(entry.name), text, version, read(port / "gid_attrs/ndevs" / entry.name)))
    return tuple(found)


def _driver(device: Path) -> str:
    try:
        return (device / "device/driver").resolve(strict=True).name
    except OSError:
        # Soft-RoCE has no device below it.
        return "rxe" if read(device / "parent") else "unknown"


def _tclass(text: str) -> int | None:
    """From `Global tclass=106`; 0 and nothing mean "not forced"."""
    found = re.search(r"Global tclass=(\d+)", text)
    return int(found[1]) if found and int(found[1]) else None
