from __future__ import annotations

import os
from pathlib import Path

import pytest

HERE = Path(__file__).parent
INSIDE = os.environ.get("PINGMESH_VM") == "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    outside = pytest.mark.skip(reason="runs inside the virtual machine: make test-vm")
    for item in items:
        if not INSIDE and item.path.is_relative_to(HERE):
            item.add_marker(outside)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Tell of a failure at once: a machine that is ended from outside shows no summary."""
    if INSIDE and report.failed:
        print(f"\n{report.longreprtext}\n{report.caplog}\n{report.capstdout}", flush=True)
