"""Which RDMA devices to probe from: those whose port is Ethernet, and whose role is not another than computing."""

from __future__ import annotations

import contextlib
import fnmatch
import ipaddress
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from agent.transport.base import address_of
from agent.transport.verbs import gids
from agent.transport.verbs.edge import Device, Port, VerbsEdge
from agent.transport.verbs.transport import Rule
from pingmesh.config import DeviceRole

log = logging.getLogger(__name__)

SYSFS = Path("/sys/class/infiniband")
NODES = Path("/sys/class/infiniband_verbs")
COMPUTE = "compute"


@dataclass(frozen=True, slots=True)
class Found:
    """A device that was looked at: its GID's address or why it has none, and its role."""

    device: str
    address: str
    role: str
    why: str = ""

    @property
    def usable(self) -> bool:
        """Whether to probe from it."""
        return bool(self.address) and self.role == COMPUTE


def interface_of(device: str, sysfs: Path = SYSFS) -> str:
    """The network interface below an RDMA device; empty while it is not there."""
    for place in _interface_files(sysfs / device):
        with contextlib.suppress(OSError):
            name = place.read_text().strip()
            if name:
                return name
    with contextlib.suppress(OSError):
        return next((p.name for p in sorted((sysfs / device / "device/net").iterdir())), "")
    return ""


def _interface_files(directory: Path) -> Iterator[Path]:
    for port in sorted(directory.glob("ports/*")):
        yield from sorted(port.glob("gid_attrs/ndevs/*"), key=lambda p: int(p.name))
    yield directory / "parent"


def node_of(device: str, nodes: Path = NODES) -> Path | None:
    """The entry through which processes open an RDMA device; None while there is none.

    It goes first when a device is taken away. Drivers that cannot take a device from those who have it open then wait
    until all of them close it, and tell nobody.
    """
    for node in sorted(nodes.glob("uverbs*")):
        with contextlib.suppress(OSError):
            if (node / "ibdev").read_text().strip() == device:
                return node
    return None


def is_virtual_function(device: str, sysfs: Path = SYSFS) -> bool:
    """Whether the device's PCI function is one of another's."""
    return (sysfs / device / "device/physfn").exists()


def role_of(device: str, address: str, virtual: bool, roles: Sequence[DeviceRole]) -> str:
    """The role by the first rule that fits in all it names; computing without one.

    >>> role_of("mlx5_8", "10.9.0.1", False, [{"role": "storage", "subnet": "10.9.0.0/16"}])
    'storage'
    """
    for rule in roles:
        fits = fnmatch.fnmatchcase(device, rule.get("name", "*")) and rule.get("virtual", virtual) == virtual
        if fits and ("subnet" not in rule or _within(address, rule["subnet"])):
            return rule["role"]
    return COMPUTE


def _within(address: str, subnet: str) -> bool:
    try:
        return bool(address) and ipaddress.ip_address(address) in ipaddress.ip_network(subnet, strict=False)
    except ValueError:
        return False


def look(edge: VerbsEdge, rule: Rule, roles: Sequence[DeviceRole], sysfs: Path = SYSFS) -> list[Found]:
    """All RDMA devices of this machine, with what speaks against each."""
    out = []
    for name in edge.devices():
        try:
            address, why = _address(edge, name, rule), ""
        except (OSError, ValueError) as error:
            address, why = "", str(error)
        found = Found(name, address, role_of(name, address, is_virtual_function(name, sysfs), roles), why)
        log.info("RDMA device", extra={"device": name, "address": address, "role": found.role, "why": why})
        out.append(found)
    return out


def _address(edge: VerbsEdge, name: str, rule: Rule) -> str:
    device = edge.open(name)
    try:
        port = _active_port(device)
        if port is None:
            raise OSError(f"{name} has no active Ethernet port")
        entry = gids.choose(
            name, port, device.gids(port.number), index=rule.index, family=rule.family, link_local=rule.link_local
        )
        return address_of(entry.gid)
    finally:
        device.close()


def index_of(edge: VerbsEdge, name: str, gid: str) -> int | None:
    """Where the table of a device's active port has a RoCE v2 GID now; None where it has it not. Raises OSError."""
    device = edge.open(name)
    try:
        port = _active_port(device)
        table = device.gids(port.number) if port is not None else []
        return next((e.index for e in table if e.v2 and e.gid == gid), None)
    finally:
        device.close()


def _active_port(device: Device) -> Port | None:
    ports = (device.port(n) for n in range(1, device.capabilities().ports + 1))
    return next((p for p in ports if p.ethernet and p.active), None)
