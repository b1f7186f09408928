"""Incidents and findings: identifiers minted once, updates by rule, a history of what changed."""

from __future__ import annotations

import secrets
import sqlite3
import time
from collections.abc import Iterable
from typing import cast, get_args

import msgspec

from pingmesh.incidents import ComponentType, Finding, Incident, Symptom, rfc3339
from pingmesh.messages import BadMessageError, FindingReport, Verdict, Verdicts

HISTORY_LIMIT = 200
LAST_NS = 1 << 62
"""Well within both SQLite's integers and what a date can say."""
TRACKED = ("component", "direction", "symptom", "cls", "alternatives")
"""Fields whose change is written into an incident's history."""

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Incident).decode


class Store:
    """Owns incidents and findings. Level-triggered: give it the analyzer's whole view as often as you like."""

    def __init__(self, db: sqlite3.Connection, cluster: str) -> None:
        self._db = db
        self._cluster = cluster
        rows = db.execute("SELECT record FROM incidents WHERE state = 'open' ORDER BY opened_at")
        self.open: dict[str, Incident] = {i.id: i for i in (_decode(blob) for (blob,) in rows)}

    # ------------------------------------------------------------ incidents

    def apply(self, m: Verdicts, now_ns: int) -> list[Incident]:
        """Take the analyzer's view in; returns the incidents that opened, closed or changed in a tracked field.

        A verdict updates the open incident that has its component, else the one that has it among its alternatives,
        else it opens a new one; one verdict an incident. What neither list names stays as it is.
        Raises BadMessageError, and changes nothing, when a type, symptom or time is none.
        """
        for v in m.open:
            if v.component_type not in get_args(ComponentType) or v.symptom not in get_args(Symptom):
                raise BadMessageError("Verdicts", f"names no known type or symptom: {v.component_type}, {v.symptom}")
        times = [v.since_ns for v in m.open] + [f.since_ns for f in m.findings]
        if any(not 0 <= at < LAST_NS for at in times):
            raise BadMessageError("Verdicts", "holds a time that is none")
        changed: list[Incident] = []
        touched: list[Incident] = []
        matched = self._match(m.open)
        for at, verdict in enumerate(m.open):
            incident = matched.get(at)
            if incident is None:
                incident = self._new(verdict, now_ns)
                matched[at] = self.open[incident.id] = incident
                changed.append(incident)
            elif self._update(incident, verdict, now_ns):
                changed.append(incident)
            touched.append(incident)
        reported = {i.id for i in matched.values()}
        for component in m.closed:
            for incident in self._over(component, reported):
                incident.state, incident.closed_at = "closed", now_ns
                _note(incident, now_ns, "closed", None, None)
                del self.open[incident.id]
                changed.append(incident)
                touched.append(incident)
        self._save(touched)
        return changed

    def _match(self, verdicts: list[Verdict]) -> dict[int, Incident]:
        scored = []
        for at, v in enumerate(verdicts):
            for incident in self.open.values():
                score = _likeness(incident, v)
                if score:
                    scored.append((-score, incident.opened_at, incident.id, at))
        out: dict[int, Incident] = {}
        taken: set[str] = set()
        for _, _, key, at in sorted(scored):
            if key not in taken and at not in out:
                taken.add(key)
                out[at] = self.open[key]
        return out

    def _over(self, component: str, reported: set[str]) -> list[Incident]:
        free = [i for i in self.open.values() if i.id not in reported]
        exact = [i for i in free if i.component == component]
        # Refined and closed before we heard of it: only the alternatives know the name.
        return exact or [i for i in free if component in i.alternatives][:1]

    def _new(self, v: Verdict, now_ns: int) -> Incident:
        stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime(now_ns / 1e9))
        incident = Incident(
            id=f"inc-{stamp}-{secrets.token_hex(3)}",
            cluster=self._cluster,
            component=v.component,
            component_type=cast(ComponentType, v.component_type),
            symptom=cast(Symptom, v.symptom),
            opened_at=now_ns,
        )
        _copy(incident, v)
        _note(incident, now_ns, "opened", None, f"{v.component} {v.symptom}")
        return incident

    def _update(self, incident: Incident, v: Verdict, now_ns: int) -> bool:
        before = {f: getattr(incident, f) for f in TRACKED}
        _copy(incident, v)
        changed = False
        for name, old in before.items():
            new = getattr(incident, name)
            if new != old:
                _note(incident, now_ns, "class" if name == "cls" else name, old, new)
                changed = True
        return changed

    def _save(self, incidents: Iterable[Incident]) -> None:
        with self._db:
            self._db.executemany(
                "INSERT OR REPLACE INTO incidents VALUES (?, ?, ?, ?, ?)",
                [(i.id, i.state, i.opened_at, i.closed_at, _encode(i)) for i in incidents],
            )

    def incidents(self, state: str | None = None, since_ns: int = 0, limit: int = 1000) -> list[Incident]:
        """Incidents in a state (None: any) that were open at `since_ns` or later, newest first."""
        rows = self._db.execute(
            "SELECT record FROM incidents WHERE (?1 IS NULL OR state = ?1) AND (closed_at IS NULL OR closed_at >= ?2)"
            " ORDER BY opened_at DESC, id LIMIT ?3",
            (state, since_ns, limit),
        )
        return [_decode(blob) for (blob,) in rows]

    def verdicts(self) -> list[Verdict]:
        """The open incidents as verdicts, for an analyzer that starts."""
        return [
            Verdict(
                component=i.component,
                component_type=i.component_type,
                direction=i.direction,
                ends=i.ends,
                symptom=i.symptom,
                cls=i.cls,
                rate=i.rate,
                rate_low=i.rate_low,
                rate_high=i.rate_high,
                confidence=i.confidence,
                priority=i.priority,
                alternatives=i.alternatives,
                evidence=i.evidence,
                since_ns=i.opened_at,
            )
            for i in sorted(self.open.values(), key=lambda i: (i.opened_at, i.id))
        ]

    # ------------------------------------------------------------ findings

    def set_findings(self, source: str, reports: Iterable[FindingReport]) -> bool:
        """Replace what one source (`analyzer`, `controller`) finds; ids last while a finding does. True on change."""
        want = {(r.kind, r.subject): r for r in reports}
        rows = self._db.execute("SELECT kind, subject, text FROM findings WHERE source = ?", (source,)).fetchall()
        have = {(kind, subject): text for kind, subject, text in rows}
        gone = have.keys() - want.keys()
        fresh = [r for key, r in want.items() if key not in have]
        reworded = [r for key, r in want.items() if key in have and have[key] != r.text]
        if gone or fresh or reworded:
            with self._db:
                self._db.executemany(
                    "DELETE FROM findings WHERE source = ? AND kind = ? AND subject = ?", [(source, *k) for k in gone]
                )
                self._db.executemany(
                    "INSERT INTO findings VALUES (?, ?, ?, ?, ?, ?)",
                    [(f"fnd-{secrets.token_hex(5)}", source, r.kind, r.subject, r.since_ns, r.text) for r in fresh],
                )
                self._db.executemany(
                    "UPDATE findings SET text = ? WHERE source = ? AND kind = ? AND subject = ?",
                    [(r.text, source, r.kind, r.subject) for r in reworded],
                )
        return bool(gone or fresh)

    def findings(self) -> list[Finding]:
        """What is found now, oldest first; what several sources find is one finding."""
        rows = self._db.execute("SELECT id, kind, subject, since, text FROM findings ORDER BY since, id")
        out: dict[tuple[str, str], Finding] = {}
        for i, k, s, at, t in rows:
            out.setdefault((k, s), Finding(id=i, kind=k, subject=s, since=at, text=t))
        return list(out.values())


def _likeness(incident: Incident, v: Verdict) -> int:
    if v.component == incident.component:
        same = (incident.direction == v.direction) + (incident.symptom == v.symptom) + (incident.cls == v.cls)
        return 10 + 2 * same + (incident.alternatives == v.alternatives)
    return 1 + (incident.symptom == v.symptom) if v.component in incident.alternatives else 0


def _copy(incident: Incident, v: Verdict) -> None:
    incident.component, incident.component_type = v.component, cast(ComponentType, v.component_type)
    incident.symptom, incident.direction, incident.cls = cast(Symptom, v.symptom), v.direction, v.cls
    incident.ends, incident.alternatives = list(v.ends), list(v.alternatives)
    incident.rate, incident.rate_low, incident.rate_high = v.rate, v.rate_low, v.rate_high
    incident.confidence = v.confidence
    incident.priority = v.priority if v.priority in ("P0", "P1") else "P2"  # type: ignore[assignment]
    incident.evidence = dict(v.evidence)
    if v.since_ns:
        incident.evidence.setdefault("since", rfc3339(v.since_ns))


def _note(incident: Incident, now_ns: int, what: str, old: object, new: object) -> None:
    entry: dict[str, object] = {"at": now_ns, "change": what}
    if old is not None or new is not None:
        entry |= {"from": old, "to": new}
    incident.history = [*incident.history, entry][-HISTORY_LIMIT:]
