"""A file descriptor of one process for others on the host that know a token: over a Unix socket in a private directory.

The connection stays open on both sides: its end tells that the other process is gone.
"""

import asyncio
import hmac
import secrets
import socket
import struct
from collections.abc import Coroutine

from cluster.messages import Epoch
from kvtransfer.transports.base import TransportError
from kvtransfer.transports.shm.private_directory import PrivateDirectory

_HELLO = struct.Struct("<16sI16s")  # ticket id, attempt, token
_TOKEN_BYTES = 16
_TIMEOUT_S = 5.0
_ACCEPT_PAUSE_S = 0.1  # out of descriptors: accepting again at once would only spin
_MAX_GEOMETRY_BYTES = 4096


class DescriptorServer:
    """Owns the directory, the socket and its connections. Never the descriptor."""

    def __init__(self, descriptor: int, geometry: bytes) -> None:
        """`geometry`: what comes with the descriptor."""
        self._descriptor, self._geometry = descriptor, geometry
        self._tokens: dict[tuple[bytes, int], bytes] = {}  # by (ticket id, attempt)
        self._directory: PrivateDirectory | None = None
        self._listener: socket.socket | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Raises OSError."""
        self._directory = await asyncio.to_thread(PrivateDirectory)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.setblocking(False)
        self._listener.bind(str(self._directory.path / "pool"))
        self._listener.listen(128)
        self._keep(self._accept(self._listener))

    def admit(self, epoch: Epoch) -> bytes:
        """What `Endpoint.parse` takes."""
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
            except (OSError, MemoryError):  # it accepts again, whatever failed: an importer must not wait in its queue
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
                return  # the importer is gone, or memory is short: it is told by the end of the connection


def parse_endpoint(endpoint: bytes) -> tuple[str, bytes]:
    """(path of the socket, token) of what `admit` said."""
    return endpoint[_TOKEN_BYTES:].decode(errors="replace"), endpoint[:_TOKEN_BYTES]


async def receive_descriptor(path: str, epoch: Epoch, token: bytes) -> tuple[socket.socket, bytes, int]:
    """(connection, geometry, descriptor), all of them the caller's from here on. Raises TransportError."""
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
            raise ConnectionRefusedError("the exporter does not know this epoch")
    except BaseException as error:
        connection.close()
        if isinstance(error, OSError):
            raise TransportError(f"asking for the pool at {path}: {error}") from error
        raise
    return connection, geometry, descriptors[0]


def is_open(connection: socket.socket) -> bool:
    """Nothing is ever said after the descriptor: bytes or an end mean that it is over."""
    try:
        connection.recv(1, socket.MSG_DONTWAIT)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


async def _readable(connection: socket.socket) -> None:
    """sock_recv would throw the descriptor away that comes with the bytes."""
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
