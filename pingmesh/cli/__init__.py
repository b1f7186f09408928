"""The `pingmesh` command: parse, run, print."""
