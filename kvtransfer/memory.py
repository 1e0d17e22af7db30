"""A worker's pool of KV blocks as this package sees it: its bytes by block id, and requests for blocks.

It never sees layers, sequences or which sequence uses a block.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch


class PoolMemory(Protocol):
    """One worker's KV blocks. `raw` is the pool itself, not a copy."""

    @property
    def num_blocks(self) -> int: ...

    @property
    def block_bytes(self) -> int: ...

    @property
    def raw(self) -> torch.Tensor:
        """Return torch.uint8, [num_blocks, block_bytes], contiguous."""
        ...

    @property
    def memfd(self) -> int | None:
        """Return the file that backs a CPU pool from its offset 0, mapped shared, or None."""
        ...


@runtime_checkable
class ExportedMemory(PoolMemory, Protocol):
    """A pool that may be in GPU pages that other processes of the host can map."""

    @property
    def cuda_file(self) -> int | None:
        """Return the file of the GPU pages, where the pool begins at the first, or None; then `why_no_cuda_file` has
        the reason."""
        ...

    @property
    def cuda_file_bytes(self) -> int: ...

    @property
    def why_no_cuda_file(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Reservation:
    """All blocks of one hand-off: the prompt's full blocks in order, then one tail per choice.

    The first `num_cached` blocks already have their content, shared and pinned for this hand-off; nothing is read into
    them."""

    block_ids: tuple[int, ...]
    num_cached: int = 0


class BlockSource(Protocol):
    async def reserve(self, handoff_id: int, num_blocks: int) -> Reservation:
        """Wait until all blocks can be reserved at once. Raises a TandemError if they never can.

        After a cancellation `discard` follows and drops the reservation, whether it was made or not."""
        ...

    def discard(self, handoff_id: int, quarantined: frozenset[int]) -> None:
        """End a hand-off that delivers no blocks. The blocks in `quarantined` may still be written to."""
        ...

    def release_quarantined(self, block_ids: frozenset[int]) -> None:
        """Report that nothing writes to these quarantined blocks any more."""
        ...
