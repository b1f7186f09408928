"""Loading settings: file < environment < flags, each value checked where it stands so that an error names its place."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints, is_typeddict

import msgspec

from pingmesh.config import ConfigError, Section, Settings

if TYPE_CHECKING:
    import yaml

PREFIX = "PINGMESH_"


@dataclass
class _Loader:
    """Values accepted so far, by dotted path's parts, and the sentences about those that were not."""

    values: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def put(self, path: tuple[str, ...], value: object) -> None:
        at = self.values
        for part in path[:-1]:
            at = at.setdefault(part, {})
        at[path[-1]] = value

    def settings(self) -> Settings:
        if not self.problems:
            try:
                settings = msgspec.convert(self.values, Settings)
            except msgspec.ValidationError as error:
                # What only shows when all is put together, as a field that is missing in an entry of a list.
                what = str(error).replace(" - at `$.", " at `")
                raise ConfigError(
                    f"configuration: {what}; `pingmesh config dump` shows the form of every key."
                ) from None
            self.problems += _contradictions(settings)
        if self.problems:
            raise ConfigError(*self.problems)
        return settings


def load(path: str | None, flags: Mapping[str, object], environ: Mapping[str, str] | None) -> Settings:
    """See `pingmesh.config.load`."""
    environ = os.environ if environ is None else environ
    loader = _Loader()
    if path := path or environ.get(PREFIX + "CONFIG"):
        _from_file(loader, path)
    _from_environment(loader, environ)
    for key, value in flags.items():
        if value is not None:
            _from_text(loader, f"flag for {key}", tuple(key.split(".")), value)
    return loader.settings()


def dump(settings: Settings) -> str:
    """All settings as a YAML file that `load` reads back."""
    import yaml

    # Not `allow_unicode`: PyYAML then writes the line breaks of Unicode in a way that it reads back as spaces.
    text: str = yaml.safe_dump(msgspec.to_builtins(settings), sort_keys=False)
    return text


# ---------------------------------------------------------------- the file


def _from_file(loader: _Loader, path: str) -> None:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}; name another file with --config.") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: is not UTF-8 text; a configuration is a YAML file.") from None
    except ValueError:
        raise ConfigError(f"{path!r}: is no name of a file; name another with --config.") from None
    node = _compose(path, text)
    if node is not None:
        value = _walk(loader, path, node, Settings, ())
        if isinstance(value, dict):
            loader.values = value


def _compose(place: str, text: str) -> yaml.Node | None:
    """The YAML node tree of a text; None if it is empty."""
    import yaml

    try:
        node: yaml.Node | None = yaml.compose(text, Loader=yaml.SafeLoader)
    except (yaml.YAMLError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        what = getattr(error, "problem", None) or "cannot be parsed"
        raise ConfigError(f"{place}:{mark.line + 1 if mark else 1}: is not valid YAML: {what}.") from None
    return node


def _walk(loader: _Loader, file: str, node: yaml.Node | None, kind: Any, path: tuple[str, ...]) -> Any:
    """The value of a YAML node as `kind`, or None after noting problems."""
    import yaml

    if node is None:
        return []
    place = f"{file}:{node.start_mark.line + 1}"
    dotted = ".".join(path)
    if _is_mapping_kind(kind):
        if not isinstance(node, yaml.MappingNode):
            if isinstance(node, yaml.ScalarNode) and not node.value and path:
                return {}  # `broker:` with nothing below it
            loader.problems.append(f"{place}: {dotted or 'the file'}: expected a mapping of {_names(kind)}.")
            return None
        out = {}
        seen: set[str] = set()
        hints = get_type_hints(kind, include_extras=True)
        for key_node, value_node in node.value:
            key = str(key_node.value)
            at = f"{file}:{key_node.start_mark.line + 1}"
            if key not in hints:
                loader.problems.append(f"{at}: {_unknown((*path, key), hints)}")
            elif key in seen:
                loader.problems.append(f"{at}: {'.'.join((*path, key))}: is given twice; remove one.")
            else:
                out[key] = _walk(loader, file, value_node, _bare(hints[key]), (*path, key))
            seen.add(key)
        if missing := {name for name, hint in hints.items() if _bare(hint) is not hint} - seen:
            loader.problems.append(f"{place}: {dotted}: needs {' and '.join(sorted(missing))}.")
        return out
    if get_origin(kind) is list and isinstance(node, yaml.SequenceNode) and _is_mapping_kind(get_args(kind)[0]):
        return [_walk(loader, file, n, get_args(kind)[0], (*path, str(i))) for i, n in enumerate(node.value)]
    try:
        value = _construct(node)
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError, OverflowError, RecursionError):
        # PyYAML lets `!!timestamp x`, `!!bool x`, a date of month 13 or an integer of 5,000 digits fail as it comes.
        loader.problems.append(f"{place}: {dotted}: cannot be read; allowed: {_allowed(kind)}.")
        return None
    return _check(loader, place, dotted, value, kind, strict=True)


def _construct(node: yaml.Node) -> object:
    import yaml

    builder = yaml.SafeLoader("")
    try:
        return builder.construct_document(node)
    finally:
        builder.dispose()


# ---------------------------------------------------------------- environment and flags


def _from_environment(loader: _Loader, environ: Mapping[str, str]) -> None:
    hints = get_type_hints(Settings, include_extras=True)
    for variable in sorted(environ):
        if not variable.startswith(PREFIX):
            continue
        path = tuple(variable.removeprefix(PREFIX).lower().split("__"))
        # Kubernetes puts PINGMESH_CONTROLLER_PORT and the like into every pod that has such a service, and the command
        # has variables of its own (PINGMESH_CONTROLLER): of the flat names only those of settings are ours.
        if len(path) == 1 and path != ("broker",) and (path[0] not in hints or _is_mapping_kind(hints[path[0]])):
            continue
        _from_text(loader, f"environment variable {variable}", path, environ[variable])


def _from_text(loader: _Loader, place: str, path: tuple[str, ...], value: object) -> None:
    """One value of the environment or of a flag; text is converted to the key's type."""
    if path == ("broker",):
        host, colon, port = str(value).rpartition(":")
        if not colon or not host:
            loader.problems.append(f"{place}: broker: {value!r} is not HOST:PORT.")
            return
        _from_text(loader, place, ("broker", "host"), host.strip("[]"))
        _from_text(loader, place, ("broker", "port"), port)
        return
    kind: Any = Settings
    for i, part in enumerate(path):
        hints = get_type_hints(kind, include_extras=True) if _is_mapping_kind(kind) else {}
        if part not in hints:
            loader.problems.append(f"{place}: {_unknown(path[: i + 1], hints)}")
            return
        kind = _bare(hints[part])
    dotted = ".".join(path)
    if _is_mapping_kind(kind):
        loader.problems.append(f"{place}: {dotted} is a section; name one of its keys: {_names(kind)}.")
        return
    item = _list_item(kind)
    if isinstance(value, str) and value.strip() == "[]" and item is not None:
        loader.put(path, [])  # which takes no parser of 600 KB
        return
    if isinstance(value, str) and _is_mapping_kind(item):
        loader.put(path, _walk(loader, place, _compose(place, value), kind, path))
        return
    if isinstance(value, str) and item is not None:
        value = [part.strip() for part in value.split(",") if part.strip()]
    checked = _check(loader, place, dotted, value, kind, strict=not isinstance(value, str))
    loader.put(path, checked)


# ---------------------------------------------------------------- checking one value


def _check(loader: _Loader, place: str, dotted: str, value: object, kind: Any, *, strict: bool) -> object:
    try:
        checked: object = msgspec.convert(value, kind, strict=strict)
        msgspec.json.encode(checked)  # half a surrogate pair (a variable that is not UTF-8) can be written nowhere
    except (msgspec.ValidationError, UnicodeEncodeError):
        shown = repr(value) if len(repr(value)) <= 60 else repr(value)[:57] + "..."
        loader.problems.append(f"{place}: {dotted}: {shown} is not allowed; allowed: {_allowed(kind)}.")
        return None
    return checked


def _contradictions(s: Settings) -> list[str]:
    """Settings that are right one by one and wrong together."""
    out = []
    if s.agent.overdue_ms >= s.agent.timeout_ms:
        out.append(
            f"agent.overdue_ms: {s.agent.overdue_ms} must be below agent.timeout_ms ({s.agent.timeout_ms}): "
            "a probe is overdue before it is lost."
        )
    if bool(s.broker.cert_file) != bool(s.broker.key_file):
        out.append("broker.cert_file and broker.key_file: give both or neither.")
    if not s.broker.tls and (s.broker.ca_file or s.broker.cert_file):
        out.append("broker.ca_file, broker.cert_file: have no effect without broker.tls: true; set it or remove them.")
    if sum(c.get("share", 0.0) for c in s.controller.classes) > 1:
        out.append("controller.classes: the shares add up to more than 1; the small class takes what they leave.")
    return out


def _is_mapping_kind(kind: Any) -> bool:
    return (isinstance(kind, type) and issubclass(kind, Section)) or is_typeddict(kind)


def _bare(kind: Any) -> Any:
    """The type without `Required[...]`."""
    return get_args(kind)[0] if getattr(get_origin(kind), "_name", "") == "Required" else kind


def _list_item(kind: Any) -> Any:
    """T of `list[T]` or `list[T] | None`, else None."""
    for k in get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,):
        if get_origin(k) is list:
            return get_args(k)[0]
    return None


def _names(kind: Any) -> str:
    return ", ".join(get_type_hints(kind))


def _unknown(path: tuple[str, ...], allowed: Mapping[str, object]) -> str:
    import difflib  # only who has mistyped something needs it

    close = difflib.get_close_matches(path[-1], list(allowed), n=1)
    hint = f"did you mean {'.'.join((*path[:-1], close[0]))}?" if close else f"allowed: {', '.join(allowed) or 'none'}."
    return f"{'.'.join(path)}: unknown key; {hint}"


def _allowed(kind: Any) -> str:
    """What a key takes, in words."""
    origin = get_origin(kind)
    if origin is Annotated:
        meta = get_args(kind)[1]
        return str(meta.description)
    if origin is Literal:
        return ", ".join(str(a) for a in get_args(kind))
    if origin is list:
        return f"a list of {_names(get_args(kind)[0]) if _is_mapping_kind(get_args(kind)[0]) else 'names'}"
    if origin in (Union, UnionType):
        return " or ".join(_allowed(a) for a in get_args(kind))
    return {str: "text", bool: "true or false", int: "an integer", float: "a number", type(None): "nothing (null)"}[
        kind
    ]
