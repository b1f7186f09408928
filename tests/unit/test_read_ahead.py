"""A socket that reads ahead gives the same bytes, and says what it holds."""

from __future__ import annotations

import socket

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pingmesh.read_ahead import AHEAD, ReadAheadSocket


def take(reader: ReadAheadSocket, sizes: list[int], total: int) -> bytes:
    out = b""
    turn = 0
    while len(out) < total:
        out += reader.recv(sizes[turn % len(sizes)])
        turn += 1
    return out


@settings(deadline=None)
@given(st.lists(st.binary(max_size=300), max_size=8), st.lists(st.integers(1, 400), min_size=1, max_size=4))
def test_the_bytes_are_the_same_in_whatever_portions_they_are_taken(parts: list[bytes], sizes: list[int]) -> None:
    a, b = socket.socketpair()
    with a, b:
        reader = ReadAheadSocket(b)
        b.setblocking(False)
        for part in parts:
            a.sendall(part)
            assert take(reader, sizes, len(part))[: len(part)] == part or not part
        with pytest.raises(BlockingIOError):
            reader.recv(1)


def test_what_is_pending_comes_at_once() -> None:
    a, b = socket.socketpair()
    with a, b:
        b.setblocking(False)
        reader = ReadAheadSocket(b)
        assert reader.pending() == 0
        a.sendall(b"abcdef")
        assert reader.recv(1) == b"a"
        assert reader.pending() == 5
        assert reader.recv(100) == b"bcdef"
        assert reader.pending() == 0
        a.close()
        assert reader.recv(1) == b""


def test_the_rest_of_a_packet_brings_no_more_with_it() -> None:
    a, b = socket.socketpair()
    with a, b:
        b.setblocking(False)
        reader = ReadAheadSocket(b)
        a.sendall(b"x" * AHEAD)
        for _ in range(AHEAD):
            reader.recv(1)
        a.sendall(b"rest, next")
        assert reader.recv(4) == b"rest"
        assert reader.pending() == 0
        assert reader.fileno() == b.fileno()
