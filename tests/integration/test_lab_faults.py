"""Each fault does to packets what it says, counts what it dropped, and is taken back without a trace."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.lab


class Rig:
    """The far end of `fault_rig.py`."""

    def __init__(self, family: int) -> None:
        script = Path(__file__).with_name("fault_rig.py")
        user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
        self._child = subprocess.Popen(
            [
                *("unshare", *user, "--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"),
                *(sys.executable, str(script), str(family)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._answer() == "ready"

    def _answer(self) -> Any:
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        if not line:
            pytest.fail("the rig ended; its error is on standard error")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["ok"]

    def __call__(self, op: str, **arguments: Any) -> Any:
        assert self._child.stdin is not None
        self._child.stdin.write(json.dumps({"op": op, **arguments}) + "\n")
        self._child.stdin.flush()
        return self._answer()

    def add(self, text: str) -> Any:
        return self("add", argv=text.split())

    def close(self) -> None:
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._child.stdin.close()
        self._child.wait(10)
        self._child.stdout.close()


both_families = pytest.mark.parametrize("shared", [4, 6], ids=["ipv4", "ipv6"], indirect=True)


@pytest.fixture(scope="module")
def shared(request: pytest.FixtureRequest) -> Iterator[tuple[Rig, dict[str, list[str]]]]:
    rig = Rig(getattr(request, "param", 4))
    # Neighbours resolve and linkwatch settles before the state counts as that of a healthy fabric.
    rig("send", src="h1", dst="h3")
    rig("send", src="h3", dst="h1")
    rig("sleep", seconds=1.0)
    yield rig, rig("snapshot")
    rig.close()


def settled(rig: Rig, healthy: dict[str, list[str]]) -> dict[str, list[str]]:
    """What differs from the healthy state, once carriers had their time."""
    deadline = time.monotonic() + 4
    while True:
        now = rig("snapshot")
        differing = {n: sorted(set(now[n]) ^ set(healthy[n])) for n in healthy if now[n] != healthy[n]}
        if not differing or time.monotonic() > deadline:
            return differing
        time.sleep(0.2)


@pytest.fixture
def rig(shared: tuple[Rig, dict[str, list[str]]]) -> Iterator[Rig]:
    rig, healthy = shared
    assert rig("list") == []
    yield rig
    rig("clear")
    assert rig("clear") == []
    assert settled(rig, healthy) == {}
    assert rig("send", src="h1", dst="h3")["by_flow"] == [10] * 32
    assert rig("send", src="h4", dst="h2")["by_flow"] == [10] * 32


def dropped(rig: Rig) -> dict[str, dict[str, int]]:
    (fault,) = rig("list")
    return fault["counters"]


@both_families
def test_black_hole_takes_all_of_its_flows_and_counts_them(rig: Rig) -> None:
    truth = rig.add("link leaf1 spine1 --loss 100% --direction forward")
    assert (truth["component"], truth["direction"]) == ("leaf1--spine1", "leaf1->spine1")
    out = rig("send", src="h1", dst="h3")
    assert set(out["by_flow"]) == {0, 10}
    lost = out["sent"] - out["received"]
    assert dropped(rig) == {"leaf1->spine1": {"dropped": lost, "probes": lost}}
    assert rig("send", src="h3", dst="h1")["received"] == 320


def test_what_a_cleared_fault_counted_is_all_that_it_dropped(rig: Rig) -> None:
    """Packets keep coming while it is cleared: none is dropped after the counters were read."""
    rig.add("link leaf1 spine1 --loss 100% --direction forward")
    out = rig("clear_amid", src="h1", dst="h3", count=2000)
    assert out["still_sending"], "all was sent before the fault was cleared"
    (cleared,) = out["cleared"]
    lost = out["sent"]["sent"] - out["sent"]["received"]
    assert 0 < lost < out["sent"]["sent"] / 4
    assert cleared["counters"] == {"leaf1->spine1": {"dropped": lost, "probes": lost}}


def test_reverse_is_the_other_direction(rig: Rig) -> None:
    assert rig.add("link leaf1 spine1 --loss 100% --direction reverse")["direction"] == "spine1->leaf1"
    assert rig("send", src="h1", dst="h3")["received"] == 320
    out = rig("send", src="h3", dst="h1")
    assert set(out["by_flow"]) == {0, 10}
    assert dropped(rig)["spine1->leaf1"]["probes"] == out["sent"] - out["received"]


@both_families
def test_loss_both_ways_is_a_share(rig: Rig) -> None:
    rig.add("link leaf1 spine1 --loss 30%")
    lost = {}
    for src, dst, direction in (("h1", "h3", "leaf1->spine1"), ("h3", "h1", "spine1->leaf1")):
        out = rig("send", src=src, dst=dst, count=60)
        crossing = sum(1 for n in out["by_flow"] if n < 60)
        lost[direction] = out["sent"] - out["received"]
        assert crossing > 4
        # Five standard deviations about 30 %.
        sent = crossing * 60
        assert abs(lost[direction] - 0.3 * sent) < 5 * (sent * 0.21) ** 0.5
    assert {d: c["probes"] for d, c in dropped(rig).items()} == lost


def test_tracers_packets_are_dropped_but_are_no_probes(rig: Rig) -> None:
    rig.add("switch spine1 --loss 100%")
    rig("send", src="h1", dst="h3", ttl=20)
    counts = dropped(rig)["both"]
    assert counts["dropped"] > 0
    assert counts["probes"] == 0


@both_families
def test_share_of_flows_takes_whole_5_tuples(rig: Rig) -> None:
    rig.add("rnic h3/rnic0 --loss 1%")  # something else on the way must not matter to what is picked
    rig("clear")
    rig.add("link spine1 leaf2 --flows 25% --direction forward")
    rig.add("link spine2 leaf2 --flows 25% --direction forward")
    first = rig("send", src="h1", dst="h3", flows=400, count=3)
    assert set(first["by_flow"]) == {0, 3}
    hit = first["by_flow"].count(0)
    assert 60 <= hit <= 145  # 100 expected; beyond four standard deviations
    assert rig("send", src="h1", dst="h3", flows=400, count=3)["by_flow"] == first["by_flow"]
    assert sum(f["counters"][f["direction"]]["probes"] for f in rig("list")) == 6 * hit


def test_only_large_packets(rig: Rig) -> None:
    assert rig.add("link leaf1 spine1 --larger-than 1000")["symptom"] == "large_packet_drop"
    assert rig("send", src="h1", dst="h3", size=900)["received"] == 320
    out = rig("send", src="h1", dst="h3", size=1000)
    assert dropped(rig)["leaf1->spine1"]["probes"] == out["sent"] - out["received"] > 0


@both_families
def test_length_is_that_of_the_whole_packet(rig: Rig) -> None:
    rig.add("link leaf1 spine1 --larger-than 1000 --direction forward")
    rig.add("link leaf1 spine2 --larger-than 1000 --direction forward")
    header = 48 if rig("family") == 6 else 28
    assert rig("send", src="h1", dst="h3", size=1000 - header)["received"] == 320
    assert rig("send", src="h1", dst="h3", size=1001 - header)["received"] == 0


@both_families
def test_only_one_class(rig: Rig) -> None:
    assert rig.add("link leaf1 spine1 --dscp 26 --direction forward")["symptom"] == "class_drop"
    assert rig("send", src="h1", dst="h3", dscp=0)["received"] == 320
    out = rig("send", src="h1", dst="h3", dscp=26)
    assert dropped(rig)["leaf1->spine1"]["probes"] == out["sent"] - out["received"] > 0


@both_families
@pytest.mark.parametrize("way", ["rx", "tx", "both"])
def test_rnic_loses_what_it_sends_or_receives(rig: Rig, way: str) -> None:
    assert rig("ping", src="h1", dst="h2") == 5
    rig.add(f"rnic h2/rnic0 --loss 100% --direction {way}")
    received = {d: rig("send", src=s, dst=t)["received"] for d, s, t in (("rx", "h3", "h2"), ("tx", "h2", "h1"))}
    assert received == {d: 0 if way in (d, "both") else 320 for d in ("rx", "tx")}
    assert {d: c["probes"] for d, c in dropped(rig).items()} == {d: 320 for d in received if way in (d, "both")}
    assert rig("ping", src="h1", dst="h2") == 0
    assert rig("send", src="h1", dst="h3")["received"] == 320


def test_switch_drops_each_packet_at_most_once(rig: Rig) -> None:
    rig.add("switch leaf1 --loss 50%")
    out = rig("send", src="h1", dst="h2", count=60)
    assert abs(out["received"] - 960) < 5 * (1920 * 0.25) ** 0.5
    assert dropped(rig)["both"]["probes"] == out["sent"] - out["received"]


@both_families
def test_down_is_rerouted_at_the_near_end_at_once_and_far_away_after_the_delay(rig: Rig) -> None:
    rig.add("link leaf1 spine1 --down --reroute 1500")
    assert rig("send", src="h1", dst="h3", count=2)["received"] == 64
    lost = 64 - rig("send", src="h3", dst="h1", count=2)["received"]
    assert 0 < lost < 64
    rig("sleep", seconds=1.8)
    assert rig("send", src="h3", dst="h1")["received"] == 320
    assert rig("send", src="h1", dst="h3")["received"] == 320


def test_down_without_reroute_stays_a_black_hole_for_the_far_side(rig: Rig) -> None:
    rig.add("link spine2 leaf2 --down --no-reroute")
    rig("sleep", seconds=1.0)
    assert 0 < rig("send", src="h1", dst="h3")["received"] < 320


def test_flap_goes_down_and_up_in_turn(rig: Rig) -> None:
    rig.add("link leaf1 spine1 --flap 0.6 --reroute 0")
    seen = set()
    for _ in range(14):
        seen.add(any("spine1" in line and "state UP" in line for line in rig("snapshot")["leaf1"]))
        rig("sleep", seconds=0.15)
    assert seen == {True, False}


@both_families
def test_congestion_delays_and_does_not_drop(rig: Rig) -> None:
    before = rig("rtt", src="h1", dst="h3")
    assert before["lost"] == 0
    assert max(before["medians"]) < 5
    rig.add("link leaf1 spine1 --congest 20mbit")
    rig("sleep", seconds=0.5)
    during = rig("rtt", src="h1", dst="h3")
    assert during["lost"] == 0
    slow = [m for m in during["medians"] if m > 5]
    assert 0 < len(slow) < 16
    assert max(slow) < 60
    rig("clear")
    assert max(rig("rtt", src="h1", dst="h3")["medians"]) < 5


@both_families
def test_spine_down_is_routed_around_and_leaf_down_is_not(rig: Rig) -> None:
    rig.add("switch spine1 --down")
    rig("sleep", seconds=1.2)
    assert rig("send", src="h1", dst="h3")["received"] == 320
    rig("clear")
    rig.add("switch leaf2 --down")
    assert rig("send", src="h1", dst="h3")["received"] == 0
    assert rig("send", src="h1", dst="h2")["received"] == 320


def test_rnic_down(rig: Rig) -> None:
    rig.add("rnic h3/rnic0 --down")
    assert rig("send", src="h1", dst="h3")["received"] == 0
    assert rig("send", src="h1", dst="h4")["received"] == 320


def test_host_down_kills_the_agent_and_clear_starts_it(rig: Rig) -> None:
    rig.add("host h3 --down")
    assert rig("agents")["agent:h3"] == "stopped"
    assert rig("send", src="h1", dst="h3")["received"] == 0
    rig("clear")
    assert rig("agents")["agent:h3"] == "running"


@pytest.mark.parametrize("kind", ["pause", "starve"])
def test_timed_host_faults_end_by_themselves(rig: Rig, kind: str) -> None:
    assert rig.add(f"host h2 --{kind} 0.5")["state"] == "active"
    assert rig("agents")["agent:h2"] == "paused"
    rig("sleep", seconds=0.9)
    assert rig("agents")["agent:h2"] == "running"
    (fault,) = rig("list")
    assert fault["state"] == "ended"
    assert fault["ended_at"] > fault["injected_at"]


def test_clearing_a_pause_early_resumes_the_agent(rig: Rig) -> None:
    rig.add("host h2 --pause 100")
    rig("clear")
    assert rig("agents")["agent:h2"] == "running"


def test_agent_faults(rig: Rig) -> None:
    rig.add("agent h1 --kill")
    rig.add("agent h2 --stop")
    assert rig.add("agent h3 --restart")["state"] == "ended"
    assert [rig("agents")[f"agent:h{i}"] for i in (1, 2, 3)] == ["stopped", "stopped", "running"]
    rig("clear", id=rig("list")[0]["id"])
    assert [rig("agents")[f"agent:h{i}"] for i in (1, 2, 3)] == ["running", "stopped", "running"]


@both_families
def test_overlapping_faults_are_taken_back_one_by_one(rig: Rig) -> None:
    link = rig.add("link leaf1 spine1 --down")
    switch = rig.add("switch spine1 --down")
    rig.add("link leaf2 spine2 --loss 100%")
    rnic = rig.add("rnic h3/rnic0 --loss 100% --direction rx")
    rig("clear", id=switch["id"])
    rig("clear", id=rnic["id"])
    rig("sleep", seconds=0.7)
    # leaf1 has only spine2, whose cable to leaf2 drops everything; the rest of the fabric is well.
    assert rig("send", src="h1", dst="h3")["received"] == 0
    rig("clear", id=link["id"])
    assert 0 < rig("send", src="h1", dst="h3")["received"] < 320


def test_the_same_part_is_not_broken_twice(rig: Rig) -> None:
    rig.add("link leaf1 spine1 --loss 10%")
    with pytest.raises(RuntimeError, match=r"leaf1--spine1 already has a fault .*clear it first"):
        rig.add("link spine1 leaf1 --down")


def test_clearing_what_never_was_is_an_error(rig: Rig) -> None:
    with pytest.raises(RuntimeError, match="no fault 'f999'"):
        rig("clear", id="f999")
    (cleared,) = rig("clear", id=rig.add("switch spine1 --loss 1%")["id"])
    assert rig("clear", id=cleared["id"]) == []
