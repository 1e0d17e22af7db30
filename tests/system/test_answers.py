"""The whole path with real processes: every answer is what transformers would have said, every hand-off real."""

import asyncio
import math
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from cluster.wire import pack_ids, unpack_ids
from tandem.v1 import inference_pb2
from tests.system.local_cluster import DEMO_MODEL, LocalCluster

_NUM_PROMPTS = 200
_CONCURRENCY = 16
_BLOCK_SIZE = 16
_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class _Case:
    prompt: tuple[int, ...]
    max_tokens: int


@pytest.fixture(scope="session")
def cases() -> list[_Case]:
    """Mixed lengths: one token, around block boundaries, many chunks; short and longer answers."""
    numbers = random.Random(7)
    lengths = [1, 2, 15, 16, 17, 31, 32, 33, 64, 65] + [numbers.randint(3, 400) for _ in range(_NUM_PROMPTS - 10)]
    return [
        _Case(tuple(numbers.randrange(10, 900) for _ in range(length)), numbers.choice((1, 2, 5, 12, 20)))
        for length in lengths
    ]


@pytest.fixture(scope="session")
def expected(cases: list[_Case]) -> list[tuple[int, ...]]:
    """What transformers.generate says, greedy, float32."""
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)
    answers = []
    for case in cases:
        prompt = torch.tensor([case.prompt])
        output = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=case.max_tokens, do_sample=False
        )
        answers.append(tuple(output[0, len(case.prompt) :].tolist()))
    return answers


async def _answer(inference: object, case: _Case) -> tuple[tuple[int, ...], inference_pb2.Summary]:
    request = inference_pb2.GenerateRequest(
        token_ids=pack_ids(case.prompt),
        sampling=inference_pb2.SamplingParams(temperature=0.0),
        stop=inference_pb2.StopConditions(max_tokens=case.max_tokens),
    )
    tokens: list[int] = []
    summary = None
    async for response in inference.Generate(request, timeout=_TIMEOUT_S):  # type: ignore[attr-defined]
        for delta in response.deltas:
            assert delta.first_index == len(tokens), "a token was repeated or is missing"
            tokens.extend(unpack_ids(delta.token_ids))
        if response.HasField("summary"):
            summary = response.summary
    assert summary is not None, "the stream ended without its summary"
    return tuple(tokens), summary


async def _answer_all(cluster: LocalCluster, cases: list[_Case]) -> list[tuple[tuple[int, ...], inference_pb2.Summary]]:
    slots = asyncio.Semaphore(_CONCURRENCY)
    async with cluster.channel() as channel:
        inference = cluster.inference(channel)

        async def one(case: _Case) -> tuple[tuple[int, ...], inference_pb2.Summary]:
            async with slots:
                return await _answer(inference, case)

        return await asyncio.gather(*(one(case) for case in cases))


@pytest.fixture(params=["shm", "tcp"])
async def cluster(
    request: pytest.FixtureRequest, redis_url: str, tmp_path: Path
) -> AsyncIterator[tuple[LocalCluster, str]]:
    """Two prefill and two decode workers, one transport."""
    transport = request.param
    flags = ("--dtype", "float32", "--kv-transports", transport, "--max-prefill-tokens", "64", "--num-blocks", "512")
    cluster = LocalCluster(redis_url, tmp_path, flags=flags)
    try:
        yield await cluster.start(prefill=2, decode=2), transport
    finally:
        await cluster.stop()


@pytest.mark.timeout(300)
async def test_200_mixed_prompts_equal_transformers_and_every_one_is_handed_over(
    cluster: tuple[LocalCluster, str], cases: list[_Case], expected: list[tuple[int, ...]]
) -> None:
    running, transport = cluster

    answers = await _answer_all(running, cases)

    wrong = [i for i, (tokens, _) in enumerate(answers) if tokens != expected[i]]
    assert not wrong, f"{len(wrong)} of {len(cases)} answers differ, first {wrong[:5]}\n{running.output()[-4000:]}"
    await _assert_handed_over(running, transport, cases, expected, [summary for _, summary in answers])


async def _assert_handed_over(
    cluster: LocalCluster,
    transport: str,
    cases: list[_Case],
    expected: list[tuple[int, ...]],
    summaries: list[inference_pb2.Summary],
) -> None:
    """Those that one token does not end: all by this transport, none prefilled twice or locally, bytes as computed."""
    reports = {name: await cluster.inspect(name) for name in cluster.workers()}
    block_bytes = {int(report.figures["block_bytes"]) for report in reports.values()}
    assert len(block_bytes) == 1
    handed_over = [i for i, tokens in enumerate(expected) if len(tokens) > 1]
    for i in handed_over:
        ledger = summaries[i].ledger
        num_blocks = math.ceil(len(cases[i].prompt) / _BLOCK_SIZE)
        assert (ledger.transport, ledger.kv_bytes) == (transport, num_blocks * min(block_bytes)), f"case {i}: {ledger}"
        assert not ledger.reasons
    figures = {name: dict(report.figures) for name, report in reports.items()}
    decodes = [figures[name] for name in figures if name.startswith("decode")]
    prefills = [figures[name] for name in figures if name.startswith("prefill")]
    assert sum(f["prompts_done"] for f in prefills) == len(cases), "a prompt was prefilled twice"
    assert sum(f["local_prefills"] for f in decodes) == 0
    assert sum(f[f"handoffs_ok_{transport}"] for f in decodes) == len(handed_over)
    for name, report in reports.items():
        assert report.violation == "", f"{name}: {report.violation}"
        in_use = {state: count for state, count in report.blocks.items() if state not in ("free", "cached") and count}
        assert not in_use, f"{name} still has {in_use}"
