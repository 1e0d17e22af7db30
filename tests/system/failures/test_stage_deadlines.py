"""Tests that a worker that is slow or stopped in one stage of a request is detected there, long before the request's
deadline.

The timeouts for silence are shorter than the defaults; the request's deadline never matters.
"""

import asyncio
import threading
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
from tests.system.rigs.members.scripted_workers import ScriptedPrefill

_DEADLINE_S = 10.0  # of a test's wait; requests have the harness's 30 s


@asynccontextmanager
async def impatient_router() -> AsyncIterator[RouterUnderTest]:
    async with router_under_test(silence_s=0.6, grace_s=0.2, placement="round-robin") as router:
        yield router


async def _end(router: RouterUnderTest, task: "asyncio.Task[Answer]") -> Answer:
    async with asyncio.timeout(_DEADLINE_S):
        answer = await task
    assert answer.token_ids[0] == expected_tokens(router, ask())
    return answer


async def _two_prefills(router: RouterUnderTest) -> tuple[ScriptedPrefill, ScriptedPrefill]:
    """Add two prefill workers and a decode worker. By round-robin the first request goes to the first prefill
    worker."""
    workers = await router.add_prefill("p0"), await router.add_prefill("p1")
    await router.add_decode("d0")
    await router.connected()
    return workers


async def _two_decodes(router: RouterUnderTest) -> tuple[ScriptedDecode, ScriptedDecode]:
    await router.add_prefill("p0")
    workers = await router.add_decode("d0"), await router.add_decode("d1")
    await router.connected()
    return workers


async def test_a_prefill_worker_that_freezes_before_accepting_loses_the_request_to_another() -> None:
    async with impatient_router() as router:
        frozen, other = await _two_prefills(router)
        frozen.before_accepting.close()
        task = asyncio.create_task(answer_to(router, ask()))
        await asyncio.wait_for(frozen.before_accepting.reached.wait(), _DEADLINE_S)
        frozen.freeze()
        answer = await _end(router, task)
        assert answer.summary.ledger.reasons[-1] == "prefill_hedged"
        assert [len(worker.jobs) for worker in (frozen, other)] == [1, 1]


async def test_requests_leave_a_suspected_prefill_worker_when_another_answers() -> None:
    async with router_under_test(silence_s=0.6, grace_s=60.0, placement="round-robin") as router:
        frozen, other = await _two_prefills(router)
        frozen.before_first_tokens.close()
        task = asyncio.create_task(answer_to(router, ask()))
        await asyncio.wait_for(frozen.before_first_tokens.reached.wait(), _DEADLINE_S)
        frozen.freeze()
        answer = await _end(router, task)
        assert answer.summary.ledger.reasons[-1] == "prefill_hedged"
        assert [len(worker.jobs) for worker in (frozen, other)] == [1, 1]
        assert frozen.id in router.fleet.connected(), "in doubt, not lost"


async def test_a_prefill_worker_that_sends_heartbeats_is_not_asked() -> None:
    async with router_under_test(silence_s=60.0) as router:
        worker = await router.add_prefill("p0")
        await router.add_decode("d0")
        await router.connected()
        peer = router.fleet.connected_peer(worker.id)
        worker.door.reached.clear()
        before_s, before = peer.heard_s, peer.stream.heartbeat.step
        async with asyncio.timeout(_DEADLINE_S):
            while peer.heard_s == before_s or peer.stream.heartbeat.step == before:
                await worker.beats.get()
        assert not router.telemetry.value("tandem_false_suspicions_total", role="prefill")


async def test_a_suspected_prefill_worker_that_answers_counts_as_a_false_suspicion() -> None:
    async with router_under_test(silence_s=0.6, grace_s=60.0) as router:
        worker = await router.add_prefill("p0")
        await router.add_decode("d0")
        await router.connected()
        worker.freeze()
        async with asyncio.timeout(_DEADLINE_S):
            while not router.fleet.is_checking_prefill:
                await router.fleet.changed()
            worker.door.open()
            while router.fleet.is_checking_prefill:
                await router.fleet.changed()
        assert router.telemetry.value("tandem_false_suspicions_total", role="prefill") == 1


async def test_a_suspected_prefill_worker_is_waited_for_when_there_is_no_other() -> None:
    async with router_under_test(silence_s=0.6, grace_s=60.0) as router:
        frozen = await router.add_prefill("p0")
        await router.add_decode("d0")
        await router.connected()
        frozen.before_first_tokens.close()
        task = asyncio.create_task(answer_to(router, ask()))
        await asyncio.wait_for(frozen.before_first_tokens.reached.wait(), _DEADLINE_S)
        frozen.freeze()
        async with asyncio.timeout(_DEADLINE_S):
            while not router.fleet.is_checking_prefill:
                await router.fleet.changed()
        frozen.door.open()
        frozen.before_first_tokens.open()
        answer = await _end(router, task)
        assert answer.summary.ledger.reasons == ()


async def test_a_router_that_was_stopped_suspects_no_worker(caplog: pytest.LogCaptureFixture) -> None:
    """When the router continues, it has not yet read the messages that workers sent while it was stopped. It expects
    one every three seconds, which workers can keep on a loaded machine.
    """
    async with router_under_test(silence_s=3.0, grace_s=0.2) as router:
        await router.add_prefill("p0")
        worker = await router.add_decode("d0")
        await router.connected()
        worker.pause_at = 3
        task = asyncio.create_task(answer_to(router, ask()))
        await asyncio.wait_for(worker.paused.wait(), _DEADLINE_S)
        assert not threading.Event().wait(3.5)
        worker.resumed.set()
        answer = await _end(router, task)
        assert answer.summary.ledger.reasons == ()
        assert "the stream from a worker broke" not in caplog.text


async def test_a_prefill_worker_that_freezes_before_the_first_token_loses_the_request_to_another() -> None:
    async with impatient_router() as router:
        frozen, other = await _two_prefills(router)
        frozen.before_first_tokens.close()
        task = asyncio.create_task(answer_to(router, ask()))
        await asyncio.wait_for(frozen.before_first_tokens.reached.wait(), _DEADLINE_S)
        frozen.freeze()
        answer = await _end(router, task)
        assert answer.summary.ledger.reasons[-1] == "prefill_hedged"
        assert answer.summary.ledger.members[0] == str(other.id)


async def test_a_slow_prefill_on_a_live_worker_is_waited_for() -> None:
    async with impatient_router() as router:
        slow, _ = await _two_prefills(router)
        slow.before_first_tokens.close()
        task = asyncio.create_task(answer_to(router, ask()))
        await asyncio.wait_for(slow.before_first_tokens.reached.wait(), _DEADLINE_S)
        for _ in range(4):  # asked four times over whether it is there
            slow.door.reached.clear()
            await asyncio.wait_for(slow.door.reached.wait(), _DEADLINE_S)
        slow.before_first_tokens.open()
        assert (await _end(router, task)).summary.ledger.reasons == ()


async def test_an_idle_prefill_worker_that_freezes_gets_no_request() -> None:
    async with impatient_router() as router:
        frozen, _ = await _two_prefills(router)
        frozen.freeze()
        await router.until_gone(frozen)
        for _ in range(2):
            answer = await _end(router, asyncio.create_task(answer_to(router, ask())))
            assert answer.summary.ledger.reasons == ()
        frozen.door.open()
        await router.connected_to(frozen)


async def test_a_start_that_does_not_return_times_out_though_its_worker_lives() -> None:
    async with impatient_router() as router:
        stuck, other = await _two_decodes(router)
        stuck.before_taking.close()
        answer = await _end(router, asyncio.create_task(answer_to(router, ask())))
        assert answer.summary.ledger.reasons == ("decode_worker_lost",)
        assert [len(worker.jobs) for worker in (stuck, other)] == [1, 1]
        await router.connected_to(stuck)  # it answers: it is only that call that it did not


async def test_a_decode_worker_that_freezes_before_its_sequences_join_loses_them_to_another() -> None:
    async with impatient_router() as router:
        frozen, other = await _two_decodes(router)
        frozen.transfer.close()
        task = asyncio.create_task(answer_to(router, ask()))
        await asyncio.wait_for(frozen.transfer.reached.wait(), _DEADLINE_S)
        frozen.freeze()
        answer = await _end(router, task)
        assert answer.summary.ledger.reasons == ("decode_worker_lost",)
        assert answer.summary.ledger.members[-1] == str(other.id)


async def test_a_decode_worker_that_freezes_between_two_tokens_loses_its_sequences_to_another() -> None:
    async with impatient_router() as router:
        frozen, other = await _two_decodes(router)
        frozen.pause_at = 4
        task = asyncio.create_task(answer_to(router, ask()))
        await asyncio.wait_for(frozen.paused.wait(), _DEADLINE_S)
        frozen.freeze()
        answer = await _end(router, task)
        assert answer.summary.ledger.reasons[-1] == "decode_hedged"
        assert answer.summary.ledger.members[-1] == str(other.id)
