"""Attention over gathered KV.

`GatherBackend` computes attention from its definition, for any device and option; it is slow, and used only where no
other back end can be. `SdpaBackend` is for CPUs: `scaled_dot_product_attention` for chunks, one batched product over
gathered blocks for decodes.
"""

from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F

from engine.attention.interface import AttentionOptions, LayerKv
from engine.batch import PackedBatch
from engine.kv.pool import restore

_SCORES_AT_ONCE = 1 << 25  # 128 MiB in float32, and as much again for their softmax
_FEW_TOKENS = 1 << 16  # of one layer: padding up to this many is cheaper than more calls


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


@dataclass(frozen=True, slots=True, eq=False)
class _Decodes:
    """Decoding sequences of a step that are computed together: their rows, and which blocks and positions each reads
    under one window."""

    rows: torch.Tensor  # [decodes]
    block_ids: torch.Tensor  # [decodes, blocks], padded with the sequence's own
    visible: torch.Tensor  # [decodes, 1, 1, blocks * block_size]
    vectors: dict[tuple[int, ...], torch.Tensor] = field(default_factory=dict)  # indices by geometry, see _vectors


class SdpaBackend:
    """Attention by `scaled_dot_product_attention`. Computes indices and masks once per step and window rather than per
    layer, and keeps those of the newest step."""

    def __init__(self) -> None:
        self._batch: PackedBatch | None = None
        self._decodes: dict[int | None, tuple[_Decodes, ...]] = {}
        self._masks: dict[tuple[int, int | None], torch.Tensor | None] = {}

    def attend(self, query: torch.Tensor, kv: LayerKv, batch: PackedBatch, options: AttentionOptions) -> torch.Tensor:
        if batch is not self._batch:
            self._batch, self._decodes, self._masks = batch, {}, {}
        output = query.new_empty(*query.shape[:2], kv.values.shape[-1])
        for sequence, rows in enumerate(batch.rows):
            if batch.query_lens[sequence] > 1:
                context = _context(kv, batch, sequence, options)
                output[rows] = self._attend_chunk(query[rows], context, sequence, options)
        if 1 in batch.query_lens:
            window = options.sliding_window
            if window not in self._decodes:
                self._decodes[window] = _decodes(batch, window, kv.keys.shape[1])
            for decodes in self._decodes[window]:
                output[decodes.rows] = _attend_decodes(query, kv, decodes, options)
        return output

    def _attend_chunk(
        self, query: torch.Tensor, context: Context, sequence: int, options: AttentionOptions
    ) -> torch.Tensor:
        if options.softcap is not None or options.sinks is not None:
            return attend_sequence(query, context, options)
        mask = self._mask(sequence, len(query), context, options.sliding_window)
        output = F.scaled_dot_product_attention(
            query.transpose(0, 1)[None],
            context.keys.transpose(0, 1)[None],
            context.values.transpose(0, 1)[None],
            attn_mask=mask,
            is_causal=mask is None,
            scale=options.scaling,
            enable_gqa=query.shape[1] != context.keys.shape[1],
        )
        return output[0].transpose(0, 1)

    def _mask(self, sequence: int, num_queries: int, context: Context, window: int | None) -> torch.Tensor | None:
        """Return the mask, or None if the plain causal mask is right."""
        place = (sequence, window)
        if place not in self._masks:
            plain = context.start == 0 and (window is None or window >= num_queries)
            self._masks[place] = (
                None if plain else visibility(context.start, num_queries, context.first, len(context.keys), window)
            )
        return self._masks[place]


def _context(kv: LayerKv, batch: PackedBatch, sequence: int, options: AttentionOptions) -> Context:
    """Return the KV that a chunk sees. A sequence's first chunk uses its own K and V without reading the pool. A
    quantised pool is always read, so that the result does not depend on how a prompt was cut into chunks."""
    if batch.starts[sequence] or kv.key_scales is not None:
        return gather_context(kv, batch, sequence, options)
    rows = batch.rows[sequence]
    return Context(first=0, start=0, keys=kv.new_keys[rows], values=kv.new_values[rows])


def _decodes(batch: PackedBatch, window: int | None, block_size: int) -> tuple[_Decodes, ...]:
    sequences = [index for index, num_queries in enumerate(batch.query_lens) if num_queries == 1]
    lens = batch.context_lens[torch.tensor(sequences)]
    lowest = torch.zeros_like(lens) if window is None else (lens - window).clamp(min=0)  # first position seen
    num_blocks = (lens - 1) // block_size - lowest // block_size + 1
    return tuple(
        _together(batch, [sequences[place] for place in places], lowest[torch.tensor(places)], block_size)
        for places in alike(num_blocks.tolist(), _FEW_TOKENS // block_size)
    )


def alike(widths: list[int], few: int) -> list[list[int]]:
    """Return groups of decodes to pad to one width: all together if the padding is small or at most doubles the work,
    otherwise by powers of two, so that one long sequence does not widen many short ones."""
    if len(widths) * max(widths) <= max(few, 2 * sum(widths)):
        return [list(range(len(widths)))]
    places: dict[int, list[int]] = {}
    for place, width in enumerate(widths):
        places.setdefault(width.bit_length(), []).append(place)
    return list(places.values())


def _together(batch: PackedBatch, chosen: list[int], lowest: torch.Tensor, block_size: int) -> _Decodes:
    sequences = torch.tensor(chosen)
    lens = batch.context_lens[sequences]
    first_blocks = lowest // block_size
    last_blocks = (lens - 1) // block_size
    width = int((last_blocks - first_blocks).max()) + 1
    columns = torch.minimum(first_blocks[:, None] + torch.arange(width), last_blocks[:, None])
    positions = (first_blocks * block_size)[:, None] + torch.arange(width * block_size)
    visible = (positions >= lowest[:, None]) & (positions < lens[:, None])
    return _Decodes(
        rows=batch.query_starts[sequences],
        block_ids=batch.block_tables[sequences[:, None], columns],
        visible=visible[:, None, None],
    )


def _attend_decodes(query: torch.Tensor, kv: LayerKv, decodes: _Decodes, options: AttentionOptions) -> torch.Tensor:
    num_kv_heads = kv.keys.shape[2]
    ours = query[decodes.rows]
    output = attend_dense(
        ours.view(len(ours), num_kv_heads, -1, ours.shape[-1]),  # [decodes, kv_heads, group, dim]
        _elements(kv.keys, kv.key_scales, decodes, query.dtype),
        _elements(kv.values, kv.value_scales, decodes, query.dtype),
        decodes.visible,
        None if options.sinks is None else options.sinks.view(num_kv_heads, -1, 1),
        options,
    )
    return output.flatten(1, 2)


def _elements(view: torch.Tensor, scales: torch.Tensor | None, decodes: _Decodes, dtype: torch.dtype) -> torch.Tensor:
    contexts = _contexts(view, decodes)
    if scales is None:
        return contexts
    return restore(contexts, _contexts(scales.unsqueeze(-1), decodes).squeeze(-1), dtype)


def _contexts(view: torch.Tensor, decodes: _Decodes) -> torch.Tensor:
    """Return the gathered KV as contiguous `[decodes, kv_heads, context, dim]`; the matrix products would copy any
    other order."""
    num_blocks, block_size, num_kv_heads, dim = view.shape
    per_block, rest = divmod(view.stride(0), dim)
    if rest:  # layers of other sizes between them: the vectors of a head lie on no common grid
        tokens = take_blocks(view, decodes.block_ids.flatten())
        return tokens.view(len(decodes.rows), -1, *view.shape[2:]).transpose(1, 2)
    geometry = (per_block, block_size, num_kv_heads)
    if geometry not in decodes.vectors:
        decodes.vectors[geometry] = _vectors(decodes.block_ids, *geometry)
    grid = view.as_strided(((num_blocks - 1) * per_block + block_size * num_kv_heads, dim), (dim, 1))
    return grid.index_select(0, decodes.vectors[geometry]).view(len(decodes.rows), num_kv_heads, -1, dim)


def _vectors(block_ids: torch.Tensor, per_block: int, block_size: int, num_kv_heads: int) -> torch.Tensor:
    """Return the index of each head's vectors, counted from the layer's first vector: sequence by sequence, head by
    head."""
    heads = torch.arange(num_kv_heads)[:, None, None]
    places = torch.arange(block_size) * num_kv_heads
    return (block_ids[:, None, :, None] * per_block + heads + places).flatten()
