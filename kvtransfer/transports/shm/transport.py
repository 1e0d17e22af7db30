"""The transport `shm`: the exporter's pool is a sealed memfd, passed over a Unix socket and mapped read-only by the
importer.

The importer copies out of the mapping. One mapping per exporter process is kept; its Unix socket stays open beside it,
so that the death of the exporter, whose memory the mapping would keep alive, ends the mapping too.
"""

import asyncio
import mmap
import os
import socket
import struct
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from cluster.messages import Epoch
from cluster.shared_memory import has_fixed_size
from kvtransfer.memory import PoolMemory
from kvtransfer.transports.base import TransportError, TransportSetup
from kvtransfer.transports.host_memory import SHORT_BYTES, HostMemory, runs
from kvtransfer.transports.shm.descriptor_server import DescriptorServer, is_open, parse_endpoint, receive_descriptor
from kvtransfer.transports.sockets import joined

NAME = "shm"

_GEOMETRY = struct.Struct("<QQ")  # number of blocks, bytes per block


def unavailable(setup: TransportSetup) -> str:
    return "" if setup.memory.memfd is not None else "the pool is not in this host's memory"


def exporter(setup: TransportSetup) -> "ShmExporter":
    return ShmExporter(memory=setup.memory)


def importer(setup: TransportSetup) -> "ShmImporter":
    return ShmImporter(memory=setup.memory)


def host_identity() -> bytes:
    """Return bytes that are equal for two processes exactly when they share a kernel and a mount namespace."""
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot_id} {os.stat('/proc/self/ns/mnt').st_ino} {os.stat('/').st_ino}".encode()


class ShmExporter:
    """Passes the pool's file to importers of admitted epochs."""

    def __init__(self, *, memory: PoolMemory) -> None:
        assert memory.memfd is not None, "shm needs a pool in a memfd"
        # Opened again for reading only. An importer that opens it once more for writing is stopped by the pool's seals.
        self._read_only = os.open(f"/proc/self/fd/{memory.memfd}", os.O_RDONLY | os.O_CLOEXEC)
        self._server = DescriptorServer(self._read_only, _GEOMETRY.pack(memory.num_blocks, memory.block_bytes))

    @property
    def name(self) -> str:
        return NAME

    async def start(self) -> None:
        await self._server.start()

    def reachable(self, importer_endpoint: bytes) -> bool:
        return importer_endpoint == host_identity()

    def grant(self, epoch: Epoch) -> bytes:
        return self._server.grant(epoch)

    def revoke(self, epoch: Epoch) -> None:
        self._server.revoke(epoch)

    async def close(self) -> None:
        await self._server.close()
        if self._read_only >= 0:
            os.close(self._read_only)
            self._read_only = -1


@dataclass(frozen=True, slots=True)
class _Mapping:
    """One exporter's pool as this process maps it, and the connection that lives as long as the exporter."""

    connection: socket.socket
    array: npt.NDArray[np.uint8]  # [num_blocks, block_bytes], read-only; unmapped with the last reference to it


class ShmImporter:
    """Owns the mappings, by exporter process. Copies run on its threads; a copy always ends by itself."""

    def __init__(self, *, memory: PoolMemory) -> None:
        self._memory = HostMemory(memory)
        self._block_bytes = memory.block_bytes
        self._copiers = ThreadPoolExecutor(2, "kv-shm-copy")
        self._mappings: dict[str, _Mapping] = {}  # by socket path, which names one start of one exporter
        self._identity = host_identity()
        self._channels: set[ShmChannel] = set()

    @property
    def name(self) -> str:
        return NAME

    @property
    def num_mappings(self) -> int:
        """Return the number of exporters whose memory this process maps."""
        return len(self._mappings)

    def endpoint(self) -> bytes:
        return self._identity

    async def open_channel(self, epoch: Epoch, exporter_endpoint: bytes) -> "ShmChannel":
        path, token = parse_endpoint(exporter_endpoint)
        mapping = self._mappings.get(path)
        if mapping is None or not is_open(mapping.connection):
            self._unmap(path)
            mapping = await _mapped(path, epoch, token)
            self._keep(path, mapping)
        if mapping.array.shape[1] != self._block_bytes:
            raise TransportError(f"blocks of {mapping.array.shape[1]} bytes there, of {self._block_bytes} here")
        channel = ShmChannel(mapping.array, self._memory, self._copiers, self._channels.discard)
        self._channels.add(channel)
        return channel

    async def close(self) -> None:
        for channel in tuple(self._channels):
            await channel.destroy()
        for path in tuple(self._mappings):
            self._unmap(path)
        self._copiers.shutdown(wait=False)

    def _keep(self, path: str, mapping: _Mapping) -> None:
        self._unmap(path)  # two hand-offs may have mapped it at once
        self._mappings[path] = mapping
        asyncio.get_running_loop().add_reader(mapping.connection, self._unmap, path)

    def _unmap(self, path: str) -> None:
        """Drop the mapping. Reads in flight keep the memory until they are done."""
        mapping = self._mappings.pop(path, None)
        if mapping is not None:
            asyncio.get_running_loop().remove_reader(mapping.connection)
            mapping.connection.close()


class ShmChannel:
    """The Channel of `shm`."""

    def __init__(
        self,
        remote: npt.NDArray[np.uint8],
        memory: HostMemory,
        copiers: ThreadPoolExecutor,
        ended: "Callable[[ShmChannel], None]",
    ) -> None:
        self._remote = remote
        self._memory, self._copiers = memory, copiers
        self._ended = ended
        self._open = True
        self._read: Future[None] | None = None  # in flight, or ended by anything but success

    async def read(self, remote_block_ids: Sequence[int], local_block_ids: Sequence[int]) -> None:
        assert len(remote_block_ids) == len(local_block_ids)
        if not self._open or self._read is not None:
            raise TransportError("the channel is closed or poisoned")
        if max(remote_block_ids, default=0) >= len(self._remote):
            raise TransportError(f"a block past the {len(self._remote)} of the exporter's pool")
        if self._memory.is_pool and len(local_block_ids) * self._remote.shape[1] <= SHORT_BYTES:
            self._copy(remote_block_ids, local_block_ids)
            return
        self._read = self._copiers.submit(self._copy, tuple(remote_block_ids), tuple(local_block_ids))
        await asyncio.wrap_future(self._read)
        self._read = None

    async def destroy(self) -> None:
        self._open = False
        if self._read is not None:
            await joined(self._read)
        # Otherwise the traceback of a failed read keeps a dead exporter's pool mapped.
        self._remote = self._remote[:0].copy()
        self._ended(self)

    async def finish(self) -> None:
        await self.destroy()

    def _copy(self, remote_block_ids: Sequence[int], local_block_ids: Sequence[int]) -> None:
        rows = self._memory.incoming(local_block_ids)
        for source, target, length in runs(remote_block_ids, rows.indices):
            if length == 1:
                rows.array[target] = self._remote[source]
            else:
                rows.array[target : target + length] = self._remote[source : source + length]
        self._memory.arrived(rows, local_block_ids)


async def _mapped(path: str, epoch: Epoch, token: bytes) -> _Mapping:
    """Request and map an exporter's pool. Raises TransportError."""
    connection, geometry, descriptor = await receive_descriptor(path, epoch, token)
    try:
        return _Mapping(connection, _map(descriptor, geometry))
    except (OSError, struct.error) as error:
        connection.close()
        raise TransportError(f"mapping the pool at {path}: {error}") from error


def _map(descriptor: int, geometry: bytes) -> npt.NDArray[np.uint8]:
    """Map the file and close the descriptor. Raises OSError, struct.error."""
    try:
        num_blocks, block_bytes = _GEOMETRY.unpack(geometry)
        num_bytes = num_blocks * block_bytes
        if not 0 < num_bytes <= os.fstat(descriptor).st_size:
            raise OSError(f"the file does not hold {num_blocks} blocks of {block_bytes} bytes")
        if not has_fixed_size(descriptor):
            raise OSError("the file's size is not sealed: a read could end this process with SIGBUS")
        memory = mmap.mmap(descriptor, num_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    finally:
        os.close(descriptor)
    return np.frombuffer(memory, dtype=np.uint8).reshape(num_blocks, block_bytes)
