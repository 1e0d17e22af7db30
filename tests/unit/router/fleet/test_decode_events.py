"""The events of a decode worker's step for each sequence, as the router reads them."""

import asyncio

import pytest

from cluster.messages import FinishReason, SampledToken
from cluster.protocol import wire
from router.fleet.decode_events import Sequences, SequencesFailed, SequencesStarted, SequenceToken, tokens_of
from router.policies.prediction.work_ahead import SequenceProgress
from tandem.enum_words import FINISH_REASONS
from tandem.internal.v1 import worker_pb2


def test_a_sequence_ends_with_the_last_of_its_tokens_in_a_step() -> None:
    """With accepted draft tokens a step has several tokens of a sequence."""
    step = worker_pb2.StepOutput(
        handles=wire.pack_ids([5, 5, 6, 5, 7]),
        token_ids=wire.pack_ids([10, 11, 20, 12, 30]),
        indices=wire.pack_ids([3, 4, 0, 5, 9]),
        ends=[
            worker_pb2.SequenceEnd(handle=5, finish_reason=FINISH_REASONS.number(FinishReason.LENGTH)),
            worker_pb2.SequenceEnd(handle=7, finish_reason=FINISH_REASONS.number(FinishReason.STOP)),
        ],
    )
    assert [(token.handle, token.index, token.token.finish_reason) for token in tokens_of(step, received_s=7.0)] == [
        (5, 3, None),
        (5, 4, None),
        (6, 0, None),
        (5, 5, FinishReason.LENGTH),
        (7, 9, FinishReason.STOP),
    ]


async def test_a_failure_is_returned_at_once_and_other_events_keep_their_order() -> None:
    sequences = Sequences({1: SequenceProgress(8)})
    started = SequencesStarted((1,), (4,), queue_s=0.0, kv_bytes=0, transport="tcp", num_cached=0)
    token, failed = _token(1), SequencesFailed("read_failed", "")
    for event in (started, failed, token):
        sequences.put(event)

    assert await sequences.unless_failed(asyncio.get_running_loop().create_future()) == failed
    assert [await sequences.next(), await sequences.next()] == [started, token]


async def test_no_event_is_lost_when_the_wait_for_a_failure_is_cancelled() -> None:
    sequences = Sequences({1: SequenceProgress(8)})
    events = [_token(index) for index in range(3)]
    sequences.put(events[0])
    waiting = asyncio.create_task(sequences.unless_failed(asyncio.get_running_loop().create_future()))
    await asyncio.sleep(0)
    for event in events[1:]:
        sequences.put(event)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)

    assert [await sequences.next() for _ in events] == events


async def test_a_wait_for_something_else_than_a_failure_leaves_all_events() -> None:
    sequences, until = Sequences({1: SequenceProgress(8)}), asyncio.get_running_loop().create_future()
    waiting = asyncio.create_task(sequences.unless_failed(until))
    await asyncio.sleep(0)
    sequences.put(_token(0))
    until.set_result(None)

    assert await waiting is None
    assert await sequences.next() == _token(0)


def _token(index: int, handle: int = 1) -> SequenceToken:
    return SequenceToken(handle, index, SampledToken(5, None, None), received_s=7.0)


async def test_tokens_are_taken_in_the_moment_in_which_they_arrive() -> None:
    sequences, taken = Sequences({1: SequenceProgress(8)}), list[SequenceToken]()
    sequences.put(_token(0))
    following = asyncio.create_task(sequences.next_besides_tokens(taken.append))
    await asyncio.sleep(0)
    assert taken == [_token(0)]
    sequences.put(_token(1))
    assert taken == [_token(0), _token(1)]  # without a turn of the event loop

    failed = SequencesFailed("read_failed", "")
    sequences.put(failed)
    sequences.put(_token(2))
    assert await following == failed
    assert taken == [_token(0), _token(1)]  # the third comes after the failure
    assert await sequences.next() == _token(2)


async def test_an_error_of_the_attempt_ends_its_wait_and_not_the_stream() -> None:
    sequences = Sequences({1: SequenceProgress(8)})

    def refuse(_: SequenceToken) -> None:
        raise ValueError("not this one")

    following = asyncio.create_task(sequences.next_besides_tokens(refuse))
    await asyncio.sleep(0)
    sequences.put(_token(0))
    sequences.put(_token(1))
    with pytest.raises(ValueError, match="not this one"):
        await following
    assert await sequences.next() == _token(1)


async def test_a_cancelled_attempt_takes_no_more_tokens() -> None:
    sequences, taken = Sequences({1: SequenceProgress(8)}), list[SequenceToken]()
    following = asyncio.create_task(sequences.next_besides_tokens(taken.append))
    await asyncio.sleep(0)
    following.cancel()
    sequences.put(_token(0))
    with pytest.raises(asyncio.CancelledError):
        await following
    assert not taken
    assert await sequences.next() == _token(0)


async def test_the_wait_ends_with_the_last_sequence() -> None:
    sequences = Sequences({1: SequenceProgress(8)})
    following = asyncio.create_task(sequences.next_besides_tokens(lambda token: sequences.live.discard(token.handle)))
    await asyncio.sleep(0)
    sequences.put(_token(0))
    assert await following is None
