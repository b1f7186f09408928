"""Host rules: who is down, dead, stopped, starved or merely restarting; and what must not be said."""

import pytest

from pingmesh.analyzer.flows import ACK, PROBE, Flow
from pingmesh.analyzer.host_rules import judge_hosts
from pingmesh.analyzer.hosts import HostBook
from pingmesh.analyzer.samples import ROUND_TRIP, Sample
from pingmesh.messages import AgentState, Health, RnicHealth
from topology.generate import leaf_spine

S = 10**9
T = 1000 * S
TOPOLOGY = leaf_spine(2, 2, 2, 1)
FLOW = Flow((1, 1, 0), "h1/rnic0", "h3/rnic0", 50000, 0, "small", 1, 100_000)


def book(*names: str) -> HostBook:
    b = HostBook()
    b.session_started(T - 100 * S)
    for n in names or ("h1", "h2", "h3", "h4"):
        b.on_message(n, 1, T - S, T - S)
        b.get(n).rebooted = T - 1000 * S
    return b


def to_h3(sent: int, lost: int, at: int = T, role: int = ROUND_TRIP) -> Sample:
    return Sample(at, at + S, FLOW, "small", role, sent, lost, confirmed=True)


def verdicts(b: HostBook, samples: list[Sample], now: int) -> dict[str, str]:
    return {v.component: v.symptom for v in judge_hosts(b, TOPOLOGY, samples, now).verdicts}


def silence(b: HostBook, host: str, times: int = 3) -> None:
    for i in range(times):
        b.on_unanswered(host, T + i * S // 3)


def test_a_host_that_answers_neither_probes_nor_questions_is_down() -> None:
    b = book()
    silence(b, "h3")
    assert verdicts(b, [to_h3(20, 20)], T + 2 * S) == {"h3": "host_down"}


def test_silence_alone_is_no_verdict() -> None:
    b = book()
    silence(b, "h3")
    assert verdicts(b, [], T + 2 * S) == {}


@pytest.mark.parametrize("times", [1, 2])
def test_one_unanswered_question_is_no_verdict(times: int) -> None:
    b = book()
    silence(b, "h3", times)
    view = judge_hosts(b, TOPOLOGY, [to_h3(20, 20)], T + 2 * S)
    assert not view.verdicts
    assert "h3" in view.undecided
    assert "h3" in view.excluded, "its losses say nothing of the fabric meanwhile"


def test_a_silent_agent_whose_probes_come_back_is_a_finding() -> None:
    b = book()
    silence(b, "h3")
    view = judge_hosts(b, TOPOLOGY, [to_h3(20, 0)], T + 2 * S)
    assert not view.verdicts
    assert [f.kind for f in view.findings] == ["management_unreachable"]


def test_silence_since_our_own_outage_means_nothing() -> None:
    b = book()
    b.session_started(T - S // 2)
    silence(b, "h3")
    view = judge_hosts(b, TOPOLOGY, [to_h3(20, 20)], T + 2 * S)
    assert not view.verdicts
    assert "h3" in view.excluded, "nor do the losses of its RNICs"
    assert b.get("h3").is_excused(T, T + S)


def will(b: HostBook, host: str, at: int, retained: bool = False) -> None:
    b.on_state(AgentState(cluster="lab", host=host, boot=1, state="died"), at, retained)


def test_a_last_will_is_a_dead_agent() -> None:
    b = book()
    will(b, "h3", T)
    assert verdicts(b, [to_h3(20, 20)], T + 2 * S) == {"h3": "agent_down"}


def test_a_last_will_with_probes_still_answered_is_a_broken_connection() -> None:
    b = book()
    will(b, "h3", T)
    view = judge_hosts(b, TOPOLOGY, [to_h3(20, 0)], T + 2 * S)
    assert not view.verdicts
    assert view.findings


def test_an_agent_that_comes_back_at_once_is_no_incident() -> None:
    b = book()
    will(b, "h3", T)
    assert verdicts(b, [], T + S // 2) == {}
    b.on_state(AgentState(cluster="lab", host="h3", boot=2, state="online", at_ns=T), T + S // 2, False)
    view = judge_hosts(b, TOPOLOGY, [to_h3(20, 20)], T + 2 * S)
    assert not view.verdicts
    assert "h3" in view.excluded, "losses while it restarts are its own"


def test_the_will_of_an_earlier_process_is_let_go() -> None:
    b = book()
    b.on_message("h3", 2, T - S, T - S)
    will(b, "h3", T)
    assert b.get("h3").state == "online"


def test_a_stopped_agent_is_nothing() -> None:
    b = book()
    b.on_state(AgentState(cluster="lab", host="h3", boot=1, state="stopped"), T, False)
    silence(b, "h3")
    assert verdicts(b, [to_h3(20, 20)], T + 5 * S) == {}


def test_stalls_are_cpu_overload_and_no_evidence() -> None:
    b = book()
    b.on_health("h3", Health(loop_lag_max=900), T)
    assert "h3" in judge_hosts(b, TOPOLOGY, [], T).excluded
    b.on_health("h3", Health(read_delay_max=700), T + S)
    assert verdicts(b, [to_h3(20, 15)], T + S) == {"h3": "cpu_overload"}
    assert verdicts(b, [], T + 20 * S) == {}


def test_a_short_stall_is_nothing() -> None:
    b = book()
    b.on_health("h3", Health(loop_lag_max=133), T)
    view = judge_hosts(b, TOPOLOGY, [], T)
    assert not view.verdicts
    assert not view.excluded


def test_a_process_that_speaks_again_was_stalled_not_down() -> None:
    b = book()
    silence(b, "h3")
    b.on_message("h3", 1, T + 3 * S, T + 3 * S)
    assert verdicts(b, [], T + 3 * S) == {"h3": "cpu_overload"}


def carrier(b: HostBook, host: str, up: bool, at: int = T) -> None:
    b.on_health(host, Health(rnics=[RnicHealth(device="rnic0", up=up)]), at)


def test_one_rnic_without_link_under_its_tor() -> None:
    b = book()
    carrier(b, "h3", False)
    view = judge_hosts(b, TOPOLOGY, [], T + S)
    (v,) = view.verdicts
    assert (v.component, v.symptom, v.direction, v.alternatives) == ("h3/rnic0", "rnic_down", "both", [])
    assert view.dark == {"h3/rnic0"}


def test_all_rnics_of_a_tor_without_link_are_the_tor() -> None:
    b = book()
    carrier(b, "h3", False)
    carrier(b, "h4", False, T + S // 4)
    assert verdicts(b, [], T + S) == {"leaf2": "switch_down"}


def test_rnics_that_come_back_after_their_tor_are_not_blamed() -> None:
    b = book()
    carrier(b, "h3", False)
    carrier(b, "h4", False)
    assert verdicts(b, [], T + S) == {"leaf2": "switch_down"}
    carrier(b, "h3", True, T + 2 * S)
    assert verdicts(b, [], T + 2 * S) == {}
    assert verdicts(b, [], T + 9 * S) == {"h4/rnic0": "rnic_down"}, "one that stays away is its own fault"


def test_carrier_loss_waits_for_the_others_to_speak() -> None:
    b = book()
    carrier(b, "h3", False)
    assert verdicts(b, [], T + S // 5) == {}


def test_the_only_rnic_of_a_tor_is_named_with_the_tor_as_alternative() -> None:
    b = HostBook()
    b.session_started(T - 100 * S)
    b.on_message("h2", 1, T - S, T - S)
    carrier(b, "h2", False)
    (v,) = judge_hosts(b, leaf_spine(2, 2, 1, 1), [], T + S).verdicts
    assert (v.component, v.alternatives) == ("h2/rnic0", ["leaf2"])


def test_link_back_ends_it() -> None:
    b = book()
    carrier(b, "h3", False)
    carrier(b, "h3", True, T + S)
    assert verdicts(b, [], T + 2 * S) == {}


def test_forward_samples_count_as_arrivals() -> None:
    b = book()
    will(b, "h3", T)
    assert verdicts(b, [to_h3(20, 20, role=PROBE), to_h3(20, 0, role=ACK)], T + 2 * S) == {"h3": "agent_down"}


def test_what_happened_while_a_host_was_away_is_never_evidence_later() -> None:
    b = book()
    silence(b, "h3")
    judge_hosts(b, TOPOLOGY, [to_h3(20, 20)], T + 2 * S)
    b.on_message("h3", 1, T + 3 * S, T + 3 * S)
    judge_hosts(b, TOPOLOGY, [], T + 3 * S)
    judge_hosts(b, TOPOLOGY, [], T + 60 * S)
    h3 = b.get("h3")
    assert h3.is_excused(T, T + S)
    assert h3.is_excused(T + 2 * S, T + 7 * S)
    assert not h3.is_excused(T + 30 * S, T + 35 * S)
