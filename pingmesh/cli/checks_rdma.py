"""What `pingmesh doctor` looks at for the verbs transport: devices, GIDs, limits, privileges, PCIe, clocks."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from agent.transport.base import TransportError, address_of
from agent.transport.verbs import gids, labels, library
from agent.transport.verbs.clocks import stamp_clock
from agent.transport.verbs.edge import Capabilities, Gid, Port, VerbsEdge
from pingmesh.cli import pcie, rdma
from pingmesh.cli.check import Check, State
from pingmesh.cli.rdma import RdmaDevice
from pingmesh.config import AgentSettings

MEMLOCK_PER_RNIC = 1 << 20
_CAPABILITIES = {"CAP_NET_RAW": 13, "CAP_IPC_LOCK": 14}
_MTUS = (4096, 2048, 1024, 512, 256)
_ROCE_HEADERS = 52
"""What the kernel leaves of a network interface's MTU for RoCE headers."""
_RXE_VENDOR = 0xFFFFFF


def _real_edge() -> VerbsEdge:
    from agent.transport.verbs.pyverbs_edge import PyverbsEdge

    return PyverbsEdge()


@dataclass(frozen=True)
class Machine:
    """Where the checks look; a test gives another."""

    sys: Path = rdma.SYS
    character_devices: Path = library.CHARACTER_DEVICES
    distribution: Path = library.DISTRIBUTION
    memlock: Callable[[], int] = lambda: resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    capabilities: Callable[[], int] = lambda: _effective(Path("/proc/self/status"))
    find_pyverbs: Callable[[Path], object] = library.find
    edge: Callable[[], VerbsEdge] = _real_edge
    uid: int = field(default_factory=os.geteuid)


def _effective(status: Path) -> int:
    """The effective capabilities in a process's status, as bits."""
    for line in rdma.read(status).splitlines():
        if line.startswith("CapEff:"):
            return int(line.split()[1], 16)
    return 0


def checks(agent: AgentSettings, bad: State, machine: Machine | None = None) -> list[Check]:
    """`bad`: the state of what the verbs transport cannot do without."""
    m = machine or Machine()
    devices = rdma.devices(m.sys)
    verbs = [pyverbs(m, bad)]
    if not devices:
        remedy = "load the NIC's RDMA driver, or use the soft transport, which needs none"
        if not m.character_devices.is_dir():
            remedy = "load the NIC's RDMA driver and ib_uverbs (or use the soft transport, which needs neither)"
        return [Check("RDMA devices", bad, "none: this machine has no RDMA", remedy), *verbs]
    out = [Check("RDMA devices", "ok", ", ".join(dict.fromkeys(d.name for d in devices)))]
    out += [*verbs, character_devices(m, bad), memlock(m, len(devices), bad), *capabilities(m, bad)]
    told = ask_devices(m, devices) if verbs[0].state == "ok" else {}
    for d in devices:
        out += device(d, agent, m, bad, told.get((d.name, d.port)))
    return out


def pyverbs(m: Machine, bad: State) -> Check:
    """Whether this interpreter can use the distribution's pyverbs."""
    try:
        m.find_pyverbs(m.distribution)
    except library.NoVerbsError as error:
        text, _, remedy = str(error).rpartition(": ")
        return Check("pyverbs", bad, text, remedy)
    return Check("pyverbs", "ok", "found")


def character_devices(m: Machine, bad: State) -> Check:
    """What user space talks to the devices by."""
    name = str(m.character_devices)
    found = sorted(m.character_devices.glob("uverbs*")) if m.character_devices.is_dir() else []
    if not found:
        remedy = f"modprobe ib_uverbs; give a container the directory (--device {name}, or a volume of it)"
        return Check(name, bad, "no uverbs devices", remedy)
    shut = [p.name for p in found if not os.access(p, os.R_OK | os.W_OK)]
    if shut:
        return Check(
            name, bad, f"no access to {', '.join(shut)}", f"run the agent as root, or chmod 666 {name}/uverbs*"
        )
    return Check(name, "ok", ", ".join(p.name for p in found))


def memlock(m: Machine, rnics: int, bad: State) -> Check:
    """Whether the packet buffers may be registered."""
    limit, needed = m.memlock(), rnics * MEMLOCK_PER_RNIC
    if limit == resource.RLIM_INFINITY:
        return Check("memlock limit", "ok", "unlimited")
    seen = f"{limit >> 10} KiB"
    if m.capabilities() >> _CAPABILITIES["CAP_IPC_LOCK"] & 1:
        return Check("memlock limit", "ok", f"{seen}, lifted by CAP_IPC_LOCK")
    if limit >= needed:
        return Check("memlock limit", "ok", f"{seen} for {rnics} ports, which need less than {needed >> 10} KiB")
    return Check(
        "memlock limit",
        bad,
        f"{seen}, but {rnics} ports may need {needed >> 10} KiB",
        "raise it: systemd LimitMEMLOCK=infinity, docker --ulimit memlock=-1, /etc/security/limits.conf",
    )


def capabilities(m: Machine, bad: State) -> list[Check]:
    """CAP_NET_RAW is for tracing paths; CAP_IPC_LOCK only helps where memlock is short."""
    have = m.capabilities()
    out = []
    for name, bit in _CAPABILITIES.items():
        if have >> bit & 1:
            out.append(Check(name, "ok", "held"))
        elif name == "CAP_NET_RAW":
            remedy = "run the agent as root, or give it CAP_NET_RAW (systemd: AmbientCapabilities=CAP_NET_RAW)"
            out.append(Check(name, bad, "not held: paths cannot be traced", remedy))
        else:
            out.append(Check(name, "ok", "not held; the memlock limit is what counts"))
    return out


@dataclass(frozen=True, slots=True)
class Told:
    """What a device says of itself over verbs."""

    port: Port
    capabilities: Capabilities


def ask_devices(m: Machine, devices: list[RdmaDevice]) -> dict[tuple[str, int], Told | str]:
    """By device and port; text: why it cannot be opened."""
    out: dict[tuple[str, int], Told | str] = {}
    try:
        edge = m.edge()
    except OSError as error:
        return {(d.name, d.port): str(error) for d in devices}
    for d in devices:
        try:
            opened = edge.open(d.name)
            try:
                out[d.name, d.port] = Told(opened.port(d.port), opened.capabilities())
            finally:
                opened.close()
        except OSError as error:
            out[d.name, d.port] = error.strerror or str(error)
    return out


def device(d: RdmaDevice, agent: AgentSettings, m: Machine, bad: State, told: Told | str | None) -> list[Check]:
    """One port of one device."""
    name = f"{d.name} port {d.port}"
    used = agent.devices is None or any(e.rpartition("=")[2] == d.name for e in agent.devices)
    bad = bad if used else "warning"
    if d.link_layer != "Ethernet":
        return [
            Check(name, "warning", f"link layer {d.link_layer}", "only RoCE is probed: leave it out of agent.devices")
        ]
    out = [port_state(d, name, bad), gid(d, agent, name, bad), mtu(d, m, name, told)]
    if isinstance(told, str):
        remedy = f"check access to {m.character_devices} and the driver's messages in dmesg"
        out.append(Check(f"{name} verbs", bad, f"cannot be opened: {told}", remedy))
    if d.tclass is not None:
        out.append(
            Check(
                f"{name} traffic class",
                "warning",
                f"{d.tclass} (DSCP {d.tclass >> 2}) is forced on all that leaves: the classes of probes are not kept",
                f"echo 0 > {d.path}/tc/{d.port}/traffic_class, or probe in that class only",
            )
        )
    return [*out, flow_label(d, m, name), clock(name, told), *pci(d, m)]


def port_state(d: RdmaDevice, name: str, bad: State) -> Check:
    """Up or not."""
    if d.state == "ACTIVE":
        return Check(name, "ok", f"ACTIVE, {d.rate or 'rate unknown'}, {d.interface or 'no network interface'}")
    return Check(
        name, bad, d.state, f"ip link set {d.interface or 'its interface'} up; check its cable and the switch port"
    )


def gid(d: RdmaDevice, agent: AgentSettings, name: str, bad: State) -> Check:
    """Which GID would be used, and why."""
    name += " GID"
    table = [Gid(g.index, g.gid, g.version == 2) for g in d.gids]
    port = Port(d.port, d.state == "ACTIVE", True, 0, max(d.table_size, 1))
    index = agent.gid_index
    try:
        chosen = gids.choose(d.name, port, table, index=index, family=agent.gid_family, link_local=agent.gid_link_local)
    except (TransportError, ValueError) as error:
        text, _, remedy = str(error).rpartition(": ")
        have = ", ".join(f"{g.index} {g.gid} v{g.version or '?'}" for g in d.gids) or "none"
        return Check(name, bad, f"{text or error} (there is {have})", remedy or "leave agent.gid_index out")
    why = f"as agent.gid_index says ({index})" if index is not None else _why(chosen, table)
    return Check(name, "ok", f"{chosen.index} ({address_of(chosen.gid)}): {why}")


def _why(chosen: Gid, table: list[Gid]) -> str:
    others = len([g for g in table if g is not chosen])
    kind = "IPv4" if chosen.gid.startswith("::ffff:") else "global IPv6, and no IPv4 is there"
    return f"RoCE v2, {kind}; of {others + 1} entries" if others else f"RoCE v2, {kind}; the only entry"


def mtu(d: RdmaDevice, m: Machine, name: str, told: Told | str | None) -> Check:
    """The path MTU: of the device, or what follows from its interface's."""
    name += " MTU"
    text = rdma.read(m.sys / "class/net" / d.interface / "mtu") if d.interface else ""
    link = int(text) if text.isdigit() else 0
    expected = next((x for x in _MTUS if x <= link - _ROCE_HEADERS), 0)
    active = told.port.mtu if isinstance(told, Told) else expected
    if not active:
        return Check(name, "warning", "not known", "give the device a network interface that is up")
    said = f"active {active}" if isinstance(told, Told) else f"expected {active}"
    seen = f"{said} (MTU of {d.interface}: {link})" if link else said
    if active < 1024:
        return Check(name, "warning", seen, f"ip link set {d.interface} mtu 9000, on the switches too")
    return Check(name, "ok", seen)


def flow_label(d: RdmaDevice, m: Machine, name: str) -> Check:
    """Whether the prober chooses the path."""
    name += " flow label"
    vendor = _RXE_VENDOR if d.driver == "rxe" else 0
    provider = labels.provider_of(d.name, vendor, m.sys / "class/infiniband")
    match provider.honoured:
        case "yes":
            return Check(name, "ok", f"honoured by {d.driver}: gives the UDP source port")
        case "no":
            return Check(name, "ok", f"not honoured by {d.driver}: the port follows the QPN, so several QPs are opened")
    return Check(
        name,
        "warning",
        f"not known of {d.driver}: paths may not change with the source port",
        "compare the ports on a switch, or probe with the soft transport",
    )


def clock(name: str, told: Told | str | None) -> Check:
    """Whose clock stamps completions."""
    name += " clock"
    if not isinstance(told, Told):
        return Check(name, "warning", "not known without opening the device", "see pyverbs above")
    found, why = stamp_clock(told.capabilities)
    if found is not None:
        return Check(name, "ok", f"hardware, {told.capabilities.clock_khz / 1000:.0f} MHz")
    return Check(name, "ok", f"software ({why}): delays hold the host's own scheduling")


def pci(d: RdmaDevice, m: Machine) -> list[Check]:
    """Each hop to the root; one reading says little, since idle cards slow down on purpose."""
    out = []
    for hop in pcie.hops(d.path / "device"):
        if hop.slow:
            out.append(
                Check(
                    f"{d.name} PCIe",
                    "warning",
                    f"{hop.function}: {hop}",
                    "look again under load (idle links slow down on purpose); then reseat the card, check its slot",
                )
            )
        else:
            out.append(Check(f"{d.name} PCIe", "ok", f"{hop.function}: {hop}"))
    return out
