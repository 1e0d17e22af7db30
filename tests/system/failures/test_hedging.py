"""Tests of hedges: requests of a worker that does not answer start at another worker too, and the execution that has
the next token first continues.

Workers are suspect after one and a half seconds here, and lost after a minute, so that only hedges act.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import pytest

from cluster.errors import QueueFull
from router.policies.breakers import BreakerPolicy
from router.request.account import RequestAccount
from router.request.explanations import Explanation
from router.requests import GenerateRequest
from tests.polling import until
from tests.system.rigs.members.router_harness import (
    Answer,
    RouterUnderTest,
    answer_to,
    ask,
    expected_tokens,
    router_under_test,
)
from tests.system.rigs.members.scripted_decode import ScriptedDecode
from tests.system.rigs.members.scripted_workers import Gate, ScriptedPrefill, ScriptedWorker

_DEADLINE_S = 20.0


@asynccontextmanager
async def _router(**settings: object) -> AsyncIterator[RouterUnderTest]:
    async with router_under_test(silence_s=1.5, grace_s=60.0, placement="round-robin", **settings) as router:
        yield router


def _count(router: RouterUnderTest, leg: str, outcome: str) -> float:
    return router.telemetry.value("tandem_hedges_total", leg=leg, outcome=outcome)


async def _counted(router: RouterUnderTest, leg: str, outcome: str) -> float:
    return _count(router, leg, outcome)


async def _reached(gate: Gate) -> None:
    await asyncio.wait_for(gate.reached.wait(), _DEADLINE_S)


async def _end(router: RouterUnderTest, task: "asyncio.Task[Answer]", request: GenerateRequest) -> Answer:
    async with asyncio.timeout(_DEADLINE_S):
        answer = await task
    for choice in range(request.n):
        assert answer.token_ids[choice] == expected_tokens(router, request, choice)
    return answer


def _explained(router: RouterUnderTest) -> Explanation:
    """Return the explanation of the request that has ended."""
    (ended,) = router.live_requests.explanations.since(0, 10, until=10)
    return ended


async def _missed(router: RouterUnderTest, worker: ScriptedWorker, number: int) -> None:
    """Wait until the worker has missed so many health checks that count."""
    peer = router.fleet.peer(worker.id)
    assert peer is not None
    async with asyncio.timeout(_DEADLINE_S):
        while peer.num_missed < number:
            await router.fleet.changed()


def _gate_of_prompts(worker: ScriptedWorker) -> Gate:
    """Return the gate at which a prompt waits at this worker."""
    assert isinstance(worker, ScriptedPrefill | ScriptedDecode)
    return worker.before_first_tokens if isinstance(worker, ScriptedPrefill) else worker.before_taking


def _wake(worker: ScriptedWorker) -> None:
    worker.door.open()
    if isinstance(worker, ScriptedDecode):
        worker.voice.open()
        worker.resumed.set()


async def _stopped_decode(
    router: RouterUnderTest, request: GenerateRequest
) -> "tuple[asyncio.Task[Answer], ScriptedPrefill, ScriptedDecode, ScriptedDecode]":
    """Send a request and stop its decode worker in the middle. Later prefills are held before their first token."""
    prefill = await router.add_prefill("p0")
    stopped, other = await router.add_decode("d0"), await router.add_decode("d1")
    await router.connected()
    stopped.pause_at = 4
    task = asyncio.create_task(answer_to(router, request))
    await asyncio.wait_for(stopped.paused.wait(), _DEADLINE_S)
    prefill.before_first_tokens.close()
    stopped.freeze()
    return task, prefill, stopped, other


@pytest.mark.parametrize("n", [1, 2])
async def test_a_hedge_takes_over_with_its_first_token_and_later_messages_of_the_suspect_are_dropped(n: int) -> None:
    async with _router() as router:
        task, prefill, stopped, other = await _stopped_decode(router, request := ask(n=n, max_tokens=12))
        await _reached(prefill.before_first_tokens)
        prefill.before_first_tokens.open()
        other.pause_at = 8
        await asyncio.wait_for(other.paused.wait(), _DEADLINE_S)
        await until(partial(_counted, router, "decode", "taken_over"), what="the hedge's first token at the router")
        _wake(stopped)  # the client still waits; its messages now belong to an attempt that is over
        await asyncio.wait_for(stopped.cancelled.wait(), _DEADLINE_S)
        other.resumed.set()
        answer = await _end(router, task, request)
        assert answer.summary.ledger.reasons == ("decode_hedged",)
        assert _count(router, "decode", "taken_over") == 1
        explained = _explained(router)
        assert [attempt.failure for attempt in explained.attempts] == ["decode_hedged", *[""] * n]
        assert explained.workers == (str(prefill.id), str(other.id))


@pytest.mark.parametrize("n", [1, 2])
async def test_a_decode_worker_that_wakes_before_its_hedge_has_a_token_continues_and_the_hedge_is_cancelled(
    n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    hedged: list[RequestAccount] = []
    monkeypatch.setattr(RequestAccount, "teach_nothing", lambda account: hedged.append(account))
    async with _router() as router:
        task, prefill, stopped, other = await _stopped_decode(router, request := ask(n=n, max_tokens=12))
        await _reached(prefill.before_first_tokens)
        _wake(stopped)
        answer = await _end(router, task, request)
        assert answer.summary.ledger.reasons == ()
        assert (_count(router, "decode", "called_off"), _count(router, "decode", "taken_over")) == (1, 0)
        explained = _explained(router)
        assert explained.attempts[0].failure == ""
        assert {attempt.failure for attempt in explained.attempts[1:]} <= {"hedge_called_off"}
        assert explained.workers == (str(prefill.id), str(stopped.id))
        assert len(hedged) == 1, "no model learns from the times of the suspect worker or of the hedge"
        await asyncio.wait_for(prefill.cancelled.wait(), _DEADLINE_S)
        assert 2 <= len(prefill.jobs) <= 1 + n, "each choice has its own tokens by now"
        await other.until(lambda: not other.running and not other.progress)
        async with asyncio.timeout(_DEADLINE_S):
            while not router.telemetry.value("tandem_false_suspicions_total", role="decode"):
                await router.fleet.changed()


async def test_a_prefill_worker_that_wakes_before_its_hedge_has_a_token_continues_and_the_hedge_is_cancelled() -> None:
    async with _router() as router:
        stopped, other = await router.add_prefill("p0"), await router.add_prefill("p1")
        await router.add_decode("d0")
        await router.connected()
        for worker in (stopped, other):
            worker.before_first_tokens.close()
        task = asyncio.create_task(answer_to(router, request := ask()))
        await _reached(stopped.before_first_tokens)
        stopped.freeze()
        await _reached(other.before_first_tokens)
        _wake(stopped)
        stopped.before_first_tokens.open()
        answer = await _end(router, task, request)
        assert answer.summary.ledger.reasons == ()
        await asyncio.wait_for(other.cancelled.wait(), _DEADLINE_S)
        assert _count(router, "prefill", "called_off") == 1
        explained = _explained(router)
        assert [attempt.failure for attempt in explained.attempts] == ["", "hedge_called_off"]
        assert explained.workers[0] == str(stopped.id)


async def test_an_exporter_that_stops_before_its_blocks_have_arrived_is_hedged() -> None:
    """The client has its first token, and the decode worker waits for the remaining blocks."""
    async with _router() as router:
        stopped, other = await router.add_prefill("p0"), await router.add_prefill("p1")
        decode = await router.add_decode("d0")
        await router.connected()
        decode.transfer.close()
        task = asyncio.create_task(answer_to(router, request := ask()))
        await _reached(decode.transfer)
        stopped.freeze()
        async with asyncio.timeout(_DEADLINE_S):
            while not _count(router, "prefill", "taken_over"):
                await other.beats.get()
        decode.transfer.open()
        answer = await _end(router, task, request)
        assert answer.summary.ledger.reasons == ("prefill_hedged",)
        assert [len(worker.jobs) for worker in (stopped, other)] == [1, 1]


@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_a_hedge_that_waits_for_its_token_continues_when_the_suspect_worker_is_lost(leg: str) -> None:
    """The suspect computes the prompt, for another worker or for itself."""
    async with _router() as router:
        add = router.add_prefill if leg == "prefill" else router.add_decode
        stopped, other = await add("w0"), await add("w1")
        if leg == "prefill":
            await router.add_decode("d0")
        await router.connected()
        held = [_gate_of_prompts(worker) for worker in (stopped, other)]
        for gate in held:
            gate.close()
        task = asyncio.create_task(answer_to(router, request := ask()))
        await _reached(held[0])
        stopped.freeze()
        await _reached(held[1])
        await stopped.die()
        await router.until_gone(stopped)
        held[1].open()
        answer = await _end(router, task, request)
        assert answer.summary.ledger.reasons == (f"{leg}_worker_lost", f"{leg}_hedged")
        assert len(other.jobs) == 1, "the hedge was not begun again"
        assert _count(router, leg, "taken_over") == 1


async def test_a_worker_that_stops_after_a_failed_call_is_hedged_too() -> None:
    async with _router() as router:
        stopped, other = await router.add_prefill("p0"), await router.add_prefill("p1")
        await router.add_decode("d0")
        await router.connected()
        stopped.before_first_tokens.close()
        task = asyncio.create_task(answer_to(router, request := ask()))
        await _reached(stopped.before_first_tokens)
        stopped.freeze()
        router.fleet.suspect(stopped.id)
        answer = await _end(router, task, request)
        assert answer.summary.ledger.reasons == ("prefill_hedged",)
        assert [len(worker.jobs) for worker in (stopped, other)] == [1, 1]


async def test_a_prompt_that_no_other_pair_may_serve_waits_for_its_suspect_worker_without_a_hedge() -> None:
    """The only other prefill worker's circuit breaker is open."""
    async with _router(breakers=BreakerPolicy(failures=1, first_pause_s=1000.0, max_pause_s=1000.0)) as router:
        stopped, other = await router.add_prefill("p0"), await router.add_prefill("p1")
        decode = await router.add_decode("d0")
        await router.connected()
        decode.broken_with = {other.id.id}
        while not router.pipeline.pairs.failing():
            await answer_to(router, ask())
        stopped.before_first_tokens.close()
        task = asyncio.create_task(answer_to(router, request := ask(request_id="held")))
        await _reached(stopped.before_first_tokens)
        stopped.freeze()
        await _missed(router, stopped, 2)
        _wake(stopped)
        stopped.before_first_tokens.open()
        answer = await _end(router, task, request)
        assert answer.summary.ledger.reasons == ()
        assert not any(_count(router, "prefill", outcome) for outcome in ("called_off", "taken_over", "failed"))


async def test_a_request_beyond_the_hedge_budget_leaves_its_worker_at_the_second_missed_answer() -> None:
    async with _router() as router:
        stopped, other = await router.add_prefill("p0"), await router.add_prefill("p1")
        await router.add_decode("d0")
        await router.connected()
        stopped.before_first_tokens.close()
        other.before_first_tokens.close()
        requests = [ask(request_id="a"), ask(request_id="b"), ask(request_id="c"), ask(request_id="d")]
        tasks = [asyncio.create_task(answer_to(router, request)) for request in requests]
        async with asyncio.timeout(_DEADLINE_S):
            while len(stopped.jobs) + len(other.jobs) < len(requests):
                await stopped.beats.get()
        held = {job.request_id for job in stopped.jobs}
        assert len(held) == 2
        stopped.freeze()
        async with asyncio.timeout(_DEADLINE_S):
            while len(other.jobs) < len(requests):
                await other.beats.get()
        assert _count(router, "prefill", "taken_over") == 0, "one hedge, which waits for its first token"
        other.before_first_tokens.open()
        answers = [await _end(router, task, request) for task, request in zip(tasks, requests, strict=True)]
        reasons = [answer.summary.ledger.reasons for answer in answers]
        assert sorted(reasons) == [(), (), ("prefill_hedged",), ("prefill_worker_lost",)]
        assert _count(router, "prefill", "taken_over") == 1


async def test_a_hedge_without_room_does_not_disturb_the_suspected_workers_request() -> None:
    async with _router() as router:
        task, prefill, stopped, other = await _stopped_decode(router, request := ask(max_tokens=12))
        prefill.refusals = [QueueFull("full")] * 3
        other.refusals = [QueueFull("full")] * 3
        async with asyncio.timeout(_DEADLINE_S):
            while not _count(router, "decode", "failed"):
                await prefill.beats.get()
        await _missed(router, stopped, 2)
        prefill.before_first_tokens.open()
        _wake(stopped)
        await _end(router, task, request)


async def test_a_client_that_leaves_ends_its_hedge_too() -> None:
    async with _router() as router:
        task, prefill, stopped, other = await _stopped_decode(router, ask(max_tokens=12))
        await _reached(prefill.before_first_tokens)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await asyncio.wait_for(prefill.cancelled.wait(), _DEADLINE_S)
        await other.until(lambda: not other.running)
        assert _count(router, "decode", "called_off") == 1
        _wake(stopped)
