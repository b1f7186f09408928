"""Fault injection: what can be broken in the lab, how, and what a right analyzer answers."""
