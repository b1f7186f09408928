from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from pingmesh.cli import main

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target


def test_architecture_names_files_that_exist() -> None:
    named = re.findall(
        r"`((?:agent|controller|pingmesh|topology)/[a-z_/]*\.py)`", (ROOT / "docs/architecture.md").read_text()
    )
    assert len(named) > 40
    for name in named:
        assert (ROOT / name).is_file(), name


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_commands_shown_parse(page: Path) -> None:
    lines = re.findall(r"^(?:    |\$ )(?:\$ )?(pingmesh .*)$", page.read_text(), flags=re.MULTILINE)
    for line in lines:
        words = shlex.split(line, comments=True)[1:]
        if "..." in words:
            continue
        main.build_parser(words[0]).parse_args(words)


def test_every_command_is_in_the_readme() -> None:
    text = (ROOT / "README.md").read_text()
    for name in main.COMMANDS:
        assert re.search(rf"`(?:pingmesh )?{name}\b", text), name
