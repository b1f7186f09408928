"""The edge to pyverbs, on a scripted pyverbs: what is asked of it, what is closed, and what its errors become."""

from __future__ import annotations

import errno
import os
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
from verbs_fake import FakeResolver

from agent.transport.base import TransportError
from agent.transport.verbs import library, pyverbs_edge
from agent.transport.verbs.edge import GRH, Happening, Shape
from agent.transport.verbs.lanes import FIRST_RECEIVES, HEAD
from agent.transport.verbs.pyverbs_edge import PyverbsEdge
from agent.transport.verbs.transport import Rule, VerbsTransport

ENUMS = [
    "IBV_EVENT_PORT_ACTIVE",
    "IBV_EVENT_PORT_ERR",
    "IBV_EVENT_GID_CHANGE",
    "IBV_EVENT_LID_CHANGE",
    "IBV_EVENT_CLIENT_REREGISTER",
    "IBV_EVENT_QP_FATAL",
    "IBV_EVENT_QP_REQ_ERR",
    "IBV_EVENT_QP_ACCESS_ERR",
    "IBV_EVENT_CQ_ERR",
    "IBV_EVENT_DEVICE_FATAL",
    "IBV_EVENT_SRQ_ERR",
    "IBV_PORT_ACTIVE",
    "IBV_LINK_LAYER_ETHERNET",
    "IBV_GID_TYPE_ROCE_V2",
    "IBV_ACCESS_LOCAL_WRITE",
    "IBV_QPT_UD",
    "IBV_WR_SEND",
    "IBV_WC_EX_WITH_BYTE_LEN",
    "IBV_WC_EX_WITH_SRC_QP",
    "IBV_WC_EX_WITH_COMPLETION_TIMESTAMP",
    "IBV_WC_RECV",
]


class PyverbsError(Exception):
    pass


class PyverbsRDMAError(PyverbsError):
    def __init__(self, message: str, error_code: int) -> None:
        super().__init__(message)
        self.error_code = error_code


class Thing:
    """An object of pyverbs: how it was made, and how often it was closed."""

    def __init__(self, kind: str, *args: Any, **kwargs: Any) -> None:
        self.kind, self.args, self.kwargs = kind, args, kwargs
        self.closed = 0

    def close(self) -> None:
        self.closed += 1


class Context(Thing):
    def __init__(self, machine: Pyverbs, name: str) -> None:
        super().__init__("Context", name)
        self.machine = machine

    def query_device(self) -> Any:
        return SimpleNamespace(vendor_id=0x2C9, phys_port_cnt=1)

    def query_device_ex(self) -> Any:
        return SimpleNamespace(completion_timestamp_mask=self.machine.stamp_mask, hca_core_clock=1_000_000)

    def query_port(self, number: int) -> Any:
        enums = self.machine.enums
        return SimpleNamespace(
            state=enums.IBV_PORT_ACTIVE, link_layer=enums.IBV_LINK_LAYER_ETHERNET, active_mtu=5, gid_tbl_len=16
        )

    def query_gid_table(self, most: int) -> list[Any]:
        v2 = self.machine.enums.IBV_GID_TYPE_ROCE_V2
        text = "0000:0000:0000:0000:0000:ffff:0a00:0001"
        return [SimpleNamespace(gid_index=3, gid_str=lambda: text, gid_type=v2, ndev_ifindex=7, port_num=1)]

    def get_async_event(self) -> Any:
        if not self.machine.events:
            raise PyverbsRDMAError("Failed to get async event", errno.EIO)
        os.read(self.machine.event_fds[0], 1)
        return SimpleNamespace(event_type=self.machine.events.pop(0), ack=lambda: None)


class Pyverbs:
    """The package: everything made of it is in `made`; `refuse` names what raises, and the errno."""

    def __init__(self) -> None:
        self.enums = SimpleNamespace(**{name: number for number, name in enumerate(ENUMS, 1)})
        self.made: list[Any] = []
        self.refuse: dict[str, int] = {}
        self.stamp_mask = 0
        self.events: list[int] = []
        self.event_fds = os.pipe()
        self.channel_fds = os.pipe()

    def __getitem__(self, name: str) -> Any:
        modules = {
            "device": {"Context": self.open, "get_device_list": self.devices},
            "pd": {"PD": self.maker("PD")},
            "addr": {n: self.maker(n) for n in ("AH", "AHAttr", "GlobalRoute", "GID")},
            "cq": {
                **{n: self.maker(n) for n in ("CqInitAttrEx", "CQEX", "PollCqAttr")},
                "CompChannel": self.maker("CompChannel", fd=self.channel_fds[0]),
                "CQ": self.maker("CQ", req_notify=lambda: None, poll=lambda n: (0, None)),
            },
            "qp": {
                **{n: self.maker(n) for n in ("QPCap", "QPInitAttr", "QPAttr")},
                "QP": self.maker("QP", qp_num=17, post_recv=lambda w: None, post_send=lambda w: None),
            },
            "mr": {"MR": self.maker("MR", lkey=9)},
            "wr": {
                **{n: self.maker(n) for n in ("SGE", "RecvWR")},
                "SendWR": self.maker("SendWR", set_wr_ud=lambda *a: None),
            },
            "pyverbs_error": {"PyverbsError": PyverbsError},
        }
        return SimpleNamespace(**modules[name])

    def maker(self, kind: str, **attributes: Any) -> Any:
        def make(*args: Any, **kwargs: Any) -> Thing:
            if kind in self.refuse:
                raise PyverbsRDMAError(f"Failed to create {kind}", self.refuse[kind])
            made = Thing(kind, *args, **kwargs)
            made.__dict__ |= attributes
            self.made.append(made)
            return made

        return make

    def open(self, name: str) -> Context:
        if "Context" in self.refuse:
            raise PyverbsRDMAError("Failed to open device", self.refuse["Context"])
        self.made.append(Context(self, name))
        return self.made[-1]  # type: ignore[no-any-return]

    def devices(self) -> list[Any]:
        if "devices" in self.refuse:
            raise PyverbsRDMAError("Failed to get devices list", self.refuse["devices"])
        return [SimpleNamespace(name=b"mlx5_1"), SimpleNamespace(name=b"mlx5_0")]

    def of(self, kind: str) -> list[Thing]:
        return [t for t in self.made if t.kind == kind]


@pytest.fixture
def pyverbs(monkeypatch: pytest.MonkeyPatch) -> Any:
    scripted = Pyverbs()
    monkeypatch.setattr(library, "load", scripted.__getitem__)
    monkeypatch.setattr(library, "load_enums", lambda: scripted.enums)
    fds = [set(), {scripted.event_fds[0]}]
    monkeypatch.setattr(pyverbs_edge, "_event_fds", lambda: fds.pop(0) if fds else set())
    yield scripted
    for fd in (*scripted.event_fds, *scripted.channel_fds):
        os.close(fd)


class Limited:
    def __init__(self, interface: str, address: str) -> None:
        pass

    def close(self) -> None:
        pass


def transport() -> VerbsTransport:
    return VerbsTransport(
        "rnic0",
        "mlx5_0",
        PyverbsEdge(),
        {7: "eth7"}.__getitem__,
        Rule(),
        resolver=lambda interface, address: FakeResolver(),
        limited=Limited,  # type: ignore[arg-type]
        members_of=lambda interface: 1,
    )


def test_without_rdma_the_list_is_empty_and_nothing_is_raised(pyverbs: Pyverbs) -> None:
    assert PyverbsEdge().devices() == ["mlx5_0", "mlx5_1"]
    pyverbs.refuse["devices"] = errno.ENOSYS
    assert PyverbsEdge().devices() == []


def test_a_device_without_permission_is_an_error_of_the_system(pyverbs: Pyverbs) -> None:
    pyverbs.refuse["Context"] = errno.EACCES
    with pytest.raises(PermissionError, match="mlx5_0 cannot be opened: Permission denied"):
        PyverbsEdge().open("mlx5_0")


def test_handles_go_further_than_the_first_router_and_carry_label_and_class(pyverbs: Pyverbs) -> None:
    t = transport()
    t.send(t.target("10.0.1.2", 99, 1), 0xC123, 26, bytes(64), 64, True)
    (route,) = pyverbs.of("GlobalRoute")
    assert route.kwargs["hop_limit"] == 64
    assert (route.kwargs["flow_label"], route.kwargs["traffic_class"]) == (0x123, 26 << 2)
    assert route.kwargs["sgid_index"] == 3
    t.close()


@pytest.mark.parametrize("code", [errno.ENOMEM, errno.EPERM, errno.EAGAIN])
def test_memory_that_may_not_be_locked_names_the_remedy_and_leaves_nothing_open(pyverbs: Pyverbs, code: int) -> None:
    pyverbs.refuse["MR"] = code
    with pytest.raises(TransportError, match=r"mlx5_0: .* KiB cannot be locked in memory: raise the limit"):
        transport()
    assert [t.closed for t in pyverbs.made if t.kind in ("Context", "PD")] == [1, 1]


def test_a_device_whose_stamped_queue_is_refused_has_software_stamps(pyverbs: Pyverbs) -> None:
    pyverbs.stamp_mask = (1 << 63) - 1
    pyverbs.refuse["CQEX"] = errno.EOPNOTSUPP
    t = transport()
    assert (t.clock, t.polled, len(pyverbs.of("CQ"))) == ("software", False, 1)
    t.close()


def test_work_requests_are_made_once_and_everything_is_closed_once(pyverbs: Pyverbs) -> None:
    t = transport()
    target = t.target("10.0.1.2", 99, 1)
    for _ in range(3):
        for _ in range(100):
            t._lanes[0].busy = [False] * len(t._lanes[0].busy)  # everything has left
            t.send(target, 0xC123, 26, bytes(64), 64, True)
    device, pair = t._device, t._lanes[0].pair
    assert isinstance(device, pyverbs_edge.PyverbsDevice)
    assert isinstance(pair, pyverbs_edge.PyverbsPair)
    memory = weakref.ref(device.memory.obj)
    made = len(pyverbs.of("SendWR"))
    assert made <= t._layout.sends
    t.close()
    t.close()
    for kind in ("SGE", "SendWR", "RecvWR", "QP", "AH", "MR", "CQ"):
        assert {x.closed for x in pyverbs.of(kind)} == {1}, kind
    # What is closed may be referred to for a while, but holds no buffers.
    assert not pair._receives
    assert not pair._sends
    assert memory() is None


def test_what_is_beyond_a_slot_is_written_to_and_read_from_where_all_have_it(pyverbs: Pyverbs) -> None:
    t = transport()
    layout, base = t._layout, t._device._address  # type: ignore[attr-defined]
    (cap,) = pyverbs.of("QPCap")
    assert (cap.kwargs["max_send_sge"], cap.kwargs["max_recv_sge"]) == (2, 2)

    def parts(request: Any) -> list[tuple[int, int]]:
        assert request.kwargs["num_sge"] == len(request.kwargs["sg"])
        return [(e.args[0] - base, e.args[1]) for e in request.kwargs["sg"]]

    beyond = t.mtu - HEAD
    received = [parts(r) for r in pyverbs.of("RecvWR")]
    assert [p[0] for p in received] == [(i * (GRH + HEAD), GRH + HEAD) for i in range(FIRST_RECEIVES)]
    assert all(p[1:] == [(layout.spill_at, beyond)] for p in received)
    target = t.target("10.0.1.2", 99, 1)
    for size in (64, HEAD, HEAD + 4, t.mtu):
        t.send(target, 0xC123, 26, bytes(64), size, True)
    first = layout.send_at[0]
    assert [parts(r) for r in pyverbs.of("SendWR")] == [
        [(first, 64)],
        [(first + HEAD, HEAD)],
        [(first + 2 * HEAD, HEAD), (layout.zeros_at, 4)],
        [(first + 3 * HEAD, HEAD), (layout.zeros_at, beyond)],
    ]
    assert layout.zeros_at + beyond <= layout.spill_at
    t.close()


def test_asynchronous_events_by_what_they_mean(pyverbs: Pyverbs) -> None:
    device = PyverbsEdge().open("mlx5_0")
    meant = {
        "IBV_EVENT_GID_CHANGE": Happening.PORT,
        "IBV_EVENT_PORT_ACTIVE": Happening.PORT,
        "IBV_EVENT_PORT_ERR": Happening.PORT,
        "IBV_EVENT_QP_FATAL": Happening.QUEUE,
        "IBV_EVENT_CQ_ERR": Happening.QUEUE,
        "IBV_EVENT_DEVICE_FATAL": Happening.FATAL,
        "IBV_EVENT_SRQ_ERR": Happening.OTHER,
    }
    for name, happening in meant.items():
        pyverbs.events.append(getattr(pyverbs.enums, name))
        os.write(pyverbs.event_fds[1], b"x")
        assert device.next_event() is happening
    assert device.next_event() is None
    # The driver was taken away: the descriptor is readable and yields nothing.
    os.write(pyverbs.event_fds[1], b"x")
    assert device.next_event() is Happening.FATAL


def test_a_bond_s_member_can_only_be_chosen_where_the_provider_lets(
    pyverbs: Pyverbs, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = PyverbsEdge().open("mlx5_0")
    device.register(4096)
    device.make_queue(16, False)
    pair = device.make_pair(Shape(1, 1, 0, 64, 1, 0, 1, 0, 64, 0, 0, 0))

    def missing(name: str) -> Any:
        if name.startswith("providers"):
            raise library.NoVerbsError("no such module")
        return pyverbs[name]

    monkeypatch.setattr(library, "load", missing)
    with pytest.raises(OSError, match="member of the bond cannot be chosen") as caught:
        pair.choose_leg(2)
    assert caught.value.errno == errno.EOPNOTSUPP
