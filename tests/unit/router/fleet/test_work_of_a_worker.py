"""What a router counts of its own sequences at a worker: which they are at once, and their tokens soon."""

import itertools

import grpc

from cluster.clock import ManualClock
from cluster.member import Member
from cluster.messages import MemberId, Role
from cluster.observe.telemetry import Telemetry
from cluster.outstanding_work import NO_SEQUENCE_WORK, SequenceWork
from cluster.request_size import RequestSize
from router.fleet.supervision import WorkerTimeouts
from router.fleet.worker_stream import RouterSide, WorkerStream
from router.policies.prediction.work_ahead import SequenceBatch, SequenceProgress


async def test_sequences_count_at_once_and_their_tokens_soon() -> None:
    timeouts = WorkerTimeouts(heartbeat_timeout_s=1.0, recovery_timeout_s=1.0)
    stream = WorkerStream(
        Member(id=MemberId("d0", "1"), role=Role.DECODE, address="127.0.0.1:1", model="m"),
        grpc.aio.insecure_channel("127.0.0.1:1"),
        RouterSide(MemberId("r0", "1"), timeouts, itertools.count(1), lambda: None, Telemetry(), ManualClock()),
        on_draining=lambda grace_s: None,
        is_draining=lambda: False,
        on_others=lambda work: None,
    )
    progress = SequenceProgress(20, RequestSize(num_prompt=100, max_tokens=20, num_committed=0, num_choices=1))
    assert stream.batch(NO_SEQUENCE_WORK, 1.0) == SequenceBatch()
    with stream.open_sequences([progress]):
        assert stream.batch(NO_SEQUENCE_WORK, 1.0) == SequenceBatch(0, 1, 100, 20.0)
        progress.record_token(1.0)
        assert stream.batch(NO_SEQUENCE_WORK, 1.06) == SequenceBatch(1, 0, 101, 19.0)
        progress.record_token(1.06)
        assert stream.batch(SequenceWork(1, 0, 50, 9.0), 1.07) == SequenceBatch(2, 0, 151, 14.0), "soon, not at once"
        assert stream.batch(SequenceWork(1, 0, 50, 9.0), 1.12) == SequenceBatch(2, 0, 152, 13.5)
    assert stream.batch(NO_SEQUENCE_WORK, 1.12) == SequenceBatch()
