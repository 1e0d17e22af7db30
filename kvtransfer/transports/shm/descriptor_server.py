"""Passes a file descriptor to other processes of the host that present a token, over a Unix socket.

The connection stays open on both sides; its end shows that the other process has ended. The socket is in a private
directory. A killed process cannot remove its directory, so each directory contains a lock file, whose lock the kernel
drops with the process, and each new process removes directories of the same user whose lock is free.
"""

import asyncio
import fcntl
import hmac
import os
import secrets
import shutil
import socket
import struct
import tempfile
from collections.abc import Coroutine
from pathlib import Path

from cluster.messages import Epoch
from kvtransfer.transports.base import TransportError

_PREFIX = "tandem-kv-"
_LOCK = "lock"
_MAX_SOCKET_PATH = 100  # the kernel's limit is 107 bytes
_HELLO = struct.Struct("<16sI16s")  # ticket id, attempt, token
_TOKEN_BYTES = 16
_TIMEOUT_S = 5.0
_ACCEPT_PAUSE_S = 0.1  # without descriptors, accepting again at once would only spin
_MAX_GEOMETRY_BYTES = 4096


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


class DescriptorServer:
    """Owns the directory, the socket and its connections, but not the descriptor."""

    def __init__(self, descriptor: int, geometry: bytes) -> None:
        """`geometry` is sent together with the descriptor."""
        self._descriptor, self._geometry = descriptor, geometry
        self._tokens: dict[tuple[bytes, int], bytes] = {}  # by (ticket id, attempt)
        self._directory: PrivateDirectory | None = None
        self._listener: socket.socket | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Start to listen. Raises OSError."""
        self._directory = await asyncio.to_thread(PrivateDirectory)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.setblocking(False)
        self._listener.bind(str(self._directory.path / "pool"))
        self._listener.listen(128)
        self._keep(self._accept(self._listener))

    def grant(self, epoch: Epoch) -> bytes:
        """Return the endpoint for this epoch, which `parse_endpoint` reads."""
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

    def _keep(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(listener)
                self._keep(self._serve(connection))
            except (OSError, MemoryError):  # accept again after any failure: an importer must not wait in the queue
                await asyncio.sleep(_ACCEPT_PAUSE_S)

    async def _serve(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with connection:
            connection.setblocking(False)
            try:
                async with asyncio.timeout(_TIMEOUT_S):
                    hello = await _receive(connection, _HELLO.size)
                ticket_id, attempt, token = _HELLO.unpack(hello)
                if hmac.compare_digest(self._tokens.get((ticket_id, attempt), b""), token):
                    socket.send_fds(connection, [self._geometry], [self._descriptor])
                    await loop.sock_recv(connection, 1)
            except (OSError, MemoryError):
                return  # the importer is gone, or memory is short; the end of the connection tells the importer


def parse_endpoint(endpoint: bytes) -> tuple[str, bytes]:
    """Return (path of the socket, token) of an endpoint that `grant` returned."""
    return endpoint[_TOKEN_BYTES:].decode(errors="replace"), endpoint[:_TOKEN_BYTES]


async def receive_descriptor(path: str, epoch: Epoch, token: bytes) -> tuple[socket.socket, bytes, int]:
    """Return (connection, geometry, descriptor), which the caller then owns. Raises TransportError."""
    if len(token) != _TOKEN_BYTES:
        raise TransportError("not an endpoint of this transport")
    hello = _HELLO.pack(epoch.ticket_id, epoch.attempt, token)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.setblocking(False)
        async with asyncio.timeout(_TIMEOUT_S):
            loop = asyncio.get_running_loop()
            await loop.sock_connect(connection, path)
            await loop.sock_sendall(connection, hello)
            await _readable(connection)
        geometry, descriptors, _, _ = socket.recv_fds(connection, _MAX_GEOMETRY_BYTES, 1)
        if len(descriptors) != 1:
            raise ConnectionRefusedError("the exporter has not admitted this epoch")
    except BaseException as error:
        connection.close()
        if isinstance(error, OSError):
            raise TransportError(f"asking for the pool at {path}: {error}") from error
        raise
    return connection, geometry, descriptors[0]


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


async def _receive(connection: socket.socket, num_bytes: int) -> bytes:
    loop = asyncio.get_running_loop()
    data = b""
    while len(data) < num_bytes:
        piece = await loop.sock_recv(connection, num_bytes - len(data))
        if not piece:
            raise ConnectionResetError("the importer ended the connection")
        data += piece
    return data
