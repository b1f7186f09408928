"""Evidence in words: who could and could not reach whom, over which paths, in which direction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Json = Mapping[str, Any]

KNOWN = ("summary", "flows", "sent", "lost", "classes", "since", "missing", "hosts", "network_rtt_us")
"""What has a form of its own here or in the answer; `sent` and `lost` are in the summary's sentence already."""
SHOWN_BAD, SHOWN_GOOD = 4, 2


def path_text(path: Sequence[str] | None) -> str:
    """`over leaf1->spine2->leaf4` from the elements walked; RNIC sides are left out, they are the flow's ends."""
    if path is None:
        return "path not known"
    links = [e for e in path if "->" in e]
    if not links:
        return "inside one ToR"
    text = links[0]
    for link in links[1:]:
        source, _, target = link.rpartition("->")
        # With parallel cables the ends carry ports (`leaf1:p1->spine2:p3`), which change from link to link.
        same = source.split(":")[0] == text.rpartition("->")[2].split(":")[0]
        text += f"->{target}" if same else f", {link}"
    return f"over {text}"


def flow_line(flow: Json) -> str:
    """`h1/rnic0 -> h14/rnic0  30 of 100 probes lost, over leaf1->spine2->leaf4, source port 49203`."""
    cls = flow.get("class")
    what = f"{cls} {flow['packets']}" if cls and cls != "small" else str(flow["packets"])
    return (
        f"{flow['from']} -> {flow['to']}  {flow['lost']} of {flow['sent']} {what} lost, "
        f"{path_text(flow.get('path'))}, source port {flow['source_port']}"
    )


def flow_lines(flows: Sequence[Json]) -> list[str]:
    """Those that lost packets, then those that did not."""
    bad = [f for f in flows if f["lost"]]
    good = [f for f in flows if not f["lost"]]
    lines = ["could not reach, or lost packets:", *(f"  {flow_line(f)}" for f in bad[:SHOWN_BAD])] if bad else []
    return lines + (["got through:", *(f"  {flow_line(f)}" for f in good[:SHOWN_GOOD])] if good else [])


def _is_flow(value: object) -> bool:
    return isinstance(value, Mapping) and {"from", "to", "sent", "lost", "packets", "source_port"} <= value.keys()


def evidence_lines(evidence: object) -> list[str]:
    """Sentences as they are; a mapping as `name: value` with its names made readable."""
    if not evidence:
        return []
    if isinstance(evidence, str):
        return [evidence]
    if isinstance(evidence, Mapping):
        lines = [str(evidence["summary"])] if evidence.get("summary") else []
        flows = [f for f in evidence.get("flows") or () if _is_flow(f)]
        lines += flow_lines(flows)
        classes = evidence.get("classes")
        if isinstance(classes, Mapping) and len(classes) > 1:
            lines += [f"class {name}: {value_text(counts)}" for name, counts in classes.items()]
        lines += [str(h) for h in evidence.get("hosts") or ()]
        if rtt := evidence.get("network_rtt_us"):
            lines.append("RTT on the network: " + ", ".join(f"{k} {v:.0f} µs" for k, v in rtt.items()))
        for k, v in evidence.items():
            if k not in KNOWN:
                lines += _named(str(k).replace("_", " "), v)
        return lines
    return [value_text(evidence)]


def _named(name: str, value: object) -> list[str]:
    if value is None or value == [] or value == {}:
        return []
    if isinstance(value, (list, tuple)) and any(isinstance(v, (Mapping, str)) and len(str(v)) > 20 for v in value):
        return [f"{name}:", *(f"  {value_text(v)}" for v in value)]
    return [f"{name}: {value_text(value)}"]


def value_text(value: object) -> str:
    """A value in a line: mappings as `name value`, lists with commas."""
    if isinstance(value, Mapping):
        return ", ".join(f"{str(k).replace('_', ' ')} {value_text(v)}" for k, v in value.items() if v is not None)
    if isinstance(value, (list, tuple)):
        return ", ".join(map(value_text, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)
