"""Imports that a package makes and none of ours uses: whoever imports them later gets the real ones."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType


@contextmanager
def left_out(module: str) -> Iterator[None]:
    """An empty module in the place of one, unless it is there already: names imported from it are an ImportError."""
    if module in sys.modules:
        yield
        return
    sys.modules[module] = ModuleType(module)
    try:
        yield
    finally:
        del sys.modules[module]
