"""Tests of --deterministic in 16 bits with real processes: other sequences of the batch, draft tokens and a worker's
death change no bit.
"""

import asyncio
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

import pytest
import pytest_asyncio

from tandem.v1 import inference_pb2
from tests.faults.control import FaultControl, Worker
from tests.faults.faulty_transport import Fault
from tests.system.rigs.members.asking import Answer, Asked, ask, asked, question
from tests.system.rigs.processes.local_cluster import LocalCluster

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

_FLAGS = ("--dtype", "bfloat16", "--deterministic", "on", "--speculation", "prompt", "--max-prefill-tokens", "48")
_DEADLINE_S = 60.0
_PROMPTS = [tuple(range(30 + shift, 30 + shift + length)) for shift, length in ((0, 5), (7, 40), (3, 90), (90, 64))]


@dataclass
class Speculating:
    cluster: LocalCluster
    control: FaultControl

    async def kill_in_a_step(self, orders: Worker, answers: Sequence[Asked]) -> None:
        """Kill decode0 in the middle of a step, once an answer has 20 tokens. Raises TimeoutError if it has no step."""
        first = [asyncio.create_task(answer.until(20)) for answer in answers]
        await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        await orders.order(Fault.HELD)
        async with asyncio.timeout(_DEADLINE_S):
            assert await orders.injected() is Fault.HELD
        self.cluster.members["decode0"].send_signal(signal.SIGKILL)
        await asyncio.gather(*first)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def speculating(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Speculating]:
    directory = tmp_path_factory.mktemp("deterministic")
    cluster, control = LocalCluster(redis_url, directory, flags=_FLAGS), FaultControl(directory)
    await control.start()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("FAULT_CONTROL", str(control.path))
            await cluster.start_member("decode0", "tests.faults.hanging_worker", _FLAGS)
        await cluster.start_member("decode1", "decode_worker", _FLAGS)
        await cluster.start(prefill=1, decode=0)
        yield Speculating(cluster, control)
    finally:
        await cluster.stop()
        await control.stop()


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


async def test_an_answer_has_the_same_bits_alone_in_a_batch_and_after_its_worker_died(speculating: Speculating) -> None:
    cluster = speculating.cluster
    alone = [_bits(await ask(cluster, request)) for request in _questions()]
    together = await asyncio.gather(*(ask(cluster, request) for request in _questions()))
    assert list(map(_bits, together)) == alone

    async with AsyncExitStack() as stack:
        answers = [await stack.enter_async_context(asked(cluster, request)) for request in _questions()]
        await speculating.kill_in_a_step(await speculating.control.worker("decode0"), answers)
        ended = await asyncio.gather(*(answer.end() for answer in answers))
    assert [_bits(answer)[0] for answer in ended] == [token_ids for token_ids, _ in alone]
    assert any(answer.ledger.reasons for answer in ended), "no request lost a worker"


async def test_draft_tokens_were_proposed_and_accepted(speculating: Speculating) -> None:
    """Any decode worker may have served a request. All drafts of the first, greedy one are accepted."""
    for request in _questions():
        await ask(speculating.cluster, request)
    figures = await speculating.cluster.figures("decode")
    assert 0 < figures["draft_tokens_accepted"] < figures["draft_tokens"]
