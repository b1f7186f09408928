from __future__ import annotations

import ipaddress
import socket
import struct

from fuzzing import fuzz
from hypothesis import given
from hypothesis import strategies as st

from agent import icmp
from agent.icmp import Quoted
from agent.trace_queue import TraceFlow
from agent.tracer import OVERHEAD, DeviceTracer
from agent.tracing import Tracing
from pingmesh.messages import TracedPath

V4, V6 = socket.AF_INET, socket.AF_INET6


def answer4(q: Quoted, *, outer_options: int = 0, inner_options: int = 0, kind: int = 11, code: int = 0) -> bytes:
    def header(protocol: int, source: str, target: str, options: int) -> bytes:
        fixed = struct.pack(">BBHHHBBH", 0x45 + options, 0, 0, 0, 0x4000, 1, protocol, 0)
        return fixed + socket.inet_aton(source) + socket.inet_aton(target) + bytes(4 * options)

    udp = struct.pack(">HHHH", q.sport, q.dport, q.length, 0)
    quoted = header(17, q.source, q.target, inner_options) + udp
    return header(1, q.router, q.source, outer_options) + struct.pack(">BBHI", kind, code, 0, 0) + quoted


def answer6(q: Quoted, kind: int = 3, code: int = 0, next_header: int = 17) -> bytes:
    udp = struct.pack(">HHHH", q.sport, q.dport, q.length, 0)
    ip = struct.pack(">IHBB", 6 << 28, q.length, next_header, 0)
    ends = socket.inet_pton(V6, q.source) + socket.inet_pton(V6, q.target)
    return struct.pack(">BBHI", kind, code, 0, 0) + ip + ends + udp


u16 = st.integers(0, 0xFFFF)
quoted4 = st.builds(Quoted, *[st.ip_addresses(v=4).map(str)] * 3, u16, u16, u16)
quoted6 = st.builds(Quoted, *[st.ip_addresses(v=6).map(str)] * 3, u16, u16, u16)


@given(quoted4, st.integers(0, 10), st.integers(0, 10))
def test_what_a_router_quotes_is_read_back(q: Quoted, outer: int, inner: int) -> None:
    assert icmp.parse(V4, answer4(q, outer_options=outer, inner_options=inner), q.router) == q


@given(quoted6)
def test_what_an_ipv6_router_quotes_is_read_back(q: Quoted) -> None:
    assert icmp.parse(V6, answer6(q), q.router) == q


@fuzz(300)
@given(st.sampled_from([V4, V6]), st.binary(max_size=200))
def test_any_bytes_are_survived(family: int, packet: bytes) -> None:
    got = icmp.parse(family, packet, "fe80::1%eth0")
    if got is not None:
        ipaddress.ip_address(got.source)


@fuzz(300)
@given(quoted4, st.data())
def test_a_damaged_answer_is_survived(q: Quoted, data: st.DataObject) -> None:
    packet = bytearray(answer4(q))
    at = data.draw(st.integers(0, len(packet) - 1))
    packet[at] = data.draw(st.integers(0, 255))
    icmp.parse(V4, bytes(packet[: data.draw(st.integers(0, len(packet)))]), q.router)


Q4 = Quoted("10.0.0.1", "10.1.0.2", "10.2.0.2", 50000, 4791, 40)
Q6 = Quoted("fd00::1", "fd00::2", "fd00::3", 50000, 4791, 40)


def test_other_errors_are_no_answers() -> None:
    assert icmp.parse(V4, answer4(Q4, kind=3, code=3), Q4.router) is None
    assert icmp.parse(V4, answer4(Q4, code=1), Q4.router) is None, "reassembly time exceeded"
    assert icmp.parse(V6, answer6(Q6, kind=1), Q6.router) is None
    assert icmp.parse(V6, answer6(Q6, next_header=58), Q6.router) is None


def test_every_shortened_answer_is_no_answer() -> None:
    for family, packet in ((V4, answer4(Q4)), (V6, answer6(Q6))):
        assert all(icmp.parse(family, packet[:n], "10.0.0.1") is None for n in range(len(packet)))


def test_a_later_fragment_has_no_ports() -> None:
    packet = bytearray(answer4(Q4))
    packet[28 + 6 : 28 + 8] = b"\x20\x07"
    assert icmp.parse(V4, bytes(packet), Q4.router) is None


class Heard:
    """The socket, with what is in it."""

    def __init__(self, packets: list[bytes], sender: str) -> None:
        self._packets = iter(packets)
        self._sender = sender

    def recvfrom(self, size: int) -> tuple[bytes, tuple[str, int]]:
        packet = next(self._packets, None)
        if packet is None:
            raise BlockingIOError
        return packet[:size], (self._sender, 0)


class Sender:
    """Keeps the length of the UDP packets that it was given."""

    def __init__(self, address: str) -> None:
        self.device = "rnic0"
        self.address = address
        self.lengths: list[int] = []

    def send_limited(self, address: str, sport: int, dscp: int, ttl: int, payload: bytes, qpn: int = 0) -> None:
        self.lengths.append(OVERHEAD + len(payload))


@fuzz(300)
@given(st.sampled_from([V4, V6]), st.lists(st.binary(max_size=120), max_size=6), st.data())
def test_other_packets_are_counted_and_the_answer_still_found(
    family: int, noise: list[bytes], data: st.DataObject
) -> None:
    local, remote, router = ("10.0.0.1", "10.0.0.2", "10.0.0.3") if family == V4 else ("fd00::1", "fd00::2", "fd00::3")
    paths: list[TracedPath] = []
    sender = Sender(local)
    tracing = Tracing(list, lambda path, urgent: paths.append(path), lambda: 5)
    tracer = DeviceTracer(sender, lambda path, urgent: paths.append(path), lambda: 5)
    tracer.bucket.tokens = tracer.bucket.quiet = 100.0
    tracer.set_flows([TraceFlow((0, 1, 1, 0), "rnic0", remote, 50000, 26, 7, 2)])
    tracer.step()
    (length,) = sender.lengths
    right = Quoted(router, local, remote, 50000, 4791, length)
    build = answer4 if family == V4 else answer6
    near = st.sampled_from(["10.0.0.9", "10.0.0.1"] if family == V4 else ["fd00::9", "fd00::1"])
    wrong = [
        build(Quoted(router, data.draw(near), remote, data.draw(u16), data.draw(u16), data.draw(u16)))
        for _ in range(data.draw(st.integers(0, 3)))
    ]
    packets = data.draw(st.permutations([*noise, *wrong]))
    tracing._read(Heard(packets, router), tracer)  # type: ignore[arg-type]
    assert (tracer.unmatched, tracer.answered, paths) == (len(packets), 0, [])
    tracing._read(Heard([build(right)], router), tracer)  # type: ignore[arg-type]
    assert [p.hops for p in paths] == [[(2, router)]]
