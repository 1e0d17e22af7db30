"""What is moved: how many blocks, together or scattered, and the two pools that they are moved between."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.layout import LayerShape, lay_out
from engine.pool import KvPool

# 64 KiB: 16 tokens of a small model in bfloat16.
LAYOUT = lay_out([LayerShape(num_kv_heads=4, key_dim=64, value_dim=64)] * 4, 16, "bfloat16")
BLOCK_SIZE = LAYOUT.block_size  # tokens
BLOCK_BYTES = LAYOUT.block_bytes


@dataclass(frozen=True, slots=True)
class Shape:
    """One line of the table. Each sample moves other blocks: what was just moved lies in a cache."""

    name: str
    num_blocks: int
    is_scattered: bool
    num_samples: int

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * BLOCK_BYTES

    def pick(self, num_pool_blocks: int, dice: random.Random) -> list[int]:
        if self.is_scattered:
            return dice.sample(range(num_pool_blocks), self.num_blocks)
        first = dice.randrange(num_pool_blocks - self.num_blocks + 1)
        return list(range(first, first + self.num_blocks))


ONE_BLOCK = Shape("64 KB", 1, False, 101)
SHAPES = (
    ONE_BLOCK,
    Shape("1 MB", 16, False, 101),
    Shape("64 MB", 1024, False, 9),
    Shape("256 MB", 4096, False, 5),
    Shape("4,096 x 64 KB", 4096, True, 5),
)
POOL_BLOCKS = 8192
QUICK_SHAPES = (ONE_BLOCK, SHAPES[1], Shape("64 MB", 1024, False, 5), Shape("1,024 x 64 KB", 1024, True, 5))
QUICK_POOL_BLOCKS = 2048


# A GPU moves these in the time that it takes to ask: what is asked for at once is larger.
GPU_SHAPES = (
    ONE_BLOCK,
    SHAPES[1],
    Shape("64 MB", 1024, False, 51),
    Shape("1 GB", 16_384, False, 21),
    Shape("16,384 x 64 KB", 16_384, True, 21),
)
GPU_POOL_BLOCKS = 32_768


def source_pool(num_blocks: int, device: str) -> KvPool:
    """Block i is told by its first eight bytes."""
    pool = KvPool(LAYOUT, num_blocks, device)
    pool.raw[:] = _row().to(pool.device)
    pool.raw[:, :8] = torch.arange(num_blocks).view(torch.uint8).view(num_blocks, 8).to(pool.device)
    return pool


def target_pool(num_blocks: int, device: str) -> KvPool:
    """As a pool that has served for a while: every page is there."""
    pool = KvPool(LAYOUT, num_blocks, device)
    pool.raw.fill_(0xFF)
    return pool


def check_arrived(target: KvPool, remote: Sequence[int], local: Sequence[int]) -> None:
    row = _row()
    for source_id, block_id in zip(remote, local, strict=True):
        row[:8] = torch.tensor([source_id]).view(torch.uint8)
        assert torch.equal(target.raw[block_id].cpu(), row), f"block {source_id} did not arrive in block {block_id}"


def _row() -> torch.Tensor:
    return torch.randint(0, 256, (BLOCK_BYTES,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
