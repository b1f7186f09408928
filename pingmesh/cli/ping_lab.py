"""`pingmesh ping` from a host of a lab, typed outside of it."""

from __future__ import annotations

import argparse
import os
import signal
import sys

from pingmesh.cli.ping_ends import Destination, PingError

_PASSED_ON = ("transport", "traffic_class", "flow_label", "sport", "count", "interval", "timeout", "size", "gid_index")


def enter(
    args: argparse.Namespace, name: str, address: str | None, target: Destination, cluster: str, controller: str
) -> int:
    """Become the same command on a lab's host. Raises PingError where there is no lab that has this RNIC.

    The target was looked up out here, where the controller is reached for certain.
    """
    # Imported here: who has no lab does not wait for it.
    from pingmesh.lab.client import Lab
    from pingmesh.lab.namespaces import LabError

    host = name.split("/")[0]
    lab = Lab()
    try:
        rnic = lab.topology.rnics[name]
        command = lab.command(host, argv(args, rnic.device, name, target, cluster, controller))
    except (LabError, OSError, KeyError, ValueError):
        where = f" (its address, {address}, is none of ours)" if address else ""
        raise PingError(
            f"{name} is not on this machine{where}: run this on {host}, in a lab by `pingmesh lab exec {host} -- "
            "pingmesh ping ...`, or give a device of this machine as SRC"
        ) from None
    sys.stdout.flush()
    # Ctrl-C is for the one that measures, which sets a handler of its own; those on the way wait for its summary.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.execvp(command[0], command)  # noqa: S606 - ourselves, in the host's namespace


def argv(
    args: argparse.Namespace, device: str, name: str, target: Destination, cluster: str, controller: str
) -> list[str]:
    """The command to run there."""
    out = [sys.executable, "-m", "pingmesh", "ping", "--device", args.device or device]
    out += ["--shown-as", name, target.name, "--cluster", cluster, "--controller", controller]
    for option in _PASSED_ON:
        if (value := getattr(args, option)) is not None:
            out += [f"--{option.replace('_', '-')}", str(value)]
    out += [f"--{flag}" for flag in ("json", "verbose", "busy") if getattr(args, flag)]
    return [*out, str(target.aim)]
