"""A pool that lies in a file: passed over a Unix socket to members of the host that prove to have a token, and mapped
there. The token is a grant of cluster/auth/connections.py, and the descriptor comes with the exporter's proof.

The connection stays open on both sides; its end shows that the other process has ended. The socket is in a private
directory. A killed process cannot remove its directory, so each directory contains a lock file, whose lock the kernel
drops with the process, and each new process removes directories of the same user whose lock is free.

An importer keeps one mapping per exporter process. The end of the connection ends the mapping, which would otherwise
keep the memory of a dead exporter. Copies run on the importer's threads. A copy cannot be stopped and always ends by
itself; destroying its channel waits for it.
"""

import asyncio
import fcntl
import os
import secrets
import shutil
import socket
import struct
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from cluster.auth.connections import PROOF_BYTES
from cluster.messages import Epoch
from kvtransfer.memory import PoolMemory
from kvtransfer.transports.base import DigestingChannel, TransportError
from kvtransfer.transports.proven_connections import MAX_UNPROVEN, PROVE_S, ConnectionProofs, Opening
from kvtransfer.transports.sockets import joined, shut_down

_PREFIX = "tandem-kv-"
_LOCK = "lock"
_MAX_SOCKET_PATH = 100  # the kernel's limit is 107 bytes
_ASKED = struct.Struct("<16sI")  # ticket id, attempt
_TOKEN_BYTES = 16
_TIMEOUT_S = 5.0
_ACCEPT_PAUSE_S = 0.1  # without descriptors, accepting again at once would only spin
_MAX_ANSWER_BYTES = 4096
GEOMETRY = struct.Struct("<QQQ")  # number of blocks, bytes per block, bytes of the file

Result = TypeVar("Result")
Mapped = TypeVar("Mapped")  # a pool in the address space of this process, unmapped with the last reference to it


class PrivateDirectory:
    """A directory that only this user can read. It is in /tmp if the default place would make socket paths too long."""

    def __init__(self, parent: Path | None = None) -> None:
        """`parent` defaults to the system's temporary directory. Raises OSError."""
        parent = Path(tempfile.gettempdir()) if parent is None else parent
        if len(str(parent / f"{_PREFIX}{'x' * 8}" / "pool").encode()) > _MAX_SOCKET_PATH:
            parent = Path("/tmp")
        _remove_abandoned(parent)
        unlocked = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}", dir=parent))
        self._lock = (unlocked / _LOCK).open("wb")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        # It gets its final name only when it is locked, so that no other process removes it.
        self.path = unlocked.rename(parent / unlocked.name.removeprefix("."))

    def remove(self) -> None:
        """Remove the directory. It may be called more than once."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def _remove_abandoned(parent: Path) -> None:
    for directory in parent.glob(f"{_PREFIX}*"):
        try:
            if directory.stat().st_uid == os.getuid() and not _is_held(directory / _LOCK):
                shutil.rmtree(directory, ignore_errors=True)
        except OSError:
            continue  # another process removed it first, or it has no lock: leave it alone


def _is_held(lock: Path) -> bool:
    """Return whether a process holds the lock. Raises OSError."""
    descriptor = os.open(lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


class PoolFileExporter:
    """Passes the pool's file to importers of admitted epochs. Owns the directory, the socket and its connections,
    but not the file."""

    name = "pool file"

    def __init__(self, proofs: ConnectionProofs, file: int, num_blocks: int, block_bytes: int, num_bytes: int) -> None:
        """`num_bytes` is the length of the file."""
        self._proofs = proofs
        self._descriptor, self._geometry = file, GEOMETRY.pack(num_blocks, block_bytes, num_bytes)
        self._tokens: dict[tuple[bytes, int], bytes] = {}  # by (ticket id, attempt)
        self._directory: PrivateDirectory | None = None
        self._listener: socket.socket | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._unproven: dict[socket.socket, None] = {}  # the oldest first

    async def start(self) -> None:
        """Start to listen. Raises OSError."""
        self._directory = await asyncio.to_thread(PrivateDirectory)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.setblocking(False)
        self._listener.bind(str(self._directory.path / "pool"))
        self._listener.listen(128)
        self._keep(self._accept(self._listener))

    def grant(self, epoch: Epoch) -> bytes:
        """Return the endpoint for this epoch, which `parse_endpoint` reads. It admits one connection."""
        assert self._directory is not None, "admit before start"
        token = self._tokens.setdefault((epoch.ticket_id, epoch.attempt), secrets.token_bytes(_TOKEN_BYTES))
        return token + str(self._directory.path / "pool").encode()

    def revoke(self, epoch: Epoch) -> None:
        self._tokens.pop((epoch.ticket_id, epoch.attempt), None)

    async def close(self) -> None:
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._listener is not None and self._directory is not None:
            self._listener.close()
            await asyncio.to_thread(self._directory.remove)

    def _token(self, asked: bytes) -> bytes | None:
        return self._tokens.get(_ASKED.unpack(asked))

    def _keep(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(listener)
                if len(self._unproven) >= MAX_UNPROVEN:  # the oldest makes room: strangers keep no member out
                    oldest = next(iter(self._unproven))
                    del self._unproven[oldest]
                    shut_down(oldest)
                self._unproven[connection] = None
                self._keep(self._serve(connection))
            except (OSError, MemoryError):  # accept again after any failure: an importer must not wait in the queue
                await asyncio.sleep(_ACCEPT_PAUSE_S)

    async def _serve(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with connection:
            connection.setblocking(False)
            try:
                async with asyncio.timeout(PROVE_S):
                    asked, proof = await self._proofs.answer_on_loop(connection, self.name, _ASKED.size, self._token)
                del self._tokens[_ASKED.unpack(asked)]  # it admits one connection
                self._unproven.pop(connection, None)
                socket.send_fds(connection, [proof, self._geometry], [self._descriptor])
                await loop.sock_recv(connection, 1)
            except (OSError, MemoryError):
                return  # the importer has left or is no member, or memory is short: the connection ends
            finally:
                self._unproven.pop(connection, None)


@dataclass(frozen=True, slots=True, eq=False)
class RemotePool(Generic[Mapped]):
    """One exporter's pool as this process maps it, and the connection that lives as long as the exporter."""

    connection: socket.socket
    memory: Mapped
    num_blocks: int


class PoolFileImporter(ABC, Generic[Mapped]):
    """Owns the mappings, by exporter process, and the threads that copy."""

    def __init__(self, memory: PoolMemory, name: str, proofs: ConnectionProofs) -> None:
        self._name, self._proofs = name, proofs
        self._block_bytes = memory.block_bytes
        self._threads = ThreadPoolExecutor(2, f"kv-{name}")
        self._pools: dict[str, RemotePool[Mapped]] = {}  # by socket path, which names one start of one exporter
        self._channels: set[PoolFileChannel[Mapped]] = set()

    @property
    def num_mappings(self) -> int:
        """Return the number of exporters whose memory this process maps."""
        return len(self._pools)

    async def open_channel(self, epoch: Epoch, exporter_endpoint: bytes) -> "PoolFileChannel[Mapped]":
        path, token = parse_endpoint(exporter_endpoint)
        pool = self._pools.get(path)
        if pool is None or not is_open(pool.connection):
            self._unmap(path)
            pool = await self._receive(path, epoch, token)
        channel = self.new_channel(pool)
        self._channels.add(channel)
        return channel

    def new_channel(self, pool: RemotePool[Mapped]) -> "PoolFileChannel[Mapped]":
        """Return a channel to a mapped pool."""
        return PoolFileChannel(pool, self.start_copy, self._channels.discard)

    async def close(self) -> None:
        for channel in tuple(self._channels):
            await channel.destroy()
        for path in tuple(self._pools):
            self._unmap(path)
        self._threads.shutdown(wait=False)

    @abstractmethod
    async def map(self, file: int, num_blocks: int, num_bytes: int) -> Mapped:
        """Map the file for reading and close it. Raises TransportError."""

    @abstractmethod
    def start_copy(self, source: Mapped, source_ids: Sequence[int], target_ids: Sequence[int]) -> Future[None] | None:
        """Copy blocks into the local pool, on a thread or, where it returns None, before it returns."""

    async def _receive(self, path: str, epoch: Epoch, token: bytes) -> RemotePool[Mapped]:
        connection, geometry, file = await receive_descriptor(
            path, epoch, token, Opening(self._proofs, self._name, epoch.exporter)
        )
        try:
            num_blocks, num_bytes = self._checked(geometry, file)
            memory = await self.map(file, num_blocks, num_bytes)
        except BaseException:
            connection.close()
            raise
        self._unmap(path)  # two hand-offs may have mapped it at once
        pool = self._pools[path] = RemotePool(connection, memory, num_blocks)
        asyncio.get_running_loop().add_reader(connection, self._unmap, path)
        return pool

    def _checked(self, geometry: bytes, file: int) -> tuple[int, int]:
        """Check a received file against its announced geometry. Return (number of blocks, bytes of the file). Raises
        TransportError after closing the file.
        """
        if len(geometry) == GEOMETRY.size:
            num_blocks, block_bytes, num_bytes = GEOMETRY.unpack(geometry)
            if block_bytes == self._block_bytes and num_blocks * block_bytes <= num_bytes:
                return num_blocks, num_bytes
        os.close(file)
        raise TransportError(f"the blocks of the exporter's pool do not have {self._block_bytes} bytes")

    def _unmap(self, path: str) -> None:
        """Drop the mapping. Copies in flight keep the memory until they are done."""
        pool = self._pools.pop(path, None)
        if pool is not None:
            asyncio.get_running_loop().remove_reader(pool.connection)
            pool.connection.close()


class PoolFileChannel(Generic[Mapped]):
    """The Channel of `shm` and `cuda_ipc`."""

    def __init__(
        self,
        pool: RemotePool[Mapped],
        start_copy: Callable[[Mapped, Sequence[int], Sequence[int]], Future[None] | None],
        ended: "Callable[[PoolFileChannel[Mapped]], None]",
    ) -> None:
        self._pool: RemotePool[Mapped] | None = pool  # None: destroyed
        self._start_copy, self._ended = start_copy, ended
        self._read: Future[Any] | None = None  # in flight, or ended by anything but success

    async def read(self, remote_block_ids: Sequence[int], local_block_ids: Sequence[int]) -> None:
        await self._copied(self._start_copy, remote_block_ids, local_block_ids)

    async def _copied(
        self,
        start_copy: Callable[[Mapped, Sequence[int], Sequence[int]], Future[Result] | Result],
        remote_block_ids: Sequence[int],
        local_block_ids: Sequence[int],
    ) -> Result:
        """Return the result of a copy. Raises TransportError."""
        assert len(remote_block_ids) == len(local_block_ids)
        if self._pool is None or self._read is not None:
            raise TransportError("the channel is closed or poisoned")
        if remote_block_ids and not 0 <= min(remote_block_ids) <= max(remote_block_ids) < self._pool.num_blocks:
            raise TransportError(f"the read names a block beyond the {self._pool.num_blocks} of the exporter's pool")
        started = start_copy(self._pool.memory, remote_block_ids, local_block_ids)
        if not isinstance(started, Future):
            return started
        self._read = started
        result: Result = await asyncio.wrap_future(started)
        self._read = None
        return result

    async def destroy(self) -> None:
        self._pool = None  # otherwise the traceback of a failed read keeps a dead exporter's memory mapped
        if self._read is not None:
            await joined(self._read)
        self._ended(self)

    async def finish(self) -> None:
        await self.destroy()


class DigestingPoolFileChannel(PoolFileChannel[Mapped], DigestingChannel):
    """The same channel where the copy can digest."""

    def __init__(
        self,
        pool: RemotePool[Mapped],
        start_copy: Callable[[Mapped, Sequence[int], Sequence[int]], Future[None] | None],
        start_digested_copy: Callable[
            [Mapped, Sequence[int], Sequence[int], bytes], Future[tuple[bytes, ...]] | tuple[bytes, ...]
        ],
        ended: Callable[[PoolFileChannel[Mapped]], None],
    ) -> None:
        super().__init__(pool, start_copy, ended)
        self._start_digested_copy = start_digested_copy

    async def read_digested(
        self, remote_block_ids: Sequence[int], local_block_ids: Sequence[int], seed: bytes
    ) -> tuple[bytes, ...]:
        def start_copy(
            pool: Mapped, remote: Sequence[int], local: Sequence[int]
        ) -> Future[tuple[bytes, ...]] | tuple[bytes, ...]:
            return self._start_digested_copy(pool, remote, local, seed)

        return await self._copied(start_copy, remote_block_ids, local_block_ids)


def parse_endpoint(endpoint: bytes) -> tuple[str, bytes]:
    """Return (path of the socket, token) of an endpoint that `grant` returned."""
    return endpoint[_TOKEN_BYTES:].decode(errors="replace"), endpoint[:_TOKEN_BYTES]


async def receive_descriptor(
    path: str, epoch: Epoch, token: bytes, opening: Opening
) -> tuple[socket.socket, bytes, int]:
    """Return (connection, geometry, descriptor), which the caller then owns. Raises TransportError."""
    if len(token) != _TOKEN_BYTES:
        raise TransportError("the endpoint is damaged or belongs to another transport")
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    proofs, transport = opening.proofs, opening.transport
    asked = _ASKED.pack(epoch.ticket_id, epoch.attempt)
    request = proofs.request(transport, opening.exporter, grant=token, content=asked)
    descriptors: list[int] = []
    try:
        connection.setblocking(False)
        async with asyncio.timeout(_TIMEOUT_S):
            loop = asyncio.get_running_loop()
            await loop.sock_connect(connection, path)
            await loop.sock_sendall(connection, request.message)
            await _readable(connection)
        answer, descriptors, _, _ = socket.recv_fds(connection, _MAX_ANSWER_BYTES, 1)
        if len(descriptors) != 1:
            raise ConnectionRefusedError("the exporter has not admitted this epoch")
        proofs.verify_answer(connection, transport, request, answer[:PROOF_BYTES])
    except BaseException as error:
        connection.close()
        for descriptor in descriptors:
            os.close(descriptor)
        if isinstance(error, OSError):
            raise TransportError(f"asking for the pool at {path}: {error}") from error
        raise
    return connection, answer[PROOF_BYTES:], descriptors[0]


def is_open(connection: socket.socket) -> bool:
    """Return whether the exporter is alive. It sends nothing after the descriptor, so bytes or an end mean that it is
    gone."""
    try:
        connection.recv(1, socket.MSG_DONTWAIT)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


async def _readable(connection: socket.socket) -> None:
    """Wait until the socket is readable. (sock_recv would discard the descriptor that comes with the bytes.)"""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(connection, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(connection)
