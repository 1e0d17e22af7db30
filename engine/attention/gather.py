"""Attention for any device and any option: gathers the KV of each sequence and computes attention from its definition.
It is slow, and used only where no other back end can be."""

from dataclasses import dataclass, replace

import torch

from engine.attention.interface import AttentionOptions, LayerKv
from engine.batch import PackedBatch
from engine.kv.pool import restore

_SCORES_AT_ONCE = 1 << 25  # 128 MiB in float32, and as much again for their softmax


class GatherBackend:
    """An attention back end that computes one sequence at a time and keeps no state between calls."""

    def attend(self, query: torch.Tensor, kv: LayerKv, batch: PackedBatch, options: AttentionOptions) -> torch.Tensor:
        output = query.new_empty(*query.shape[:2], kv.values.shape[-1])
        for sequence, rows in enumerate(batch.rows):
            output[rows] = attend_sequence(query[rows], gather_context(kv, batch, sequence, options), options)
        return output


@dataclass(frozen=True, slots=True, eq=False)
class Context:
    """The KV that the queries of one chunk may see: K and V in order, from position `first` up to the chunk's last
    token."""

    first: int
    start: int  # position of the first query
    keys: torch.Tensor  # [context, kv_heads, dim]
    values: torch.Tensor


def gather_context(kv: LayerKv, batch: PackedBatch, sequence: int, options: AttentionOptions) -> Context:
    """Copy a sequence's blocks out of the pool, except those that its sliding window has passed."""
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
    """Gather like `take_blocks`, with quantised codes restored to `dtype`."""
    taken = take_blocks(view, block_ids)
    return taken if scales is None else restore(taken, take_blocks(scales, block_ids), dtype)


def take_blocks(view: torch.Tensor, block_ids: torch.Tensor) -> torch.Tensor:
    """Return the tokens of these blocks in order: `[num_blocks, block_size, kv_heads, dim]` -> `[tokens, kv_heads,
    dim]`.

    Each block is copied as one run of bytes, which is five times as fast on a CPU as indexing several axes; float8 is
    copied as int8 because some devices cannot index float8.
    """
    codes = view.view(torch.int8) if view.dtype == torch.float8_e4m3fn else view
    return codes.flatten(1).index_select(0, block_ids).view(view.dtype).view(-1, *view.shape[2:])


def attend_sequence(query: torch.Tensor, context: Context, options: AttentionOptions) -> torch.Tensor:
    """Attend with the queries `[queries, heads, dim]` of one sequence to its context, -> `[queries, heads, value_dim]`.
    Queries are computed in groups so that the scores stay small for any context length."""
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


def attend_dense(
    query: torch.Tensor,  # [..., kv_heads, queries, dim]; the heads of one group and its tokens may share `queries`
    keys: torch.Tensor,  # [..., kv_heads, context, dim]
    values: torch.Tensor,  # [..., kv_heads, context, value_dim]
    visible: torch.Tensor,  # bool, broadcasts to [..., kv_heads, queries, context]
    sinks: torch.Tensor | None,  # broadcasts to [..., kv_heads, queries, 1]
    options: AttentionOptions,
) -> torch.Tensor:
    """Return `[..., kv_heads, queries, value_dim]`. The softmax is taken in float32, as in the models' own eager
    attention."""
    scores = torch.matmul(query * options.scaling, keys.transpose(-1, -2)).float()
    if options.softcap is not None:
        scores = torch.tanh(scores / options.softcap) * options.softcap
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is None:
        weights = torch.softmax(scores, dim=-1)
    else:
        column = sinks.float().expand(*scores.shape[:-1], 1)
        weights = torch.softmax(torch.cat([scores, column], dim=-1), dim=-1)[..., :-1]
    return torch.matmul(weights.to(values.dtype), values)


def visibility(start: int, num_queries: int, first: int, num_keys: int, window: int | None) -> torch.Tensor:
    """Return which of the keys at positions first, first + 1, ... the queries at start, start + 1, ... see: bool
    `[queries, keys]`."""
    positions = torch.arange(start, start + num_queries)[:, None]
    key_positions = torch.arange(first, first + num_keys)[None, :]
    visible = key_positions <= positions
    if window is not None:
        visible &= key_positions > positions - window
    return visible
