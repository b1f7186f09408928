"""Address handles by (remote address, flow label, traffic class), made only while the next hop is known."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable

from agent.transport.verbs.edge import Handle
from agent.transport.verbs.neighbours import Hop, Resolver

RECHECK_NS = 10_000_000_000
"""A handle holds the neighbour's hardware address, which may change behind it."""
RETRY_NS = 200_000_000
SOON_NS = 20_000_000
"""A neighbour that is there answers within this."""
MAX_HANDLES = 8192

Make = Callable[[str, int, int], Handle]
"""(remote address, flow label, traffic class); raises OSError."""


class Route:
    """What is known of the way to one remote address."""

    __slots__ = ("address", "check_ns", "error", "handles", "hop")

    def __init__(self, address: str) -> None:
        self.address = address
        self.handles: dict[int, Handle] = {}
        self.hop: Hop | None = None
        self.check_ns = 0
        """When to look at the next hop again."""
        self.error: OSError | None = None


class HandleBook:
    """All handles of one RNIC."""

    def __init__(self, resolver: Resolver, make: Make) -> None:
        self._resolver = resolver
        self._make = make
        self._routes: dict[str, Route] = {}
        self._count = 0
        self.made = 0

    def route(self, address: str) -> Route:
        """The way to an address; nothing is asked yet."""
        route = self._routes.get(address)
        if route is None:
            if len(self._routes) >= MAX_HANDLES:
                self.clear()
            route = self._routes[address] = Route(address)
        return route

    def prepare(self, route: Route, now: int) -> None:
        """Have the kernel look for the next hop before the first packet needs it; does not raise."""
        if route.hop is None and now >= route.check_ns:
            self._look(route, now)

    def handle(self, route: Route, label: int, dscp: int, now: int) -> Handle:
        """The handle for a packet. Raises OSError while the next hop is not known; ask again for the next packet."""
        if now >= route.check_ns:
            self._look(route, now)
        if route.error is not None:
            raise route.error
        key = label << 6 | dscp
        handle = route.handles.get(key)
        if handle is None:
            if self._count >= MAX_HANDLES:
                self.clear_handles()
            handle = route.handles[key] = self._make(route.address, label, dscp << 2)
            self._count += 1
            self.made += 1
        return handle

    def _look(self, route: Route, now: int) -> None:
        try:
            hop = self._resolver.look(route.address)
        except OSError as failed:
            self._refuse(route, now + RETRY_NS, failed)
            return
        if not hop.mac:
            self._resolver.nudge(hop)
            code = errno.EHOSTUNREACH
            error = OSError(code, f"neighbour {hop.address} does not answer: {os.strerror(code)}")
            self._refuse(route, now + (RETRY_NS if hop.dead else SOON_NS), error)
            return
        if route.hop is not None and route.hop != hop:
            self._drop(route)
        route.hop, route.error, route.check_ns = hop, None, now + RECHECK_NS

    def _refuse(self, route: Route, until: int, error: OSError) -> None:
        self._drop(route)
        route.error, route.check_ns = error, until

    def _drop(self, route: Route) -> None:
        self._count -= len(route.handles)
        for handle in route.handles.values():
            handle.close()
        route.handles.clear()

    def clear_handles(self) -> None:
        """Close all handles; they are made again as they are needed."""
        for route in self._routes.values():
            self._drop(route)

    def clear(self) -> None:
        """Close all handles and forget all routes but those still held by targets."""
        self.clear_handles()
        self._routes.clear()

    def close(self) -> None:
        """Close all handles and the resolver."""
        self.clear()
        self._resolver.close()
