"""The examples of docs/topology.md are what it says they are."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from topology import cli, files, schema
from topology.warnings import warnings

PAGE = (Path(__file__).parents[2] / "docs" / "topology.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.parametrize("text", EXAMPLES, ids=["first", "fabrics"])
def test_the_examples_are_good_files(text: str) -> None:
    assert warnings(files.parse(text)) == ()


def test_the_first_example_is_described_rightly() -> None:
    t = files.parse(EXAMPLES[0])
    assert f"`ok, {cli.counts(t)}`" in PAGE
    names = {k.name for k in t.links} | {d.name for d in t.directed_links} | set(t.rnics)
    names |= {f"{r.name}@{leg.switch}" for r in t.rnics.values() if len(r.legs) > 1 for leg in r.legs}
    rows = re.findall(r"^\|[^|]*\|[^|]*\| `([^`]*)` \|$", PAGE, re.MULTILINE)
    assert len(rows) == 5
    assert set(rows) <= names


def test_every_key_is_explained() -> None:
    kinds = (schema.FileTopology, schema.FileSwitch, schema.FileHost, schema.FileLeg, schema.FileRnic, schema.FileLink)
    for kind in kinds:
        for field in msgspec.structs.fields(kind):
            assert re.search(rf"`[^`\n]*\b{field.encode_name}\b[^`\n]*`", PAGE), field.encode_name
