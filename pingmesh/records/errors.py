"""What may be wrong with a record file, in one sentence that says where and what to do."""

from __future__ import annotations

LONGEST_SHOWN = 60


def shown(value: object) -> str:
    """A value as sentences quote it: the first of a long one."""
    text = repr(value)
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}... ({len(text)} characters)"


class RecordsError(ValueError):
    """A record file that cannot be used. `row` counts from 1, the header of a CSV file left out."""

    def __init__(
        self, source: str, problem: str, remedy: str, *, row: int | None = None, column: str | None = None
    ) -> None:
        self.source = source
        self.row = row
        self.column = column
        place = source
        if row is not None:
            place += f": row {row}"
        if column is not None:
            place += f"{',' if row is not None else ':'} column {shown(column)}"
        super().__init__(f"{place}: {problem}; {remedy}.")


class MissingPyarrowError(RecordsError):
    """Parquet and Arrow files need pyarrow, which is an extra."""

    def __init__(self, source: str) -> None:
        super().__init__(
            source,
            "Parquet and Arrow files need pyarrow, which is not installed",
            "install it with `pip install 'pingmesh[offline]'`, or use CSV",
        )
