"""Typed, frozen settings: file < environment < flag. Unknown keys are errors that name the place and what is allowed."""

from __future__ import annotations

from pathlib import Path

import msgspec


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A part of the configuration."""


class BrokerSettings(Section, frozen=True):
    """Where the MQTT broker is and how we prove who we are."""

    host: str = "127.0.0.1"
    port: int = 1883
    username: str | None = None
    password_file: str | None = None
    tls: bool = False
    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None
    keepalive_s: int = 10
    reconnect_max_s: float = 10.0
    max_queued: int = 10_000

    def read_password(self) -> str | None:
        """The password, from its file: secrets are never in the configuration itself."""
        return Path(self.password_file).read_text().strip() if self.password_file else None


class AgentSettings(Section, frozen=True):
    """The agent on a host."""

    host: str | None = None
    """Name in the topology; default: the machine's host name."""
    devices: list[str] | None = None
    """Devices to probe from; default: what the transport finds. For `soft`: network interfaces."""
    transport: str = "soft"
    cpu_budget: float = 0.2
    """Share of one core over which the agent lowers its own rate."""
    max_rate: float = 150.0
    """Hard cap of probes/s per RNIC, whatever the controller asks."""
    spool_reports: int = 720
    """Reports kept while the broker is away (720 = one hour)."""
    timeout_ms: int = 500
    overdue_ms: int = 100


class ControllerSettings(Section, frozen=True):
    """The controller."""

    database: str = "pingmesh.db"
    listen: str = "unix:pingmesh.sock"
    """`unix:PATH` or `HOST:PORT` of the HTTP API."""
    tor_mesh_rate: float = 10.0
    """ToR-mesh probes/s per prober RNIC."""
    link_rate: float = 10.0
    """Probes/s that every directed switch link shall carry."""
    link_tuples: int = 16
    """Distinct 5-tuples that every directed switch link shall carry."""
    max_rate: float = 150.0
    rotation_s: float = 3600.0
    rotation_share: float = 0.2
    classes: list[dict[str, str | int | float]] = []
    """Further probe classes `{name, dscp, size, share}`; the small one is always there."""


class AnalyzerSettings(Section, frozen=True):
    """The analyzer."""

    noise: float = 1e-4
    """Loss rate below which nothing is named."""
    open_confidence: float = 0.95
    close_after_s: float = 20.0
    confirm_probes: int = 20
    confirm_interval_ms: float = 20.0


class Settings(Section, frozen=True):
    """Everything, by section."""

    cluster: str = "default"
    topology: str | None = None
    """Path of the topology file."""
    log_level: str = "info"
    broker: BrokerSettings = BrokerSettings()
    agent: AgentSettings = AgentSettings()
    controller: ControllerSettings = ControllerSettings()
    analyzer: AnalyzerSettings = AnalyzerSettings()
