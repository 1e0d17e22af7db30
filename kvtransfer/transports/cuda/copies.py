"""Copies blocks between two pools of device memory, in any order of their ids, in one launch.

The source is given by its address, because another process's memory is not a tensor here and may be on another GPU.

Imported only on a GPU: Triton comes with torch's CUDA wheels.
"""

# ruff: noqa: ANN001, ANN202  (a kernel's arguments have Triton's types, which it finds at the call)

import torch
import triton
import triton.language as tl

_WORDS = 4096  # that one program copies
_ALIGNMENT = 16  # bytes: the widest access of a thread


# One kernel for any number of blocks: the second list of ids begins where the first one ends.
@triton.jit(do_not_specialize_on_alignment=["source_ids", "target_ids"])  # type: ignore[untyped-decorator]
def _copy_words(  # type: ignore[no-untyped-def]
    source_address,
    target,  # [num_blocks, block_words]
    source_ids,  # int64, [copies]
    target_ids,  # int64, [copies]
    block_words,
    ALIGNMENT: tl.constexpr,  # bytes, of every block on the source's side
    WORDS: tl.constexpr,
):
    source = source_address.to(tl.pointer_type(target.dtype.element_ty))
    source_block = tl.load(source_ids + tl.program_id(0))
    target_block = tl.load(target_ids + tl.program_id(0))
    words = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    places = tl.max_contiguous(tl.multiple_of(source + source_block * block_words + words, ALIGNMENT), WORDS)
    data = tl.load(places, mask=words < block_words)
    tl.store(target + target_block * block_words + words, data, mask=words < block_words)


def copy_blocks(source_address: int, source_ids: torch.Tensor, target: torch.Tensor, target_ids: torch.Tensor) -> None:
    """Copy blocks `source_ids` of the pool at `source_address` to blocks `target_ids` of `target`.

    `target` is torch.uint8, [num_blocks, block_bytes], contiguous; ids are torch.int64. The copy is enqueued on the
    current stream."""
    assert target.is_contiguous() and len(source_ids) == len(target_ids)
    addresses_and_size = (source_address, target.data_ptr(), target.shape[1])
    is_aligned = all(number % _ALIGNMENT == 0 for number in addresses_and_size)
    words = target.view(torch.int32 if is_aligned else torch.int8)
    if len(source_ids):
        _copy_words[(len(source_ids), triton.cdiv(words.shape[1], _WORDS))](
            source_address,
            words,
            source_ids,
            target_ids,
            words.shape[1],
            ALIGNMENT=_ALIGNMENT if is_aligned else 1,
            WORDS=_WORDS,
        )
