"""What is joined and summed as columns is what joining and summing one by one gives."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pingmesh.analyzer.candidates import candidates_of
from pingmesh.analyzer.components import compile_components
from pingmesh.analyzer.counts import ROUND_TRIP, Sample, prober_rows, responder_rows
from pingmesh.analyzer.evidence import Evidence, Numbers, evidence_since, reaching, walked
from pingmesh.analyzer.flows import ACK, PROBE, FlowBook
from pingmesh.analyzer.hazards import Hazards
from pingmesh.analyzer.hosts import Host, HostBook
from pingmesh.analyzer.observe import loss_observations, totals, walked_since
from pingmesh.analyzer.plain_join import KEEP_NS, PlainJoin
from pingmesh.analyzer.samples import SampleStore
from pingmesh.analyzer.summary import summarise, summarise_evidence
from pingmesh.analyzer.symptoms import crossings
from pingmesh.analyzer.table import table_of
from pingmesh.analyzer.waits import USUAL
from pingmesh.messages import (
    PROBER_COLUMNS,
    RESPONDER_COLUMNS,
    WINDOW_NS,
    Flow,
    Peer,
    ProbeClass,
    ProbeList,
    ProberRows,
    TracedPath,
    pack_columns,
)
from topology.generate import clos3

TOPOLOGY = clos3(2, 2, 2, 4, 2, 1)
NAMES = list(TOPOLOGY.rnics)
NUMBER = {name: i + 1 for i, name in enumerate(NAMES)}
W = 1000
S = 10**9
CLASSES = [ProbeClass(), ProbeClass(name="large", size=4096)]


def tell(book: FlowBook, name: str, version: int, flows: list[Flow]) -> None:
    host, device = name.split("/")
    book.add_list(
        ProbeList(
            cluster="lab",
            host=host,
            device=device,
            number=NUMBER[name],
            list_version=version,
            classes=CLASSES,
            flows=flows,
            peers=[Peer(NUMBER[n], n, "", 1, 1, 1, 4096) for n in NAMES],
        )
    )


def one_by_one(evidence: Evidence) -> list[Sample]:
    """Every sample that is evidence."""
    rows = ((span.clean, span.keep(np.flatnonzero(span.clean.sent))) for span in evidence.spans)
    return [*evidence.single, *(s for clean, some in rows for s in evidence.store.samples_of(clean, some))]


def listed(seed: int, flows: int, versions: tuple[int, ...] = (1,)) -> FlowBook:
    """A book in which every RNIC has a list of so many flows."""
    rng = random.Random(seed)
    book = FlowBook(TOPOLOGY)
    for version in versions:
        for name in NAMES:
            others = [n for n in NAMES if n != name]
            entries = [Flow(i, NUMBER[rng.choice(others)], 50000 + i, i % 2, 1, 10**6, 6) for i in range(flows)]
            tell(book, name, version, entries)
    return book


# ---------------------------------------------------------------- joining


class Plain:
    """The store as it was before it had columns."""

    def __init__(self, book: FlowBook) -> None:
        self.join_ = PlainJoin(book, USUAL.settle_ns)
        self.samples: list[Sample] = []

    def add_prober(self, rows: ProberRows, offset: int, now: int) -> None:
        key = (rows.rnic, rows.epoch, rows.list_version, rows.window)
        start = rows.window * WINDOW_NS + offset
        if key not in self.join_.windows and not now - KEEP_NS <= start <= now + WINDOW_NS:
            return
        for index, counts in prober_rows(rows.columns):
            self.samples += self.join_.add_prober(key, start, index, counts)

    def add_responder(self, columns: bytes, now: int) -> None:
        for key, index, counts in responder_rows(columns):
            self.join_.add_responder(key, index, counts, now)

    def join(self, now: int, covered: dict[str, int]) -> None:
        self.samples += self.join_.join(now, lambda h: covered.get(h, 0))


small = st.integers(0, 4)
prober_row = st.tuples(
    st.integers(0, 4), small, small, small, small, st.integers(-4, 4), small, st.sampled_from([0, 0, 0, 1]), small,
    st.integers(0, 10**5), small
)  # fmt: skip
key = st.tuples(st.sampled_from([1, 1, 2, 99]), st.sampled_from([5, 5, 5, 6]), st.sampled_from([1, 1, 1, 2, 3]))
window = st.sampled_from([W, W, W + 1])
steps = st.lists(
    st.one_of(
        st.tuples(st.just("prober"), key, window, st.lists(prober_row, min_size=1, max_size=4)),
        st.tuples(
            st.just("responder"),
            st.lists(st.tuples(key, window, st.integers(0, 4), small, small, small, small), min_size=1, max_size=6),
        ),
        st.tuples(st.just("both"), st.lists(st.tuples(*[small] * 6), min_size=1, max_size=3)),
        st.tuples(st.just("all covered")),
        st.tuples(st.just("covered"), st.sampled_from([n.split("/")[0] for n in NAMES]), st.sampled_from([1, 2])),
        st.tuples(st.just("join"), st.integers(0, 3)),
    ),
    max_size=20,
)


@settings(max_examples=300, deadline=None)
@given(steps, st.sampled_from([0, 0, 3 * S, -3600 * S]))
def test_columns_join_as_single_counts_do(steps: list[tuple[object, ...]], offset: int) -> None:
    book = listed(1, 4, (1, 2))
    store, plain = SampleStore(book), Plain(book)
    now = (W + 2) * WINDOW_NS + offset
    heard: dict[str, int] = {}
    for step in [*steps, ("join", 20)]:
        match step:
            case ("prober", (rnic, epoch, version), window, table):
                columns = pack_columns(PROBER_COLUMNS, list(zip(*table, strict=True)))
                rows = ProberRows(rnic=rnic, epoch=epoch, list_version=version, window=window, columns=columns)
                store.add_prober(rows, offset, now)
                plain.add_prober(rows, offset, now)
            case ("responder", table):
                flat = [(*k[:3], w, *rest, 0) for k, w, *rest in table]
                columns = pack_columns(RESPONDER_COLUMNS, list(zip(*(r[:9] for r in flat), strict=True)))
                store.add_responder(columns, now)
                plain.add_responder(columns, now)
            case ("both", counts):
                tables = [
                    (i, received + lost, max(ack1, ack2), ack1, ack2, 0, 0, excluded, 0, 900, 900)
                    for i, (received, lost, ack1, ack2, excluded, _) in enumerate(counts)
                ]
                rows = ProberRows(
                    rnic=1,
                    epoch=5,
                    list_version=1,
                    window=W,
                    columns=pack_columns(PROBER_COLUMNS, list(zip(*tables, strict=True))),
                )
                flat = [
                    (1, 5, 1, W, i, received + excluded, ack1 + excluded + extra, ack2 + excluded, 0)
                    for i, (received, _, ack1, ack2, excluded, extra) in enumerate(counts)
                ]
                columns = pack_columns(RESPONDER_COLUMNS, list(zip(*flat, strict=True)))
                for s in (store, plain):
                    s.add_prober(rows, offset, now)
                    s.add_responder(columns, now)
            case ("all covered",):
                heard.update(dict.fromkeys(TOPOLOGY.hosts, (W + 2) * WINDOW_NS + offset + S))
            case ("covered", host, windows):
                heard[host] = (W + windows) * WINDOW_NS + offset + S
            case ("join", later):
                # Late enough to give up, and too early to forget: there the two differ by a window.
                now = min(now + later * S, (W + 1) * WINDOW_NS + offset + 16 * S)
                store.join(now, lambda h: heard.get(h, 0))
                plain.join(now, heard)
    assert Counter(store.samples) == Counter(plain.samples)


# ---------------------------------------------------------------- summing


def covered(until: int, silent: str) -> Callable[[str], int]:
    """All hosts but one have reported until a time."""
    return lambda host: 0 if host == silent else until


def report_all(store: SampleStore, rng: random.Random, windows: int, loss: float, silent: str) -> int:
    """Both ends of every flow report; responders on `silent` do not. Returns the time after it."""
    for w in range(W, W + windows):
        now = (w + 1) * WINDOW_NS + S
        received: list[tuple[int, ...]] = []
        for name in NAMES:
            table = []
            for i in range(6):
                sent = rng.randint(3, 5)
                got = sum(rng.random() >= loss for _ in range(sent))
                ack1, ack2 = (sum(rng.random() >= loss for _ in range(got)) for _ in range(2))
                arrived = max(ack1, ack2)
                rtt = 500 * ack2
                table.append((i, sent, arrived, ack1, ack2, sent - arrived, 0, 0, 0, rtt, rtt))
                received.append((NUMBER[name], 5, 1, w, i, got, got, got, 0))
            columns = pack_columns(PROBER_COLUMNS, list(zip(*table, strict=True)))
            store.add_prober(ProberRows(rnic=NUMBER[name], epoch=5, list_version=1, window=w, columns=columns), 0, now)
        heard = [r for r in received if store.book.flows[r[0], 1, r[4]].dst_host != silent]
        store.add_responder(pack_columns(RESPONDER_COLUMNS, list(zip(*heard, strict=True))), now)
        store.join(now, covered(now, silent))
    now = (W + windows) * WINDOW_NS + 14 * S
    store.join(now, covered(now, silent))
    return now


def trace(book: FlowBook, rng: random.Random, share: float, at: int) -> None:
    inbound = {d.name: d.target_address for d in TOPOLOGY.directed_links}
    for flow in list(book.current()):
        for role in (PROBE, ACK):
            a, b = (flow.src, flow.dst) if role == PROBE else (flow.dst, flow.src)
            path = rng.choice(book.path_set(a, b))[1:-1]
            hops = [(i + 2, inbound[e]) for i, e in enumerate(path[:-1])]
            if hops and rng.random() < share:
                book.add_path(TracedPath(role, *flow.key, flow.sport, hops, at), at)


@pytest.mark.parametrize("silent", ["", "h3"])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("share", "loss"), [(1.0, 0.01), (0.7, 0.01), (0.7, 0.0)])
def test_sums_say_what_all_samples_say(seed: int, share: float, loss: float, silent: str) -> None:
    rng = random.Random(seed)
    book = listed(seed, 6)
    trace(book, rng, share, W * WINDOW_NS - 50 * S)
    store = SampleStore(book)
    report_all(store, rng, 3, loss, silent)
    if seed == 1:  # some move, others are traced for the first time, after the fact
        trace(book, rng, 0.3, (W + 1) * WINDOW_NS)
    since = (W + 1) * WINDOW_NS if seed == 2 else 0
    away = Host("h2")
    if seed == 3:
        away.excuse((W + 1) * WINDOW_NS, (W + 1) * WINDOW_NS + S)
    dark = {NAMES[-1]} if seed == 3 else set()
    evidence = evidence_since(store, [away], since, 0, dark)
    single = [
        s
        for s in store.samples
        if s.start >= since
        and not dark & {s.flow.src, s.flow.dst}
        and not ({"h2"} & {s.flow.src_host, s.flow.dst_host} and away.is_excused(s.start, s.end))
    ]
    assert Counter(one_by_one(evidence)) == Counter(single)
    assert sorted(s.rtt_ns / 1000 for s in single if s.rtts) == evidence.rtts_us().tolist()

    components = compile_components(candidates_of(TOPOLOGY))
    sums = totals(book, single)
    assert evidence.has_loss == any(lost for _, lost in sums.values())
    mine = Hazards(evidence.table(Numbers(components)), components, 1e-4, 1e-5)
    plain = Hazards(table_of(loss_observations(sums), dict(components.index)), components, 1e-4, 1e-5)
    if silent:
        # A round trip of which one way is unknown is two one-way rows here: the hidden part is weighed less.
        lossy = [np.sort((h.sent_of * 1e6 + h.lost_of)[h.lost_of > 0]) for h in (mine, plain)]
        assert lossy[0].tolist() == lossy[1].tolist()
        return
    np.testing.assert_allclose(mine.clean, plain.clean)
    np.testing.assert_allclose(mine.exposure, plain.exposure)
    np.testing.assert_allclose(mine.clean_flows, plain.clean_flows)
    groups = [Counter(zip(h.sent_of.round(6), h.lost_of, h.flows, strict=True)) for h in (mine, plain)]
    assert groups[0] == groups[1]

    for elements in ({"p1-leaf1->p1-agg1"}, {f"{NAMES[0]} tx", f"{NAMES[0]} rx"}, {"core1->p2-agg1", "core2->p2-agg1"}):
        chosen = frozenset(elements)
        found = [
            Counter((c.flow.key, c.role, c.cls, frozenset(c.paths), c.sent, c.lost) for c in part)
            for part in (evidence.crossings(chosen), crossings(sums, chosen))
        ]
        assert found[0] == found[1]


@pytest.mark.parametrize("silent", ["", "h3"])
@pytest.mark.parametrize("seed", range(3))
def test_other_questions_are_answered_alike(seed: int, silent: str) -> None:
    rng = random.Random(seed)
    book = listed(seed, 6)
    trace(book, rng, 0.8, W * WINDOW_NS - 50 * S)
    store = SampleStore(book)
    now = report_all(store, rng, 3, 0.01, silent)
    since = (W + 1) * WINDOW_NS
    for elements in ({"p1-leaf1->p1-agg1"}, {f"{NAMES[0]} tx", f"{NAMES[0]} rx"}, {"core1->p2-agg1"}):
        chosen = frozenset(elements)
        later = [s for s in store.samples if s.start >= since]
        assert walked(store, since, chosen, 40_000) == walked_since(book, later, chosen, 40_000)
    for host in ("h1", "h3"):
        to_host = [s for s in store.samples if s.start >= since and s.role != ACK and s.flow.dst_host == host]
        assert Counter(reaching(store, since)(host)) == Counter(to_host)
    if silent:
        return
    evidence = evidence_since(store, [], 0, 0, ())
    hosts = HostBook()
    broken = [frozenset({"p1-leaf1->p1-agg1"})]
    mine = summarise_evidence("lab", evidence, hosts, now, 0, broken)
    assert mine == summarise("lab", book, store.samples, hosts, now, 0, broken)


def test_a_row_used_again_starts_from_nothing() -> None:
    book = listed(1, 4)
    store = SampleStore(book)
    now = report_all_of(store)
    for version in range(2, 14):
        for name in NAMES:
            flows = [
                Flow(i, NUMBER[NAMES[-1] if name != NAMES[-1] else NAMES[0]], 60000 + i, 0, 1, 1, 6) for i in range(4)
            ]
            tell(book, name, version, flows)
        now += 50 * S
        store.join(now, covered(now, ""))
        evidence = evidence_since(store, [], 0, 0, ())
        assert len(one_by_one(evidence)) == len(store.samples), "also of lists that are forgotten"
    assert book.rows.slots <= 8 * len(NAMES), "ranges of forgotten lists are used again"
    assert len(book.flows) == 3 * 4 * len(NAMES)
    assert not store.samples


def report_all_of(store: SampleStore) -> int:
    row = ProberRows(
        rnic=1,
        epoch=5,
        list_version=1,
        window=W,
        columns=pack_columns(PROBER_COLUMNS, [[0], [3], [3], [3], [3], [0], [0], [0], [0], [100], [50]]),
    )
    now = (W + 1) * WINDOW_NS + S
    store.add_prober(row, 0, now)
    store.add_responder(pack_columns(RESPONDER_COLUMNS, [[1], [5], [1], [W], [0], [3], [3], [3], [0]]), now)
    assert [(s.role, s.sent, s.lost) for s in store.join(now, lambda h: now)] == [(PROBE, 3, 0), (ACK, 6, 0)]
    assert all(s.role != ROUND_TRIP for s in store.samples)
    assert replace(store.samples[0], rtts=0).rtt_ns == 100 * 100 // 3
    return now
