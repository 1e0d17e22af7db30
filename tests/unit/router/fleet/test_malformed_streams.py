"""A worker whose stream has values out of bounds loses the attempts that the message names, and no other."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import grpc
import pytest

from cluster.clock import ManualClock
from cluster.errors import MalformedMessage
from cluster.member import Member
from cluster.messages import MemberId, Role
from cluster.observe.telemetry import Telemetry
from cluster.protocol.wire import pack_ids
from cluster.serving.rpc_errors import HANDOFF_REASON, REASON, RETRY_AFTER_S, error_from_rpc
from router.fleet.decode_events import DecodeEvent, Sequences, SequencesFailed, SequenceToken, StreamLost
from router.fleet.supervision import WorkerTimeouts
from router.fleet.worker_stream import RouterSide, WorkerStream
from router.pipeline.failures import AttemptFailed, failed_sequences
from router.policies.prediction.work_ahead import SequenceProgress
from tandem.internal.v1 import worker_pb2, worker_pb2_grpc
from tandem.v1 import admin_pb2, inference_pb2

WORKER = MemberId("d0", "1")
DEADLINE_S = 20.0


class _Worker(worker_pb2_grpc.DecodeWorkerServicer):
    """A decode worker that sends the scripted messages."""

    def __init__(self, *, num_bad_hellos: int = 0) -> None:
        self._num_bad_hellos = num_bad_hellos
        self.says: asyncio.Queue[worker_pb2.WorkerMessage] = asyncio.Queue()
        self.num_calls = 0

    async def Connect(
        self, request_iterator: AsyncIterator[worker_pb2.RouterMessage], context: object
    ) -> AsyncIterator[worker_pb2.WorkerMessage]:
        self.num_calls += 1
        name = "" if self.num_calls <= self._num_bad_hellos else str(WORKER)
        yield worker_pb2.WorkerMessage(hello=worker_pb2.WorkerHello(worker=name))
        while True:
            yield await self.says.get()


@asynccontextmanager
async def _following(
    worker: _Worker, telemetry: Telemetry, *, grace_s: float = DEADLINE_S
) -> AsyncIterator[WorkerStream]:
    server = grpc.aio.server()
    worker_pb2_grpc.add_DecodeWorkerServicer_to_server(worker, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    async with grpc.aio.insecure_channel(address) as channel:
        timeouts = WorkerTimeouts(heartbeat_timeout_s=DEADLINE_S, recovery_timeout_s=grace_s)
        stream = WorkerStream(
            Member(id=WORKER, role=Role.DECODE, address=address, model="m"),
            channel,
            RouterSide(MemberId("r0", "1"), timeouts, itertools.count(1), lambda: None, telemetry, ManualClock()),
            on_draining=lambda grace_s: None,
            is_draining=lambda: False,
            on_others=lambda work: None,
        )
        running = asyncio.create_task(stream.run())
        try:
            async with asyncio.timeout(DEADLINE_S):
                await stream.connected.wait()
                yield stream
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await server.stop(None)


def _step(sequences: list[int], **changes: object) -> worker_pb2.WorkerMessage:
    ids = pack_ids(sequences)
    step = worker_pb2.StepOutput(step=1, handles=ids, token_ids=ids, indices=pack_ids([0] * len(sequences)))
    for name, value in changes.items():
        setattr(step, name, value)
    return worker_pb2.WorkerMessage(step=step)


def _short_logprobs(handles: list[int]) -> worker_pb2.WorkerMessage:
    message = _step(handles)
    message.step.logprobs.append(
        inference_pb2.PositionLogprobs(chosen=inference_pb2.TokenLogprob(token_id=1, logprob=-1.0))
    )
    return message


def _heard(sequences: Sequences) -> list[DecodeEvent]:
    return [sequences.events.popleft() for _ in range(len(sequences.events))]


@pytest.mark.parametrize("kind", ["short logprobs", "ragged tokens", "failed", "started"])
async def test_a_malformed_message_ends_only_the_attempts_of_its_handles(kind: str) -> None:
    worker, telemetry = _Worker(), Telemetry()
    async with _following(worker, telemetry) as stream:
        with (
            stream.open_sequences([SequenceProgress(9), SequenceProgress(9)]) as named,
            stream.open_sequences([SequenceProgress(9)]) as other,
        ):
            handles = list(named.handles)
            started = worker_pb2.SequenceStarted(handles=handles, transfer_s=float("nan"))
            messages = {
                "short logprobs": _short_logprobs(handles),
                "ragged tokens": _step(handles, token_ids=b"abc"),
                "failed": worker_pb2.WorkerMessage(failed=worker_pb2.SequenceFailed(handles=handles)),
                "started": worker_pb2.WorkerMessage(started=started),
            }
            worker.says.put_nowait(messages[kind])
            worker.says.put_nowait(_step([*other.handles]))
            assert isinstance(await other.next(), SequenceToken)
            events = _heard(named)
            assert [(type(event), getattr(event, "reason", "")) for event in events] == [
                (SequencesFailed, "malformed_message")
            ]
            assert _heard(other) == [] and worker.num_calls == 1
            kind_counted = "step" if kind in ("short logprobs", "ragged tokens") else kind
            assert telemetry.value("tandem_malformed_messages_total", message=kind_counted) == 1


async def test_a_malformed_hello_ends_the_connection_and_the_next_one_is_used() -> None:
    """A worker sends hello once per connection: without a new connection the router would wait until the worker
    ends.
    """
    worker, telemetry = _Worker(num_bad_hellos=2), Telemetry()
    async with _following(worker, telemetry) as stream:  # connected
        assert worker.num_calls == 3
        assert telemetry.value("tandem_malformed_messages_total", message="hello") == 2
        with stream.open_sequences([SequenceProgress(9)]) as sequences:
            worker.says.put_nowait(_step([*sequences.handles]))
            assert isinstance(await sequences.next(), SequenceToken)


async def test_a_step_with_unreadable_handles_ends_every_attempt_and_not_the_stream() -> None:
    worker, telemetry = _Worker(), Telemetry()
    async with _following(worker, telemetry) as stream:
        with stream.open_sequences([SequenceProgress(9)]) as one, stream.open_sequences([SequenceProgress(9)]) as other:
            worker.says.put_nowait(_step([1], handles=b"abc"))
            assert isinstance(await one.next(), SequencesFailed) and isinstance(await other.next(), SequencesFailed)
        with stream.open_sequences([SequenceProgress(9)]) as later:
            worker.says.put_nowait(_step([*later.handles]))
            assert isinstance(await later.next(), SequenceToken)


async def test_a_step_that_names_wrong_sequences_ends_the_attempts_without_tokens() -> None:
    """The step contained the last token of a sequence, which the worker has removed: no later message would show
    a gap.
    """
    worker, telemetry = _Worker(), Telemetry()
    async with _following(worker, telemetry, grace_s=0.3) as stream:
        with (
            stream.open_sequences([SequenceProgress(9)]) as ended_there,
            stream.open_sequences([SequenceProgress(9)]) as runs_on,
        ):
            worker.says.put_nowait(_step([*ended_there.handles], handles=b"x" * 16))
            worker.says.put_nowait(_step([*runs_on.handles]))
            async with asyncio.timeout(DEADLINE_S):
                assert isinstance(await ended_there.next(), StreamLost)
            assert [type(event) for event in _heard(runs_on)] == [SequenceToken]


async def test_malformed_figures_are_ignored_and_counted() -> None:
    worker, telemetry = _Worker(), Telemetry()
    async with _following(worker, telemetry) as stream:
        with stream.open_sequences([SequenceProgress(9)]) as sequences:
            for heartbeat in (
                worker_pb2.Heartbeat(running=3, free_blocks=7),
                worker_pb2.Heartbeat(running=1 << 31),
                worker_pb2.Heartbeat(step_s=float("inf")),
                worker_pb2.Heartbeat(links=[admin_pb2.LinkSpeed(exporter="nobody")]),
            ):
                worker.says.put_nowait(worker_pb2.WorkerMessage(heartbeat=heartbeat))
            leaving = worker_pb2.WorkerLeaving(grace_s=float("nan"))
            worker.says.put_nowait(worker_pb2.WorkerMessage(leaving=leaving))
            worker.says.put_nowait(_step([*sequences.handles]))
            assert isinstance(await sequences.next(), SequenceToken)
            assert (stream.heartbeat.running, stream.heartbeat.free_blocks) == (3, 7)
            assert telemetry.value("tandem_malformed_messages_total", message="heartbeat") == 3
            assert telemetry.value("tandem_malformed_messages_total", message="leaving") == 1


def test_a_malformed_message_is_an_error_of_the_worker_and_never_of_the_client() -> None:
    failure = failed_sequences("malformed_message", "StepOutput: ...", prefill=MemberId("p0", "1"), decode=WORKER)
    assert isinstance(failure, AttemptFailed) and isinstance(failure.error, MalformedMessage)
    assert failure.name == "decode_malformed_message" and failure.member == WORKER


def _refusals() -> Iterator[tuple[str, float | None]]:
    yield "1.5", 1.5
    yield from ((text, None) for text in ("", "nan", "inf", "-1", "soon", "1e300"))


@pytest.mark.parametrize(("text", "seconds"), list(_refusals()))
def test_an_invalid_retry_after_is_omitted(text: str, seconds: float | None) -> None:
    trailing = grpc.aio.Metadata((REASON, "queue_full"), (RETRY_AFTER_S, text), (HANDOFF_REASON, "x"))
    error = grpc.aio.AioRpcError(grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.aio.Metadata(), trailing, "full")
    assert error_from_rpc(error).retry_after_s == seconds
