"""A worker's pool of KV blocks as this package sees it: its bytes by block id, requests for blocks, and the blocks as
rows of an array in host memory.

It never sees layers, sequences or which sequence uses a block. The rows are the pool itself on a CPU, a pinned copy on
a GPU. A copy from or to a GPU waits for the GPU, so it is called on the transports' own threads; on the event loop only
for pools in host memory.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch

from kvtransfer.device import side_stream

# Copying this much takes less time than waking another thread and being woken by it.
SHORT_BYTES = 1 << 20


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


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of an array that hold the requested blocks: block i is `array[indices[i]]`."""

    array: npt.NDArray[np.uint8]  # [rows, block_bytes]
    indices: Sequence[int]

    def views(self) -> list[memoryview]:
        """Return the bytes in order, neighbouring rows as one view."""
        if not self.indices:
            return []
        flat = self.array.data.cast("B")
        row_bytes = self.array.shape[1]
        pieces = runs(self.indices, self.indices)
        return [flat[start * row_bytes : (start + length) * row_bytes] for start, _, length in pieces]


def runs(sources: Sequence[int], targets: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield (source, target, length) of the longest stretches that are consecutive on both sides."""
    first_source = first_target = length = 0
    for source, target in zip(sources, targets, strict=True):
        if length and source == first_source + length and target == first_target + length:
            length += 1
            continue
        if length:
            yield first_source, first_target, length
        first_source, first_target, length = source, target, 1
    if length:
        yield first_source, first_target, length


class HostMemory:
    """Access to one pool's blocks in host memory."""

    def __init__(self, memory: PoolMemory) -> None:
        self._raw = memory.raw
        self._pool_array = None if memory.raw.is_cuda else memory.raw.numpy()

    @property
    def is_pool(self) -> bool:
        """Return whether `incoming` rows are the pool itself, so that `arrived` has nothing to do."""
        return self._pool_array is not None

    def outgoing(self, block_ids: Sequence[int]) -> Rows:
        """Return rows with the blocks' current bytes."""
        if self._pool_array is not None:
            return Rows(self._pool_array, block_ids)
        staged = self._staging(len(block_ids))
        with side_stream("outgoing", self._raw.device) as stream:
            staged.copy_(self._raw.index_select(0, self._on_device(block_ids)), non_blocking=True)
            stream.synchronize()
        return Rows(staged.numpy(), range(len(block_ids)))

    def incoming(self, block_ids: Sequence[int]) -> Rows:
        """Return rows to write the blocks' bytes to. Call `arrived` afterwards."""
        if self._pool_array is not None:
            return Rows(self._pool_array, block_ids)
        return Rows(self._staging(len(block_ids)).numpy(), range(len(block_ids)))

    def arrived(self, rows: Rows, block_ids: Sequence[int]) -> None:
        """Move the rows into the pool. When it returns the blocks are visible to the device."""
        if self._pool_array is not None:
            return
        with side_stream("incoming", self._raw.device) as stream:
            # Blocking copy into a temporary: the pinned rows may be reused as soon as this returns.
            self._raw.index_copy_(0, self._on_device(block_ids), torch.from_numpy(rows.array).to(self._raw.device))
            stream.synchronize()

    def _staging(self, num_blocks: int) -> torch.Tensor:
        return torch.empty((num_blocks, self._raw.shape[1]), dtype=torch.uint8, pin_memory=True)

    def _on_device(self, block_ids: Sequence[int]) -> torch.Tensor:
        return torch.tensor(block_ids, dtype=torch.int64, device=self._raw.device)  # an empty list has no dtype
