"""The rule of Liu et al. 2024 (R-Pingmesh), §5, as a baseline: RNICs by a tenth of their probes, links by vote.

1. An RNIC is anomalous if more than 10 % of the ToR-mesh probes *to* it fail; all failures to or from it are its own.
2. Of what is left each failed probe votes once for each link on its path (and its ACK's, in round trips); the links
   with the most votes are named if enough probes failed ("more than a threshold", which is not published: `least`).
   Cluster probes (ToR-mesh and inter-ToR) and service flows vote separately. Flows without a known path do not vote.

The paper votes for switches the same way, but a switch always has at least the votes of its links and no rule says
which of the two to believe; links are named here.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

RNIC_RATE = 0.1
TOR_MESH, INTER_TOR, SERVICE = 0, 1, 2


@dataclass(frozen=True)
class Named:
    """RNICs found anomalous and, of the rest, the most voted links."""

    rnics: Ints
    links: Ints


def paper_rule(
    links: int, hops: Ints, kind: Ints, src: Ints, dst: Ints, sent: Ints, lost: Ints, *, least: int = 10
) -> Named:
    """Names from one window. `hops` is (records, any): link numbers below `links`, padded with -1, all -1 where the
    path is not known; `kind` is 0 ToR-mesh, 1 inter-ToR, 2 service; `src` and `dst` are RNIC numbers; `sent` and
    `lost` packets. O(records x hops)."""
    size = int(max(src.max(initial=-1), dst.max(initial=-1))) + 1
    mesh = kind == TOR_MESH
    probes = np.bincount(dst[mesh], sent[mesh], size)
    failed = np.bincount(dst[mesh], lost[mesh], size)
    anomalous = failed > RNIC_RATE * probes
    rest = np.where(anomalous[src] | anomalous[dst], 0, lost)
    named = []
    for group in (kind != SERVICE, kind == SERVICE):
        votes = np.bincount((hops[group] % (links + 1)).ravel(), np.repeat(rest[group], hops.shape[1]), links + 1)[
            :links
        ]
        if rest[group].sum() >= least and votes.max(initial=0) > 0:
            named.append(np.flatnonzero(votes == votes.max()))
    return Named(np.flatnonzero(anomalous), np.unique(np.concatenate(named)) if named else np.empty(0, np.int64))
