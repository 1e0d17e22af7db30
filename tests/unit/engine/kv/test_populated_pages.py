"""The pages of reserved blocks are allocated before their content arrives, and no byte changes."""

import os

import pytest
import torch

from engine.kv.layout import LayerShape, lay_out
from engine.kv.pool import KvPool
from kvtransfer.memory import PopulatedPages

LAYOUT = lay_out([LayerShape(num_kv_heads=4, key_dim=64, value_dim=64)] * 3, 16, "bfloat16")  # 48 KiB a block


def allocated_bytes(pool: KvPool) -> int:
    assert pool.memfd is not None
    return os.fstat(pool.memfd).st_blocks * 512


def populate(pages: PopulatedPages, block_ids: tuple[int, ...]) -> None:
    pages.populate_soon(block_ids)
    pages._thread.submit(lambda: None).result()


def test_pages_of_reserved_blocks_exist_before_the_first_write() -> None:
    pool = KvPool(LAYOUT, 20)
    pages = PopulatedPages(pool)
    if pages._madvise(pool.raw.data_ptr(), 0, 23) != 0:
        pytest.skip("this kernel cannot populate pages on request")
    assert allocated_bytes(pool) == 0
    populate(pages, (3, 4, 5, 17))
    assert allocated_bytes(pool) == 4 * pool.block_bytes
    populate(pages, (4, 17, 18))
    assert allocated_bytes(pool) == 5 * pool.block_bytes
    assert not pool.raw.any()
    pages.close()


def test_written_blocks_keep_their_bytes() -> None:
    pool = KvPool(LAYOUT, 4)
    pool.raw[:] = torch.randint(0, 256, pool.raw.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    before, pages = pool.raw.clone(), PopulatedPages(pool)
    populate(pages, (0, 1, 2, 3))
    assert torch.equal(pool.raw, before)
    pages.close()
