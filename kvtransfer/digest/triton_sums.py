"""The sums of kvtransfer/digest/definitions.py on a GPU: blocks are read once, where they lie, whatever their order.

One program multiplies some pieces, of whichever blocks, with the matrix of coefficients; int8 products in 32-bit sums
are what matrix units compute exactly. A fold is the same over its own output, whose rows are often shorter than a
piece: no program goes on behind their end. Owns nothing; the definition stands in digest.py.

Imported only where blocks are on a GPU: Triton comes with torch's CUDA wheels.
"""

# ruff: noqa: ANN001, ANN202  (a kernel's arguments have Triton's types, which it finds at the call)

import torch
import triton
import triton.language as tl

_ROWS = 32  # pieces of one program; a matrix unit takes 16 at least
_COLUMNS = 256  # bytes of each piece at a time
_STAGES = 5  # four of these are on their way: the few programs of a short read, or of a fold, wait for memory


# One compiled kernel for a pool's blocks and one for each fold of them, however many are asked for: a compilation takes
# longer than a hand-off.
@triton.jit(do_not_specialize=["num_pieces"])  # type: ignore[untyped-decorator]
def _sum_pieces(  # type: ignore[no-untyped-def]
    blocks,  # int8, [num_blocks, block_bytes]
    block_ids,  # int64, [wanted]
    coefficients,  # int8, [NUM_SUMS, PIECE_BYTES]: each sum's coefficients are neighbours
    sums,  # int32, [wanted * pieces, NUM_SUMS]
    block_stride,
    block_bytes,
    pieces_per_block,
    num_pieces,  # of all wanted blocks
    PIECE_BYTES: tl.constexpr,
    NUM_SUMS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    pieces = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_piece = pieces < num_pieces
    block_id = tl.load(block_ids + pieces // pieces_per_block, mask=is_piece, other=0)
    piece_start = (pieces % pieces_per_block) * PIECE_BYTES
    row = blocks + block_id * block_stride + piece_start
    num_bytes = tl.where(is_piece, tl.minimum(block_bytes - piece_start, PIECE_BYTES), 0)  # the rest counts as zeros
    sum_index = tl.arange(0, NUM_SUMS)
    total = tl.zeros((ROWS, NUM_SUMS), dtype=tl.int32)
    for start in range(0, tl.minimum(block_bytes, PIECE_BYTES), COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        data = tl.load(row[:, None] + columns[None, :], mask=columns[None, :] < num_bytes[:, None], other=0)
        factors = tl.load(coefficients + sum_index[None, :] * PIECE_BYTES + columns[:, None])
        total = tl.dot(data, factors, total, out_dtype=tl.int32)
    tl.store(sums + pieces[:, None] * NUM_SUMS + sum_index[None, :], total, mask=is_piece[:, None])


def piece_sums(blocks: torch.Tensor, block_ids: torch.Tensor, coefficients: torch.Tensor) -> torch.Tensor:
    """torch.int32, [wanted, pieces, sums] of the rows `block_ids` (torch.int64) of `blocks` (torch.uint8, [num_blocks,
    block_bytes]); `coefficients` is torch.int8, [sums, piece]. Enqueued on the current stream."""
    num_sums, piece_bytes = coefficients.shape
    block_bytes = blocks.shape[1]
    assert blocks.stride(1) == 1 and coefficients.is_contiguous()
    pieces_per_block = triton.cdiv(block_bytes, piece_bytes)
    num_pieces = len(block_ids) * pieces_per_block
    sums = torch.empty((len(block_ids), pieces_per_block, num_sums), dtype=torch.int32, device=blocks.device)
    if num_pieces:
        _sum_pieces[(triton.cdiv(num_pieces, _ROWS),)](
            blocks.view(torch.int8),
            block_ids,
            coefficients,
            sums,
            blocks.stride(0),
            block_bytes,
            pieces_per_block,
            num_pieces,
            PIECE_BYTES=piece_bytes,
            NUM_SUMS=num_sums,
            ROWS=_ROWS,
            COLUMNS=_COLUMNS,
            num_stages=_STAGES,
        )
    return sums
