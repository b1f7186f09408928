"""Reads YAML text into msgspec types and finds every problem of form on the way, each with its line.

The YAML node tree is walked beside the types' description (`msgspec.inspect`), because both msgspec's and PyYAML's own
conversion stop at the first error and have forgotten the lines by then.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, Final, TypeVar

import msgspec
import msgspec.inspect as mi
import yaml

from topology.problems import Problem, did_you_mean

Place = tuple[str | int, ...]
"""Where in the document: keys and list indices from the top."""

T = TypeVar("T", bound=msgspec.Struct)

_LOADER: Final = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_TAG: Final = "tag:yaml.org,2002:"


class _Wrong:
    """Stands for a value that could not be read; its problem is noted."""


_WRONG: Final = _Wrong()


def place_name(place: Place) -> str:
    """`hosts.h1.rnics.rnic0`, `links[3].a`; items are counted from 1, as people do.

    >>> place_name(("links", 2, "a"))
    'links[3].a'
    """
    out = ""
    for part in place:
        out += f"[{part + 1}]" if isinstance(part, int) else f".{part}" if out else part
    return out


@cache
def _fields(kind: type[Any]) -> Mapping[str, mi.Field]:
    info = mi.type_info(kind)
    assert isinstance(info, mi.StructType)
    return {f.encode_name: f for f in info.fields}


class Document:
    """A YAML text being read.

    `lines` has the line of each key and list item, `problems` what is wrong so far. Objects with a wrong optional field
    are kept without it, those with a wrong required one are left out: later checks can still go on.
    """

    def __init__(self) -> None:
        self.lines: dict[Place, int] = {}
        self.problems: list[Problem] = []
        self._wrong: set[Place] = set()
        self._seen: set[int] = set()

    def note(self, place: Place, text: str, line: int | None = None) -> None:
        """Add a problem at a place; its line is that of the nearest enclosing thing that has one."""
        if line is None:
            line = self.line(place)
        self._wrong.add(place)
        self.problems.append(Problem(line, place_name(place), text))

    def is_wrong(self, place: Place, *keys: str) -> bool:
        """Whether a problem with one of the keys of an object is known already."""
        return any((*place, key) in self._wrong for key in keys)

    def line(self, place: Place) -> int:
        """The line of a place, or of the nearest place around it."""
        while place and place not in self.lines:
            place = place[:-1]
        return self.lines.get(place, 0)

    def read(self, text: str, kind: type[T]) -> T | None:
        """Read the text as `kind`; None if even a required part is wrong. Never raises on bad text: see `problems`."""
        try:
            text.encode()
        except UnicodeEncodeError as e:
            line = text.count("\n", 0, e.start) + 1
            self.note((), "holds half a surrogate pair, which is no text; save the file as UTF-8", line)
            return None
        try:
            root = yaml.compose(text, Loader=_LOADER)
        except yaml.MarkedYAMLError as e:
            mark = e.problem_mark or e.context_mark
            told = ", ".join(t for t in (e.context, e.problem) if t)
            self.note((), f"this is no YAML: {told}; mend the text there", mark.line + 1 if mark else 0)
            return None
        except yaml.reader.ReaderError as e:
            code = e.character if isinstance(e.character, int) else ord(e.character)
            line = text.count("\n", 0, text.index(chr(code))) + 1  # its own position is in bytes or characters
            self.note((), f"character U+{code:04X} is not allowed in YAML; remove it", line)
            return None
        except (RecursionError, yaml.YAMLError):
            self.note((), "the text is nested too deeply to be a topology; see docs/topology.md for the form")
            return None
        if root is None or _is_null(root):
            self.note((), "the file is empty; begin with `version: 1`, see docs/topology.md for the form")
            return None
        value = self._struct(root, kind, ())
        return None if isinstance(value, _Wrong) else value

    def _value(self, node: yaml.Node, kind: mi.Type, place: Place) -> object:
        """Read a node as a type of the description; `_WRONG` with a problem noted if it does not fit."""
        if id(node) in self._seen:
            self.note(place, "anchors and aliases are not supported; write the value out here")
            return _WRONG
        self._seen.add(id(node))
        rule = ""
        if isinstance(kind, mi.UnionType):  # all unions of the schema are `X | None`
            if _is_null(node):
                return None
            kind = next(k for k in kind.types if not isinstance(k, mi.NoneType))
        if isinstance(kind, mi.Metadata):
            rule = str((kind.extra or {}).get("rule", ""))
            kind = kind.type
        match kind:
            case mi.StructType():
                return self._struct(node, kind.cls, place)
            case mi.DictType():
                return self._dict(node, kind, place)
            case mi.ListType():
                return self._list(node, kind, place)
            case _:
                return self._scalar(node, kind, rule, place)

    def _items(self, node: yaml.Node, place: Place) -> Iterator[tuple[str, yaml.Node, Place]]:
        """Keys and values of a mapping, lines noted; bad and repeated keys become problems."""
        if not isinstance(node, yaml.MappingNode):
            self.note(place, f"must be a mapping of `key: value`, not {_kind(node)}", node.start_mark.line + 1)
            return
        for key, value in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                self.note(place, f"a key must be a name, not {_kind(key)}", line)
                continue
            if key.tag == _TAG + "merge":
                self.note(place, "merge keys (`<<`) are not supported; write the keys out", line)
                continue
            at = (*place, key.value)
            if at in self.lines:
                self.note(at, f"is here a second time (first in line {self.lines[at]}); remove or rename one", line)
                continue
            self.lines[at] = line
            yield key.value, value, at

    def _struct(self, node: yaml.Node, kind: type[T], place: Place) -> T | _Wrong:
        fields = _fields(kind)
        values: dict[str, object] = {}
        usable = isinstance(node, yaml.MappingNode)
        for key, child, at in self._items(node, place):
            field = fields.get(key)
            if field is None:
                text = f"unknown key{did_you_mean(key, fields)} Allowed here: {', '.join(fields)}"
                self.note(at, text.replace("key Allowed", "key. Allowed"))
                continue
            value = self._value(child, field.type, at)
            if value is not _WRONG:
                values[field.name] = value
            elif field.required:
                usable = False
        if isinstance(node, yaml.MappingNode):
            for key, field in fields.items():
                if field.required and (*place, key) not in self.lines:
                    usable = False
                    self.note(place, f"`{key}` is missing; add it ({_wanted(field.type)})", node.start_mark.line + 1)
        return kind(**values) if usable else _WRONG

    def _dict(self, node: yaml.Node, kind: mi.DictType, place: Place) -> object:
        out: dict[str, object] = {}
        count = 0
        for key, child, at in self._items(node, place):
            count += 1
            problem = _misfit(key, kind.key_type)
            if problem:
                self.note(at, problem)
            value = self._value(child, kind.value_type, at)
            if value is not _WRONG and not problem:
                out[key] = value
        if not isinstance(node, yaml.MappingNode):
            return _WRONG
        if count < (kind.min_length or 0):
            self.note(place, "is empty; name at least one")
        return out

    def _list(self, node: yaml.Node, kind: mi.ListType, place: Place) -> object:
        if not isinstance(node, yaml.SequenceNode):
            self.note(place, f"must be a list of `- item`, not {_kind(node)}", node.start_mark.line + 1)
            return _WRONG
        if len(node.value) < (kind.min_length or 0):
            self.note(place, "is empty; list at least one")
            return _WRONG
        out: list[object] = []
        for i, child in enumerate(node.value):
            at = (*place, i)
            self.lines[at] = child.start_mark.line + 1
            # A wrong item keeps its place, so that the items after it keep their numbers.
            value = self._value(child, kind.item_type, at)
            out.append(None if value is _WRONG else value)
        return out

    def _scalar(self, node: yaml.Node, kind: mi.Type, rule: str, place: Place) -> object:
        problem = None
        value: object = None
        if not isinstance(node, yaml.ScalarNode) or _is_null(node):
            problem = f"must be {_wanted(kind)}, not {_kind(node)}"
        elif isinstance(kind, mi.StrType):
            # The text as typed: a host may be called 1001 or on without quotes.
            value = node.value
            problem = _misfit(node.value, kind, rule)
        elif _WHOLE.fullmatch(node.value) is None or node.tag != _TAG + "int":
            problem = f"`{node.value}` must be {_wanted(kind)}"
        else:
            value = int(node.value)
            problem = _misfit(value, kind)
        if problem is None:
            return value
        self.note(place, problem)
        return _WRONG


_WHOLE: Final = re.compile(r"[-+]?(0|[1-9][0-9]{0,17})")


def _is_null(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode) and node.tag == _TAG + "null"


def _kind(node: yaml.Node) -> str:
    if isinstance(node, yaml.MappingNode):
        return "a mapping"
    if isinstance(node, yaml.SequenceNode):
        return "a list"
    return "nothing" if _is_null(node) else f"`{node.value}`"


def _wanted(kind: mi.Type) -> str:
    match kind:
        case mi.Metadata():
            return _wanted(kind.type)
        case mi.UnionType():
            return _wanted(next(k for k in kind.types if not isinstance(k, mi.NoneType)))
        case mi.LiteralType():
            return " or ".join(f"{v}" for v in kind.values)
        case mi.IntType():
            low = "" if kind.ge is None else f" of at least {kind.ge}"
            return f"a whole number{low}" if kind.le is None else f"a whole number from {kind.ge} to {kind.le}"
        case mi.StrType():
            return "a name or text"
        case mi.ListType():
            return "a list"
        case _:
            return "a mapping"


def _misfit(value: str | int, kind: mi.Type, rule: str = "") -> str | None:
    """Why a value of the right basic type is out of bounds, with the remedy; None if it is fine."""
    if isinstance(kind, mi.Metadata):
        return _misfit(value, kind.type, str((kind.extra or {}).get("rule", "")))
    match kind, value:
        case mi.StrType(pattern=str(pattern)), str() if re.fullmatch(pattern, value) is None:
            return f"{value!r} is no valid name; {rule}"
        case mi.LiteralType(), int() if value not in kind.values:
            return f"must be {_wanted(kind)}, not {value}"
        case mi.IntType(), int() if not (kind.ge or 0) <= value <= (kind.le if kind.le is not None else value):
            return f"must be {_wanted(kind)}, not {value}"
        case _:
            return None
