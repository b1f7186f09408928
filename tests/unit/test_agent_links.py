from __future__ import annotations

from dataclasses import replace

from agent.interfaces import Interface, Netlink
from agent.links import LinkState, LinkWatcher


class Links:
    def __init__(self, *names: str) -> None:
        self.now = {n: Interface(n, i, True, 2, 4200) for i, n in enumerate(names)}

    def interface(self, name: str) -> Interface | None:
        return self.now.get(name)

    def set(self, name: str, up: bool, changes: int) -> None:
        self.now[name] = replace(self.now[name], up=up, carrier_changes=changes)


def watch(links: Links, *devices: str) -> tuple[LinkWatcher, list[tuple[str, bool, int]]]:
    told: list[tuple[str, bool, int]] = []

    def on_change(device: str, state: LinkState) -> None:
        told.append((device, state.up, state.flaps))

    return LinkWatcher(links, devices, on_change), told


def test_down_and_up_are_told_once_each() -> None:
    links = Links("rnic0", "rnic1")
    watcher, told = watch(links, "rnic0", "rnic1")
    assert watcher.up("rnic0")
    assert watcher.poll() == []
    links.set("rnic0", False, 3)
    assert watcher.poll() == ["rnic0"]
    assert watcher.poll() == []
    links.set("rnic0", True, 4)
    watcher.poll()
    assert told == [("rnic0", False, 1), ("rnic0", True, 2)]


def test_a_flap_between_two_polls_is_told() -> None:
    links = Links("rnic0")
    watcher, told = watch(links, "rnic0")
    links.set("rnic0", True, 6)
    watcher.poll()
    assert told == [("rnic0", True, 4)]


def test_a_device_that_comes_late_and_goes_away() -> None:
    links = Links()
    watcher, told = watch(links, "rnic0")
    assert not watcher.up("rnic0")
    links.now["rnic0"] = Interface("rnic0", 4, True, 50, 4200)
    watcher.poll()
    del links.now["rnic0"]
    watcher.poll()
    links.now["rnic0"] = Interface("rnic0", 9, False, 1, 4200)
    watcher.poll()
    assert told == [("rnic0", True, 0), ("rnic0", False, 1)]


def test_the_kernel_answers() -> None:
    with Netlink() as netlink:
        lo = netlink.interface("lo")
        assert lo is not None
        assert lo.loopback
        assert lo in netlink.interfaces()
        assert netlink.interface("no-such-device") is None
        assert netlink.prefixes("lo") == [], "loopback addresses are nothing to probe from"
