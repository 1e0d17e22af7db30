"""The limit of `shm`: memcpy between the same two pools, one call per run of blocks, on one thread.

The exporter's pool is mapped again, without the transport. Views are made before the clock starts.
"""

import mmap
import os
import random
from collections.abc import Callable

import numpy as np

from benchmarks.kv.shapes import Shape
from engine.kv.pool import KvPool
from kvtransfer.memory import runs


class Memcpy:
    def __init__(self, pid: int, memfd: int, pool: KvPool) -> None:
        """`memfd`: the exporter's, in the process `pid`."""
        self._target = pool.raw.numpy()
        descriptor = os.open(f"/proc/{pid}/fd/{memfd}", os.O_RDONLY)
        try:
            mapping = mmap.mmap(descriptor, pool.raw.numel(), mmap.MAP_SHARED, mmap.PROT_READ)
        finally:
            os.close(descriptor)
        self._source = np.frombuffer(mapping, dtype=np.uint8).reshape(pool.raw.shape)
        self._source.max()  # every page is mapped

    def prepare(self, shape: Shape, dice: random.Random) -> Callable[[], None]:
        remote, local = (shape.pick(len(self._target), dice) for _ in range(2))
        copies = [
            (self._target[target : target + length].reshape(-1), self._source[source : source + length].reshape(-1))
            for source, target, length in runs(remote, local)
        ]

        def move() -> None:
            for target, source in copies:
                np.copyto(target, source)

        return move
