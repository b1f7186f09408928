"""pingmesh: a RoCE full-mesh ping monitor; this package holds what the parts share, the analyzer, the lab and the command line."""
