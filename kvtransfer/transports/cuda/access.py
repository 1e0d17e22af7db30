"""One GPU's access to another process's pool: maps its exported pages and copies blocks out of them.

It owns its stream. Call it on transports' threads, never on the event loop, because it waits for copies.
"""

import os
import threading
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch

from cluster.shared_memory import DriverRefused, driver_result, map_pages, unmap_pages
from kvtransfer.device import use_device
from kvtransfer.memory import PoolMemory
from kvtransfer.transports.base import TransportError


class Mapping(Protocol):
    """Mapped pages of another process. They are unmapped when nothing refers to this object any more."""

    @property
    def address(self) -> int: ...


class PoolAccess(Protocol):
    """The device operations that `cuda_ipc` needs. CUDA and the tests implement it."""

    def device(self) -> str:
        """Return the name of the local pool's GPU."""
        ...

    def reaches(self, device: str) -> bool:
        """Return whether a GPU of this name may read the local pool; True if only an attempt can tell."""
        ...

    def map(self, file: int, num_bytes: int) -> Mapping:
        """Map a file for reading and close it. Raises TransportError."""
        ...

    def copy(self, source: Mapping, source_ids: Sequence[int], target_ids: Sequence[int]) -> None:
        """Copy blocks into the local pool. When it returns they are visible to the device."""
        ...


class CudaMapping:
    """A Mapping of CUDA pages."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.address = address
        weakref.finalize(self, unmap_pages, address, num_bytes).atexit = False


class CudaAccess:
    """The PoolAccess of a CUDA device."""

    def __init__(self, memory: PoolMemory) -> None:
        self._pool = memory.raw
        self._index = memory.raw.get_device()
        self._lock = threading.Lock()  # over the stream
        self._stream: torch.cuda.Stream | None = None

    def device(self) -> str:
        return str(torch.cuda.get_device_properties(self._index).uuid)

    def reaches(self, device: str) -> bool:
        for index in range(torch.cuda.device_count()):
            if str(torch.cuda.get_device_properties(index).uuid) == device:
                return index == self._index or torch.cuda.can_device_access_peer(index, self._index)
        return True  # not visible to this process

    def map(self, file: int, num_bytes: int) -> CudaMapping:
        from cuda.bindings import driver

        use_device(self._index)
        try:
            return CudaMapping(_import_for_reading(driver, file, num_bytes, self._index), num_bytes)
        except DriverRefused as error:
            raise TransportError(str(error)) from error

    def copy(self, source: Mapping, source_ids: Sequence[int], target_ids: Sequence[int]) -> None:
        """Copy on a separate stream, so that the copy and the engine's steps do not wait for each other.

        The destination is not in use, and the source was complete before it was offered.
        """
        from kvtransfer.transports.cuda.copies import copy_blocks

        with self._lock, torch.cuda.device(self._index):
            if self._stream is None:
                self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            with torch.cuda.stream(self._stream):
                both = torch.from_numpy(np.array((source_ids, target_ids), dtype=np.int64)).pin_memory()
                ids = both.to(self._pool.device, non_blocking=True)  # pageable memory would be waited for
                copy_blocks(source.address, ids[0], self._pool, ids[1])
                self._stream.synchronize()


def _import_for_reading(driver: Any, file: int, num_bytes: int, index: int) -> int:
    """Map the pages and return their address. It closes `file`. Raises DriverRefused."""
    kind = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    try:
        handle = driver_result(driver.cuMemImportFromShareableHandle(file, kind))
    finally:
        os.close(file)
    try:
        for_reading = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READ
        return map_pages(driver, handle, num_bytes, index, for_reading)
    finally:
        driver.cuMemRelease(handle)  # the mapping keeps the pages
