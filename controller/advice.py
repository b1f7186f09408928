"""What to do about an incident: one or two sentences per symptom, with the names filled in."""

from __future__ import annotations

from pingmesh.incidents import Incident

STEPS: dict[str, tuple[str, ...]] = {
    "drop": (
        "Look at the error and discard counters of {where} at both ends; clean or replace the optics if they grow.",
        "Take {component} out of routing until it is repaired: the remaining paths carry the traffic.",
    ),
    "blackhole": (
        "Take {component} out of routing now: it forwards nothing although routing still uses it.",
        "Then look at its ports, line card and forwarding table.",
    ),
    "flow_blackhole": (
        "Compare the forwarding and ECMP group entries of {component} with a healthy neighbour: some flows vanish, "
        "which points at one corrupt entry or one broken lane. A reload of the line card usually restores it.",
    ),
    "large_packet_drop": ("Compare the MTU at both ends of {where}: large packets are dropped where small ones pass.",),
    "class_drop": (
        "Check PFC, ECN and queue settings of class {cls} on {where}: only this class loses packets "
        "(a PFC deadlock looks like this).",
    ),
    "link_down": ("Check the cable and optics of {component}; routing already avoids it.",),
    "flap": (
        "Shut {component} down administratively until its cable and optics are replaced: flapping hurts more than a "
        "missing link.",
    ),
    "high_rtt": (
        "Look for what else uses {where} (incast, a second job) and whether ECN and PFC thresholds are set there.",
    ),
    "rnic_down": (
        "Check RNIC {component}: link state, cable and the switch port it goes to; keep jobs off its host meanwhile.",
    ),
    "switch_down": ("Check power and management of switch {component}; traffic should have moved to its peers.",),
    "host_down": ("Check host {component} over its console or BMC: neither its agent nor its RNICs answer.",),
    "agent_down": ("Restart the pingmesh agent on {component}; its host is not watched until then.",),
    "cpu_overload": (
        "See what uses the CPUs of {component} (data loaders, a runaway process): its delays are not the network's.",
    ),
}


def steps(incident: Incident) -> list[str]:
    """What to do, most urgent first."""
    direction = incident.direction
    where = f"{incident.component} in the direction {direction}" if direction and direction != "both" else None
    out = [
        text.format(component=incident.component, where=where or incident.component, cls=incident.cls or "?")
        for text in STEPS.get(incident.symptom, ())
    ]
    if incident.alternatives:
        out.append(f"If {incident.component} turns out healthy, look at {', '.join(incident.alternatives)} next.")
    return out
