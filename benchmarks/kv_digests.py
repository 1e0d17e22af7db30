"""What digests of blocks cost where the pool lies, by each definition, beside a copy of the same blocks."""

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch

from benchmarks.kv_shapes import Shape, target_pool
from engine.kv.pool import KvPool
from kvtransfer.digest.definitions import DEFINITIONS, digest_blocks

_NUM_SAMPLES = 11


@dataclass(frozen=True, slots=True)
class DigestCost:
    """Samples are seconds, taken in turns."""

    shape: str
    num_bytes: int
    copy_s: Sequence[float]
    digest_s: Mapping[str, Sequence[float]]  # by the definition's name

    def lines(self) -> list[str]:
        copy_s = median(self.copy_s)
        return [
            f"| {name} | {self.shape} | {median(each) * 1e3:.2f} ms | {self.num_bytes / median(each) / 1e9:.1f} | "
            f"{copy_s / median(each):.2f} |"
            for name, each in self.digest_s.items()
        ]


def measure_digests(shapes: Sequence[Shape], num_blocks: int, device: str) -> list[DigestCost]:
    pool = target_pool(num_blocks, device, "none")
    try:
        return [_cost(pool, shape) for shape in shapes]
    finally:
        pool.close()


def table(costs: Sequence[DigestCost]) -> list[str]:
    head = ["| digests by | size | median | GB/s | to a copy |", "|---|---|---|---|---|"]
    return head + [line for cost in costs for line in cost.lines()]


def _cost(pool: KvPool, shape: Shape) -> DigestCost:
    dice, num_blocks = random.Random(5), shape.num_blocks
    copy_s: list[float] = []
    digest_s: dict[str, list[float]] = {definition.name: [] for definition in DEFINITIONS}
    for turn in range(_NUM_SAMPLES + 1):  # the first one warms up
        ids = shape.pick(pool.num_blocks, dice)
        works: list[Callable[[], object]] = [lambda: pool.raw[:num_blocks].copy_(pool.raw[-num_blocks:])]
        works += [partial(digest_blocks, pool, ids, definition) for definition in DEFINITIONS]
        samples = [_seconds(pool, work) for work in works]
        for kept, seconds in zip([copy_s, *digest_s.values()], samples, strict=True):
            kept += [seconds] if turn else []
    return DigestCost(shape.name, shape.num_bytes, copy_s, digest_s)


def _seconds(pool: KvPool, work: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    work()
    if pool.raw.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - began_s
