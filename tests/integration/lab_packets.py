"""Packets of the lab's own tests, run on a node: `python lab_packets.py trace|echo|flows ...`; prints JSON.

It knows nothing of pingmesh, so that the fabric is judged by something else than what is built on it.
"""

from __future__ import annotations

import json
import select
import socket
import struct
import sys
import time

PORT = 4791


def trace(source: str, target: str, ttl: int, first: int, count: int, gap: float) -> list[list[object]]:
    """Send one datagram from each source port with a TTL; [port, address that answered] of those answered."""
    six = ":" in target
    family = socket.AF_INET6 if six else socket.AF_INET
    icmp = socket.socket(family, socket.SOCK_RAW, socket.IPPROTO_ICMPV6 if six else socket.IPPROTO_ICMP)
    icmp.setblocking(False)
    answers: dict[int, str] = {}

    def collect(seconds: float) -> None:
        end = time.monotonic() + seconds
        while len(answers) < count and select.select([icmp], [], [], max(0.0, end - time.monotonic()))[0]:
            packet, address = icmp.recvfrom(2048)
            message = packet if six else packet[(packet[0] & 15) * 4 :]
            if message[0] != (3 if six else 11):  # time exceeded
                continue
            quoted = message[8:]
            udp = quoted[40:] if six else quoted[(quoted[0] & 15) * 4 :]
            answers[struct.unpack("!H", udp[:2])[0]] = address[0]

    for port in range(first, first + count):
        with socket.socket(family, socket.SOCK_DGRAM) as s:
            s.bind((source, port))
            if six:
                s.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_UNICAST_HOPS, ttl)
            else:
                s.setsockopt(socket.IPPROTO_IP, socket.IP_TTL, ttl)
            s.sendto(b"x" * 32, (target, PORT))
        collect(gap)
    collect(0.3)
    return [[port, address] for port, address in answers.items()]


def echo(address: str) -> None:
    """Send every datagram back to where it came from, until standard input ends."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as s:
        s.bind((address, PORT))
        print("ready", flush=True)
        while (ready := select.select([s, sys.stdin], [], [])[0]) == [s]:
            data, peer = s.recvfrom(2048)
            s.sendto(data, peer)
        assert sys.stdin in ready


def flows(source: str, target: str, first: int, count: int) -> int:
    """How many of `count` flows get their datagram back within half a second."""
    sockets = []
    for port in range(first, first + count):
        s = socket.socket(socket.AF_INET6 if ":" in target else socket.AF_INET, socket.SOCK_DGRAM)
        s.bind((source, port))
        s.sendto(b"x", (target, PORT))
        sockets.append(s)
    waiting = set(sockets)
    end = time.monotonic() + 0.5
    while waiting and (ready := select.select(list(waiting), [], [], max(0.0, end - time.monotonic()))[0]):
        for s in ready:
            s.recv(2048)
            waiting.discard(s)
    for s in sockets:
        s.close()
    return count - len(waiting)


def main(what: str, *args: str) -> None:
    if what == "echo":
        echo(*args)
    elif what == "flows":
        source, target, first, count = args
        print(json.dumps(flows(source, target, int(first), int(count))))
    else:
        source, target, ttl, first, count, gap = args
        print(json.dumps(trace(source, target, int(ttl), int(first), int(count), float(gap))))


if __name__ == "__main__":
    main(*sys.argv[1:])
