"""Findings: what is wrong but is no fault of the fabric."""

from __future__ import annotations

from collections.abc import Iterable

from pingmesh.analyzer.flows import FlowBook
from pingmesh.analyzer.host_rules import SECOND
from pingmesh.analyzer.samples import SampleStore
from pingmesh.messages import BadMessageError, FindingReport

FORGET_NS = 120 * SECOND
SKEW_NS = SECOND


class Findings:
    """Kept while they hold, and two minutes more."""

    def __init__(self) -> None:
        self._reports: dict[tuple[str, str], FindingReport] = {}
        self._seen: dict[tuple[str, str], int] = {}
        self._mismatched: dict[str, int] = {}
        self._steps: dict[str, int] = {}

    def note(self, kind: str, subject: str, text: str, now: int) -> None:
        """A finding holds now."""
        key = (kind, subject)
        self._seen[key] = now
        if key not in self._reports:
            self._reports[key] = FindingReport(kind=kind, subject=subject, since_ns=now, text=text)

    def version(self, host: str, error: BadMessageError, now: int) -> None:
        """A message of another major version."""
        if "protocol version" in error.reason:
            self.note(
                "version_unsupported",
                host,
                f"{host} speaks another {error.reason}: its results are not used; bring it to the same major version.",
                now,
            )

    def clock(self, host: str, offset_ns: int, steps: int, now: int) -> None:
        """The agent's clock against ours, and how many steps it has seen itself since it started."""
        before, self._steps[host] = self._steps.get(host, 0), steps
        if steps > before:
            self.note("clock_skew", host, f"The wall clock of {host} was stepped: check its time service.", now)
        elif abs(offset_ns) > SKEW_NS:
            self.note(
                "clock_skew",
                host,
                f"The clock of {host} is {abs(offset_ns) / 1e9:.1f} s {'behind' if offset_ns > 0 else 'ahead'}: "
                "check its time service.",
                now,
            )

    def from_judgement(self, reports: Iterable[FindingReport], store: SampleStore, book: FlowBook, now: int) -> None:
        """Findings of the host rules, class mismatches, and answers that fit no path of the topology."""
        for r in reports:
            self.note(r.kind, r.subject, r.text, now)
        for name, n in store.mismatched.items():
            if n > self._mismatched.get(name, 0):
                self._mismatched[name] = n
                self.note(
                    "class_mismatch",
                    name,
                    f"Probes of {name} arrive in another class than they left in: a switch or host rewrites DSCP.",
                    now,
                )
        for key, hops in book.mismatches.items():
            flow = book.flows.get(key)
            if flow is not None:
                self.note(
                    "path_mismatch",
                    flow.src,
                    f"The traced path of {flow} ({hops}) is none of the topology's: check the cabling or the file.",
                    now,
                )

    def current(self, now: int) -> list[FindingReport]:
        """Those that hold, oldest first."""
        for key in [k for k, at in self._seen.items() if now - at > FORGET_NS]:
            del self._seen[key], self._reports[key]
        return sorted(self._reports.values(), key=lambda r: r.since_ns)
