"""The wire copy: KV as it travels, apart from the pool. Slot i belongs to block i, for as long as somebody holds it.

Owns the memory: on CPU a sealed memfd, so that another process on the host can read it in place; on a GPU a tensor. A
slot in a memfd takes memory when it is first written.
"""

import os
import weakref

import torch

from cluster.memory.sealed_memory import allocate_sealed


class WireCopy:
    """A PoolMemory. Zero at the start."""

    def __init__(self, *, num_blocks: int, block_bytes: int, device: torch.device) -> None:
        self.num_blocks = num_blocks
        self.block_bytes = block_bytes
        self.memfd: int | None = None
        if device.type == "cpu":
            self.memfd, mapping = allocate_sealed("tandem-kv-wire", num_blocks * block_bytes)
            flat = torch.frombuffer(mapping, dtype=torch.uint8)  # keeps the mapping alive
            self._close_file = weakref.finalize(self, os.close, self.memfd)  # once, by `close` or without
        else:
            flat = torch.zeros(num_blocks * block_bytes, dtype=torch.uint8, device=device)
        self.raw = flat.view(num_blocks, block_bytes)

    def close(self) -> None:
        """Ends this process's use of the memory."""
        self.raw = torch.empty(0, 0, dtype=torch.uint8)
        if self.memfd is not None:
            self._close_file()
            self.memfd = None
