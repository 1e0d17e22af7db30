"""The limit of every transport between two pools on one GPU: one plain copy of as many bytes, read and written once."""

import random
from collections.abc import Callable

import torch

from benchmarks.kv_shapes import Shape
from engine.pool import KvPool


class DeviceCopy:
    def __init__(self, pool: KvPool) -> None:
        self._target = pool.raw
        self._source = torch.empty_like(pool.raw)

    def prepare(self, shape: Shape, dice: random.Random) -> Callable[[], None]:
        """Neighbouring blocks, even where the shape scatters them: nothing moves as many bytes sooner."""
        last = len(self._target) - shape.num_blocks
        source, target = dice.randrange(last + 1), dice.randrange(last + 1)
        torch.cuda.synchronize()

        def move() -> None:
            self._target[target : target + shape.num_blocks].copy_(self._source[source : source + shape.num_blocks])
            torch.cuda.synchronize()

        return move
