"""Turns what the agents report into incidents."""
