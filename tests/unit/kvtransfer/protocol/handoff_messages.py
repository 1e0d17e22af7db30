"""The messages and the plan of one hand-off of two choices over two blocks and a tail."""

from cluster.messages import Epoch, MemberId
from kvtransfer.protocol.handoff import (
    Accepted,
    Finished,
    FirstToken,
    RemoteBlock,
    Tail,
)
from kvtransfer.protocol.import_machine import HandOffPlan

EXPORTER = MemberId("prefill-0", "a")
EPOCH = Epoch(EXPORTER, b"ticket", 1)
STALE = Epoch(MemberId("prefill-0", "before"), b"ticket", 1)
PLAN = HandOffPlan(
    epoch=EPOCH,
    num_sealed=2,
    num_choices=2,
    num_tail_valid=3,
    num_tokens=35,
    prompt_hash=b"prompt",
    attach_timeout_s=5.0,
    read_timeout_s=30.0,
    quarantine_s=10.0,
    timeout_s=100.0,
)
BLOCKS = (RemoteBlock(40, b"d0"), RemoteBlock(41, b"d1"))
TAIL = Tail(RemoteBlock(42, b"d2"), 3)
TOKENS = (FirstToken(7, False), FirstToken(8, True))
ACCEPTED = Accepted(EPOCH, lease_s=6.0, max_lease_s=60.0)
FINISHED = Finished(EPOCH, TOKENS, 35, b"prompt", TAIL)
