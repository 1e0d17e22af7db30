"""The events of a decode worker's step for each sequence, as the router reads them."""

import asyncio

from cluster.messages import FinishReason, SampledToken
from cluster.protocol import wire
from router.fleet.decode_events import Sequences, SequencesFailed, SequencesStarted, SequenceToken, tokens_of
from router.policies.sequence_progress import SequenceProgress
from tandem.enum_words import FINISH_REASONS
from tandem.internal.v1 import worker_pb2


def test_a_sequence_ends_with_the_last_of_its_tokens_in_a_step() -> None:
    """Accepted draft tokens are several tokens of one step."""
    step = worker_pb2.StepOutput(
        handles=wire.pack_ids([5, 5, 6, 5, 7]),
        token_ids=wire.pack_ids([10, 11, 20, 12, 30]),
        indices=wire.pack_ids([3, 4, 0, 5, 9]),
        ends=[
            worker_pb2.SequenceEnd(handle=5, finish_reason=FINISH_REASONS.number(FinishReason.LENGTH)),
            worker_pb2.SequenceEnd(handle=7, finish_reason=FINISH_REASONS.number(FinishReason.STOP)),
        ],
    )
    assert [(token.handle, token.index, token.token.finish_reason) for token in tokens_of(step)] == [
        (5, 3, None),
        (5, 4, None),
        (6, 0, None),
        (5, 5, FinishReason.LENGTH),
        (7, 9, FinishReason.STOP),
    ]


async def test_a_failure_is_returned_at_once_and_other_events_keep_their_order() -> None:
    sequences = Sequences({1: SequenceProgress(8)})
    started = SequencesStarted((1,), (4,), queue_s=0.0, kv_bytes=0, transport="tcp", num_cached=0)
    token, failed = SequenceToken(1, 1, SampledToken(5, None, None)), SequencesFailed("read_failed", "")
    for event in (started, failed, token):
        sequences.events.put_nowait(event)

    assert await sequences.failure() == failed
    assert [await sequences.next(), await sequences.next()] == [started, token]


async def test_no_event_is_lost_when_the_wait_for_a_failure_is_cancelled() -> None:
    sequences = Sequences({1: SequenceProgress(8)})
    events = [SequenceToken(1, index, SampledToken(5, None, None)) for index in range(3)]
    sequences.events.put_nowait(events[0])
    waiting = asyncio.create_task(sequences.failure())
    await asyncio.sleep(0)
    for event in events[1:]:
        sequences.events.put_nowait(event)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)

    assert [await sequences.next() for _ in events] == events
