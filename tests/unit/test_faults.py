"""Arguments of faults, the places they name, the rules they make and the answers they expect."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from pingmesh.incidents import ComponentType, Symptom
from pingmesh.lab.faults import KINDS, FaultError, FaultSpec, parse, random_spec
from pingmesh.lab.faults.drops import Drop, Hook, parse_counters
from pingmesh.lab.faults.places import find_link
from pingmesh.lab.faults.spec import Action, Target, parse_percent, parse_rate
from pingmesh.lab.faults.truth import Truth, expect
from topology.generate import leaf_spine
from topology.model import Topology


def said(text: str) -> FaultSpec:
    return parse(text.split())


@pytest.fixture(scope="module")
def fabric() -> Topology:
    return leaf_spine(2, 2, 2, 1)


@pytest.fixture(scope="module")
def parallel() -> Topology:
    return leaf_spine(2, 1, 1, 1, parallel=2)


def test_loss_defaults_to_both_directions() -> None:
    spec = said("link leaf1 spine2 --loss 30%")
    assert spec == FaultSpec(target=Target.LINK, action=Action.LOSS, names=("leaf1", "spine2"), loss=0.3)
    assert spec.direction == "both"


def test_narrowing_alone_means_all_of_it() -> None:
    for option in ("--flows 25%", "--larger-than 1000", "--dscp 26"):
        assert said(f"link leaf1 spine2 {option}").loss == 1.0
    assert said("link leaf1 spine2 --flows 25% --loss 50").loss == 0.5


def test_down_reroutes_after_half_a_second_unless_told_otherwise() -> None:
    assert said("link a b --down").reroute_ms == 500
    assert said("link a b --down --reroute 50").reroute_ms == 50
    assert said("link a b --flap 2 --no-reroute").reroute_ms is None


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("link a b", "Say what happens"),
        ("link a a --down", "two ends"),
        ("link a b --down --loss 3", "not allowed with argument"),
        ("link a b --down --dscp 3", "--dscp does not go with --down"),
        ("link a b --congest 20mbit --flows 10%", "--flows does not go with --congest"),
        ("link a b --congest 20mbit --direction both", "one direction"),
        ("link a b --congest 900mbit", "does not work"),
        ("link a b --delay 0", "0.1 to 10000"),
        ("link a b --delay 5 --jitter 6", "before they are sent"),
        ("link a b --loss 5 --jitter 6", "--jitter goes with --delay only"),
        ("link a b --delay 5 --flows 10%", "--flows does not go with --delay"),
        ("link a b --delay 5 --reroute 5", "go with --down and --flap only"),
        ("link a b --loss 30 --reroute 5", "go with --down and --flap only"),
        ("link a b --down --direction forward", "in both directions"),
        ("link a b --loss 0", "above 0"),
        ("link a b --loss 101", "up to 100"),
        ("link a b --loss nan", "percentage"),
        ("link a b --dscp 64", "0 to 63"),
        ("link a --down", "required"),
        ("rnic h1/rnic0", "required"),
        ("rnic h1/rnic0 --down --direction rx", "--loss only"),
        ("host h1 --starve 0", "0.1 to 3600"),
        ("cable a b --down", "invalid choice"),
        ("broker", "required"),
    ],
)
def test_mistakes_are_one_sentence(text: str, sentence: str) -> None:
    with pytest.raises(FaultError) as caught:
        said(text)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_percentages_and_rates() -> None:
    assert parse_percent("0.5%") == parse_percent("0.5") == 0.005
    assert parse_rate("20mbit") == parse_rate("20M") == parse_rate("20000000") == 20_000_000


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_drawn_can_be_said_again_and_sent(kind: str, fabric: Topology) -> None:
    for seed in range(5):
        spec = parse(random_spec(random.Random(seed), fabric, [kind]))
        assert said(spec.text) == spec
        assert msgspec.convert(msgspec.to_builtins(spec), FaultSpec) == spec
        expected = expect(fabric, spec)
        assert expected.component_type in (None, *ComponentType.__args__)  # type: ignore[attr-defined]
        assert {expected.symptom, *expected.also} <= {None, *Symptom.__args__}  # type: ignore[attr-defined]


def test_drawing_is_repeatable_and_goes_everywhere(fabric: Topology) -> None:
    assert random_spec(random.Random(3), fabric) == random_spec(random.Random(3), fabric)
    rng = random.Random(1)
    drawn = {tuple(random_spec(rng, fabric, ["link-down"])[1:3]) for _ in range(200)}
    assert len(drawn) == 8  # four cables, said from either end
    with pytest.raises(FaultError, match="no kind of fault 'link-melt'"):
        random_spec(rng, fabric, ["link-melt"])


def test_drawn_links_of_parallel_cables_are_not_ambiguous(parallel: Topology) -> None:
    rng = random.Random(1)
    drawn = {expect(parallel, parse(random_spec(rng, parallel, ["link-down"]))).component for _ in range(100)}
    assert drawn == {k.name for k in parallel.links}


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("link spine2 leaf1 --loss 100 --direction forward", ("leaf1--spine2", "link", "spine2->leaf1", "blackhole")),
        ("link spine2 leaf1 --loss 30 --direction reverse", ("leaf1--spine2", "link", "leaf1->spine2", "drop")),
        ("link leaf1 spine1 --loss 30", ("leaf1--spine1", "link", "both", "drop")),
        ("link leaf1 spine1 --flows 25%", ("leaf1--spine1", "link", "both", "flow_blackhole")),
        ("link leaf1 spine1 --larger-than 999", ("leaf1--spine1", "link", "both", "large_packet_drop")),
        ("link leaf1 spine1 --dscp 26", ("leaf1--spine1", "link", "both", "class_drop")),
        ("link leaf1 spine1 --down", ("leaf1--spine1", "link", "both", "link_down")),
        ("link leaf1 spine1 --flap 2", ("leaf1--spine1", "link", "both", "flap")),
        ("link spine1 leaf1 --congest 20mbit", ("leaf1--spine1", "link", "spine1->leaf1", "high_rtt")),
        ("link leaf1 spine1 --delay 20", ("leaf1--spine1", "link", "both", "high_rtt")),
        ("link spine1 leaf1 --delay 20 --direction forward", ("leaf1--spine1", "link", "spine1->leaf1", "high_rtt")),
        ("rnic h1/rnic0 --loss 100 --direction rx", ("h1/rnic0", "rnic", "rx", "blackhole")),
        ("rnic h1 --down", ("h1/rnic0", "rnic", "both", "rnic_down")),
        ("switch spine1 --loss 5", ("spine1", "switch", None, "drop")),
        ("switch spine1 --down", ("spine1", "switch", None, "switch_down")),
        ("host h1 --down", ("h1", "host", None, "host_down")),
        ("host h1 --pause 5", ("h1", "host", None, "host_down")),
        ("host h1 --starve 5", ("h1", "host", None, "cpu_overload")),
        ("agent h1 --kill", ("h1", "host", None, "agent_down")),
        ("agent h1 --restart", ("h1", None, None, None)),
        ("broker --restart", ("broker", None, None, None)),
    ],
)
def test_the_right_answer(text: str, answer: tuple[str | None, ...], fabric: Topology) -> None:
    e = expect(fabric, said(text))
    assert (e.component, e.component_type, e.direction, e.symptom) == answer
    assert e.fabric == text.startswith(("link", "rnic", "switch"))


def test_public_truth_is_json_in_the_terms_of_incidents(fabric: Topology) -> None:
    spec = said("link leaf1 spine1 --loss 30")
    public = Truth("f1", spec, expect(fabric, spec), 1_700_000_000_000_000_000).public()
    assert public["injected_at"] == "2023-11-14T22:13:20.000Z"
    assert (public["state"], public["ended_at"]) == ("active", None)
    assert msgspec.json.decode(msgspec.json.encode(public)) == public


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("switch leaf9 --down", "no switch 'leaf9'; did you mean leaf"),
        ("link leaf1 spien2 --down", "did you mean spine2"),
        ("link leaf1 h1 --down", "use `rnic h1/rnic0`"),
        ("link leaf1 leaf2 --down", "leaf1 has links to spine1, spine2"),
        ("rnic h1/rnic7 --down", "did you mean"),
        ("host zebra --down", "there is h1, h2, h3, h4."),
    ],
)
def test_unknown_names_come_with_what_is_near(text: str, sentence: str, fabric: Topology) -> None:
    with pytest.raises(FaultError) as caught:
        expect(fabric, said(text))
    assert sentence in str(caught.value)


def test_parallel_cables_need_a_port(parallel: Topology) -> None:
    with pytest.raises(FaultError, match=r"2 parallel links join leaf1 and spine1; name a port: leaf1:\S+ spine1:"):
        find_link(parallel, "leaf1", "spine1")
    link = parallel.links[0]
    assert find_link(parallel, f"{link.a}:{link.a_port}", link.b) == link.forward
    assert find_link(parallel, link.b, f"{link.a}:{link.a_port}") == link.reverse
    with pytest.raises(FaultError, match="No link joins leaf1:x9"):
        find_link(parallel, "leaf1:x9", "spine1")


def rules(**narrow: Any) -> list[str]:
    script = Drop("f1", "leaf1", Hook.INPUT, "eth1", **narrow).install()
    return [line for line in script.splitlines() if line.endswith("jump f1_drop")]


def test_length_counts_the_ip_header_in_both_families() -> None:
    v4, v6 = rules(larger_than=1000)
    assert "ip length > 1000 " in v4
    assert "ip6 length > 960 " in v6  # IPv6 says the length of what follows its 40 bytes


def test_a_share_of_flows_is_a_hash_of_the_5_tuple_with_the_seed() -> None:
    v4, v6 = rules(flows=0.25, seed=0xBEEF)
    assert "jhash ip saddr . ip daddr . udp sport mod 100000 seed 0xbeef < 25000 " in v4
    assert "jhash ip6 saddr . ip6 daddr . udp sport mod 100000 seed 0xbeef < 25000 " in v6


def test_total_loss_draws_no_random_number() -> None:
    assert "numgen" not in Drop("f1", "leaf1", Hook.INPUT, "eth1").install()
    assert "numgen random mod 100000 >= 10 return" in Drop("f1", "s", Hook.INPUT, "p", loss=0.0001).install()


def test_counters_of_nft() -> None:
    text = '{"nftables": [{"metainfo": {}}, {"counter": {"name": "f1_dropped", "packets": 7, "bytes": 70}}]}'
    assert parse_counters(text) == {"f1_dropped": 7}
