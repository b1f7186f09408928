"""What the fuzz tests share: how long they run, and inputs that get past the first check.

The environment's PINGMESH_FUZZ_EXAMPLES sets the number of examples of every fuzz test; `benchmarks/fuzz.py` runs
them for a minute each with it.
"""

from __future__ import annotations

import os
from typing import Any

import msgspec
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from pingmesh.messages import Message


def examples(default: int) -> int:
    """How many examples a fuzz test tries."""
    return int(os.environ.get("PINGMESH_FUZZ_EXAMPLES", default))


def fuzz(default: int) -> settings:
    """Settings of a fuzz test: its length; no example is too slow, for other things run beside it."""
    return settings(max_examples=examples(default), deadline=None, suppress_health_check=list(HealthCheck))


words = st.text(max_size=6) | st.sampled_from(
    ["h1", "h2", "rnic0", "h1/rnic0", "h2/rnic0", "1.0", "drop", "link", "leaf1->spine1", "::ffff:10.0.0.2", "lab", ""]
)
integers = st.integers(0, 8) | st.integers(-(2**63), 2**64 - 1) | st.integers(0, 2**32 - 1)
floats = st.floats() | st.sampled_from([0.0, 1.0, 0.5, 100.0])
_leaves = st.none() | st.booleans() | integers | floats | words | st.binary(max_size=4)
anything: st.SearchStrategy[Any] = st.recursive(
    _leaves, lambda x: st.lists(x, max_size=3) | st.dictionaries(words, x, max_size=3), max_leaves=8
)


def values_of(info: msgspec.inspect.Type) -> st.SearchStrategy[Any]:
    """Plain values that fit a type, so that they get past the decoder."""
    i = msgspec.inspect
    match info:
        case i.IntType():
            return integers
        case i.FloatType():
            return floats
        case i.StrType():
            return words
        case i.BoolType():
            return st.booleans()
        case i.BytesType():
            return st.binary(max_size=9)
        case i.NoneType():
            return st.none()
        case i.LiteralType(values=values):
            return st.sampled_from(values)
        case i.ListType(item_type=item):
            return st.lists(values_of(item), max_size=4)
        case i.TupleType(item_types=items):
            return st.tuples(*map(values_of, items))
        case i.DictType(key_type=key, value_type=value):
            return st.dictionaries(values_of(key), values_of(value), max_size=3)
        case i.UnionType(types=types):
            return st.one_of(*map(values_of, types))
        case i.StructType(fields=fields, array_like=array_like):
            values = {f.encode_name: values_of(f.type) for f in fields}
            return st.tuples(*values.values()) if array_like else st.fixed_dictionaries(values)
    return anything


def messages(kind: type[Message], host: str, cluster: str = "lab") -> st.SearchStrategy[bytes]:
    """MessagePack of well-formed messages of a kind, full of nonsense."""
    info = msgspec.inspect.type_info(kind)
    assert isinstance(info, msgspec.inspect.StructType)
    fields = {f.encode_name: values_of(f.type) for f in info.fields}
    fixed = {
        "type": st.just(kind.__struct_config__.tag),
        "version": st.sampled_from(["1.0", "1.7"]),
        "cluster": st.just(cluster),
        "host": st.just(host),
    }
    return st.fixed_dictionaries(fields | fixed).map(msgspec.msgpack.encode)


@st.composite
def damaged(draw: st.DrawFn, good: st.SearchStrategy[bytes]) -> bytes:
    """Good bytes with a few of them exchanged, put in, cut out or cut off."""
    data = bytearray(draw(good))
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(data)))
        data[at : at + draw(st.integers(0, 3))] = draw(st.binary(max_size=3))
    return bytes(data[: draw(st.integers(0, len(data)))] if draw(st.booleans()) else data)
