"""The store's rules: one identifier a fault, updates by component and alternatives, history, findings."""

from __future__ import annotations

import sqlite3

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller import database
from controller.store import Store
from pingmesh.messages import BadMessageError, FindingReport, Verdict, Verdicts

S = 1_000_000_000


@pytest.fixture
def store() -> Store:
    return Store(database.connect(":memory:"), "lab")


def view(*verdicts: Verdict, closed: tuple[str, ...] = ()) -> Verdicts:
    return Verdicts(cluster="lab", host="_analyzer", now_ns=1, open=list(verdicts), closed=list(closed))


def link(component: str = "leaf1--spine1", **more: object) -> Verdict:
    fields: dict[str, object] = {
        "component": component,
        "component_type": "link",
        "direction": component.replace("--", "->"),
        "symptom": "drop",
        "confidence": 0.9,
    }
    return Verdict(**fields | more)  # type: ignore[arg-type]


def test_opens_once_and_stays_itself(store: Store) -> None:
    (opened,) = store.apply(view(link(rate=0.1)), 5 * S)
    assert (opened.state, opened.opened_at, opened.component) == ("open", 5 * S, "leaf1--spine1")
    assert store.apply(view(link(rate=0.2)), 6 * S) == []
    (kept,) = store.incidents()
    assert (kept.id, kept.rate, kept.opened_at) == (opened.id, 0.2, 5 * S)
    assert [h["change"] for h in kept.history] == ["opened"]


def test_refinement_to_an_alternative_updates(store: Store) -> None:
    (opened,) = store.apply(view(link(alternatives=["spine1--leaf2", "spine1"])), S)
    refined = Verdict(component="spine1", component_type="switch", symptom="switch_down", confidence=0.99)
    (changed,) = store.apply(view(refined), 2 * S)
    assert changed.id == opened.id
    assert (changed.component, changed.component_type, changed.direction) == ("spine1", "switch", None)
    changes = {h["change"]: (h.get("from"), h.get("to"), h["at"]) for h in changed.history}
    assert changes["component"] == ("leaf1--spine1", "spine1", 2 * S)
    assert changes["symptom"] == ("drop", "switch_down", 2 * S)
    assert changes["direction"] == ("leaf1->spine1", None, 2 * S)
    assert changes["alternatives"] == (["spine1--leaf2", "spine1"], [], 2 * S)
    assert len(store.open) == 1


def test_another_component_is_another_incident(store: Store) -> None:
    store.apply(view(link()), S)
    store.apply(view(link(), link("leaf2--spine1")), 2 * S)
    assert sorted(i.component for i in store.open.values()) == ["leaf1--spine1", "leaf2--spine1"]


def test_exact_component_is_matched_before_alternatives(store: Store) -> None:
    store.apply(view(link("leaf1--spine1", alternatives=["leaf2--spine1"])), S)
    store.apply(view(link("leaf1--spine1", alternatives=["leaf2--spine1"]), link("leaf2--spine1")), 2 * S)
    ids = {i.component: i.id for i in store.open.values()}
    assert len(set(ids.values())) == 2
    store.apply(view(link("leaf2--spine1"), link("leaf1--spine1")), 3 * S)
    assert {i.component: i.id for i in store.open.values()} == ids


def test_two_directions_of_one_cable_stay_two(store: Store) -> None:
    both = [link(direction="leaf1->spine1"), link(direction="spine1->leaf1")]
    store.apply(view(*both), S)
    ids = {i.direction: i.id for i in store.open.values()}
    assert store.apply(view(*reversed(both)), 2 * S) == []
    assert {i.direction: i.id for i in store.open.values()} == ids
    assert len(ids) == 2


def test_neither_open_nor_closed_stays(store: Store) -> None:
    store.apply(view(link()), S)
    assert store.apply(view(), 2 * S) == []
    assert len(store.open) == 1


def test_closing(store: Store) -> None:
    store.apply(view(link()), S)
    (closed,) = store.apply(view(closed=("leaf1--spine1", "no-such--link")), 9 * S)
    assert (closed.state, closed.closed_at) == ("closed", 9 * S)
    assert closed.history[-1] == {"at": 9 * S, "change": "closed"}
    assert store.open == {}
    (again,) = store.apply(view(link()), 10 * S)
    assert again.id != closed.id
    assert [i.state for i in store.incidents()] == ["open", "closed"]
    assert [i.id for i in store.incidents("closed")] == [closed.id]
    assert [i.id for i in store.incidents(None, 10 * S)] == [again.id]


def test_what_is_open_is_not_closed_by_the_same_view(store: Store) -> None:
    store.apply(view(link()), S)
    assert store.apply(view(link(), closed=("leaf1--spine1",)), 2 * S) == []
    assert len(store.open) == 1


def test_refined_and_closed_before_it_was_seen(store: Store) -> None:
    store.apply(view(link(alternatives=["spine1"])), S)
    (closed,) = store.apply(view(closed=("spine1",)), 2 * S)
    assert closed.component == "leaf1--spine1"


def test_unknown_symptoms_are_rejected_and_change_nothing(store: Store) -> None:
    store.apply(view(link()), S)
    for bad in (link("a--b", symptom="gremlins"), link("a--b", component_type="planet")):
        with pytest.raises(BadMessageError, match=r"gremlins|planet"):
            store.apply(view(bad, link(rate=0.5)), 2 * S)
    assert [i.rate for i in store.incidents()] == [None]


def test_survives_a_restart() -> None:
    db = database.connect(":memory:")
    (opened,) = Store(db, "lab").apply(view(link(evidence={"flows": [1, "x"]}, since_ns=S)), 2 * S)
    again = Store(db, "lab")
    assert again.open[opened.id] == opened
    (verdict,) = again.verdicts()
    assert (verdict.component, verdict.direction, verdict.since_ns) == ("leaf1--spine1", "leaf1->spine1", 2 * S)
    assert again.apply(view(link(evidence={"flows": [1, "x"]}, since_ns=S)), 3 * S) == []


def test_public_form(store: Store) -> None:
    store.apply(view(link(cls="large", since_ns=S)), 2 * S)
    shown = store.incidents()[0].public()
    assert shown["class"] == "large"
    assert shown["opened_at"] == "1970-01-01T00:00:02.000Z"
    assert shown["evidence"] == {"since": "1970-01-01T00:00:01.000Z"}
    assert shown["history"] == [
        {"at": "1970-01-01T00:00:02.000Z", "change": "opened", "from": None, "to": "leaf1--spine1 drop"}
    ]


_names = st.sampled_from(["a--b", "b--c", "c--d"])


@given(
    st.lists(
        st.tuples(
            st.lists(st.tuples(_names, st.lists(_names, max_size=2)), max_size=3),
            st.lists(_names, max_size=2),
        ),
        max_size=8,
    )
)
@settings(max_examples=80, deadline=None)
def test_rules_hold_over_any_history(steps: list[tuple[list[tuple[str, list[str]]], list[str]]]) -> None:
    db = database.connect(":memory:")
    store = Store(db, "lab")
    for at, (verdicts, closed) in enumerate(steps, 1):
        before = dict(store.open)
        store.apply(view(*(link(c, alternatives=a) for c, a in verdicts), closed=tuple(closed)), at * S)
        shown = [i.component for i in store.open.values()]
        for component, _ in verdicts:
            assert component in shown  # whatever is reported is open
        for gone in before.keys() - store.open.keys():
            assert closed, gone  # nothing closes unless told
        assert store.apply(view(*(link(c, alternatives=a) for c, a in verdicts)), at * S) == []  # level-triggered
        assert Store(db, "lab").open == store.open
    everything = store.incidents(limit=10_000)
    assert len({i.id for i in everything}) == len(everything)
    assert all((i.state == "closed") == (i.closed_at is not None) for i in everything)


def report(kind: str, subject: str, text: str = "x", since_ns: int = S) -> FindingReport:
    return FindingReport(kind=kind, subject=subject, since_ns=since_ns, text=text)


def test_findings_keep_their_ids_while_they_last(store: Store) -> None:
    assert store.set_findings("analyzer", [report("clock_skew", "h1"), report("uneven_ecmp", "leaf1")])
    first = {f.subject: f.id for f in store.findings()}
    assert store.set_findings("analyzer", [report("clock_skew", "h1", "worse", 9 * S)])
    (kept,) = store.findings()
    assert (kept.id, kept.since, kept.text) == (first["h1"], S, "worse")
    store.set_findings("analyzer", [])
    store.set_findings("analyzer", [report("clock_skew", "h1")])
    assert store.findings()[0].id != first["h1"]


def test_sources_do_not_take_each_others_findings_away(store: Store) -> None:
    store.set_findings("analyzer", [report("not_in_topology", "x/r", "from the analyzer", 2 * S)])
    store.set_findings("controller", [report("not_in_topology", "x/r", "from the controller")])
    assert [f.text for f in store.findings()] == ["from the controller"]
    store.set_findings("controller", [])
    assert [f.text for f in store.findings()] == ["from the analyzer"]


def test_the_database_is_one_file_with_a_log(tmp_path: object) -> None:
    db = database.connect(f"{tmp_path}/sub/c.db")
    assert db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert isinstance(db, sqlite3.Connection)
    db.close()
