"""Shared memory: the exporter's pool is a memfd, handed over a Unix socket and mapped read-only by the importer.

The importer copies out of the mapping. One mapping per exporter process is kept; its Unix socket stays open beside it,
so that the death of the exporter, whose memory the mapping would keep alive, ends the mapping too.
"""

import asyncio
import hmac
import mmap
import os
import secrets
import shutil
import socket
import struct
import tempfile
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt

from cluster.messages import Epoch
from kvtransfer.memory import PoolMemory
from kvtransfer.transports.base import TransportError, TransportMeans
from kvtransfer.transports.host_memory import SHORT_BYTES, HostMemory, runs
from kvtransfer.transports.sockets import joined

NAME = "shm"

_HELLO = struct.Struct("<16sI16s")  # ticket id, attempt, token
_GEOMETRY = struct.Struct("<QQ")  # number of blocks, bytes per block
_TOKEN_BYTES = 16
_TIMEOUT_S = 5.0
_ACCEPT_PAUSE_S = 0.1  # out of descriptors: accepting again at once would only spin
_MAX_SOCKET_PATH = 100  # the kernel takes 107 bytes


def unavailable(means: TransportMeans) -> str:
    return "" if means.memory.memfd is not None else "the pool is not in this host's memory"


def exporter(means: TransportMeans) -> "ShmExporter":
    return ShmExporter(memory=means.memory)


def importer(means: TransportMeans) -> "ShmImporter":
    return ShmImporter(memory=means.memory)


def host_identity() -> bytes:
    """Equal for two processes exactly when they run on one kernel and see the same files."""
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot_id} {os.stat('/proc/self/ns/mnt').st_ino} {os.stat('/').st_ino}".encode()


class ShmExporter:
    """Hands the pool's file to importers of admitted epochs. Owns a private directory with the Unix socket."""

    def __init__(self, *, memory: PoolMemory) -> None:
        assert memory.memfd is not None, "shm needs a pool in a memfd"
        self._memfd = memory.memfd
        self._geometry = _GEOMETRY.pack(memory.num_blocks, memory.block_bytes)
        self._tokens: dict[tuple[bytes, int], bytes] = {}  # by (ticket id, attempt)
        self._directory: Path | None = None
        self._listener: socket.socket | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def name(self) -> str:
        return NAME

    async def start(self) -> None:
        self._directory = _private_directory()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.setblocking(False)
        self._listener.bind(str(self._directory / "pool"))
        self._listener.listen(128)
        self._keep(self._accept(self._listener))

    def reachable(self, importer_endpoint: bytes) -> bool:
        return importer_endpoint == host_identity()

    def admit(self, epoch: Epoch) -> bytes:
        assert self._directory is not None, "admit before start"
        token = self._tokens.setdefault((epoch.ticket_id, epoch.attempt), secrets.token_bytes(_TOKEN_BYTES))
        return token + str(self._directory / "pool").encode()

    def revoke(self, epoch: Epoch) -> None:
        self._tokens.pop((epoch.ticket_id, epoch.attempt), None)

    async def close(self) -> None:
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._listener is not None and self._directory is not None:
            self._listener.close()
            await asyncio.to_thread(shutil.rmtree, self._directory, ignore_errors=True)

    def _keep(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError:
                await asyncio.sleep(_ACCEPT_PAUSE_S)
            else:
                self._keep(self._serve(connection))

    async def _serve(self, connection: socket.socket) -> None:
        """Hands over the file, then holds the connection: its end tells the importer that this process is gone."""
        loop = asyncio.get_running_loop()
        with connection:
            connection.setblocking(False)
            try:
                async with asyncio.timeout(_TIMEOUT_S):
                    hello = await _receive(connection, _HELLO.size)
                ticket_id, attempt, token = _HELLO.unpack(hello)
                if not hmac.compare_digest(self._tokens.get((ticket_id, attempt), b""), token):
                    return
                self._hand_over(connection)
                await loop.sock_recv(connection, 1)
            except OSError:
                return  # the importer is gone

    def _hand_over(self, connection: socket.socket) -> None:
        # Opened anew for reading only: the pool's own descriptor would let the importer map it writable.
        read_only = os.open(f"/proc/self/fd/{self._memfd}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            socket.send_fds(connection, [self._geometry], [read_only])
        finally:
            os.close(read_only)


class _Mapping:
    """One exporter's pool as this process sees it, and the connection that lives as long as the exporter."""

    def __init__(self, connection: socket.socket, array: npt.NDArray[np.uint8]) -> None:
        self.connection = connection
        self.array = array  # [num_blocks, block_bytes], read-only; unmapped with the last reference to it

    def alive(self) -> bool:
        try:
            return self.connection.recv(1, socket.MSG_DONTWAIT) != b""
        except BlockingIOError:
            return True
        except OSError:
            return False


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
        """Exporters whose memory this process holds at the moment."""
        return len(self._mappings)

    def endpoint(self) -> bytes:
        return self._identity

    async def open(self, epoch: Epoch, exporter_endpoint: bytes) -> "ShmChannel":
        token, path = exporter_endpoint[:_TOKEN_BYTES], exporter_endpoint[_TOKEN_BYTES:].decode(errors="replace")
        mapping = self._mappings.get(path)
        if mapping is None or not mapping.alive():
            self._unmap(path)
            try:
                async with asyncio.timeout(_TIMEOUT_S):
                    mapping = await _mapped(path, _HELLO.pack(epoch.ticket_id, epoch.attempt, token))
            except OSError as error:
                raise TransportError(f"mapping the pool at {path}: {error}") from error
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
        """Readers still in flight keep the memory until they are done."""
        mapping = self._mappings.pop(path, None)
        if mapping is not None:
            asyncio.get_running_loop().remove_reader(mapping.connection)
            mapping.connection.close()


class ShmChannel:
    """See Channel in base.py."""

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
        self._ended(self)

    async def release(self) -> None:
        await self.destroy()

    def _copy(self, remote_block_ids: Sequence[int], local_block_ids: Sequence[int]) -> None:
        rows = self._memory.incoming(local_block_ids)
        for source, target, length in runs(remote_block_ids, rows.indices):
            if length == 1:
                rows.array[target] = self._remote[source]
            else:
                rows.array[target : target + length] = self._remote[source : source + length]
        self._memory.arrived(rows, local_block_ids)


async def _mapped(path: str, hello: bytes) -> _Mapping:
    """Raises OSError."""
    loop = asyncio.get_running_loop()
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.setblocking(False)
        await loop.sock_connect(connection, path)
        await loop.sock_sendall(connection, hello)
        await _readable(connection)
        geometry, descriptors, _, _ = socket.recv_fds(connection, _GEOMETRY.size, 1)
        if len(geometry) != _GEOMETRY.size or len(descriptors) != 1:
            raise ConnectionRefusedError("the exporter does not know this epoch")
        return _Mapping(connection, _map(descriptors[0], *_GEOMETRY.unpack(geometry)))
    except BaseException:
        connection.close()
        raise


def _map(descriptor: int, num_blocks: int, block_bytes: int) -> npt.NDArray[np.uint8]:
    """Takes the descriptor over. Raises OSError."""
    try:
        num_bytes = num_blocks * block_bytes
        if not 0 < num_bytes <= os.fstat(descriptor).st_size:
            raise OSError(f"the file does not hold {num_blocks} blocks of {block_bytes} bytes")
        memory = mmap.mmap(descriptor, num_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    finally:
        os.close(descriptor)
    return np.frombuffer(memory, dtype=np.uint8).reshape(num_blocks, block_bytes)


async def _readable(connection: socket.socket) -> None:
    """sock_recv would throw the descriptor away that comes with the bytes."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()

    def arrived() -> None:
        if not ready.done():
            ready.set_result(None)

    loop.add_reader(connection, arrived)
    try:
        await ready
    finally:
        loop.remove_reader(connection)


async def _receive(connection: socket.socket, num_bytes: int) -> bytes:
    loop = asyncio.get_running_loop()
    data = b""
    while len(data) < num_bytes:
        piece = await loop.sock_recv(connection, num_bytes - len(data))
        if not piece:
            raise ConnectionResetError("the importer ended the connection")
        data += piece
    return data


def _private_directory() -> Path:
    """Readable by this user only. In /tmp where the usual place makes the socket's path too long for the kernel."""
    directory = Path(tempfile.mkdtemp(prefix="tandem-kv-"))
    if len(str(directory / "pool").encode()) > _MAX_SOCKET_PATH:
        directory.rmdir()
        directory = Path(tempfile.mkdtemp(prefix="tandem-kv-", dir="/tmp"))
    return directory
