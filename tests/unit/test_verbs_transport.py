"""The verbs transport on scripted devices: what it sends, takes in, refuses, and when it wants to be opened anew."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Iterator
from typing import Any

import pytest
from verbs_fake import RXE, FakeDevice, FakeEdge, FakePair, FakeResolver, Script, v2

from agent.transport.base import TransportError
from agent.transport.verbs import lanes
from agent.transport.verbs.edge import Happening
from agent.transport.verbs.handles import RECHECK_NS, SOON_NS
from agent.transport.verbs.transport import LANES, Rule, VerbsTransport

OWN, PEER = "10.0.0.1", "10.0.1.2"
PROBE = bytes(range(64))
FREE_RUNNING = (1 << 63) - 1


class Limited:
    def __init__(self, interface: str, address: str) -> None:
        self.sent: list[tuple[object, ...]] = []

    def send(self, *what: object) -> None:
        self.sent.append(what)

    def close(self) -> None:
        pass


class Bench:
    """A transport on a scripted device, and what it delivered and told."""

    def __init__(self, members: int = 1, **script: object) -> None:
        script.setdefault("table", [v2(3, f"::ffff:{OWN}")])
        self.script = Script(**script)  # type: ignore[arg-type]
        self.edge = FakeEdge(mlx5_0=self.script)
        self.members = members
        self.resolver = FakeResolver()
        self.now = 1_000_000_000
        self.got: list[tuple[bytes, str, int, int, int, int, int]] = []
        self.troubles: list[str] = []
        self.transport = self.open()

    def open(self) -> VerbsTransport:
        transport = VerbsTransport(
            "rnic0",
            "mlx5_0",
            self.edge,
            {7: "eth7"}.__getitem__,
            Rule(),
            resolver=lambda interface, address: self.resolver,
            limited=Limited,  # type: ignore[arg-type]
            clock=self.clock,
            members_of=lambda interface: self.members,
        )
        self.device.address = transport.address
        return transport

    def clock(self) -> int:
        self.now += 100
        return self.now

    @property
    def device(self) -> FakeDevice:
        return self.edge.opened[-1]

    @property
    def pairs(self) -> list[FakePair]:
        return self.device.pairs

    def receive(self, payload: memoryview, source: str, qpn: int, sport: int, dscp: int, ttl: int, ns: int) -> None:
        self.got.append((bytes(payload), source, qpn, sport, dscp, ttl, ns))

    def start(self) -> None:
        self.transport.watch(self.troubles.append)
        self.transport.start(asyncio.get_running_loop(), self)

    def send(self, sport: int = 0xC123, dscp: int = 26, size: int = 64, payload: bytes = PROBE) -> int:
        target = self.transport.target(PEER, 99, 0x1234)
        return self.transport.send(target, sport, dscp, payload, size, True)


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)
    await asyncio.sleep(0.02)


@pytest.fixture
def benches() -> Iterator[list[Bench]]:
    made: list[Bench] = []
    yield made
    for bench in made:
        bench.transport.close()
        assert all(device.closed for device in bench.edge.opened)


@pytest.fixture
async def bench(benches: list[Bench]) -> Bench:
    made = Bench()
    benches.append(made)
    made.start()
    return made


@pytest.fixture
async def stamped(benches: list[Bench]) -> Bench:
    made = Bench(stamp_mask=FREE_RUNNING, clock_khz=1_000_000)
    benches.append(made)
    made.start()
    return made


@pytest.fixture
async def rxe(benches: list[Bench]) -> Bench:
    made = Bench(vendor=RXE, mtu=1024)
    benches.append(made)
    made.start()
    return made


class Waiter:
    def __init__(self) -> None:
        self.ns: list[int] = []

    def stamped(self, ns: int) -> None:
        self.ns.append(ns)


async def test_what_an_rnic_tells_of_itself(bench: Bench) -> None:
    t = bench.transport
    assert (t.device, t.interface, t.address, t.gid) == ("rnic0", "eth7", OWN, f"::ffff:{OWN}")
    assert (t.kind, t.clock, t.source_port_honoured, t.mtu) == ("verbs", "software", "yes", 4096)
    assert t.qpn == bench.pairs[0].qpn
    assert len(bench.pairs) == 1


async def test_a_probe_leaves_padded_and_marked_with_a_label_for_its_port(bench: Bench) -> None:
    tx_ns = bench.send(sport=0xC123, dscp=26, size=1024)
    (sent,) = bench.pairs[0].sent
    assert sent.payload == PROBE.ljust(1024, b"\0")
    assert (sent.qpn, sent.qkey) == (99, 0x1234)
    assert (sent.handle.label, sent.handle.traffic_class, sent.handle.gid) == (0x123, 26 << 2, f"::ffff:{PEER}")
    assert tx_ns == bench.now
    assert bench.transport.source_port(0xC123) == 0xC123


async def test_handles_are_made_once_for_each_port_and_class(bench: Bench) -> None:
    for _ in range(3):
        for sport in (0xC001, 0xC002):
            bench.send(sport)
        bench.send(0xC001, dscp=0)
    assert len(bench.device.handles) == 3
    assert bench.resolver.looks == 1


async def test_a_packet_is_delivered_by_its_ip_header_and_its_buffer_given_back(bench: Bench) -> None:
    pair = bench.pairs[0]
    assert pair.arrive(PROBE, PEER, 42, dscp=26, ttl=61)
    await settle()
    ((payload, source, qpn, sport, dscp, ttl, _),) = bench.got
    assert (payload, source, qpn, sport, dscp, ttl) == (PROBE, PEER, 42, 0, 26, 61)
    assert len(pair.posted) == lanes.FIRST_RECEIVES


async def test_buffers_are_given_back_whatever_the_packet(bench: Bench) -> None:
    pair = bench.pairs[0]

    def fail(*_: object) -> None:
        raise RuntimeError("a bug in whoever receives")

    for round_ in range(3 * lanes.FIRST_RECEIVES):
        assert pair.arrive(b"", PEER, 42)
        assert pair.arrive(PROBE, PEER, 42, destination="10.9.9.9")
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert bench.transport.bad_frames == 2 * (round_ + 1)
    bench.transport._receive = fail
    for _ in range(3):
        pair.arrive(PROBE, PEER, 42)
    await settle()
    assert len(pair.posted) == lanes.FIRST_RECEIVES
    assert bench.transport.receives_missing == 0
    assert bench.got == []


async def test_buffers_that_cannot_be_given_back_are_counted(bench: Bench) -> None:
    bench.pairs[0].arrive(PROBE, PEER, 42)
    bench.script.gone = True
    await settle()
    assert bench.transport.receives_missing == 1
    assert bench.troubles


async def test_ipv6_is_read_from_the_whole_header(benches: list[Bench]) -> None:
    bench = Bench(table=[v2(2, "fd00::1")])
    benches.append(bench)
    bench.start()
    bench.pairs[0].arrive(PROBE, "fd00::9", 42, dscp=10, ttl=60)
    await settle()
    ((_, source, _, _, dscp, ttl, _),) = bench.got
    assert (source, dscp, ttl) == ("fd00::9", 10, 60)
    with pytest.raises(ValueError, match=r"has an IPv6 address and cannot reach 10.0.1.2"):
        bench.transport.target(PEER, 1, 1)


async def test_a_long_burst_of_sends_waits_for_no_completion_it_has_not_asked_for(bench: Bench) -> None:
    for _ in range(10 * lanes.BLOCK * lanes.ONLY_BLOCKS):
        bench.send()
    assert len(bench.pairs[0].sent) == 10 * lanes.BLOCK * lanes.ONLY_BLOCKS
    for _ in range(10):
        bench.send(size=4096)


async def test_large_packets_share_their_padding(bench: Bench) -> None:
    for size in (64, 4096, 128, 132):
        bench.send(size=size)
    sent = [p.payload for p in bench.pairs[0].sent]
    assert [len(p) for p in sent] == [64, 4096, 128, 132]
    assert all(p == PROBE + bytes(len(p) - len(PROBE)) for p in sent)
    with pytest.raises(OSError, match="do not fit") as caught:
        bench.send(size=bench.transport.mtu + 4)
    assert caught.value.errno == errno.EMSGSIZE
    for filling in (b"a", b"b"):
        bench.pairs[0].arrive(PROBE + filling * (4096 - len(PROBE)), PEER, 42)
    await settle()
    assert [p[: len(PROBE)] for p, *_ in bench.got] == [PROBE, PROBE]
    # What comes beyond its slot goes where no packet of ours is read from.
    bench.send(size=4096)
    assert bench.pairs[0].sent[-1].payload == PROBE + bytes(4096 - len(PROBE))
    assert bench.troubles == []


async def test_a_full_queue_refuses_and_overwrites_nothing(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench.device.queue, "put", lambda entry: None)
    for _ in range(lanes.BLOCK * lanes.ONLY_BLOCKS):
        bench.send()
    with pytest.raises(OSError, match="send queue is full") as caught:
        bench.send()
    assert caught.value.errno == errno.ENOBUFS
    assert bench.troubles == []


async def test_rxe_has_a_port_for_each_of_its_queue_pairs(rxe: Bench) -> None:
    t = rxe.transport
    assert t.source_port_honoured == "no"
    assert len(rxe.pairs) == LANES
    ports = {t.source_port(p) for p in range(0xC000, 0xC100)}
    assert {57236, 63494} <= ports
    assert len(ports) == LANES
    assert all(t.source_port(p) == p for p in ports)
    rxe.send(63494)
    assert [len(p.sent) for p in rxe.pairs[:3]] == [0, 1, 0]
    # An ACK comes to the queue pair that sent the probe.
    rxe.pairs[1].arrive(PROBE, PEER, 5)
    await settle()
    assert len(rxe.got) == 1
    assert rxe.device.handles[0].label == 0


async def test_where_the_call_is_the_sending_the_stamp_is_from_before_it(rxe: Bench, bench: Bench) -> None:
    left: dict[str, int] = {}
    for name, each in (("rxe", rxe), ("bench", bench)):
        posted = each.pairs[0].post_send

        def post(*what: object, name: str = name, each: Bench = each, posted: Any = posted) -> None:
            left[name] = each.clock()
            posted(*what)

        for pair in each.pairs:
            pair.post_send = post  # type: ignore[method-assign]
    assert rxe.send() < left["rxe"]
    assert bench.send() > left["bench"]


async def test_registered_memory_stays_small(rxe: Bench, bench: Bench) -> None:
    assert lanes.Layout(LANES, 4096).size < 1 << 17
    assert len(rxe.device.memory) < 1 << 17
    assert len(bench.device.memory) < 1 << 17


async def test_send_stamps_come_with_completions(stamped: Bench) -> None:
    assert stamped.transport.clock == "hardware"
    assert stamped.send() == 0
    waiter = Waiter()
    stamped.transport.await_stamp(waiter)
    stamped.pairs[0].arrive(PROBE, PEER, 42)
    await asyncio.sleep(0.05)
    ((*_, rx_ns),) = stamped.got
    assert rx_ns - waiter.ns[0] == stamped.device.step


async def test_stamps_survive_a_wrap_between_sending_and_receiving(stamped: Bench) -> None:
    stamped.device.stamp = FREE_RUNNING - 1500
    stamped.send()
    waiter = Waiter()
    stamped.transport.await_stamp(waiter)
    stamped.pairs[0].arrive(PROBE, PEER, 42)
    await asyncio.sleep(0.05)
    assert stamped.got[0][-1] - waiter.ns[0] == stamped.device.step


@pytest.mark.parametrize(
    "script", [{"stamp_mask": (1 << 17) - 1}, {"stamp_mask": FREE_RUNNING, "stamped_queue": False}]
)
async def test_without_usable_stamps_software_stamps_and_it_is_told(
    benches: list[Bench], script: dict[str, object]
) -> None:
    bench = Bench(clock_khz=1_000_000, **script)
    benches.append(bench)
    bench.start()
    assert bench.transport.clock == "software"
    assert bench.send() > 0


async def test_a_failed_queue_pair_is_told_once_and_refuses_at_once(bench: Bench) -> None:
    bench.pairs[0].error = 2
    for _ in range(3):
        bench.send()
    await settle()
    assert bench.troubles == ["mlx5_0: a send failed with status 2"]
    with pytest.raises(OSError, match="a send failed with status 2"):
        bench.send()


async def test_who_waits_for_a_stamp_of_a_failed_send_is_told_there_is_none(stamped: Bench) -> None:
    stamped.pairs[0].error = 12
    stamped.send()
    waiter = Waiter()
    stamped.transport.await_stamp(waiter)
    await asyncio.sleep(0.05)
    assert waiter.ns == [0]
    assert stamped.troubles


async def test_flushed_receives_mean_a_failed_queue_pair(bench: Bench) -> None:
    bench.pairs[0].arrive(PROBE, PEER, 42, status=5)
    await settle()
    assert bench.troubles == ["mlx5_0: a receive failed with status 5"]
    assert bench.got == []


async def test_an_index_that_moves_and_an_address_that_goes(bench: Bench) -> None:
    bench.device.happen(Happening.PORT)
    await settle()
    assert bench.troubles == []
    bench.script.table = [v2(4, f"::ffff:{OWN}")]
    bench.device.happen(Happening.PORT)
    await settle()
    assert bench.troubles == [f"mlx5_0: its GID ::ffff:{OWN} moved from index 3 to 4"]
    # Until it is opened anew nothing leaves with the old index.
    with pytest.raises(OSError, match="moved from index 3 to 4"):
        bench.send()
    was = (bench.transport.device, bench.transport.gid)
    bench.transport.close()
    bench.transport = bench.open()
    bench.start()
    bench.send()
    assert bench.device.handles[0].index == 4
    assert (bench.transport.device, bench.transport.gid) == was
    bench.script.table = []
    bench.device.happen(Happening.PORT)
    await settle()
    assert bench.troubles[1:] == [f"mlx5_0: its GID ::ffff:{OWN} is gone"]


async def test_a_better_address_does_not_take_an_rnic_from_the_one_it_has(bench: Bench) -> None:
    bench.script.table = [v2(0, "::ffff:10.0.0.200"), v2(3, f"::ffff:{OWN}")]
    bench.device.happen(Happening.PORT)
    await settle()
    assert bench.troubles == []


async def test_a_port_that_goes_down_refuses_and_wants_to_be_opened_anew_when_it_is_back(bench: Bench) -> None:
    bench.script.active = False
    bench.device.happen(Happening.PORT)
    await settle()
    assert bench.troubles == []
    with pytest.raises(OSError, match="mlx5_0 port 1 is down") as caught:
        bench.send()
    assert caught.value.errno == errno.ENETDOWN
    bench.script.active = True
    bench.device.happen(Happening.PORT)
    await settle()
    assert bench.troubles == ["mlx5_0: the port is active again"]


async def test_a_device_opened_while_its_port_is_down_waits_for_it(benches: list[Bench]) -> None:
    bench = Bench(active=False)
    benches.append(bench)
    bench.start()
    with pytest.raises(OSError, match="is down"):
        bench.send()
    bench.script.active = True
    bench.device.happen(Happening.PORT)
    await settle()
    assert bench.troubles == ["mlx5_0: the port is active again"]


@pytest.mark.parametrize(
    ("event", "reason"),
    [(Happening.FATAL, "the device failed or was taken away"), (Happening.QUEUE, "a queue failed")],
)
async def test_fatal_events(bench: Bench, event: Happening, reason: str) -> None:
    bench.device.happen(Happening.OTHER)
    bench.device.happen(event)
    bench.device.happen(event)
    await settle()
    assert bench.troubles == [f"mlx5_0: {reason}"]


async def test_a_device_that_is_gone_without_a_word_is_noticed_by_the_next_send(bench: Bench) -> None:
    bench.script.gone = True
    with pytest.raises(OSError, match="cannot be posted"):
        bench.send()
    await settle()
    assert len(bench.troubles) == 1
    bench.transport.close()
    with pytest.raises(OSError, match="cannot be opened"):
        bench.open()


async def test_a_refused_lock_of_memory_names_the_remedy() -> None:
    with pytest.raises(TransportError, match=r"KiB cannot be locked in memory: raise the limit .LimitMEMLOCK=infinity"):
        Bench(memlock=1 << 12)


async def test_a_device_of_another_link_layer_is_refused() -> None:
    with pytest.raises(TransportError, match="mlx5_0 has no Ethernet port"):
        Bench(ethernet=False)


async def test_a_dead_neighbour_delays_nobody_and_is_asked_again(bench: Bench) -> None:
    bench.resolver.forget(dead=False)
    with pytest.raises(OSError, match=r"neighbour 10.0.0.254 does not answer") as caught:
        bench.send()
    assert caught.value.errno == errno.EHOSTUNREACH
    assert bench.device.handles == []
    assert bench.resolver.nudges == 1
    looks = bench.resolver.looks
    with pytest.raises(OSError, match="does not answer"):
        bench.send()
    assert bench.resolver.looks == looks
    bench.resolver.hop = bench.resolver.hop._replace(mac=b"\2\0\0\0\0\2")
    bench.now += SOON_NS
    bench.send()
    assert bench.troubles == []


async def test_a_neighbour_with_new_hardware_has_new_handles(bench: Bench) -> None:
    bench.send()
    bench.now += RECHECK_NS
    bench.send()
    assert len(bench.device.handles) == 1
    bench.resolver.hop = bench.resolver.hop._replace(mac=b"\2\0\0\0\0\3")
    bench.now += RECHECK_NS
    bench.send()
    assert [h.closed for h in bench.device.handles] == [1, 0]


async def test_without_a_route_the_send_fails_and_the_queue_pair_does_not(bench: Bench) -> None:
    bench.resolver.error = OSError(errno.ENETUNREACH, "no route")
    with pytest.raises(OSError, match="no route"):
        bench.send()
    assert bench.troubles == []
    assert bench.pairs[0].sent == []


async def test_renewed_queue_pairs_do_not_take_what_the_old_ones_left(bench: Bench) -> None:
    old, qkey = bench.pairs[0], bench.transport.qkey
    old.arrive(PROBE, PEER, 42)
    bench.transport.renew()
    await settle()
    assert bench.got == []
    assert old.closed
    new = bench.pairs[-1]
    assert (bench.transport.qpn, bench.transport.qkey != qkey) == (new.qpn, True)
    new.arrive(PROBE, PEER, 42)
    await settle()
    assert len(bench.got) == 1


async def test_trace_packets_have_the_port_that_probes_really_have(rxe: Bench) -> None:
    rxe.transport.send_limited(PEER, 0xC005, 26, 2, b"1234", 99)
    limited = rxe.transport._limited
    assert isinstance(limited, Limited)
    assert limited.sent == [(PEER, rxe.transport.source_port(0xC005), 26, 2, b"1234", 99, rxe.transport.qpn)]


@pytest.mark.parametrize(("really", "legs"), [((1, 2), [1, 2]), ((1, 1), [1]), (None, [])])
async def test_only_those_legs_of_a_bond_are_claimed_that_packets_leave_by(
    benches: list[Bench], caplog: pytest.LogCaptureFixture, really: tuple[int, ...] | None, legs: list[int]
) -> None:
    bench = Bench(members=2, legs=really)
    benches.append(bench)
    bench.start()
    assert (bench.transport.members, list(bench.transport.legs)) == (2, legs)
    assert any("is a bond of 2 members" in r.getMessage() for r in caplog.records) == (len(legs) < 2)
    for sport in range(0xC000, 0xC008):
        bench.send(sport)
        assert bench.transport.source_port(sport) == sport
    assert [len(p.sent) for p in bench.pairs] == [4, 4]


async def test_a_queue_without_channel_is_polled_by_a_timer_and_that_is_told(stamped: Bench, bench: Bench) -> None:
    assert (stamped.transport.polled, bench.transport.polled) == (True, False)
    stamped.transport.spin()
    assert not stamped.transport.polled


async def test_who_spins_is_not_woken(bench: Bench, stamped: Bench) -> None:
    for each in (bench, stamped):
        each.now += 1
        each.transport.spin()
        arms = each.device.queue.arms
        each.pairs[0].arrive(PROBE, PEER, 42)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert len(each.got) == 1
        each.pairs[0].arrive(PROBE, PEER, 42)
        await settle()
        assert len(each.got) == 2
        assert each.device.queue.arms == arms


async def test_an_ack_that_comes_while_the_one_before_is_handled_needs_no_wake_up(bench: Bench) -> None:
    queue, pair = bench.device.queue, bench.pairs[0]
    await settle()
    arms, came = queue.arms, [1]

    def one_more() -> None:
        if came:
            came.pop()
            pair.arrive(PROBE, PEER, 42)
            queue.armed = False  # nobody is told of what came before

    queue.before_arming = one_more
    pair.arrive(PROBE, PEER, 42)
    await settle()
    assert len(bench.got) == 2
    assert queue.arms == arms + 1
    assert queue.armed
    pair.arrive(PROBE, PEER, 42)
    await settle()
    assert len(bench.got) == 3
