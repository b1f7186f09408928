"""Opening and closing incidents: hysteresis, refinement, flaps, and going on after a restart."""

import msgspec
import pytest

from pingmesh.analyzer.tracker import Phase, Tracker
from pingmesh.messages import Verdict

S = 10**9
LINK = {"leaf1--spine1": frozenset({"leaf1->spine1", "spine1->leaf1"})}
SWITCH = {"spine1": frozenset({"leaf1->spine1", "spine1->leaf1", "leaf2->spine1", "spine1->leaf2"})}

HOST = {"h1": frozenset({"h1/rnic0 tx", "h1/rnic0 rx"})}
TOR = {"leaf1": HOST["h1"] | LINK["leaf1--spine1"]}


def link(symptom: str = "drop", confidence: float = 0.99, direction: str = "leaf1->spine1") -> Verdict:
    return Verdict(
        component="leaf1--spine1", component_type="link", direction=direction, symptom=symptom, confidence=confidence
    )


@pytest.fixture
def tracker() -> Tracker:
    return Tracker(0.95, 20 * S)


def names(verdicts: list[Verdict]) -> list[str]:
    return [v.component for v in verdicts]


def test_a_sure_verdict_opens_at_once(tracker: Tracker) -> None:
    assert names(tracker.update([link()], LINK, set(), 0, True)) == ["leaf1--spine1"]
    assert names(tracker.update([link()], LINK, set(), S, True)) == [], "it opens once"


def test_an_unsure_verdict_waits_for_more_evidence_not_for_time(tracker: Tracker) -> None:
    unsure = link(confidence=0.5)
    for t in range(10):
        assert not tracker.update([unsure], LINK, set(), t * S // 10, new_look=t == 0)
    assert not tracker.update([unsure], LINK, set(), 2 * S, True)
    assert names(tracker.update([unsure], LINK, set(), 3 * S, True)) == ["leaf1--spine1"]


def counted(sent: int, lost: int, symptom: str = "drop") -> Verdict:
    verdict = link(symptom)
    verdict.rate, verdict.evidence = lost / sent, {"sent": sent, "lost": lost}
    return verdict


def test_a_burst_that_is_remembered_and_a_stray_loss_are_no_fault(tracker: Tracker) -> None:
    """An episode is over, the last minute is judged again, and its burst is in it; then one more packet is lost."""
    for sent, lost in [(16_065, 19), (16_229, 20), (17_000, 22)]:
        verdict = counted(sent, lost)
        verdict.evidence["moments"] = {"sent": sent, "lost": lost, "worst_sent": 700, "worst_lost": 16}
        assert not tracker.update([verdict], LINK, set(), sent * S // 1000, True)
    steady = counted(18_000, 40)
    steady.evidence["moments"] = {"sent": 18_000, "lost": 40, "worst_sent": 700, "worst_lost": 16}
    assert tracker.update([steady], LINK, set(), 18 * S, True), "the rest of the time it loses about as much"


@pytest.mark.parametrize(("elsewhere", "opens"), [(2, False), (3, True)])
def test_what_a_burst_took_of_a_round_and_the_loss_that_started_it_are_no_fault(
    tracker: Tracker, elsewhere: int, opens: bool
) -> None:
    assert not tracker.update([counted(200, 2)], LINK, set(), S, True)
    verdict = counted(500, 6 + elsewhere)
    verdict.evidence["moments"] = {"sent": 500, "lost": 6 + elsewhere, "worst_sent": 300, "worst_lost": 6}
    assert bool(tracker.update([verdict], LINK, set(), 2 * S, True)) == opens


@pytest.mark.parametrize("symptom", ["drop", "class_drop", "large_packet_drop"])
def test_a_burst_of_losses_that_does_not_come_again_opens_nothing(tracker: Tracker, symptom: str) -> None:
    for look in range(10):
        verdict = counted(200 + 200 * look, 12 + look // 3, symptom)
        assert not tracker.update([verdict], LINK, set(), look * S, True)


@pytest.mark.parametrize(("sent", "lost"), [(400, 24), (500, 20), (220, 13), (4000, 120)])
def test_losses_that_go_on_open_at_the_second_look(tracker: Tracker, sent: int, lost: int) -> None:
    assert not tracker.update([counted(200, 12)], LINK, set(), 0, True)
    assert not tracker.update([counted(200, 12)], LINK, set(), S // 2, True), "nothing was counted meanwhile"
    assert names(tracker.update([counted(sent, lost)], LINK, set(), S, True)) == ["leaf1--spine1"]


@pytest.mark.parametrize(("tuples", "looks"), [(1, 3), (5, 3), (6, 1), (60, 1), (0, 1)])
def test_a_heavy_loss_of_few_tuples_waits_for_more_of_them(tracker: Tracker, tuples: int, looks: int) -> None:
    """Of the first tuples that an ACL takes, three may share an RNIC; 0 is where no path is known."""
    verdict = counted(40, 40, "blackhole")
    verdict.evidence["lossy_tuples"] = tuples
    opened = [look for look in range(1, 5) if tracker.update([verdict], LINK, set(), look * S, True)]
    assert opened == [looks]


def test_a_light_loss_may_be_of_few_tuples(tracker: Tracker) -> None:
    for sent, lost, opens in [(200, 20, False), (400, 40, True)]:
        verdict = counted(sent, lost)
        verdict.evidence["lossy_tuples"] = 3
        assert bool(tracker.update([verdict], LINK, set(), sent * S, True)) == opens


def test_a_second_burst_opens(tracker: Tracker) -> None:
    assert not tracker.update([counted(200, 12)], LINK, set(), 0, True)
    assert not tracker.update([counted(600, 12)], LINK, set(), S, True)
    assert tracker.update([counted(800, 25)], LINK, set(), 2 * S, True)


def test_losses_of_a_new_episode_are_counted_anew(tracker: Tracker) -> None:
    assert not tracker.update([counted(2000, 12)], LINK, set(), 0, True)
    assert not tracker.update([counted(200, 12)], LINK, set(), S, True)
    assert tracker.update([counted(400, 20)], LINK, set(), 2 * S, True)


@pytest.mark.parametrize(("lost", "opens"), [(11, True), (2, False)])
def test_losses_of_another_window_are_all_new(tracker: Tracker, lost: int, opens: bool) -> None:
    first, second = counted(200, 12), counted(190, lost)
    second.since_ns = 5 * S
    assert not tracker.update([first], LINK, set(), 5 * S, True)
    assert bool(tracker.update([second], LINK, set(), 6 * S, True)) == opens


def test_most_packets_lost_need_no_second_look(tracker: Tracker) -> None:
    assert names(tracker.update([counted(200, 120)], LINK, set(), 0, True)) == ["leaf1--spine1"]


def test_a_doubt_that_passes_is_forgotten(tracker: Tracker) -> None:
    tracker.update([link(confidence=0.5)], LINK, set(), 0, True)
    tracker.update([], {}, set(), 3 * S, True)
    assert not tracker.tracks


def test_it_closes_by_evidence_after_its_time(tracker: Tracker) -> None:
    tracker.update([link()], LINK, set(), 0, True)
    assert tracker.close(lambda t: True, 10 * S) == []
    assert tracker.close(lambda t: False, 30 * S) == [], "not enough clean evidence: it stays open"
    assert tracker.close(lambda t: True, 30 * S) == ["leaf1--spine1"]
    assert tracker.closed(31 * S) == ["leaf1--spine1"]
    assert tracker.closed(60 * S) == []


def test_new_losses_keep_it_open(tracker: Tracker) -> None:
    tracker.update([link()], LINK, set(), 0, True)
    tracker.bad(tracker.open[0], 25 * S, 25 * S)
    assert tracker.close(lambda t: True, 30 * S) == []


def test_a_refinement_is_not_undone_by_a_vaguer_look(tracker: Tracker) -> None:
    tracker.update([link()], LINK, set(), 0, True)
    tracker.update([link("link_down", direction="both")], LINK, set(), S, True)
    tracker.update([link()], LINK, set(), 2 * S, True)
    (track,) = tracker.open
    assert (track.verdict.symptom, track.verdict.direction) == ("link_down", "both")


def test_clean_packets_after_the_fault_do_not_water_down_what_is_known(tracker: Tracker) -> None:
    tracker.update([link("blackhole")], LINK, set(), 0, True)
    tracker.update([link("drop")], LINK, set(), S, True)
    assert tracker.open[0].verdict.symptom == "blackhole", "nothing bad since"
    tracker.bad(tracker.open[0], 2 * S, 2 * S)
    tracker.update([link("drop")], LINK, set(), 3 * S, True)
    assert tracker.open[0].verdict.symptom == "drop", "there are new losses"


def test_a_switch_takes_the_place_of_its_links(tracker: Tracker) -> None:
    tracker.update([link()], LINK, set(), 0, True)
    down = Verdict(component="spine1", component_type="switch", symptom="switch_down", confidence=0.99)
    tracker.update([down], SWITCH, set(), S, True)
    assert names([t.verdict for t in tracker.open]) == ["spine1"]
    assert tracker.closed(S) == ["leaf1--spine1"]


def test_a_switch_that_is_not_open_yet_takes_nobodys_place(tracker: Tracker) -> None:
    tracker.update([link()], LINK, set(), 0, True)
    doubtful = Verdict(component="spine1", component_type="switch", symptom="drop", confidence=0.5)
    tracker.update([doubtful], SWITCH, set(), S, True)
    tracker.update([], {}, set(), 5 * S, True)
    assert names([t.verdict for t in tracker.open]) == ["leaf1--spine1"]


def test_parts_of_a_broken_switch_are_not_named_beside_it(tracker: Tracker) -> None:
    down = Verdict(component="spine1", component_type="switch", symptom="switch_down", confidence=0.99)
    tracker.update([down], SWITCH, set(), 0, True)
    assert not tracker.update([down, link()], SWITCH | LINK, set(), S, True)
    assert not tracker.update([link("link_down")], LINK, set(), 2 * S, True), "its links come back one by one"
    assert names([t.verdict for t in tracker.open]) == ["spine1"]


def test_a_host_that_dies_below_a_sick_tor_is_named_all_the_same(tracker: Tracker) -> None:
    drop = Verdict(component="leaf1", component_type="switch", symptom="drop", confidence=0.99)
    dead = Verdict(component="h1", component_type="host", symptom="agent_down", confidence=0.95)
    tracker.update([drop], TOR, set(), 0, True)
    assert names(tracker.update([drop, dead], TOR | HOST, set(), S, True)) == ["h1"]


def test_what_a_host_loses_below_a_sick_tor_is_the_tors(tracker: Tracker) -> None:
    down = Verdict(component="leaf1", component_type="switch", symptom="switch_down", confidence=0.99)
    lossy = Verdict(component="h1", component_type="host", symptom="blackhole", confidence=0.99)
    tracker.update([lossy], HOST, set(), 0, True)
    assert names(tracker.update([down], TOR, set(), S, True)) == ["leaf1"]
    assert names([t.verdict for t in tracker.open]) == ["leaf1"]
    assert not tracker.update([down, lossy], TOR | HOST, set(), 2 * S, True)


def test_a_share_of_tuples_is_named_after_more_of_them_were_tried(tracker: Tracker) -> None:
    for t in range(2):
        assert not tracker.update([link("flow_blackhole")], LINK, set(), t * S, True)
    assert tracker.update([link("flow_blackhole")], LINK, set(), 2 * S, True)


def test_links_that_may_be_their_switch_wait(tracker: Tracker) -> None:
    unsettled = {"leaf1--spine1"}
    assert not tracker.update([link()], LINK, unsettled, 0, True)
    assert not tracker.update([link()], LINK, unsettled, S, True)
    assert tracker.update([link()], LINK, unsettled, 2 * S, True)


def test_going_down_again_after_a_pause_is_a_flap(tracker: Tracker) -> None:
    down = link("link_down", direction="both")
    tracker.update([down], LINK, set(), 0, True)
    tracker.update([down], LINK, set(), S // 2, True)
    assert tracker.open[0].verdict.symptom == "link_down"
    tracker.update([], {}, set(), 5 * S, True)
    tracker.update([down], LINK, set(), 10 * S, True)
    assert tracker.open[0].verdict.symptom == "flap"


def test_a_black_hole_told_of_window_by_window_is_no_flap(tracker: Tracker) -> None:
    tracker.update([link("blackhole")], LINK, set(), 0, True)
    for t in (5, 10, 15):
        tracker.bad(tracker.open[0], (t - 5) * S, t * S)
    assert tracker.open[0].verdict.symptom == "blackhole"


def test_a_partial_drop_is_never_a_flap(tracker: Tracker) -> None:
    for t in range(0, 20, 4):
        tracker.update([link()], LINK, set(), t * S, True)
        tracker.bad(tracker.open[0], t * S, t * S)
    assert tracker.open[0].verdict.symptom == "drop"


def test_a_new_analyzer_goes_on_with_open_incidents(tracker: Tracker) -> None:
    tracker.adopt(link(), LINK["leaf1--spine1"], 100 * S)
    assert tracker.tracks["leaf1--spine1"].phase is Phase.OPEN
    assert not tracker.update([link()], LINK, set(), 101 * S, True), "it is open already"
    assert tracker.close(lambda t: True, 125 * S) == ["leaf1--spine1"]


@pytest.mark.parametrize(
    ("evidence", "closed"),
    [({"sent": 5000, "lost": 5000}, ["spine1"]), ({"links": ["leaf1--spine1"]}, [])],
    ids=["its losses are counted", "nobody walks its links"],
)
def test_a_switch_down_by_count_is_over_while_its_losses_are_remembered(
    tracker: Tracker, evidence: dict[str, object], closed: list[str]
) -> None:
    """Losses stay in the evidence for a minute; that nobody walks its links is so now."""
    down = Verdict(
        component="spine1", component_type="switch", symptom="switch_down", confidence=0.99, evidence=evidence
    )
    tracker.update([down], SWITCH, set(), 0, True)
    tracker.bad(tracker.open[0], 0, 3 * S)
    for t in range(4, 24):
        tracker.update([down], SWITCH, set(), t * S, True)
    assert tracker.close(lambda _: True, 24 * S) == closed


@pytest.mark.parametrize(("ago_s", "opens"), [(15, True), (25, False)])
def test_losses_long_past_open_nothing(tracker: Tracker, ago_s: int, opens: bool) -> None:
    dead = msgspec.structs.replace(link("blackhole"), rate=1.0, evidence={"last_lost_ns": (100 - ago_s) * S})
    assert bool(tracker.update([dead], LINK, set(), 100 * S, True)) is opens
