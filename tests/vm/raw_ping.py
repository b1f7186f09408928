"""raw_ping.py SOURCE_DEVICE SOURCE_ADDRESS TARGET_DEVICE TARGET_ADDRESS COUNT: RDMA UD messages by nothing but pyverbs.

For the distribution's Python. Prints as JSON what the target received (number, TTLs, sources, milliseconds on the way)
and the sender's QPN.
"""

import ipaddress
import json
import sys
import time

import pyverbs.device as d
import pyverbs.enums as e
from pyverbs.addr import AH, GID, AHAttr, GlobalRoute
from pyverbs.cq import CQ
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import SGE, RecvWR, SendWR

QKEY = 0x11111111
SLOT = 256


def gid(address: str) -> GID:
    raw = b"\0" * 10 + b"\xff\xff" + ipaddress.IPv4Address(address).packed
    return GID(":".join(raw[i : i + 2].hex() for i in range(0, 16, 2)))


class End:
    def __init__(self, device: str, address: str) -> None:
        self.context = d.Context(name=device)
        mine = str(gid(address))
        self.gid_index = next(
            g.gid_index
            for g in self.context.query_gid_table(1024)
            if g.gid_type == e.IBV_GID_TYPE_ROCE_V2 and g.gid_str() == mine
        )
        self.pd = PD(self.context)
        self.cq = CQ(self.context, 128, None, None, 0)
        cap = QPCap(max_send_wr=64, max_recv_wr=64)
        init = QPInitAttr(qp_type=e.IBV_QPT_UD, scq=self.cq, rcq=self.cq, cap=cap, sq_sig_all=1)
        attr = QPAttr(port_num=1)
        attr.qkey, attr.pkey_index, attr.sq_psn = QKEY, 0, 0
        self.qp = QP(self.pd, init, attr)
        self.mr = MR(self.pd, 64 * SLOT, e.IBV_ACCESS_LOCAL_WRITE)

    def receive(self, slot: int) -> None:
        sge = SGE(self.mr.buf + slot * SLOT, SLOT, self.mr.lkey)
        wr = RecvWR(wr_id=slot, num_sge=1, sg=[sge])
        self.qp.post_recv(wr)
        wr.close()
        sge.close()

    def send(self, ah: AH, qpn: int) -> None:
        sge = SGE(self.mr.buf, 64, self.mr.lkey)
        wr = SendWR(wr_id=1000, opcode=e.IBV_WR_SEND, num_sge=1, sg=[sge], send_flags=e.IBV_SEND_SIGNALED)
        wr.set_wr_ud(ah, qpn, QKEY)
        self.qp.post_send(wr)
        wr.close()
        sge.close()

    def poll(self, patience: float) -> list:
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline:
            number, found = self.cq.poll(16)
            if number:
                return found
            time.sleep(0.001)
        return []


def main() -> None:
    source, source_address, target, target_address, count = sys.argv[1:]
    a, b = End(source, source_address), End(target, target_address)
    for slot in range(32):
        b.receive(slot)
    route = GlobalRoute(dgid=gid(target_address), flow_label=0, sgid_index=a.gid_index, hop_limit=64, traffic_class=0)
    ah = AH(a.pd, attr=AHAttr(is_global=1, port_num=1, gr=route))
    ttls, sources, took = [], [], []
    for _ in range(int(count)):
        sent = time.monotonic()
        a.send(ah, b.qp.qp_num)
        assert [w.status for w in a.poll(5)] == [0]
        arrived = b.poll(5)
        took += [(time.monotonic() - sent) * 1e3] * len(arrived)
        for w in arrived:
            header = b.mr.read(40, w.wr_id * SLOT)
            ttls.append(header[28])
            sources.append(str(ipaddress.IPv4Address(header[32:36])))
            b.receive(w.wr_id)
    print(json.dumps({"received": len(ttls), "ttls": ttls, "sources": sources, "ms": took, "qpn": a.qp.qp_num}))


if __name__ == "__main__":
    main()
