"""Tests that a real router moves the sequences of a draining decode worker in time, over scripted workers."""

import asyncio
import logging

import pytest

from cluster.errors import QueueFull
from cluster.messages import MemberId
from tests.polling import until
from tests.system.rigs.members.migration_stage import Stage, stage
from tests.system.rigs.members.router_harness import answer_to, ask, ask_and_hold, router_under_test
from tests.system.rigs.members.scripted_decode import ScriptedDecode

_LONG_S = 1000.0


async def _known_to_leave(on: Stage, worker: ScriptedDecode) -> None:
    async with asyncio.timeout(10):
        while worker.id not in {peer.member.id for peer in on.router.fleet.draining()}:
            await on.router.fleet.changed()


async def test_a_sequence_that_will_not_end_in_time_migrates_without_a_second_prefill() -> None:
    async with stage() as on, on.streaming(request := ask(max_tokens=20, n=3, logprobs=1)) as answering:
        await on.joined()
        on.source.leave(0.0)
        answer = await on.complete(answering, request)
        assert answer.summary.ledger.reasons == (), "moved, not failed over"
        assert (len(on.prefill.jobs), len(on.target.jobs), on.count("moved")) == (1, 3, 3)
        logprobs: dict[int, list[int]] = {0: [], 1: [], 2: []}
        for delta in (delta for output in answer.outputs for delta in output.deltas):
            logprobs[delta.choice] += [item.token_id for item in delta.logprobs]
        assert logprobs == answer.token_ids


async def test_a_sequence_that_will_end_in_time_stays() -> None:
    async with stage() as on, on.streaming(request := ask(max_tokens=20, n=2)) as answering:
        await on.joined()
        on.source.leave(_LONG_S)
        await _known_to_leave(on, on.source)
        await answer_to(on.router, ask(max_tokens=5))  # what would move has moved by then
        on.source.resumed.set()
        await on.complete(answering, request)
        assert on.count("moved") == 0 and len(on.target.jobs) == 1


async def test_a_sequence_stays_until_another_worker_joins() -> None:
    async with stage() as on, on.streaming(request := ask(max_tokens=20)) as answering:
        on.source.leave(0.0)
        await _known_to_leave(on, on.source)
        await on.joined()
        await on.complete(answering, request)
        assert (on.count("moved"), len(on.prefill.jobs)) == (1, 1)


async def test_a_worker_that_announced_its_end_is_logged_as_gone_and_another_one_as_lost(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    async with router_under_test() as router:
        planned, killed = await router.add_decode("planned"), await router.add_decode("killed")
        await router.connected()
        planned.leave(_LONG_S)
        await router.until_gone(planned)
        await planned.die()
        router.workers.remove(planned)
        router.register()
        killed.pause_at = 2
        held = await ask_and_hold(router, ask(max_tokens=5), killed)
        await killed.die()  # its registration remains
        await router.add_decode("successor")
        await until(lambda: _logged(caplog, killed.id, "the worker does not answer"), what="the router tries again")
        assert "decode_worker_lost" in (await held).summary.ledger.reasons
        # Before the end, at which the other workers stop while the router still runs.
        warned = [(r.getMessage(), str(getattr(r, "worker", ""))) for r in caplog.records if r.levelname == "WARNING"]
        assert warned == [("the worker is lost; its requests continue at other workers", str(killed.id))]
        assert await _logged(caplog, planned.id, "the worker has left")


async def _logged(caplog: pytest.LogCaptureFixture, worker: MemberId, message: str) -> bool:
    found = [(record.getMessage(), str(getattr(record, "worker", ""))) for record in caplog.records]
    return (message, str(worker)) in found


async def test_the_last_worker_of_a_pool_finishes_its_sequences() -> None:
    async with stage() as on, on.streaming(request := ask(max_tokens=20)) as answering:
        on.source.leave(0.0)
        await _known_to_leave(on, on.source)
        on.source.resumed.set()
        answer = await on.complete(answering, request)
        assert answer.summary.ledger.reasons == ()


async def test_two_draining_workers_do_not_migrate_to_each_other() -> None:
    async with stage() as on, on.streaming(request := ask(max_tokens=20)) as answering:
        await on.joined()
        on.target.leave(_LONG_S)
        await _known_to_leave(on, on.target)
        on.source.leave(0.0)
        await _known_to_leave(on, on.source)
        on.source.resumed.set()
        await on.complete(answering, request)
        assert not on.target.jobs


async def test_a_move_to_a_target_without_room_is_retried() -> None:
    async with stage() as on, on.streaming(request := ask(max_tokens=20)) as answering:
        await on.joined()
        on.target.refusals = [QueueFull("full"), QueueFull("still full")]
        on.source.leave(0.0)
        answer = await on.complete(answering, request)
        assert (on.count("kept", "queue_full"), on.count("moved")) == (2, 1)
        assert answer.summary.ledger.reasons == () and len(on.prefill.jobs) == 1


async def test_a_target_that_drains_during_a_move_is_replaced() -> None:
    async with stage() as on, on.streaming(request := ask(max_tokens=20)) as answering:
        await on.joined()
        on.target.transfer.close()
        on.source.leave(0.0)
        async with asyncio.timeout(10):
            await on.target.transfer.reached.wait()
        third = await on.router.add_decode("d2")
        await on.router.connected_to(third)
        on.target.leave(0.0)
        await on.complete(answering, request)
        assert (on.count("kept", "draining"), on.count("moved")) == (1, 1)
        assert len(on.prefill.jobs) == len(third.jobs) == 1


async def test_a_queued_sequence_starts_elsewhere_without_using_up_an_attempt() -> None:
    async with stage(max_attempts=2) as on:
        on.source.transfer.close()
        on.target.transfer.close()
        request = ask(max_tokens=20)
        answering = asyncio.create_task(answer_to(on.router, request))
        async with asyncio.timeout(10):
            await on.source.transfer.reached.wait()
            await on.joined()
            on.source.leave(0.0)
            await on.target.transfer.reached.wait()
            await on.router.connected_to(await on.router.add_decode("d2"))
            on.target.leave(0.0)
        answer = await on.complete(answering, request)
        assert answer.summary.ledger.reasons == ("decode_draining", "decode_draining")
        await on.source.until(lambda: bool(on.source.cancelled_handles))


async def test_a_preempted_sequence_restarts_elsewhere_from_its_clients_tokens() -> None:
    async with stage(max_attempts=2) as on, on.streaming(request := ask(max_tokens=20)) as answering:
        await on.joined()
        on.source.progress.clear()
        on.source.leave(0.0)
        answer = await on.complete(answering, request)
        assert answer.summary.ledger.reasons == ("decode_draining",)
        assert (on.count("kept", "not_found"), len(on.prefill.jobs), on.prefill.jobs[-1].num_committed) == (1, 2, 5)


async def test_more_sequences_than_move_at_once_all_leave() -> None:
    async with stage() as on, on.streaming(request := ask(max_tokens=20, n=9)) as answering:
        await on.joined()
        on.source.leave(0.0)
        await on.complete(answering, request)
        assert on.count("moved") == 9 and len(on.prefill.jobs) == 1
