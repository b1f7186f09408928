from __future__ import annotations

import pytest

from pingmesh.analyzer.hosts import HostBook
from pingmesh.analyzer.waits import USUAL, Waits, waits_for
from pingmesh.config import AgentSettings
from pingmesh.messages import Health


def test_the_usual_waits_go_with_the_usual_time_out() -> None:
    assert waits_for(AgentSettings().timeout_ms) == USUAL


def test_longer_time_outs_make_all_waits_longer() -> None:
    assert waits_for(2000) == Waits(
        answer_s=1.2, confirm_s=10.0, straggler_s=1.0, settle_ns=2_400_000_000, slow_ns=8_000_000, stall_ms=1000.0
    )


def test_shorter_time_outs_do_not_make_the_management_network_faster() -> None:
    short = waits_for(100)
    assert (short.answer_s, short.confirm_s) == (USUAL.answer_s, USUAL.confirm_s)
    assert (short.settle_ns, short.slow_ns, short.stall_ms) == (120_000_000, 400_000, 50.0)


@pytest.mark.parametrize(("timeout_ms", "starved"), [(500, True), (2000, False)])
def test_a_stall_is_no_excuse_where_probes_wait_for_longer(timeout_ms: int, starved: bool) -> None:
    book = HostBook(waits_for(timeout_ms))
    book.on_health("h1", Health(loop_lag_max=400.0), 10)
    assert bool(book.get("h1").starved(0)) is starved
