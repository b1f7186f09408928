"""Link state of the agent's devices: who has carrier, and how often it went."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from agent.interfaces import LinkSource

log = logging.getLogger(__name__)


@dataclass(slots=True)
class LinkState:
    """A device's link. `flaps` counts transitions since the agent first saw the device."""

    up: bool
    flaps: int = 0
    _last_changes: int | None = None


class LinkWatcher:
    """Looks at the links of some devices when told to, and tells of each change.

    A link that went down and came back between two polls shows as two more carrier changes: it is told too.
    `interface_of` tells the network interface below a device, empty while there is none.
    """

    def __init__(
        self,
        source: LinkSource,
        devices: Iterable[str],
        on_change: Callable[[str, LinkState], None],
        interface_of: Callable[[str], str] = str,
    ) -> None:
        self._source = source
        self._interface_of = interface_of
        self._on_change = on_change
        self.states: dict[str, LinkState] = {d: LinkState(up=False) for d in devices}
        for device in self.states:
            self._look(device)

    def up(self, device: str) -> bool:
        """Whether a device has carrier; False for one that is not there."""
        state = self.states.get(device)
        return state is not None and state.up

    def poll(self) -> list[str]:
        """Look at every device once; returns those that changed, after `on_change` ran for each."""
        changed = [d for d in self.states if self._look(d)]
        for device in changed:
            state = self.states[device]
            log.info("link %s", "up" if state.up else "down", extra={"device": device, "flaps": state.flaps})
            self._on_change(device, state)
        return changed

    def _look(self, device: str) -> bool:
        state = self.states[device]
        name = self._interface_of(device)
        interface = self._source.interface(name) if name else None
        up = interface is not None and interface.up
        moved = 0
        if interface is not None:
            if state._last_changes is not None and interface.carrier_changes >= state._last_changes:
                moved = interface.carrier_changes - state._last_changes
            state._last_changes = interface.carrier_changes
        # A device that vanished has no counter to read; its going counts as one transition.
        if interface is None and state.up:
            moved = 1
            state._last_changes = None
        state.flaps += moved
        changed = up != state.up or moved > 0
        state.up = up
        return changed
