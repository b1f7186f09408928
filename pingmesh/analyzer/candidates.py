"""What may be broken: every component of a fabric, with the directed elements that its packets cross."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from topology.model import Rnic, Topology

CandidateType = Literal["link", "rnic", "leg", "switch", "host"]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A component that may be at fault.

    `direction` is `a->b` for one direction of a cable, `tx` or `rx` for one side of an RNIC (or of a leg of a bonded
    one), `both`, and None for switches and hosts. `elements` are names as they occur in the paths of observations.
    """

    component: str
    type: CandidateType
    direction: str | None
    elements: frozenset[str]

    @property
    def order(self) -> tuple[str, str, str]:
        """A key that orders candidates the same way in every run."""
        return self.type, self.component, self.direction or ""

    def is_same_component(self, other: Candidate) -> bool:
        """Whether they differ in direction at most."""
        return (self.component, self.type) == (other.component, other.type)

    def parts(self) -> tuple[frozenset[str], ...]:
        """The element sets whose loss rates are independent of each other.

        A cable that is broken in both directions, or an RNIC on both sides, has two; a switch, a host and anything in
        one direction has one.
        """
        if self.direction != "both":
            return (self.elements,)
        if self.type == "link":
            return tuple(frozenset((e,)) for e in sorted(self.elements))
        sides = (frozenset(e for e in self.elements if e.endswith(side)) for side in (" tx", " rx"))
        return tuple(s for s in sides if s)


def rnic_element(rnic: Rnic, switch: str, side: Literal["tx", "rx"]) -> str:
    """The element an RNIC's packets cross between it and `switch`: `h1/rnic0 tx`, or `h1/rnic0@leaf1 tx` if bonded."""
    return f"{rnic.name}@{switch} {side}" if len(rnic.legs) > 1 else f"{rnic.name} {side}"


def _sides(component: str, kind: CandidateType, tx: frozenset[str], rx: frozenset[str]) -> list[Candidate]:
    return [
        Candidate(component, kind, "tx", tx),
        Candidate(component, kind, "rx", rx),
        Candidate(component, kind, "both", tx | rx),
    ]


def candidates_of(topology: Topology) -> list[Candidate]:
    """Every component that can be named, in a deterministic order.

    Each direction of each cable and both together; each RNIC's transmit side, receive side and both (and the same for
    each leg of a bonded one); each switch with all that enters or leaves it; each host that has several RNICs.
    """
    out: list[Candidate] = []
    at_switch: dict[str, set[str]] = {s: set() for s in topology.switches}
    for link in topology.links:
        forward, reverse = link.forward.name, link.reverse.name
        out += (
            Candidate(link.name, "link", forward, frozenset((forward,))),
            Candidate(link.name, "link", reverse, frozenset((reverse,))),
            Candidate(link.name, "link", "both", frozenset((forward, reverse))),
        )
        for switch in (link.a, link.b):
            at_switch[switch] |= {forward, reverse}
    for host, rnics in topology.hosts.items():
        of_host: set[str] = set()
        for rnic in rnics:
            all_tx: set[str] = set()
            all_rx: set[str] = set()
            for leg in rnic.legs:
                tx, rx = rnic_element(rnic, leg.switch, "tx"), rnic_element(rnic, leg.switch, "rx")
                at_switch[leg.switch] |= {tx, rx}
                all_tx.add(tx)
                all_rx.add(rx)
                if len(rnic.legs) > 1:
                    out += _sides(f"{rnic.name}@{leg.switch}", "leg", frozenset((tx,)), frozenset((rx,)))
            out += _sides(rnic.name, "rnic", frozenset(all_tx), frozenset(all_rx))
            of_host |= all_tx | all_rx
        if len(rnics) > 1:
            out.append(Candidate(host, "host", None, frozenset(of_host)))
    out += (Candidate(s, "switch", None, frozenset(es)) for s, es in at_switch.items() if es)
    return out
