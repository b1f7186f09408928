from __future__ import annotations

import importlib.metadata

from pingmesh.version import VERSION


def test_the_release_is_that_of_the_installed_package() -> None:
    assert importlib.metadata.version("pingmesh") == VERSION
