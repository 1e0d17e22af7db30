"""--deterministic on, in 16 bits, between real processes: company, guesses and the death of a worker change no bit."""

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
import pytest_asyncio

from tandem.v1 import inference_pb2
from tests.system.asking import Answer, ask, asked, question
from tests.system.local_cluster import LocalCluster

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

_FLAGS = ("--dtype", "bfloat16", "--deterministic", "on", "--speculation", "prompt", "--max-prefill-tokens", "48")
_PROMPTS = [tuple(range(30 + shift, 30 + shift + length)) for shift, length in ((0, 5), (7, 40), (3, 90), (90, 64))]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def guessing(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalCluster]:
    cluster = LocalCluster(redis_url, tmp_path_factory.mktemp("deterministic"), flags=_FLAGS)
    try:
        yield await cluster.start(prefill=1, decode=2)
    finally:
        await cluster.stop()


def _questions() -> list[inference_pb2.GenerateRequest]:
    sampling = [inference_pb2.SamplingParams(temperature=temperature, seed=5) for temperature in (0.0, 0.9)]
    return [
        question(prompt, max_tokens=200, sampling=params, ignore_eos=True, logprobs=1)
        for prompt in _PROMPTS
        for params in sampling
    ]


def _bits(answer: Answer) -> tuple[tuple[int, ...], list[float]]:
    assert len(answer.token_ids) == 200
    return answer.token_ids, [told.chosen.logprob for told in answer.logprobs]


async def test_an_answer_has_the_same_bits_alone_in_company_and_after_its_worker_died(guessing: LocalCluster) -> None:
    alone = [_bits(await ask(guessing, request)) for request in _questions()]
    together = await asyncio.gather(*(ask(guessing, request) for request in _questions()))
    assert list(map(_bits, together)) == alone

    async with AsyncExitStack() as stack:
        answers = [await stack.enter_async_context(asked(guessing, request)) for request in _questions()]
        await asyncio.gather(*(answer.until(20) for answer in answers))
        guessing.members["decode0"].send_signal(signal.SIGKILL)
        ended = await asyncio.gather(*(answer.end() for answer in answers))
    assert [_bits(answer)[0] for answer in ended] == [token_ids for token_ids, _ in alone]
    assert any(answer.ledger.reasons for answer in ended), "nobody lost a worker"


async def test_guesses_were_made_and_came_true(guessing: LocalCluster) -> None:
    await ask(guessing, _questions()[0])
    figures = await guessing.inspect("decode1")
    assert 0 < figures.figures["guesses_accepted"] < figures.figures["guesses"]
