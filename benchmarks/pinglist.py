"""How long probe lists take: whole, and for one host's change; three-tier fabrics of 1,000, 10,000 and 100,000 RNICs.

`benchmarks/pinglist.py [--quick] [--json FILE]`. Whole lists are ToR-mesh, Eq. (1), one round of top-up towards 16
tuples on every directed link, intervals, and the encoded messages. `--quick` leaves 100,000 out.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import time
from pathlib import Path

from controller import database
from controller.book import Book
from controller.pinglist import Draft, Entry, start, top_up, tor_mesh
from controller.rates import RatePlan, intervals
from controller.reach import Reach
from pingmesh.messages import Peer, ProbeClass, ProbeList, encode
from topology.generate import clos3
from topology.model import Topology

# pods, leaves a pod, aggregation switches a pod, cores, hosts a leaf, RNICs a host
SIZES = {1_000: (4, 8, 4, 16, 4, 8), 10_000: (10, 16, 8, 64, 8, 8), 100_000: (49, 32, 8, 64, 8, 8)}


def whole(t: Topology) -> dict[str, float]:
    names = set(t.rnics)
    numbers = {n: i for i, n in enumerate(t.rnics, 1)}
    times: dict[str, float] = {}
    began = at = time.perf_counter()

    def lap(name: str) -> None:
        nonlocal at
        now = time.perf_counter()
        times[name] = round(now - at, 3)
        at = now

    reach = Reach(t)
    entries = tor_mesh(reach, names)
    lap("tor_mesh_s")
    draft = Draft.of(reach, names, 1)
    entries += start(draft)
    lap("eq1_s")
    expected: dict[str, float] = {}
    links = reach.pairs_over
    lap("crossable_links_s")
    if len(t.rnics) <= 20_000:
        for e in draft.entries:
            for link, share in reach.shares(reach.unit_of[e.source], reach.unit_of[e.target]).items():
                expected[link] = expected.get(link, 0.0) + share
        entries += top_up(draft, {link: 16 - expected.get(link, 0.0) for link in links}, per_round=10**9)
        lap("top_up_s")
    book = Book(database.connect(":memory:"), reach)
    book.add(entries, 1)
    lap("book_s")
    by_source: dict[str, list[Entry]] = {}
    for e in entries:
        by_source.setdefault(e.source, []).append(e)
    size = 0
    peers = {n: Peer(i, n, "::ffff:10.0.0.1", 77, 1 << 30, 1 << 60, 4096) for n, i in numbers.items()}
    for name, mine in by_source.items():
        book.compose(name, numbers.get, intervals(mine, RatePlan())[0])
        m = ProbeList(
            cluster="c",
            host=name.split("/")[0],
            device="r",
            number=numbers[name],
            list_version=1,
            classes=[ProbeClass()],
            flows=book.sheets[name].flows,
            peers=[peers[n] for n in {e.target for e in mine}],
        )
        size += len(encode(m))
    lap("messages_s")
    book.save()
    lap("save_s")
    times["total_s"] = round(time.perf_counter() - began, 3)
    times |= {"tuples": len(entries), "links": len(t.directed_links), "list_bytes_mean": size // len(by_source)}
    at = time.perf_counter()
    host = next(iter(t.hosts))
    mine = [r.name for r in t.hosts[host]]
    for name in {*mine, *(p for n in mine for p in book.probers[n])}:
        here = [Entry(name, x.target, x.sport, x.kind, x.cls) for x in book.sheets[name].lines.values()]
        book.compose(name, numbers.get, intervals([e for e in here if e.target not in mine], RatePlan())[0])
    book.save()
    lap("one_host_leaves_s")
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="1,000 and 10,000 RNICs only")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    result: dict[str, object] = {
        "machine": {"cpus": os.cpu_count(), "python": platform.python_version(), "load": os.getloadavg()[0]}
    }
    for rnics, size in SIZES.items():
        if args.quick and rnics > 10_000:
            continue
        t = clos3(*size)
        figures = whole(t)
        figures["rnics"] = len(t.rnics)
        figures["max_rss_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
        result[str(rnics)] = figures
        print(f"{len(t.rnics):>7} RNICs: " + ", ".join(f"{k} {v}" for k, v in figures.items()), flush=True)
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
