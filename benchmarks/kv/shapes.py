"""The shapes of the benchmark: how many blocks move, neighbouring or scattered, and the two pools."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.kv.layout import LayerShape, lay_out
from engine.kv.pool import KvPool

# 16 tokens in bfloat16: of a small model, 64 KiB; of an 8B Llama, 2 MiB.
LAYOUTS = {
    "cpu": lay_out([LayerShape(num_kv_heads=4, key_dim=64, value_dim=64)] * 4, 16, "bfloat16"),
    "cuda": lay_out([LayerShape(num_kv_heads=8, key_dim=128, value_dim=128)] * 32, 16, "bfloat16"),
}
BLOCK_SIZE = 16  # tokens
_SMALL_BYTES, _LARGE_BYTES = LAYOUTS["cpu"].block_bytes, LAYOUTS["cuda"].block_bytes


@dataclass(frozen=True, slots=True)
class Shape:
    """One row of the table. Each sample moves other blocks, because blocks that just moved are in a cache."""

    name: str
    num_blocks: int
    is_scattered: bool
    num_samples: int
    block_bytes: int = _SMALL_BYTES

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.block_bytes

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


# A GPU moves a gigabyte in the time that it takes to ask a few times.
GPU_SHAPES = (
    Shape("2 MB", 1, False, 101, _LARGE_BYTES),
    Shape("64 MB", 32, False, 51, _LARGE_BYTES),
    Shape("1 GB", 512, False, 21, _LARGE_BYTES),
    Shape("512 x 2 MB", 512, True, 21, _LARGE_BYTES),
    Shape("4 GB", 2048, False, 11, _LARGE_BYTES),
)
GPU_POOL_BLOCKS = 4096
STAGED_SHAPES = GPU_SHAPES[:2]  # through host memory: it says all there is to say


class _OrdinaryPool(KvPool):
    """A pool that is not exported: the UCX in NIXL's wheel cannot pass exported pages to another process."""

    def _cuda_memory(self, num_bytes: int) -> torch.Tensor:
        self.why_no_cuda_file = "the pool is in ordinary memory"
        return torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)


def source_pool(num_blocks: int, device: str, transport: str) -> KvPool:
    """Return a pool whose block i begins with its number in eight bytes."""
    pool = _pool(num_blocks, device, transport)
    pool.raw[:] = _row(pool).to(pool.device)
    pool.raw[:, :8] = torch.arange(num_blocks).view(torch.uint8).view(num_blocks, 8).to(pool.device)
    return _completed(pool)


def target_pool(num_blocks: int, device: str, transport: str) -> KvPool:
    """Return a pool whose pages all exist, as in a pool that has served for a while."""
    pool = _pool(num_blocks, device, transport)
    pool.raw.fill_(0xFF)
    return _completed(pool)


def check_arrived(target: KvPool, remote: Sequence[int], local: Sequence[int]) -> None:
    row = _row(target)
    for source_id, block_id in zip(remote, local, strict=True):
        row[:8] = torch.tensor([source_id]).view(torch.uint8)
        assert torch.equal(target.raw[block_id].cpu(), row), f"block {source_id} did not arrive in block {block_id}"


def _pool(num_blocks: int, device: str, transport: str) -> KvPool:
    kind = _OrdinaryPool if transport == "nixl" else KvPool
    return kind(LAYOUTS[device], num_blocks, device)


def _completed(pool: KvPool) -> KvPool:
    """Wait for the device, because transports do not wait for work of others."""
    if pool.raw.is_cuda:
        torch.cuda.synchronize()
    return pool


def _row(pool: KvPool) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 256, (pool.block_bytes,), dtype=torch.uint8, generator=generator)
