"""Tests that after the death of a decode worker every field of the request still holds."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from cluster.messages import DecodeJob, PrefillJob, TokenLogprobs
from router.requests import GenerateRequest, SamplingParams, StopConditions
from tests.system.rigs.members.router_harness import (
    Answer,
    RouterUnderTest,
    answer_to,
    ask,
    expected_tokens,
    router_under_test,
)

_WARM = SamplingParams(temperature=0.8, top_k=20, top_p=0.9, min_p=0.05, seed=7)
_MANY = replace(
    ask(n=3, logprobs=2),
    sampling=_WARM,
    stop=StopConditions(max_tokens=24, min_tokens=6, ignore_eos=True, stop_token_ids=(3, 5)),
    cache_salt="tenant",
    priority=-3,
    is_batch=True,
)
_AT = 9  # tokens that the client has then


async def _undisturbed(request: GenerateRequest) -> Answer:
    async with router_under_test() as router:
        await router.add_prefill("p0")
        await router.add_decode("d0")
        await router.connected()
        return await answer_to(router, request)


async def _interrupted(router: RouterUnderTest, request: GenerateRequest) -> tuple[Answer, list[Any]]:
    """Return the answer, and every job that a worker received for it, in order."""
    prefill, dying = await router.add_prefill("p0"), await router.add_decode("d0")
    await router.connected()
    dying.pause_at = _AT
    task = asyncio.create_task(answer_to(router, request))
    await asyncio.wait_for(dying.paused.wait(), 10)
    heir = await router.add_decode("d1")
    await router.connected()
    await dying.die()
    answer = await task
    assert "decode_worker_lost" in answer.summary.ledger.reasons
    return answer, [*prefill.jobs, *dying.jobs, *heir.jobs]


def _delivered(answer: Answer) -> dict[str, object]:
    """Return everything that the client received except times and places."""
    logprobs: dict[int, list[TokenLogprobs]] = {}
    for output in answer.outputs:
        for delta in output.deltas:
            logprobs.setdefault(delta.choice, []).extend(delta.logprobs)
    return {
        "token_ids": answer.token_ids,
        "text": answer.text,
        "finish_reasons": answer.finish_reasons,
        "stop_causes": answer.stop_causes,
        "logprobs": logprobs,
        "usage": answer.summary.usage,
    }


def _wanted(job: PrefillJob | DecodeJob) -> tuple[object, ...]:
    """Return the part of a job that the request itself decides."""
    prompt = (
        job.prompt_token_ids if isinstance(job, DecodeJob) else job.token_ids[: len(job.token_ids) - job.num_committed]
    )
    return prompt, job.sampling, job.stops, job.cache_salt, job.priority, job.is_batch, job.request_id


@pytest.mark.parametrize("request_", [ask(max_tokens=24), _MANY], ids=["greedy", "everything"])
async def test_a_resumed_answer_equals_the_undisturbed_one(request_: GenerateRequest) -> None:
    undisturbed = await _undisturbed(request_)
    async with router_under_test() as router:
        answer, jobs = await _interrupted(router, request_)
    assert _delivered(answer) == _delivered(undisturbed)
    assert len({_wanted(job) for job in jobs}) == 1


async def test_every_choice_continues_with_its_own_seed_and_tokens() -> None:
    async with router_under_test() as router:
        answer, jobs = await _interrupted(router, _MANY)
    seeds = jobs[0].seeds
    for job in jobs:
        if isinstance(job, DecodeJob):
            for start in job.sequences:
                said = answer.token_ids[seeds.index(start.seed)]
                assert list(start.committed_token_ids) == said[: len(start.committed_token_ids)]
    again = [
        start for job in jobs if isinstance(job, DecodeJob) for start in job.sequences if start.committed_token_ids
    ]
    assert {start.seed for start in again} == set(seeds)


async def test_a_stop_string_that_spans_a_failover_is_found() -> None:
    async with router_under_test() as router:
        tokens, stop = _text_across(router, request := ask(max_tokens=24))
    stopping = replace(request, stop=StopConditions(max_tokens=24, stop=(stop,)))
    undisturbed = await _undisturbed(stopping)
    async with router_under_test() as router:
        answer, _ = await _interrupted(router, stopping)
    assert _delivered(answer) == _delivered(undisturbed)
    assert (answer.finish_reasons[0], answer.stop_causes[0]) == ("stop", stop)
    assert _AT < len(answer.token_ids[0]) < len(tokens)


async def test_a_stop_string_that_min_tokens_forbids_stays_forbidden() -> None:
    async with router_under_test() as router:
        tokens, stop = _text_across(router, request := ask(max_tokens=24))
    later = replace(request, stop=StopConditions(max_tokens=24, min_tokens=_AT + 4, stop=(stop,)))
    async with router_under_test() as router:
        answer, _ = await _interrupted(router, later)
    assert answer.token_ids[0] == tokens
    assert answer.finish_reasons[0] == "length"


async def test_a_stop_token_after_a_failover_ends_the_choice() -> None:
    async with router_under_test() as router:
        tokens = expected_tokens(router, request := ask(max_tokens=24))
    stopping = replace(request, stop=StopConditions(max_tokens=24, stop_token_ids=(tokens[_AT + 3],)))
    async with router_under_test() as router:
        answer, _ = await _interrupted(router, stopping)
    assert answer.token_ids[0] == tokens[: _AT + 4]
    assert (answer.finish_reasons[0], answer.stop_causes[0]) == ("stop", tokens[_AT + 3])


def _text_across(router: RouterUnderTest, request: GenerateRequest) -> tuple[list[int], str]:
    """Return the answer's tokens, and a piece of its text that spans the worker's death."""
    tokens = expected_tokens(router, request)
    before, whole = router.tokenization.decode(tokens[:_AT]), router.tokenization.decode(tokens)
    stop = whole[len(before) - 2 : len(before) + 2]
    assert whole.index(stop) == len(before) - 2, "it stands there for the first time"
    return tokens, stop
