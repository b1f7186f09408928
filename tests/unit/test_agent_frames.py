"""RoCEv2 UD frames and their ICRC, against a straightforward reading of the specification."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import struct
import time

import pytest
from fuzzing import fuzz
from hypothesis import given
from hypothesis import strategies as st

from agent import frames
from agent.transport import sockets
from agent.transport.base import address_of, gid_of
from agent.transport.soft import SoftTransport

A4, B4 = (ipaddress.ip_address(a).packed for a in ("10.1.1.2", "10.2.1.2"))
A6, B6 = (ipaddress.ip_address(a).packed for a in ("fd00:1::2", "fd00:2::2"))


def slow_crc(data: bytes) -> int:
    """CRC-32 bit by bit."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0xEDB88320 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def slow_icrc(packet: bytes) -> bytes:
    """The ICRC of an IP packet, with each masked field as the annex lists it."""
    p = bytearray(packet[:-4])
    if p[0] >> 4 == 4:
        p[1] = 0xFF  # TOS
        p[8] = 0xFF  # TTL
        p[10:12] = b"\xff\xff"  # header checksum
        udp = 20
    else:
        p[0:4] = b"\x6f\xff\xff\xff"  # traffic class, flow label
        p[7] = 0xFF  # hop limit
        udp = 40
    p[udp + 6 : udp + 8] = b"\xff\xff"  # UDP checksum
    p[udp + 8 + 4] = 0xFF  # BTH resv8a
    return struct.pack("<I", slow_crc(b"\xff" * 8 + bytes(p)))


def ip_packet(version: int, frame: bytes, *, ident: int = 0, tos: int = 104, ttl: int = 61) -> bytes:
    if version == 4:
        head = struct.pack("!BBHHHBBH4s4s", 0x45, tos, 20 + len(frame), ident, 0x4000, ttl, 17, 0x1234, A4, B4)
    else:
        head = struct.pack("!IHBB16s16s", 6 << 28 | tos << 20 | 0xABCDE, len(frame), 17, ttl, A6, B6)
    return head + frame


def make_frame(version: int, payload: bytes, *, qpn: int = 0x1234, qkey: int = 7, ident: int = 0) -> bytes:
    length = frames.HEAD + len(payload) + frames.TAIL
    prefix = frames.prefix4(A4, B4, 20 + length, ident) if version == 4 else frames.prefix6(A6, B6, length)
    head, crc = frames.head(prefix, length, 0xC123, qpn, qkey, 0x55)
    frame = bytearray(head + payload + bytes(frames.TAIL))
    frames.put_icrc(frame, memoryview(frame), crc)
    if version == 6:
        frames.add_checksum6(frame, frames.pseudo6(A6, B6))
    return bytes(frame)


def test_the_slow_icrc_agrees_with_an_rnic() -> None:
    """A congestion notification as a ConnectX-4 Lx put it on the wire: another opcode, the same ICRC rule."""
    ip = struct.pack("!BBHHHBBHII", 0x45, 0xC2, 60, 0x718C, 0x4000, 64, 17, 0x9161, 0x0A001101, 0x0A001201)
    bth = struct.pack("!BBHII", 0x81, 0, 0xFFFF, 0x4000_0118, 0)
    packet = ip + struct.pack("!HHHH", 0, 4791, 40, 0) + bth + bytes(16) + bytes.fromhex("82fd002a")
    assert slow_icrc(packet) == packet[-4:]


def test_the_headers_of_a_known_frame() -> None:
    frame = make_frame(4, b"pingmesh")
    assert frame[:28].hex() == "c12312b7002800006400ffff00001234000000000000000700000055"
    assert len(frame) == 40


@given(st.sampled_from([4, 6]), st.binary(max_size=64).map(lambda b: b + bytes(-len(b) % 4)), st.integers(0, 255))
def test_icrc_is_what_the_annex_says_and_routers_do_not_change_it(version: int, payload: bytes, hops: int) -> None:
    frame = make_frame(version, payload)
    for ttl, tos in ((64, 104), (64 - hops % 64, hops)):
        assert frame[-4:] == slow_icrc(ip_packet(version, frame, ttl=ttl, tos=tos))


@given(st.binary(max_size=200).map(lambda b: b + bytes(-len(b) % 4)))
def test_udp_checksum_over_ipv6(payload: bytes) -> None:
    frame = make_frame(6, payload)
    pseudo = A6 + B6 + struct.pack("!II", len(frame), 17)
    total = sum(struct.unpack(f"!{(len(pseudo) + len(frame)) // 2}H", pseudo + frame))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    assert total == 0xFFFF
    assert frame[6:8] != b"\0\0"


def test_gids() -> None:
    assert address_of(gid_of("10.1.2.3")) == "10.1.2.3"
    assert address_of("0000:0000:0000:0000:0000:ffff:0a01:0203") == "10.1.2.3"
    assert address_of(gid_of("fd00::1")) == "fd00::1"
    with pytest.raises(ValueError, match="gid"):
        address_of("no gid")


# ---------------------------------------------------------------- what the soft transport does with a packet


class Sink:
    def __init__(self) -> None:
        self.packets: list[tuple[bytes, str, int, int, int, int]] = []

    def receive(self, payload: memoryview, source: str, qpn: int, sport: int, dscp: int, ttl: int, rx_ns: int) -> None:
        self.packets.append((bytes(payload), source, qpn, sport, dscp, ttl))


class Loop:
    """As much of an event loop as a transport that only receives wants."""

    def add_reader(self, *args: object) -> None: ...

    def remove_reader(self, *args: object) -> None: ...


def transport(monkeypatch: pytest.MonkeyPatch, version: int) -> tuple[SoftTransport, Sink]:
    """A transport at B whose sockets are ordinary ones: no privilege needed."""
    for name in ("open_raw", "open_quiet"):
        monkeypatch.setattr(sockets, name, lambda *_: socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
    monkeypatch.setattr(sockets, "mtu_of", lambda _: 4200)
    made = SoftTransport("eth0", "10.2.1.2" if version == 4 else "fd00:2::2")
    made.qpn, made.qkey = 0x1234, 7
    sink = Sink()
    made.start(Loop(), sink)  # type: ignore[arg-type]
    return made, sink


def feed(made: SoftTransport, version: int, packet: bytes) -> None:
    """As from the raw socket: with the IP header over IPv4, without over IPv6."""
    data = packet if version == 4 else packet[40:]
    made._buffer[: len(data)] = data
    made.accept(len(data), "10.1.1.2" if version == 4 else "fd00:1::2", 1, 104, 61)


@pytest.mark.parametrize("version", [4, 6])
def test_good_packets_are_delivered_again_and_again(monkeypatch: pytest.MonkeyPatch, version: int) -> None:
    made, sink = transport(monkeypatch, version)
    payloads = [bytes([i]) * 64 for i in range(5)] + [bytes(4096)]
    for payload in payloads:
        feed(made, version, ip_packet(version, make_frame(version, payload)))
    source = "10.1.1.2" if version == 4 else "fd00:1::2"
    assert sink.packets == [(payload, source, 0x55, 0xC123, 26, 61) for payload in payloads]
    assert made.bad_frames == made.foreign == 0
    made.close()


def test_packets_of_rnics_that_count_their_ip_ids_up(monkeypatch: pytest.MonkeyPatch) -> None:
    made, sink = transport(monkeypatch, 4)
    for ident in range(1, 50):
        feed(made, 4, ip_packet(4, make_frame(4, bytes(64), ident=ident), ident=ident))
    assert len(sink.packets) == 49
    assert not made._opened
    made.close()


def test_padded_payloads_of_others_lose_their_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    made, sink = transport(monkeypatch, 4)
    frame = bytearray(make_frame(4, b"hello\0\0\0"))
    frame[9] = 3 << 4
    frame[-4:] = slow_icrc(ip_packet(4, bytes(frame)))
    feed(made, 4, ip_packet(4, bytes(frame)))
    assert [p[0] for p in sink.packets] == [b"hello"]
    made.close()


@pytest.mark.parametrize("version", [4, 6])
def test_any_flipped_bit_is_noticed(monkeypatch: pytest.MonkeyPatch, version: int) -> None:
    made, sink = transport(monkeypatch, version)
    start = 20 if version == 4 else 40
    good = ip_packet(version, make_frame(version, bytes(range(64))))
    feed(made, version, good)
    free = {start + 6, start + 7, start + 12}  # the UDP checksum and resv8a are not covered
    for position in range(start, len(good)):
        flipped = bytearray(good)
        flipped[position] ^= 0x10
        feed(made, version, bytes(flipped))
        if position in free:
            sink.packets.pop()
    assert len(sink.packets) == 1
    assert made.bad_frames == len(good) - start - len(free)
    made.close()


@pytest.mark.parametrize(("qpn", "qkey"), [(0x1235, 7), (0x1234, 8)])
def test_packets_for_another_queue_pair_are_foreign(monkeypatch: pytest.MonkeyPatch, qpn: int, qkey: int) -> None:
    made, sink = transport(monkeypatch, 4)
    for _ in range(3):
        feed(made, 4, ip_packet(4, make_frame(4, bytes(64), qpn=qpn, qkey=qkey)))
    assert (made.foreign, made.bad_frames, sink.packets) == (3, 0, [])
    made.close()


def test_a_renewed_queue_pair_forgets_what_it_took_for_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    made, sink = transport(monkeypatch, 4)
    packet = ip_packet(4, make_frame(4, bytes(64)))
    feed(made, 4, packet)
    made.renew()
    feed(made, 4, packet)
    assert (len(sink.packets), made.foreign) == (1, 1)
    made.close()


@pytest.mark.parametrize("version", [4, 6])
@fuzz(400)
@given(data=st.data())
def test_any_bytes_are_counted_and_no_more(monkeypatch: pytest.MonkeyPatch, version: int, data: st.DataObject) -> None:
    made, sink = transport(monkeypatch, version)
    good = ip_packet(version, make_frame(version, bytes(64)))
    feed(made, version, good)
    start = 20 if version == 4 else 40
    packets = [
        data.draw(st.binary(max_size=300)),
        good[: data.draw(st.integers(0, len(good) - 1))],
        good[: start + 28] + data.draw(st.binary(max_size=200)),
        good + data.draw(st.binary(min_size=1, max_size=8)),
    ]
    for packet in packets:
        padded = packet if version == 4 else bytes(40) + packet if packet == packets[0] else packet.ljust(40, b"\0")
        feed(made, version, padded)
    assert len(sink.packets) + made.bad_frames + made.foreign == 1 + len(packets)
    assert sink.packets[0][0] == bytes(64)
    made.close()


def test_the_memory_of_headers_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    made, sink = transport(monkeypatch, 4)
    for ttl in range(1, 256):
        for tos in range(0, 256, 4):
            feed(made, 4, ip_packet(4, make_frame(4, bytes(8)), ttl=ttl, tos=tos))
    assert len(made._opened) <= 4096
    assert len(sink.packets) == 255 * 64
    made.close()


def test_a_target_of_another_family_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    made, _ = transport(monkeypatch, 4)
    with pytest.raises(ValueError, match="IPv4"):
        made.target("fd00::1", 1, 1)
    made.close()


async def test_stamps_that_never_come_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    made, _ = transport(monkeypatch, 4)
    got: list[int] = []

    class Waiter:
        def stamped(self, ns: int) -> None:
            got.append(ns)

    made.start(asyncio.get_running_loop(), Sink())
    target = made.target("127.0.0.1", 5, 5)
    made._socket.setblocking(False)
    target.sockaddr = ("127.0.0.1", 9)
    before = time.time_ns()
    assert made.send(target, 0xC000, 0, bytes(64), 64, True) == 0
    made.await_stamp(Waiter())
    await asyncio.sleep(0.05)
    assert len(got) == 1
    assert before <= got[0] <= time.time_ns()
    made.close()
