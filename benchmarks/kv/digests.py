"""Measure the cost of block digests on the device that holds the pool, beside a copy of the same blocks."""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch

from benchmarks.kv.shapes import Shape, target_pool
from engine.kv.pool import KvPool
from kvtransfer.digests import digest_blocks

_NUM_SAMPLES = 11


@dataclass(frozen=True, slots=True)
class DigestCost:
    """Samples in seconds, taken in turns."""

    shape: str
    num_bytes: int
    copy_s: Sequence[float]
    digest_s: Sequence[float]

    def line(self) -> str:
        copy_s, digest_s = median(self.copy_s), median(self.digest_s)
        return (
            f"| {self.shape} | {digest_s * 1e3:.2f} ms | {self.num_bytes / digest_s / 1e9:.1f} | "
            f"{copy_s / digest_s:.2f} |"
        )


def measure_digests(shapes: Sequence[Shape], num_blocks: int, device: str) -> list[DigestCost]:
    pool = target_pool(num_blocks, device, "none")
    try:
        return [_cost(pool, shape) for shape in shapes]
    finally:
        pool.close()


def table(costs: Sequence[DigestCost]) -> list[str]:
    head = ["| digests of | median | GB/s | speed relative to a copy |", "|---|---|---|---|"]
    return head + [cost.line() for cost in costs]


def _cost(pool: KvPool, shape: Shape) -> DigestCost:
    dice, num_blocks = random.Random(5), shape.num_blocks
    copy_s: list[float] = []
    digest_s: list[float] = []
    for turn in range(_NUM_SAMPLES + 1):  # the first turn is a warm-up
        ids = shape.pick(pool.num_blocks, dice)
        copied = _seconds(pool, lambda: pool.raw[:num_blocks].copy_(pool.raw[-num_blocks:]))
        digested = _seconds(pool, partial(digest_blocks, pool, ids))
        if turn:
            copy_s.append(copied)
            digest_s.append(digested)
    return DigestCost(shape.name, shape.num_bytes, copy_s, digest_s)


def _seconds(pool: KvPool, work: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    work()
    if pool.raw.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - began_s
