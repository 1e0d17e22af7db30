"""A router that receives nothing from any worker does not conclude that its workers have failed."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.system.rigs.members.router_harness import (
    Answer,
    RouterUnderTest,
    answer_to,
    ask,
    expected_tokens,
    router_under_test,
)
from tests.system.rigs.members.scripted_decode import ScriptedDecode
from tests.system.rigs.members.scripted_workers import ScriptedPrefill, ScriptedWorker

_DEADLINE_S = 20.0


@asynccontextmanager
async def _decoding(
    *, silence_s: float = 0.6, grace_s: float, max_attempts: int = 1
) -> "AsyncIterator[tuple[RouterUnderTest, asyncio.Task[Answer], ScriptedPrefill, ScriptedDecode, ScriptedDecode]]":
    """Serve a request until its decode worker has sent some tokens. Then all workers become silent."""
    async with router_under_test(
        silence_s=silence_s, grace_s=grace_s, max_attempts=max_attempts, placement="round-robin"
    ) as router:
        prefill = await router.add_prefill("p0")
        decode, other = await router.add_decode("d0"), await router.add_decode("d1")
        await router.connected()
        decode.pause_at = 4
        task = asyncio.create_task(answer_to(router, ask(max_tokens=12)))
        await asyncio.wait_for(decode.paused.wait(), _DEADLINE_S)
        for worker in (prefill, decode, other):
            worker.freeze()
        yield router, task, prefill, decode, other
        async with asyncio.timeout(_DEADLINE_S):
            answer = await task
        assert answer.token_ids[0] == expected_tokens(router, ask(max_tokens=12))


async def _asked(worker: ScriptedWorker, times: int) -> None:
    """Wait until the router has checked the worker's health this often."""
    for _ in range(times):
        worker.door.reached.clear()
        await asyncio.wait_for(worker.door.reached.wait(), _DEADLINE_S)


def _wake(worker: ScriptedWorker) -> None:
    worker.door.open()
    if isinstance(worker, ScriptedDecode):
        worker.voice.open()
        worker.resumed.set()


async def test_while_no_worker_sends_anything_no_worker_is_hedged_or_given_up() -> None:
    async with _decoding(grace_s=60.0) as (router, task, prefill, decode, other):
        await _asked(decode, 4)
        peers = [router.fleet.peer(worker.id) for worker in (prefill, decode, other)]
        assert [peer.num_missed for peer in peers if peer is not None] == [0, 0, 0]
        for worker in (decode, other, prefill):
            _wake(worker)
        answer = await asyncio.wait_for(asyncio.shield(task), _DEADLINE_S)
        assert answer.summary.ledger.reasons == ()


async def test_a_silent_worker_is_replaced_as_soon_as_another_one_answers() -> None:
    async with _decoding(grace_s=60.0, max_attempts=3) as (_, task, prefill, decode, other):
        await _asked(decode, 3)
        for worker in (other, prefill):
            _wake(worker)
        answer = await asyncio.wait_for(asyncio.shield(task), _DEADLINE_S)
        assert answer.summary.ledger.reasons[0] in ("decode_hedged", "decode_worker_lost")
        assert answer.summary.ledger.members[-1] == str(other.id)
        _wake(decode)


@pytest.mark.parametrize("comes_back", [True, False])
async def test_losing_all_workers_by_silence_uses_up_no_attempt(comes_back: bool) -> None:
    # Health checks time out long before streams do, also on a busy machine.
    async with _decoding(silence_s=2.0, grace_s=0.2) as (router, task, prefill, decode, other):
        async with asyncio.timeout(_DEADLINE_S):
            while router.fleet.connected():
                await router.fleet.changed()
        for worker in (prefill, decode, other) if comes_back else (prefill, other):
            _wake(worker)
        answer = await asyncio.wait_for(asyncio.shield(task), _DEADLINE_S)
        assert answer.summary.ledger.reasons[0] == "decode_all_workers_silent"
        _wake(decode)
