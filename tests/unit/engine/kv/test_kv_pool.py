"""The block layout and the pool: one block is one run of bytes, every byte of it has one owner, and on CPU another
process can map the whole."""

import mmap
import os
from collections.abc import Iterator

import pytest
import torch

from engine.kv.layout import BlockLayout, LayerShape, lay_out
from engine.kv.pool import KvPool
from engine.scheduling.step import BlockCopy

UNEVEN = (LayerShape(2, 16, 16), LayerShape(1, 32, 24), LayerShape(4, 8, 8))


@pytest.fixture
def layout() -> BlockLayout:
    return lay_out(UNEVEN, block_size=4, dtype="float32")


@pytest.fixture
def pool(layout: BlockLayout) -> Iterator[KvPool]:
    pool = KvPool(layout, num_blocks=5)
    yield pool
    pool.close()


def test_a_uniform_block_has_the_axes_layer_kv_token_head_dim() -> None:
    layout = lay_out([LayerShape(2, 8, 8)] * 3, block_size=4, dtype="bfloat16")
    pool = KvPool(layout, num_blocks=2)
    pool.tensor.copy_(torch.arange(pool.tensor.numel()).view_as(pool.tensor) % 251)
    whole = pool.tensor.view(2, 3, 2, 4, 2, 8)

    for layer, (keys, values) in enumerate(pool.layers):
        assert torch.equal(keys, whole[:, layer, 0])
        assert torch.equal(values, whole[:, layer, 1])
    pool.close()


def test_different_layers_share_no_byte_and_leave_no_byte_unused(pool: KvPool) -> None:
    views = [view for layer in pool.layers for view in layer]
    for number, view in enumerate(views, start=1):
        view.add_(number)

    expected = {number: view.numel() for number, view in enumerate(views, start=1)}
    assert {number: int((pool.tensor == number).sum()) for number in expected} == expected
    assert sum(expected.values()) == pool.tensor.numel()


def test_sizes_follow_from_the_table(layout: BlockLayout) -> None:
    assert layout.kv_bytes_per_token == 4 * (2 * 32 + 56 + 4 * 16)
    assert layout.block_bytes == 4 * layout.kv_bytes_per_token
    assert [layout.num_blocks_for(tokens) for tokens in (0, 1, 4, 5)] == [0, 1, 1, 2]


def test_a_change_of_any_bytes_meaning_changes_the_layout_digest(layout: BlockLayout) -> None:
    others = [
        lay_out(UNEVEN, block_size=8, dtype="float32"),
        lay_out(UNEVEN, block_size=4, dtype="bfloat16"),
        lay_out(UNEVEN[::-1], block_size=4, dtype="float32"),
        lay_out(UNEVEN[:2], block_size=4, dtype="float32"),
        lay_out(UNEVEN, block_size=4, dtype="int8"),
        lay_out(UNEVEN, block_size=4, dtype="fp8"),
    ]
    assert len({layout.digest(), *(other.digest() for other in others)}) == 7
    assert lay_out(UNEVEN, block_size=4, dtype="float32").digest() == layout.digest()


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_codes_and_scales_share_no_byte_and_lie_inside_their_block(dtype: str, block_size: int) -> None:
    layout = lay_out(UNEVEN, block_size, dtype)
    pool = KvPool(layout, num_blocks=3)
    views = [view for layer in (*pool.layers, *pool.scales) for view in layer]
    for view in views:
        as_bytes = view.unsqueeze(-1).view(torch.uint8)  # what one view wrote another one finds
        as_bytes += 1

    num_used = sum(view.numel() * view.element_size() for view in views)
    assert int((pool.raw == 1).sum()) == num_used
    assert int(pool.raw.count_nonzero()) == num_used
    num_padding = layout.block_bytes - num_used // pool.num_blocks
    assert num_padding < 2 * 16
    assert layout.block_bytes % 16 == 0
    pool.close()


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_kv_of_eight_bits_takes_little_more_than_half_of_sixteen(dtype: str) -> None:
    shapes = [LayerShape(8, 128, 128)] * 32
    halved = lay_out(shapes, 16, dtype).block_bytes / lay_out(shapes, 16, "bfloat16").block_bytes
    assert 0.5 < halved < 0.51


@pytest.mark.parametrize("dtype", ["float32", "int8", "fp8"])
def test_zeroed_positions_are_zero_in_every_layer_and_no_others(dtype: str) -> None:
    pool = KvPool(lay_out(UNEVEN, 4, dtype), num_blocks=2)
    views = [view for layer in (*pool.layers, *pool.scales) for view in layer]
    for view in views:
        view.copy_(torch.ones(view.shape))
    pool.zero_positions(torch.tensor([1, 1]), torch.tensor([2, 3]))

    for view in views:
        assert not view[1, 2:].float().any()
        assert view[1, :2].float().all() and view[0].float().all()
    pool.close()


def test_the_raw_view_shares_the_memory_of_the_layers(pool: KvPool) -> None:
    assert int(pool.raw.count_nonzero()) == 0
    pool.tensor[3] = 1.5
    assert pool.raw[3].view(torch.float32).eq(1.5).all()
    assert int(pool.raw[2].count_nonzero()) == 0


def test_the_pools_writes_are_visible_in_another_mapping_of_the_memfd(pool: KvPool) -> None:
    assert pool.memfd is not None
    num_bytes = pool.num_blocks * pool.block_bytes
    assert os.fstat(pool.memfd).st_size == num_bytes
    with mmap.mmap(pool.memfd, num_bytes, mmap.MAP_SHARED, mmap.PROT_READ) as mapping:
        pool.raw[2] = 7
        block = mapping[2 * pool.block_bytes : 3 * pool.block_bytes]
    assert block == bytes([7]) * pool.block_bytes


def test_closing_returns_the_descriptor(layout: BlockLayout) -> None:
    pool = KvPool(layout, num_blocks=1)
    memfd = pool.memfd
    assert memfd is not None
    pool.close()
    pool.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(memfd)


def test_copies_read_every_source_before_any_target_is_written(pool: KvPool) -> None:
    for block_id in range(pool.num_blocks):
        pool.tensor[block_id] = block_id

    pool.copy_blocks([BlockCopy(0, 1), BlockCopy(1, 2), BlockCopy(1, 4)])

    assert [int(block[0]) for block in pool.tensor] == [0, 0, 1, 3, 1]
