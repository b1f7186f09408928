"""Numbers in what the controller and the analyzer send, checked before the data plane packs them into headers."""

from __future__ import annotations

import ipaddress
import math
from collections.abc import Iterable

from pingmesh.messages import Ask, BadMessageError, Confirm, Peer, ProbeList, Retrace

U8, U16, U24, U32 = (1 << 8) - 1, (1 << 16) - 1, (1 << 24) - 1, (1 << 32) - 1
MAX_FLOWS = 20_000
MAX_WINDOWS = 20_000
MAX_CONFIRM_PROBES = 20_000
MAX_SIZE = 9000
MIN_INTERVAL_US = 100


def _within(kind: str, name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise BadMessageError(kind, f"{name} {value} is not within {low}..{high}")


def check_peers(kind: str, peers: Iterable[Peer]) -> None:
    """Raises BadMessageError."""
    for p in peers:
        _within(kind, "peer number", p.number, 0, U32)
        _within(kind, "peer QPN", p.qpn, 0, U24)
        _within(kind, "peer Q_Key", p.qkey, 0, U32)
        _within(kind, "peer epoch", p.epoch, 0, U32)
        _within(kind, "peer MTU", p.mtu, 0, U16)
        try:
            ipaddress.ip_address(p.gid)
        except ValueError:
            raise BadMessageError(kind, f"peer GID {p.gid[:60]!r} is no IP address") from None


def check_list(m: ProbeList) -> None:
    """Raises BadMessageError."""
    kind = "ProbeList"
    _within(kind, "number", m.number, 1, U32)
    _within(kind, "list version", m.list_version, 0, U32)
    _within(kind, "number of flows", len(m.flows), 0, MAX_FLOWS)
    for name, rate in (("max_rate", m.max_rate), ("trace_rate", m.trace_rate)):
        if not math.isfinite(rate) or rate < 0:
            raise BadMessageError(kind, f"{name} {rate} is no rate")
    if not math.isfinite(m.trace_rate_suspicion) or m.trace_rate_suspicion < 0:
        raise BadMessageError(kind, f"trace_rate_suspicion {m.trace_rate_suspicion} is no rate")
    for c in m.classes:
        _within(kind, "DSCP", c.dscp, 0, 63)
        _within(kind, "size", c.size, 0, MAX_SIZE)
    check_peers(kind, m.peers)
    seen: set[int] = set()
    for f in m.flows:
        _within(kind, "flow index", f.index, 0, U16)
        _within(kind, "flow peer", f.peer, 0, U32)
        _within(kind, "source port", f.sport, 1, U16)
        _within(kind, "class", f.cls, 0, min(len(m.classes) - 1, U8))
        _within(kind, "interval", f.interval_us, MIN_INTERVAL_US, U32)
        _within(kind, "trace mask", f.trace_mask, 0, U8)
        if f.index in seen:
            raise BadMessageError(kind, f"flow index {f.index} comes twice")
        seen.add(f.index)


def check_ask(m: Ask) -> None:
    """Raises BadMessageError."""
    _within("Ask", "number of windows", len(m.windows), 0, MAX_WINDOWS)
    for window in m.windows:
        for value in window:
            _within("Ask", "window key", value, 0, U32)


def check_confirm(m: Confirm) -> None:
    """Raises BadMessageError."""
    kind = "Confirm"
    _within(kind, "RNIC", m.rnic, 0, U32)
    _within(kind, "list version", m.list_version, 0, U32)
    _within(kind, "interval", m.interval_us, 0, 10_000_000)
    _within(kind, "class", m.cls, -1, U8)
    _within(kind, "count", m.count, 1, 1000)
    _within(kind, "number of probes", m.count * len(m.indexes), 0, MAX_CONFIRM_PROBES)
    for index in m.indexes:
        _within(kind, "flow index", index, 0, U16)


def check_retrace(m: Retrace) -> None:
    """Raises BadMessageError."""
    _within("Retrace", "number of flows", len(m.flows), 0, MAX_FLOWS)
