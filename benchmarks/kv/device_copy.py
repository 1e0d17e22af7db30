"""The limits of transports between two pools on one GPU: copies of the same bytes within one process.

One is a plain copy of neighbouring blocks, which no transport can beat. The other is the transport's own kernel on the
shape's blocks, which separates the kernel's cost from the rest.
"""

import random
from collections.abc import Callable

import torch

from benchmarks.kv.shapes import Shape
from engine.kv.pool import KvPool


class DeviceCopy:
    def __init__(self, pool: KvPool) -> None:
        self._target = pool.raw
        self._source = torch.zeros_like(pool.raw)

    def prepare(self, shape: Shape, dice: random.Random) -> Callable[[], None]:
        last = len(self._target) - shape.num_blocks
        source, target = dice.randrange(last + 1), dice.randrange(last + 1)
        torch.cuda.synchronize()

        def move() -> None:
            self._target[target : target + shape.num_blocks].copy_(self._source[source : source + shape.num_blocks])
            torch.cuda.synchronize()

        return move

    def prepare_kernel(self, shape: Shape, dice: random.Random) -> Callable[[], None]:
        from kvtransfer.transports.cuda.copies import copy_blocks

        sources, targets = (
            torch.tensor(shape.pick(len(self._target), dice), device=self._target.device) for _ in range(2)
        )
        torch.cuda.synchronize()

        def move() -> None:
            copy_blocks(self._source.data_ptr(), sources, self._target, targets)
            torch.cuda.synchronize()

        return move
