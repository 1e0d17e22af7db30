"""Tests of the whole path with real processes: every answer equals that of transformers, over real hand-offs."""

import asyncio
import math
import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.system.asking import Answer, ask, question
from tests.system.local_cluster import DEMO_MODEL, LocalCluster

pytestmark = pytest.mark.asyncio(loop_scope="session")

_NUM_PROMPTS = 200
_NUM_LONG = 20  # of three to seven chunks
_CONCURRENCY = 16
_BLOCK_SIZE = 16
_REFERENCE_BATCH = 20


@dataclass(frozen=True, slots=True)
class _Case:
    prompt: tuple[int, ...]
    max_tokens: int


@pytest.fixture(scope="session")
def cases() -> list[_Case]:
    """Prompts and answers of mixed lengths: one token, around block boundaries, many chunks."""
    numbers = random.Random(7)
    lengths = [1, 2, 15, 16, 17, 31, 32, 33, 64, 65, *(numbers.randint(129, 400) for _ in range(_NUM_LONG))]
    lengths += [numbers.randint(3, 110) for _ in range(_NUM_PROMPTS - len(lengths))]
    return [
        _Case(tuple(numbers.randrange(10, 900) for _ in range(length)), numbers.choice((1, 2, 5, 12, 20)))
        for length in lengths
    ]


@pytest.fixture(scope="session")
def expected(cases: list[_Case]) -> list[tuple[int, ...]]:
    """The greedy float32 answers of transformers.generate. Similar lengths are batched to save time."""
    torch.set_num_threads(1)
    model: Any = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)
    eos = model.generation_config.eos_token_id
    by_length = sorted(range(len(cases)), key=lambda i: len(cases[i].prompt))
    answers: dict[int, tuple[int, ...]] = {}
    for start in range(0, len(cases), _REFERENCE_BATCH):
        batch = by_length[start : start + _REFERENCE_BATCH]
        longest = max(len(cases[i].prompt) for i in batch)
        padded = [(0,) * (longest - len(cases[i].prompt)) + cases[i].prompt for i in batch]
        mask = [[0] * (longest - len(cases[i].prompt)) + [1] * len(cases[i].prompt) for i in batch]
        output = model.generate(
            torch.tensor(padded),
            attention_mask=torch.tensor(mask),
            max_new_tokens=max(cases[i].max_tokens for i in batch),
            do_sample=False,
            pad_token_id=eos,
        )
        for i, row in zip(batch, output[:, longest:].tolist(), strict=True):
            tokens = tuple(row[: cases[i].max_tokens])
            answers[i] = tokens[: tokens.index(eos) + 1] if eos in tokens else tokens
    return [answers[i] for i in range(len(cases))]


async def _answer_all(cluster: LocalCluster, cases: list[_Case]) -> list[Answer]:
    slots = asyncio.Semaphore(_CONCURRENCY)

    async def one(case: _Case) -> Answer:
        async with slots:
            return await ask(cluster, question(case.prompt, max_tokens=case.max_tokens))

    return await asyncio.gather(*(one(case) for case in cases))


@pytest.fixture(params=["shm", pytest.param("tcp", marks=pytest.mark.slow)])
def transport_and_cluster(request: pytest.FixtureRequest) -> tuple[str, LocalCluster]:
    """Two prefill and two decode workers that share one transport."""
    return request.param, request.getfixturevalue(f"{request.param}_cluster")


async def test_200_mixed_prompts_equal_transformers_and_every_one_is_handed_over(
    transport_and_cluster: tuple[str, LocalCluster], cases: list[_Case], expected: list[tuple[int, ...]]
) -> None:
    transport, cluster = transport_and_cluster
    await cluster.mend()
    before = await cluster.figures("prefill"), await cluster.figures("decode")

    answers = await _answer_all(cluster, cases)

    wrong = [i for i, answer in enumerate(answers) if answer.token_ids != expected[i]]
    assert not wrong, f"{len(wrong)} of {len(cases)} answers differ, first {wrong[:5]}\n{cluster.output()[-4000:]}"
    handed_over = [i for i, tokens in enumerate(expected) if len(tokens) > 1]  # one token needs no decode
    await _assert_bytes_moved(cluster, transport, cases, handed_over, answers)
    prefill, decode = await cluster.figures("prefill"), await cluster.figures("decode")
    assert prefill["prompts_done"] - before[0]["prompts_done"] == len(cases), "a prompt was prefilled twice"
    assert decode["local_prefills"] == before[1]["local_prefills"]
    ok = f"handoffs_ok_{transport}"
    assert decode[ok] - before[1][ok] == len(handed_over)
    await cluster.until_free()


async def _assert_bytes_moved(
    cluster: LocalCluster, transport: str, cases: list[_Case], handed_over: list[int], answers: list[Answer]
) -> None:
    block_bytes = {int((await cluster.inspect(name)).figures["block_bytes"]) for name in cluster.workers()}
    assert len(block_bytes) == 1
    for i in handed_over:
        ledger = answers[i].ledger
        num_blocks = math.ceil(len(cases[i].prompt) / _BLOCK_SIZE)
        assert (ledger.transport, ledger.kv_bytes) == (transport, num_blocks * min(block_bytes)), f"case {i}: {ledger}"
        assert not ledger.reasons
