"""The two ends of a `pingmesh ping`: which device here, which queue pair there."""

from __future__ import annotations

import difflib
import ipaddress
import socket
from collections.abc import Sequence
from typing import Any, NamedTuple

from agent.interfaces import Netlink
from agent.ping import Aim
from agent.transport.base import address_of
from pingmesh.cli import ask, rdma

SERVE_HINT = "`pingmesh ping --serve --device DEVICE` on the far end prints what to give here"


class PingError(ValueError):
    """What was asked cannot be done; the text is one sentence for the user."""


class Source(NamedTuple):
    """Where probes leave: the name shown, the device the transport opens, and an address of it if one was given."""

    name: str
    device: str
    address: str | None = None


class Destination(NamedTuple):
    """Where they go. `mtu` 0: not known. `presence`: of its agent, as the controller sees it.

    `renewed`: another epoch of it has registered since.
    """

    name: str
    aim: Aim
    mtu: int = 0
    presence: str = "online"
    up: bool = True
    renewed: bool = False


def is_name(text: str) -> bool:
    """Whether it is an RNIC's name, `host/device`."""
    return text.count("/") == 1 and all(text.split("/"))


def registered(controller: str, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """RNICs of these names as the controller knows them; what it does not know is left out."""
    if not names:
        return {}
    return {r["name"]: r for r in ask.get(controller, "/rnics", name=",".join(names)) if r["name"] in names}


def unknown(controller: str, name: str) -> PingError:
    """That an RNIC is not registered, with those that might be meant."""
    everyone = [str(r["name"]) for r in ask.get(controller, "/rnics")]
    close = difflib.get_close_matches(name, everyone, 3)
    if not everyone:
        hint = "no RNIC is: is an agent running?"
    elif close:
        hint = f"did you mean {' or '.join(close)}?"
    else:
        hint = f"{len(everyone)} are, such as {everyone[0]}"
    return PingError(f"{name} is not registered with the controller at {controller}: {hint}")


def destination(text: str, known: dict[str, dict[str, Any]], controller: str) -> Destination:
    """From what was typed. Raises PingError."""
    if "," in text:
        try:
            aim = Aim.parse(text)
            ipaddress.ip_address(aim.address)
        except ValueError as error:
            raise PingError(f"DST {error}: {SERVE_HINT}") from None
        return Destination(aim.address, aim)
    if not is_name(text):
        raise PingError(
            f"DST {text!r} is neither an RNIC's name, such as h4/rnic0, nor ADDRESS,QPN,QKEY,EPOCH: {SERVE_HINT}"
        )
    entry = known.get(text)
    if entry is None:
        raise unknown(controller, text)
    if "qkey" not in entry:
        raise PingError(f"the controller at {controller} does not tell Q_Keys: it is of an earlier version; update it")
    aim = Aim(address_of(entry["gid"]), entry["qpn"], entry["qkey"], entry["epoch"])
    return Destination(text, aim, entry["mtu"], entry["agent"], entry["up"])


def again(target: Destination, controller: str) -> Destination:
    """The target as the controller sees it now. Raises PingError, ConnectionError."""
    now = destination(target.name, registered(controller, [target.name]), controller)
    return target._replace(presence=now.presence, up=now.up, renewed=now.aim.epoch != target.aim.epoch)


def local_addresses(transport: str) -> dict[str, str]:
    """Device, as a transport names it, by each usable address of this machine (of this network namespace)."""
    if transport == "verbs":
        return {g.address: d.name for d in rdma.devices() for g in d.gids if g.version == 2 and g.address}
    with Netlink() as netlink:
        return {str(p.ip): i.name for i in netlink.interfaces() for p in netlink.prefixes(i.name)}


def source(
    text: str | None,
    device: str | None,
    known: dict[str, dict[str, Any]],
    by_address: dict[str, str],
) -> Source | None:
    """From what was typed; None where it is an RNIC of another machine. Raises PingError.

    `by_address`: see `local_addresses`.
    """
    if device is not None:
        return Source(text or device, device)
    if text is None:
        raise PingError("no SRC: name an RNIC, a device or an address of this machine")
    if is_name(text):
        host, name = text.split("/")
        entry = known.get(text)
        address = entry["address"] if entry else None
        if address in by_address:
            return Source(text, by_address[address], address)
        # Without a controller the name itself may tell: a device of this very machine.
        if entry is None and host == socket.gethostname() and name in by_address.values():
            return Source(text, name)
        return None
    try:
        address = str(ipaddress.ip_address(text))
    except ValueError:
        return Source(text, text)
    if address not in by_address:
        have = ", ".join(sorted(by_address)) or "none"
        raise PingError(f"SRC {text} is no address of this machine; usable here: {have}")
    return Source(text, by_address[address], address)
