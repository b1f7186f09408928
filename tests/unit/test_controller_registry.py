"""Registry: numbers that last, who is listed, boots that take turns; the database under it."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from controller_fakes import register, rnic_info

from controller import database
from controller.registry import GONE_AFTER_NS, GRACE_NS, Registry
from pingmesh.messages import AgentState, Register
from topology.generate import leaf_spine

T = leaf_spine(2, 2, 2, 1)
S = 1_000_000_000


@pytest.fixture
def db() -> sqlite3.Connection:
    return database.connect(":memory:")


def state(host: str, what: str, boot: int = 1) -> AgentState:
    return AgentState(cluster="lab", host=host, boot=boot, state=what)  # type: ignore[arg-type]


def test_numbers_last_as_long_as_names(tmp_path: Path) -> None:
    path = str(tmp_path / "c.db")
    first = Registry(database.connect(path))
    for host in ("h2", "h1"):
        change = first.register(register(T, host, ["rnic0"]), S)
        assert change.added == [f"{host}/rnic0"]
    numbers = {r.name: r.number for r in first.rnics.values()}
    again = Registry(database.connect(path))
    again.register(register(T, "h3", ["rnic0"]), S)
    again.register(register(T, "h1", ["rnic0"], boot=2, epoch=2), S)
    assert {n: again.rnics[n].number for n in numbers} == numbers
    assert again.rnics["h3/rnic0"].number not in numbers.values()
    assert again.by_number[numbers["h2/rnic0"]].name == "h2/rnic0"


def test_an_unchanged_registration_changes_nothing(db: sqlite3.Connection) -> None:
    r = Registry(db)
    r.register(register(T, "h1", ["rnic0"]), S)
    assert not r.register(register(T, "h1", ["rnic0"]), 2 * S)
    assert r.rnics["h1/rnic0"].since_ns == S
    assert r.agents["h1"].seen_ns == 2 * S


def test_a_new_epoch_moves_the_peer(db: sqlite3.Connection) -> None:
    r = Registry(db)
    r.register(register(T, "h1", ["rnic0"]), S)
    change = r.register(register(T, "h1", ["rnic0"], boot=2, epoch=9), 5 * S)
    assert (change.moved, change.added) == (["h1/rnic0"], [])
    record = r.rnics["h1/rnic0"]
    assert (record.peer().epoch, record.since_ns) == (9, 5 * S)


def test_going_down_is_no_move(db: sqlite3.Connection) -> None:
    r = Registry(db)
    r.register(register(T, "h1", ["rnic0"]), S)
    down = rnic_info(T, "h1/rnic0")
    down.up = False
    change = r.register(Register(cluster="lab", host="h1", boot=1, started_ns=1, rnics=[down]), 2 * S)
    assert change.moved == []
    assert change.other
    assert r.listed(2 * S) == {"h1/rnic0"}


def test_who_is_listed(db: sqlite3.Connection) -> None:
    r = Registry(db)
    for host in ("h1", "h2", "h3"):
        r.register(register(T, host, ["rnic0"]), 10 * S)
    assert r.agent_state(state("h1", "stopped"), 20 * S)
    assert r.agent_state(state("h2", "died"), 20 * S)
    assert r.listed(20 * S + GRACE_NS - 1) == {"h1/rnic0", "h2/rnic0", "h3/rnic0"}
    assert r.listed(20 * S + GRACE_NS) == {"h2/rnic0", "h3/rnic0"}
    assert r.walking() == {"h3"}
    assert r.listed(10 * S + GONE_AFTER_NS) == {"h2/rnic0"}
    assert r.listed(20 * S + GONE_AFTER_NS) == set()
    r.register(register(T, "h1", ["rnic0"]), 21 * S)
    assert "h1/rnic0" in r.listed(20 * S + 2 * GRACE_NS)


def test_a_controller_that_was_away_forgets_nobody(db: sqlite3.Connection) -> None:
    r = Registry(db)
    r.register(register(T, "h1", ["rnic0"]), 10 * S)
    later = 10 * S + 5 * GONE_AFTER_NS
    again = Registry(db)
    again.back(later)
    assert again.listed(later + S) == {"h1/rnic0"}


def test_the_will_of_an_earlier_boot_says_nothing_of_the_next(db: sqlite3.Connection) -> None:
    r = Registry(db)
    r.register(register(T, "h1", ["rnic0"], boot=1), S)
    r.register(register(T, "h1", ["rnic0"], boot=2, epoch=2), 2 * S)
    assert not r.agent_state(state("h1", "died", boot=1), 3 * S)
    assert r.walking() == {"h1"}
    assert not r.agent_state(state("nobody", "died"), 3 * S)


def test_a_registration_that_was_missed_shows_in_the_state(db: sqlite3.Connection) -> None:
    r = Registry(db)
    online = AgentState(cluster="lab", host="h1", boot=1, state="online", epochs={"rnic0": 1})
    assert r.missed(online)
    assert not r.missed(state("h1", "died"))
    r.register(register(T, "h1", ["rnic0"]), S)
    assert not r.missed(online)
    assert r.missed(state("h1", "online", boot=2))
    assert r.missed(AgentState(cluster="lab", host="h1", boot=1, state="online", epochs={"rnic0": 2}))
    assert r.missed(AgentState(cluster="lab", host="h1", boot=1, state="online", epochs={"rnic0": 1, "rnic1": 1}))


def test_a_device_left_out_leaves_and_returns(db: sqlite3.Connection) -> None:
    r = Registry(db)
    t = leaf_spine(1, 1, 1, 2)
    r.register(register(t, "h1", ["rnic0", "rnic1"]), S)
    assert r.register(register(t, "h1", ["rnic0"]), 10 * S).other
    assert r.listed(10 * S + GRACE_NS) == {"h1/rnic0"}
    assert r.register(register(t, "h1", ["rnic0", "rnic1"]), 20 * S).other
    assert r.listed(20 * S) == {"h1/rnic0", "h1/rnic1"}


def test_two_boots_in_turn_are_two_nodes(db: sqlite3.Connection) -> None:
    r = Registry(db)
    for at, boot in ((1, 1), (5, 2), (9, 2)):
        r.register(register(T, "h1", ["rnic0"], boot=boot, epoch=boot), at * S)
        assert r.duplicates(at * S) == []  # a restart
    r.register(register(T, "h1", ["rnic0"], boot=1, epoch=1), 60 * S)
    assert r.duplicates(60 * S) == [("h1", 60 * S)]
    assert r.duplicates(60 * S + 600 * S) == []


def test_entries_say_what_is_not_in_the_topology(db: sqlite3.Connection) -> None:
    r = Registry(db)
    r.register(register(T, "h1", ["rnic0"]), S)
    r.register(register(T, "stray", ["rnic0"]), S)
    assert [(e.name, e.in_topology) for e in r.entries(T.rnics)] == [("h1/rnic0", True), ("stray/rnic0", False)]


def test_what_was_registered_survives_a_kill(tmp_path: Path) -> None:
    path = tmp_path / "c.db"
    script = (
        "import os, signal, sys; sys.path.insert(0, sys.argv[2])\n"
        "from controller_fakes import register\n"
        "from controller import database\n"
        "from controller.registry import Registry\n"
        "from topology.generate import leaf_spine\n"
        "r = Registry(database.connect(sys.argv[1]))\n"
        "r.register(register(leaf_spine(1, 1, 1, 1), 'h1', ['rnic0']), 1)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(path), str(Path(__file__).parent)], check=False, timeout=60
    )
    assert done.returncode == -9
    db = database.connect(str(path))
    assert set(Registry(db).rnics) == {"h1/rnic0"}
    assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    db.close()


def test_no_database_of_ours(tmp_path: Path) -> None:
    text = tmp_path / "notes.txt"
    text.write_text("this is no database, and long enough to be seen as one that is not\n" * 20)
    with pytest.raises(database.DatabaseError, match=r"notes\.txt cannot be used .*controller\.database"):
        database.connect(str(text))
    newer = tmp_path / "newer.db"
    db = sqlite3.connect(newer)
    db.execute("PRAGMA user_version=99")
    db.close()
    with pytest.raises(database.DatabaseError, match="has layout 99, this version knows 1"):
        database.connect(str(newer))


def test_the_seed_is_drawn_once(tmp_path: Path) -> None:
    path = str(tmp_path / "c.db")
    one = database.connect(path)
    seed = database.seed(one)
    one.close()
    two = database.connect(path)
    assert database.seed(two) == seed
    two.close()
