"""The last resort, on any device: each sequence's KV gathered, then attention written out. Slow; does everything."""

from dataclasses import dataclass, replace

import torch

from engine.attention.dense import attend_dense, visibility
from engine.attention.interface import AttentionOptions, LayerKv
from engine.batch import PackedBatch
from engine.kv.quantised_kv import restore

_SCORES_AT_ONCE = 1 << 25  # 128 MiB in float32, and as much again for their softmax


class GatherBackend:
    """One sequence at a time; holds nothing between calls."""

    def attend(self, query: torch.Tensor, kv: LayerKv, batch: PackedBatch, options: AttentionOptions) -> torch.Tensor:
        output = query.new_empty(*query.shape[:2], kv.values.shape[-1])
        for sequence, rows in enumerate(batch.rows):
            output[rows] = attend_sequence(query[rows], gather_context(kv, batch, sequence, options), options)
        return output


@dataclass(frozen=True, slots=True, eq=False)
class Context:
    """What the queries of one chunk may see: K and V in order, from position `first` up to the chunk's last token."""

    first: int
    start: int  # position of the first query
    keys: torch.Tensor  # [context, kv_heads, dim]
    values: torch.Tensor


def gather_context(kv: LayerKv, batch: PackedBatch, sequence: int, options: AttentionOptions) -> Context:
    """Copies a sequence's blocks out of the pool, without those that its window has left behind."""
    block_size = kv.keys.shape[1]
    start = batch.starts[sequence]
    end = start + batch.query_lens[sequence]
    first_block = 0 if options.sliding_window is None else max(0, start + 1 - options.sliding_window) // block_size
    block_ids = batch.block_tables[sequence, first_block : -(-end // block_size)]
    first = first_block * block_size
    keys, values = (
        take_elements(view, scales, block_ids, kv.new_keys.dtype)[: end - first]
        for view, scales in ((kv.keys, kv.key_scales), (kv.values, kv.value_scales))
    )
    return Context(first=first, start=start, keys=keys, values=values)


def take_elements(
    view: torch.Tensor, scales: torch.Tensor | None, block_ids: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """As `take_blocks`, with codes restored to `dtype`."""
    taken = take_blocks(view, block_ids)
    return taken if scales is None else restore(taken, take_blocks(scales, block_ids), dtype)


def take_blocks(view: torch.Tensor, block_ids: torch.Tensor) -> torch.Tensor:
    """The tokens of these blocks, in order: `[num_blocks, block_size, kv_heads, dim]` -> `[tokens, kv_heads, dim]`.
    A block is copied as one run of bytes, five times as fast on CPU as by indexing with several axes; float8 as int8,
    as not every device selects float8."""
    codes = view.view(torch.int8) if view.dtype == torch.float8_e4m3fn else view
    return codes.flatten(1).index_select(0, block_ids).view(view.dtype).view(-1, *view.shape[2:])


def attend_sequence(query: torch.Tensor, context: Context, options: AttentionOptions) -> torch.Tensor:
    """The queries `[queries, heads, dim]` of one sequence over its context, -> `[queries, heads, value_dim]`. So many
    queries at a time that their scores stay small, however long the context is."""
    size = max(1, _SCORES_AT_ONCE // (query.shape[1] * len(context.keys)))
    parts = [
        _attend_queries(part, replace(context, start=context.start + number * size), options)
        for number, part in enumerate(torch.split(query, size))
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _attend_queries(query: torch.Tensor, context: Context, options: AttentionOptions) -> torch.Tensor:
    num_queries, num_heads, dim = query.shape
    num_keys, num_kv_heads, _ = context.keys.shape
    group = num_heads // num_kv_heads
    visible = visibility(context.start, num_queries, context.first, num_keys, options.sliding_window)
    output = attend_dense(
        query.view(num_queries, num_kv_heads, group, dim).permute(1, 2, 0, 3),  # [kv_heads, group, queries, dim]
        context.keys.transpose(0, 1)[:, None],  # [kv_heads, 1, context, dim]
        context.values.transpose(0, 1)[:, None],
        visible.to(query.device),
        None if options.sinks is None else options.sinks.view(num_kv_heads, group, 1, 1),
        options,
    )
    return output.permute(2, 0, 1, 3).reshape(num_queries, num_heads, -1)
