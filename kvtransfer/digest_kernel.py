"""The kernel that computes the sums of kvtransfer/digests.py on a GPU, and copies the blocks in the same pass if asked.

It reads each block once, in place, in any order of the blocks. One program multiplies a number of pieces, of any
blocks, with the matrix of coefficients. Matrix units compute int8 products in 32-bit sums exactly. A fold is the same
work over its own output, whose rows are often shorter than a piece; no program reads past their end.

Import this module only where blocks are on a GPU: Triton comes with torch's CUDA wheels.
"""

# ruff: noqa: ANN001, ANN202  (a kernel's arguments have Triton's types, which it finds at the call)

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

_ROWS = 32  # pieces per program; a matrix unit needs at least 16
_COLUMNS = 256  # bytes of each piece at a time
_ALIGNMENT = 16  # bytes: the widest access of a thread
_STAGES = 5  # four loads are in flight, because the few programs of a short read or of a fold wait for memory


# There is one compiled kernel for a pool's blocks and one for each fold, for any number of blocks: a compilation
# takes longer than a hand-off.
@triton.jit(do_not_specialize=["num_pieces"], do_not_specialize_on_alignment=["block_ids", "target_ids"])  # type: ignore[untyped-decorator]
def _sum_pieces(  # type: ignore[no-untyped-def]
    address,  # of the blocks, [num_blocks, block_bytes]
    block_ids,  # int64, [wanted]
    target,  # int8, [num_blocks, block_bytes]
    target_ids,  # int64, [wanted]
    coefficients,  # int8, [NUM_SUMS, PIECE_BYTES]: the coefficients of one sum are contiguous
    sums,  # int32, [wanted * pieces, NUM_SUMS]
    block_stride,
    target_stride,
    block_bytes,
    pieces_per_block,
    num_pieces,  # of all wanted blocks together
    PIECE_BYTES: tl.constexpr,
    NUM_SUMS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ALIGNMENT: tl.constexpr,  # bytes, of `address`
    COPIES: tl.constexpr,
):
    blocks = tl.multiple_of(address.to(tl.pointer_type(tl.int8)), ALIGNMENT)
    pieces = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_piece = pieces < num_pieces
    block_id = tl.load(block_ids + pieces // pieces_per_block, mask=is_piece, other=0)
    piece_start = (pieces % pieces_per_block) * PIECE_BYTES
    row = blocks + block_id * block_stride + piece_start
    if COPIES:
        target_id = tl.load(target_ids + pieces // pieces_per_block, mask=is_piece, other=0)
        target_row = target + target_id * target_stride + piece_start
    num_bytes = tl.where(is_piece, tl.minimum(block_bytes - piece_start, PIECE_BYTES), 0)  # the rest is zeros
    sum_index = tl.arange(0, NUM_SUMS)
    total = tl.zeros((ROWS, NUM_SUMS), dtype=tl.int32)
    for start in range(0, tl.minimum(block_bytes, PIECE_BYTES), COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        inside = columns[None, :] < num_bytes[:, None]
        data = tl.load(row[:, None] + columns[None, :], mask=inside, other=0)
        if COPIES:
            tl.store(target_row[:, None] + columns[None, :], data, mask=inside)
        factors = tl.load(coefficients + sum_index[None, :] * PIECE_BYTES + columns[:, None])
        total = tl.dot(data, factors, total, out_dtype=tl.int32)
    tl.store(sums + pieces[:, None] * NUM_SUMS + sum_index[None, :], total, mask=is_piece[:, None])


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """Blocks to read, by their address because another process's memory is not a tensor here: `[num_blocks,
    block_bytes]`, each `stride` bytes after the last one."""

    address: int
    stride: int
    ids: torch.Tensor  # torch.int64, [wanted]

    @classmethod
    def of(cls, blocks: torch.Tensor, ids: torch.Tensor) -> "Source":
        assert blocks.stride(1) == 1
        return cls(blocks.data_ptr(), blocks.stride(0), ids)


def piece_sums(blocks: torch.Tensor, block_ids: torch.Tensor, coefficients: torch.Tensor) -> torch.Tensor:
    """Return the sums (torch.int32, [wanted, pieces, NUM_SUMS]) of the rows `block_ids` (torch.int64) of `blocks`
    (torch.uint8, [num_blocks, block_bytes]).

    `coefficients` is torch.int8, [NUM_SUMS, PIECE_BYTES]. The work is enqueued on the current stream."""
    return _summed(Source.of(blocks, block_ids), blocks, block_ids, coefficients, copies=False)


def copied_piece_sums(
    source: Source, target: torch.Tensor, target_ids: torch.Tensor, coefficients: torch.Tensor
) -> torch.Tensor:
    """Copy the source's blocks to the rows `target_ids` of `target` (torch.uint8, [num_blocks, block_bytes]), and
    return what `piece_sums` returns for the copies. Each byte is read once."""
    assert target.is_contiguous() and len(source.ids) == len(target_ids)
    return _summed(source, target, target_ids, coefficients, copies=True)


def _summed(
    source: Source, target: torch.Tensor, target_ids: torch.Tensor, coefficients: torch.Tensor, *, copies: bool
) -> torch.Tensor:
    num_sums, piece_bytes = coefficients.shape
    block_bytes = target.shape[1]
    assert coefficients.is_contiguous()
    pieces_per_block = triton.cdiv(block_bytes, piece_bytes)
    num_pieces = len(source.ids) * pieces_per_block
    sums = torch.empty((len(source.ids), pieces_per_block, num_sums), dtype=torch.int32, device=target.device)
    if num_pieces:
        _sum_pieces[(triton.cdiv(num_pieces, _ROWS),)](
            source.address,
            source.ids,
            target.view(torch.int8),
            target_ids,
            coefficients,
            sums,
            source.stride,
            target.stride(0),
            block_bytes,
            pieces_per_block,
            num_pieces,
            PIECE_BYTES=piece_bytes,
            NUM_SUMS=num_sums,
            ROWS=_ROWS,
            COLUMNS=_COLUMNS,
            ALIGNMENT=_ALIGNMENT if source.address % _ALIGNMENT == 0 else 1,
            COPIES=copies,
            num_stages=_STAGES,
        )
    return sums
