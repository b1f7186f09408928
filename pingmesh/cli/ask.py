"""Asking the controller: the middle layer of the commands that show what it knows."""

from __future__ import annotations

import datetime
import re
from typing import Any

from pingmesh.config import ConfigError


def get(address: str, path: str, **params: object) -> Any:
    """JSON of the controller's API. Raises ControllerUnreachableError with a remedy."""
    # Imported here: `--help` should not wait for an HTTP library.
    from controller.client import get as client_get

    return client_get(address, path, **{k: v for k, v in params.items() if v is not None})


def now() -> datetime.datetime:
    """The time that ages are counted to."""
    return datetime.datetime.now(tz=datetime.UTC)


_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


def span(text: str) -> int:
    """Seconds of `90s`, `10m`, `2h`, `1d`. Raises ConfigError."""
    m = re.fullmatch(r"(\d+)([smhd])", text)
    if not m or not int(m[1]):
        raise ConfigError(f"--since: {text!r} is no span of time; write for example 90s, 10m, 2h or 1d.")
    return int(m[1]) * _UNITS[m[2]]
