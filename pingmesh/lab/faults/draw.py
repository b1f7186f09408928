"""Draws faults at random, so that the demo and the benchmarks draw alike. The analyzer is never told."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pingmesh.lab.faults.errors import FaultError
from topology.model import DirectedLink, Topology

Draw = Callable[[random.Random, Topology], list[str]]


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of fault: the class it is pooled with, and how to draw the arguments of `lab fault add`."""

    pool: str
    draw: Draw


def _end(d: DirectedLink, switch: str) -> str:
    port = d.link.a_port if d.link.a == switch else d.link.b_port
    return f"{switch}:{port}" if d.link.parallel else switch


def _link(*options: str, directions: Sequence[str] = ()) -> Draw:
    def draw(rng: random.Random, topology: Topology) -> list[str]:
        if not topology.directed_links:
            raise FaultError("This lab has no switch links to draw a fault for.")
        d = rng.choice(topology.directed_links)
        argv = ["link", _end(d, d.source), _end(d, d.target), *options]
        return [*argv, "--direction", rng.choice(directions)] if directions else argv

    return draw


def _rnic(*options: str, directions: Sequence[str] = ()) -> Draw:
    def draw(rng: random.Random, topology: Topology) -> list[str]:
        argv = ["rnic", rng.choice(sorted(topology.rnics)), *options]
        return [*argv, "--direction", rng.choice(directions)] if directions else argv

    return draw


def _switch(*options: str) -> Draw:
    return lambda rng, topology: ["switch", rng.choice(sorted(topology.switches)), *options]


def _host(target: str, *options: str) -> Draw:
    return lambda rng, topology: [target, rng.choice(sorted(topology.hosts)), *options]


_LINK_WAYS = ("forward", "reverse", "both")
_ONE_WAY = ("forward", "reverse")
_RNIC_WAYS = ("rx", "tx", "both")

KINDS: dict[str, Kind] = {
    "link-blackhole": Kind("link", _link("--loss", "100%", directions=_LINK_WAYS)),
    "link-loss-50": Kind("link", _link("--loss", "50%", directions=_LINK_WAYS)),
    "link-loss-30": Kind("link", _link("--loss", "30%", directions=_LINK_WAYS)),
    "link-loss-10": Kind("link", _link("--loss", "10%", directions=_LINK_WAYS)),
    "link-loss-1": Kind("link-1%", _link("--loss", "1%", directions=_ONE_WAY)),
    "link-down": Kind("link", _link("--down")),
    "link-down-no-reroute": Kind("link", _link("--down", "--no-reroute")),
    "link-flap": Kind("link", _link("--flap", "3")),
    "link-congest": Kind("link-congest", _link("--congest", "20mbit", directions=_ONE_WAY)),
    "link-flows": Kind("link-partial", _link("--flows", "25%", directions=_ONE_WAY)),
    "link-large": Kind("link-partial", _link("--larger-than", "1000", directions=_ONE_WAY)),
    "link-dscp": Kind("link-partial", _link("--dscp", "48", directions=_ONE_WAY)),
    "rnic-blackhole": Kind("rnic", _rnic("--loss", "100%", directions=_RNIC_WAYS)),
    "rnic-loss-30": Kind("rnic", _rnic("--loss", "30%", directions=_RNIC_WAYS)),
    "rnic-loss-10": Kind("rnic", _rnic("--loss", "10%", directions=_RNIC_WAYS)),
    "rnic-down": Kind("rnic", _rnic("--down")),
    "switch-blackhole": Kind("switch", _switch("--loss", "100%")),
    "switch-loss-30": Kind("switch", _switch("--loss", "30%")),
    "switch-loss-10": Kind("switch", _switch("--loss", "10%")),
    "switch-down": Kind("switch", _switch("--down")),
    "host-down": Kind("host", _host("host", "--down")),
    "host-starve": Kind("host", _host("host", "--starve", "20")),
    "host-pause": Kind("host", _host("host", "--pause", "15")),
    "agent-kill": Kind("host", _host("agent", "--kill")),
    "agent-restart": Kind("restart", _host("agent", "--restart")),
    "agent-stop": Kind("restart", _host("agent", "--stop")),
    "broker-restart": Kind("restart", lambda rng, topology: ["broker", "--restart"]),
    "controller-restart": Kind("restart", lambda rng, topology: ["controller", "--restart"]),
    "analyzer-restart": Kind("restart", lambda rng, topology: ["analyzer", "--restart"]),
}
"""Every kind. Pools `link`, `rnic`, `switch`, `host`: what must be named right; `restart`: what must blame nobody."""

DEMO_KINDS = (
    "link-blackhole",
    "link-loss-30",
    "link-down",
    "rnic-blackhole",
    "rnic-down",
    "switch-loss-30",
    "host-down",
)


def random_spec(rng: random.Random, topology: Topology, kinds: Sequence[str] = DEMO_KINDS) -> list[str]:
    """Arguments of `lab fault add` for one of the kinds at a random place. Raises FaultError for an unknown kind."""
    kind = rng.choice(list(kinds))
    if kind not in KINDS:
        raise FaultError(f"There is no kind of fault {kind!r}; there is {', '.join(KINDS)}.")
    return KINDS[kind].draw(rng, topology)
