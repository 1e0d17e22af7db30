"""What this package knows of a pool of KV blocks: bytes by block id. Never layers, sequences or who owns a block."""

from typing import Protocol, runtime_checkable

import torch


class PoolMemory(Protocol):
    """One worker's blocks. `raw` is the pool itself, not a copy."""

    @property
    def num_blocks(self) -> int: ...

    @property
    def block_bytes(self) -> int: ...

    @property
    def raw(self) -> torch.Tensor:
        """torch.uint8, [num_blocks, block_bytes], contiguous."""
        ...

    @property
    def memfd(self) -> int | None:
        """File that backs a CPU pool from its offset 0, mapped shared; None where there is none."""
        ...


@runtime_checkable
class ExportedMemory(PoolMemory, Protocol):
    """A pool that may lie in GPU pages which another process on the host can map."""

    @property
    def cuda_file(self) -> int | None:
        """File that names the pages; the pool begins at the first. None where `why_no_cuda_file` says why."""
        ...

    @property
    def cuda_file_bytes(self) -> int: ...

    @property
    def why_no_cuda_file(self) -> str: ...
