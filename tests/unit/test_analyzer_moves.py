"""Tuples that moved: which links to look at, and for how long."""

from pingmesh.analyzer.moves import Moves

S = 10**9


def test_the_most_deserted_link_comes_first() -> None:
    m = Moves()
    m.note({"a->b", "b->c"}, 10 * S, 10 * S)
    m.note({"a->b"}, 11 * S, 11 * S)
    assert m.since(12 * S) == 10 * S
    assert m.to_trace(12 * S) == ["a->b", "b->c"]
    assert m.to_trace(12 * S + 1) == [], "it was just asked for"


def test_a_change_is_over_when_nothing_moves_any_more() -> None:
    m = Moves()
    m.note({"a->b"}, 10 * S, 10 * S)
    assert m.since(30 * S) is None
    assert m.to_trace(30 * S) == []
    m.note({"c->d"}, 40 * S, 41 * S)
    assert m.since(41 * S) == 40 * S
    assert m.to_trace(41 * S) == ["c->d"]
