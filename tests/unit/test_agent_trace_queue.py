"""Which tuple is traced next."""

from agent.trace_queue import LOSS_ROUND_S, ROUND_S, Tuple5, Urgency


def tuple5(**fields: object) -> Tuple5:
    t = Tuple5("10.0.0.1", 50000, 26, 7)
    for name, value in fields.items():
        setattr(t, name, value)
    return t


def test_what_was_never_traced_comes_before_what_was() -> None:
    assert tuple5().rank(100.0) == (Urgency.NEVER, 0.0)
    known = tuple5(traced_at=80.0, hops={2: "172.16.0.1"})
    assert known.rank(100.0) == (Urgency.OLDEST, 80.0)
    assert known.rank(80.0 + ROUND_S / 2) is None


def test_a_tuple_whose_routers_did_not_answer_is_still_unknown() -> None:
    mute = tuple5(traced_at=80.0, hops={2: None})
    assert mute.rank(80.0 + LOSS_ROUND_S / 2) is None, "not at once: the router may be limiting its answers"
    assert mute.rank(80.0 + LOSS_ROUND_S) == (Urgency.NEVER, 80.0)
    assert min([mute.rank(100.0), tuple5().rank(100.0)]) == (Urgency.NEVER, 0.0), "after those never tried"


def test_what_is_asked_for_and_what_loses_comes_first() -> None:
    asked = tuple5(asked=True, traced_at=99.0, hops={2: "172.16.0.1"})
    lossy = tuple5(lossy=True, traced_at=90.0, hops={2: "172.16.0.1"})
    assert min(t.rank(100.0) for t in (tuple5(), lossy, asked)) == (Urgency.ASKED, 99.0)
    assert min(t.rank(100.0) for t in (tuple5(), lossy)) == (Urgency.LOSSY, 90.0)
    assert tuple5(busy=True).rank(100.0) is None
