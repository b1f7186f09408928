"""A fault as asked for: the arguments of `pingmesh lab fault add` and the frozen specification they make."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from enum import Enum
from typing import NoReturn, TypeVar

import msgspec

from pingmesh.lab.faults.errors import FaultError

DEFAULT_REROUTE_MS = 500
MIN_RATE = 5_000_000
MAX_RATE = 100_000_000


class Target(Enum):
    """What a fault is done to."""

    LINK = "link"
    RNIC = "rnic"
    SWITCH = "switch"
    HOST = "host"
    AGENT = "agent"
    BROKER = "broker"
    CONTROLLER = "controller"
    ANALYZER = "analyzer"


class Action(Enum):
    """What is done."""

    LOSS = "loss"
    DOWN = "down"
    FLAP = "flap"
    CONGEST = "congest"
    DELAY = "delay"
    STARVE = "starve"
    PAUSE = "pause"
    RESTART = "restart"
    KILL = "kill"
    STOP = "stop"


class FaultSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One fault. `loss` and `flows` are shares 0..1; `direction` is relative to `names` (forward: first to second)."""

    target: Target
    action: Action
    names: tuple[str, ...] = ()
    loss: float = 1.0
    direction: str = "both"
    larger_than: int | None = None
    flows: float | None = None
    dscp: int | None = None
    reroute_ms: int | None = DEFAULT_REROUTE_MS
    """Milliseconds until the far switches withdraw their routes; None: never."""
    seconds: float = 0.0
    rate_bps: int = 0
    delay_ms: float = 0.0
    jitter_ms: float = 0.0
    """Each packet is delayed by `delay_ms` plus or minus up to this."""

    @property
    def text(self) -> str:
        """The fault in the words of the command line, for lists and logs."""
        words = [self.target.value, *self.names]
        match self.action:
            case Action.LOSS:
                words += ["--loss", f"{self.loss * 100:g}%"]
                if self.flows is not None:
                    words += ["--flows", f"{self.flows * 100:g}%"]
                if self.larger_than is not None:
                    words += ["--larger-than", str(self.larger_than)]
                if self.dscp is not None:
                    words += ["--dscp", str(self.dscp)]
            case Action.FLAP | Action.STARVE | Action.PAUSE:
                words += [f"--{self.action.value}", f"{self.seconds:g}"]
            case Action.CONGEST:
                words += ["--congest", f"{self.rate_bps / 1e6:g}mbit"]
            case Action.DELAY:
                words += ["--delay", f"{self.delay_ms:g}"]
                words += ["--jitter", f"{self.jitter_ms:g}"] if self.jitter_ms else []
            case _:
                words.append(f"--{self.action.value}")
        if self.action in (Action.LOSS, Action.CONGEST, Action.DELAY) and self.target in (Target.LINK, Target.RNIC):
            words += ["--direction", self.direction]
        if self.target is Target.LINK and self.action in (Action.DOWN, Action.FLAP):
            words += ["--no-reroute"] if self.reroute_ms is None else ["--reroute", str(self.reroute_ms)]
        return " ".join(words)


T = TypeVar("T")


def _typed(convert: Callable[[str], T], name: str) -> Callable[[str], T]:
    """An argparse type whose error is our sentence."""

    def inner(text: str) -> T:
        try:
            return convert(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    inner.__name__ = name
    return inner


def parse_percent(text: str) -> float:
    """`30`, `30%` or `0.5%` as a share 0..1. Raises FaultError."""
    try:
        value = float(text.strip().removesuffix("%"))
    except ValueError:
        value = -1.0
    if not 0 < value <= 100:
        raise FaultError(f"{text!r} is no percentage: give a number above 0 and up to 100, such as 30 or 0.5%.")
    return value / 100


def parse_rate(text: str) -> int:
    """`10mbit`, `10M` or `12500000` in bits per second. Raises FaultError."""
    m = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]?)(?:bit|bps|bit/s)?", text.strip(), re.IGNORECASE)
    if m is None:
        raise FaultError(f"{text!r} is no rate: give bits per second, such as 20mbit.")
    rate = int(float(m[1]) * {"": 1, "k": 1e3, "m": 1e6, "g": 1e9}[m[2].lower()])
    if not MIN_RATE <= rate <= MAX_RATE:
        raise FaultError(
            f"A rate of {text} does not work: below {MIN_RATE // 10**6}mbit the probes alone fill the queue, above "
            f"{MAX_RATE // 10**6}mbit the lab cannot fill it."
        )
    return rate


def parse_seconds(text: str) -> float:
    """A duration in seconds, 0.1 to 3600. Raises FaultError."""
    try:
        value = float(text.strip().removesuffix("s"))
    except ValueError:
        value = -1.0
    if not 0.1 <= value <= 3600:
        raise FaultError(f"{text!r} is no duration: give seconds from 0.1 to 3600.")
    return value


def parse_milliseconds(text: str) -> float:
    """A delay in milliseconds, 0.1 to 10000. Raises FaultError."""
    try:
        value = float(text.strip().removesuffix("ms"))
    except ValueError:
        value = -1.0
    if not 0.1 <= value <= 10_000:
        raise FaultError(f"{text!r} is no delay: give milliseconds from 0.1 to 10000.")
    return value


def _bounded(name: str, low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if not low <= value <= high:
            raise FaultError(f"{text!r} is no {name}: give a whole number from {low} to {high}.")
        return value

    return _typed(parse, name)


_percent = _typed(parse_percent, "percentage")
_rate = _typed(parse_rate, "rate")
_seconds = _typed(parse_seconds, "seconds")
_milliseconds = _typed(parse_milliseconds, "milliseconds")


_EXAMPLES = {
    "link": "leaf1 spine2 --loss 30% --direction forward",
    "rnic": "h3/rnic0 --down",
    "switch": "spine1 --loss 100%",
    "host": "h7 --starve 20",
    "agent": "h7 --kill",
    "broker": "--restart",
    "controller": "--restart",
    "analyzer": "--restart",
}


def add_fault_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `pingmesh lab fault add`; `spec_from_args` reads them."""
    kinds = parser.add_subparsers(dest="fault_target", metavar="WHAT", required=True, parser_class=type(parser))

    p = kinds.add_parser("link", help="a cable between two switches: loss, down, flap, congestion, delay")
    p.add_argument("names", nargs=2, metavar="SWITCH", help="its ends; SWITCH:PORT where cables are parallel")
    what = p.add_mutually_exclusive_group()
    what.add_argument("--loss", type=_percent, metavar="PCT", help="drop this percentage of IP packets")
    what.add_argument("--down", action="store_true", help="both ends lose the carrier")
    what.add_argument("--flap", type=_seconds, metavar="SECONDS", help="down and up in turn, this long each")
    what.add_argument("--congest", type=_rate, metavar="RATE", help="a slow queue that competing traffic keeps filled")
    what.add_argument("--delay", type=_milliseconds, metavar="MS", help="every packet comes later (needs netem)")
    p.add_argument("--jitter", type=_milliseconds, metavar="MS", help="with --delay: by up to so much more or less")
    p.add_argument(
        "--direction", choices=("forward", "reverse", "both"), help="forward: from the first name to the second"
    )
    p.add_argument(
        "--larger-than", type=_bounded("packet size", 64, 9000), metavar="BYTES", help="only larger IP packets"
    )
    p.add_argument("--flows", type=_percent, metavar="SHARE", help="only this percentage of 5-tuples, by hash")
    p.add_argument("--dscp", type=_bounded("DSCP", 0, 63), metavar="N", help="only packets with this DSCP")
    route = p.add_mutually_exclusive_group()
    route.add_argument(
        "--reroute",
        type=_bounded("delay", 0, 600_000),
        metavar="MS",
        help="far switches withdraw after MS (500)",
    )
    route.add_argument("--no-reroute", action="store_true", help="far switches never learn of it")

    p = kinds.add_parser("rnic", help="an RNIC with its cable and ToR port: loss, down")
    p.add_argument("names", nargs=1, metavar="HOST/DEVICE")
    what = p.add_mutually_exclusive_group(required=True)
    what.add_argument("--loss", type=_percent, metavar="PCT", help="drop this percentage of IP packets")
    what.add_argument("--down", action="store_true", help="the cable loses the carrier")
    p.add_argument("--direction", choices=("rx", "tx", "both"), help="as seen from the RNIC (default both)")

    p = kinds.add_parser("switch", help="a switch: loss, down")
    p.add_argument("names", nargs=1, metavar="SWITCH")
    what = p.add_mutually_exclusive_group(required=True)
    what.add_argument("--loss", type=_percent, metavar="PCT", help="drop this percentage of the packets it receives")
    what.add_argument("--down", action="store_true", help="all its ports lose the carrier")

    p = kinds.add_parser("host", help="a host: down, starved of CPU, paused")
    p.add_argument("names", nargs=1, metavar="HOST")
    what = p.add_mutually_exclusive_group(required=True)
    what.add_argument("--down", action="store_true", help="agent killed, all links and the management link down")
    what.add_argument("--starve", type=_seconds, metavar="SECONDS", help="hardly any CPU for this long")
    what.add_argument("--pause", type=_seconds, metavar="SECONDS", help="frozen for this long")

    p = kinds.add_parser("agent", help="the agent of a host: restart, kill, stop")
    p.add_argument("names", nargs=1, metavar="HOST")
    what = p.add_mutually_exclusive_group(required=True)
    what.add_argument("--restart", action="store_true", help="stop it and start it again")
    what.add_argument("--kill", action="store_true", help="SIGKILL; stays dead until cleared")
    what.add_argument("--stop", action="store_true", help="SIGTERM; stays stopped until cleared")

    for name in ("broker", "controller", "analyzer"):
        p = kinds.add_parser(name, help=f"the {name}: restart")
        p.add_argument("--restart", action="store_true", required=True, help="stop it and start it again")

    for name, example in _EXAMPLES.items():
        kinds.choices[name].epilog = f"example: pingmesh lab fault add {name} {example}"


def _action(args: argparse.Namespace) -> Action:
    for action in (a for a in Action if a is not Action.LOSS):
        value = getattr(args, action.value, None)
        if value is not None and value is not False:
            return action
    if args.loss is not None or args.fault_target != Target.LINK.value:
        return Action.LOSS
    if args.flows is None and args.larger_than is None and args.dscp is None:
        raise FaultError(
            "Say what happens to the link: --loss, --down, --flap, --congest, --delay, --flows, --larger-than, --dscp."
        )
    return Action.LOSS


def spec_from_args(args: argparse.Namespace) -> FaultSpec:
    """The specification that parsed arguments make. Raises FaultError for options that do not go together."""
    target = Target(args.fault_target)
    action = _action(args)
    names = tuple(getattr(args, "names", ()))
    direction: str | None = getattr(args, "direction", None)
    if target is not Target.LINK:
        if action is not Action.LOSS and direction is not None:
            raise FaultError(f"--direction does not go with --{action.value}: it concerns --loss only.")
        seconds = getattr(args, action.value) if action in (Action.STARVE, Action.PAUSE) else 0.0
        loss = args.loss if action is Action.LOSS else 1.0
        return FaultSpec(
            target=target, action=action, names=names, loss=loss, seconds=seconds, direction=direction or "both"
        )
    if names[0] == names[1]:
        raise FaultError(f"A link has two ends, not {names[0]} twice.")
    for option, value in (("--flows", args.flows), ("--larger-than", args.larger_than), ("--dscp", args.dscp)):
        if value is not None and action is not Action.LOSS:
            raise FaultError(f"{option} does not go with --{action.value}: it picks which packets --loss drops.")
    down = action in (Action.DOWN, Action.FLAP)
    if (args.reroute is not None or args.no_reroute) and not down:
        raise FaultError("--reroute and --no-reroute go with --down and --flap only.")
    if direction is not None and down:
        raise FaultError(f"--direction does not go with --{action.value}: a cable goes down in both directions.")
    if action is Action.CONGEST and direction == "both":
        raise FaultError("--congest fills the queue of one direction: give --direction forward or reverse.")
    if args.jitter is not None and action is not Action.DELAY:
        raise FaultError("--jitter goes with --delay only.")
    if args.jitter is not None and args.jitter > args.delay:
        raise FaultError("A --jitter above its --delay would have packets arrive before they are sent.")
    reroute = None if args.no_reroute else DEFAULT_REROUTE_MS if args.reroute is None else args.reroute
    return FaultSpec(
        target=target,
        action=action,
        names=names,
        loss=1.0 if args.loss is None else args.loss,
        direction=direction or ("forward" if action is Action.CONGEST else "both"),
        larger_than=args.larger_than,
        flows=args.flows,
        dscp=args.dscp,
        reroute_ms=reroute if down else DEFAULT_REROUTE_MS,
        seconds=args.flap if action is Action.FLAP else 0.0,
        rate_bps=args.congest if action is Action.CONGEST else 0,
        delay_ms=args.delay if action is Action.DELAY else 0.0,
        jitter_ms=args.jitter or 0.0,
    )


class _Parser(argparse.ArgumentParser):
    """Raises instead of leaving the process."""

    def error(self, message: str) -> NoReturn:
        raise FaultError(f"{message[:1].upper()}{message[1:]}.".replace("..", "."))


def parse(argv: Sequence[str]) -> FaultSpec:
    """The specification of `fault add` arguments, such as `["link", "leaf1", "spine2", "--loss", "30%"]`.

    Raises FaultError.
    """
    parser = _Parser(prog="pingmesh lab fault add", add_help=False)
    add_fault_arguments(parser)
    return spec_from_args(parser.parse_args(list(argv)))
