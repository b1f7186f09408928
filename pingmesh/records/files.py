"""Record files on disk: written whole or not at all, read row group by row group."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pingmesh.records.decode import flows_from_arrow, hosts_from_arrow
from pingmesh.records.errors import RecordsError
from pingmesh.records.model import HostFact, Records
from pingmesh.records.schema import FLOWS, HOSTS, KEY, flows_to_arrow, hosts_to_arrow, pyarrow

ROW_GROUP = 1 << 20
BATCH = Records | list[HostFact]


def write(path: Path, what: Records | Sequence[HostFact], about: Mapping[str, str]) -> int:
    """Write a `.parquet` or `.arrow` file; it appears under its name only when complete. Returns its bytes.

    Raises:
        RecordsError: pyarrow is missing, or the suffix is another.
        OSError: the disk says no.
    """
    pa = pyarrow(str(path))
    table = flows_to_arrow(what, about) if isinstance(what, Records) else hosts_to_arrow(what, about)
    part = path.with_name(f".{path.name}.part")
    try:
        if path.suffix == ".parquet":
            from pyarrow import parquet

            parquet.write_table(table, part, compression="zstd", row_group_size=ROW_GROUP, write_page_checksum=True)
        elif path.suffix == ".arrow":
            from pyarrow import ipc

            with pa.OSFile(str(part), "wb") as sink, ipc.new_file(sink, table.schema) as writer:
                writer.write_table(table, max_chunksize=ROW_GROUP)
        else:
            raise RecordsError(str(path), f"suffix {path.suffix!r} is no record file's", "use .parquet or .arrow")
        with part.open("rb") as f:
            os.fsync(f.fileno())
        size = part.stat().st_size
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return size


def tables(path: Path) -> Iterator[Any]:
    """The Arrow tables of a Parquet or Arrow file, of about `ROW_GROUP` rows each; an empty file has one without rows.

    Raises:
        RecordsError: the file cannot be read.
    """
    source = str(path)
    pa = pyarrow(source)
    try:
        if path.suffix == ".parquet":
            from pyarrow import parquet

            with parquet.ParquetFile(path, page_checksum_verification=True) as f:
                for i in range(f.num_row_groups):
                    yield _sound(f.read_row_group(i))
                if not f.num_row_groups:
                    yield _sound(f.read())
        else:
            from pyarrow import ipc

            with pa.OSFile(source, "rb") as raw:
                try:
                    reader = ipc.open_file(raw)
                except pa.ArrowInvalid:
                    raw.seek(0)
                    yield _sound(ipc.open_stream(raw).read_all())
                    return
                for i in range(reader.num_record_batches):
                    yield _sound(pa.Table.from_batches([reader.get_batch(i)]))
                if not reader.num_record_batches:
                    yield _sound(reader.schema.empty_table())
    except FileNotFoundError:
        raise RecordsError(source, "there is no such file", "give the path of a record file") from None
    except (OSError, pa.ArrowException, UnicodeDecodeError, IndexError) as error:
        if isinstance(error, OSError) and error.errno:  # Arrow's own words name the file again
            why = os.strerror(error.errno)
            raise RecordsError(source, f"cannot be read ({why})", "give the path of a record file") from None
        what = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise RecordsError(
            source, f"cannot be read as {path.suffix[1:]} ({what})", "check that the file is whole, or record it again"
        ) from None


def _sound(table: Any) -> Any:
    """The table, if buffers and names are what they claim: an Arrow file is memory as it was, and may point anywhere.

    Of a Parquet file checksums guard the pages, and not even those where another system wrote none.
    """
    table.validate(full=True)
    table.schema.names  # noqa: B018 - decodes them
    return table


def read(path: Path) -> Iterator[BATCH]:
    """Flow records or host facts of a file in our own schema, batch by batch.

    Raises:
        RecordsError: the file cannot be read, is of another schema or version, or holds what cannot be.
    """
    row = 1
    for table in tables(path):
        kind = (table.schema.metadata or {}).get(KEY, b"").decode("utf-8", "replace")
        if kind == FLOWS:
            yield flows_from_arrow(table, str(path), row)
        elif kind == HOSTS:
            yield hosts_from_arrow(table, str(path), row)
        elif kind:
            raise RecordsError(
                str(path),
                f"has schema {kind!r}, this pingmesh reads {FLOWS} and {HOSTS}",
                "use a pingmesh of its version",
            )
        else:
            raise RecordsError(
                str(path),
                "carries no pingmesh.schema in its metadata",
                "for another system's records say which column is which with --columns",
            )
        row += table.num_rows
