"""What KV looks like while it travels. Blocks keep their ids on the way: block 7 of the pool is block 7 of the wire.

`memory` is what transports serve and fill, and what digests cover: the pool itself where KV travels as it is.
"""

from collections.abc import Sequence
from typing import Protocol

from kvtransfer.memory import PoolMemory

_SHORT_BYTES = 1 << 20  # digested in 0.1 ms


class WireFormat(Protocol):
    @property
    def memory(self) -> PoolMemory: ...

    @property
    def short_bytes(self) -> int:
        """So much is encoded, or decoded, and digested on the event loop's thread: sooner than another one is woken for
        it and wakes this one. 0: nothing is."""
        ...

    def encode(self, block_ids: Sequence[int]) -> None:
        """Makes the wire's bytes of written blocks, before their digests are taken. What is not short: on a helper
        thread."""
        ...

    def decode(self, block_ids: Sequence[int]) -> None:
        """Writes the pool's blocks from bytes that arrived and were verified; visible to the device when it returns.
        What is not short: on a helper thread."""
        ...


class NativeFormat:
    """Nothing is changed."""

    def __init__(self, pool: PoolMemory) -> None:
        self.memory = pool
        self.short_bytes = 0 if pool.raw.is_cuda else _SHORT_BYTES  # a device would be waited for

    def encode(self, block_ids: Sequence[int]) -> None:
        pass

    def decode(self, block_ids: Sequence[int]) -> None:
        pass
