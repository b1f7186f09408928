"""Whatever is in a topology file, reading it ends in a topology or in a TopologyError that names a line of it."""

from __future__ import annotations

import random
import tempfile

import yaml
from fuzzing import damaged, fuzz
from hypothesis import given
from hypothesis import strategies as st

from topology import files
from topology.generate import clos3, leaf_spine
from topology.model import Topology
from topology.warnings import warnings

BASE = files.dump(leaf_spine(2, 2, 1, 2, parallel=2))
SEEDS = [BASE, files.dump(clos3(2, 1, 1, 1, 1, 1, family=6))]
WORDS = [
    "leaf1",
    "spine1",
    "h1",
    "1",
    "-1",
    "~",
    "[]",
    "{}",
    "10.0.0.1",
    "::1",
    "&a ",
    "*a",
    "<<: *a",
    "? ",
    "!!int x",
    "tier: 1",
    "legs: [{switch: leaf1}]",
    "rnics: {}",
    "\t",
    "\n",
    "\n  ",
    "- ",
    ": ",
    "#",
    "'",
    '"',
    "|",
    ">",
    "%",
    "\x00",
    "\ud800",
    "\u2028",
    "\xe9",
    "0x1",
    "1_0",
    "1:30",
    "2024-01-01",
    ".nan",
    "on",
]

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(WORDS)


def read(text: str) -> tuple[Topology | None, tuple[files.Problem, ...]]:
    try:
        return files.parse(text), ()
    except files.TopologyError as e:
        return None, e.problems


def survives(text: str) -> None:
    t, problems = read(text)
    if t is None:
        assert problems
        last = max(text.count("\n"), len(text.splitlines())) + 1
        assert all(0 <= p.line <= last and p.render("f") for p in problems)
    else:
        assert files.parse(files.dump(t)) == t
        warnings(t)


@fuzz(100)
@given(st.text(max_size=200))
def test_random_text(text: str) -> None:
    survives(text)


@fuzz(200)
@given(st.binary(max_size=300) | damaged(st.sampled_from([s.encode() for s in SEEDS])))
def test_raw_bytes_in_a_file(data: bytes) -> None:
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        try:
            t = files.load(file.name)
        except files.TopologyError:
            return
    assert files.parse(files.dump(t)) == t


@fuzz(200)
@given(st.lists(st.sampled_from([*WORDS, *BASE.split()]), max_size=60).map(" ".join))
def test_random_words_of_the_format(text: str) -> None:
    survives(text)


@fuzz(300)
@given(
    st.sampled_from(SEEDS),
    st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 9), st.sampled_from(WORDS)), min_size=1, max_size=4),
)
def test_edited_files(seed: str, edits: list[tuple[int, int, str]]) -> None:
    text = seed
    for at, length, word in edits:
        at %= len(text) + 1
        text = text[:at] + word + text[at + length :]
    survives(text)


@fuzz(300)
@given(
    st.integers(0, 2**32),
    st.recursive(scalars, lambda s: st.lists(s, max_size=3) | st.dictionaries(scalars, s, max_size=3), max_leaves=6),
)
def test_valid_yaml_with_one_value_exchanged(seed: int, value: object) -> None:
    """Any node of a good file, replaced by anything."""
    rng = random.Random(seed)
    content = yaml.safe_load(rng.choice(SEEDS))
    place = content
    while True:
        key = rng.choice(list(place) if isinstance(place, dict) else range(len(place)))
        if isinstance(place[key], dict | list) and place[key] and rng.random() < 0.8:
            place = place[key]
            continue
        place[key] = value
        break
    try:
        text = yaml.safe_dump(content, allow_unicode=rng.random() < 0.5)
    except yaml.YAMLError:  # PyYAML cannot write some of it (a list as a key)
        return
    survives(text)
