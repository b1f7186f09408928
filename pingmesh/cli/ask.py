"""Asking the controller: the middle layer of the commands that show what it knows."""

from __future__ import annotations

import datetime
from typing import Any


def get(
    address: str,
    path: str,
    *,
    hosts: str | None = None,
    state: str | None = None,
    since: str | None = None,
    name: str | None = None,
) -> Any:
    """JSON of the controller's API. Raises ControllerUnreachableError or BadRequestError, each with a remedy."""
    # Imported here: `--help` should not wait for an HTTP library.
    from controller.client import get as client_get

    return client_get(address, path, hosts=hosts, state=state, since=since, name=name)


def now() -> datetime.datetime:
    """The time that ages are counted to."""
    return datetime.datetime.now(tz=datetime.UTC)
