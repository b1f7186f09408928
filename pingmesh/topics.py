"""MQTT topics: `pingmesh/v1/<cluster>/<host>/<kind>`; names that start with `_` are our own services."""

from __future__ import annotations

from dataclasses import dataclass

ROOT = "pingmesh/v1"

CONTROLLER = "_controller"
ANALYZER = "_analyzer"

# From an agent.
REGISTER = "register"  # Register, QoS 1
STATE = "state"  # AgentState, retained; the last will goes here too
REPORT = "report"  # Report, QoS 1
EXCEPTION = "exception"  # Exceptions
PATHS = "paths"  # Paths
ANSWER = "answer"  # Answer | ConfirmResult

# To an agent.
LIST = "list"  # ProbeList, retained, topic <host>/list/<device>
PEERS = "peers"  # PeerUpdate
ASK = "ask"  # Ask | Confirm | Retrace from the analyzer, WhoAreYou from the controller

# Between the analyzer and the controller.
VERDICTS = "verdicts"  # from _analyzer: Verdicts
SUMMARY = "summary"  # from _analyzer: Summary
REGISTRY = "registry"  # from _controller, retained: Registry
INCIDENTS = "incidents"  # from _controller, retained: OpenIncidents
COVERAGE = "coverage"  # from _controller, retained: Coverage


class BadTopicError(ValueError):
    """A topic that is not one of ours."""

    def __init__(self, topic: str) -> None:
        self.topic = topic
        super().__init__(f"topic {topic!r} is not {ROOT}/<cluster>/<host>/<kind>")


@dataclass(frozen=True, slots=True)
class Topic:
    """A topic, split. `device` is set for probe lists only; `retained` if the broker kept the message for us."""

    cluster: str
    host: str
    kind: str
    device: str | None = None
    retained: bool = False

    def __str__(self) -> str:
        tail = f"/{self.device}" if self.device else ""
        return f"{ROOT}/{self.cluster}/{self.host}/{self.kind}{tail}"


def parse(topic: str, retained: bool = False) -> Topic:
    """Split a topic name; raises BadTopicError."""
    parts = topic.split("/")
    if len(parts) not in (5, 6) or parts[:2] != ["pingmesh", "v1"] or not all(parts):
        raise BadTopicError(topic)
    return Topic(parts[2], parts[3], parts[4], parts[5] if len(parts) == 6 else None, retained)
