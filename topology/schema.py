"""The topology file as types: the source of both the reader and the published `schema.json`."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_.]*(-[A-Za-z0-9_.]+)*$"
NAME_RULE = "use letters, digits, `_`, `.` and single `-` between them, a letter or digit first"
_PORT_RULE = "use letters, digits, `_`, `.`, `/`, `:` and single `-` between them"

# `--` and `->` join names to links, `/` a host to its device, `@` an RNIC to its ToR: names stay clear of them.
Name = Annotated[str, Meta(pattern=NAME_PATTERN, extra={"rule": NAME_RULE})]
Port = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_./:]+(-[A-Za-z0-9_./:]+)*$", extra={"rule": _PORT_RULE})]
Address = Annotated[str, Meta(description="IPv4 or IPv6 address, without prefix length")]


class FileStruct(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A mapping in the file."""


class FileSwitch(FileStruct, frozen=True):
    """A switch."""

    tier: Annotated[int, Meta(ge=1, le=9, description="1 for a ToR (leaf), 2 for the layer above, and so on")]
    loopback: Address | None = None
    icmp_limit: Annotated[int, Meta(ge=1, description="ICMP answers per second that the switch gives to all")] = 100
    fabric: Name | None = None


class FileLeg(FileStruct, frozen=True):
    """One cable of an RNIC: the port defaults to HOST-DEVICE."""

    switch: Name
    port: Port | None = None
    address: Address | None = None
    switch_address: Address | None = None


class FileRnic(FileStruct, frozen=True):
    """An RNIC: either `switch` (with its port and addresses) or `legs`."""

    switch: Name | None = None
    port: Port | None = None
    address: Address | None = None
    switch_address: Address | None = None
    legs: Annotated[list[FileLeg], Meta(min_length=1)] | None = None
    rail: Annotated[int, Meta(ge=0)] | None = None
    group: Annotated[Name, Meta(description="RNICs of different groups never probe each other")] | None = None


class FileHost(FileStruct, frozen=True):
    """A host."""

    rnics: Annotated[dict[Name, FileRnic], Meta(min_length=1)]


class FileLink(FileStruct, frozen=True):
    """A cable between two switches; each port defaults to the name of the switch at the other end."""

    a: Name
    b: Name
    a_port: Port | None = None
    b_port: Port | None = None
    a_address: Address | None = None
    b_address: Address | None = None


class FileTopology(FileStruct, frozen=True):
    """A pingmesh topology file."""

    version: Literal[1]
    cluster: Name
    switches: Annotated[dict[Name, FileSwitch], Meta(min_length=1)]
    hosts: dict[Name, FileHost] = {}
    links: list[FileLink] = []


def json_schema() -> dict[str, Any]:
    """The JSON schema (draft 2020-12) of the file."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "pingmesh topology",
        **msgspec.json.schema(FileTopology),
    }


def json_schema_text() -> str:
    """The content of `schema.json`."""
    return json.dumps(json_schema(), indent=2) + "\n"
