"""Fabrics, probes and faults drawn as arrays: what inference is tested and measured on, without sending a packet."""
