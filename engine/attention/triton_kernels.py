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
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    sequence, offset = tl.load(tile_sequences + tile), tl.load(tile_offsets + tile)
    first_row, num_queries, context_len = _lengths(query_starts, context_lens, sequence)
    first_position = context_len - num_queries + offset  # of the tile's first query
    begin = _first_column(first_position, window, COLUMNS, HAS_WINDOW)
    end = tl.minimum(first_position + ROWS // GROUP, context_len)
    first_part, part_step, num_parts, part_tokens = _parts(end - begin, COLUMNS, PARTS, LEAST_PART)
    if first_part >= num_parts:
        return

    rows = tl.arange(0, ROWS)
    queries = offset + rows // GROUP  # [ROWS], counted in the chunk
    heads = kv_head * GROUP + rows % GROUP
    live = (rows < (ROWS // GROUP) * GROUP) & (queries < num_queries)
    tokens = (first_row + queries).to(tl.int64)
    positions = context_len - num_queries + queries
    query_rows = tokens * query_token_stride + heads * query_head_stride
    q = _load_rows(query, query_rows, live, KEY_DIM, KEY_PAD)

    for part in range(first_part, num_parts, part_step):
        highest, total = _begin_softmax(sinks, heads, live, part, ROWS, HAS_SINKS)
        weighted = tl.zeros([ROWS, VALUE_PAD], tl.float32)
        part_end = tl.minimum(begin + (part + 1) * part_tokens, end)
        for first in range(begin + part * part_tokens, part_end, COLUMNS):
            columns = first + tl.arange(0, COLUMNS)
            written = columns < part_end
            blocks = tl.load(block_tables + sequence * table_stride + columns // BLOCK_SIZE, mask=written, other=0)
            blocks, places = blocks.to(tl.int64), columns % BLOCK_SIZE

            key_rows = _in_pool(blocks, places, kv_head, key_block_stride, key_token_stride, key_head_stride)
            k = _load_columns(keys, key_rows, written, KEY_DIM, KEY_PAD)
            scores = tl.dot(q, k.to(q.dtype), input_precision="ieee")  # [ROWS, COLUMNS]
            scale_rows = _in_pool(blocks, places, kv_head, scale_block_stride, scale_token_stride, scale_head_stride)
            if HAS_SCALES:
                scores *= tl.load(key_scales + scale_rows, mask=written, other=0.0).to(tl.float32)[None, :]
            scores = _as_exponents(scores, scaling, softcap, HAS_SOFTCAP)
            # Most of a long context is seen by all rows, and needs no mask.
            is_edge = (first + COLUMNS > part_end) | (first + COLUMNS - 1 > first_position)
            if HAS_WINDOW:
                is_edge |= first <= first_position + (ROWS // GROUP - 1) - window
            if is_edge:
                scores = _mask(scores, columns, positions, written, window, HAS_WINDOW)

            weights, highest, shrink = _weigh(scores, highest)
            total = total * shrink + tl.sum(weights, axis=1)
            value_rows = _in_pool(blocks, places, kv_head, value_block_stride, value_token_stride, value_head_stride)
            v = _load_rows(values, value_rows, written, VALUE_DIM, VALUE_PAD)
            if HAS_SCALES:
                weights *= tl.load(value_scales + scale_rows, mask=written, other=0.0).to(tl.float32)[None, :]
            weighted = weighted * shrink[:, None] + tl.dot(weights.to(q.dtype), v.to(q.dtype), input_precision="ieee")

        if PARTS > 1:
            slots = (tile.to(tl.int64) * tl.num_programs(1) * GROUP + heads) * PARTS + part
            tl.store(part_sums + slots * 2, highest, mask=live)
            tl.store(part_sums + slots * 2 + 1, total, mask=live)
            _store_rows(part_values, slots * VALUE_DIM, weighted, live, VALUE_DIM, VALUE_PAD)
        else:
            result = weighted / tl.where(total > 0.0, total, 1.0)[:, None]
            output_rows = tokens * output_token_stride + heads * output_head_stride
            _store_rows(output, output_rows, result, live, VALUE_DIM, VALUE_PAD)


@triton.jit
def _lengths(query_starts, context_lens, sequence):  # type: ignore[no-untyped-def]
    """Return the first row of a sequence's chunk in the step, its queries, and the tokens of the context with them."""
    first_row = tl.load(query_starts + sequence).to(tl.int32)
    num_queries = tl.load(query_starts + sequence + 1).to(tl.int32) - first_row
    return first_row, num_queries, tl.load(context_lens + sequence).to(tl.int32)


@triton.jit  # type: ignore[untyped-decorator]
def _parts(span, COLUMNS: tl.constexpr, PARTS: tl.constexpr, LEAST_PART: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the parts that this program computes (the first, the step to its next, the number of all) and the tokens
    per part."""
    if PARTS == 1:
        return 0, 1, 1, span
    part_tokens = _part_tokens(span, COLUMNS, LEAST_PART)
    return tl.program_id(2), tl.num_programs(2), tl.cdiv(span, part_tokens), part_tokens


@triton.jit
def _in_pool(blocks, places, kv_head, block_stride, token_stride, head_stride):  # type: ignore[no-untyped-def]
    """Return where the columns' numbers for one KV head begin in a strided view of the pool, in elements."""
    return blocks * block_stride + places * token_stride + kv_head * head_stride


@triton.jit  # type: ignore[untyped-decorator]
def _load_rows(tensor, starts, live, DIM: tl.constexpr, PAD: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load DIM elements from each start: `[starts, PAD]`, with zeros after them and in rows that are not live."""
    dims = tl.arange(0, PAD)
    return tl.load(tensor + starts[:, None] + dims[None, :], mask=live[:, None] & (dims[None, :] < DIM), other=0.0)


@triton.jit  # type: ignore[untyped-decorator]
def _load_columns(tensor, starts, live, DIM: tl.constexpr, PAD: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load the same, transposed: `[PAD, starts]`."""
    dims = tl.arange(0, PAD)
    return tl.load(tensor + starts[None, :] + dims[:, None], mask=live[None, :] & (dims[:, None] < DIM), other=0.0)


@triton.jit  # type: ignore[untyped-decorator]
def _store_rows(tensor, starts, rows, live, DIM: tl.constexpr, PAD: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store the first DIM elements of each live row of `[starts, PAD]`, in the tensor's type."""
    dims = tl.arange(0, PAD)
    is_stored = live[:, None] & (dims[None, :] < DIM)
    tl.store(tensor + starts[:, None] + dims[None, :], rows.to(tensor.dtype.element_ty), mask=is_stored)


@triton.jit  # type: ignore[untyped-decorator]
def _begin_softmax(sinks, heads, live, part, ROWS: tl.constexpr, HAS_SINKS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return each row's highest score and sum of weights before the first column of a part. A sink takes part in the
    softmax and gives no value: it is counted in the first part."""
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if HAS_SINKS:
        has_sink = live & (heads * 0 + part == 0)
        sink = tl.load(sinks + heads, mask=has_sink, other=float("-inf")).to(tl.float32)
        highest = tl.where(has_sink, sink * _LOG2_E, highest)
        total = tl.where(has_sink, 1.0, total)
    return highest, total


@triton.jit  # type: ignore[untyped-decorator]
def _as_exponents(scores, scaling, softcap, HAS_SOFTCAP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the products of queries and keys as scaled scores in base 2, after the soft cap if there is one."""
    if HAS_SOFTCAP:
        scores = scores * (2.0 * scaling / softcap)
        return (softcap * _LOG2_E) * (2.0 * tl.sigmoid(scores) - 1.0)  # tanh
    return scores * (scaling * _LOG2_E)


@triton.jit  # type: ignore[untyped-decorator]
def _mask(scores, columns, positions, written, window, HAS_WINDOW: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the scores without those of columns that are not written, come after a row's position or before its
    window."""
    visible = written[None, :] & (columns[None, :] <= positions[:, None])
    if HAS_WINDOW:
        visible = visible & (columns[None, :] > positions[:, None] - window)
    return tl.where(visible, scores, float("-inf"))


@triton.jit
def _weigh(scores, highest):  # type: ignore[no-untyped-def]
    """Return the weights of the scores, the highest score with them, and the factor of all earlier weights."""
    higher = tl.maximum(highest, tl.max(scores, axis=1))
    anchor = tl.where(higher == float("-inf"), 0.0, higher)  # a row that has seen nothing yet
    return tl.exp2(scores - anchor[:, None]), higher, tl.exp2(highest - anchor)


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
