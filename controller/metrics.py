"""The controller's own metrics, made afresh at each scrape, so that what has gone leaves no series behind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from controller.clock import now_ns

if TYPE_CHECKING:
    from controller.service import Controller


class ControllerCollector(Collector):
    """Reads the state of one controller."""

    def __init__(self, controller: Controller) -> None:
        self._c = controller

    def collect(self) -> Iterator[Metric]:
        """One gauge or counter a noun; no label grows with pairs of RNICs."""
        c = self._c
        agents = c.agents(now_ns())
        yield _gauge("pingmesh_agents_online", "Agents online.", agents["online"])
        yield _gauge("pingmesh_agents_expected", "Hosts in the topology.", agents["expected"])
        share = c.planner.coverage.share
        if share is not None:
            yield _gauge("pingmesh_coverage_ratio", "Share of directed switch links probed as wanted.", share)
        yield _gauge("pingmesh_tuples", "Inter-ToR 5-tuples in the probe lists.", c.planner.coverage.tuples)
        yield _gauge("pingmesh_tuples_untraced", "Of these, without a traced path.", c.planner.coverage.untraced)
        yield _gauge("pingmesh_broker_connected", "1 while connected.", int(c.bus.connected.is_set()))
        yield _gauge("pingmesh_findings", "Findings.", len(c.store.findings()))
        incidents = GaugeMetricFamily("pingmesh_incidents_open", "Open incidents.", labels=["symptom"])
        by_symptom: dict[str, int] = {}
        for i in c.store.open.values():
            by_symptom[i.symptom] = by_symptom.get(i.symptom, 0) + 1
        for symptom, n in sorted(by_symptom.items()):
            incidents.add_metric([symptom], n)
        yield incidents
        rejected = CounterMetricFamily("pingmesh_messages_rejected", "Messages not usable.", labels=["kind"])
        for kind, n in sorted(c.bus.rejected.items()):
            rejected.add_metric([kind], n)
        yield rejected
        received = CounterMetricFamily("pingmesh_messages_received", "Messages received.", labels=["kind"])
        for kind, n in sorted(c.received.items()):
            received.add_metric([kind], n)
        yield received


def _gauge(name: str, text: str, value: object) -> GaugeMetricFamily:
    assert isinstance(value, int | float)
    return GaugeMetricFamily(name, text, value=value)


def exposition(controller: Controller) -> tuple[bytes, str]:
    """The scrape's body and content type."""
    registry = CollectorRegistry()
    registry.register(ControllerCollector(controller))
    return generate_latest(registry), CONTENT_TYPE_LATEST
