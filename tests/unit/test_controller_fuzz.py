"""Whatever arrives over MQTT, the controller goes on: rejected with a reason, or taken in without harm."""

from __future__ import annotations

import asyncio
import os

import httpx
import msgspec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from controller import database
from controller.api import build
from controller.service import Controller, now_ns
from pingmesh import topics
from pingmesh.config import Settings
from pingmesh.messages import AgentState, BadMessageError, Paths, Register, Summary, Verdicts
from topology.generate import leaf_spine

T = leaf_spine(2, 2, 1, 1)
EXAMPLES = int(os.environ.get("PINGMESH_FUZZ_EXAMPLES", "150"))
KINDS = {
    topics.REGISTER: (Register, "h1"),
    topics.STATE: (AgentState, "h1"),
    topics.PATHS: (Paths, "h1"),
    topics.VERDICTS: (Verdicts, topics.ANALYZER),
    topics.SUMMARY: (Summary, topics.ANALYZER),
}
_text = st.text(max_size=6) | st.sampled_from(["h1", "h2", "rnic0", "1.0", "drop", "link", "a--b"])
_int = st.integers(-(2**63), 2**64 - 1) | st.integers(0, 20)
_leaf = st.none() | st.booleans() | _int | st.floats() | _text | st.binary(max_size=4)
_any = st.recursive(_leaf, lambda x: st.lists(x, max_size=3) | st.dictionaries(_text, x, max_size=3), max_leaves=8)


def _typed(kind: object) -> st.SearchStrategy[object]:
    """Values that fit a field's type, so that they get past the decoder."""
    info = msgspec.inspect.type_info(kind)  # type: ignore[arg-type]
    return _of(info)


def _of(info: msgspec.inspect.Type) -> st.SearchStrategy[object]:
    i = msgspec.inspect
    match info:
        case i.IntType():
            return _int
        case i.FloatType():
            return st.floats()
        case i.StrType():
            return _text
        case i.BoolType():
            return st.booleans()
        case i.BytesType():
            return st.binary(max_size=9)
        case i.NoneType():
            return st.none()
        case i.LiteralType(values=values):
            return st.sampled_from(values)
        case i.ListType(item_type=item):
            return st.lists(_of(item), max_size=4)
        case i.TupleType(item_types=items):
            return st.tuples(*map(_of, items))
        case i.DictType(key_type=key, value_type=value):
            return st.dictionaries(_of(key), _of(value), max_size=3)
        case i.UnionType(types=types):
            return st.one_of(*map(_of, types))
        case i.StructType(fields=fields, array_like=array_like):
            values = {f.encode_name: _of(f.type) for f in fields}
            return st.tuples(*values.values()) if array_like else st.fixed_dictionaries(values)
    return _any


_payloads = {
    kind: st.fixed_dictionaries(
        {
            **{f.encode_name: _of(f.type) for f in msgspec.inspect.type_info(cls).fields},  # type: ignore[attr-defined]
            "type": st.just(cls.__struct_config__.tag),
            "version": st.sampled_from(["1.0", "1.7"]),
            "cluster": st.just("lab"),
            "host": st.just(host),
        }
    )
    for kind, (cls, host) in KINDS.items()
}


def _controller() -> Controller:
    return Controller(Settings(cluster="lab"), T, database.connect(":memory:"))


def _take(c: Controller, kind: str, payload: bytes) -> bool:
    try:
        c.handle(topics.Topic("lab", KINDS[kind][1], kind), payload)
    except BadMessageError:
        return False
    return True


@given(st.lists(st.sampled_from(sorted(KINDS)).flatmap(lambda k: st.tuples(st.just(k), _payloads[k])), max_size=6))
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
def test_well_formed_nonsense(messages: list[tuple[str, dict[str, object]]]) -> None:
    c = _controller()
    for kind, payload in messages:
        _take(c, kind, msgspec.msgpack.encode(payload))
        c.tick(now_ns())
        c.publisher._compose()
    paths = ["/status", "/incidents", "/findings", "/coverage", "/rnics", "/diagnose?hosts=h1,h2&since=1h", "/metrics"]

    async def ask() -> None:
        transport = httpx.ASGITransport(build(c))
        async with httpx.AsyncClient(transport=transport, base_url="http://c") as client:
            for path in paths:
                assert (await client.get(path)).status_code == 200

    asyncio.run(ask())
    again = Controller(Settings(cluster="lab"), T, c.db)  # what was stored can be read
    assert again.registry.rnics.keys() == c.registry.rnics.keys()
    assert again.store.open == c.store.open or any(
        x != x for i in c.store.open.values() for x in (i.rate, i.rate_low, i.rate_high, i.confidence)
    )
    c.db.close()


@given(st.sampled_from(sorted(KINDS)), st.binary(max_size=200))
@settings(max_examples=EXAMPLES, deadline=None)
def test_raw_bytes(kind: str, payload: bytes) -> None:
    c = _controller()
    _take(c, kind, payload)
    c.tick(now_ns())
    c.db.close()
