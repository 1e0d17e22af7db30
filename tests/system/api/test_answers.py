"""Tests of the whole path with real processes: every answer equals that of transformers, over real hand-offs."""

import asyncio
import math
import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.system.rigs.members.asking import Answer, ask, question
from tests.system.rigs.processes.local_cluster import DEMO_MODEL, LocalCluster

pytestmark = pytest.mark.asyncio(loop_scope="session")

_NUM_PROMPTS = 200
_NUM_LONG = 20  # of three to seven chunks
_CONCURRENCY = 16
_BLOCK_SIZE = 16
_REFERENCE_BATCH = 20
_EOS = 0  # of the demo model


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


def _greedy_tokens(cases: list[_Case], answers: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Return for each token of the answers the one that transformers draws greedily, in float32, after the prompt and
    the answer's tokens before it. An answer that equals this is the greedy one. Similar lengths are batched to save
    time; what pads a row comes after all that it asks for."""
    torch.set_num_threads(1)
    model: Any = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)
    rows = [(*case.prompt, *answer) for case, answer in zip(cases, answers, strict=True)]
    by_length = sorted(range(len(rows)), key=lambda i: len(rows[i]))
    found: dict[int, tuple[int, ...]] = {}
    for start in range(0, len(rows), _REFERENCE_BATCH):
        batch = by_length[start : start + _REFERENCE_BATCH]
        longest = len(rows[batch[-1]])
        with torch.inference_mode():
            logits = model(torch.tensor([rows[i] + (0,) * (longest - len(rows[i])) for i in batch])).logits
        for i, row in zip(batch, logits.argmax(-1).tolist(), strict=True):
            found[i] = tuple(row[len(cases[i].prompt) - 1 : len(rows[i]) - 1])
    return [found[i] for i in range(len(rows))]


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
    transport_and_cluster: tuple[str, LocalCluster], cases: list[_Case]
) -> None:
    transport, cluster = transport_and_cluster
    await cluster.mend()
    before = await cluster.figures("prefill"), await cluster.figures("decode")

    answers = await _answer_all(cluster, cases)

    given = [answer.token_ids for answer in answers]
    expected = _greedy_tokens(cases, given)
    wrong = [i for i, tokens in enumerate(given) if tokens != expected[i] or not _is_whole(cases[i], tokens)]
    assert not wrong, f"{len(wrong)} of {len(cases)} answers differ, first {wrong[:5]}\n{cluster.output()[-4000:]}"
    handed_over = [i for i, tokens in enumerate(given) if len(tokens) > 1]  # one token needs no decode
    await _assert_bytes_moved(cluster, transport, cases, handed_over, answers)
    prefill, decode = await cluster.figures("prefill"), await cluster.figures("decode")
    assert prefill["prompts_done"] - before[0]["prompts_done"] == len(cases), "a prompt was prefilled twice"
    assert decode["local_prefills"] == before[1]["local_prefills"]
    ok = f"handoffs_ok_{transport}"
    assert decode[ok] - before[1][ok] == len(handed_over)
    await cluster.until_free()


def _is_whole(case: _Case, tokens: tuple[int, ...]) -> bool:
    """Return whether the answer ends at its maximum length or with the first end-of-sequence token."""
    ends_early = _EOS in tokens and tokens.index(_EOS) == len(tokens) - 1 < case.max_tokens
    return ends_early or (_EOS not in tokens and len(tokens) == case.max_tokens)


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
