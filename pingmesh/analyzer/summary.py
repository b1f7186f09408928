"""Totals of the last minute for status, coverage of evidence and an innocent verdict."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from pingmesh import topics
from pingmesh.analyzer.evidence import Evidence
from pingmesh.analyzer.flows import FlowBook
from pingmesh.analyzer.host_rules import SECOND
from pingmesh.analyzer.hosts import HostBook
from pingmesh.analyzer.observe import paths_of
from pingmesh.analyzer.samples import Sample
from pingmesh.messages import LinkSummary, Summary

SPAN_S = 60.0


def _percentile(values: list[float], share: float) -> float:
    return values[min(len(values) - 1, int(share * len(values)))]


def summarise(
    cluster: str,
    book: FlowBook,
    samples: Iterable[Sample],
    hosts: HostBook,
    now: int,
    rejected: int,
    broken: Sequence[frozenset[str]],
    clean: Iterable[tuple[str, int]] = (),
    rtts_us: Sequence[float] | None = None,
) -> Summary:
    """Packets sent and lost by directed link and by RNIC, and percentiles of flows' mean RTT, of the last `SPAN_S`.

    A loss on a path that crosses an element of a component known to be `broken` is that one's; any other is shown at
    every element of its path, for nobody knows better. `clean`: (element, packets) of samples without losses that are
    not among `samples`; `rtts_us`: sorted round trips, if others than theirs.
    """
    links: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    rnics: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    rtts: list[float] = []
    for s in samples:
        if s.rtts:
            rtts.append(s.rtt_ns / 1000)
        paths = paths_of(book, s.flow, s.role, now)
        if len(paths) == 1:
            path = frozenset(paths[0])
            guilty = frozenset[str]().union(*(path & elements for elements in broken)) if s.lost else path
            for e in path:
                t = links[e] if "->" in e else rnics[e.rsplit(" ", 1)[0]]
                t[0] += s.sent
                t[1] += s.lost if not guilty or e in guilty else 0
    for e, sent in clean:
        (links[e] if "->" in e else rnics[e.rsplit(" ", 1)[0]])[0] += sent
    rtts = sorted(rtts) if rtts_us is None else list(rtts_us)
    return Summary(
        cluster=cluster,
        host=topics.ANALYZER,
        now_ns=now,
        span_s=SPAN_S,
        links=[LinkSummary(k, v[0], max(0, v[1])) for k, v in sorted(links.items())],
        rnics=[LinkSummary(k, v[0], max(0, v[1])) for k, v in sorted(rnics.items())],
        agents_heard=sorted(h.name for h in hosts.hosts.values() if h.heard > now - 15 * SECOND),
        rtt_us={f"p{int(q * 100)}": round(_percentile(rtts, q), 1) for q in (0.5, 0.9, 0.99)} if rtts else {},
        rejected=rejected,
    )


def summarise_evidence(
    cluster: str, evidence: Evidence, hosts: HostBook, now: int, rejected: int, broken: Sequence[frozenset[str]]
) -> Summary:
    """`summarise` of evidence of the last `SPAN_S`. O(elements + flows that are looked at one by one)."""
    sums, _ = evidence.clean_sums()
    names = evidence.book.elements.names
    clean = ((names[e], int(sums[e])) for e in sums.nonzero()[0].tolist())
    rtts = evidence.rtts_us().tolist()
    return summarise(cluster, evidence.book, evidence.apart, hosts, now, rejected, broken, clean, rtts)
