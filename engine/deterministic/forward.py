"""The plain forward over a padded step, so that no array leaves the processor's vector units a remainder."""

import dataclasses

import torch
from transformers import PreTrainedModel

from engine.attention.fixed_tiles import FixedTilesBackend
from engine.batch import PackedBatch
from engine.deterministic.fixed_rows import ROW_COUNTS
from engine.kv.pool import KvPool
from engine.steps.forward import PlainForward


class FixedForward:
    """A Forward whose rows have the same bits in any step. Its model's products are FixedRows."""

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
