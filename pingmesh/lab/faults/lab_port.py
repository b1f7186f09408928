"""What fault injection needs of the lab: the fabric's commands and routes, and the lab's processes."""

from __future__ import annotations

from typing import Protocol

from topology.model import DirectedLink, Link, Topology


class Routes(Protocol):
    """The lab's routing. Both calls block and are idempotent."""

    def withdraw(self, *links: Link | DirectedLink) -> None:
        """Make every switch avoid these cables."""

    def restore(self, *links: Link | DirectedLink) -> None:
        """Use them again."""


class FabricPort(Protocol):
    """The fabric as faults see it. All calls block; commands that fail raise."""

    @property
    def topology(self) -> Topology:
        """What was built."""

    @property
    def routes(self) -> Routes:
        """Its routing."""

    def run(self, node: str, *argv: str) -> str:
        """Run a command on a switch or host; its standard output."""

    def nft(self, node: str, script: str) -> None:
        """Load an nftables script there, all of it or nothing."""

    def namespace(self, node: str) -> str | None:
        """The network namespace that holds a node's devices; None: the lab's own."""

    def interface(self, node: str, port: str) -> str:
        """The network device of a switch's port."""

    def set_device(self, node: str, device: str, *, up: bool) -> None:
        """Set a node's device up or down; up brings back what the kernel removed."""

    def set_management(self, host: str, *, up: bool) -> None:
        """Cut a host off from the management network, so that nobody hears a goodbye, or connect it again."""


class ProcessPort(Protocol):
    """The lab's processes as faults see them, by name: `agent:h1`, `broker`, `controller`, `analyzer`."""

    async def start(self, name: str) -> None:
        """Start it; nothing if it runs."""

    async def stop(self, name: str) -> None:
        """SIGTERM, and wait for its end (SIGKILL after a while); it stays stopped."""

    async def kill(self, name: str) -> None:
        """SIGKILL; it stays dead."""

    async def restart(self, name: str) -> None:
        """Stop it as an operator would, and start it again."""

    def pid(self, name: str) -> int | None:
        """Its process id while it lives."""

    def pause(self, name: str) -> None:
        """SIGSTOP; nothing if it does not run."""

    def resume(self, name: str) -> None:
        """SIGCONT; nothing if it is not paused."""

    def limit_cpu(self, host: str, share: float | None) -> bool:
        """Allow a host's processes this share of one core (None: any). False where the lab has no control groups."""
