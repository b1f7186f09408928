"""A directory of record files of bounded size: a new file every so often, the oldest removed first."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from pingmesh.records import files
from pingmesh.records.model import HostFact, Records

_NAME = re.compile(r"(flows|hosts)-(\d{8}T\d{6}-\d{6})\.(parquet|arrow)")


@dataclass(slots=True)
class Spooled:
    """What was written so far, and what had to go."""

    files: int = 0
    rows: int = 0
    bytes: int = 0
    removed: int = 0


class Spool:
    """Writes pairs of files, `flows-TIME-N` and `hosts-TIME-N`; those of one pair come and go together.

    Only files of these names count towards `max_bytes` and are removed; the newest pair always stays.
    """

    def __init__(self, directory: Path, max_bytes: int, about: Mapping[str, str], suffix: str = ".parquet") -> None:
        self._directory = directory
        self._max_bytes = max_bytes
        self._about = about
        self._suffix = suffix
        self._number = max((int(stem[-6:]) for stem in self._pairs()), default=0)
        self.done = Spooled()

    def write(self, records: Records | None, facts: Sequence[HostFact], at_ns: int) -> list[Path]:
        """Write what there is, then make room. Returns the files written.

        Raises:
            RecordsError: pyarrow is missing.
            OSError: the disk says no.
        """
        self._number = (self._number + 1) % 1_000_000
        stem = f"{datetime.fromtimestamp(at_ns / 1e9, tz=UTC):%Y%m%dT%H%M%S}-{self._number:06d}"
        written = []
        for kind, what in (("flows", records), ("hosts", facts)):
            if what is not None and len(what):
                path = self._directory / f"{kind}-{stem}{self._suffix}"
                self.done.bytes += files.write(path, what, self._about)
                self.done.files += 1
                written.append(path)
        self.done.rows += len(records) if records is not None else 0
        self._make_room()
        return written

    def _pairs(self) -> dict[str, list[Path]]:
        """The files by their common part, oldest first."""
        out: dict[str, list[Path]] = {}
        for path in self._directory.iterdir():
            match = _NAME.fullmatch(path.name)
            if match:
                out.setdefault(match[2], []).append(path)
        return dict(sorted(out.items()))

    def _make_room(self) -> None:
        pairs = self._pairs()
        sizes = {stem: sum(p.stat().st_size for p in paths) for stem, paths in pairs.items()}
        total = sum(sizes.values())
        for stem in list(pairs)[:-1]:
            if total <= self._max_bytes:
                return
            for path in pairs[stem]:
                path.unlink(missing_ok=True)
                self.done.removed += 1
            total -= sizes[stem]
