"""pingmesh, a RoCE full-mesh ping monitor: what the parts share, the analyzer, the lab and the command line."""
