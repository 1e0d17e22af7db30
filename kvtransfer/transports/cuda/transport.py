"""The transport `cuda_ipc` between GPUs of one host. The importer maps the exporter's pages for reading and copies from
device to device.

The pages are passed as a file. CUDA's virtual memory management keeps exported pages while any process maps them, so a
copy in flight when the exporter dies reads what was sealed, and ends. The connection that carried the file ends with
the exporter; that ends the mapping, and so the pages.

A copy cannot be stopped and always ends by itself; destroying its channel waits for it.
"""

import asyncio
import os
import socket
import struct
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from cluster.messages import Epoch
from kvtransfer.memory import ExportedMemory, PoolMemory
from kvtransfer.transports.base import TransportError, TransportSetup
from kvtransfer.transports.cuda.access import CudaAccess, Mapping, PoolAccess
from kvtransfer.transports.shm.descriptor_server import DescriptorServer, is_open, parse_endpoint, receive_descriptor
from kvtransfer.transports.shm.transport import host_identity
from kvtransfer.transports.sockets import joined

NAME = "cuda_ipc"

_GEOMETRY = struct.Struct("<QQQ")  # number of blocks, bytes per block, bytes of the file


def unavailable(setup: TransportSetup) -> str:
    memory = setup.memory
    if not isinstance(memory, ExportedMemory):
        return "the memory to transfer is not exported GPU memory"
    return memory.why_no_cuda_file


def exporter(setup: TransportSetup) -> "CudaIpcExporter":
    assert isinstance(setup.memory, ExportedMemory)
    return CudaIpcExporter(memory=setup.memory, access=CudaAccess(setup.memory))


def importer(setup: TransportSetup) -> "CudaIpcImporter":
    return CudaIpcImporter(memory=setup.memory, access=CudaAccess(setup.memory))


class CudaIpcExporter:
    """Passes the pool's file to importers of admitted epochs."""

    def __init__(self, *, memory: ExportedMemory, access: PoolAccess) -> None:
        assert memory.cuda_file is not None, memory.why_no_cuda_file
        self._access = access
        geometry = _GEOMETRY.pack(memory.num_blocks, memory.block_bytes, memory.cuda_file_bytes)
        self._server = DescriptorServer(memory.cuda_file, geometry)

    @property
    def name(self) -> str:
        return NAME

    async def start(self) -> None:
        await self._server.start()

    def reachable(self, importer_endpoint: bytes) -> bool:
        host, _, device = importer_endpoint.rpartition(b" ")
        return host == host_identity() and self._access.reaches(device.decode(errors="replace"))

    def grant(self, epoch: Epoch) -> bytes:
        return self._server.grant(epoch)

    def revoke(self, epoch: Epoch) -> None:
        self._server.revoke(epoch)

    async def close(self) -> None:
        await self._server.close()


@dataclass(frozen=True, slots=True)
class _RemotePool:
    """One exporter's pool as this process maps it, and the connection that lives as long as the exporter."""

    connection: socket.socket
    mapping: Mapping
    num_blocks: int


class CudaIpcImporter:
    """Owns the mappings, by exporter process. Copies run on its threads."""

    def __init__(self, *, memory: PoolMemory, access: PoolAccess) -> None:
        self._block_bytes = memory.block_bytes
        self._access = access
        self._endpoint = host_identity() + b" " + access.device().encode()
        self._threads = ThreadPoolExecutor(2, "kv-cuda-ipc")
        self._pools: dict[str, _RemotePool] = {}  # by socket path, which names one start of one exporter
        self._channels: set[CudaIpcChannel] = set()

    @property
    def name(self) -> str:
        return NAME

    @property
    def num_mappings(self) -> int:
        """Return the number of exporters whose memory this process maps."""
        return len(self._pools)

    def endpoint(self) -> bytes:
        return self._endpoint

    async def open_channel(self, epoch: Epoch, exporter_endpoint: bytes) -> "CudaIpcChannel":
        path, token = parse_endpoint(exporter_endpoint)
        pool = self._pools.get(path)
        if pool is None or not is_open(pool.connection):
            self._unmap(path)
            pool = await self._map(path, epoch, token)
        channel = CudaIpcChannel(pool, self._access, self._threads, self._channels.discard)
        self._channels.add(channel)
        return channel

    async def close(self) -> None:
        for channel in tuple(self._channels):
            await channel.destroy()
        for path in tuple(self._pools):
            self._unmap(path)
        self._threads.shutdown(wait=False)

    async def _map(self, path: str, epoch: Epoch, token: bytes) -> _RemotePool:
        connection, geometry, file = await receive_descriptor(path, epoch, token)
        try:
            num_blocks, num_bytes = self._checked(geometry, file)
            mapping = await asyncio.shield(  # otherwise the file would never be closed
                asyncio.get_running_loop().run_in_executor(self._threads, self._access.map, file, num_bytes)
            )
        except BaseException:
            connection.close()
            raise
        self._unmap(path)  # two hand-offs may have mapped it at once
        pool = self._pools[path] = _RemotePool(connection, mapping, num_blocks)
        asyncio.get_running_loop().add_reader(connection, self._unmap, path)
        return pool

    def _checked(self, geometry: bytes, file: int) -> tuple[int, int]:
        """Return (number of blocks, bytes of the file)."""
        if len(geometry) == _GEOMETRY.size:
            num_blocks, block_bytes, num_bytes = _GEOMETRY.unpack(geometry)
            if block_bytes == self._block_bytes and num_blocks * block_bytes <= num_bytes:
                return num_blocks, num_bytes
        os.close(file)
        raise TransportError(f"the exporter's pool is not of blocks of {self._block_bytes} bytes")

    def _unmap(self, path: str) -> None:
        """Drop the mapping. Copies in flight keep the memory until they are done."""
        pool = self._pools.pop(path, None)
        if pool is not None:
            asyncio.get_running_loop().remove_reader(pool.connection)
            pool.connection.close()


class CudaIpcChannel:
    """The Channel of `cuda_ipc`."""

    def __init__(
        self,
        pool: _RemotePool,
        access: PoolAccess,
        threads: ThreadPoolExecutor,
        ended: "Callable[[CudaIpcChannel], None]",
    ) -> None:
        self._pool: _RemotePool | None = pool  # None: destroyed
        self._access, self._threads, self._ended = access, threads, ended
        self._read: Future[None] | None = None  # in flight, or ended by anything but success

    async def read(self, remote_block_ids: Sequence[int], local_block_ids: Sequence[int]) -> None:
        assert len(remote_block_ids) == len(local_block_ids)
        if self._pool is None or self._read is not None:
            raise TransportError("the channel is closed or poisoned")
        if remote_block_ids and not 0 <= min(remote_block_ids) <= max(remote_block_ids) < self._pool.num_blocks:
            raise TransportError(f"a block past the {self._pool.num_blocks} of the exporter's pool")
        self._read = self._threads.submit(
            self._access.copy, self._pool.mapping, tuple(remote_block_ids), tuple(local_block_ids)
        )
        await asyncio.wrap_future(self._read)
        self._read = None

    async def destroy(self) -> None:
        self._pool = None  # otherwise the traceback of a failed read keeps a dead exporter's pages mapped
        if self._read is not None:
            await joined(self._read)
        self._ended(self)

    async def finish(self) -> None:
        await self.destroy()
