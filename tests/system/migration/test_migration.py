"""Tests that running sequences move to another decode worker and their clients get every token once."""

import asyncio
from contextlib import AsyncExitStack, aclosing

import pytest

from cluster.errors import (
    InvalidRequest,
    NotFound,
    TooManyFrozen,
)
from cluster.member import Capacity
from cluster.service_times import DecodeTimes, PrefillTimes, ServiceTimes
from router.pipeline.migration import MigrationCount
from tests.system.rigs.members.migration_stage import KEPT, MOVED, NOTHING, none_frozen, stage
from tests.system.rigs.members.router_harness import ask, expected_tokens


async def test_a_moved_stream_continues_at_the_target_unnoticed_by_its_client() -> None:
    async with stage() as on, on.streaming(request := ask(max_tokens=20)) as answering:
        await on.joined()
        assert await on.migrate() == MOVED
        answer = await on.complete(answering, request)
        (job,) = on.target.jobs
        assert job.sequences[0].committed_token_ids == tuple(answer.token_ids[0][:4])
        assert job.attempt == 2
        assert on.source.cancelled_handles == {on.source.jobs[0].sequences[0].handle}
        ledger = answer.summary.ledger
        assert ledger.members == (str(on.prefill.id), str(on.source.id), str(on.target.id))
        assert (ledger.reasons, ledger.kv_bytes) == ((), 800)
        assert len(on.prefill.jobs) == 1
        assert on.count("moved") == 1
        assert on.router.telemetry.value("tandem_retries_total", leg="decode", reason="worker_lost") == 0


async def test_the_tokens_of_a_moved_stream_are_not_compared_with_those_that_were_predicted() -> None:
    async with stage(placement="auto") as on:
        for worker in (on.prefill, on.source):
            worker.service_times = ServiceTimes(PrefillTimes(0.0, 0.01, 0.0, 0.0), DecodeTimes(0.01, 0.0, 0.0, 0.0))
        await on.router.knows_speeds()
        async with on.streaming(request := ask(max_tokens=20)) as answering:
            await on.joined()
            assert await on.migrate() == MOVED
            await on.complete(answering, request)
        errors = [on.router.telemetry.value(f"tandem_{name}_prediction_error_ratio") for name in ("ttft", "itl")]
        assert errors == [1, 0]


async def test_every_choice_moves_by_itself() -> None:
    async with stage() as on, on.streaming(request := ask(max_tokens=20, n=3)) as answering:
        await on.joined()
        assert await on.migrate(max_sequences=1) == MOVED
        assert await on.migrate() == MigrationCount(2, 0)
        await on.complete(answering, request)
        assert [len(job.sequences) for job in on.target.jobs] == [1, 1, 1]
        assert {job.attempt for job in on.target.jobs} == {2, 3, 4}


async def test_three_calls_together_freeze_no_more_than_four() -> None:
    requests = [ask(max_tokens=20, n=4, request_id=f"r{number}") for number in range(3)]
    async with stage() as on, AsyncExitStack() as streams:
        answering = [await streams.enter_async_context(on.streaming(request)) for request in requests]
        await on.joined()
        on.target.transfer.close()
        moving = [on.migrating() for _ in range(3)]
        await on.source.until(lambda: len(on.source.frozen) >= 4)
        async with asyncio.timeout(10):
            await on.target.transfer.reached.wait()
        on.target.transfer.open()
        counts = await asyncio.gather(*moving)
        assert sum(count.num_moved for count in counts) == 12
        assert on.source.most_frozen == 4
        for request, answer in zip(requests, answering, strict=True):
            await on.complete(answer, request)


async def test_a_freeze_refused_for_its_limit_is_retried() -> None:
    """Sequences of another router may be frozen there."""
    async with stage() as on, on.streaming(request := ask(max_tokens=20)) as answering:
        await on.joined()
        on.source.freeze_refusals = [TooManyFrozen("four are frozen"), TooManyFrozen("four are frozen")]
        assert await on.migrate() == MOVED
        assert on.count("deferred", "too_many_frozen") == 2
        answer = await on.complete(answering, request)
        assert answer.summary.ledger.reasons == ()


async def test_sequences_stay_when_every_freeze_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async with stage() as on, on.streaming(request := ask(max_tokens=20)) as answering:
        await on.joined()
        on.source.freeze_refusals = [TooManyFrozen("four are frozen")] * 9
        assert await on.router.migrations.move(on.router.fleet.connected_peer(on.source.id), 1, timeout_s=0.1) == "kept"
        on.source.resumed.set()
        await on.complete(answering, request)


async def test_choices_that_are_not_moved_are_not_disturbed() -> None:
    async with stage() as on, on.streaming(request := ask(max_tokens=20, n=3)) as answering:
        await on.joined()
        assert await on.migrate(max_sequences=1) == MOVED
        on.source.resumed.set()
        await on.complete(answering, request)
        assert len(on.target.jobs) == len(on.source.jobs) == 1


async def test_a_sequence_can_move_back_and_forth_many_times() -> None:
    async with stage() as on, on.streaming(request := ask(max_tokens=20, n=2)) as answering:
        await on.joined()
        on.target.pause_at = 5
        for _ in range(40):
            assert await on.migrate("d0", "d1") == MigrationCount(2, 0)
            assert await on.migrate("d1", "d0") == MigrationCount(2, 0)
        await none_frozen(on.source)
        await none_frozen(on.target)
        on.source.resumed.set()
        await on.complete(answering, request)
        assert on.count("moved") == 160


async def test_logprobs_and_a_stop_string_span_the_move() -> None:
    async with stage() as on:
        tokens = expected_tokens(on.router, ask(max_tokens=40))
        text = on.router.tokenization.decode(tokens)
        begun = len(on.router.tokenization.decode(tokens[:5]))
        stop = text[begun - 2 : begun + 2]
        request = ask(max_tokens=40, stop=(stop,), logprobs=1)
        async with on.streaming(request) as answering:
            await on.joined()
            await on.migrate()
            async with asyncio.timeout(10):
                answer = await answering
        assert answer.text[0] == text[: text.index(stop)]
        assert answer.finish_reasons[0] == "stop"
        logprobs = [item for output in answer.outputs for delta in output.deltas for item in delta.logprobs]
        assert [item.token_id for item in logprobs] == answer.token_ids[0]


async def test_a_sequence_that_ends_before_the_freeze_delivers_its_last_tokens_from_the_source() -> None:
    async with stage() as on, on.streaming(request := ask(max_tokens=8)) as answering:
        await on.joined()
        on.source.before_freezing.close()
        moving = on.migrating()
        async with asyncio.timeout(10):
            await on.source.before_freezing.reached.wait()
        on.source.resumed.set()
        await on.source.until(lambda: not on.source.progress)
        on.source.before_freezing.open()
        assert (await moving).num_moved == 0
        await on.complete(answering, request)
        assert on.target.jobs == []


async def test_tokens_that_arrive_after_the_freeze_was_answered_come_first() -> None:
    async with stage() as on, on.streaming(request := ask(max_tokens=20)) as answering:
        await on.joined()
        on.source.voice.close()
        on.source.pause_at = 9
        on.source.resumed.set()
        on.source.resumed = asyncio.Event()
        await on.source.until(lambda: [p.index for p in on.source.progress.values()] == [9])
        on.source.after_freezing.close()
        moving = on.migrating()
        async with asyncio.timeout(10):
            await on.source.after_freezing.reached.wait()
        on.source.after_freezing.open()
        await on.router.fleet.connected_peer(on.source.id).inspect()  # it follows the freeze's answer
        assert on.target.jobs == []
        on.source.voice.open()
        assert await moving == MOVED
        await on.complete(answering, request)
        assert len(on.target.jobs[0].sequences[0].committed_token_ids) == 8


async def test_one_sequence_is_moved_once_at_a_time() -> None:
    async with stage() as on, on.streaming(request := ask(max_tokens=20)) as answering:
        await on.joined()
        on.target.transfer.close()
        moving = on.migrating()
        async with asyncio.timeout(10):
            await on.target.transfer.reached.wait()
        assert await on.migrate() == NOTHING
        on.target.transfer.open()
        assert await moving == MOVED
        await on.complete(answering, request)


async def test_impossible_migrations_are_refused_by_name() -> None:
    async with stage() as on:
        for source, target in (("d7", ""), ("p0", ""), ("d0", "d7")):
            with pytest.raises(NotFound, match=r"no decode worker '[dp][07]'"):
                await on.migrate(source, target)
        with pytest.raises(InvalidRequest, match="source and target"):
            await on.migrate("d0", str(on.source.id))
        assert await on.migrate("d0") == NOTHING


async def test_without_another_decode_worker_all_sequences_stay() -> None:
    async with stage() as on, on.streaming(request := ask(max_tokens=20)) as answering:
        assert await on.migrate() == KEPT
        assert on.count("kept", "no_workers") == 1
        on.source.resumed.set()
        await on.complete(answering, request)


@pytest.mark.parametrize(
    "capacity",
    [Capacity(100, 1, max_num_seqs=8, max_model_len=100), Capacity(10, 16, max_num_seqs=0, max_model_len=100)],
    ids=["blocks", "slots"],
)
async def test_no_sequence_moves_to_a_worker_where_it_would_queue(capacity: Capacity) -> None:
    """Scripted workers report ten free blocks."""
    async with stage() as on, on.streaming(request := ask(prompt=tuple(range(5, 25)), max_tokens=20)) as answering:
        on.target.capacity = capacity
        await on.joined()
        peer = on.router.fleet.connected_peer(on.target.id)
        async with asyncio.timeout(10):
            while not peer.stream.heartbeat.free_blocks:
                await peer.inspect()
        assert await on.migrate() == KEPT
        assert on.count("kept", "overloaded") == 1
        on.source.resumed.set()
        await on.complete(answering, request)


async def test_a_sequence_that_has_not_started_is_not_moved() -> None:
    async with stage() as on:
        await on.joined()
        for decode in (on.source, on.target):
            decode.transfer.close()
        async with aclosing(on.router.pipeline.generate(ask())) as outputs:
            await anext(outputs)
            for name in ("d0", "d1"):
                assert await on.migrate(name) == NOTHING
            for decode in (on.source, on.target):
                decode.transfer.open()
