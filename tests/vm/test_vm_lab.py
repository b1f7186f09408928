"""The lab's fabric with Soft-RoCE hosts, before any agent: packets take it, faults hit them, and it leaves nothing."""

from __future__ import annotations

import signal
import statistics
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import pytest
import vm_lab

from pingmesh.lab.client import Lab

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def before() -> dict[str, Any]:
    return vm_lab.machine_state()


@pytest.fixture(scope="module")
def lab(before: dict[str, Any]) -> Iterator[Lab]:
    with vm_lab.start(agents=False) as running:
        yield running


def test_a_message_crosses_the_fabric(lab: Lab) -> None:
    same_tor = vm_lab.raw_ping(lab, "h1/rnic0", "h2/rnic0")
    assert (same_tor["received"], set(same_tor["ttls"])) == (5, {63})
    across = vm_lab.raw_ping(lab, "h1/rnic0", "h3/rnic0")
    assert (across["received"], set(across["ttls"])) == (5, {61})
    assert set(across["sources"]) == {lab.topology.rnics["h1/rnic0"].address}


def test_a_black_hole_takes_messages_and_its_counter_tells(lab: Lab) -> None:
    truth = lab.fault_add(["rnic", "h3/rnic0", "--loss", "100%", "--direction", "rx"])
    try:
        assert vm_lab.raw_ping(lab, "h1/rnic0", "h3/rnic0", 2)["received"] == 0
        assert vm_lab.raw_ping(lab, "h1/rnic0", "h4/rnic0", 2)["received"] == 2
        (shown,) = lab.fault_list()
        assert shown["counters"]["rx"]["probes"] >= 2
    finally:
        lab.fault_clear(truth["id"])
    assert vm_lab.raw_ping(lab, "h1/rnic0", "h3/rnic0", 2)["received"] == 2


def on_the_way(lab: Lab, source: str, target: str) -> float:
    """Median of the milliseconds that messages take."""
    return statistics.median(vm_lab.raw_ping(lab, source, target, 15)["ms"])


def test_a_delay_delays_its_direction_by_what_was_asked(lab: Lab) -> None:
    there, back = on_the_way(lab, "h1/rnic0", "h3/rnic0"), on_the_way(lab, "h3/rnic0", "h1/rnic0")
    try:
        for spine in ("spine1", "spine2"):
            link = f"link leaf1 {spine} --delay 30 --direction forward"
            done = vm_lab.cli("lab", "fault", "add", *link.split())
            assert f"{link} (active); expected: link leaf1--{spine} (leaf1->{spine}): high_rtt" in done.stdout, done
        assert 25 < on_the_way(lab, "h1/rnic0", "h3/rnic0") - there < 60
        assert abs(on_the_way(lab, "h3/rnic0", "h1/rnic0") - back) < 25
    finally:
        lab.fault_clear()
    assert on_the_way(lab, "h1/rnic0", "h3/rnic0") - there < 25


def test_a_lab_that_is_killed_leaves_nothing_that_the_next_command_does_not_remove(
    before: dict[str, Any], lab: Lab
) -> None:
    subprocess.run(["kill", f"-{signal.SIGKILL}", str(lab.lab_status()["pid"])], check=True)
    time.sleep(1)
    assert vm_lab.cli("lab", "down").stdout == "lab removed\n"
    vm_lab.until(lambda: vm_lab.machine_state()["rdma"] == before["rdma"], 20)
    assert vm_lab.machine_state() == before


def test_a_lab_that_is_ended_leaves_nothing(before: dict[str, Any]) -> None:
    with vm_lab.start(agents=False):
        assert vm_lab.machine_state() != before
    vm_lab.until(lambda: vm_lab.machine_state()["rdma"] == before["rdma"], 20)
    assert vm_lab.machine_state() == before
