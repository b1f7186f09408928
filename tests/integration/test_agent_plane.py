"""The agents' data plane on real packets through a router: every count against the router's own."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest

from pingmesh.messages import SEND_ERROR

RIG = Path(__file__).with_name("plane_rig.py")
FLOWS = 20

pytestmark = pytest.mark.lab


class Run(NamedTuple):
    """What the rig printed, and what it captured."""

    family: int
    counts: dict[str, dict[str, int]]
    other: dict[str, object]
    pcap: Path


@pytest.fixture(scope="module", params=[4, 6], ids=["ipv4", "ipv6"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    unshare = ["unshare", *user, "--mount", "--net", "--pid", "--fork", "--kill-child", "--"]
    if subprocess.run([*unshare, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("namespaces cannot be made here: run as root or allow unprivileged user namespaces")
    if shutil.which("nft") is None:
        pytest.skip("the router's rules need nft (Debian: nftables)")
    pcap = tmp_path_factory.mktemp("plane") / "capture.pcap"
    done = subprocess.run(
        [*unshare, sys.executable, str(RIG), str(request.param), str(pcap)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    counts = {name: value for name, value in result.items() if isinstance(value, dict)}
    return Run(request.param, counts, result, pcap)


@pytest.mark.parametrize("part", ["clean", "after_junk", "up_again"])
def test_nothing_is_lost_where_nothing_is_dropped(run: Run, part: str) -> None:
    c = run.counts[part]
    assert c["sent"] >= FLOWS * 9
    assert c["sent"] == c["arrived"] == c["ack1"] == c["ack2"]
    assert c["sent"] == c["received"] == c["acks1"] == c["acks2"]
    assert c["lost"] == c["late"] == c["excluded"] == c["send_error"] == c["mismatched"] == 0


def test_forward_losses_are_the_routers_count(run: Run) -> None:
    c = run.counts["forward"]
    assert c["dropped"] > 50
    assert c["sent"] - c["received"] == c["lost"] == c["dropped"]
    assert c["received"] == c["acks1"] == c["ack1"] == c["acks2"] == c["ack2"] == c["arrived"]


def test_reverse_losses_are_the_routers_count_packet_by_packet(run: Run) -> None:
    c = run.counts["reverse"]
    assert c["dropped"] > 100
    assert c["sent"] == c["received"] == c["acks1"] == c["acks2"]
    assert c["acks1"] - c["ack1"] + c["acks2"] - c["ack2"] == c["dropped"]
    # Two ACKs, 30 % loss: about 9 % of the probes are without any.
    assert c["lost"] == c["sent"] - c["arrived"] < c["dropped"] / 3


def test_large_packets_are_not_fragmented_and_are_lost_where_only_they_are_dropped(run: Run) -> None:
    c = run.counts["large"]
    assert c["lost"] == c["dropped"] > 50
    assert abs(c["sent"] - 2 * c["lost"]) <= FLOWS


def test_a_confirmation_counts_the_same_at_both_ends(run: Run) -> None:
    assert run.other["confirmed"] == [[0, 1], [10, 10], [10, 10], [10, 10], [10, 10], [0, 0]]
    there = run.other["confirmed_there"]
    assert isinstance(there, list)
    assert there[3] == [0x8000_0005] * 2
    assert there[4:] == [[0, 1], [10, 10], [10, 10], [10, 10], [0, 0]]


def test_tuples_to_trace_are_those_in_use(run: Run) -> None:
    assert run.other["own_flows"] == FLOWS
    assert run.other["incoming_flows"] == [0xC000 + 7 * i for i in range(FLOWS)]


def test_a_quiet_fabric_tells_no_events(run: Run) -> None:
    assert run.other["events"] == 0


def test_junk_is_counted_and_nothing_more(run: Run) -> None:
    # 200 random packets and the two TTL-limited ones whose TTL sufficed; 100 good frames for nobody's queue pair.
    assert run.counts["junk"] == {"bad": 202, "foreign": 100, "before": 0}


def test_a_link_that_is_down_makes_send_errors(run: Run) -> None:
    c = run.counts["down"]
    assert c["send_error"] >= FLOWS * 9
    assert c["sent"] == c["lost"] == 0
    assert run.other["down"]["events"] == [SEND_ERROR]  # type: ignore[index]


def packets(pcap: Path) -> list[bytes]:
    data = pcap.read_bytes()[24:]
    out = []
    while data:
        length = struct.unpack_from("<I", data, 8)[0]
        out.append(data[16 : 16 + length])
        data = data[16 + length :]
    return out


def test_the_kernel_answers_nobody_port_unreachable(run: Run) -> None:
    protocol_at, icmp, unreachable = (9, 1, (3, 20)) if run.family == 4 else (6, 58, (1, 40))
    kind, at = unreachable
    assert not [p for p in packets(run.pcap) if p[protocol_at] == icmp and p[at] == kind]


def test_tshark_decodes_our_frames(run: Run) -> None:
    if shutil.which("tshark") is None:
        pytest.skip("tshark is not installed, so that nobody else decodes our frames here")
    fields = ["infiniband.bth.opcode", "udp.dstport", "udp.length", "udp.checksum.status"]
    fields += ["ip.id", "ip.flags.df", "ip.dsfield.dscp"] if run.family == 4 else ["ipv6.tclass.dscp"]
    argv = ["tshark", "-r", str(run.pcap), "-o", "udp.check_checksum:TRUE", "-Y", "udp.dstport==4791", "-T", "fields"]
    for field in fields:
        argv += ["-e", field]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    lines = Counter(line for line in done.stdout.splitlines())
    not_present, good = "3", "1"
    small, large = "96", "4128"
    if run.family == 4:
        expected = {
            f"100\t4791\t{size}\t{not_present}\t0x0000\t1\t{dscp}"
            for size, dscp in ((small, 26), (small, 10), (large, 10))
        }
    else:
        expected = {f"100\t4791\t{size}\t{good}\t{dscp}" for size, dscp in ((small, 26), (small, 10), (large, 10))}
    assert set(lines) == expected
    assert sum(lines.values()) >= 3 * run.counts["clean"]["sent"]
