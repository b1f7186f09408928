"""Whatever arrives over MQTT, the controller goes on: refused, counted and nothing changed, or taken without harm."""

from __future__ import annotations

import asyncio

import httpx
from controller_fakes import register
from fuzzing import damaged, fuzz, messages
from hypothesis import given
from hypothesis import strategies as st

from controller import database
from controller.api import build
from controller.clock import now_ns
from controller.service import Controller
from pingmesh import topics
from pingmesh.bus import UNHANDLED
from pingmesh.config import Settings
from pingmesh.messages import AgentState, Message, Paths, Register, Summary, Verdict, Verdicts, encode
from topology.generate import leaf_spine

T = leaf_spine(2, 2, 1, 1)
KINDS: dict[str, tuple[type[Message], str]] = {
    topics.REGISTER: (Register, "h1"),
    topics.STATE: (AgentState, "h1"),
    topics.PATHS: (Paths, "h1"),
    topics.VERDICTS: (Verdicts, topics.ANALYZER),
    topics.SUMMARY: (Summary, topics.ANALYZER),
}
kinds = st.sampled_from(sorted(KINDS))
VERDICT = Verdict(component="h1/rnic0", component_type="rnic", symptom="drop", confidence=0.9)
GOOD = [
    (topics.REGISTER, register(T, "h1", ["rnic0"])),
    (topics.REGISTER, register(T, "h2", ["rnic0"])),
    (topics.VERDICTS, Verdicts(cluster="lab", host=topics.ANALYZER, now_ns=1, open=[VERDICT])),
    (topics.SUMMARY, Summary(cluster="lab", host=topics.ANALYZER, now_ns=1, span_s=1.0, agents_heard=["h1"])),
]
PATHS = ["/status", "/incidents", "/findings", "/coverage", "/rnics", "/diagnose?hosts=h1,h2&since=1h", "/metrics"]


class Rig:
    """A controller that holds two RNICs, an incident and a summary."""

    def __init__(self) -> None:
        self.c = Controller(Settings(cluster="lab"), T, database.connect(":memory:"))
        for kind, message in GOOD:
            self.give(kind, encode(message), message.host)
        assert not self.c.bus.rejected
        assert (len(self.c.registry.rnics), len(self.c.store.open)) == (2, 1)

    def state(self) -> tuple[object, ...]:
        c = self.c
        return (
            list(c.db.iterdump()),
            repr((c.registry.rnics, c.registry.by_number, c.registry.agents, c.store.open, c.summary, c.enough_data)),
            repr((c.book.paths, c.book.sheets, c.planner.stale)),
        )

    def give(self, kind: str, payload: object, host: str) -> bool:
        """By way of the bus; whether it was taken in."""
        bus = self.c.bus
        before, refused = self.state(), sum(bus.rejected.values())
        asyncio.run(bus._dispatch(f"pingmesh/v1/lab/{host}/{kind}", payload, False))
        assert bus.rejected[UNHANDLED] == 0
        if sum(bus.rejected.values()) > refused:
            assert self.state() == before
            return False
        return True

    def goes_on(self) -> None:
        """It plans, publishes and answers."""
        self.c.tick(now_ns())
        self.c.publisher._compose()

        async def ask() -> None:
            transport = httpx.ASGITransport(build(self.c))
            async with httpx.AsyncClient(transport=transport, base_url="http://c") as client:
                for path in PATHS:
                    assert (await client.get(path)).status_code == 200

        asyncio.run(ask())
        again = Controller(Settings(cluster="lab"), T, self.c.db)  # what was stored can be read
        assert again.registry.rnics.keys() == self.c.registry.rnics.keys()
        assert again.store.open == self.c.store.open or any(
            x != x for i in self.c.store.open.values() for x in (i.rate, i.rate_low, i.rate_high, i.confidence)
        )
        self.c.db.close()


well_formed = kinds.flatmap(lambda k: st.tuples(st.just(k), messages(*KINDS[k])))


@fuzz(150)
@given(st.lists(well_formed, max_size=6))
def test_well_formed_nonsense(given: list[tuple[str, bytes]]) -> None:
    rig = Rig()
    for kind, payload in given:
        rig.give(kind, payload, KINDS[kind][1])
        rig.c.tick(now_ns())
        rig.c.publisher._compose()
    rig.goes_on()


@fuzz(150)
@given(
    st.lists(
        st.tuples(kinds, damaged(well_formed.map(lambda p: p[1]) | st.sampled_from(GOOD).map(lambda g: encode(g[1]))))
    )
)
def test_damaged_messages(given: list[tuple[str, bytes]]) -> None:
    rig = Rig()
    for kind, payload in given:
        rig.give(kind, payload, KINDS[kind][1])
    rig.goes_on()


@fuzz(150)
@given(
    kinds | st.sampled_from(["x", "list/rnic0"]),
    st.binary(min_size=1, max_size=200) | st.integers() | st.text(),
    st.sampled_from(["h1", "h9", topics.ANALYZER]),
)
def test_raw_bytes_are_counted_and_change_nothing(kind: str, payload: object, host: str) -> None:
    rig = Rig()
    before = rig.state()
    assert not rig.give(kind, payload, host)
    assert rig.state() == before
    assert sum(rig.c.bus.rejected.values()) == 1
    rig.goes_on()
