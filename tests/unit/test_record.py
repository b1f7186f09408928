"""`pingmesh record`: samples to records, files that rotate within their bound, arguments."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from pingmesh.analyzer.flows import ACK, PROBE, FlowBook
from pingmesh.analyzer.hosts import HostBook
from pingmesh.analyzer.samples import ROUND_TRIP, Sample
from pingmesh.cli import main
from pingmesh.cli.record import seconds, size
from pingmesh.config import ConfigError
from pingmesh.messages import Flow as ListFlow
from pingmesh.messages import Health, Peer, ProbeClass, ProbeList, RnicHealth, TracedPath
from pingmesh.offline.capture import SILENT_NS, Capture
from pingmesh.records import files
from pingmesh.records.model import HostFact, Records
from pingmesh.records.spool import Spool
from topology.generate import leaf_spine

SECOND = 1_000_000_000
FABRIC = leaf_spine(2, 2, 1, 1)
START = 1_700_000_000 * SECOND


def book() -> FlowBook:
    out = FlowBook(FABRIC)
    peers = [Peer(2, "h2/rnic0", "g", 1, 1, 1, 4096)]
    flow = ListFlow(0, 2, 50000, 0, 1, 100_000, 0)
    classes = [ProbeClass(name="small"), ProbeClass(name="large", size=4000)]
    out.add_list(
        ProbeList(
            cluster="lab",
            host="h1",
            device="rnic0",
            number=1,
            list_version=1,
            classes=classes,
            flows=[flow],
            peers=peers,
        )
    )
    link = next(d for d in FABRIC.directed_links if d.name == "leaf1->spine2")
    out.add_path(TracedPath(PROBE, 1, 1, 0, 50000, [(2, link.target_address)], START), START)
    return out


def sample(b: FlowBook, role: int, sent: int, lost: int, start: int = START + SECOND) -> Sample:
    return Sample(
        start, start + 5 * SECOND, b.flows[1, 1, 0], "small", role, sent, lost, 1000 if role != ACK else 0, sent
    )


def hosts(now: int) -> HostBook:
    out = HostBook()
    out.session_started(now)
    for name in ("h1", "h2"):
        out.on_message(name, 1, now, now)
        out.get(name).rebooted = now - 60 * SECOND
    return out


def test_samples_become_records() -> None:
    b = book()
    c = Capture(FABRIC, b, hosts(START))
    late = replace(sample(b, PROBE, 50, 0), sent=0, lost=-1)
    c.add(
        [sample(b, PROBE, 50, 2), sample(b, ACK, 96, 1), sample(b, ROUND_TRIP, 10, 0, START + 6 * SECOND), late], START
    )
    assert len(c) == 3
    r = c.take()
    assert r is not None
    assert c.take() is None
    assert (r.sent.tolist(), r.lost.tolist()) == ([50, 96, 10], [1, 1, 0])
    assert r.role.tolist() == [0, 1, 2]
    assert r.path.value(0) == ("h1/rnic0 tx", "leaf1->spine2", "spine2->leaf2", "h2/rnic0 rx")
    assert r.path.value(1) is None  # the ACK was never traced
    assert r.path.value(2) is None
    assert (r.prober.value(1), r.target.value(1)) == ("h1/rnic0", "h2/rnic0")
    assert r.prober_address.value(0) == FABRIC.rnics["h1/rnic0"].address
    assert r.rtt_sum_ns.tolist() == [50_000, 0, 10_000]
    assert {r.validity.value(i) for i in range(3)} == {"valid"}
    c.add([late], START)
    assert (len(c), c.too_late) == (0, 1)


def test_what_the_analyzer_sets_aside_is_marked() -> None:
    b, now = book(), START + 7 * SECOND
    book_of_hosts = hosts(START)
    for name in ("h1", "h2"):
        book_of_hosts.on_message(name, 1, now, now)
    book_of_hosts.on_health("h2", Health(loop_lag_max=900.0), now)
    c = Capture(FABRIC, b, book_of_hosts)
    c.add([sample(b, PROBE, 50, 20)], now)
    r = c.take()
    assert r is not None
    assert r.validity.value(0) == "target_set_aside"
    c.add([], now + 5 * SECOND)
    facts = {f.host: f for f in c.take_facts() if f.start_ns == START + 5 * SECOND}
    assert (facts["h2"].stall_ms, facts["h2"].set_aside) == (900.0, True)
    assert not facts["h1"].set_aside


def test_an_rnic_without_link_is_marked() -> None:
    b, now = book(), START + 7 * SECOND
    of_hosts = hosts(now)
    of_hosts.on_health("h1", Health(rnics=[RnicHealth(device="rnic0", up=False)]), now)
    c = Capture(FABRIC, b, of_hosts)
    c.add([sample(b, PROBE, 50, 50)], now)
    r = c.take()
    assert r is not None
    assert r.validity.value(0) == "no_link"
    assert [f.dark for f in c.take_facts()] == [("rnic0",), ()]


def test_silence_is_noticed() -> None:
    b = book()
    of_hosts = hosts(START)
    now = START + SILENT_NS + 2 * SECOND
    of_hosts.on_message("h1", 1, now, now)
    c = Capture(FABRIC, b, of_hosts)
    c.add([sample(b, ROUND_TRIP, 50, 50, START + SECOND)], now)
    r = c.take()
    assert r is not None
    assert r.validity.value(0) == "target_set_aside"
    (h2,) = [f for f in c.take_facts() if f.host == "h2"]
    assert (h2.unanswered, h2.silent_since_ns) == (3, START)


def records() -> Records:
    b = book()
    c = Capture(FABRIC, b, hosts(START))
    c.add([sample(b, PROBE, 50, 2)], START)
    r = c.take()
    assert r is not None
    return r


FACTS = [HostFact(start_ns=0, end_ns=5, host="h1")]


def test_files_rotate_within_their_bound(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("not ours")
    spool = Spool(tmp_path, 1 << 30, {})
    first = spool.write(records(), FACTS, START)
    assert [p.name for p in first] == ["flows-20231114T221320-000001.parquet", "hosts-20231114T221320-000001.parquet"]
    pair = sum(p.stat().st_size for p in first)
    spool = Spool(tmp_path, int(2.5 * pair), {})
    for i in range(1, 5):
        spool.write(records(), FACTS, START + i * SECOND)
    left = sorted(p.name[6:-8] for p in tmp_path.glob("flows-*"))
    assert left == ["20231114T221323-000004", "20231114T221324-000005"]
    assert len(list(tmp_path.glob("hosts-*"))) == 2
    assert (spool.done.files, spool.done.rows, spool.done.removed) == (8, 4, 6)
    assert (tmp_path / "notes.txt").exists()


def test_the_newest_pair_stays_however_small_the_bound(tmp_path: Path) -> None:
    spool = Spool(tmp_path, 1, {})
    spool.write(records(), FACTS, START)
    spool.write(records(), [], START + SECOND)
    assert [p.name for p in tmp_path.iterdir()] == ["flows-20231114T221321-000002.parquet"]
    assert spool.write(None, [], START) == []


def test_a_file_appears_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    fsync = os.fsync

    def look(fd: int) -> None:
        seen.append(sorted(p.name for p in tmp_path.iterdir()))
        fsync(fd)

    monkeypatch.setattr(files.os, "fsync", look)
    Spool(tmp_path, 1 << 30, {}).write(records(), [], START)
    assert seen == [[".flows-20231114T221320-000001.parquet.part"]]


@pytest.mark.parametrize(("text", "value"), [("90s", 90), ("10m", 600), ("2h", 7200), ("1d", 86_400), ("1.5", 1.5)])
def test_durations(text: str, value: float) -> None:
    assert seconds("--for", text) == value


@pytest.mark.parametrize("text", ["", "0", "-1", "10x", "m", "1 0"])
def test_bad_durations_and_sizes(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--for: .* is no duration"):
        seconds("--for", text)
    with pytest.raises(ConfigError, match=r"--max-bytes: .* is no size"):
        size("--max-bytes", text)


def test_sizes() -> None:
    assert [size("x", t) for t in ("7", "1K", "500M", "2G")] == [7, 1024, 500 << 20, 2 << 30]


def test_record_without_topology(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["record", "--out", str(tmp_path)]) == 2
    assert "no topology file" in capsys.readouterr().err
