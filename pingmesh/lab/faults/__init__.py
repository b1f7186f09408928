"""Fault injection: what can be broken in the lab, how, and what a right analyzer answers."""

from pingmesh.lab.faults.draw import DEMO_KINDS, KINDS, random_spec
from pingmesh.lab.faults.errors import FaultError
from pingmesh.lab.faults.manager import FaultManager
from pingmesh.lab.faults.spec import FaultSpec, add_fault_arguments, parse, spec_from_args
from pingmesh.lab.faults.truth import Truth

__all__ = [
    "DEMO_KINDS",
    "KINDS",
    "FaultError",
    "FaultManager",
    "FaultSpec",
    "Truth",
    "add_fault_arguments",
    "parse",
    "random_spec",
    "spec_from_args",
]
