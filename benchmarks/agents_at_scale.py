"""What the agents of a three-tier fabric send, wire-true and cheaply made: lists, traces, reports, registrations.

Lists have the shape that the controller's rules give: each RNIC probes the next 16 RNICs of its ToR on other hosts;
each ToR has as many random tuples to other ToRs as Eq. (1) asks for, shared out evenly over its RNICs at both ends;
four tuples a ToR uplink have a twin in the large class. Simplified: targets are drawn without the controller's
registry, ring order and top-up (no link lacks tuples at these sizes), and ECMP is a fair draw a tuple and direction.
All messages are made by the product's own encoders.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from controller.rates import RatePlan
from controller.sampling import tuples_needed
from pingmesh import topics
from pingmesh.messages import (
    INTER_TOR,
    LOST,
    OVERDUE,
    PROBER_COLUMNS,
    RESPONDER_COLUMNS,
    TOR_MESH,
    WINDOW_NS,
    AgentState,
    Event,
    Exceptions,
    Flow,
    Health,
    Message,
    Paths,
    Peer,
    ProbeClass,
    ProbeList,
    ProberRows,
    Register,
    Report,
    RnicHealth,
    RnicInfo,
    TracedPath,
    encode,
)
from topology.generate import clos3
from topology.model import Topology

Ints = npt.NDArray[np.int64]
Shape = tuple[int, int, int, int, int, int]
"""Pods, leaves a pod, aggregation switches a pod, cores, hosts a leaf, RNICs a host."""

CLUSTER = "scale"
MATES = 16
TWINS_A_LINK = 4
EARLY_S = 0.7
"""A report leaves so long after a window's end: it tells of the first packets of the next window, too."""
REGISTER_S = 60.0
BATCH_S = 5.5
"""Paths that are as they were wait so long for company."""
LARGE = 4096

Sent = tuple[str, bytes, int]
"""Topic, payload, QoS."""


@dataclass
class Flows:
    """All list entries, (flows,), sorted by source: RNICs by number from 0, `up` and `core` by role (2, flows).

    `up` is the aggregation switch (of its pod) that a tuple takes, `core` the core of that switch's plane; -1: none.
    """

    src: Ints
    dst: Ints
    sport: Ints
    cls: Ints
    kind: Ints
    index: Ints
    up: Ints
    core: Ints


@dataclass
class Counts:
    """One window, (flows,)."""

    sent: Ints
    early: Ints
    """Received before the report of the window before left."""
    lost_there: Ints
    lost_back: Ints
    """ACKs of the second kind lost."""


@dataclass
class Agents:
    """All agents of one fabric. `traced`: share of the inter-ToR tuples whose paths the analyzer knows already."""

    shape: Shape
    seed: int = 1
    traced: float = 0.9
    topology: Topology = field(init=False)
    flows: Flows = field(init=False)
    trace_rate: float = field(init=False)
    """TTL-limited packets/s of an RNIC."""

    def __post_init__(self) -> None:
        self.topology = clos3(*self.shape)
        self.rng = np.random.default_rng(self.seed)
        self.names = list(self.topology.rnics)
        self.hosts = list(self.topology.hosts)
        pods, leaves, _, _, hosts, rnics = self.shape
        self.per_host, self.per_leaf, self.leaves = rnics, hosts * rnics, pods * leaves
        self.epochs = self.rng.integers(1, 1 << 32, len(self.names))
        self.boots = self.rng.integers(1, 1 << 32, len(self.hosts))
        self.flows = self._draw_flows()
        f = self.flows
        self.first = np.searchsorted(f.src, np.arange(len(self.names) + 1))
        shuffled = self.rng.permutation(len(f.src))
        self.incoming = shuffled[np.argsort(f.dst[shuffled] // self.per_host, kind="stable")]
        """Flows by target host; those of one host in the order in which their probes happen to come in."""
        self.first_in = np.searchsorted(f.dst[self.incoming] // self.per_host, np.arange(len(self.hosts) + 1))
        self.known = (f.kind == INTER_TOR) & (f.cls == 0) & (self.rng.random(len(f.src)) < self.traced)
        self.trace_rate = self._trace_rate()
        self.seq = 0

    # ------------------------------------------------------------ lists

    def _draw_flows(self) -> Flows:
        pods, _, aggs, cores, _, _ = self.shape
        n, rng = self.per_leaf, self.rng
        mates = min(MATES, n - self.per_host)
        ring = np.arange(n)
        mesh = []
        for i in ring:
            others = (i + 1 + np.arange(n - 1)) % n
            mesh.append(others[others // self.per_host != i // self.per_host][:mates])
        base = np.arange(self.leaves)[:, None, None] * n
        mesh_dst = (base + np.array(mesh)[None]).ravel()
        mesh_src = np.repeat(np.arange(self.leaves * n), mates)
        per_leaf = tuples_needed(cores if pods > 1 else aggs)
        leaf = np.repeat(np.arange(self.leaves), per_leaf)
        far_leaf = (leaf + rng.integers(1, self.leaves, len(leaf))) % self.leaves
        src = leaf * n + np.tile(np.arange(per_leaf) % n, self.leaves)
        dst = far_leaf * n + rng.permutation(len(leaf)) % n
        twins = np.flatnonzero(np.tile(np.arange(per_leaf) < TWINS_A_LINK * aggs, self.leaves))
        sport = rng.integers(0xC000, 0x10000, len(src))
        up, core = self._draw_paths(src, dst)
        order = np.argsort(
            all_src := np.concatenate((mesh_src, src, src[twins])),
            kind="stable",
        )
        none = np.full((2, len(mesh_src)), -1)
        by_source = all_src[order]
        start = np.searchsorted(by_source, np.arange(self.leaves * n))
        return Flows(
            src=by_source,
            dst=np.concatenate((mesh_dst, dst, dst[twins]))[order],
            sport=np.concatenate((rng.integers(0xC000, 0x10000, len(mesh_src)), sport, sport[twins]))[order],
            cls=np.concatenate((np.zeros(len(mesh_src) + len(src), np.int64), np.ones(len(twins), np.int64)))[order],
            kind=np.repeat([TOR_MESH, INTER_TOR], [len(mesh_src), len(src) + len(twins)])[order],
            index=np.arange(len(order)) - start[by_source],
            up=np.concatenate((none, up, up[:, twins]), axis=1)[:, order],
            core=np.concatenate((none, core, core[:, twins]), axis=1)[:, order],
        )

    def _draw_paths(self, src: Ints, dst: Ints) -> tuple[Ints, Ints]:
        _, leaves, aggs, cores, _, _ = self.shape
        up = self.rng.integers(0, aggs, (2, len(src)))
        width = cores // aggs
        same_pod = src // self.per_leaf // leaves == dst // self.per_leaf // leaves
        core = np.where(same_pod, -1, up * width + self.rng.integers(0, width, (2, len(src))))
        return up, core

    def _trace_rate(self) -> float:
        """As `controller.rates.trace_rates`: the switch that most traces meet has its ICMP budget shared out."""
        from controller.rates import QUIET_SHARE, TRACE_MAX, TRACE_SAFETY

        pods, _, aggs, cores, _, _ = self.shape
        at_core = 0.5 if pods > 1 else 0.0
        load = max(len(self.names) * at_core / cores, len(self.names) * (1 - at_core) / (pods * aggs))
        rate = TRACE_SAFETY * QUIET_SHARE * 100 / load
        return float(f"{min(max(rate, 0.01), TRACE_MAX):.2g}")

    def lists(self) -> Iterator[Sent]:
        """The retained probe list of every RNIC (from the controller, not from agents)."""
        f = self.flows
        inter = round(1e6 / RatePlan().flow_rate)
        mesh = round(1e6 * MATES / RatePlan().tor_mesh_rate)
        for i, name in enumerate(self.names):
            a, b = int(self.first[i]), int(self.first[i + 1])
            entries = [
                Flow(index, dst + 1, sport, cls, kind, mesh if kind == TOR_MESH else inter, 0b110 * (kind == INTER_TOR))
                for index, dst, sport, cls, kind in zip(
                    *(c[a:b].tolist() for c in (f.index, f.dst, f.sport, f.cls, f.kind)), strict=True
                )
            ]
            peers = [
                Peer(d + 1, self.names[d], "::ffff:10.0.0.1", 77, 1 << 30, int(self.epochs[d]), 4096)
                for d in dict.fromkeys(f.dst[a:b].tolist())
            ]
            host, device = name.split("/")
            message = ProbeList(
                cluster=CLUSTER,
                host=host,
                device=device,
                number=i + 1,
                list_version=1,
                classes=[ProbeClass(), ProbeClass(name="large", size=LARGE)],
                flows=entries,
                peers=peers,
            )
            yield str(topics.Topic(CLUSTER, host, topics.LIST, device)), encode(message), 1

    # ------------------------------------------------------------ paths

    def _hops(self, flow: int, role: int) -> list[tuple[int, str | None]]:
        _, leaves, _, _, _, _ = self.shape
        f = self.flows
        leaf = int((f.src if role == 0 else f.dst)[flow]) // self.per_leaf
        pod, up, core = leaf // leaves + 1, int(f.up[role, flow]), int(f.core[role, flow])
        tor, agg = f"p{pod}-leaf{leaf % leaves + 1}", f"p{pod}-agg{up + 1}"
        hops: list[tuple[int, str | None]] = [(2, self._inbound[tor, agg])]
        if core >= 0:
            hops.append((3, self._inbound[agg, f"core{core + 1}"]))
        return hops

    @property
    def _inbound(self) -> dict[tuple[str, str], str | None]:
        known: dict[tuple[str, str], str | None] | None = self.__dict__.get("_inbound_of")
        if known is None:
            known = {(d.source, d.target): d.target_address for d in self.topology.directed_links}
            self.__dict__["_inbound_of"] = known
        return known

    def _paths(self, host: int, traced: list[tuple[int, int]], now_ns: int) -> Sent:
        f = self.flows
        paths = [
            TracedPath(role, int(f.src[i]) + 1, 1, int(f.index[i]), int(f.sport[i]), self._hops(i, role), now_ns)
            for i, role in traced
        ]
        name = self.hosts[host]
        message = Paths(cluster=CLUSTER, host=name, boot=int(self.boots[host]), now_ns=now_ns, paths=paths)
        return str(topics.Topic(CLUSTER, name, topics.PATHS)), encode(message), 0

    def known_paths(self, now_ns: int) -> Iterator[Sent]:
        """What was traced before: both directions of the known tuples, in batches."""
        for i in range(0, len(known := np.flatnonzero(self.known).tolist()), 25):
            batch = known[i : i + 25]
            yield self._paths(0, [(flow, role) for flow in batch for role in (0, 1)], now_ns)

    def retraced(self, now_ns: int, seconds: float) -> Iterator[Sent]:
        """Paths traced again, unchanged, within so many seconds, as agents batch them."""
        _, _, _, cores, _, _ = self.shape
        packets = 2 if cores else 1
        known = np.flatnonzero(self.known)
        if not len(known):
            return
        per_host = self.trace_rate * self.per_host / packets * seconds
        messages = per_host if per_host < seconds / BATCH_S else seconds / BATCH_S
        each = max(1, round(per_host / messages))
        for host in np.flatnonzero(self.rng.random(len(self.hosts)) < messages % 1).tolist() + [
            h for h in range(len(self.hosts)) for _ in range(int(messages))
        ]:
            flows = known[self.rng.integers(0, len(known), each)].tolist()
            yield self._paths(host, [(i, int(self.rng.integers(0, 2))) for i in flows], now_ns)

    # ------------------------------------------------------------ counts

    def count(self, *, loss: float = 0.0, faulty: str = "", rate: float = 0.0) -> Counts:
        """Draw a window: `loss` a packet and hop anywhere, and `rate` on the directed link `faulty`."""
        f, rng = self.flows, self.rng
        n = len(f.src)
        sent = 3 + (rng.random(n) < 0.125).astype(np.int64)
        early = (rng.random(n) < EARLY_S / 1.6).astype(np.int64)
        there, back = np.zeros(n, np.int64), np.zeros(n, np.int64)
        for out in (there, back):
            hit = rng.integers(0, n, rng.poisson(loss * 4 * sent.sum()))
            np.add.at(out, hit, 1)
        if faulty:
            cross = self.crossing(faulty)
            there += cross[0] * rng.binomial(sent, rate)
            back += cross[1] * rng.binomial(sent, rate)
        there = np.minimum(there, sent - early)
        return Counts(sent, early, there, np.minimum(back, sent - there))

    def crossing(self, link: str) -> npt.NDArray[np.bool_]:
        """Which flows' probes (0) and ACKs (1) take an uplink `pP-aggA->coreC`, (2, flows)."""
        agg, core = link.split("->")
        pod, up = (int(x) for x in agg.removeprefix("p").split("-agg"))
        f = self.flows
        leaves = self.shape[1]
        pods = np.stack([end // self.per_leaf // leaves + 1 for end in (f.src, f.dst)])
        hit: npt.NDArray[np.bool_] = (pods == pod) & (f.up == up - 1) & (f.core == int(core.removeprefix("core")) - 1)
        return hit

    # ------------------------------------------------------------ reports

    def reports(self, window: int, now: Counts, after: Counts) -> Iterator[Sent]:
        """What every host reports of a window, `after` being the next."""
        f = self.flows
        arrived = now.sent - now.lost_there
        ack2 = arrived - now.lost_back
        zero = np.zeros(len(f.src), np.int64)
        rtt = self.rng.integers(150, 400, len(f.src))
        columns = (f.index, now.sent, arrived, arrived, ack2, now.lost_there, zero, zero, zero, rtt * ack2, rtt + 60)
        packed = [c.astype(t) for t, c in zip(PROBER_COLUMNS, columns, strict=True)]
        end = (window + 1) * WINDOW_NS
        rest = now.sent - now.early - now.lost_there
        for host, name in enumerate(self.hosts):
            rows = []
            for rnic in range(host * self.per_host, (host + 1) * self.per_host):
                a, b = self.first[rnic], self.first[rnic + 1]
                raw = b"".join(c[a:b].tobytes() for c in packed)
                rows.append(
                    ProberRows(
                        rnic=rnic + 1,
                        epoch=int(self.epochs[rnic]),
                        list_version=1,
                        window=window,
                        columns=packed_columns(raw),
                    )
                )
            message = Report(
                cluster=CLUSTER,
                host=name,
                boot=int(self.boots[host]),
                seq=window,
                now_ns=end + int((EARLY_S + 0.01) * 1e9),
                until_ns=end + int(EARLY_S * 1e9),
                prober=rows,
                responder=self._responder(host, window, rest, after.early),
                health=Health(
                    loop_lag_max=1.5,
                    cpu_share=0.1,
                    rnics=[RnicHealth(device=f"rnic{i}") for i in range(self.per_host)],
                ),
            )
            yield str(topics.Topic(CLUSTER, name, topics.REPORT)), encode(message), 1

    def _responder(self, host: int, window: int, rest: Ints, early: Ints) -> bytes:
        """What arrived of a window since the last report, (flows,), and of the next one already."""
        f = self.flows
        mine = self.incoming[self.first_in[host] : self.first_in[host + 1]]
        late, new = mine[rest[mine] > 0], mine[early[mine] > 0]
        flow = np.concatenate((late, new))
        counts = np.concatenate((rest[late], early[new]))
        src = f.src[flow]
        columns = (
            src + 1,
            self.epochs[src],
            np.ones(len(flow), np.int64),
            np.repeat([window, window + 1], [len(late), len(new)]),
            f.index[flow],
            counts,
            counts,
            counts,
            np.zeros(len(flow), np.int64),
        )
        raw = b"".join(c.astype(t).tobytes() for t, c in zip(RESPONDER_COLUMNS, columns, strict=True))
        return packed_columns(raw)

    def exceptions(self, window: int, counts: Counts) -> Iterator[Sent]:
        """What leaves at once: a message each for a lost probe's `overdue` and `lost`."""
        f = self.flows
        for i in np.flatnonzero(counts.lost_there).tolist():
            host = int(f.src[i]) // self.per_host
            sent = window * WINDOW_NS + 1_000_000_000
            for kind, after_ns in ((OVERDUE, 100_000_000), (LOST, 500_000_000)):
                event = Event(kind, int(f.src[i]) + 1, 1, int(f.index[i]), 7, sent, 0, 0)
                message = Exceptions(
                    cluster=CLUSTER,
                    host=self.hosts[host],
                    boot=int(self.boots[host]),
                    now_ns=sent + after_ns,
                    events=[event],
                    health=Health(rnics=[RnicHealth(device=f"rnic{i}") for i in range(self.per_host)]),
                )
                yield str(topics.Topic(CLUSTER, self.hosts[host], topics.EXCEPTION)), encode(message), 0

    def registrations(self, now_ns: int, seconds: float) -> Iterator[Sent]:
        """Registrations and states that fall into so many seconds; all of them for REGISTER_S."""
        share = min(1.0, seconds / REGISTER_S)
        for host in np.flatnonzero(self.rng.random(len(self.hosts)) < share).tolist():
            name, boot = self.hosts[host], int(self.boots[host])
            mine = range(host * self.per_host, (host + 1) * self.per_host)
            rnics = [
                RnicInfo(
                    device=f"rnic{i}",
                    address="10.0.0.1",
                    gid="::ffff:10.0.0.1",
                    qpn=77,
                    qkey=1,
                    epoch=int(self.epochs[n]),
                )
                for i, n in enumerate(mine)
            ]
            message: Message = Register(
                cluster=CLUSTER, host=name, boot=boot, started_ns=now_ns - 10**12, rnics=rnics, software="pingmesh"
            )
            yield str(topics.Topic(CLUSTER, name, topics.REGISTER)), encode(message), 1
            epochs = {f"rnic{i}": int(self.epochs[n]) for i, n in enumerate(mine)}
            message = AgentState(cluster=CLUSTER, host=name, boot=boot, state="online", at_ns=now_ns, epochs=epochs)
            yield str(topics.Topic(CLUSTER, name, topics.STATE)), encode(message), 1


def packed_columns(raw: bytes) -> bytes:
    """What `pingmesh.messages.pack_columns` makes of columns that are arrays already."""
    pack = zlib.compressobj(6, zlib.DEFLATED, zlib.MAX_WBITS, zlib.DEF_MEM_LEVEL, zlib.Z_FIXED)
    return pack.compress(raw) + pack.flush()


def check_packing() -> None:
    """That columns packed from arrays are what the product's encoder makes, byte for byte."""
    from pingmesh.messages import pack_columns

    values = [[1, 2, 3]] * len(PROBER_COLUMNS)
    raw = b"".join(np.array(v).astype(t).tobytes() for t, v in zip(PROBER_COLUMNS, values, strict=True))
    assert packed_columns(raw) == pack_columns(PROBER_COLUMNS, values)
    assert all(array(t).itemsize == np.dtype(t).itemsize for t in PROBER_COLUMNS + RESPONDER_COLUMNS)
