"""Measure what `--kv-verify keyed` costs beside `all`: digests alone, tags, and whole imports, in pairs that alternate.

`python -m benchmarks.kv.keyed` prints a table; figures are medians with quartiles, ratios are medians of the pairs."""

import asyncio
import os
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from itertools import cycle
from statistics import median, quantiles

import torch

from benchmarks.kv.importer import moves_over
from benchmarks.kv.parties import EXPORTER, KEY
from benchmarks.kv.shapes import QUICK_POOL_BLOCKS, QUICK_SHAPES, Shape, target_pool
from kvtransfer.digests import KNOWN_DIGESTS, PUBLIC, VerifyMode, digest_blocks
from kvtransfer.keyed_digests import BlockTags, exported_definition

_KEYED = exported_definition(VerifyMode.KEYED, KNOWN_DIGESTS[0], KEY)
_NUM_PAIRS = {1: 200, 16: 200, 1024: 30}  # by number of blocks


async def _in_pairs(shape: Shape, sample: Callable[[str], Awaitable[float]]) -> str:
    """Return the cells of one row: `all`, `keyed`, and the ratio."""
    dice = random.Random(3)
    samples: dict[str, list[float]] = {"all": [], "keyed": []}
    for turn in range(_NUM_PAIRS[shape.num_blocks] + 2):
        for mode in dice.sample(sorted(samples), 2):
            seconds = await sample(mode)
            if turn > 1:
                samples[mode].append(seconds)
    ratio = median(keyed / plain for plain, keyed in zip(samples["all"], samples["keyed"], strict=True))
    return f"{_cell(samples['all'])} | {_cell(samples['keyed'])} | {ratio:.3f}"


def _cell(seconds: Sequence[float]) -> str:
    low, middle, high = quantiles(seconds, n=4)
    return f"{middle * 1e3:.3f} ({low * 1e3:.3f} to {high * 1e3:.3f})"


async def _digests(shape: Shape) -> str:
    pool, dice = target_pool(QUICK_POOL_BLOCKS, "cpu", "shm"), random.Random(5)

    async def sample(mode: str) -> float:
        ids = shape.pick(pool.num_blocks, dice)
        began_s = time.perf_counter()
        if mode == "all":
            digest_blocks(pool, ids, PUBLIC)
        else:
            tags = BlockTags(_KEYED, EXPORTER, bytes(16))
            for place, digest in enumerate(digest_blocks(pool, ids, _KEYED.seed)):
                tags.tag(place, digest, is_unverified=False)
        return time.perf_counter() - began_s

    try:
        return await _in_pairs(shape, sample)
    finally:
        pool.close()


async def _imports(transport: str, shape: Shape) -> str:
    """Two pairs of processes serve each mode: on a machine of two cores, the pair that starts last is slower."""
    async with AsyncExitStack() as stack:
        moves = [
            (mode, (await stack.enter_async_context(moves_over(transport, QUICK_POOL_BLOCKS, "", "cpu", mode)))[0])
            for mode in ("all", "keyed", "keyed", "all")
        ]
        turns = {mode: cycle([move for its, move in moves if its == mode]) for mode in ("all", "keyed")}
        return await _in_pairs(shape, lambda mode: next(turns[mode]).hand_off(shape))


async def main() -> None:
    torch.set_num_threads(1)
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.0f}; ms: median (quartiles)\n")
    print("| | `all` | `keyed` | ratio of pairs |\n|---|---|---|---|")
    for shape in QUICK_SHAPES:
        print(f"| digests and tags, {shape.name} | {await _digests(shape)} |", flush=True)
    for transport in ("shm", "tcp"):
        for shape in QUICK_SHAPES:
            print(f"| import by `{transport}`, {shape.name} | {await _imports(transport, shape)} |", flush=True)


if __name__ == "__main__":
    asyncio.run(main())
