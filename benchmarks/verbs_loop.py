"""A bare loop of pyverbs calls, to measure ours beside: `verbs_loop.py client|server DEVICE ADDRESS [PEER...]`.

The server prints `ADDRESS QPN` and answers each message with one; the client sends COUNT messages in turn. Both poll
all the time (or, with --events, wait on the completion channel), reuse their work requests and keep no books. The
server's answer carries how long its answer before took to leave, as a second ACK would.
"""

from __future__ import annotations

import argparse
import ipaddress
import json
import os
import select
import time
from pathlib import Path
from typing import Any

from agent.transport.verbs import library

QKEY = 0x11111111
SLOTS, SIZE = 16, 64
GRH = 40


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
        init = qp.QPInitAttr(qp_type=e.IBV_QPT_UD, scq=self.cq, rcq=self.cq, cap=cap, sq_sig_all=1)
        attr = qp.QPAttr(port_num=1)
        attr.qkey = QKEY
        self.qp = qp.QP(self._pd, init, attr)
        self.mr = library.load("mr").MR(self._pd, (SLOTS + 1) * 256, e.IBV_ACCESS_LOCAL_WRITE)
        self._wr = library.load("wr")
        self._sges = [self._wr.SGE(self.mr.buf + i * 256, 256, self.mr.lkey) for i in range(SLOTS)]
        self._receives = [self._wr.RecvWR(wr_id=i, num_sge=1, sg=[s]) for i, s in enumerate(self._sges)]
        for i in range(SLOTS):
            self.post_receive(i)
        self._send: Any = None
        self._backlog: list[tuple[int, int, bytes, int]] = []

    def gid(self, address: str) -> Any:
        """In the form pyverbs wants."""
        return self._addr.GID(ipaddress.IPv6Address(f"::ffff:{address}").exploded)

    def aim(self, address: str, qpn: int) -> None:
        """Make the one work request that every message is sent with."""
        route = self._addr.GlobalRoute(dgid=self.gid(address), sgid_index=self.index, hop_limit=64, traffic_class=104)
        handle = self._addr.AH(self._pd, attr=self._addr.AHAttr(is_global=1, port_num=1, gr=route))
        sge = self._wr.SGE(self.mr.buf + SLOTS * 256, SIZE, self.mr.lkey)
        e = self.enums
        self._send = self._wr.SendWR(
            wr_id=99, opcode=e.IBV_WR_SEND, num_sge=1, sg=[sge], send_flags=e.IBV_SEND_SIGNALED
        )
        self._send.set_wr_ud(handle, qpn, QKEY)
        self._kept = handle, sge

    def post_receive(self, slot: int) -> None:
        """Give a slot back."""
        self.qp.post_recv(self._receives[slot])

    def send(self, payload: bytes) -> int:
        """When the call returned."""
        self.mr.write(payload, len(payload), SLOTS * 256)
        self.qp.post_send(self._send)
        return time.perf_counter_ns()

    def receive(self, give_up: float) -> tuple[int, int, bytes, int] | None:
        """(slot, when, payload, sender's QPN) of the next message."""
        while True:
            if self._backlog:
                return self._backlog.pop(0)
            count, completions = self.cq.poll(SLOTS)
            now = time.perf_counter_ns()
            for wc in completions if count else ():
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
    delay, left, cpu = 0, count, 0
    while left:
        found = end.receive(time.monotonic() + 20)
        if found is None:
            break
        if left == count:
            cpu = time.process_time_ns()
            end.aim(end.source(found[0]), found[3])
        left -= 1
        sent = end.send(delay.to_bytes(8, "big") + bytes(SIZE - 8))
        for _ in range(1, acks):
            end.send(bytes(SIZE))
        delay = sent - found[1]
        end.post_receive(found[0])
    done = count - left
    print(json.dumps({"answered": done, "cpu_us": (time.process_time_ns() - cpu) / 1000 / max(1, done)}), flush=True)


def client(end: Endpoint, peer: str, qpn: int, count: int, acks: int) -> None:
    """Send in turn, each when the one before has all its answers."""
    end.aim(peer, qpn)
    whole: list[int] = []
    delays: list[int] = []
    cpu = time.process_time_ns()
    for _ in range(count):
        sent = end.send(bytes(SIZE))
        found = end.receive(time.monotonic() + 2)
        if found is None:
            continue
        whole.append(found[1] - sent)
        delays.append(int.from_bytes(found[2][:8], "big"))
        end.post_receive(found[0])
        for _ in range(1, acks):
            if (more := end.receive(time.monotonic() + 2)) is not None:
                end.post_receive(more[0])
    cpu = time.process_time_ns() - cpu
    # An answer tells the delay of the one before.
    network = [w - d for w, d in zip(whole, delays[1:], strict=False)]
    said = {"answered": len(whole), "whole_ns": whole, "network_ns": network, "cpu_us": cpu / 1000 / count}
    print(json.dumps(said), flush=True)


def main() -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("role", choices=("client", "server"))
    parser.add_argument("device")
    parser.add_argument("address")
    parser.add_argument("peer", nargs="*", help="client: the server's address and QPN")
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--acks", type=int, default=1, help="answers to a message")
    parser.add_argument("--events", action="store_true")
    args = parser.parse_args()
    end = Endpoint(args.device, args.address, args.events)
    if args.role == "server":
        server(end, args.address, args.count, args.acks)
    else:
        client(end, args.peer[0], int(args.peer[1]), args.count, args.acks)


if __name__ == "__main__":
    main()
