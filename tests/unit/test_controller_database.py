from __future__ import annotations

import stat
from pathlib import Path

import pytest

from controller import database


def test_nobody_else_may_read_it(tmp_path: Path) -> None:
    path = tmp_path / "new" / "pingmesh.db"
    db = database.connect(str(path))
    database.remember(db, "a", "b")
    files = list(path.parent.iterdir())
    assert path in files
    assert {stat.S_IMODE(f.stat().st_mode) for f in files} == {0o600}, files
    db.close()


def test_its_mode_is_the_owners_business_afterwards(tmp_path: Path) -> None:
    path = tmp_path / "pingmesh.db"
    database.connect(str(path)).close()
    path.chmod(0o640)
    database.connect(str(path)).close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


@pytest.mark.parametrize("place", ["file/pingmesh.db", "directory"])
def test_a_place_where_none_can_be_is_named(place: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "directory").mkdir()
    with pytest.raises(database.DatabaseError, match=r"controller\.database") as raised:
        database.connect(str(tmp_path / place))
    assert place in str(raised.value)
