"""The agent's data plane: a prober and a responder per RNIC, one timer, and the counts of both roles.

Single-threaded: every call must come from the event loop's thread. Nothing here does input or output but the transports.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from agent.transport.base import Transport
from pingmesh.config import AgentSettings
from pingmesh.messages import Confirm, Event, Peer, ProbeList, ProberRows, RnicHealth, RnicInfo

PROBER, RESPONDER = 0, 1


class TracedFlow(NamedTuple):
    """A tuple whose path may be traced. `role` PROBER: our probes; RESPONDER: our ACKs of somebody's probes.

    `rnic`, `list_version` and `index` name the flow by its *prober* in both roles. The packets to imitate leave from
    `transport` to `address`, UDP source port `sport`, with `qpn` in their BTH. `seen_ns`: last sent or answered (monotonic).
    """

    role: int
    rnic: int
    list_version: int
    index: int
    transport: Transport
    address: str
    qpn: int
    sport: int
    dscp: int
    trace_mask: int
    seen_ns: int


class Engine:
    """All RNICs of this host.

    `on_event` is called at once, from the event loop, for everything unusual; it must not raise or block.
    `rate_factor` (0 < f <= 1) stretches all probe intervals by 1/f: fail-slow sets it.
    """

    def __init__(
        self,
        settings: AgentSettings,
        cluster: str,
        host: str,
        transports: Sequence[Transport],
        *,
        on_event: Callable[[Event], None],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.rate_factor = 1.0
        raise NotImplementedError

    def start(self) -> None:
        """Answer probes from now on, and probe once lists come."""
        raise NotImplementedError

    def close(self) -> None:
        """Stop probing and close the transports; safe to call twice."""
        raise NotImplementedError

    def infos(self) -> list[RnicInfo]:
        """What to register, one per RNIC."""
        raise NotImplementedError

    def set_link(self, device: str, up: bool) -> None:
        """The link of an RNIC went up or down (as its owner polls it): counted as flaps, shown in `infos`."""
        raise NotImplementedError

    def apply_list(self, message: ProbeList) -> bool:
        """Probe by this list from now on; False (and nothing changes) if no RNIC here has its device.

        Flows that stay keep their phase. Probes in flight are still counted under their own list version.
        """
        raise NotImplementedError

    def apply_peers(self, peers: Sequence[Peer]) -> None:
        """Peers changed their QPN, epoch or GID: what is outstanding to them is stale, flows go on to the new ones."""
        raise NotImplementedError

    async def confirm(self, message: Confirm) -> tuple[int, bytes]:
        """Send extra probes; returns (own epoch, PROBER_COLUMNS of what was really sent) when all are resolved.

        Empty columns when the RNIC, the list version or every index is unknown here.
        """
        raise NotImplementedError

    def responder_totals(self, windows: Sequence[tuple[int, int, int, int]]) -> bytes:
        """RESPONDER_COLUMNS totals for these (source RNIC, source epoch, list version, window)."""
        raise NotImplementedError

    def take_report(self) -> tuple[list[ProberRows], bytes, int]:
        """What happened since the last call: (prober rows, responder columns, until_ns).

        Prober rows: windows whose end lies more than the time-out back, and amendments to earlier ones. Responder
        columns: increments of everything received till `until_ns` (anchored wall clock).
        """
        raise NotImplementedError

    def wall_ns(self) -> int:
        """The wall clock as anchored at the start: it never steps."""
        raise NotImplementedError

    def take_read_delay(self) -> int:
        """Longest time in ns between a packet's kernel stamp and its reading since the last call."""
        raise NotImplementedError

    def rnic_health(self, *, peek: bool = False) -> list[RnicHealth]:
        """Counters since the last call without `peek`."""
        raise NotImplementedError

    def own_flows(self, number: int | None = None) -> Iterator[TracedFlow]:
        """Tuples of the RNIC with this registry number (default: all RNICs) that have a trace mask."""
        raise NotImplementedError

    def incoming_flows(self) -> Iterator[TracedFlow]:
        """Tuples of the ACKs sent within the last minute that have a trace mask."""
        raise NotImplementedError

    def restart_rnic(self, device: str) -> None:
        """A new queue pair and epoch for this RNIC; unanswered probes are no evidence. Register again afterwards."""
        raise NotImplementedError
