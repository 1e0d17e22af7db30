"""Priorities and the batch class with real processes: a higher priority finishes first, and no token changes."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
import pytest_asyncio

from tandem.v1 import inference_pb2
from tests.system.rigs.members.asking import ask, asked, question
from tests.system.rigs.processes.local_cluster import LocalCluster

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.slow]

_SLOTS = 2
_FLAGS = ("--dtype", "float32", "--scheduling-policy", "priority", "--max-num-seqs", str(_SLOTS), "--num-blocks", "512")
_PROMPT = tuple(range(100, 140))


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def two_slots(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalCluster]:
    cluster = LocalCluster(redis_url, tmp_path_factory.mktemp("scheduling"), flags=_FLAGS)
    try:
        yield await cluster.start(prefill=1, decode=1)
    finally:
        codes = await cluster.stop()
    assert set(codes.values()) == {0}, cluster.output()[-4000:]


def _long(number: int, *, priority: int = 0, is_batch: bool = False) -> inference_pb2.GenerateRequest:
    request = question((*_PROMPT, number + 200), max_tokens=700, ignore_eos=True)
    request.priority, request.is_batch = priority, is_batch
    return request


@pytest.mark.parametrize("is_batch", [False, True], ids=["priority", "batch class"])
async def test_a_request_with_a_higher_priority_takes_the_slot_of_a_running_one(
    two_slots: LocalCluster, is_batch: bool
) -> None:
    """The request is answered while earlier requests are still decoded; all answers equal those of the requests
    alone.
    """
    held = [_long(number, is_batch=is_batch) for number in range(_SLOTS)]
    urgent = question((*_PROMPT, 300), max_tokens=8, ignore_eos=True)
    urgent.priority = 0 if is_batch else -1
    before = (await two_slots.inspect("decode0")).figures["displaced"]

    async with AsyncExitStack() as stack:
        running = [await stack.enter_async_context(asked(two_slots, request)) for request in held]
        await asyncio.gather(*(answer.until(20) for answer in running))
        first = await ask(two_slots, urgent)
        displaced = (await two_slots.inspect("decode0")).figures["displaced"] - before
        still_live = (await two_slots.inspect("decode0")).figures["sequences_done"]
        answers = await asyncio.gather(*(answer.end() for answer in running))
        done = (await two_slots.inspect("decode0")).figures["sequences_done"]

    assert displaced == 1
    assert done - still_live == _SLOTS, "those that ran were done before it"
    alone = [await ask(two_slots, request) for request in (*held, urgent)]
    assert [answer.token_ids for answer in (*answers, first)] == [answer.token_ids for answer in alone]
