"""Tests that a migration that fails at any point loses and repeats no token: the sequence stays or restarts."""

import asyncio

import pytest

from cluster.errors import (
    DeadlineExceeded,
    HandOffReason,
    InternalError,
    NotFound,
    QueueFull,
    TandemError,
    WorkerTooSmall,
)
from tests.system.rigs.members.migration_stage import KEPT, MOVED, NOTHING, all_cancelled, none_frozen, stage
from tests.system.rigs.members.router_harness import ask, pass_time


@pytest.mark.parametrize(
    "refusal",
    [QueueFull("full"), WorkerTooSmall("its pool is smaller"), InternalError("broken")],
    ids=lambda e: e.reason,
)
async def test_a_refusing_target_leaves_the_sequence_at_the_source(refusal: TandemError) -> None:
    async with stage() as on, on.streaming(request := ask(max_tokens=20)) as answering:
        await on.joined()
        on.target.refusals = [refusal]
        assert await on.migrate() == KEPT
        on.source.resumed.set()
        answer = await on.complete(answering, request)
        assert answer.summary.ledger.reasons == ()
        assert on.count("kept", refusal.reason) == 1
        assert len(on.prefill.jobs) == len(on.source.jobs) == 1


@pytest.mark.parametrize("reason", [HandOffReason.DIGEST_MISMATCH, HandOffReason.NOT_ENOUGH_BLOCKS])
async def test_a_failed_hand_off_leaves_the_sequence_at_the_source(reason: HandOffReason) -> None:
    async with stage() as on, on.streaming(request := ask(max_tokens=20)) as answering:
        await on.joined()
        on.target.handoff_failures = [str(reason)]
        assert await on.migrate() == KEPT
        assert on.count("kept", reason) == 1
        assert await on.migrate() == MOVED  # it can be tried again
        await on.complete(answering, request)


async def test_a_target_that_starts_from_another_token_ends_the_move() -> None:
    async with stage() as on, on.streaming(request := ask(max_tokens=20)) as answering:
        await on.joined()
        on.target.first_token_offset = 1
        assert await on.migrate() == KEPT
        on.source.resumed.set()
        await on.complete(answering, request)
        assert on.count("kept", "first_token_mismatch") == 1
        async with asyncio.timeout(10):
            await on.target.cancelled.wait()


async def test_the_death_of_the_target_while_it_pulls_keeps_the_sequence_at_the_source() -> None:
    async with stage() as on, on.streaming(request := ask(max_tokens=20)) as answering:
        await on.joined()
        on.target.transfer.close()
        moving = on.migrating()
        async with asyncio.timeout(10):
            await on.target.transfer.reached.wait()
        await on.target.die()
        assert await moving == KEPT
        on.source.resumed.set()
        answer = await on.complete(answering, request)
        assert answer.summary.ledger.reasons == ()


async def test_a_target_that_does_not_start_in_time_is_abandoned_and_its_job_cancelled() -> None:
    async with stage(migration_timeout_s=15.0) as on, on.streaming(request := ask(max_tokens=20)) as answering:
        await on.joined()
        on.target.transfer.close()
        moving = asyncio.create_task(on.router.migrations.migrate("d0", "", 0))
        async with asyncio.timeout(10):
            await on.target.transfer.reached.wait()
        pass_time(15.0)
        assert await moving == KEPT
        async with asyncio.timeout(10):
            await on.target.cancelled.wait()
        on.target.transfer.open()  # it wakes up too late: the router has abandoned the move
        on.source.resumed.set()
        await on.complete(answering, request)
        assert on.count("kept", "timeout") == 1


async def test_the_death_of_the_source_before_the_freeze_is_an_ordinary_failover() -> None:
    async with stage() as on, on.streaming(request := ask(max_tokens=20)) as answering:
        await on.joined()
        on.source.before_freezing.close()
        moving = on.migrating()
        async with asyncio.timeout(10):
            await on.source.before_freezing.reached.wait()
        await on.source.die()
        assert await moving == KEPT
        answer = await on.complete(answering, request)
        assert answer.summary.ledger.reasons == ("decode_worker_lost",)
        assert on.prefill.jobs[-1].num_committed == 5
        assert on.count("restarted", "worker_lost") == 1


async def test_the_death_of_the_source_while_the_target_pulls_restarts_the_sequence() -> None:
    async with stage() as on, on.streaming(request := ask(max_tokens=20)) as answering:
        await on.joined()
        on.target.transfer.close()
        on.target.handoff_failures = [str(HandOffReason.EXPORTER_LOST)]
        moving = on.migrating()
        async with asyncio.timeout(10):
            await on.target.transfer.reached.wait()
        await on.source.die()
        await on.router.until_gone(on.source)
        on.target.transfer.open()
        assert await moving == KEPT
        answer = await on.complete(answering, request)
        assert len(answer.summary.ledger.reasons) == 1
        assert on.prefill.jobs[-1].num_committed == 5


async def test_the_death_of_the_source_after_the_target_has_started_has_no_effect() -> None:
    async with stage() as on, on.streaming(request := ask(max_tokens=20)) as answering:
        await on.joined()
        on.target.pause_at = 5
        assert await on.migrate() == MOVED
        await on.source.die()
        await on.router.until_gone(on.source)
        on.target.resumed.set()
        answer = await on.complete(answering, request)
        assert answer.summary.ledger.reasons == ()


async def test_a_thaw_that_fails_is_an_ordinary_failover() -> None:
    async with stage() as on, on.streaming(request := ask(max_tokens=20)) as answering:
        await on.joined()
        on.target.refusals = [QueueFull("full")]
        on.source.thaw_refusals = [NotFound("it expired")]
        assert await on.migrate() == KEPT
        answer = await on.complete(answering, request)
        assert answer.summary.ledger.reasons == ("decode_not_found",)
        assert on.count("restarted", "not_found") == 1


async def test_lost_tokens_end_the_move_in_time() -> None:
    async with stage(migration_timeout_s=10.0) as on, on.streaming(request := ask(max_tokens=20)) as answering:
        await on.joined()
        on.source.voice.close()
        on.source.pause_at = 9
        on.source.resumed.set()
        on.source.resumed = asyncio.Event()
        await on.source.until(lambda: [p.index for p in on.source.progress.values()] == [9])
        on.source.lose_messages()
        moving = asyncio.create_task(on.router.migrations.migrate("d0", "", 0))
        await on.source.until(lambda: bool(on.source.frozen))
        await on.router.fleet.connected_peer(on.source.id).inspect()  # it follows the freeze's answer
        pass_time(10.0)
        assert await moving == KEPT
        answer = await on.complete(answering, request)
        assert answer.summary.ledger.reasons == ("decode_worker_lost",)


@pytest.mark.parametrize("where", ["freezing", "frozen", "pulling", "thawing"])
async def test_a_client_that_leaves_during_the_move_frees_both_workers(where: str) -> None:
    async with stage() as on, on.streaming(ask(max_tokens=20)) as answering:
        await on.joined()
        gate = {
            "freezing": on.source.before_freezing,
            "frozen": on.source.after_freezing,
            "pulling": on.target.transfer,
            "thawing": on.source.before_thawing,
        }[where]
        gate.close()
        on.target.refusals = [QueueFull("full")] if where == "thawing" else []
        moving = on.migrating()
        async with asyncio.timeout(10):
            await gate.reached.wait()
            answering.cancel()
            assert await moving == NOTHING
        await all_cancelled(on.source)
        await all_cancelled(on.target)
        assert on.source.frozen == {}
        gate.open()


async def test_a_deadline_that_passes_during_a_move_is_named() -> None:
    async with stage() as on, on.streaming(ask(max_tokens=20, timeout_s=15.0)) as answering:
        await on.joined()
        on.target.transfer.close()
        moving = asyncio.create_task(on.router.migrations.migrate("d0", "", 0))
        async with asyncio.timeout(10):
            await on.target.transfer.reached.wait()
        pass_time(15.0)
        with pytest.raises(DeadlineExceeded, match="in phase transfer"):
            await answering
        assert await moving == NOTHING
        on.target.transfer.open()


async def test_a_cancel_lost_with_its_connection_is_sent_again() -> None:
    """A frozen sequence sends nothing that would remind the router of it."""
    async with stage() as on, on.streaming(request := ask(max_tokens=20)) as answering:
        await on.joined()
        on.source.is_deaf = True
        assert await on.migrate() == MOVED
        await on.complete(answering, request)
        assert on.source.frozen
        on.source.break_streams()
        await on.router.until_gone(on.source)
        on.source.is_deaf = False
        await none_frozen(on.source)


async def test_a_cancelled_migrate_call_does_not_stop_the_move() -> None:
    async with stage() as on, on.streaming(request := ask(max_tokens=20)) as answering:
        await on.joined()
        on.target.transfer.close()
        moving = on.migrating()
        async with asyncio.timeout(10):
            await on.target.transfer.reached.wait()
        moving.cancel()
        on.target.transfer.open()
        await on.complete(answering, request)
        assert on.count("moved") == 1
