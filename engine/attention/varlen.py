"""Attention on CUDA by torch's own FlashAttention kernels (`torch.nn.attention.varlen`), over the same blocks in place.

It requires block sizes that are multiples of 256 tokens, and supports neither soft caps nor sinks.
"""

import torch
import torch.nn.functional as F
from torch.nn.attention.varlen import varlen_attn

from engine.attention.interface import AttentionOptions, LayerKv
from engine.batch import PackedBatch


class VarlenBackend:
    """Attention by torch's `varlen_attn`. Keeps the newest step's tables as int32, the type that the kernels read."""

    def __init__(self) -> None:
        self._batch: PackedBatch | None = None
        self._tables: tuple[torch.Tensor, ...] = ()

    def for_graph(self, batch: PackedBatch) -> "VarlenBackend":
        return VarlenBackend()

    def prepare(self, batch: PackedBatch) -> None:
        """Do nothing on the host: the conversions are part of the captured graph."""
        self._batch = None

    def attend(self, query: torch.Tensor, kv: LayerKv, batch: PackedBatch, options: AttentionOptions) -> torch.Tensor:
        if batch is not self._batch:
            self._batch, self._tables = batch, _in_32_bits(batch)
        query_starts, context_starts, context_lens, block_tables = self._tables
        output = varlen_attn(
            query if query.stride(2) == 1 else query.contiguous(),
            kv.keys,
            kv.values,
            query_starts,
            context_starts,
            max(batch.query_lens),
            block_tables.shape[1] * kv.keys.shape[1],
            scale=options.scaling,
            window_size=(-1 if options.sliding_window is None else options.sliding_window - 1, 0),
            enable_gqa=query.shape[1] != kv.keys.shape[2],
            seqused_k=context_lens,
            block_table=block_tables,
        )
        assert isinstance(output, torch.Tensor)
        return output


def _in_32_bits(batch: PackedBatch) -> tuple[torch.Tensor, ...]:
    """Return int32 (query starts, context starts, context lengths, block tables)."""
    context_lens = batch.context_lens.to(torch.int32)
    context_starts = F.pad(batch.context_lens.cumsum(0), (1, 0)).to(torch.int32)
    return batch.query_starts.to(torch.int32), context_starts, context_lens, batch.block_tables.to(torch.int32)
