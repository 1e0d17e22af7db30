"""Makes a runner deterministic, checks that it is, and describes how for the worker's report and fingerprint.

Without compiled kernels the plain forward runs over a padded step, so that no array leaves the processor's vector units
a remainder."""

import dataclasses
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from cluster.errors import ModelRefused
from cluster.messages import LayoutFingerprint
from engine.attention.fixed_tiles import FixedTilesBackend
from engine.batch import PackedBatch
from engine.cpu.compiled_forward import CompiledForward
from engine.deterministic.check import check
from engine.deterministic.fixed_rows import ROW_COUNTS, fix_own_products, fix_rows
from engine.kv.pool import KvPool
from engine.model.loaded import LoadedModel
from engine.steps.forward import PlainForward
from engine.steps.runner import ModelRunner


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
