"""Sequences that a runner continues with draft tokens and without a scheduler, for the tests of speculation."""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from cluster.messages import Sampling
from cluster.request_size import blocks_for
from engine.batch import PackedBatch
from engine.kv.layout import LayerShape, lay_out
from engine.kv.pool import KvPool
from engine.scheduling.step import Chunk, DraftRequest, Sample, StepPlan
from engine.speculation.drafter import Drafter, TokenProposer
from engine.steps.runner import ModelRunner

BLOCK_SIZE = 8


class TableForward:
    """A model whose distributions are known exactly: the logits after a token are a row of a table."""

    def __init__(self, table: torch.Tensor) -> None:
        self.table = table  # [vocab, vocab]

    def __call__(self, batch: PackedBatch) -> torch.Tensor:
        return self.table[batch.input_ids[0, batch.logit_rows]]


def table_runner(table: torch.Tensor, num_blocks: int) -> ModelRunner:
    pool = KvPool(lay_out([LayerShape(1, 1, 1)], BLOCK_SIZE, "float32"), num_blocks)
    return ModelRunner(TableForward(table), pool)


@dataclass(slots=True)
class FixedDrafter:
    """Always proposes `num_draft_tokens` draft tokens, from the test's own proposer."""

    proposer: TokenProposer
    num_draft_tokens: int
    judged: list[tuple[int, int]] = field(default_factory=list)

    def propose(self, token_ids: Sequence[int], limit: int, num_sequences: int) -> tuple[int, ...]:
        return self.proposer.propose(token_ids, min(limit, self.num_draft_tokens))

    def request(self, token_ids: list[int], num_sequences: int) -> DraftRequest | None:
        return None

    def judge(self, num_draft_tokens: int, num_right: int) -> None:
        self.judged.append((num_draft_tokens, num_right))

    def store(self, num_known: int, draft_tokens: tuple[int, ...]) -> None:
        raise AssertionError


@dataclass(slots=True)
class Oracle:
    """A drafter that proposes the tokens that will be drawn, or other tokens where `is_right` is False."""

    truth: Sequence[int]
    is_right: Iterable[bool]
    vocab_size: int

    def propose(self, token_ids: Sequence[int], max_draft_tokens: int) -> tuple[int, ...]:
        coming = self.truth[len(token_ids) : len(token_ids) + max_draft_tokens]
        picks = zip(coming, self.is_right, strict=False)
        return tuple(token if right else (token + 1) % self.vocab_size for token, right in picks)


@dataclass(slots=True)
class Talk:
    """A sequence, with `num_computed` and the other fields as the scheduler keeps them."""

    number: int
    token_ids: list[int]
    block_ids: tuple[int, ...]
    drafter: Drafter | None = None
    seed: int = 0
    sampling: Sampling = field(default_factory=Sampling)
    num_computed: int = 0
    num_draft_tokens: int = 0
    num_right: int = 0

    def chunk(self, limit: int) -> Chunk:
        known, end = tuple(self.token_ids[self.num_computed :]), len(self.token_ids)
        draft_tokens: tuple[int, ...] = ()
        draft = None
        if self.drafter is not None:
            draft_tokens = self.drafter.propose(self.token_ids, limit, 1) if self.num_computed else ()
            draft = self.drafter.request(self.token_ids, 1)
        return Chunk(
            sequence_id=self.number,
            token_ids=known + draft_tokens,
            start=self.num_computed,
            block_ids=self.block_ids[: blocks_for(end + len(draft_tokens), BLOCK_SIZE)],
            samples=tuple(Sample(self.seed, end + index, self.sampling) for index in range(len(draft_tokens) + 1)),
            num_draft_tokens=len(draft_tokens),
            draft=draft,
        )

    def grow(self, chunk: Chunk, drawn: Sequence[int], draft_tokens: tuple[int, ...] | None) -> None:
        self.num_computed = len(self.token_ids) + len(drawn) - 1
        self.token_ids += drawn
        self.num_draft_tokens += chunk.num_draft_tokens
        self.num_right += len(drawn) - 1
        if self.drafter is not None:
            if chunk.num_draft_tokens:
                self.drafter.judge(chunk.num_draft_tokens, len(drawn) - 1)
            if chunk.draft is not None and draft_tokens is not None:
                self.drafter.store(len(self.token_ids), draft_tokens)


def talks_of(count: int, prompt: Sequence[int], most_tokens: int) -> list[Talk]:
    """Return equal sequences, each with its own blocks and its number as seed."""
    width = blocks_for(most_tokens, BLOCK_SIZE)
    return [Talk(i, list(prompt), tuple(range(i * width, (i + 1) * width)), seed=i) for i in range(count)]


def step(runner: ModelRunner, talks: Sequence[Talk], most_tokens: int) -> None:
    plan = StepPlan(tuple(talk.chunk(most_tokens - len(talk.token_ids) - 1) for talk in talks))
    result = runner.run(plan)
    for talk, chunk, drawn, draft_tokens in itertools.zip_longest(
        talks, plan.chunks, result.tokens, result.draft_tokens
    ):
        talk.grow(chunk, [token.token_id for token in drawn], draft_tokens)


def speak(runner: ModelRunner, talks: Sequence[Talk], most_tokens: int) -> int:
    """Run until every sequence has `most_tokens` tokens. Return the number of steps, summed over the sequences."""
    num_steps = 0
    while going := [talk for talk in talks if len(talk.token_ids) < most_tokens]:
        step(runner, going, most_tokens)
        num_steps += len(going)
    return num_steps
