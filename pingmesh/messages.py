"""What travels over MQTT: typed MessagePack, unknown fields ignored, columns as packed little-endian arrays.

Rates of growth: a report is one message a host and window and carries a few bytes a flow after compression;
everything else is rare. Counts in reports are *increments*: a late ACK is a further row with `arrived` 1 and
`lost` -1, so adding rows up is always right and the order does not matter.
"""

from __future__ import annotations

import sys
import zlib
from array import array
from collections.abc import Sequence
from typing import Literal, TypeVar

import msgspec

VERSION_MAJOR = 1
WINDOW_NS = 5_000_000_000
CONFIRM_BIT = 0x8000_0000
"""Window numbers with this bit belong to active confirmations: `CONFIRM_BIT | confirm id`."""

MAX_MESSAGE = 1 << 22
MAX_COLUMN = 1 << 22


class BadMessageError(ValueError):
    """A message that cannot be used. `reason` is one short sentence for the rejection counter's label."""

    def __init__(self, kind: str, reason: str) -> None:
        self.kind = kind
        self.reason = reason
        super().__init__(f"{kind}: {reason}")


class Message(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What every message says of its sender. `version` is `major.minor` of the protocol."""

    version: str = "1.0"
    cluster: str
    host: str


# ---------------------------------------------------------------- registration and lists


class RnicInfo(msgspec.Struct, kw_only=True, omit_defaults=True):
    """An RNIC as its agent sees it. `qkey` is random per process, `epoch` per start of the RNIC's queue pair."""

    device: str
    address: str
    gid: str
    qpn: int
    qkey: int
    epoch: int
    mtu: int = 4096
    up: bool = True
    transport: str = "soft"
    source_port_honoured: Literal["yes", "no", "unknown"] = "yes"
    clock: Literal["hardware", "software", "kernel"] = "kernel"
    """What stamps the packets behind this RNIC's delays."""
    members: int = 1
    """Ports of the bond that the RNIC is; 1: it is none."""
    legs: list[int] = []
    """Of a bond: the members, from 1, that its probes are known to leave by. Nothing is known of the others."""


class Register(Message, tag="register"):
    """An agent's RNICs; sent on connecting, when any changes, and once a minute."""

    boot: int
    """Random per agent process."""
    started_ns: int
    rnics: list[RnicInfo]
    software: str = ""


class WhoAreYou(Message, tag="who"):
    """From the controller: it does not know this agent's registration; register now."""


class AgentState(Message, tag="state"):
    """Retained. `died` is the last will: the process or its connection ended without a goodbye."""

    boot: int
    state: Literal["online", "stopped", "died"]
    at_ns: int = 0
    epochs: dict[str, int] = {}
    """Of an online agent, by device. It is retained, a registration is not: who has missed one sees it here."""


class ProbeClass(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A class of probes. `size` is the whole UD payload in bytes; 0 = the smallest."""

    name: str = "small"
    dscp: int = 26
    size: int = 0


class Flow(msgspec.Struct, array_like=True):
    """One entry of a probe list: one 5-tuple, probed each `interval_us`.

    `trace_mask` has bit t-1 set where the hop at TTL t must be traced because the topology leaves a choice; the
    responder traces its ACK's tuple at the same TTLs. 0: nothing to trace.
    """

    index: int
    peer: int
    sport: int
    cls: int
    kind: int  # 0 ToR-mesh, 1 inter-ToR
    interval_us: int
    trace_mask: int


TOR_MESH, INTER_TOR = 0, 1


class Peer(msgspec.Struct, array_like=True):
    """How to reach an RNIC. `number` is the registry's; it lasts as long as the name `host/device`."""

    number: int
    name: str
    gid: str
    qpn: int
    qkey: int
    epoch: int
    mtu: int


class ProbeList(Message, tag="list"):
    """The whole list of one RNIC; `list_version` grows with each change of flows (not of peers)."""

    device: str
    number: int
    list_version: int
    classes: list[ProbeClass]
    flows: list[Flow]
    peers: list[Peer]
    max_rate: float = 150.0
    """Hard cap, probes/s of this RNIC, confirmation included."""
    trace_rate: float = 1.0
    """TTL-limited packets/s of this RNIC (both roles) in quiet times."""
    trace_rate_suspicion: float = 5.0


class PeerUpdate(Message, tag="peers"):
    """Peers whose QPN, epoch or GID changed. Flows stay."""

    peers: list[Peer]


class RegistryEntry(msgspec.Struct, array_like=True):
    """An RNIC as the registry holds it. `since_ns`: when this epoch registered (controller's clock)."""

    number: int
    name: str
    address: str
    epoch: int
    since_ns: int
    in_topology: bool


class Registry(Message, tag="registry"):
    """Retained, from the controller: every RNIC known. The analyzer maps numbers to names with it."""

    rnics: list[RegistryEntry]


# ---------------------------------------------------------------- health


class RnicHealth(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One RNIC's health since the last report. `flaps` counts link transitions since the agent started."""

    device: str
    up: bool = True
    flaps: int = 0
    rx_dropped: int = 0
    bad_frames: int = 0
    foreign: int = 0
    send_errors: int = 0
    receives_missing: int = 0
    """Receive buffers that are not with the device, now."""


class Health(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The agent's own health since the last report; durations in milliseconds."""

    loop_lag_max: float = 0.0
    read_delay_max: float = 0.0
    cpu_pressure: float = 0.0
    throttled: float = 0.0
    """Time in which the own cgroup was throttled."""
    cpu_share: float = 0.0
    """CPU of this process over wall time, 0..n cores."""
    rate_factor: float = 1.0
    """What fail-slow has left of the probe rate, > 0."""
    spooled: int = 0
    dropped_reports: int = 0
    clock_steps: int = 0
    rnics: list[RnicHealth] = []


# ---------------------------------------------------------------- results


class ProberRows(msgspec.Struct, kw_only=True):
    """Prober's counts of one RNIC, list version and window: equally long columns (see `Columns`)."""

    rnic: int
    epoch: int
    list_version: int
    window: int
    columns: bytes


PROBER_COLUMNS = "HhhhhhhhhII"
"""index, sent, arrived (an ACK of either kind came), ack1, ack2, lost (no ACK within the time-out), late (ACK after
it; counted in arrived), excluded (invalid or stale target: no evidence), send_error, RTT sum in 100 ns over `ack2`
measured probes (0: none), RTT maximum in 100 ns. `sent` counts probes that left: neither excluded nor send_error."""

RESPONDER_COLUMNS = "IIIIHhhhh"
"""source RNIC, source epoch, list version, window, index, received, ack1 sent, ack2 sent, class mismatches."""


class Report(Message, tag="report"):
    """One message a host and window, both roles. `until_ns`: the responder's counts hold all it received till then."""

    boot: int
    seq: int
    now_ns: int
    until_ns: int
    prober: list[ProberRows] = []
    responder: bytes = b""
    health: Health = msgspec.field(default_factory=Health)


OVERDUE, LOST, LATE, NO_RTT, SLOW, SEND_ERROR, STALE, INVALID = range(8)
UNKNOWN, FORWARD, REVERSE = range(3)


class Event(msgspec.Struct, array_like=True):
    """Something unusual about one probe. `direction`: where it was lost, if the ACK history already tells."""

    kind: int
    rnic: int
    list_version: int
    index: int
    seq: int
    sent_ns: int  # agent's wall clock as anchored at its start
    direction: int
    rtt_us: int


class Exceptions(Message, tag="exception"):
    """Leaves at once, coalesced to 10 messages/s a host. `more` counts events left out for size."""

    boot: int
    now_ns: int
    events: list[Event]
    more: int = 0
    health: Health | None = None


class TracedPath(msgspec.Struct, array_like=True):
    """What answered along a tuple. `role` 0: the prober's tuple (rnic -> peer); 1: the ACK's (traced by the responder).

    `hops` pairs (ttl, address or None). For role 1 `rnic` is the *prober's* number and (list_version, index) its flow,
    so that both directions of a flow share a key. `at_ns` is the tracing agent's clock.
    """

    role: int
    rnic: int
    list_version: int
    index: int
    sport: int
    hops: list[tuple[int, str | None]]
    at_ns: int


class Paths(Message, tag="paths"):
    """Traced paths, published in small batches."""

    boot: int
    now_ns: int
    paths: list[TracedPath]


# ---------------------------------------------------------------- asking and confirming


class Ask(Message, tag="ask"):
    """Are you there, how are you, and what did your responder count for (source RNIC, epoch, list version, window)?"""

    id: int
    windows: list[tuple[int, int, int, int]] = []


class Answer(Message, tag="answer"):
    """Within 300 ms of the Ask. `responder` in RESPONDER_COLUMNS: *totals* of the windows asked for, not increments."""

    boot: int
    id: int
    now_ns: int
    responder: bytes = b""
    health: Health = msgspec.field(default_factory=Health)


class Confirm(Message, tag="confirm"):
    """Send `count` extra probes on each of these flows of one RNIC, `interval_us` apart, in window `CONFIRM_BIT | id`.

    `cls` overrides the flow's class (-1: the flow's own). The agent keeps its hard cap and says what it really sent.
    """

    id: int
    rnic: int
    list_version: int
    indexes: list[int]
    count: int
    interval_us: int
    cls: int = -1


class ConfirmResult(Message, tag="confirmed"):
    """Counts of one Confirm when every probe is answered or timed out; columns as PROBER_COLUMNS."""

    boot: int
    id: int
    now_ns: int
    rnic: int
    epoch: int
    list_version: int
    columns: bytes
    health: Health = msgspec.field(default_factory=Health)


class Retrace(Message, tag="retrace"):
    """Trace these (role, source RNIC, list version, index) first, at the suspicion budget."""

    id: int
    flows: list[tuple[int, int, int, int]]


# ---------------------------------------------------------------- analyzer and controller


class Verdict(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What the analyzer holds to be broken now; the controller's store turns it into an incident."""

    component: str
    component_type: str
    direction: str | None = None
    ends: list[str] = []
    symptom: str
    cls: str | None = None
    rate: float | None = None
    rate_low: float | None = None
    rate_high: float | None = None
    confidence: float = 0.0
    priority: str = "P2"
    alternatives: list[str] = []
    evidence: dict[str, object] = {}
    since_ns: int = 0


class FindingReport(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Something wrong that is no fault of the fabric."""

    kind: str
    subject: str
    since_ns: int
    text: str


class Verdicts(Message, tag="verdicts"):
    """The analyzer's whole view, level-triggered: sent when it changes and every few seconds.

    `closed` names components of incidents that are over by evidence; an incident in neither list stays open.
    """

    now_ns: int
    open: list[Verdict] = []
    closed: list[str] = []
    findings: list[FindingReport] = []
    enough_data: bool = True


class LinkSummary(msgspec.Struct, array_like=True):
    """What crossed a directed link (or went to or from an RNIC) over the last `span_s`."""

    component: str
    sent: int
    lost: int


class Summary(Message, tag="summary"):
    """Every 5 s from the analyzer: totals for status and for an innocent verdict. RTTs in microseconds."""

    now_ns: int
    span_s: float
    links: list[LinkSummary] = []
    rnics: list[LinkSummary] = []
    agents_heard: list[str] = []
    rtt_us: dict[str, float] = {}
    """p50, p90, p99 of network RTT over flows' means."""
    rejected: int = 0


class OpenIncidents(Message, tag="incidents"):
    """Retained, from the controller: the open incidents, so that a new analyzer goes on where the last one stopped."""

    open: list[Verdict]


class LinkCoverage(msgspec.Struct, array_like=True):
    """How one directed link is walked: distinct traced 5-tuples and the probes/s their lists ask for."""

    link: str
    flows: int
    rate: float


class Coverage(Message, tag="coverage"):
    """Retained, from the controller. `reasons` says why an RNIC or link is not covered."""

    share: float | None
    links: list[LinkCoverage]
    uncovered_rnics: list[str]
    reasons: dict[str, str] = {}


AnyMessage = (
    Register
    | AgentState
    | ProbeList
    | PeerUpdate
    | Registry
    | Report
    | Exceptions
    | Paths
    | Ask
    | Answer
    | Confirm
    | ConfirmResult
    | Retrace
    | WhoAreYou
    | Verdicts
    | Summary
    | OpenIncidents
    | Coverage
)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)

M = TypeVar("M", bound=Message)


def encode(message: Message) -> bytes:
    """MessagePack of a message."""
    return _encoder.encode(message)


def decode(payload: bytes, expect: type[M], host: str | None = None, cluster: str | None = None) -> M:
    """Decode and check one message.

    `host` and `cluster` are those of the topic: identity in the topic and in the payload must agree.
    Raises BadMessageError; never anything else, whatever the bytes.
    """
    kind = expect.__name__
    if len(payload) > MAX_MESSAGE:
        raise BadMessageError(kind, "larger than 4 MiB")
    try:
        m = _decoder.decode(payload)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise BadMessageError(kind, f"cannot be decoded: {error}") from None
    if not isinstance(m, expect):
        raise BadMessageError(kind, f"is a {type(m).__name__}")
    if m.version.split(".")[0] != str(VERSION_MAJOR):
        raise BadMessageError(kind, f"protocol version {m.version}, we speak {VERSION_MAJOR}")
    if host is not None and m.host != host:
        raise BadMessageError(kind, f"names host {m.host!r} on the topic of {host!r}")
    if cluster is not None and m.cluster != cluster:
        raise BadMessageError(kind, f"names cluster {m.cluster!r} on a topic of {cluster!r}")
    return m


_SWAP = sys.byteorder != "little"
_WIDTH = {types: sum(array(code).itemsize for code in types) for types in (PROBER_COLUMNS, RESPONDER_COLUMNS)}
"""Bytes of a row."""


def pack_columns(types: str, columns: Sequence[Sequence[int]]) -> bytes:
    """Pack equally long integer columns, `types` as in `array`; little-endian, compressed."""
    parts = []
    for code, values in zip(types, columns, strict=True):
        a = array(code, values)
        if _SWAP:
            a.byteswap()
        parts.append(a.tobytes())
    # With the fixed code: tables are small, and reading a code's own table would take longer than all the rest.
    pack = zlib.compressobj(6, zlib.DEFLATED, zlib.MAX_WBITS, zlib.DEF_MEM_LEVEL, zlib.Z_FIXED)
    return pack.compress(b"".join(parts)) + pack.flush()


def unpack_raw(types: str, data: bytes) -> tuple[int, bytes]:
    """Number of rows and the raw concatenated columns. Raises BadMessageError."""
    if not data:
        return 0, b""
    try:
        d = zlib.decompressobj()
        raw = d.decompress(data, MAX_COLUMN)
    except zlib.error as error:
        raise BadMessageError("columns", f"cannot be decompressed: {error}") from None
    width = _WIDTH.get(types) or sum(array(code).itemsize for code in types)
    if not d.eof or d.unconsumed_tail or len(raw) % width:
        raise BadMessageError("columns", f"{len(raw)} bytes are no whole number of {width} byte rows")
    return len(raw) // width, raw


def unpack_columns(types: str, data: bytes) -> list[array[int]]:
    """The columns again. Raises BadMessageError."""
    n, raw = unpack_raw(types, data)
    out = []
    at = 0
    for code in types:
        a: array[int] = array(code)
        a.frombytes(raw[at : at + n * a.itemsize])
        at += n * a.itemsize
        if _SWAP:
            a.byteswap()
        out.append(a)
    return out
