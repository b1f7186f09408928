"""When did it begin? The same evidence over several spans back, and the span in which faults explain most.

What was counted before a fault began speaks for the broken component, as clean packets do, and against it no
less than for its neighbours: a link that carried much is cleared of what an RNIC that carried little is not. The log
likelihood ratio of "these are broken since then" against "nothing is" comes only from what was counted since then,
so that spans can be compared (a generalised likelihood ratio over the time of change; Basseville and Nikiforov 1993).
"""

from __future__ import annotations

from collections.abc import Iterable

from pingmesh.analyzer.components import Components
from pingmesh.analyzer.localise import THRESHOLD, Suspect, localise_table
from pingmesh.analyzer.table import Table


def online(table: Table, components: Components, *, noise: float = 1e-4, threshold: float = THRESHOLD) -> list[Suspect]:
    """`localise_table` with the settings of the running analyzer (`pingmesh.analyzer.localise.localise`)."""
    return localise_table(table, components, noise=noise, threshold=threshold, further=0.0)


def best_span(
    tables: Iterable[Table], components: Components, *, noise: float = 1e-4, threshold: float = THRESHOLD
) -> tuple[int, list[Suspect]]:
    """The span whose suspects have the highest score together, and these; of equal ones the first.

    Args:
        tables: one for each span, in any order; they end at the same time.
        components: what may be broken.
        noise: see `localise_table`.
        threshold: see `localise_table`.

    Returns:
        The place of the span among the tables, and its suspects; (-1, []) if none of them has any.

    One inference a table.
    """
    best, found, top = -1, list[Suspect](), 0.0
    for i, table in enumerate(tables):
        suspects = online(table, components, noise=noise, threshold=threshold)
        score = sum(s.score for s in suspects)
        if score > top:
            best, found, top = i, suspects, score
    return best, found
