"""Which GID, which port, which clock, which device: every shape met in the field."""

from __future__ import annotations

from pathlib import Path

import pytest
from verbs_fake import FakeEdge, Script, v1, v2

from agent.transport.base import TransportError
from agent.transport.verbs import bonds, clocks, discovery, gids, labels, library
from agent.transport.verbs.edge import Capabilities, Gid, Port
from agent.transport.verbs.transport import Rule

PORT = Port(1, True, True, 4096, 16)
FULL = [
    v1(0, "fe80::ac0:ebff:fe11:2233"),
    v2(1, "fe80::ac0:ebff:fe11:2233"),
    v1(2, "::ffff:10.20.1.11"),
    v2(3, "::ffff:10.20.1.11"),
]


@pytest.mark.parametrize(
    ("table", "index"),
    [
        (FULL, 3),
        ([v2(0, "fe80::690:81ff:fe37:a9e8"), v2(1, "::ffff:10.20.9.101")], 1),
        ([v2(2, "fd00::1"), v2(9, "::ffff:192.168.3.4")], 9),
        ([v2(4, "2001:db8::1"), v2(2, "fd00::1")], 2),
        ([v2(1, "::ffff:169.254.7.9"), v2(900, "::ffff:8.8.4.4")], 900),
        ([v2(5, "::ffff:10.0.0.1"), v2(3, "::ffff:10.0.0.2")], 3),
    ],
)
def test_the_best_entry_is_chosen(table: list[Gid], index: int) -> None:
    assert gids.choose("mlx5_0", PORT, table).index == index


@pytest.mark.parametrize(
    "table",
    [
        [v2(1, "::ffff:169.254.7.9")],
        [v2(1, "febf::1")],
        [v1(0, "::ffff:10.0.0.1")],
        [v2(0, "::"), v2(1, "::ffff:127.0.0.1"), v2(2, "::1")],
        [],
    ],
)
def test_without_a_usable_entry_the_remedy_is_said(table: list[Gid]) -> None:
    with pytest.raises(gids.NoGidError, match="mlx5_0 port 1 has no usable RoCE v2 GID: give its network interface"):
        gids.choose("mlx5_0", PORT, table)


def test_link_local_only_when_told() -> None:
    table = [v2(1, "fe80::1"), v2(2, "::ffff:169.254.7.9")]
    assert gids.choose("d", PORT, table, link_local=True).index == 2
    assert gids.choose("d", PORT, [*table, v2(5, "fd00::1")], link_local=True).index == 5


def test_one_family_only_when_told() -> None:
    table = [v2(1, "::ffff:10.0.0.1"), v2(2, "fd00::1")]
    assert gids.choose("d", PORT, table, family="ipv6").index == 2
    with pytest.raises(gids.NoGidError, match="an IPv4 address"):
        gids.choose("d", PORT, table[1:], family="ipv4")


def test_a_forced_index_is_taken_or_refused_with_the_place() -> None:
    assert gids.choose("d", PORT, FULL, index=1).gid == "fe80::ac0:ebff:fe11:2233"
    with pytest.raises(gids.GidIndexError, match=r"agent.gid_index 16 of mlx5_0 port 1 is outside .* 16 entries"):
        gids.choose("mlx5_0", PORT, FULL, index=16)
    with pytest.raises(gids.GidIndexError, match="is not RoCE v2"):
        gids.choose("mlx5_0", PORT, FULL, index=2)
    with pytest.raises(gids.NoGidError):
        gids.choose("mlx5_0", PORT, FULL, index=9)


def test_an_address_is_found_again_where_it_moved() -> None:
    here = v2(3, "::ffff:10.20.1.11")
    assert gids.find(FULL, here) == here
    assert gids.find([v2(4, "::ffff:10.20.1.11")], here) == v2(4, "::ffff:10.20.1.11")
    assert gids.find([v1(3, "::ffff:10.20.1.11")], here) is None


def test_labels_reach_every_port_and_never_are_zero() -> None:
    for port in (0xC000, 0xC001, 0xD431, 0xFFFF):
        label = labels.label_of_port(port)
        assert label
        assert labels.port_of_label(label) == port
    # A port outside the range gets the one of the same low bits.
    assert labels.port_of_label(labels.label_of_port(4791)) == 0xC000 | 4791


def test_providers(tmp_path: Path) -> None:
    (tmp_path / "drivers/hns3").mkdir(parents=True)
    (tmp_path / "roce0/device").mkdir(parents=True)
    (tmp_path / "roce0/device/driver").symlink_to(tmp_path / "drivers/hns3")
    assert labels.provider_of("roce0", 0x19E5, tmp_path) is labels.Provider.LABEL
    assert labels.provider_of("mlx5_0", 0x02C9, tmp_path).honoured == "yes"
    assert labels.provider_of("rxe0", 0xFFFFFF, tmp_path).honoured == "no"
    assert labels.provider_of("bnxt_re0", 0x14E4, tmp_path).honoured == "unknown"


def test_labels_that_differ_may_collide_and_are_counted_by_port() -> None:
    assert labels.port_of_label(0x00001) == labels.port_of_label(0x04000) == 0xC001
    one_each = [labels.label_of_port(port) for port in range(0xC001, 0x10000)]
    assert (min(one_each), max(one_each)) == (1, 0x3FFF)
    assert len({labels.port_of_label(label) for label in one_each}) == 0x3FFF


def test_a_counter_of_17_bits_wraps() -> None:
    clock = clocks.TickClock((1 << 17) - 1, 1_000_000)
    first = clock.ns(0x1FFF0)
    assert clock.ns(0x00010) - first == 32


def test_counters_wrap_forwards_and_backwards() -> None:
    clock = clocks.TickClock((1 << 48) - 1, 1_000_000)
    first = clock.ns((1 << 48) - 16)
    assert clock.ns(16) - first == 32
    assert clock.ns((1 << 48) - 8) - first == 8
    assert clock.ns(0x20) - first == 48


def test_ticks_are_converted_by_the_clock_s_rate() -> None:
    clock = clocks.TickClock((1 << 63) - 1, 156_250)
    first = clock.ns(1000)
    assert clock.ns(1000 + 156_250) - first == 1_000_000


@pytest.mark.parametrize(
    ("mask", "khz", "why"),
    [
        (0, 0, "stamps no completions"),
        ((1 << 17) - 1, 1_000_000, "17 bits wraps too soon"),
        ((1 << 32) - 1, 1_000_000, "32 bits wraps too soon"),
        ((1 << 48) - 1, 0, "does not tell the rate"),
        (0xFF00FF, 1_000_000, "is no counter"),
    ],
)
def test_clocks_that_are_refused(mask: int, khz: int, why: str) -> None:
    clock, told = clocks.stamp_clock(Capabilities(0, 1, mask, khz))
    assert clock is None
    assert why in told


def test_seconds_and_nanoseconds_are_told_from_ticks() -> None:
    wall = 1_800_000_000
    real = clocks.DetectingClock((1 << 63) - 1, 1_000_000, wall)
    late = wall << 32 | 999_999_990
    assert real.ns(wall + 1 << 32 | 10) - real.ns(late) == 20
    ticks = clocks.DetectingClock((1 << 63) - 1, 1_000_000, wall)
    assert ticks.ns((5 << 32) + 100) - ticks.ns(5 << 32) == 100


def test_where_a_gid_is_now() -> None:
    table = [Gid(1, "::ffff:10.0.0.1", False), v2(4, "::ffff:10.0.0.1"), v2(6, "fd00::1")]
    edge = FakeEdge(mlx5_0=Script(table=table), mlx5_1=Script(table=table, active=False))
    assert discovery.index_of(edge, "mlx5_0", "::ffff:10.0.0.1") == 4
    assert discovery.index_of(edge, "mlx5_0", "::ffff:10.0.0.2") is None
    assert discovery.index_of(edge, "mlx5_1", "::ffff:10.0.0.1") is None
    assert all(device.closed == 1 for device in edge.opened)


def test_the_node_of_a_device(tmp_path: Path) -> None:
    for number, device in enumerate(("mlx5_1", "mlx5_0")):
        (tmp_path / f"uverbs{number}").mkdir()
        (tmp_path / f"uverbs{number}/ibdev").write_text(f"{device}\n")
    (tmp_path / "uverbs2").mkdir()
    (tmp_path / "abi_version").write_text("6\n")
    assert discovery.node_of("mlx5_0", tmp_path) == tmp_path / "uverbs1"
    assert discovery.node_of("mlx5_7", tmp_path) is None
    assert discovery.node_of("mlx5_0", tmp_path / "nothing") is None


def test_devices_are_found_by_role(tmp_path: Path) -> None:
    edge = FakeEdge(
        mlx5_0=Script(table=FULL),
        mlx5_1=Script(table=[v2(1, "febf::1")]),
        mlx5_2=Script(table=[v2(3, "::ffff:10.99.0.1")]),
        mlx5_3=Script(table=FULL, active=False),
        ib0=Script(table=FULL, ethernet=False),
        vf0=Script(table=FULL),
    )
    (tmp_path / "vf0/device/physfn").mkdir(parents=True)
    found = discovery.look(
        edge, Rule(), [{"role": "storage", "subnet": "10.99.0.0/16"}, {"role": "management", "virtual": True}], tmp_path
    )
    assert [f.device for f in found if f.usable] == ["mlx5_0"]
    assert {f.device: f.role for f in found} | {"mlx5_2": "storage", "vf0": "management"} == {
        f.device: f.role for f in found
    }
    why = {f.device: f.why for f in found}
    assert "no usable RoCE v2 GID" in why["mlx5_1"]
    assert "no active Ethernet port" in why["mlx5_3"]
    assert "no active Ethernet port" in why["ib0"]
    assert all(device.closed == 1 for device in edge.opened)


def test_the_interface_below_a_device(tmp_path: Path) -> None:
    ndevs = tmp_path / "mlx5_0/ports/1/gid_attrs/ndevs"
    ndevs.mkdir(parents=True)
    (ndevs / "0").mkdir()  # an empty slot: reading it fails
    (ndevs / "10").write_text("eth3\n")
    (ndevs / "9").write_text("eth2\n")
    assert discovery.interface_of("mlx5_0", tmp_path) == "eth2"
    (tmp_path / "rxe0").mkdir()
    (tmp_path / "rxe0/parent").write_text("eth0\n")
    assert discovery.interface_of("rxe0", tmp_path) == "eth0"
    assert discovery.interface_of("mlx5_9", tmp_path) == ""


def test_why_there_is_no_rdma(tmp_path: Path) -> None:
    assert "load the NIC's RDMA driver and ib_uverbs" in library.explain_no_devices(tmp_path / "infiniband")
    assert library.explain_no_devices(tmp_path).startswith("there is no RDMA device: load")


def test_pyverbs_of_another_python_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr("agent.transport.verbs.library.importlib.import_module", refuse)
    with pytest.raises(library.NoVerbsError, match="apt install python3-pyverbs"):
        library.find(tmp_path)
    (tmp_path / "__init__.py").touch()
    (tmp_path / "device.cpython-27-x86_64-linux-gnu.so").touch()
    with pytest.raises(library.NoVerbsError, match="run the agent with /usr/bin/python3"):
        library.find(tmp_path)
    assert issubclass(library.NoVerbsError, TransportError)


def test_members_of_a_bond(tmp_path: Path) -> None:
    (tmp_path / "bond0/bonding").mkdir(parents=True)
    (tmp_path / "bond0/bonding/slaves").write_text("eth0 eth1\n")
    assert bonds.members_of("bond0", tmp_path) == 2
    assert bonds.members_of("eth0", tmp_path) == 1
