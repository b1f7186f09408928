"""Figures in a Markdown page: they stand between two markers, and what is written by hand around them stays."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def _parts(page: Path, begin: str, end: str) -> tuple[str, str]:
    before, first, rest = page.read_text(encoding="utf-8").partition(begin)
    _, last, after = rest.partition(end)
    if not first or not last:
        raise ValueError(f"no {begin} ... {end}")
    return before, after


def require(page: Path, begin: str, end: str) -> None:
    """Before a long run: end the program with one sentence if the page cannot take its figures."""
    try:
        _parts(page, begin, end)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise SystemExit(f"{page} cannot take the figures: {reason}; give --docs a page with these markers") from None


def put(page: Path, lines: Sequence[str], begin: str, end: str) -> None:
    """Replace what stands between the markers. ValueError if they are not there."""
    before, after = _parts(page, begin, end)
    page.write_text("\n".join([before + begin, *lines, end]) + after, encoding="utf-8")
