"""Observations as arrays: what the localiser computes on."""

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
class Evidence:
    """Observations grouped by path set. A *slot* is one alternative of one path set; a *group* is `flows` equal flows.

    Clean flows of one known path make a single group whose `sent` is their mean: their likelihood needs no more.
    The `*_ptr` arrays are CSR row pointers.
    """

    elements: tuple[str, ...]
    set_ptr: Ints
    """Path set -> its slots (contiguous)."""
    slot_set: Ints
    slot_ptr: Ints
    """Slot -> positions in `slot_elements`."""
    slot_elements: Ints
    element_ptr: Ints
    """Element -> positions in `element_slots`."""
    element_slots: Ints
    group_ptr: Ints
    """Path set -> its groups (contiguous)."""
    group_set: Ints
    sent: Floats
    lost: Floats
    flows: Floats

    @property
    def hops(self) -> Ints:
        """Elements a packet crosses, per slot; at least 1."""
        return np.maximum(np.diff(self.slot_ptr), 1)

    def slots_of(self, elements: Sequence[int]) -> Ints:
        """The slots that touch any of the elements, ascending."""
        found = [self.element_slots[self.element_ptr[e] : self.element_ptr[e + 1]] for e in elements]
        if len(found) == 1:
            return found[0]
        return np.unique(np.concatenate(found)) if found else np.empty(0, np.int64)


def expand(ptr: Ints, rows: Ints) -> tuple[Ints, Ints]:
    """All positions of CSR `rows`, concatenated, and for each the index into `rows` that it belongs to."""
    counts = ptr[rows + 1] - ptr[rows]
    owner = np.repeat(np.arange(len(rows)), counts)
    first = np.cumsum(counts) - counts
    return np.arange(len(owner)) - first[owner] + ptr[rows][owner], owner


def _pointer(counts: Ints) -> Ints:
    return np.concatenate((np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)))


def compile_evidence(observations: Sequence[Observation]) -> Evidence:
    """Group observations and index them by element.

    Observations without packets or paths are no evidence and left out; `lost` is held within 0..`sent`.
    O(observations + unique paths x hops); callers that share `paths` tuples between observations save the hashing.
    """
    usable = [o for o in observations if o.sent > 0 and o.paths]
    by_identity: dict[int, int] = {}
    by_value: dict[tuple[tuple[str, ...], ...], int] = {}
    obs_set = np.empty(len(usable), np.int64)
    for i, o in enumerate(usable):
        number = by_identity.get(id(o.paths))
        if number is None:
            number = by_identity[id(o.paths)] = by_value.setdefault(o.paths, len(by_value))
        obs_set[i] = number

    index: dict[str, int] = {}
    flat: list[int] = []
    lengths: list[int] = []
    alternatives: list[int] = []
    for paths in by_value:
        alternatives.append(len(paths))
        for path in paths:
            numbers = {index.setdefault(e, len(index)) for e in path}
            flat.extend(numbers)
            lengths.append(len(numbers))
    slot_elements = np.array(flat, np.int64)
    slot_ptr = _pointer(np.array(lengths, np.int64))
    set_sizes = np.array(alternatives, np.int64)
    slot_set = np.repeat(np.arange(len(set_sizes)), set_sizes)
    # Sixteen-bit keys are sorted by radix, several times faster.
    keys = slot_elements.astype(np.uint16) if len(index) <= 0xFFFF else slot_elements
    by_element = np.argsort(keys, kind="stable")
    slot_of_position = np.repeat(np.arange(len(lengths)), np.diff(slot_ptr))

    sent = np.fromiter((o.sent for o in usable), np.int64, len(usable))
    lost = np.clip(np.fromiter((o.lost for o in usable), np.int64, len(usable)), 0, sent)
    mergeable = (lost == 0) & (set_sizes[obs_set] == 1) if len(usable) else np.empty(0, bool)
    size_key = np.where(mergeable, 0, sent)
    order = np.lexsort((lost, size_key, obs_set))
    s, z, k = obs_set[order], size_key[order], lost[order]
    is_first = np.ones(len(order), bool)
    is_first[1:] = (s[1:] != s[:-1]) | (z[1:] != z[:-1]) | (k[1:] != k[:-1])
    starts = np.flatnonzero(is_first)
    flows = np.diff(np.append(starts, len(order))).astype(np.float64)
    total = np.add.reduceat(sent[order], starts) if len(starts) else np.empty(0, np.int64)
    group_set = s[starts]
    return Evidence(
        elements=tuple(index),
        set_ptr=_pointer(set_sizes),
        slot_set=slot_set,
        slot_ptr=slot_ptr,
        slot_elements=slot_elements,
        element_ptr=_pointer(np.bincount(slot_elements, minlength=len(index))),
        element_slots=slot_of_position[by_element],
        group_ptr=_pointer(np.bincount(group_set, minlength=len(set_sizes))),
        group_set=group_set,
        sent=total / np.maximum(flows, 1),
        lost=k[starts].astype(np.float64),
        flows=flows,
    )
