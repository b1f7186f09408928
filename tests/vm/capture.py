"""Packets of one interface, seen in Python and decoded by tshark."""

from __future__ import annotations

import json
import shutil
import socket
import struct
import subprocess
from pathlib import Path
from typing import Any

_ALL_PROTOCOLS = 3
_RAW_IP = 101
_UDP = 17


class Sniffer:
    """What crosses an interface, from its IP header on. Made in the interface's namespace."""

    def __init__(self, interface: str) -> None:
        self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(_ALL_PROTOCOLS))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
        self._socket.bind((interface, _ALL_PROTOCOLS))
        self._socket.setblocking(False)

    def close(self) -> None:
        self._socket.close()

    def packets(self) -> list[bytes]:
        """UDP over IPv4 that came since the last call."""
        found: list[bytes] = []
        while True:
            try:
                packet = self._socket.recv(9000)
            except BlockingIOError:
                return found
            if packet[0] >> 4 == 4 and packet[9] == _UDP:
                found.append(packet)


def write_pcap(path: Path, packets: list[bytes]) -> None:
    data = struct.pack("<IHHiIII", 0xA1B2C3D4, 2, 4, 0, 0, 65535, _RAW_IP)
    for p in packets:
        data += struct.pack("<IIII", 0, 0, len(p), len(p)) + p
    path.write_bytes(data)


def decode(pcap: Path) -> list[dict[str, Any]]:
    """The layers of each packet by name, as tshark sees them, each flattened to {field: value}."""
    tshark = shutil.which("tshark")
    assert tshark, "tools/vm-setup.sh installs tshark"
    command = [tshark, "-r", str(pcap), "-n", "-T", "json", "--no-duplicate-keys"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [
        {name: _flat(layer) for name, layer in packet["_source"]["layers"].items() if isinstance(layer, dict)}
        for packet in json.loads(done.stdout)
    ]


def _flat(layer: dict[str, Any]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, value in layer.items():
        if isinstance(value, dict):
            out |= _flat(value)
        else:
            out[name] = value
    return out
