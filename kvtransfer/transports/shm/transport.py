"""The transport `shm`: the exporter's pool is a sealed memfd, passed over a Unix socket and mapped read-only by the
importer.

The importer copies out of the mapping, and digests what it copies in the same pass where that can be compiled.
"""

import mmap
import os
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import numpy.typing as npt

from cluster.shared_memory import has_fixed_size
from kvtransfer.digests import compiled_digests
from kvtransfer.memory import SHORT_BYTES, HostMemory, PoolMemory, runs
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

NAME = "shm"
_Pool = npt.NDArray[np.uint8]  # [num_blocks, block_bytes]
_Digests = tuple[bytes, ...]


def unavailable(setup: TransportSetup) -> str:
    return "" if setup.memory.memfd is not None else "the pool is not in this host's memory"


def exporter(setup: TransportSetup) -> "ShmExporter":
    return ShmExporter(memory=setup.memory, proofs=setup.proofs)


def importer(setup: TransportSetup) -> "ShmImporter":
    return ShmImporter(memory=setup.memory, proofs=setup.proofs)


def host_identity() -> bytes:
    """Return bytes that are equal for two processes exactly when they share a kernel and a mount namespace."""
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot_id} {os.stat('/proc/self/ns/mnt').st_ino} {os.stat('/').st_ino}".encode()


class ShmExporter(PoolFileExporter):
    """Passes the pool's file to importers of admitted epochs."""

    name = NAME

    def __init__(self, *, memory: PoolMemory, proofs: ConnectionProofs) -> None:
        assert memory.memfd is not None, "shm needs a pool in a memfd"
        # Opened again for reading only. An importer that opens it once more for writing is stopped by the pool's seals.
        self._read_only = os.open(f"/proc/self/fd/{memory.memfd}", os.O_RDONLY | os.O_CLOEXEC)
        self._identity = host_identity()
        num_blocks, block_bytes = memory.num_blocks, memory.block_bytes
        super().__init__(proofs, self._read_only, num_blocks, block_bytes, num_blocks * block_bytes)

    def reachable(self, importer_endpoint: bytes) -> bool:
        return importer_endpoint == self._identity

    async def close(self) -> None:
        await super().close()
        if self._read_only >= 0:
            os.close(self._read_only)
            self._read_only = -1


class ShmImporter(PoolFileImporter[_Pool]):
    """Maps pools as read-only arrays."""

    name = NAME

    def __init__(self, *, memory: PoolMemory, proofs: ConnectionProofs) -> None:
        super().__init__(memory, NAME, proofs)
        self._memory = HostMemory(memory)
        self._identity = host_identity()

    def endpoint(self) -> bytes:
        return self._identity

    def new_channel(self, pool: RemotePool[_Pool]) -> PoolFileChannel[_Pool]:
        compiled = compiled_digests() if self._memory.is_pool else None
        if compiled is None:
            return super().new_channel(pool)
        target, digesting = self._memory.incoming(()).array, compiled

        def start_digested_copy(
            source: _Pool, source_ids: Sequence[int], target_ids: Sequence[int], seed: bytes
        ) -> Future[_Digests] | _Digests:
            if len(target_ids) * self._block_bytes <= SHORT_BYTES:
                return digesting.copy(source, source_ids, target, target_ids, seed)
            return submit(self._threads, digesting.copy, source, tuple(source_ids), target, tuple(target_ids), seed)

        return DigestingPoolFileChannel(pool, self.start_copy, start_digested_copy, self._channels.discard)

    async def map(self, file: int, num_blocks: int, num_bytes: int) -> _Pool:
        try:
            if not 0 < num_bytes <= os.fstat(file).st_size:
                raise OSError(f"the file does not hold {num_blocks} blocks of {self._block_bytes} bytes")
            if not has_fixed_size(file):
                raise OSError("the file's size is not sealed: a read could end this process with SIGBUS")
            memory = mmap.mmap(file, num_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        except OSError as error:
            raise TransportError(f"mapping the exporter's pool: {error}") from error
        finally:
            os.close(file)
        count = num_blocks * self._block_bytes
        return np.frombuffer(memory, dtype=np.uint8, count=count).reshape(num_blocks, self._block_bytes)

    def start_copy(self, source: _Pool, source_ids: Sequence[int], target_ids: Sequence[int]) -> Future[None] | None:
        if self._memory.is_pool and len(target_ids) * self._block_bytes <= SHORT_BYTES:
            self._copy(source, source_ids, target_ids)
            return None
        return submit(self._threads, self._copy, source, tuple(source_ids), tuple(target_ids))

    def _copy(self, source: _Pool, source_ids: Sequence[int], target_ids: Sequence[int]) -> None:
        rows = self._memory.incoming(target_ids)
        for first, target, length in runs(source_ids, rows.indices):
            if length == 1:
                rows.array[target] = source[first]
            else:
                rows.array[target : target + length] = source[first : first + length]
        self._memory.arrived(rows, target_ids)
