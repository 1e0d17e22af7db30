"""A prefill worker publishes a snapshot of its prefix cache, then every change, and ends subscriptions when it
leaves."""

import asyncio
from collections.abc import Callable

import pytest

from cluster.errors import Draining, Overloaded
from cluster.messages import MemberId
from engine.kv.block_pool import BlockPool
from engine.scheduling import cache_commands, commands
from engine.scheduling.prefix_access import CacheEventSubscribers
from engine.steps.questions import Questions
from prefill_worker.service import CacheEventPublisher
from tandem.internal.v1 import worker_pb2

_ME = MemberId("me", "1")
_HASHES = tuple(bytes([number]) * 16 for number in range(1, 10))


class _Worker:
    """A pool with its subscribers, as the step thread has them. `answer` lets it answer them."""

    def __init__(self) -> None:
        self.pool = BlockPool(4)
        self.subscribers = CacheEventSubscribers(self.pool)
        self.posted: list[commands.Command] = []
        self._questions = Questions(self._post)
        self.publisher = CacheEventPublisher(_ME, self._questions)

    def keep(self, block_hash: bytes) -> None:
        block_ids = self.pool.reserve(1)
        assert block_ids is not None
        self.pool.keep(block_ids, [block_hash], b"root")
        self.pool.drop_references(block_ids)
        self.answer()

    def answer(self) -> None:
        for ready in self.subscribers.due():
            self._questions.settle((ready,))

    def _post(self, command: commands.Command) -> None:
        self.posted.append(command)
        match command:
            case cache_commands.AwaitCacheEvents():
                self.subscribers.add(command)
            case cache_commands.CancelCacheEvents(subscriber_id):
                self.subscribers.cancel(subscriber_id)
        asyncio.get_running_loop().call_soon(self.answer)


def _request(member: str = "", since: int = 0) -> worker_pb2.SubscribeCacheEventsRequest:
    return worker_pb2.SubscribeCacheEventsRequest(member=member, since=since)


async def test_a_new_subscriber_gets_a_snapshot_and_then_every_change() -> None:
    worker = _Worker()
    worker.keep(_HASHES[0])
    messages = worker.publisher.subscribe(_request())
    first = await anext(messages)
    assert (first.cleared, first.next_number, first.stored, first.member) == (True, 1, _HASHES[0], str(_ME))

    for block_hash in _HASHES[1:5]:  # one more than fit
        worker.keep(block_hash)
    then = await anext(messages)
    assert (then.cleared, then.first_number, then.next_number) == (False, 1, 6)
    assert (then.stored, then.removed) == (b"".join(_HASHES[1:5]), _HASHES[0])
    await messages.aclose()


async def test_a_returning_subscriber_gets_the_missed_events_and_a_snapshot_from_a_new_incarnation() -> None:
    worker = _Worker()
    for block_hash in _HASHES[:2]:
        worker.keep(block_hash)
    for member, expected in ((str(_ME), (False, _HASHES[1])), ("me@0", (True, b"".join(_HASHES[:2])))):
        messages = worker.publisher.subscribe(_request(member, since=1))
        message = await anext(messages)
        assert (message.cleared, message.stored) == expected
        await messages.aclose()


async def test_a_cancelled_subscription_leaves_no_question_at_the_step_thread() -> None:
    worker = _Worker()
    waiting = asyncio.ensure_future(anext(worker.publisher.subscribe(_request(str(_ME)))))
    await _until(lambda: bool(worker.posted))
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)

    assert isinstance(worker.posted[-1], cache_commands.CancelCacheEvents)
    worker.keep(_HASHES[0])
    assert worker.subscribers.due() == ()


async def test_a_leaving_worker_ends_its_subscriptions_with_draining() -> None:
    worker = _Worker()
    waiting = asyncio.ensure_future(anext(worker.publisher.subscribe(_request(str(_ME)))))
    await _until(lambda: bool(worker.posted))
    worker.publisher.close()
    with pytest.raises(Draining):
        await waiting


async def test_the_number_of_subscriptions_is_bounded() -> None:
    worker = _Worker()
    waiting = [asyncio.ensure_future(anext(worker.publisher.subscribe(_request(str(_ME))))) for _ in range(64)]
    await _until(lambda: len(worker.posted) == 64)
    with pytest.raises(Overloaded):
        await anext(worker.publisher.subscribe(_request()))
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


async def _until(holds: Callable[[], bool]) -> None:
    for _ in range(1000):  # turns of the loop
        if holds():
            return
        await asyncio.sleep(0)
    raise AssertionError("it never came")
