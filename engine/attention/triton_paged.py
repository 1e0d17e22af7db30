"""Attention on CUDA: one paged kernel of our own, in Triton, for prompt chunks and decodes alike.

It reads K and V where they lie, through the layer's strides and the block tables, with 64-bit offsets; it knows
windows, soft caps, sinks, grouped heads, head sizes that are no power of two, and full float32. The softmax is the
online one of FlashAttention (Dao et al., 2022), over tiles of positions; tables are looked up per position, so any
block size will do.

Imported only when this back end is chosen: Triton comes with torch's CUDA wheels.
"""

# ruff: noqa: ANN001, ANN202  (a kernel's arguments have Triton's types, which it finds at the call)

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from engine.attention.interface import AttentionOptions, LayerKv
from engine.batch import PackedBatch

_CHUNK_ROWS = 64  # queries x heads of a group that one program computes, in chunks
_MIN_ROWS = 16  # the least that a matrix unit takes


@triton.jit  # type: ignore[untyped-decorator]
def _attend_tile(  # type: ignore[no-untyped-def]
    query,  # [tokens, heads, KEY_DIM]
    keys,  # [num_blocks, BLOCK_SIZE, kv_heads, KEY_DIM], strided
    values,  # [num_blocks, BLOCK_SIZE, kv_heads, VALUE_DIM], strided
    output,  # [tokens, heads, VALUE_DIM]
    sinks,  # [heads]
    block_tables,  # [sequences, blocks]
    query_starts,  # [sequences + 1]
    context_lens,  # [sequences]
    tile_sequences,  # [tiles], whose queries a program computes
    tile_offsets,  # [tiles], and from which of that chunk's queries on
    scaling,
    softcap,
    window,
    query_token_stride,
    query_head_stride,
    key_block_stride,
    key_token_stride,
    key_head_stride,
    value_block_stride,
    value_token_stride,
    value_head_stride,
    output_token_stride,
    output_head_stride,
    table_stride,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEY_DIM: tl.constexpr,
    KEY_PAD: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Rows are (query, head of the group) pairs of one KV head; columns are positions of the context."""
    sequence = tl.load(tile_sequences + tl.program_id(0))
    offset = tl.load(tile_offsets + tl.program_id(0))
    kv_head = tl.program_id(1)
    first_row = tl.load(query_starts + sequence)
    num_queries = tl.load(query_starts + sequence + 1) - first_row
    context_len = tl.load(context_lens + sequence)
    start = context_len - num_queries  # position of the chunk's first query

    rows = tl.arange(0, ROWS)
    queries = offset + rows // GROUP  # [ROWS], counted in the chunk
    heads = kv_head * GROUP + rows % GROUP
    live = (rows < (ROWS // GROUP) * GROUP) & (queries < num_queries)
    positions = start + queries
    tokens = (first_row + queries).to(tl.int64)

    key_dims = tl.arange(0, KEY_PAD)
    value_dims = tl.arange(0, VALUE_PAD)
    q = tl.load(
        query + tokens[:, None] * query_token_stride + heads[:, None] * query_head_stride + key_dims[None, :],
        mask=live[:, None] & (key_dims[None, :] < KEY_DIM),
        other=0.0,
    )

    # A sink takes part in the softmax and gives no value: it is where the running sums begin.
    if HAS_SINKS:
        highest = tl.load(sinks + heads, mask=live, other=0.0).to(tl.float32)
        total = tl.full([ROWS], 1.0, tl.float32)
    else:
        highest = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
    weighted = tl.zeros([ROWS, VALUE_PAD], tl.float32)

    begin = 0
    if HAS_WINDOW:
        begin = tl.maximum(start + offset - window + 1, 0) // COLUMNS * COLUMNS
    end = tl.minimum(start + offset + ROWS // GROUP, context_len)
    for first in range(begin, end, COLUMNS):
        columns = first + tl.arange(0, COLUMNS)
        written = columns < end
        blocks = tl.load(block_tables + sequence * table_stride + columns // BLOCK_SIZE, mask=written, other=0)
        blocks = blocks.to(tl.int64)
        places = columns % BLOCK_SIZE
        k = tl.load(
            keys
            + blocks[None, :] * key_block_stride
            + places[None, :] * key_token_stride
            + kv_head * key_head_stride
            + key_dims[:, None],
            mask=written[None, :] & (key_dims[:, None] < KEY_DIM),
            other=0.0,
        )  # [KEY_PAD, COLUMNS]
        scores = tl.dot(q, k, input_precision="ieee") * scaling
        if HAS_SOFTCAP:
            scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)  # tanh
        visible = live[:, None] & written[None, :] & (columns[None, :] <= positions[:, None])
        if HAS_WINDOW:
            visible = visible & (columns[None, :] > positions[:, None] - window)
        scores = tl.where(visible, scores, float("-inf"))

        higher = tl.maximum(highest, tl.max(scores, axis=1))
        anchor = tl.where(higher == float("-inf"), 0.0, higher)  # a row that has seen nothing yet
        weights = tl.exp(scores - anchor[:, None])
        shrink = tl.exp(highest - anchor)
        v = tl.load(
            values
            + blocks[:, None] * value_block_stride
            + places[:, None] * value_token_stride
            + kv_head * value_head_stride
            + value_dims[None, :],
            mask=written[:, None] & (value_dims[None, :] < VALUE_DIM),
            other=0.0,
        )  # [COLUMNS, VALUE_PAD]
        weighted = weighted * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        total = total * shrink + tl.sum(weights, axis=1)
        highest = higher

    result = weighted / tl.where(total > 0.0, total, 1.0)[:, None]
    tl.store(
        output + tokens[:, None] * output_token_stride + heads[:, None] * output_head_stride + value_dims[None, :],
        result.to(output.dtype.element_ty),
        mask=live[:, None] & (value_dims[None, :] < VALUE_DIM),
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Tiles:
    """What each program of one launch computes: queries of which sequence, from which one on."""

    rows: int
    sequences: torch.Tensor  # [tiles]
    offsets: torch.Tensor  # [tiles]


class TritonBackend:
    """Cuts a step into tiles once, not once per layer: holds those of the newest step."""

    def __init__(self) -> None:
        self._batch: PackedBatch | None = None
        self._launches: tuple[_Tiles, ...] = ()

    def attend(self, query: torch.Tensor, kv: LayerKv, batch: PackedBatch, options: AttentionOptions) -> torch.Tensor:
        group = query.shape[1] // kv.keys.shape[2]
        if batch is not self._batch:
            self._batch, self._launches = batch, _launches(batch, group, query.device)
        query = query if query.stride(2) == 1 else query.contiguous()
        output = query.new_empty(*query.shape[:2], kv.values.shape[-1])
        for tiles in self._launches:
            _launch(tiles, query, output, kv, batch, options)
        return output


def _launches(batch: PackedBatch, group: int, device: torch.device) -> tuple[_Tiles, ...]:
    """Decodes and chunks apart: a decode has one query, and would leave most of a chunk's rows empty."""
    least = max(_MIN_ROWS, triton.next_power_of_2(group))
    decodes = [(sequence, 0) for sequence, length in enumerate(batch.query_lens) if length == 1]
    chunk_rows = max(least, _CHUNK_ROWS)
    chunks = [
        (sequence, offset)
        for sequence, length in enumerate(batch.query_lens)
        if length > 1
        for offset in range(0, length, chunk_rows // group)
    ]
    return tuple(
        _Tiles(rows, *torch.tensor(places, dtype=torch.int32).T.contiguous().to(device, non_blocking=True).unbind())
        for rows, places in ((least, decodes), (chunk_rows, chunks))
        if places
    )


def _launch(
    tiles: _Tiles,
    query: torch.Tensor,
    output: torch.Tensor,
    kv: LayerKv,
    batch: PackedBatch,
    options: AttentionOptions,
) -> None:
    _, block_size, num_kv_heads, key_dim = kv.keys.shape
    value_dim = kv.values.shape[3]
    key_pad, value_pad = (max(16, triton.next_power_of_2(dim)) for dim in (key_dim, value_dim))
    row_bytes = max(key_pad, value_pad) * query.element_size()
    _attend_tile[(len(tiles.sequences), num_kv_heads)](
        query,
        kv.keys,
        kv.values,
        output,
        query if options.sinks is None else options.sinks,
        batch.block_tables,
        batch.query_starts,
        batch.context_lens,
        tiles.sequences,
        tiles.offsets,
        options.scaling,
        options.softcap or 0.0,
        options.sliding_window or 0,
        *query.stride()[:2],
        *kv.keys.stride()[:3],
        *kv.values.stride()[:3],
        *output.stride()[:2],
        batch.block_tables.stride(0),
        GROUP=query.shape[1] // num_kv_heads,
        BLOCK_SIZE=block_size,
        KEY_DIM=key_dim,
        KEY_PAD=key_pad,
        VALUE_DIM=value_dim,
        VALUE_PAD=value_pad,
        ROWS=tiles.rows,
        COLUMNS=max(16, min(64, (16 << 10) // row_bytes)),  # a tile of K must fit small shared memories
        HAS_WINDOW=options.sliding_window is not None,
        HAS_SOFTCAP=options.softcap is not None,
        HAS_SINKS=options.sinks is not None,
        num_warps=4,
        num_stages=2 if row_bytes <= 512 else 1,
    )
