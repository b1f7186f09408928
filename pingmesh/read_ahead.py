"""A socket that reads ahead: what its owner takes byte by byte comes from the kernel in one piece."""

from __future__ import annotations

import ssl
from typing import Any

AHEAD = 1 << 16


class ReadAheadSocket:
    """A connected, non-blocking socket for an MQTT client that asks for one byte, then for a length, then for the rest.

    `pending` tells how much is here already, as that of an SSL socket does: whoever waits for the socket to become
    readable must first take that. Only a call for one byte reads ahead. Everything else is the socket's own.
    """

    def __init__(self, sock: Any) -> None:
        self._sock = sock
        self._buffer = b""
        self._at = 0

    def recv(self, size: int) -> bytes:
        """Up to `size` bytes. Raises BlockingIOError or ssl.SSLWantReadError if there are none now."""
        if self._at >= len(self._buffer):
            if size > 1:
                # The rest of a packet that was cut: with more than that there would be no end to what is pending.
                data: bytes = self._sock.recv(size)
                return data
            self._buffer, self._at = self._sock.recv(AHEAD), 0
        start = self._at
        self._at = start + size
        return self._buffer[start : self._at]

    def pending(self) -> int:
        """Bytes that `recv` can give at once."""
        ahead = max(0, len(self._buffer) - self._at)
        return ahead or (self._sock.pending() if isinstance(self._sock, ssl.SSLSocket) else 0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)
