"""What KV looks like while it travels. Blocks keep their ids on the way: block 7 of the pool is block 7 of the wire.

`memory` is what transports serve and fill, and what digests cover: the pool itself where KV travels as it is.
"""

from collections.abc import Sequence
from typing import Protocol

from kvtransfer.memory import PoolMemory


class WireFormat(Protocol):
    @property
    def memory(self) -> PoolMemory: ...

    def encode(self, block_ids: Sequence[int]) -> None:
        """Makes the wire's bytes of written blocks. Called on a helper thread, before their digests are taken."""
        ...

    def decode(self, block_ids: Sequence[int]) -> None:
        """Writes the pool's blocks from bytes that arrived and were verified. On a helper thread; visible to the device
        when it returns."""
        ...


class NativeFormat:
    """Nothing is changed."""

    def __init__(self, pool: PoolMemory) -> None:
        self.memory = pool

    def encode(self, block_ids: Sequence[int]) -> None:
        pass

    def decode(self, block_ids: Sequence[int]) -> None:
        pass
