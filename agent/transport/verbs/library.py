"""Finding pyverbs, which comes with the node's own rdma-core and never from a package index."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from agent.transport.base import TransportError

DISTRIBUTION = Path("/usr/lib/python3/dist-packages/pyverbs")
CHARACTER_DEVICES = Path("/dev/infiniband")


class NoVerbsError(TransportError):
    """RDMA cannot be had on this machine; the message is one sentence with the remedy."""


def find(distribution: Path = DISTRIBUTION) -> ModuleType:
    """The package pyverbs: of this Python's own path, else of the distribution. Raises NoVerbsError.

    Nothing else of the distribution's packages becomes importable: an agent in an environment of its own keeps it so.
    """
    try:
        return importlib.import_module("pyverbs")
    except ImportError:
        pass
    version = f"{sys.version_info.major}{sys.version_info.minor}"
    if not (distribution / "__init__.py").is_file():
        raise NoVerbsError("the verbs transport needs pyverbs: apt install python3-pyverbs")
    if not list(distribution.glob(f"device.cpython-{version}-*.so")):
        raise NoVerbsError(
            f"{distribution} is made for another Python than {version[0]}.{version[1:]}: run the agent with "
            "/usr/bin/python3"
        )
    spec = importlib.util.spec_from_file_location(
        "pyverbs", distribution / "__init__.py", submodule_search_locations=[str(distribution)]
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["pyverbs"] = module
    spec.loader.exec_module(module)
    return module


def load(name: str) -> ModuleType:
    """A module of pyverbs by its name within it. Raises NoVerbsError."""
    find()
    try:
        return importlib.import_module(f"pyverbs.{name}")
    except ImportError as error:
        raise NoVerbsError(
            f"pyverbs does not fit this machine's rdma-core ({error}): take both from one release"
        ) from None


def load_enums() -> ModuleType:
    """The constants of libibverbs, wherever this release of pyverbs keeps them. Raises NoVerbsError."""
    find()
    try:
        return importlib.import_module("pyverbs.enums")
    except ImportError:
        return load("libibverbs_enums")


def explain_no_devices(character_devices: Path = CHARACTER_DEVICES) -> str:
    """Why no RDMA device is listed, and what to do."""
    if not character_devices.is_dir():
        return (
            f"there is no {character_devices}: load the NIC's RDMA driver and ib_uverbs, and give a container that "
            "directory"
        )
    return "there is no RDMA device: load the NIC's RDMA driver (`rdma link` lists devices)"
