"""Competing traffic of a congested link: keeps a queue filled to a depth without ever overfilling it.

The socket's send buffer is the clock. A datagram counts against it until the queue has sent it, so a sender that
blocks on a full buffer holds the queue between half and all of `depth` bytes whatever the rate of the link and
however late the process runs; the packets of others are delayed by that much and none is dropped.
"""

from __future__ import annotations

import argparse
import ipaddress
import socket
import time

DISCARD_PORT = 9
PAYLOAD = 3600
"""The largest payload whose packet costs the kernel one 4 KiB buffer."""
_TRUESIZE = 4352
"""What such a packet counts against the send buffer: the 4 KiB buffer and its descriptor."""


def send_forever(address: str, depth: int) -> None:
    """Keep about `depth` bytes queued towards an address until killed."""
    family = socket.AF_INET6 if ipaddress.ip_address(address).version == 6 else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        packets = max(2, round(depth / PAYLOAD))
        # The kernel doubles the value that it is given.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, packets * _TRUESIZE // 2)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_DONTROUTE, 1)
        payload = bytes(PAYLOAD)
        while True:
            try:
                sock.sendto(payload, (address, DISCARD_PORT))
            except OSError:
                # The port is down or its neighbour does not resolve yet.
                time.sleep(0.1)


def main() -> None:
    """`python competitor.py ADDRESS DEPTH`: a file that needs the standard library only, so that it starts at once."""
    parser = argparse.ArgumentParser(description="Keep a queue filled.")
    parser.add_argument("address")
    parser.add_argument("depth", type=int, help="bytes")
    args = parser.parse_args()
    send_forever(args.address, args.depth)


if __name__ == "__main__":
    main()
