"""Tests that a request goes only to workers whose pool can hold it, and waits while no such worker is present. A small
worker never makes a request invalid."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import grpc
import pytest

from cluster.errors import NoWorkerLargeEnough, TandemError, WorkerTooSmall
from cluster.member import Capacity
from cluster.registry.scale_target import ScaleTarget
from router.requests import GenerateRequest, ResumedChoice
from tests.system.placement.test_waiting_for_workers import _http, _question
from tests.system.rigs.members.migration_stage import Stage, stage
from tests.system.rigs.members.router_harness import (
    Answer,
    RouterUnderTest,
    answer_to,
    ask,
    expected_tokens,
    pass_time,
    router_under_test,
)
from tests.system.rigs.members.scripted_decode import ScriptedDecode
from tests.system.rigs.members.served_router import collect, generate_request, reason_of, served

# `ask()` has a prompt of 4 tokens and asks for 8.
LARGE = Capacity(num_blocks=100, block_size=4, max_num_seqs=8, max_model_len=1000)
SMALL = Capacity(num_blocks=2, block_size=4, max_num_seqs=8, max_model_len=1000)


async def _die(router: RouterUnderTest, worker: ScriptedDecode) -> None:
    router.workers.remove(worker)
    router.register()
    await worker.die()
    await router.until_gone(worker)


@asynccontextmanager
async def _interrupted(
    request: GenerateRequest, **settings: object
) -> AsyncIterator[tuple[RouterUnderTest, ScriptedDecode, "asyncio.Task[Answer]"]]:
    """Yield a stream whose decode worker, the only large one, died after three tokens, and the small worker."""
    async with router_under_test(**settings) as router:
        await router.add_prefill("p0", capacity=LARGE)
        large = await router.add_decode("d0", capacity=LARGE)
        await router.connected()
        large.pause_at = 3
        answering = asyncio.create_task(answer_to(router, request))
        async with asyncio.timeout(10):
            await large.paused.wait()
        small = await router.add_decode("d1", capacity=SMALL)
        await router.connected_to(small)
        await _die(router, large)
        try:
            yield router, small, answering
        finally:
            answering.cancel()
            await asyncio.gather(answering, return_exceptions=True)


async def _waits(router: RouterUnderTest) -> None:
    """Return when a request waits for a large worker."""
    async with asyncio.timeout(10):
        while not router.telemetry.value("tandem_requests_waiting_for_large_worker"):  # noqa: ASYNC110 -- no event tells
            await asyncio.sleep(0)


async def test_a_stream_waits_for_a_large_enough_worker_and_continues() -> None:
    async with _interrupted(request := ask(n=2)) as (router, small, answering):
        await _waits(router)
        await router.add_decode("d2", capacity=LARGE)
        async with asyncio.timeout(20):
            answer = await answering
        assert [answer.token_ids[choice] for choice in (0, 1)] == [expected_tokens(router, request, c) for c in (0, 1)]
        assert answer.summary.ledger.reasons == ("decode_worker_lost", "no_worker_large_enough")
        assert small.jobs == []
        assert router.telemetry.value("tandem_requests_waiting_for_large_worker") == 0


async def test_a_stream_without_a_large_worker_ends_by_that_reason_at_its_deadline() -> None:
    async with _interrupted(ask(timeout_s=15.0)) as (router, small, answering):
        await _waits(router)
        pass_time(15.0)
        with pytest.raises(NoWorkerLargeEnough, match=r"4 \+ max_tokens 8 = 12 tokens.* 1 decode worker.*holds 9"):
            async with asyncio.timeout(10):
                await answering
        assert small.jobs == []


async def test_a_request_too_large_for_every_worker_is_refused_at_once_as_the_clusters_fault() -> None:
    async with served() as (router, channel), _http(router) as http:
        await router.add_prefill("p0", capacity=LARGE)
        small = await router.add_decode("d0", capacity=SMALL)
        await router.connected()
        with pytest.raises(grpc.aio.AioRpcError, match="holds 9: start one with a larger --num-blocks") as refused:
            await collect(channel, generate_request())
        assert (refused.value.code(), reason_of(refused.value)) == (
            grpc.StatusCode.UNAVAILABLE,
            "no_worker_large_enough",
        )
        answer = await http.post("/v1/completions", json=_question())
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "no_worker_large_enough"
        assert (await http.post("/v1/completions", json=_question(max_tokens=5))).status_code == 200
        assert len(small.jobs) == 1


async def test_a_router_that_has_just_started_waits_for_a_large_worker_that_may_be_absent() -> None:
    """The router has read only the small worker so far: Redis may have lost data, or a worker may be restarting."""
    async with router_under_test(absence_s=30.0) as router:
        await router.add_decode("d0", capacity=SMALL)
        await router.connected()
        answering = asyncio.create_task(answer_to(router, request := ask()))
        await _waits(router)
        assert not answering.done()
        await router.add_decode("d1", capacity=LARGE)
        async with asyncio.timeout(10):
            assert (await answering).token_ids[0] == expected_tokens(router, request)
        assert router.telemetry.value("tandem_requests_waiting_for_large_worker") == 0


@pytest.mark.parametrize("target", [ScaleTarget(0, 1), ScaleTarget(0, 2, follower="up", reached=1)])
async def test_the_wait_for_a_large_worker_ends_when_the_scale_target_is_reached(target: ScaleTarget) -> None:
    """At first either no process follows the target, or a worker is missing."""
    async with router_under_test(absence_s=60.0) as router:
        await router.add_decode("d0", capacity=SMALL)
        await router.connected()
        router.fleet.set_scale_target(target)
        answering = asyncio.create_task(answer_to(router, ask()))
        done, _ = await asyncio.wait((answering,), timeout=0.1)
        assert not done
        await router.add_decode("d1", capacity=SMALL)
        router.fleet.set_scale_target(replace(target, follower="up", reached=1))
        with pytest.raises(NoWorkerLargeEnough):
            async with asyncio.timeout(10):
                await answering


@pytest.mark.parametrize(("absence_s", "timeout_s"), [(0.3, 30.0), (30.0, 0.3)], ids=["until it knows", "deadline"])
async def test_the_wait_for_a_large_worker_ends_with_the_same_refusal(absence_s: float, timeout_s: float) -> None:
    async with router_under_test(absence_s=absence_s) as router:
        await router.add_decode("d0", capacity=SMALL)
        await router.connected()
        with pytest.raises(NoWorkerLargeEnough):
            async with asyncio.timeout(10):
                await answer_to(router, ask(timeout_s=timeout_s))
        assert router.telemetry.value("tandem_requests_waiting_for_large_worker") == 0


async def test_a_suspected_large_worker_is_waited_for() -> None:
    async with router_under_test() as router:
        large = await router.add_decode("d0", capacity=LARGE)
        await router.add_decode("d1", capacity=SMALL)
        await router.connected()
        router.fleet.connected_peer(large.id).trusted = False
        answering = asyncio.create_task(answer_to(router, request := ask()))
        await _waits(router)
        router.fleet.connected_peer(large.id).trusted = True
        router.register()
        async with asyncio.timeout(10):
            assert (await answering).token_ids[0] == expected_tokens(router, request)


async def test_a_resumed_request_waits_for_a_large_worker_as_before() -> None:
    async with router_under_test() as router:
        await router.add_prefill("p0", capacity=LARGE)
        large = await router.add_decode("d0", capacity=LARGE)
        await router.connected()
        request = replace(ask(request_id="mine"), num_bytes=100)  # as over gRPC, so that it can be resumed
        first = await answer_to(router, request)
        accepted = next(output.accepted for output in first.outputs if output.accepted is not None)
        await router.add_decode("d1", capacity=SMALL)
        await _die(router, large)
        has = tuple(first.token_ids[0][:3])
        resumed = replace(
            request,
            resume_from=(ResumedChoice(has, num_characters=0),),
            resume_number=1,
            acceptance=accepted.acceptance,
            timeout_s=20.0,
        )
        going_on = asyncio.create_task(_tokens(router, resumed))
        await _waits(router)
        await router.add_decode("d2", capacity=LARGE)
        async with asyncio.timeout(10):
            assert [*has, *(await going_on)] == expected_tokens(router, request)


async def _tokens(router: RouterUnderTest, request: GenerateRequest) -> list[int]:
    return [
        token_id
        async for output in router.pipeline.generate(request)
        for delta in output.deltas
        for token_id in delta.token_ids
    ]


async def test_placement_and_failover_use_only_workers_that_can_hold_the_request() -> None:
    async with router_under_test() as router:
        small = [await router.add_prefill("p0", capacity=Capacity(1, 2, 8, 1000))]
        large = [await router.add_prefill("p1", capacity=LARGE)]
        decodes = {name: await router.add_decode(name, capacity=SMALL) for name in ("d0", "d1")}
        decodes |= {name: await router.add_decode(name, capacity=LARGE) for name in ("d2", "d3")}
        await router.connected()
        decodes["d2"].refusals = [WorkerTooSmall("wrong")]
        for _ in range(6):
            answer = await answer_to(router, request := ask())
            assert answer.token_ids[0] == expected_tokens(router, request)
        assert (len(small[0].jobs), len(decodes["d0"].jobs), len(decodes["d1"].jobs)) == (0, 0, 0)
        assert len(large[0].jobs) >= 6 and decodes["d2"].jobs and decodes["d3"].jobs


async def test_a_refusal_for_size_uses_up_no_attempt_and_the_worker_is_not_asked_again() -> None:
    """The worker registered no capacity, so routers cannot know it."""
    async with router_under_test(max_attempts=1) as router:
        prefills = [await router.add_prefill(name) for name in ("p0", "p1")]
        decodes = [await router.add_decode(name) for name in ("d0", "d1")]
        await router.connected()
        for worker in (prefills[0], decodes[0]):
            worker.refusals = [WorkerTooSmall("its pool is smaller") for _ in range(9)]
        for _ in range(2):
            answer = await answer_to(router, request := ask())
            assert answer.token_ids[0] == expected_tokens(router, request)
        assert len(prefills[0].refusals) >= 7 and len(decodes[0].refusals) >= 7, "asked more than once per request"


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_a_client_never_sees_a_workers_own_refusal(side: str) -> None:
    async with router_under_test() as router:
        prefill, decode = await router.add_prefill("p0"), await router.add_decode("d0")
        await router.connected()
        decode.refusals = [WorkerTooSmall("its pool is smaller") for _ in range(9)]
        if side == "prefill":
            prefill.refusals = [WorkerTooSmall("its pool is smaller") for _ in range(9)]
        answering = asyncio.create_task(answer_to(router, ask(timeout_s=15.0)))
        await _waits(router)
        pass_time(15.0)
        with pytest.raises(NoWorkerLargeEnough, match=r"prompt 4 \+ max_tokens 8"):
            await answering


async def test_a_prompt_that_no_prefill_worker_can_hold_is_prefilled_by_a_decode_worker() -> None:
    async with router_under_test() as router:
        prefill = await router.add_prefill("p0", capacity=Capacity(1, 2, 8, 1000))
        await router.add_decode("d0", capacity=LARGE)
        await router.connected()
        answer = await answer_to(router, request := ask())
        assert answer.token_ids[0] == expected_tokens(router, request)
        assert answer.summary.ledger.reasons == ("no_large_enough_pair",)
        assert prefill.jobs == []


async def test_a_hand_off_that_the_watermark_forbids_is_prefilled_by_the_decode_worker() -> None:
    async with router_under_test() as router:
        prefill = await router.add_prefill("p0", capacity=LARGE)
        await router.add_decode("d0", capacity=replace(SMALL, num_blocks=3, num_watermark_blocks=3))
        await router.connected()
        answer = await answer_to(router, request := ask())
        assert answer.token_ids[0] == expected_tokens(router, request)
        assert answer.summary.ledger.reasons == ("no_large_enough_pair",)
        assert prefill.jobs == []


async def test_one_token_needs_no_large_decode_worker() -> None:
    async with router_under_test() as router:
        await router.add_prefill("p0", capacity=LARGE)
        small = await router.add_decode("d0", capacity=SMALL)
        await router.connected()
        request = ask(prompt=tuple(range(5, 45)), max_tokens=1)
        assert (await answer_to(router, request)).token_ids[0] == expected_tokens(router, request)
        assert small.jobs == []


@pytest.mark.parametrize("comes_late", [False, True])
async def test_open_max_tokens_follow_from_the_largest_worker(comes_late: bool) -> None:
    async with router_under_test() as router:
        request = replace(ask(), stop=replace(ask().stop, max_tokens=None))
        if not comes_late:
            await router.add_decode("d0", capacity=SMALL)
            await router.add_decode("d1", capacity=replace(SMALL, num_blocks=5))
            await router.connected()
        answering = asyncio.create_task(answer_to(router, request))
        if comes_late:
            await router.add_prefill("p0", capacity=LARGE)
            await router.connected()
            await router.add_decode("d1", capacity=replace(SMALL, num_blocks=5))
        async with asyncio.timeout(10):
            answer = await answering
        assert len(answer.token_ids[0]) == 5 * 4 + 1 - 4
        accepted = next(output.accepted for output in answer.outputs if output.accepted is not None)
        assert accepted.max_tokens == 17


async def test_a_ticket_is_reissued_only_to_a_decode_worker_that_can_hold_it() -> None:
    async with router_under_test() as router:
        prefill = await router.add_prefill("p0", capacity=LARGE)
        first = await router.add_decode("d0", capacity=LARGE)
        small = await router.add_decode("d1", capacity=SMALL)
        await router.connected()
        first.refusals = [WorkerTooSmall("its pool is smaller than it said")]
        answering = asyncio.create_task(answer_to(router, request := ask()))
        async with asyncio.timeout(10):
            await first.started.wait()
        await router.add_decode("d2", capacity=LARGE)
        async with asyncio.timeout(20):
            assert (await answering).token_ids[0] == expected_tokens(router, request)
        assert small.jobs == [] and len(prefill.jobs) >= 1


async def test_a_sequence_is_not_moved_to_a_worker_that_cannot_hold_it() -> None:
    async with stage() as on, on.streaming(request := ask(max_tokens=20)) as answering:
        on.target.capacity = replace(SMALL, num_blocks=5)  # what it has fits there, what it asks for does not
        await on.joined()
        await on.migrate()
        assert on.count("kept", "no_worker_large_enough") == 1
        on.source.resumed.set()
        await on.complete(answering, request)
        assert on.target.jobs == []


async def test_a_sequence_that_only_the_draining_worker_can_hold_stays_until_it_exits() -> None:
    async with stage() as on:
        on.source.transfer.close()
        on.target.capacity = SMALL
        await on.joined()
        answering = asyncio.create_task(_answer_at_the_source(on))
        async with asyncio.timeout(10):
            await on.source.started.wait()
        on.source.leave(0.0)
        async with asyncio.timeout(10):
            while not on.router.fleet.draining():
                await on.router.fleet.changed()
        await answer_to(on.router, ask(max_tokens=4))  # long enough for what would be given up to be given up
        on.source.transfer.open()
        async with asyncio.timeout(10):
            answer = await answering
        assert answer.summary.ledger.reasons == ()
        assert len(on.target.jobs) == 1


async def _answer_at_the_source(on: Stage) -> Answer:
    return await answer_to(on.router, ask(max_tokens=20))


async def test_the_models_own_length_stays_the_clients_fault() -> None:
    async with router_under_test() as router:
        await router.add_decode("d0", capacity=SMALL)
        await router.connected()
        with pytest.raises(TandemError, match="maximum context length is 1024") as refused:
            await answer_to(router, ask(max_tokens=5000))
        assert refused.value.reason == "context_length_exceeded"
