"""Packet counts of flows as arrays: what the localiser computes on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Observation:
    """One-way packets of one flow (or of a group of packets) that shared a path.

    `paths` are the alternatives, equally likely, each a tuple of element names in any order; one entry means that the
    path is known. The two directions of a conversation are two observations.
    """

    sent: int
    lost: int
    paths: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """One row a flow: `sent` and `lost` packets, over one of the paths of the row's path set, all equally likely.

    The `*_ptr` arrays are CSR row pointers. `sent` and `lost` are (rows,), whole numbers; 0 <= lost <= sent. A set
    with one path is a known path. Elements are numbers below `elements`.
    """

    elements: int
    path_ptr: Ints
    """Path -> positions in `path_elements`."""
    path_elements: Ints
    set_ptr: Ints
    """Path set -> its paths (contiguous)."""
    row_set: Ints
    """Row -> path set."""
    sent: Floats
    lost: Floats
    flows: Floats | None = None
    """Flows that each row stands for, where it is the sum of several; None: one each. Rows with losses are one flow."""

    @property
    def rows(self) -> int:
        """Number of flows."""
        return len(self.row_set)


def expand(ptr: Ints, rows: Ints) -> tuple[Ints, Ints]:
    """All positions of CSR `rows`, concatenated, and for each the index into `rows` that it belongs to."""
    counts = ptr[rows + 1] - ptr[rows]
    owner = np.repeat(np.arange(len(rows)), counts)
    first = np.cumsum(counts) - counts
    return np.arange(len(owner)) - first[owner] + ptr[rows][owner], owner


def pointer(counts: npt.ArrayLike) -> Ints:
    """CSR row pointers from row lengths."""
    return np.concatenate((np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)))


def known_paths(elements: int, paths: Ints, sent: npt.ArrayLike, lost: npt.ArrayLike) -> Table:
    """A table of flows whose paths are known: `paths` is (rows, hops), element numbers, padded with -1.

    O(rows x hops); nothing is sorted.
    """
    there = paths >= 0
    rows = len(paths)
    return Table(
        elements=elements,
        path_ptr=pointer(there.sum(axis=1)),
        path_elements=paths[there].astype(np.int64, copy=False),
        set_ptr=np.arange(rows + 1),
        row_set=np.arange(rows),
        sent=np.asarray(sent, np.float64),
        lost=np.minimum(np.asarray(lost, np.float64), np.asarray(sent, np.float64)),
    )


def table_of(observations: Sequence[Observation], index: dict[str, int]) -> Table:
    """Observations as a table, with elements numbered by `index`; elements that it does not hold are added to it.

    Observations without packets or paths are no evidence and left out; `lost` is held within 0..`sent`. Flows with
    equal path sets share one. O(observations + unique paths x hops); callers that share `paths` tuples between
    observations save the hashing.
    """
    usable = [o for o in observations if o.sent > 0 and o.paths]
    by_identity: dict[int, int] = {}
    by_value: dict[tuple[tuple[str, ...], ...], int] = {}
    row_set = np.empty(len(usable), np.int64)
    for i, o in enumerate(usable):
        number = by_identity.get(id(o.paths))
        if number is None:
            number = by_identity[id(o.paths)] = by_value.setdefault(o.paths, len(by_value))
        row_set[i] = number
    flat: list[int] = []
    lengths: list[int] = []
    for paths in by_value:
        for path in paths:
            flat.extend(index.setdefault(e, len(index)) for e in path)
            lengths.append(len(path))
    sent = np.fromiter((o.sent for o in usable), np.float64, len(usable))
    lost = np.fromiter((o.lost for o in usable), np.float64, len(usable))
    return Table(
        elements=len(index),
        path_ptr=pointer(lengths),
        path_elements=np.array(flat, np.int64),
        set_ptr=pointer([len(paths) for paths in by_value]),
        row_set=row_set,
        sent=sent,
        lost=np.clip(lost, 0, sent),
    )
