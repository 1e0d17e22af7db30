"""A worker's pool of KV blocks as this package sees it: its bytes by block id, requests for blocks, and the blocks as
rows of an array in host memory.

It never sees layers, sequences or which sequence uses a block. The rows are the pool itself on a CPU, a pinned copy on
a GPU. A copy from or to a GPU waits for the GPU, so it is called on the transports' own threads; on the event loop only
for pools in host memory.

A transfer never waits for a step of the engine, and no step waits for a transfer (`side_stream`).
"""

import contextlib
import ctypes
import mmap
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch


@contextmanager
def side_stream(work: str, device: torch.device) -> Iterator[torch.cuda.Stream]:
    """Make a stream for this kind of work current, for threads that do the same `work` one after the other.

    The caller waits for the stream before it leaves the block if other threads or streams use the result."""
    stream = _stream(work, device)
    with torch.cuda.device(device), torch.cuda.stream(stream):
        yield stream


def ids_to_device(device: torch.device, *block_ids: Sequence[int]) -> torch.Tensor:
    """Return lists of equal length as torch.int64 `[lists, ids]` on the device, without waiting for the copy."""
    on_host = torch.from_numpy(np.array(block_ids, dtype=np.int64))
    return on_host.pin_memory().to(device, non_blocking=True)  # pageable memory would be waited for


@lru_cache(maxsize=64)
def _stream(work: str, device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def use_device(index: int) -> None:
    """Make the device's primary context current on this thread. It waits for no step of the engine.

    CUDA's runtime does this for every thread that calls it; UCX and other libraries that call the driver themselves
    fail on a thread without a context. Raises RuntimeError."""
    torch.cuda.set_device(index)
    torch.cuda.Stream(index).synchronize()  # type: ignore[no-untyped-call]  # set_device alone may not call the runtime


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
    async def reserve(self, handoff_id: int, num_blocks: int, *, is_announced: bool) -> Reservation:
        """Wait until all blocks can be reserved at once. Raises a TandemError if they never can.

        `is_announced`: the exporter has begun to compute. If it has not, `announce` follows when it has. After a
        cancellation `discard` follows and drops the reservation, whether it was made or not."""
        ...

    def announce(self, handoff_id: int) -> None:
        """Report that the exporter has begun to compute, and so has all blocks that it needs."""
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


_MADV_POPULATE_WRITE = 23  # madvise(2), since Linux 5.14
_PIECE_BYTES = 1 << 20  # other threads that map memory wait for a piece


class PopulatedPages:
    """Populates the pages of a pool in advance. Call it on the event loop. A pool on a GPU has nothing to populate."""

    def __init__(self, memory: PoolMemory) -> None:
        self._block_bytes = memory.block_bytes
        self._address = 0 if memory.raw.is_cuda else memory.raw.data_ptr()
        self._lacking = set(() if memory.raw.is_cuda else range(memory.num_blocks))
        self._thread = ThreadPoolExecutor(1, "kv-pages")
        self._madvise = ctypes.CDLL(None, use_errno=True).madvise
        self._madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

    def populate_soon(self, block_ids: Sequence[int]) -> None:
        """Populate the pages of blocks that are about to be written, each block once, on a thread of its own."""
        lacking = [block_id for block_id in block_ids if block_id in self._lacking]
        if lacking:
            self._lacking.difference_update(lacking)
            with contextlib.suppress(RuntimeError, MemoryError):  # no thread: the first write allocates
                self._thread.submit(self._populate, lacking)

    def close(self) -> None:
        """Wait until the system has been asked for the last time."""
        self._thread.shutdown(cancel_futures=True)

    def _populate(self, block_ids: Sequence[int]) -> None:
        for first, _, length in runs(block_ids, block_ids):
            start = self._address + first * self._block_bytes
            end = start + length * self._block_bytes
            for piece in range(start - start % mmap.PAGESIZE, end, _PIECE_BYTES):
                # An error is no failure: an older kernel does not know the request, and the first write allocates.
                self._madvise(piece, min(_PIECE_BYTES, end - piece), _MADV_POPULATE_WRITE)
