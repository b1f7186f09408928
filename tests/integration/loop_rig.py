"""Whole labs with agents: their incidents over time, what their broker carries, what their routers count."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest

from pingmesh import topics
from pingmesh.lab.client import Lab
from pingmesh.lab.fabric import MANAGEMENT_ADDRESS
from pingmesh.lab.judge import FABRIC, judge, matches
from pingmesh.lab.names import switch_interfaces
from pingmesh.lab.namespaces import LabError
from pingmesh.lab.supervisor import BROKER_PORT
from pingmesh.messages import Message, decode
from topology.model import DirectedLink, Topology

Json = dict[str, Any]
T = TypeVar("T")
M = TypeVar("M", bound=Message)

CLOSE_AFTER_S = 5
EAR = Path(__file__).with_name("loop_ear.py")
READY_S = 90.0
NAMED_S = 20.0
JUDGED_S = 2.0
CLOSED_S = 40.0
DWELL_S = 3.0
"""How long a fault stays after it was named: nothing else may be blamed meanwhile."""


@contextmanager
def running(topology: Topology) -> Iterator[Lab]:
    """A lab whose agents are online and walk every link, removed afterwards with its directory."""
    # Short: sockets lie in it.
    directory = Path(tempfile.mkdtemp(prefix="pmloop-"))
    try:
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("PINGMESH_ANALYZER__CLOSE_AFTER_S", str(CLOSE_AFTER_S))
            try:
                lab = Lab.up(topology, directory=directory / "lab")
            except LabError as error:
                if "namespaces" in str(error):
                    pytest.skip(str(error))
                raise
        with lab:
            yield lab
    finally:
        shutil.rmtree(directory)


def without(t: Topology, host: str) -> Topology:
    """The same fabric without a host."""
    return Topology(t.cluster, t.switches, {n: r for n, r in t.rnics.items() if r.host != host}, t.links)


def ready(lab: Lab) -> Lab:
    """Wait until every agent is online, every link is walked and nothing is open."""
    assert lab.wait_ready(READY_S), f"after {READY_S:.0f} s: {lab.status()}"
    poll(lambda: not lab.incidents(state="open"), CLOSED_S, lambda: f"still open: {shown(lab.incidents(state='open'))}")
    return lab


def poll(look: Callable[[], T | None], patience: float, complaint: Callable[[], str]) -> T:
    """The first true value that `look` gives; fails with the complaint when there is none in time."""
    deadline = time.monotonic() + patience
    while not (found := look()):
        if time.monotonic() > deadline:
            pytest.fail(f"after {patience:.0f} s: {complaint()}")
        time.sleep(0.1)
    return found


def shown(incidents: Sequence[Mapping[str, Any]]) -> str:
    """Incidents in a few words each."""
    return str(
        [
            f"{i['component']} {i['direction']} {i['symptom']} {i['state']} rate {i['rate']} {i['alternatives']}"
            for i in incidents
        ]
    )


class Since:
    """The incidents that a lab opens from now on."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab
        self._before = {i["id"] for i in lab.incidents()}
        self._last: list[Json] = []

    def new(self) -> list[Json]:
        """All of them; while the controller is away, those known before."""
        try:
            self._last = [i for i in self._lab.incidents() if i["id"] not in self._before]
        except ConnectionError:
            pass
        return self._last

    def check(self, truth: Json) -> None:
        """Fail if something was blamed that was not broken."""
        incidents = self.new()
        blamed = judge(truth, incidents).blamed
        assert not blamed, f"{truth['fault']}: {shown(blamed)} was blamed; in all {shown(incidents)}"

    def check_component(self, truth: Json) -> None:
        """Fail if another component was blamed: of what is healing, loss is no longer what it was."""
        incidents = self.new()
        assert all(i["component"] == truth["component"] for i in incidents), f"{truth['fault']}: {shown(incidents)}"

    def check_fabric(self, what: str) -> None:
        """Fail if a part of the fabric was blamed."""
        incidents = self.new()
        blamed = [i for i in incidents if i["component_type"] in FABRIC]
        assert not blamed, f"{what}: {shown(blamed)} was blamed; in all {shown(incidents)}"

    def watch(self, seconds: float, check: Callable[[], object]) -> None:
        """Check again and again for a time."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            check()
            time.sleep(0.2)
        check()


def prove(lab: Lab, *argv: str) -> Json:
    """See a fault named and nothing else blamed, and the incident closed once it is cleared; the incident as named.

    Like everywhere, an incident is judged 2 s after it opened: until then its symptom may still be refined.
    """
    since = Since(lab)
    truth = lab.fault_add(argv)
    poll(since.new, NAMED_S, lambda: f"{truth['fault']}: there is no incident")
    named = poll(
        lambda: next((i for i in since.new() if matches(truth, i)), None),
        JUDGED_S,
        lambda: f"{truth['fault']} was not named; incidents: {shown(since.new())}",
    )
    since.watch(DWELL_S, lambda: since.check(truth))
    lab.fault_clear()
    closes(since, lambda: since.check_component(truth))
    return named


def closes(since: Since, check: Callable[[], object]) -> None:
    """Wait until all incidents since then are closed."""

    def is_closed() -> bool:
        check()
        return all(i["state"] == "closed" for i in since.new())

    poll(is_closed, CLOSED_S, lambda: f"still open: {shown(since.new())}")


@contextmanager
def stray_agent(lab: Lab, host: str) -> Iterator[None]:
    """An agent of the name `stray` with an RNIC `stray0`, neither of which is in the topology, on one of the hosts."""
    add = "ip link add stray0 type veth peer name stray1 && ip addr add 10.99.0.1/32 dev stray0"
    done = lab.run(host, "sh", "-c", f"{add} && ip link set stray1 up && ip link set stray0 up")
    assert done.returncode == 0, done.stderr
    broker = f"{MANAGEMENT_ADDRESS}:{BROKER_PORT}"
    argv = [sys.executable, "-m", "pingmesh", "agent", "--cluster", lab.topology.cluster, "--broker", broker]
    argv += ["--host", "stray", "--devices", "stray0"]
    # Ended by the end of its input: a signal would reach only what leads into the lab.
    command = lab.command(host, ["sh", "-c", '"$@" & read line; kill $!; wait $!', "sh", *argv])
    agent = subprocess.Popen(command, stdin=subprocess.PIPE)
    try:
        yield
    finally:
        agent.communicate()
        lab.run(host, "ip", "link", "del", "stray0")


class Ear:
    """Hears what a lab's broker carries from now on; as a context manager it is ended on leaving."""

    def __init__(self, lab: Lab, *kinds: str) -> None:
        """`kinds`: tails of topics below the cluster, such as `+/paths`."""
        self._cluster = lab.topology.cluster
        names = [f"{topics.ROOT}/{self._cluster}/{k}" for k in kinds]
        argv = lab.command("mgmt", [sys.executable, str(EAR), MANAGEMENT_ADDRESS, str(BROKER_PORT), *names])
        self._heard = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=self._heard)
        poll(self._lines, 10, lambda: f"the ear hears nothing; exit code {self._process.poll()}")

    def __enter__(self) -> Ear:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()
        self._heard.close()

    def messages(self, kind: str, expect: type[M]) -> list[M]:
        """All messages of one kind so far, oldest first."""
        found = []
        for line in self._lines():
            if line == "ready":
                continue
            name, retained, payload = line
            topic = topics.parse(name, retained)
            if topic.kind == kind and payload:
                found.append(decode(bytes.fromhex(payload), expect, topic.host, topic.cluster))
        return found

    def _lines(self) -> list[Any]:
        # A read of its own position: the child writes through the same open file.
        text = Path(f"/proc/self/fd/{self._heard.fileno()}").read_text()
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


COUNT_TUPLES = """
table inet looptest {
  set seen { type ipv4_addr . ipv4_addr . inet_service . ifname; size 65535; flags dynamic; counter; }
  chain arriving {
    type filter hook prerouting priority -320;
    udp dport 4791 ip ttl > 32 update @seen { ip saddr . ip daddr . udp sport . iifname }
  }
}
"""
"""Each packet of a probe or ACK by 5-tuple and inbound port; packets of the path tracer have a smaller TTL."""

Tuple5 = tuple[str, str, int]
"""Source, destination, UDP source port."""
Port = tuple[str, str]
"""(switch, network device by which the packet came in)."""


@contextmanager
def counting_tuples(lab: Lab) -> Iterator[None]:
    """Every switch counts the probes and ACKs that come in."""
    switches = list(lab.topology.switches)
    for s in switches:
        done = lab.run(s, "nft", COUNT_TUPLES)
        assert done.returncode == 0, done.stderr
    try:
        yield
    finally:
        for s in switches:
            lab.run(s, "nft", "delete table inet looptest")


def counted_tuples(lab: Lab) -> dict[Tuple5, dict[Port, int]]:
    """What the switches counted: packets by 5-tuple and inbound port."""
    out: dict[Tuple5, dict[Port, int]] = {}
    for s in lab.topology.switches:
        done = lab.run(s, "nft", "-j", "list", "set", "inet", "looptest", "seen")
        assert done.returncode == 0, done.stderr
        (found,) = [row["set"] for row in json.loads(done.stdout)["nftables"] if "set" in row]
        for e in found.get("elem", []):
            source, target, sport, device = e["elem"]["val"]["concat"]
            out.setdefault((source, target, sport), {})[s, device] = e["elem"]["counter"]["packets"]
    return out


def ports_on(t: Topology, src: str, dst: str, elements: Sequence[str]) -> set[Port]:
    """The inbound ports of the switches on a path from one RNIC to another, of its elements' names."""
    devices = switch_interfaces(t)
    links: dict[str, DirectedLink] = {d.name: d for d in t.directed_links}
    first = t.rnics[src].legs[0]
    ports = {(first.switch, devices[first.switch, first.port])}
    for name in elements:
        if "->" in name:
            d = links[name]
            ports.add((d.target, devices[d.target, d.link.b_port if d.is_forward else d.link.a_port]))
    assert elements[0] == f"{src} tx", elements
    assert elements[-1] == f"{dst} rx", elements
    return ports
