"""`python -m pingmesh`."""

from __future__ import annotations

from pingmesh.cli.main import entry

if __name__ == "__main__":
    entry()
