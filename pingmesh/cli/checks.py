"""What `pingmesh doctor` looks at: each check answers with what it saw and, where something is missing, one remedy."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

from agent.interfaces import Netlink
from pingmesh.cli import checks_rdma
from pingmesh.cli.check import Check, Role, State
from pingmesh.config import Settings

PROC_NET = Path("/proc/sys/net")
ROCE_PORT = 4791


def checks(settings: Settings, role: Role | None, controller: str) -> list[Check]:
    """The checks of a role, or of all; what only another role would need is a warning at most."""
    out = [python()]
    if role in (None, "agent"):
        verbs = settings.agent.transport == "verbs"
        # A host whose agent uses the soft transport lacks nothing without RDMA.
        out += [*checks_rdma.checks(settings.agent, _bad(role) if verbs else "warning")]
        out += [] if verbs else [raw_sockets(role), roce_port(), *devices(settings, role)]
    if role in (None, "lab"):
        out += [namespaces(role), tool("nft", "nftables", role), tool("ip", "iproute2", role), multipath(role)]
    if role in (None, "lab", "server"):
        out.append(mosquitto())
    if role in (None, "lab"):
        out.append(tshark())
    if role != "lab":
        out += [broker(settings, role), api(controller, role)]
    return out


def _bad(role: Role | None) -> State:
    return "failed" if role else "warning"


def python() -> Check:
    """The interpreter."""
    version = ".".join(map(str, sys.version_info[:3]))
    ok = sys.version_info >= (3, 11)
    return Check("Python", "ok" if ok else "failed", version, "" if ok else "install Python 3.11 or newer")


def raw_sockets(role: Role | None) -> Check:
    """Whether probes can be sent: the soft transport needs a raw socket."""
    try:
        socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_UDP).close()
    except PermissionError:
        return Check(
            "raw sockets (CAP_NET_RAW)",
            _bad(role),
            "not permitted",
            "run the agent as root, or give it CAP_NET_RAW (systemd: AmbientCapabilities=CAP_NET_RAW)",
        )
    return Check("raw sockets (CAP_NET_RAW)", "ok", "permitted")


def roce_port() -> Check:
    """Whether somebody else answers RoCEv2 on this machine: Soft-RoCE would answer our probes with nothing."""
    for table in ("udp", "udp6"):
        path = Path("/proc/net") / table
        if not path.exists():
            continue
        for line in path.read_text().splitlines()[1:]:
            if int(line.split()[1].rpartition(":")[2], 16) == ROCE_PORT:
                return Check(
                    "UDP port 4791",
                    "warning",
                    "in use (an agent that runs, or the kernel's rdma_rxe)",
                    "if no agent is running: unload rdma_rxe (rdma link delete ...)",
                )
    return Check("UDP port 4791", "ok", "free")


def devices(settings: Settings, role: Role | None) -> list[Check]:
    """The agent's interfaces: there, up, big enough."""
    with Netlink() as netlink:
        found = {i.name: i for i in netlink.interfaces() if not i.loopback}
    wanted = settings.agent.devices
    if wanted is None:
        names = ", ".join(found) or "none"
        return [
            Check(
                "agent devices",
                "warning",
                f"none configured; interfaces here: {names}",
                "name those of the fabric: agent.devices or pingmesh agent --devices eth1,eth2",
            )
        ]
    out = []
    for name in wanted:
        i = found.get(name)
        if i is None:
            out.append(
                Check(
                    f"device {name}", _bad(role), "no such interface", f"interfaces here: {', '.join(found) or 'none'}"
                )
            )
        elif not i.up:
            out.append(
                Check(
                    f"device {name}", _bad(role), "down or without carrier", f"ip link set {name} up; check its cable"
                )
            )
        else:
            out.append(Check(f"device {name}", "ok", f"up, MTU {i.mtu}"))
        reverse = PROC_NET / "ipv4/conf" / name / "rp_filter"
        if i is not None and len(wanted) > 1 and reverse.exists() and reverse.read_text().strip() == "1":
            out.append(
                Check(
                    f"sysctl rp_filter of {name}",
                    "warning",
                    "1 (strict): with several devices the kernel drops answers that take another way back",
                    f"sysctl -w net.ipv4.conf.{name}.rp_filter=2",
                )
            )
    return out


def namespaces(role: Role | None) -> Check:
    """Whether the lab can be built: root, or unprivileged user namespaces."""
    name = "namespaces for the lab"
    flags = "-mn" if os.geteuid() == 0 else "-Urmn"
    try:
        done = subprocess.run(["unshare", flags, "true"], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Check(name, _bad(role), f"unshare: {error}", "install util-linux")
    if done.returncode == 0:
        return Check(name, "ok", "root" if os.geteuid() == 0 else "unprivileged user namespaces")
    if os.geteuid() == 0:
        remedy = "this container lacks CAP_SYS_ADMIN: start it with --privileged"
    else:
        remedy = "run the lab as root, or allow user namespaces: sysctl -w kernel.unprivileged_userns_clone=1"
    return Check(name, _bad(role), done.stderr.strip() or "not permitted", remedy)


def _which(command: str) -> str | None:
    return shutil.which(command, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")


def tool(command: str, package: str, role: Role | None) -> Check:
    """A program that the lab runs by name."""
    path = _which(command)
    return Check(command, "ok", path) if path else Check(command, _bad(role), "not found", f"apt-get install {package}")


def mosquitto() -> Check:
    """The better broker."""
    path = _which("mosquitto")
    if path:
        return Check("mosquitto", "ok", path)
    return Check(
        "mosquitto",
        "warning",
        "not found; amqtt takes its place, good for 200 agents and a single analyzer",
        "apt-get install mosquitto",
    )


def tshark() -> Check:
    """Only tests need it."""
    path = _which("tshark")
    return (
        Check("tshark", "ok", path)
        if path
        else Check("tshark", "warning", "not found; only tests need it", "apt-get install tshark")
    )


def multipath(role: Role | None) -> Check:
    """Whether the lab's routers can hash on the 5-tuple."""
    name = "kernel: multipath routing"
    if not (PROC_NET / "ipv4/fib_multipath_hash_policy").exists():
        return Check(name, _bad(role), "no fib_multipath_hash_policy", "use a kernel with CONFIG_IP_ROUTE_MULTIPATH")
    seeded = (PROC_NET / "ipv4/fib_multipath_hash_seed").exists()
    return Check(name, "ok", "hash seed by sysctl" if seeded else "hash seed by nft jhash")


def broker(settings: Settings, role: Role | None) -> Check:
    """Whether the broker accepts connections."""
    host, port = settings.broker.host, settings.broker.port
    try:
        socket.create_connection((host, port), timeout=3).close()
    except OSError as error:
        return Check(
            "broker",
            _bad(role),
            f"{host}:{port}: {error.strerror or error}",
            "start it (pingmesh up) or name another: PINGMESH_BROKER=HOST:PORT, broker.host in the configuration",
        )
    return Check("broker", "ok", f"{host}:{port} accepts connections")


def api(controller: str, role: Role | None) -> Check:
    """Whether the controller answers, and hears the analyzer."""
    from pingmesh.cli import ask

    try:
        status = ask.get(controller, "/status")
    except ConnectionError as error:
        state: State = "failed" if role == "server" else "warning"
        return Check(
            "controller",
            state,
            f"{controller}: {error.__cause__ or error}",
            "start it (pingmesh up) or name it: --controller",
        )
    if not (status.get("analyzer") or {}).get("alive"):
        return Check("controller", "warning", f"{controller} answers, but hears no analyzer", "start the analyzer")
    return Check("controller", "ok", f"{controller} answers, the analyzer is alive")
