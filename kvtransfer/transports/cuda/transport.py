"""The transport `cuda_ipc` between GPUs of one host. The importer maps the exporter's pages for reading and copies from
device to device.

The pages are passed as a file. CUDA's virtual memory management keeps exported pages while any process maps them, so a
copy in flight when the exporter dies reads sealed blocks, and ends. The connection that carried the file ends with
the exporter; that ends the mapping, and so the pages. CudaAccess maps and copies on the transport's threads, never on
the event loop, because it waits for copies.
"""

import asyncio
import os
import threading
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from cluster.shared_memory import DriverRefused, driver_result, map_pages, unmap_pages
from kvtransfer.digests import copy_digested
from kvtransfer.memory import ExportedMemory, PoolMemory, ids_to_device, side_stream, use_device
from kvtransfer.thread_work import submit
from kvtransfer.transports.base import TransportError, TransportSetup
from kvtransfer.transports.proven_connections import ConnectionProofs
from kvtransfer.transports.shm.pool_file import (
    DigestingPoolFileChannel,
    PoolFileChannel,
    PoolFileExporter,
    PoolFileImporter,
    RemotePool,
)
from kvtransfer.transports.shm.transport import host_identity

NAME = "cuda_ipc"


def unavailable(setup: TransportSetup) -> str:
    memory = setup.memory
    if not isinstance(memory, ExportedMemory):
        return "the memory to transfer is not exported GPU memory"
    return memory.why_no_cuda_file


def exporter(setup: TransportSetup) -> "CudaIpcExporter":
    assert isinstance(setup.memory, ExportedMemory)
    return CudaIpcExporter(memory=setup.memory, proofs=setup.proofs, access=CudaAccess(setup.memory))


def importer(setup: TransportSetup) -> "CudaIpcImporter":
    return CudaIpcImporter(memory=setup.memory, proofs=setup.proofs, access=CudaAccess(setup.memory))


class Mapping(Protocol):
    """The mapped pages of another process. They are unmapped when nothing refers to this object any more."""

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

    def copy_digested(
        self, source: Mapping, source_ids: Sequence[int], target_ids: Sequence[int], seed: bytes
    ) -> tuple[bytes, ...]:
        """Do what `copy` does, and return the digests of the bytes that were written."""
        ...


class CudaIpcExporter(PoolFileExporter):
    """Passes the pool's file to importers of admitted epochs."""

    name = NAME

    def __init__(self, *, memory: ExportedMemory, access: PoolAccess, proofs: ConnectionProofs) -> None:
        assert memory.cuda_file is not None, memory.why_no_cuda_file
        super().__init__(proofs, memory.cuda_file, memory.num_blocks, memory.block_bytes, memory.cuda_file_bytes)
        self._access = access

    def reachable(self, importer_endpoint: bytes) -> bool:
        host, _, device = importer_endpoint.rpartition(b" ")
        return host == host_identity() and self._access.reaches(device.decode(errors="replace"))


class CudaIpcImporter(PoolFileImporter[Mapping]):
    name = NAME

    def __init__(self, *, memory: PoolMemory, access: PoolAccess, proofs: ConnectionProofs) -> None:
        super().__init__(memory, NAME, proofs)
        self._access = access
        self._endpoint = host_identity() + b" " + access.device().encode()

    def endpoint(self) -> bytes:
        return self._endpoint

    async def map(self, file: int, num_blocks: int, num_bytes: int) -> Mapping:
        has_begun = False

        def map_file() -> Mapping:
            nonlocal has_begun
            has_begun = True
            return self._access.map(file, num_bytes)

        def end(_: object = None) -> None:
            """Close the file where no thread maps it: none could be started, or the threads were shut down before."""
            if not has_begun:
                os.close(file)

        try:
            mapping = submit(self._threads, map_file)
        except BaseException:
            end()
            raise
        mapping.add_done_callback(end)
        return await asyncio.shield(asyncio.wrap_future(mapping))  # it goes on without its caller, and closes the file

    def new_channel(self, pool: RemotePool[Mapping]) -> PoolFileChannel[Mapping]:
        def start_digested_copy(
            source: Mapping, source_ids: Sequence[int], target_ids: Sequence[int], seed: bytes
        ) -> Future[tuple[bytes, ...]]:
            ids = tuple(source_ids), tuple(target_ids)
            return submit(self._threads, self._access.copy_digested, source, *ids, seed)

        return DigestingPoolFileChannel(pool, self.start_copy, start_digested_copy, self._channels.discard)

    def start_copy(self, source: Mapping, source_ids: Sequence[int], target_ids: Sequence[int]) -> Future[None]:
        return submit(self._threads, self._access.copy, source, tuple(source_ids), tuple(target_ids))


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

        with self._lock, self._copy_stream():
            ids = ids_to_device(self._pool.device, source_ids, target_ids)
            copy_blocks(source.address, ids[0], self._pool, ids[1])

    def copy_digested(
        self, source: Mapping, source_ids: Sequence[int], target_ids: Sequence[int], seed: bytes
    ) -> tuple[bytes, ...]:
        with self._lock, self._copy_stream():
            return copy_digested(source.address, source_ids, self._pool, target_ids, seed)

    @contextmanager
    def _copy_stream(self) -> Iterator[None]:
        """Make a stream current, and wait for its work at the end, after an error too: the caller may then drop the
        mapping that it reads."""
        with side_stream("copy", self._pool.device) as stream:
            try:
                yield
            finally:
                stream.synchronize()


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
