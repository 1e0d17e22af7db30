"""The Triton kernels of paged attention: one computes a tile of queries over its context, one merges the parts of a
context that was split.

K and V are read in place, through the layer's strides and the block tables, with 64-bit offsets; tables are looked up
per position, so any block size is supported. The softmax is the online one of FlashAttention (Dao et al., 2022), in
base 2.

The context of a decode is split into parts (Flash-Decoding, Dao et al., 2023), because otherwise one sequence would
occupy only as many programs as it has KV heads. The split depends on that context's length alone, and parts are added
in their order, so a sequence's result has the same bits whichever sequences share the step.
"""

# ruff: noqa: ANN001, ANN201, ANN202  (a kernel's arguments have Triton's types, which it finds at the call)

import triton
import triton.language as tl

MOST_PARTS = tl.constexpr(32)
_LOG2_E = tl.constexpr(1.4426950408889634)
# A kernel is compiled again (seconds) whenever a pointer's alignment changes or a number becomes 1 or a multiple of
# 16. A step's tables follow each other in memory and are as wide as its longest context: both change from step to
# step, and the kernel gains nothing from them.
_ANY_ALIGNMENT = ("block_tables", "query_starts", "context_lens", "tile_sequences", "tile_offsets")


@triton.jit(do_not_specialize=("table_stride",), do_not_specialize_on_alignment=_ANY_ALIGNMENT)  # type: ignore[untyped-decorator]
def attend_tile(  # type: ignore[no-untyped-def]
    query,  # [tokens, heads, KEY_DIM]
    keys,  # [num_blocks, BLOCK_SIZE, kv_heads, KEY_DIM], strided
    values,  # [num_blocks, BLOCK_SIZE, kv_heads, VALUE_DIM], strided
    key_scales,  # [num_blocks, BLOCK_SIZE, kv_heads], strided
    value_scales,  # the same, with the same strides
    output,  # [tokens, heads, VALUE_DIM]
    part_values,  # [tiles, heads, PARTS, VALUE_DIM] in float32, not yet divided by their weights' sum
    part_sums,  # [tiles, heads, PARTS, 2] in float32: the highest score and the sum of weights
    sinks,  # [heads]
    block_tables,  # [sequences, blocks]
    query_starts,  # [sequences + 1]
    context_lens,  # [sequences]
    tile_sequences,  # [tiles], the sequence of each program's queries
    tile_offsets,  # [tiles], the first query of each program in its chunk
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
    scale_block_stride,
    scale_token_stride,
    scale_head_stride,
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
    PARTS: tl.constexpr,  # 1: the context is read whole, and `output` is written
    LEAST_PART: tl.constexpr,  # tokens, a multiple of COLUMNS
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_SCALES: tl.constexpr,
):
    """Compute one tile of attention. Its rows are (query, head of the group) pairs of one KV head; its columns are
    positions of the context."""
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    sequence = tl.load(tile_sequences + tile)
    offset = tl.load(tile_offsets + tile)
    first_row = tl.load(query_starts + sequence).to(tl.int32)
    num_queries = tl.load(query_starts + sequence + 1).to(tl.int32) - first_row
    context_len = tl.load(context_lens + sequence).to(tl.int32)
    start = context_len - num_queries  # position of the chunk's first query

    begin = _first_column(start + offset, window, COLUMNS, HAS_WINDOW)
    end = tl.minimum(start + offset + ROWS // GROUP, context_len)
    first_part, part_step, num_parts, part_tokens = 0, 1, 1, end - begin
    if PARTS > 1:
        first_part, part_step = tl.program_id(2), tl.num_programs(2)
        part_tokens = _part_tokens(end - begin, COLUMNS, LEAST_PART)
        num_parts = tl.cdiv(end - begin, part_tokens)
        if first_part >= num_parts:
            return

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

    for part in range(first_part, num_parts, part_step):
        highest = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        if HAS_SINKS:
            # A sink takes part in the softmax and gives no value: it is where the first part's running sums begin.
            has_sink = live & (rows * 0 + part == 0)
            sink = tl.load(sinks + heads, mask=has_sink, other=float("-inf")).to(tl.float32)
            highest = tl.where(has_sink, sink * _LOG2_E, highest)
            total = tl.where(has_sink, 1.0, total)
        weighted = tl.zeros([ROWS, VALUE_PAD], tl.float32)

        part_end = tl.minimum(begin + (part + 1) * part_tokens, end)
        for first in range(begin + part * part_tokens, part_end, COLUMNS):
            columns = first + tl.arange(0, COLUMNS)
            written = columns < part_end
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
            scores = tl.dot(q, k.to(q.dtype), input_precision="ieee")
            scale_places = blocks * scale_block_stride + places * scale_token_stride + kv_head * scale_head_stride
            if HAS_SCALES:
                factors = tl.load(key_scales + scale_places, mask=written, other=0.0).to(tl.float32)
                scores = scores * factors[None, :]
            if HAS_SOFTCAP:
                scores = scores * (2.0 * scaling / softcap)
                scores = (softcap * _LOG2_E) * (2.0 * tl.sigmoid(scores) - 1.0)  # tanh
            else:
                scores = scores * (scaling * _LOG2_E)
            # Most of a long context is seen by all rows, and needs no mask.
            is_edge = (first + COLUMNS > part_end) | (first + COLUMNS - 1 > start + offset)
            if HAS_WINDOW:
                is_edge = is_edge | (first <= start + offset + (ROWS // GROUP - 1) - window)
            if is_edge:
                visible = written[None, :] & (columns[None, :] <= positions[:, None])
                if HAS_WINDOW:
                    visible = visible & (columns[None, :] > positions[:, None] - window)
                scores = tl.where(visible, scores, float("-inf"))

            higher = tl.maximum(highest, tl.max(scores, axis=1))
            anchor = tl.where(higher == float("-inf"), 0.0, higher)  # a row that has seen nothing yet
            weights = tl.exp2(scores - anchor[:, None])
            shrink = tl.exp2(highest - anchor)
            total = total * shrink + tl.sum(weights, axis=1)
            v = tl.load(
                values
                + blocks[:, None] * value_block_stride
                + places[:, None] * value_token_stride
                + kv_head * value_head_stride
                + value_dims[None, :],
                mask=written[:, None] & (value_dims[None, :] < VALUE_DIM),
                other=0.0,
            )  # [COLUMNS, VALUE_PAD]
            if HAS_SCALES:
                factors = tl.load(value_scales + scale_places, mask=written, other=0.0).to(tl.float32)
                weights = weights * factors[None, :]
            weighted = weighted * shrink[:, None] + tl.dot(weights.to(q.dtype), v.to(q.dtype), input_precision="ieee")
            highest = higher

        if PARTS > 1:
            slots = (tile.to(tl.int64) * tl.num_programs(1) * GROUP + heads) * PARTS + part
            tl.store(part_sums + slots * 2, highest, mask=live)
            tl.store(part_sums + slots * 2 + 1, total, mask=live)
            tl.store(
                part_values + slots[:, None] * VALUE_DIM + value_dims[None, :],
                weighted,
                mask=live[:, None] & (value_dims[None, :] < VALUE_DIM),
            )
        else:
            result = weighted / tl.where(total > 0.0, total, 1.0)[:, None]
            rows_out = tokens[:, None] * output_token_stride + heads[:, None] * output_head_stride
            tl.store(
                output + rows_out + value_dims[None, :],
                result.to(output.dtype.element_ty),
                mask=live[:, None] & (value_dims[None, :] < VALUE_DIM),
            )


@triton.jit(do_not_specialize_on_alignment=_ANY_ALIGNMENT)  # type: ignore[untyped-decorator]
def merge_parts(  # type: ignore[no-untyped-def]
    part_values,  # [tiles, heads, PARTS, VALUE_DIM]
    part_sums,  # [tiles, heads, PARTS, 2]
    output,  # [tokens, heads, VALUE_DIM]
    query_starts,
    context_lens,
    tile_sequences,
    window,
    output_token_stride,
    output_head_stride,
    VALUE_DIM: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
    LEAST_PART: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):
    """Merge the parts of one head of one decode, one after another, so that the order of the sum is fixed."""
    tile = tl.program_id(0)
    head = tl.program_id(1)
    sequence = tl.load(tile_sequences + tile)
    context_len = tl.load(context_lens + sequence).to(tl.int32)
    span = context_len - _first_column(context_len - 1, window, COLUMNS, HAS_WINDOW)
    num_parts = tl.cdiv(span, _part_tokens(span, COLUMNS, LEAST_PART))

    slot = (tile.to(tl.int64) * tl.num_programs(1) + head) * PARTS
    highest = tl.load(part_sums + slot * 2)
    for part in range(1, num_parts):
        highest = tl.maximum(highest, tl.load(part_sums + (slot + part) * 2))
    value_dims = tl.arange(0, VALUE_PAD)
    weighted = tl.zeros([VALUE_PAD], tl.float32)
    total = highest * 0.0
    for part in range(0, num_parts):
        share = tl.exp2(tl.load(part_sums + (slot + part) * 2) - highest)
        total = total + share * tl.load(part_sums + (slot + part) * 2 + 1)
        values = tl.load(part_values + (slot + part) * VALUE_DIM + value_dims, mask=value_dims < VALUE_DIM, other=0.0)
        weighted = weighted + share * values
    token = tl.load(query_starts + sequence).to(tl.int64)
    tl.store(
        output + token * output_token_stride + head * output_head_stride + value_dims,
        (weighted / total).to(output.dtype.element_ty),
        mask=value_dims < VALUE_DIM,
    )


@triton.jit  # type: ignore[untyped-decorator]
def _first_column(position, window, COLUMNS: tl.constexpr, HAS_WINDOW: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the first column to read for a tile whose first query is at `position`."""
    if HAS_WINDOW:
        return tl.maximum(position - window + 1, 0) // COLUMNS * COLUMNS
    return position * 0


@triton.jit  # type: ignore[untyped-decorator]
def _part_tokens(span, COLUMNS: tl.constexpr, LEAST_PART: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the tokens per part: at most MOST_PARTS parts, each of whole tiles of columns."""
    return tl.maximum(tl.cdiv(tl.cdiv(span, MOST_PARTS), COLUMNS) * COLUMNS, LEAST_PART)
