"""Whatever stands in a file, the environment or a flag: settings that can be written and read back, or ConfigError."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml
from fuzzing import anything, damaged, fuzz
from hypothesis import given
from hypothesis import strategies as st

from pingmesh.config import ConfigError, Settings, load
from pingmesh.config_load import dump

EXAMPLE = (Path(__file__).parents[2] / "deploy/pingmesh.yaml").read_bytes()
SMALL = b"broker: {port: 1, host: a}\ncontroller: {classes: [{name: a, dscp: 1}]}\n"
GOOD = [dump(Settings()).encode(), EXAMPLE, SMALL]
WORDS = [
    *dump(Settings()).split(),
    *("&a", "*a", "<<: *a", "!!int", "!!binary", "!!set", "!!omap", "!!timestamp", "? ", "- ", "{", "}", "[", "]"),
    *(
        "\n",
        "\n  ",
        "\t",
        "#",
        "'",
        '"',
        "|",
        ">",
        "%",
        "\0",
        "\ud800",
        "\u2028",
        "1e999",
        ".nan",
        ".inf",
        "0x1",
        "1:30",
    ),
    *("~", "9" * 5000, "2024-13-45", "2024-01-01", "on", "-1", "classes: [{name: a, dscp: 1}]", "null"),
]
SECTIONS = yaml.safe_load(dump(Settings()))
KEYS = [k for k, v in SECTIONS.items() if not isinstance(v, dict)] + [
    f"{section}.{key}" for section, keys in SECTIONS.items() if isinstance(keys, dict) for key in keys
]
texts = st.text(max_size=40) | st.lists(st.sampled_from(WORDS), max_size=6).map(" ".join)


def survives(file: bytes | None, flags: Mapping[str, object] | None, environ: Mapping[str, str]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = None
        if file is not None:
            path = str(Path(directory) / "pingmesh.yaml")
            Path(path).write_bytes(file)
        try:
            settings = load(path, flags, environ)
        except ConfigError as error:
            problems = error.problems
        else:
            again = Path(directory) / "again.yaml"
            again.write_text(dump(settings), encoding="utf-8")
            assert load(str(again), environ={}) == settings
            return
    assert problems
    assert all(p.strip() for p in problems)


@fuzz(150)
@given(st.binary(max_size=200) | st.text(max_size=100).map(lambda t: t.encode("utf-8", "replace")))
def test_any_bytes_as_the_file(data: bytes) -> None:
    survives(data, None, {})


@fuzz(150)
@given(st.lists(st.sampled_from(WORDS), max_size=30).map(lambda w: " ".join(w).encode("utf-8", "replace")))
def test_words_of_the_format(data: bytes) -> None:
    survives(data, None, {})


@fuzz(150)
@given(damaged(st.sampled_from(GOOD)))
def test_damaged_files(data: bytes) -> None:
    survives(data, None, {})


@fuzz(150)
@given(st.dictionaries(st.sampled_from(KEYS), anything | texts, max_size=4))
def test_a_file_with_any_values(values: dict[str, object]) -> None:
    content: dict[str, object] = {}
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        below = content.setdefault(section, {}) if section else content
        assert isinstance(below, dict)
        below[name] = value
    try:
        text = yaml.safe_dump(content)
    except yaml.YAMLError:  # PyYAML cannot write some of it
        return
    survives(text.encode("utf-8", "replace"), None, {})


@fuzz(200)
@given(
    st.dictionaries(
        st.sampled_from(KEYS).map(lambda k: "PINGMESH_" + k.replace(".", "__").upper())
        | texts.map(lambda t: "PINGMESH_" + t)
        | st.sampled_from(["PINGMESH_BROKER", "PINGMESH_CONFIG", "PINGMESH_", "PINGMESH___", "PINGMESH_AGENT__"]),
        texts | st.sampled_from(["[{name: a, dscp: 1}]", "::1:5", "[::1]:5", "a:1", ":", "a,b", ",", "/dev/null"]),
        max_size=4,
    )
)
def test_any_environment(environ: dict[str, str]) -> None:
    survives(None, None, environ)


@fuzz(150)
@given(st.dictionaries(st.sampled_from([*KEYS, "broker", "agent", "", "."]) | texts, anything | texts, max_size=4))
def test_any_flags(flags: dict[str, object]) -> None:
    survives(None, flags, {})


@pytest.mark.parametrize("entry", ["-", "- {}", "- {dscp: 3}"])
def test_an_entry_of_a_list_without_its_required_fields(tmp_path: Path, entry: str) -> None:
    place = tmp_path / "pingmesh.yaml"
    place.write_text(f"controller:\n  classes:\n    {entry}\n")
    with pytest.raises(ConfigError, match="classes"):
        load(str(place), {}, {})
