"""Topology files: YAML in, YAML out; errors name the line, the object and the remedy, all of them at once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import yaml

from topology.check import Checker
from topology.document import Document
from topology.model import Leg, Link, Rnic, Switch, Topology
from topology.problems import Problem
from topology.schema import FileTopology

__all__ = ["Problem", "TopologyError", "content", "dump", "load", "parse"]

DEFAULT_ICMP_LIMIT = 100

SHOWN = 50
"""Problems that the message of a TopologyError spells out; the rest are counted."""


class TopologyError(ValueError):
    """A topology file that cannot be used. `problems` holds everything found, in order of lines."""

    def __init__(self, source: str, problems: Sequence[Problem]) -> None:
        self.source = source
        self.problems = tuple(sorted(problems))
        lines = [p.render(source) for p in self.problems[:SHOWN]]
        if len(self.problems) > SHOWN:
            lines.append(f"{source}: and {len(self.problems) - SHOWN:,} problems more")
        super().__init__("\n".join(lines))


def load(path: str | Path) -> Topology:
    """Read a topology file.

    Raises:
        TopologyError: it cannot be read, or something in it is wrong.
    """
    source = str(path)
    try:
        text = Path(path).read_bytes().decode("utf-8")
    except OSError as e:
        problem = f"cannot be read ({e.strerror or e}); give the path of a topology file"
        raise TopologyError(source, [Problem(0, "", problem)]) from None
    except UnicodeDecodeError as e:
        line = e.object.count(b"\n", 0, e.start) + 1
        raise TopologyError(source, [Problem(line, "", "is not UTF-8 text; save the file as UTF-8")]) from None
    return parse(text, source)


def parse(text: str, source: str = "<topology>") -> Topology:
    """Read the text of a topology file; `source` is what errors call it.

    Raises:
        TopologyError: with every problem of form found, or, where the form allows to go on, every problem of both.
    """
    document = Document()
    read = document.read(text, FileTopology)
    topology = None if read is None else Checker(document, read).topology()
    if topology is None or document.problems:
        raise TopologyError(source, document.problems)
    return topology


def dump(t: Topology) -> str:
    """The file that `parse` reads back as an equal topology: names in their order, defaults left out."""
    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
    text: str = yaml.dump(content(t), Dumper=dumper, sort_keys=False, default_flow_style=None, width=1000)
    return text


def content(t: Topology) -> dict[str, object]:
    """What `dump` writes, as plain data; as JSON it can be read back as well, for JSON is YAML."""
    return {
        "version": 1,
        "cluster": t.cluster,
        "switches": {s.name: _switch(s) for s in t.switches.values()},
        "hosts": {host: {"rnics": {r.device: _rnic(r) for r in rnics}} for host, rnics in t.hosts.items()},
        "links": [_link(k) for k in t.links],
    }


def _set(**fields: object) -> dict[str, object]:
    return {key: value for key, value in fields.items() if value is not None}


def _switch(s: Switch) -> dict[str, object]:
    limit = None if s.icmp_limit == DEFAULT_ICMP_LIMIT else s.icmp_limit
    return _set(tier=s.tier, loopback=s.loopback, icmp_limit=limit, fabric=s.fabric)


def _leg(leg: Leg, default_port: str) -> dict[str, object]:
    port = None if leg.port == default_port else leg.port
    return _set(switch=leg.switch, port=port, address=leg.address, switch_address=leg.switch_address)


def _rnic(r: Rnic) -> dict[str, object]:
    legs = [_leg(leg, f"{r.host}-{r.device}") for leg in r.legs]
    cables = legs[0] if len(legs) == 1 else {"legs": legs}
    return {**cables, **_set(rail=r.rail, group=r.group)}


def _link(k: Link) -> dict[str, object]:
    return _set(
        a=k.a,
        b=k.b,
        a_port=None if k.a_port == k.b else k.a_port,
        b_port=None if k.b_port == k.a else k.b_port,
        a_address=k.a_address,
        b_address=k.b_address,
    )
