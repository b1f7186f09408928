"""Whatever bytes come: the decoders end in a message or in their own exception, in bounded memory."""

from __future__ import annotations

import tracemalloc
import zlib
from typing import get_args

import msgspec
import pytest
from fuzzing import anything, damaged, fuzz, messages, words
from hypothesis import given
from hypothesis import strategies as st

from pingmesh import topics
from pingmesh.messages import (
    MAX_COLUMN,
    MAX_MESSAGE,
    PROBER_COLUMNS,
    RESPONDER_COLUMNS,
    AnyMessage,
    BadMessageError,
    Message,
    Report,
    decode,
    encode,
    pack_columns,
    unpack_columns,
)

KINDS: tuple[type[Message], ...] = get_args(AnyMessage)
COLUMNS = st.sampled_from([PROBER_COLUMNS, RESPONDER_COLUMNS, "H", "I", "hI"])
well_formed = st.sampled_from(KINDS).flatmap(lambda kind: messages(kind, "h1"))


def take(payload: bytes, kind: type[Message]) -> Message | None:
    try:
        return decode(payload, kind, "h1", "lab")
    except BadMessageError as error:
        refused = error
    assert refused.kind == kind.__name__
    assert refused.reason
    return None


@fuzz(300)
@given(
    st.one_of(st.binary(max_size=300), anything.map(msgspec.msgpack.encode), damaged(well_formed)),
    st.sampled_from(KINDS),
)
def test_any_payload(payload: bytes, kind: type[Message]) -> None:
    m = take(payload, kind)
    assert m is None or (m.host, m.cluster, m.version[:1]) == ("h1", "lab", "1")


@fuzz(300)
@given(well_formed)
def test_well_formed_payloads_are_of_their_kind_or_of_none(payload: bytes) -> None:
    kinds = [m for m in (take(payload, kind) for kind in KINDS) if m is not None]
    assert len(kinds) <= 1
    for m in kinds:
        again = decode(encode(m), type(m))
        assert again == m or "nan" in repr(m)


@fuzz(300)
@given(
    COLUMNS,
    st.one_of(
        st.binary(max_size=200),
        st.binary(max_size=200).map(zlib.compress),
        damaged(st.binary(max_size=200).map(zlib.compress)),
        st.binary(max_size=80).map(lambda b: zlib.compress(b) + b),
    ),
)
def test_any_columns(types: str, data: bytes) -> None:
    try:
        columns = unpack_columns(types, data)
    except BadMessageError:
        return
    assert len({len(c) for c in columns}) == 1
    assert unpack_columns(types, pack_columns(types, columns)) == columns


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("payload", [b"\x91" * 100_000, b"\x81\xa1a" * 100_000, b"\xdd\xff\xff\xff\xff", b"\xdf" * 9])
def test_deep_and_boastful_payloads(payload: bytes, kind: type[Message]) -> None:
    assert take(payload, kind) is None


def test_too_large_a_payload_is_not_even_looked_at() -> None:
    report = encode(Report(cluster="lab", host="h1", boot=1, seq=1, now_ns=1, until_ns=1, responder=bytes(MAX_MESSAGE)))
    with pytest.raises(BadMessageError, match="larger than 4 MiB"):
        decode(report, Report)


@pytest.mark.parametrize("size", [MAX_COLUMN + 1, 1 << 26])
def test_a_decompression_bomb_takes_no_memory(size: int) -> None:
    packer = zlib.compressobj(9)
    block = bytes(1 << 20)
    bomb = b"".join(packer.compress(block[: min(len(block), size - at)]) for at in range(0, size, len(block)))
    bomb += packer.flush()
    tracemalloc.start()
    with pytest.raises(BadMessageError, match="columns"):
        unpack_columns(PROBER_COLUMNS, bomb)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * MAX_COLUMN


@fuzz(300)
@given(
    st.text(max_size=60)
    | st.lists(words | st.sampled_from(["pingmesh", "v1", "v2", "+", "#", "$SYS", "\0"]), max_size=8).map("/".join)
    | st.lists(words, min_size=3, max_size=4).map(lambda parts: "/".join(["pingmesh", "v1", *parts])),
    st.booleans(),
)
def test_any_topic(text: str, retained: bool) -> None:
    try:
        topic = topics.parse(text, retained)
    except topics.BadTopicError:
        return
    assert str(topic) == text
    assert topic.retained is retained
