"""The API and `diagnose`, over ASGI and over a real unix socket."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from controller_fakes import EcmpFabric, register

from controller import client, database
from controller.advice import STEPS
from controller.api import ListenError, bind, build, serve
from controller.clock import now_ns
from controller.service import Controller, probe_classes
from controller.views import parse_since
from pingmesh import topics
from pingmesh.config import ControllerSettings, Settings
from pingmesh.incidents import Symptom
from pingmesh.messages import (
    AgentState,
    BadMessageError,
    FindingReport,
    LinkSummary,
    Paths,
    Summary,
    TracedPath,
    Verdict,
    Verdicts,
    encode,
)
from topology.generate import leaf_spine

T = leaf_spine(2, 2, 2, 1)


class Bench:
    """A controller without a broker, fed by hand."""

    def __init__(self, **settings: object) -> None:
        self.c = Controller(
            Settings(cluster="lab", controller=ControllerSettings(**settings)),  # type: ignore[arg-type]
            T,
            database.connect(":memory:"),
        )
        self.fabric = EcmpFabric(T)

    def take(self, host: str, kind: str, payload: bytes) -> None:
        self.c.handle(topics.Topic("lab", host, kind), payload)

    def agents(self, *hosts: str) -> None:
        for host in hosts:
            self.take(host, topics.REGISTER, encode(register(T, host, ["rnic0"])))

    def plan(self, seconds: int = 20) -> None:
        """Let the planner live through some seconds, with tracing."""
        start = now_ns()
        for step in range(seconds * 2):
            self.c.tick(start + step * 500_000_000)
            self.c.publisher._compose()
            for source, target, sport in sorted(self.c.book.pending):
                record = self.c.registry.rnics[source]
                number = self.c.registry.rnics[target].number
                flows = self.c.book.sheets[source].flows
                for f in (f for f in flows if (f.peer, f.sport) == (number, sport)):
                    hops = self.fabric.hops(source, target, sport, f.trace_mask)
                    path = TracedPath(0, record.number, self.c.book.versions[source], f.index, sport, hops, 1)
                    m = Paths(cluster="lab", host=record.host, boot=1, now_ns=1, paths=[path])
                    self.take(record.host, topics.PATHS, encode(m))

    def verdicts(self, *verdicts: Verdict, findings: tuple[FindingReport, ...] = (), enough: bool = True) -> None:
        m = Verdicts(
            cluster="lab",
            host="_analyzer",
            now_ns=1,
            open=list(verdicts),
            findings=list(findings),
            enough_data=enough,
        )
        self.take(topics.ANALYZER, topics.VERDICTS, encode(m))

    def summary(self, *links: tuple[str, int, int], rnics: tuple[tuple[str, int, int], ...] = ()) -> None:
        m = Summary(
            cluster="lab",
            host="_analyzer",
            now_ns=1,
            span_s=60,
            links=[LinkSummary(*x) for x in links],
            rnics=[LinkSummary(*x) for x in rnics],
            rtt_us={"p50": 21.0},
        )
        self.take(topics.ANALYZER, topics.SUMMARY, encode(m))

    def get(self, path: str) -> object:
        answer = self.ask(path)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def ask(self, path: str) -> httpx.Response:
        async def go() -> httpx.Response:
            transport = httpx.ASGITransport(build(self.c))
            async with httpx.AsyncClient(transport=transport, base_url="http://controller") as asked:
                return await asked.get(path)

        return asyncio.run(go())

    def diagnose(self, hosts: str) -> dict[str, object]:
        answer = self.get(f"/diagnose?hosts={hosts}&since=10m")
        assert isinstance(answer, dict)
        return answer


@pytest.fixture(scope="module")
def built() -> Iterator[Bench]:
    bench = Bench()
    bench.agents("h1", "h2", "h3", "h4")
    bench.plan()
    yield bench
    bench.c.db.close()


@pytest.fixture
def bench(built: Bench) -> Bench:
    """The built one, without incidents."""
    with built.c.db:
        built.c.db.execute("DELETE FROM incidents")
        built.c.db.execute("DELETE FROM findings")
    built.c.store.open.clear()
    built.verdicts()
    built.summary(("leaf1->spine1", 600, 0), rnics=(("h1/rnic0", 900, 0),))
    return built


DROP = Verdict(
    component="leaf1--spine1",
    component_type="link",
    direction="leaf1->spine1",
    symptom="drop",
    confidence=0.99,
    evidence={"summary": "31 of 100 lost"},
)


def test_status_of_a_healthy_fabric(bench: Bench) -> None:
    status = bench.get("/status")
    assert isinstance(status, dict)
    assert status["healthy"] is True
    assert status["coverage"] == 1.0
    assert status["open_incidents"] == 0
    assert status["agents"]["expected"] == status["agents"]["online"] == 4
    assert status["rtt_us"] == {"p50": 21.0}


def test_status_with_an_incident_and_without_an_analyzer(bench: Bench) -> None:
    bench.verdicts(DROP)
    status = bench.get("/status")
    assert isinstance(status, dict)
    assert (status["healthy"], status["open_incidents"], status["enough_data"]) == (False, 1, True)
    fresh = Bench()
    status = fresh.get("/status")
    assert isinstance(status, dict)
    assert (status["healthy"], status["enough_data"], status["coverage"]) == (False, False, 0.0)
    assert status["agents"]["missing"] == ["h1", "h2", "h3", "h4"]


def test_lists_and_pages(bench: Bench) -> None:
    bench.verdicts(DROP, findings=(FindingReport(kind="clock_skew", subject="h2", since_ns=1, text="off by 3 s"),))
    (incident,) = bench.get("/incidents?state=open")  # type: ignore[misc]
    assert (incident["component"], incident["state"], incident["symptom"]) == ("leaf1--spine1", "open", "drop")
    assert bench.get("/incidents?state=closed") == []
    (finding,) = bench.get("/findings")  # type: ignore[misc]
    assert (finding["kind"], finding["subject"]) == ("clock_skew", "h2")
    rnics = bench.get("/rnics")
    assert isinstance(rnics, list)
    assert [r["name"] for r in rnics] == [f"h{i}/rnic0" for i in range(1, 5)]
    assert all(r["flows"] and r["listed"] and 10 <= r["rate"] <= 150 for r in rnics)
    two = bench.get("/rnics?name=h4/rnic0,h2/rnic0,h9/rnic0")
    assert isinstance(two, list)
    assert [r["name"] for r in two] == ["h2/rnic0", "h4/rnic0"]
    assert all({"gid", "qpn", "qkey", "epoch", "number"} <= set(r) for r in two)
    cover = bench.get("/coverage")
    assert isinstance(cover, dict)
    assert {x["link"] for x in cover["links"]} == {d.name for d in T.directed_links}
    shape = bench.get("/topology")
    assert isinstance(shape, dict)
    assert len(shape["links"]) == 4


def test_questions_that_cannot_be_answered(bench: Bench) -> None:
    for path, code, text in (
        ("/diagnose", 400, "no hosts"),
        ("/diagnose?hosts=h1,h77,h78", 404, "no host h77, h78 in the topology"),
        ("/diagnose?hosts=h1&since=yesterday", 400, "give an age"),
        ("/incidents?state=ajar", 400, "give open, closed or all"),
        ("/nothing", 404, "Not Found"),
    ):
        answer = bench.ask(path)
        assert answer.status_code == code
        assert text in answer.json()["error"]


def test_health_and_metrics(bench: Bench) -> None:
    assert bench.ask("/-/healthy").status_code == 200
    assert bench.ask("/-/ready").status_code == 503  # no broker here
    bench.verdicts(DROP)
    text = bench.ask("/metrics").text
    assert "pingmesh_agents_online 4.0" in text
    assert "pingmesh_coverage_ratio 1.0" in text
    assert 'pingmesh_incidents_open{symptom="drop"} 1.0' in text


def test_diagnose_network(bench: Bench) -> None:
    bench.verdicts(DROP)
    found = bench.diagnose("h1,h3")
    assert found["verdict"] == "network"
    assert found["incidents"][0]["component"] == "leaf1--spine1"  # type: ignore[index]
    assert "leaf1->spine1" in found["next"][0]  # type: ignore[index]
    assert found["coverage"]["share"] == 1.0  # type: ignore[index]


def test_diagnose_does_not_blame_links_elsewhere(bench: Bench) -> None:
    bench.verdicts(DROP)
    found = bench.diagnose("h1,h2")  # both under leaf1
    assert (found["verdict"], found["incidents"]) == ("innocent", [])
    assert bench.diagnose("h3")["verdict"] == "network"  # a single host: all that it may reach


def test_diagnose_counts_alternatives(bench: Bench) -> None:
    elsewhere = Verdict(component="h2/rnic0", component_type="rnic", symptom="drop", alternatives=["leaf1--spine1"])
    bench.verdicts(elsewhere)
    assert bench.diagnose("h1,h3")["verdict"] == "network"
    bench.verdicts(Verdict(component="h2/rnic0", component_type="rnic", symptom="drop"))
    assert bench.diagnose("h1,h3")["verdict"] == "innocent"


def test_diagnose_host(bench: Bench) -> None:
    bench.verdicts(Verdict(component="h3", component_type="host", symptom="cpu_overload", confidence=0.9))
    found = bench.diagnose("h1,h3")
    assert found["verdict"] == "host"
    assert "CPU" in found["next"][0]  # type: ignore[index]
    assert bench.diagnose("h1,h4")["verdict"] == "innocent"


def test_a_missing_agent_is_no_verdict(bench: Bench) -> None:
    bench.verdicts(Verdict(component="h3", component_type="host", symptom="agent_down", confidence=0.9))
    assert bench.diagnose("h1,h3")["verdict"] == "insufficient_data"


def test_diagnose_innocent_says_what_was_seen(bench: Bench) -> None:
    bench.summary(("leaf1->spine1", 600, 0), ("spine1->leaf2", 601, 1), ("elsewhere->x", 9, 9))
    found = bench.diagnose("h1,h3")
    assert found["verdict"] == "innocent"
    evidence = found["evidence"]
    assert isinstance(evidence, dict)
    assert evidence["summary"].startswith("1 of 1201 probes and ACKs were lost on the 8 directed links between them")
    assert evidence["links_with_loss"] == ["spine1->leaf2: 1 of 601 lost in 60 s"]
    assert len(evidence["hosts"]) == 2
    assert found["next"]


def test_nobody_is_innocent_of_what_was_not_measured(bench: Bench) -> None:
    bench.summary(("elsewhere->x", 9, 0), rnics=(("h4/rnic0", 9, 0),))
    for hosts in ("h1,h3", "h1,h2"):  # across the fabric, and under one ToR
        found = bench.diagnose(hosts)
        assert found["verdict"] == "insufficient_data"
        assert "nothing has been measured between them" in found["next"][0]  # type: ignore[index]


def test_diagnose_innocent_under_one_tor(bench: Bench) -> None:
    found = bench.diagnose("h1,h2,h1")
    evidence = found["evidence"]
    assert isinstance(evidence, dict)
    assert evidence["summary"] == "0 of 900 probes and ACKs were lost to or from their RNICs in the last 60 s"
    assert len(evidence["hosts"]) == 2


@pytest.mark.parametrize("enough", [True, False])
def test_diagnose_without_data(enough: bool) -> None:
    fresh = Bench()
    if not enough:
        fresh.verdicts(enough=False)
    found = fresh.diagnose("h1,h3")
    assert found["verdict"] == "insufficient_data"
    assert "agent runs on h1" in found["next"][0]  # type: ignore[index]


def test_a_fault_that_is_over_still_answers_for_its_time(bench: Bench) -> None:
    bench.verdicts(DROP)
    m = Verdicts(cluster="lab", host="_analyzer", now_ns=1, closed=["leaf1--spine1"])
    bench.take(topics.ANALYZER, topics.VERDICTS, encode(m))
    found = bench.diagnose("h1,h3")
    assert found["verdict"] == "network"
    assert "It is over" in found["next"][0]  # type: ignore[index]
    answer = bench.get("/diagnose?hosts=h1,h3")  # now only
    assert isinstance(answer, dict)
    assert answer["verdict"] == "innocent"


def test_every_symptom_has_advice() -> None:
    assert STEPS.keys() == set(Symptom.__args__)  # type: ignore[attr-defined]


def test_controller_findings() -> None:
    bench = Bench()
    bench.agents("h1")
    bench.take("stray", topics.REGISTER, encode(register(T, "stray", ["rnic9"])))
    wrong = register(T, "h2", ["rnic0"])
    wrong.rnics[0].address = "192.0.2.77"
    bench.take("h2", topics.REGISTER, encode(wrong))
    other = register(T, "h3", ["rnic0"])
    other.version = "2.0"
    with pytest.raises(BadMessageError):
        bench.take("h3", topics.REGISTER, encode(other))
    for boot in (1, 2, 1):
        bench.take("h4", topics.REGISTER, encode(register(T, "h4", ["rnic0"], boot=boot)))
    bench.plan(3)
    found = {(f.kind, f.subject) for f in bench.c.store.findings()}
    assert found == {
        ("not_in_topology", "stray/rnic9"),
        ("address_mismatch", "h2/rnic0"),
        ("version_unsupported", "h3"),
        ("duplicate_node", "h4"),
    }
    assert "stray/rnic9" not in bench.c.book.sheets
    assert all(e.target != "stray/rnic9" for e in bench.c.book.where)
    bench.agents("h3")
    bench.plan(1)
    assert "version_unsupported" not in {f.kind for f in bench.c.store.findings()}


def test_messages_that_cannot_be_used_are_rejected() -> None:
    bench = Bench()
    twice = register(T, "h1", ["rnic0", "rnic0"])
    slash = register(T, "h1", ["rnic0"])
    slash.rnics[0].device = "a/b"
    for host, kind, payload in (
        ("h1", topics.REGISTER, b"\xc1garbage"),
        ("h1", topics.REGISTER, encode(register(T, "h2", ["rnic0"]))),
        ("h1", topics.REGISTER, encode(twice)),
        ("h1", topics.REGISTER, encode(slash)),
        ("h1", topics.STATE, encode(register(T, "h1", ["rnic0"]))),
        ("h1", topics.PATHS, encode(AgentState(cluster="lab", host="h1", boot=1, state="online"))),
        (topics.ANALYZER, topics.VERDICTS, b""),
    ):
        with pytest.raises(BadMessageError):
            bench.take(host, kind, payload)
    assert bench.c.registry.rnics == {}


def test_paths_of_others_rnics_are_ignored(bench: Bench) -> None:
    source, target, sport = next(k for k in bench.c.book.paths if k[0] == "h1/rnic0")
    known = bench.c.book.paths[source, target, sport]
    index = next(i for e, i in bench.c.book.where.items() if e.tuple5 == (source, target, sport))
    other = next(p for p in ("172.16.0.1", *(d.target_address for d in T.directed_links)) if p)
    path = TracedPath(0, bench.c.registry.rnics[source].number, 99, index, sport, [(2, other)], 1)
    m = Paths(cluster="lab", host="h2", boot=1, now_ns=1, paths=[path])
    bench.take("h2", topics.PATHS, encode(m))
    assert bench.c.book.paths[source, target, sport] == known


def test_classes_of_the_settings() -> None:
    assert [c.name for c, _ in probe_classes(Settings())] == ["small", "large"]
    more = Settings(
        controller=ControllerSettings(
            classes=[
                {"name": "storage", "dscp": 10, "share": 0.5},
                {"name": "large", "dscp": 26, "size": 1024},
                {"name": "off", "dscp": 1, "share": 0.0},
            ]
        )
    )
    assert [(c.name, c.dscp, c.size, share) for c, share in probe_classes(more)] == [
        ("small", 26, 0, 1.0),
        ("large", 26, 1024, 0.25),
        ("storage", 10, 0, 0.5),
    ]


def test_since_in_all_its_forms() -> None:
    now = 10_000 * 10**9
    assert parse_since("", now) == 0
    assert parse_since("90s", now) == parse_since("90", now) == parse_since("1.5m", now) == now - 90 * 10**9
    assert parse_since("1970-01-01T01:00:00Z") == parse_since("1970-01-01T02:00:00+01:00") == 3600 * 10**9
    assert parse_since("1970-01-01T01:00:00") == 3600 * 10**9


async def test_the_client_over_a_unix_socket(tmp_path: Path, bench: Bench) -> None:
    listen = f"unix:{tmp_path}/c.sock"
    task = asyncio.create_task(serve(bench.c, bind(listen)))
    try:
        status = await asyncio.to_thread(client.get, listen, "/status")
        assert isinstance(status, dict)
        assert status["coverage"] == 1.0
        with pytest.raises(client.BadRequestError, match="no host x in the topology"):
            await asyncio.to_thread(client.get, listen, "/diagnose", hosts="x", since=None)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    second = bind(listen)  # the file of the first is replaced
    second.close()


def test_nobody_there(tmp_path: Path) -> None:
    for listen in (f"unix:{tmp_path}/none.sock", "127.0.0.1:1", "http://127.0.0.1:1"):
        with pytest.raises(client.ControllerUnreachableError, match="is it running"):
            client.get(listen, "/status")
    with pytest.raises(ListenError, match="cannot listen on nowhere:x"):
        bind("nowhere:x")


def test_a_dead_controllers_socket_is_closed_again(tmp_path: Path) -> None:
    bind(f"unix:{tmp_path}/c.sock").close()
    with pytest.raises(client.ControllerUnreachableError, match="refused"):
        client.get(f"unix:{tmp_path}/c.sock", "/status")
    gc.collect()  # a socket left open is an error of the whole suite's


def test_ticks_are_cheap(bench: Bench) -> None:
    began = time.process_time()
    for step in range(100):
        bench.c.tick(now_ns() + step * 250_000_000)
    assert time.process_time() - began < 1.0
