"""Typed, frozen settings: file < environment < flag. Unknown keys are errors that name the place."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, Required, TypedDict

import msgspec
from msgspec import Meta

Port = Annotated[int, Meta(ge=1, le=65535, description="an integer from 1 to 65535")]
LogLevel = Literal["debug", "info", "warning", "error"]
Name = Annotated[
    str,
    Meta(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
        max_length=100,
        description=("letters, digits, '.', '_' and '-', beginning with a letter or digit"),
    ),
]
Share = Annotated[float, Meta(ge=0, le=1, description="a number from 0 to 1")]
PositiveShare = Annotated[float, Meta(gt=0, le=1, description="a number above 0 and up to 1")]
Rate = Annotated[float, Meta(gt=0, le=10_000, description="a number above 0 and up to 10000, per second")]
Positive = Annotated[float, Meta(gt=0, description="a number above 0")]
Count = Annotated[int, Meta(ge=1, description="an integer from 1")]


class ConfigError(ValueError):
    """A configuration that cannot be used. `problems` are sentences, each with its place, value and what is allowed."""

    def __init__(self, *problems: str) -> None:
        self.problems = problems
        super().__init__("\n".join(problems))


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A part of the configuration."""


class BrokerSettings(Section, frozen=True):
    """Where the MQTT broker is and how we prove who we are."""

    host: str = "127.0.0.1"
    port: Port = 1883
    username: str | None = None
    password_file: str | None = None
    tls: bool = False
    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None
    keepalive_s: Count = 10
    reconnect_max_s: Positive = 10.0
    max_queued: Count = 10_000

    def read_password(self) -> str | None:
        """The password, from its file: secrets are never in the configuration itself."""
        return Path(self.password_file).read_text().strip() if self.password_file else None


class DeviceRole(TypedDict, total=False):
    """What RDMA devices are for. All that a rule names has to fit; the first that fits decides."""

    role: Required[Literal["compute", "storage", "management"]]
    name: str
    """Pattern as of a shell: `mlx5_[0-7]`."""
    subnet: str
    """The address lies in it: `10.9.0.0/16`."""
    virtual: bool
    """Whether the device is a virtual function."""


class AgentSettings(Section, frozen=True):
    """The agent on a host."""

    host: Name | None = None
    """Name in the topology; default: the machine's host name."""
    devices: list[str] | None = None
    """Devices to probe from, each `DEVICE` or `NAME=DEVICE` (published under that name); default: what is found.
    For `soft`: network interfaces; for `verbs`: RDMA devices.
    """
    transport: Literal["soft", "verbs"] = "soft"
    gid_index: Annotated[int, Meta(ge=0, description="an integer from 0")] | None = None
    """For `verbs`: this entry of every GID table, instead of the best by rule."""
    gid_family: Literal["any", "ipv4", "ipv6"] = "any"
    """For `verbs`: of which family a GID may be; IPv4 goes before IPv6."""
    gid_link_local: bool = False
    """For `verbs`: whether a link-local GID will do if there is no other."""
    roles: list[DeviceRole] = []
    """For `verbs`, when devices are found: `{role, name, subnet, virtual}`; only `compute` devices are probed from."""
    cpu_budget: Positive = 0.2
    """Share of one core over which the agent lowers its own rate."""
    max_rate: Rate = 150.0
    """Hard cap of probes/s per RNIC, whatever the controller asks."""
    spool_reports: Count = 720
    """Reports kept while the broker is away (720 = one hour)."""
    timeout_ms: Count = 500
    """Probes without an answer count as lost then; the analyzer reads it too, and waits accordingly."""
    overdue_ms: Count = 100


class ProbeClassSettings(TypedDict, total=False):
    """A further class of probes; it gets `share` of the probes of each list."""

    name: Required[Name]
    dscp: Required[Annotated[int, Meta(ge=0, le=63, description="an integer from 0 to 63")]]
    size: Annotated[int, Meta(ge=0, le=9000, description="an integer from 0 (smallest) to 9000 bytes")]
    share: Share


class ControllerSettings(Section, frozen=True):
    """The controller."""

    database: str = "pingmesh.db"
    listen: str = "127.0.0.1:8470"
    """`unix:PATH` or `HOST:PORT` of the HTTP API."""
    tor_mesh_rate: Rate = 10.0
    """ToR-mesh probes/s per prober RNIC."""
    link_rate: Rate = 10.0
    """Probes/s that every directed switch link shall carry."""
    link_tuples: Count = 16
    """Distinct 5-tuples that every directed switch link shall carry."""
    max_rate: Rate = 150.0
    rotation_s: Positive = 3600.0
    rotation_share: Share = 0.2
    classes: list[ProbeClassSettings] = []
    """Further probe classes `{name, dscp, size, share}`; `small` and `large` are there without, and may be changed."""


class AnalyzerSettings(Section, frozen=True):
    """The analyzer."""

    noise: PositiveShare = 1e-4
    """Loss rate below which nothing is named."""
    open_confidence: PositiveShare = 0.95
    close_after_s: Positive = 20.0
    confirm_interval_ms: Positive = 20.0


class Settings(Section, frozen=True):
    """Everything, by section."""

    cluster: Name = "default"
    topology: str | None = None
    """Path of the topology file."""
    log_level: LogLevel = "info"
    broker: BrokerSettings = BrokerSettings()
    agent: AgentSettings = AgentSettings()
    controller: ControllerSettings = ControllerSettings()
    analyzer: AnalyzerSettings = AnalyzerSettings()


def load(
    path: str | None = None, flags: Mapping[str, object] | None = None, environ: Mapping[str, str] | None = None
) -> Settings:
    """Settings from the file at `path` < environment (`PINGMESH_BROKER__HOST`, `PINGMESH_CLUSTER`) < `flags`.

    `flags` is keyed by dotted path (`broker.host`; `broker` alone takes `HOST:PORT`); None values are ignored.
    Without `path`, `PINGMESH_CONFIG` may name the file. Raises ConfigError with all that is wrong.
    """
    # Imported here: what only builds Settings needs neither the loader nor its imports.
    from pingmesh import config_load

    return config_load.load(path, flags or {}, environ)
