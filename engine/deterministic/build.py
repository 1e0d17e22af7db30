"""Makes a runner deterministic, checks that it is, and describes how for the worker's report and fingerprint.

Without compiled kernels the plain forward runs over a padded step, so that no array leaves the processor's vector units
a remainder."""

import dataclasses
import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from cluster.errors import ModelRefused
from cluster.messages import LayoutFingerprint, Sampling
from cluster.request_size import blocks_for
from engine.attention.fixed_tiles import FixedTilesBackend
from engine.batch import PackedBatch
from engine.cpu.compiled_forward import CompiledForward
from engine.deterministic.fixed_rows import ROW_COUNTS, fix_own_products, fix_rows
from engine.kv.pool import KvPool
from engine.model.loaded import LoadedModel
from engine.scheduling.step import Chunk, Sample, StepPlan
from engine.steps.forward import PlainForward
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
class Determinism:
    """The method by which determinism was reached, and the digest of the check's results."""

    path: str
    digest: str
    report: str

    def marked(self, fingerprint: LayoutFingerprint) -> LayoutFingerprint:
        """Return the fingerprint extended by the digest, so that only workers that compute the same bits exchange
        KV."""
        mark = f"{fingerprint.dtype}, deterministic by {self.path} ({self.digest})"
        return dataclasses.replace(fingerprint, dtype=mark)


def make_deterministic(loaded: LoadedModel, runner: ModelRunner, pool: KvPool) -> Determinism:
    """Make the engine deterministic: keep the compiled kernels, or replace any other forward by the plain one with
    fixed shapes. Raises ModelRefused if results still depend on the batch."""
    if isinstance(runner.forward, CompiledForward):
        digest = check(runner, pool, loaded.info.vocab_size, loaded.info.max_model_len)
        return Determinism("compiled kernels", digest, f"deterministic: the compiled kernels, verified ({digest})")
    counts = fix_rows(loaded.model)
    fix_own_products(loaded.model)
    digest, queries = _fixed(loaded, runner, pool)
    how = f"products of {'/'.join(map(str, counts))} rows, attention of {queries}"
    return Determinism("fixed shapes", digest, f"deterministic: {how}, verified ({digest})")


def _fixed(loaded: LoadedModel, runner: ModelRunner, pool: KvPool) -> tuple[str, str]:
    """Compute many queries of a chunk at once if that yields the same bits as one query at a time."""
    try:
        runner.forward = FixedForward(loaded.model, pool, wide=True)
        return check(runner, pool, loaded.info.vocab_size, loaded.info.max_model_len), "many queries"
    except ModelRefused:
        runner.forward = FixedForward(loaded.model, pool, wide=False)
        return check(runner, pool, loaded.info.vocab_size, loaded.info.max_model_len), "one query"


class FixedForward:
    """A Forward whose rows have the same bits in any step. The products of its model are FixedRows."""

    def __init__(self, model: PreTrainedModel, pool: KvPool, wide: bool) -> None:
        self._plain = PlainForward(model, pool, FixedTilesBackend(wide))

    def __call__(self, batch: PackedBatch) -> torch.Tensor:
        return self._plain(padded(batch))[: len(batch.logit_rows)]


def padded(batch: PackedBatch) -> PackedBatch:
    """Repeat the last token and the last logit row up to a multiple of the least number of rows. The repeated token
    gets the same bits each time and is written to the same position."""
    num_tokens, num_rows = batch.input_ids.shape[1], len(batch.logit_rows)
    more_tokens, more_rows = (-num % ROW_COUNTS[0] for num in (num_tokens, num_rows))
    if not more_tokens and not more_rows:
        return batch

    def again(tensor: torch.Tensor, times: int) -> torch.Tensor:
        return torch.cat([tensor, tensor[..., -1:].expand(*tensor.shape[:-1], times)], dim=-1)

    return dataclasses.replace(
        batch,
        input_ids=again(batch.input_ids, more_tokens),
        position_ids=again(batch.position_ids, more_tokens),
        slot_blocks=again(batch.slot_blocks, more_tokens),
        slot_offsets=again(batch.slot_offsets, more_tokens),
        logit_rows=again(batch.logit_rows, more_rows) if num_rows else batch.logit_rows,
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
