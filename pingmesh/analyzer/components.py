"""What may be broken, compiled once for a fabric: which elements each component's packets cross, as arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pingmesh.analyzer.candidates import Candidate
from pingmesh.analyzer.table import Bools, Ints, pointer


@dataclass(frozen=True, slots=True, eq=False)
class Components:
    """Candidates with one loss rate (`singles`) as CSR over element numbers, and those with two (`pairs`).

    A single is one direction of a cable, one side of an RNIC or leg, a switch or a host. A pair is both directions of
    a component: two singles, given by their numbers.
    """

    index: dict[str, int]
    """Element name -> number."""
    singles: tuple[Candidate, ...]
    ptr: Ints
    """Single -> positions in `elements`."""
    elements: Ints
    element_ptr: Ints
    """Element -> positions in `element_singles`."""
    element_singles: Ints
    pairs: dict[tuple[int, int], Candidate]
    partner: dict[int, int]
    """The other direction of a single."""
    groups: Ints
    """Numbers of the singles that hold several elements."""
    may_share: Bools
    """Singles that may drop a share of the 5-tuples: all but groups that are no switches."""
    sides: Ints
    """The pairs' singles, (pairs, 2), ascending."""

    def of(self, single: int) -> list[int]:
        """The elements of a single."""
        found: list[int] = self.elements[self.ptr[single] : self.ptr[single + 1]].tolist()
        return found

    def named(self, singles: tuple[int, ...]) -> Candidate:
        """The candidate that is a single, or a pair of them."""
        return self.singles[singles[0]] if len(singles) == 1 else self.pairs[singles[0], singles[1]]

    def singles_of(self, element: int) -> Ints:
        """The singles that hold an element."""
        return self.element_singles[self.element_ptr[element] : self.element_ptr[element + 1]]

    def sums(self, values: np.ndarray) -> np.ndarray:
        """Sum over each single's elements of a per-element value. O(elements of all singles)."""
        padded = np.append(values[self.elements], 0.0)
        return np.add.reduceat(padded, self.ptr[:-1]) if len(self.singles) else np.empty(0)


def compile_components(candidates: Sequence[Candidate]) -> Components:
    """Number the elements and index singles by element. O(elements of all candidates); once for a fabric."""
    ordered = sorted(candidates, key=lambda c: c.order)
    index: dict[str, int] = {}
    singles: list[Candidate] = []
    by_elements: dict[tuple[str, frozenset[str]], int] = {}
    flat: list[int] = []
    sizes: list[int] = []
    for c in ordered:
        if len(c.parts()) != 1 or not c.elements:
            continue
        by_elements[c.component, c.elements] = len(singles)
        singles.append(c)
        flat.extend(index.setdefault(e, len(index)) for e in sorted(c.elements))
        sizes.append(len(c.elements))
    pairs: dict[tuple[int, int], Candidate] = {}
    for c in ordered:
        if len(c.parts()) == 2:
            a, b = (by_elements.get((c.component, part)) for part in c.parts())
            if a is not None and b is not None:
                pairs[min(a, b), max(a, b)] = c
    elements = np.array(flat, np.int64)
    may_share = [n == 1 or c.type == "switch" for n, c in zip(sizes, singles, strict=True)]
    order = np.argsort(elements, kind="stable")
    return Components(
        index=index,
        singles=tuple(singles),
        ptr=pointer(sizes),
        elements=elements,
        element_ptr=pointer(np.bincount(elements, minlength=len(index))),
        element_singles=np.repeat(np.arange(len(singles)), sizes)[order],
        pairs=pairs,
        partner={a: b for pair in pairs for a, b in (pair, pair[::-1])},
        groups=np.flatnonzero(np.array(sizes) > 1),
        may_share=np.array(may_share, bool),
        sides=np.array(sorted(pairs), np.int64).reshape(-1, 2),
    )
