"""Conversion of events into the wire messages of a router's stream. Decides nothing."""

from collections.abc import Mapping, Sequence

from cluster.errors import HandOffFailed, TandemError
from cluster.protocol import wire
from decode_worker.live_handles import Arrival
from engine.scheduling.commands import SequenceToken, Started
from tandem.enum_words import FINISH_REASONS
from tandem.internal.v1 import worker_pb2
from tandem.v1 import inference_pb2

_LOCAL = "local"


def leaving(grace_s: float) -> worker_pb2.WorkerMessage:
    return worker_pb2.WorkerMessage(leaving=worker_pb2.WorkerLeaving(grace_s=grace_s))


def started(event: Started, begun: Mapping[int, Arrival | None]) -> worker_pb2.WorkerMessage:
    """`begun`: the import of each sequence that is still live; None if it was prefilled here."""
    message = worker_pb2.SequenceStarted(
        handles=begun, queue_s=event.queue_s, transport=_LOCAL, num_cached=event.num_cached
    )
    arrivals = [arrival for arrival in begun.values() if arrival is not None]
    if arrivals:
        message.first_token_ids = wire.pack_ids([arrival.first_token_id for arrival in arrivals])
        message.queue_s += arrivals[0].queue_s
        message.transfer_s = arrivals[0].transfer_s
        message.kv_bytes = arrivals[0].kv_bytes
        message.transport = arrivals[0].transport
    return worker_pb2.WorkerMessage(started=message)


def step_output(step: int, tokens: Sequence[SequenceToken]) -> worker_pb2.WorkerMessage:
    output = worker_pb2.StepOutput(
        step=step,
        handles=wire.pack_ids([t.handle for t in tokens]),
        token_ids=wire.pack_ids([t.token.token_id for t in tokens]),
        indices=wire.pack_ids([t.index for t in tokens]),
    )
    if any(t.token.logprobs is not None for t in tokens):
        for t in tokens:
            logprobs = t.token.logprobs
            output.logprobs.append(wire.logprobs_to_wire(logprobs) if logprobs else inference_pb2.PositionLogprobs())
    for t in tokens:
        if t.token.finish_reason is not None:
            finish_reason = FINISH_REASONS.number(t.token.finish_reason)
            output.ends.append(worker_pb2.SequenceEnd(handle=t.handle, finish_reason=finish_reason))
    return worker_pb2.WorkerMessage(step=output)


def failed(handles: Sequence[int], error: TandemError) -> worker_pb2.WorkerMessage:
    reason = str(error.handoff_reason) if isinstance(error, HandOffFailed) else error.reason
    return worker_pb2.WorkerMessage(failed=worker_pb2.SequenceFailed(handles=handles, reason=reason, detail=str(error)))
