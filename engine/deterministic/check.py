"""The check at load that one sequence's logits and KV have the same bits alone, with other sequences in the step, and
cut into other chunks."""

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cluster.errors import ModelRefused
from cluster.messages import Sampling
from engine.kv.pool import KvPool
from engine.scheduling.schedule import blocks_for
from engine.scheduling.step import Chunk, Sample, StepPlan
from engine.steps.runner import ModelRunner

_LENGTH = 150  # tokens: more than one tile of attention, and more than the largest row count of products
_SEED = 13
_SAMPLE = Sample(seed=0, position=0, sampling=Sampling())
# Lengths of the chunks, in turn, and of the other sequences' chunks before and behind each of them.
_WAYS = (
    ((_LENGTH,), ((1, 3), (17,))),
    ((1, 2, 3, 5, 7, 64), ()),
    ((33, 1, 1, 4, 9), ((2,), (1, 1, 5))),
    ((70, 1), ((40,), (11, 1))),
)


@dataclass(frozen=True, slots=True)
class _Outcome:
    logits: torch.Tensor  # [tokens, vocab]
    blocks: torch.Tensor  # the bytes of the sequence's own KV


def check(runner: ModelRunner, pool: KvPool, vocab_size: int, longest: int) -> str:
    """Check that results do not depend on the batch, and return a digest of them: machines with equal digests compute
    equal bits. The pool is zero before and after. Raises ModelRefused with the dependence found."""
    num_free = pool.num_blocks - max(sum(_blocks(pool, way)) for _, way in _WAYS)
    length = min(_LENGTH, longest, num_free * pool.layout.block_size)
    if length < 2:
        raise ModelRefused(f"--deterministic on: a pool of {pool.num_blocks} blocks is too small for the check")
    token_ids = torch.randint(vocab_size, (2 * _LENGTH,), generator=torch.Generator().manual_seed(_SEED)).tolist()
    try:
        base = _computed(runner, pool, token_ids, length, ((_LENGTH,), ()))
        for way in _WAYS:
            other = _computed(runner, pool, token_ids, length, way)
            same = (other.logits == base.logits).all(dim=-1)
            if not bool(same.all()) or not torch.equal(other.blocks, base.blocks):
                where = f"{int((~same).sum())} of {length} rows of logits" if not bool(same.all()) else "its KV"
                raise ModelRefused(
                    f"--deterministic on: {where} of a sequence differ in chunks of {way[0][:3]} tokens "
                    f"beside others of {way[1]}, on this machine"
                )
    finally:
        pool.raw.zero_()
    return hashlib.blake2b(base.logits.float().cpu().numpy().tobytes(), digest_size=6).hexdigest()


def _computed(
    runner: ModelRunner,
    pool: KvPool,
    token_ids: list[int],
    length: int,
    way: tuple[Sequence[int], Sequence[Sequence[int]]],
) -> _Outcome:
    pool.raw.zero_()
    lengths, company = way
    own = tuple(range(pool.num_blocks - 1, pool.num_blocks - 1 - blocks_for(length, pool.layout.block_size), -1))
    others = _company(pool, token_ids, company)
    rows, done = [], 0
    for asked in itertools.cycle(lengths):
        tokens = tuple(token_ids[done : min(done + asked, length)])
        chunk = Chunk(0, tokens, done, own, (_SAMPLE,) * len(tokens), num_draft_tokens=len(tokens) - 1)
        before = others[: len(others) // 2]
        logits = runner.logits(StepPlan((*before, chunk, *others[len(before) :])))
        rows.append(logits[len(before) :][: len(tokens)].clone())
        done += len(tokens)
        if done == length:
            return _Outcome(torch.cat(rows), pool.raw[list(own)].clone())
    raise AssertionError


def _company(pool: KvPool, token_ids: list[int], company: Sequence[Sequence[int]]) -> tuple[Chunk, ...]:
    """Return chunks of short sequences that share every step of the check."""
    chunks, first = [], 0
    for number, length in enumerate(itertools.chain.from_iterable(company), start=1):
        blocks = tuple(range(first, first + blocks_for(length, pool.layout.block_size)))
        chunks.append(Chunk(number, tuple(token_ids[-length - number : -number]), 0, blocks, (_SAMPLE,)))
        first += len(blocks)
    return tuple(chunks)


def _blocks(pool: KvPool, company: Sequence[Sequence[int]]) -> list[int]:
    return [blocks_for(length, pool.layout.block_size) for length in itertools.chain.from_iterable(company)]
