"""GIDs, source ports and clocks of RDMA devices: the rules, on tables and counters as they are found in the field."""

from __future__ import annotations

import ipaddress
from pathlib import Path

import pytest

from agent.transport.verbs.clocks import (
    CounterClock,
    DeviceClock,
    RealTimeClock,
    SoftwareClock,
    clock_for,
    elapsed_ticks,
)
from agent.transport.verbs.gids import GidEntry, GidRule, Kind, NoGidError, choose
from agent.transport.verbs.labels import (
    LABELS,
    driver_of,
    label_of_port,
    port_of_label,
    port_of_qpn,
    rule_of,
)

TIMEOUT_NS = 500_000_000


def table(*entries: tuple[int, str, Kind]) -> list[GidEntry]:
    return [GidEntry(*e) for e in entries]


MIXED = table(
    (0, "fe80::ac0:ebff:fe11:2233", "v1"),
    (1, "fe80::ac0:ebff:fe11:2233", "v2"),
    (2, "::ffff:10.20.1.11", "v1"),
    (3, "::ffff:10.20.1.11", "v2"),
)


@pytest.mark.parametrize(
    ("entries", "index"),
    [
        (MIXED, 3),
        (table((0, "fe80::690:81ff:fe37:a9e8", "v2"), (1, "::ffff:10.20.9.101", "v2")), 1),
        (table((0, "fd00::5", "v2"), (200, "::ffff:8.8.8.8", "v2"), (900, "::ffff:10.1.1.1", "v2")), 200),
        (table((4, "2001:db8::7", "v2"), (2, "fd00::5", "v2")), 2),
    ],
)
def test_the_gid_is_chosen_by_rule(entries: list[GidEntry], index: int) -> None:
    choice = choose("mlx5_0", 1, entries, GidRule())
    assert choice.entry.index == index
    assert "RoCE v2" in choice.why


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        (table((1, "::ffff:169.254.7.9", "v2")), "link-local"),
        (table((1, "febf::1", "v2")), "link-local"),
        (table((0, "::ffff:10.1.1.1", "v1")), "not RoCE v2"),
        ([], "the GID table is empty"),
    ],
)
def test_no_gid_can_be_used(entries: list[GidEntry], words: str) -> None:
    with pytest.raises(NoGidError, match=rf"mlx5_1 port 1: .*{words}"):
        choose("mlx5_1", 1, entries, GidRule())


def test_link_local_only_when_told_and_after_all_others() -> None:
    entries = table((0, "::ffff:169.254.7.9", "v2"), (1, "fd00::1", "v2"))
    assert choose("mlx5_1", 1, entries, GidRule(link_local=True)).entry.index == 1
    assert choose("mlx5_1", 1, entries[:1], GidRule(link_local=True)).entry.index == 0


def test_the_index_moves_and_the_address_is_found_again() -> None:
    before = choose("mlx5_0", 1, MIXED, GidRule()).entry
    after = choose("mlx5_0", 1, table(*((e.index + 1, e.gid, e.kind) for e in MIXED)), GidRule()).entry
    assert (before.index, after.index) == (3, 4)
    assert before.gid == after.gid


def test_family_and_networks_narrow_the_choice() -> None:
    entries = table((0, "::ffff:10.1.1.1", "v2"), (1, "::ffff:192.168.7.1", "v2"), (2, "fd00::5", "v2"))
    assert choose("mlx5_0", 1, entries, GidRule(family=6)).entry.index == 2
    wanted = (ipaddress.ip_network("192.168.0.0/16"),)
    assert choose("mlx5_0", 1, entries, GidRule(networks=wanted)).entry.index == 2 - 1
    with pytest.raises(NoGidError, match="not IPv6"):
        choose("mlx5_0", 1, entries[:2], GidRule(family=6))


def test_a_forced_index_must_be_there() -> None:
    assert choose("mlx5_0", 1, MIXED, GidRule(index=3)).entry.index == 3
    with pytest.raises(NoGidError, match="mlx5_0 port 1: there is no GID at index 300: the table has 255 slots"):
        choose("mlx5_0", 1, MIXED, GidRule(index=300), size=255)
    with pytest.raises(NoGidError, match="255 slots, and this one is empty"):
        choose("mlx5_0", 1, MIXED, GidRule(index=9), size=255)
    with pytest.raises(NoGidError, match="index 2 is of type v1"):
        choose("mlx5_0", 1, MIXED, GidRule(index=2))


def test_every_port_has_a_label_and_labels_collide_as_known() -> None:
    assert [port_of_label(label_of_port(p)) for p in range(0xC000, 0x10000)] == list(range(0xC000, 0x10000))
    assert port_of_label(0x00001) == port_of_label(0x04000) == 0xC001
    assert len({port_of_label(x) for x in LABELS}) == len(LABELS)
    assert port_of_label(0) == 0, "a random port per address handle: unknown"
    with pytest.raises(ValueError, match="is not within"):
        label_of_port(4791)


def test_ports_of_rxe_queue_pairs() -> None:
    assert [port_of_qpn(q) for q in (17, 18)] == [57236, 63494]
    assert all(0xC000 <= port_of_qpn(q) < 1 << 16 for q in range(2, 4000))


def test_the_driver_tells_the_rule(tmp_path: Path) -> None:
    driver = tmp_path / "drivers" / "mlx5_core"
    driver.mkdir(parents=True)
    (tmp_path / "mlx5_0" / "device").mkdir(parents=True)
    (tmp_path / "mlx5_0" / "device" / "driver").symlink_to(driver)
    (tmp_path / "rxe1").mkdir()
    (tmp_path / "rxe1" / "parent").write_text("h1\n")
    assert [rule_of(driver_of(d, tmp_path)) for d in ("mlx5_0", "rxe1", "absent")] == ["label", "qpn", "unknown"]


def test_a_narrow_counter_wraps_but_is_refused() -> None:
    assert elapsed_ticks(0x1FFF0, 0x00010, 0x1FFFF) == 32
    clock, why = clock_for(DeviceClock(0x1FFFF, 1_000_000), TIMEOUT_NS)
    assert isinstance(clock, SoftwareClock)
    assert "17 bits come round every 0.131 ms" in why


@pytest.mark.parametrize(
    ("device", "words"),
    [
        (DeviceClock(0, 0), "no completion timestamps"),
        (DeviceClock((1 << 48) - 1, 0), "rate of its clock"),
        (DeviceClock(0xFF0F, 1), "holes"),
    ],
)
def test_software_stamps_say_why(device: DeviceClock, words: str) -> None:
    clock, why = clock_for(device, TIMEOUT_NS)
    assert clock.source == "software"
    assert words in why
    assert clock.ns(0, 77) == 77


def test_a_free_running_counter_through_its_wraps() -> None:
    khz, mask = 156_250, (1 << 32) - 1  # comes round every 27.5 s
    clock, why = clock_for(DeviceClock(mask, khz), TIMEOUT_NS)
    assert isinstance(clock, CounterClock)
    assert not why
    start = mask - 1000
    period = (mask + 1) * 1_000_000 // khz
    truth = [0, 5_000_000, 9_000_000_000, 70_000_000_000, 70_000_100_000]
    assert truth[3] - truth[2] > 2 * period, "more than one wrap unseen between two stamps"
    told = [clock.ns(start + t * khz // 1_000_000 & mask, 10**12 + t + 30_000) for t in truth]
    assert told == pytest.approx(truth, abs=10)


def test_stamps_out_of_order_go_back_a_little() -> None:
    clock = CounterClock((1 << 48) - 1, 1_000_000)
    assert [clock.ns(t, t) for t in (1000, 5000, 4000, 6000)] == [0, 4000, 3000, 5000]


def test_real_time_stamps() -> None:
    clock, why = clock_for(DeviceClock((1 << 64) - 1, 1_000_000, "real_time"), TIMEOUT_NS)
    assert isinstance(clock, RealTimeClock)
    assert not why
    assert clock.ns(2 << 32 | 1, 0) - clock.ns(1 << 32 | 999_999_999, 0) == 2
