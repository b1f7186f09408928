"""A bare loop of pyverbs calls, to measure ours beside: `verbs_loop.py client|server DEVICE ADDRESS [PEER...]`.

The server prints `ADDRESS QPN` and answers each message with one; the client sends COUNT messages in turn, or with
--rate at the very moments at which a prober would send: as many wake-ups, as many messages at each. Both poll all the
time (or, with --events, wait on the completion channel), reuse their work requests, ask for one completion in 16 sends
and keep no books. The server's answer carries how long its answer before took to leave, as a second ACK would: till
post_send was called, and till it returned.
"""

from __future__ import annotations

import argparse
import heapq
import ipaddress
import json
import os
import random
import select
import time
from pathlib import Path
from typing import Any, NamedTuple

from agent.prober import BATCH_NS, JITTER
from agent.transport.verbs import library

QKEY = 0x11111111
SLOTS, SIZE = 64, 64
GRH = 40
FLOWS = 60
SIGNAL_EVERY = 16


class Cost(NamedTuple):
    """CPU of this process in ns: all of it, and what was spent in user space."""

    total: int
    user: int

    @classmethod
    def now(cls) -> Cost:
        """So far."""
        return cls(time.process_time_ns(), int(os.times().user * 1e9))

    def since(self, count: int) -> dict[str, float]:
        """Microseconds for each of `count` probes."""
        now = Cost.now()
        per = 1000 * max(1, count)
        return {"cpu_us": (now.total - self.total) / per, "user_us": (now.user - self.user) / per}


def schedule(rate: float, seconds: float, seed: int = 1) -> list[tuple[float, int]]:
    """When a prober with FLOWS flows would wake up to send, and how many probes; as `Prober` draws it."""
    rng = random.Random(seed)
    interval = FLOWS / rate
    batch = BATCH_NS / 1e9
    slots = [-rng.random() * interval for _ in range(FLOWS)]
    heap: list[tuple[float, int]] = []

    def again(flow: int, now: float) -> None:
        while slots[flow] < now:
            slots[flow] += interval
        heapq.heappush(heap, (slots[flow] + interval * JITTER * rng.random(), flow))

    for flow in range(FLOWS):
        again(flow, 0.0)
    out = []
    while (at := heap[0][0] + batch) < seconds:
        due = []
        while heap[0][0] <= at + batch:
            due.append(heapq.heappop(heap)[1])
        for flow in due:
            slots[flow] += interval
            again(flow, at)
        out.append((at, len(due)))
    return out


class Endpoint:
    """One queue pair with its receives posted."""

    def __init__(self, name: str, address: str, events: bool) -> None:
        e = self.enums = library.load_enums()
        context = library.load("device").Context(name=name)
        self._addr = library.load("addr")
        wanted = self.gid(address)
        table = context.query_gid_table(1024)
        v2 = [g for g in table if g.gid_type == e.IBV_GID_TYPE_ROCE_V2]
        self.index = next(g.gid_index for g in v2 if g.gid_str() == str(wanted))
        self._pd = library.load("pd").PD(context)
        cq = library.load("cq")
        before = _fds()
        self._channel = cq.CompChannel(context) if events else None
        self.fd = (_fds() - before).pop() if events else -1
        self.cq = cq.CQ(context, 64, None, self._channel, 0)
        if events:
            os.set_blocking(self.fd, False)
            self.cq.req_notify()
        qp = library.load("qp")
        cap = qp.QPCap(max_send_wr=SLOTS, max_recv_wr=SLOTS)
        init = qp.QPInitAttr(qp_type=e.IBV_QPT_UD, scq=self.cq, rcq=self.cq, cap=cap, sq_sig_all=0)
        attr = qp.QPAttr(port_num=1)
        attr.qkey = QKEY
        self.qp = qp.QP(self._pd, init, attr)
        self.mr = library.load("mr").MR(self._pd, (SLOTS + 1) * 256, e.IBV_ACCESS_LOCAL_WRITE)
        self._wr = library.load("wr")
        self._sges = [self._wr.SGE(self.mr.buf + i * 256, 256, self.mr.lkey) for i in range(SLOTS)]
        self._receives = [self._wr.RecvWR(wr_id=i, num_sge=1, sg=[s]) for i, s in enumerate(self._sges)]
        for i in range(SLOTS):
            self.post_receive(i)
        self._sends: list[Any] = []
        self._sent = 0
        self._backlog: list[tuple[int, int, bytes, int]] = []

    def gid(self, address: str) -> Any:
        """In the form pyverbs wants."""
        return self._addr.GID(ipaddress.IPv6Address(f"::ffff:{address}").exploded)

    def aim(self, address: str, qpn: int) -> None:
        """Make the work requests that messages are sent with, one in 16 of which asks for a completion."""
        route = self._addr.GlobalRoute(dgid=self.gid(address), sgid_index=self.index, hop_limit=64, traffic_class=104)
        handle = self._addr.AH(self._pd, attr=self._addr.AHAttr(is_global=1, port_num=1, gr=route))
        sge = self._wr.SGE(self.mr.buf + SLOTS * 256, SIZE, self.mr.lkey)
        e = self.enums
        for flags in [0] * (SIGNAL_EVERY - 1) + [e.IBV_SEND_SIGNALED]:
            request = self._wr.SendWR(wr_id=99, opcode=e.IBV_WR_SEND, num_sge=1, sg=[sge], send_flags=flags)
            request.set_wr_ud(handle, qpn, QKEY)
            self._sends.append(request)
        self._kept = handle, sge

    def post_receive(self, slot: int) -> None:
        """Give a slot back."""
        self.qp.post_recv(self._receives[slot])

    def send(self, payload: bytes) -> tuple[int, int]:
        """When post_send was called, and when it returned."""
        self.mr.write(payload, len(payload), SLOTS * 256)
        self._sent += 1
        request = self._sends[self._sent % SIGNAL_EVERY]
        called = time.perf_counter_ns()
        self.qp.post_send(request)
        return called, time.perf_counter_ns()

    def receive(self, give_up: float) -> tuple[int, int, bytes, int] | None:
        """(slot, when, payload, sender's QPN) of the next message."""
        while True:
            if self._backlog:
                return self._backlog.pop(0)
            count, completions = self.cq.poll(SLOTS)
            now = time.perf_counter_ns()
            for wc in completions if count else ():
                if wc.status:
                    raise RuntimeError(f"a completion with status {wc.status}")
                if wc.opcode & 128:
                    payload = self.mr.read(wc.byte_len - GRH, wc.wr_id * 256 + GRH)
                    self._backlog.append((wc.wr_id, now, payload, wc.src_qp))
            if count:
                continue
            if self._channel is not None:
                if not select.select([self.fd], [], [], max(0.0, give_up - time.monotonic()))[0]:
                    return None
                self._channel.get_cq_event(self.cq)
                self.cq.req_notify()
            elif time.monotonic() > give_up:
                return None

    def source(self, slot: int) -> str:
        """Who sent the message in a slot (IPv4)."""
        return str(ipaddress.IPv4Address(self.mr.read(4, slot * 256 + 32)))


def _fds() -> set[int]:
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            if "infinibandevent" in str(entry.readlink()):
                found.add(int(entry.name))
        except OSError:
            pass
    return found


def server(end: Endpoint, address: str, count: int, acks: int) -> None:
    """Answer `count` messages, each with `acks`."""
    print(address, end.qp.qp_num, flush=True)
    delays = bytes(16)
    left, cost = count, Cost.now()
    while left:
        # A client takes long to start on an emulated processor.
        found = end.receive(time.monotonic() + (180 if left == count else 20))
        if found is None:
            break
        slot, arrived, _, qpn = found
        if left == count:
            cost = Cost.now()
            end.aim(end.source(slot), qpn)
        left -= 1
        called, returned = end.send(delays + bytes(SIZE - 16))
        for _ in range(1, acks):
            end.send(bytes(SIZE))
        delays = (called - arrived).to_bytes(8, "big") + (returned - arrived).to_bytes(8, "big")
        end.post_receive(slot)
    done = count - left
    print(json.dumps({"answered": done} | cost.since(done)), flush=True)


def client(end: Endpoint, peer: str, qpn: int, count: int, acks: int) -> None:
    """Send in turn, each when the one before has all its answers."""
    end.aim(peer, qpn)
    called, returned = [], []
    delays: list[tuple[int, int]] = []
    cost = Cost.now()
    for _ in range(count):
        sent = end.send(bytes(SIZE))
        found = end.receive(time.monotonic() + 2)
        if found is None:
            continue
        called.append(found[1] - sent[0])
        returned.append(found[1] - sent[1])
        delays.append((int.from_bytes(found[2][:8], "big"), int.from_bytes(found[2][8:16], "big")))
        end.post_receive(found[0])
        for _ in range(1, acks):
            if (more := end.receive(time.monotonic() + 2)) is not None:
                end.post_receive(more[0])
    spent = cost.since(count)
    # An answer tells the delays of the one before.
    told = {
        "answered": len(called),
        "whole_ns": called,
        "network_ns": [w - d[0] for w, d in zip(called, delays[1:], strict=False)],
        "network_after_ns": [w - d[1] for w, d in zip(returned, delays[1:], strict=False)],
    }
    print(json.dumps(told | spent), flush=True)


def paced_client(end: Endpoint, peer: str, qpn: int, turns: list[tuple[float, int]], acks: int) -> None:
    """Send at these moments, whatever is answered meanwhile."""
    end.aim(peer, qpn)
    expected, got = acks * sum(n for _, n in turns), 0
    payload = bytes(SIZE)
    cost, began = Cost.now(), time.monotonic()
    for at, probes in turns:
        while (found := end.receive(began + at)) is not None:
            got += 1
            end.post_receive(found[0])
        for _ in range(probes):
            end.send(payload)
    while got < expected and (found := end.receive(time.monotonic() + 2)) is not None:
        got += 1
        end.post_receive(found[0])
    print(json.dumps({"answered": got / acks} | cost.since(expected // acks)), flush=True)


def main() -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("role", choices=("client", "server"))
    parser.add_argument("device")
    parser.add_argument("address")
    parser.add_argument("peer", nargs="*", help="client: the server's address and QPN")
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--rate", type=float, help="probes/s, for as long as COUNT takes")
    parser.add_argument("--acks", type=int, default=1, help="answers to a message")
    parser.add_argument("--events", action="store_true")
    args = parser.parse_args()
    turns = schedule(args.rate, args.count / args.rate) if args.rate else []
    count = sum(n for _, n in turns) or args.count
    end = Endpoint(args.device, args.address, args.events)
    if args.role == "server":
        server(end, args.address, count, args.acks)
    elif turns:
        paced_client(end, args.peer[0], int(args.peer[1]), turns, args.acks)
    else:
        client(end, args.peer[0], int(args.peer[1]), args.count, args.acks)


if __name__ == "__main__":
    main()
