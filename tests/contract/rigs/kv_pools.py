"""Two real pools for the tests of hand-offs, whose bytes identify the pool and the block."""

import torch

from engine.kv.layout import LayerShape, lay_out
from engine.kv.pool import KvPool

BLOCK_SIZE = 4
LAYOUT = lay_out([LayerShape(num_kv_heads=1, key_dim=8, value_dim=8)] * 2, BLOCK_SIZE, "float32")


def random_pool(num_blocks: int, seed: int, *, layers: int = 2) -> KvPool:
    shape = LayerShape(num_kv_heads=1, key_dim=8, value_dim=8)
    pool = KvPool(lay_out([shape] * layers, BLOCK_SIZE, "float32"), num_blocks)
    generator = torch.Generator().manual_seed(seed)
    pool.raw.copy_(torch.randint(0, 256, pool.raw.shape, dtype=torch.uint8, generator=generator))
    return pool
