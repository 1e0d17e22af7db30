"""TCP: blocks straight from the exporter's pool into the importer's, by vectored send and receive.

A socket serves one hand-off at a time and is kept for the next one when it ends clean. Every read is announced with
its epoch and a number and answered with the same; a read that ends any other way poisons the socket, which is shut
down and its reader joined before anyone may touch the destination blocks.

Sockets block, each in a thread of its own: the kernel copies without the interpreter's lock, the event loop never
waits, and a peer that hangs stops nobody else. (asyncio would wake the loop for every piece the kernel has ready.)
"""

import asyncio
import hmac
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from cluster.messages import Epoch
from kvtransfer.memory import PoolMemory
from kvtransfer.transports.base import TransportError, TransportMeans
from kvtransfer.transports.host_memory import HostMemory
from kvtransfer.transports.sockets import connect, joined, receive, receive_into, send, shut_down, tune

NAME = "tcp"

# magic, ticket id, attempt, number of the read, token, number of blocks; then the block ids, 4 bytes each.
_ANNOUNCEMENT = struct.Struct("<4s16sII16sI")
# magic, ticket id, attempt, number of the read, refused or not, number of bytes; then the bytes.
_ANSWER = struct.Struct("<4s16sII?Q")
_MAGIC = b"TKV1"
_TOKEN_BYTES = 16
_ENDPOINT = struct.Struct(f"<{_TOKEN_BYTES}sH")  # token, port; then the host's name
_MAX_CONNECTIONS = 512
_HELLO_TIMEOUT_S = 5.0
_ACCEPT_PAUSE_S = 0.1  # out of descriptors: accepting again at once would only spin


def unavailable(means: TransportMeans) -> str:
    return ""


def exporter(means: TransportMeans) -> "TcpExporter":
    return TcpExporter(
        memory=means.memory, host=means.host, advertise_host=means.advertise_host, send_timeout_s=means.timeout_s
    )


def importer(means: TransportMeans) -> "TcpImporter":
    return TcpImporter(memory=means.memory)


class TcpExporter:
    """Answers announced reads of admitted epochs. Owns its listening socket, its connections and their threads."""

    def __init__(self, *, memory: PoolMemory, host: str, advertise_host: str, send_timeout_s: float) -> None:
        self._memory = HostMemory(memory)
        self._num_blocks, self._block_bytes = memory.num_blocks, memory.block_bytes
        self._host, self._advertise_host, self._send_timeout_s = host, advertise_host, send_timeout_s
        self._tokens: dict[tuple[bytes, int], bytes] = {}  # by (ticket id, attempt)
        self._lock = threading.Lock()  # over the two below
        self._connections: dict[socket.socket, threading.Thread] = {}
        self._closed = threading.Event()
        self._listener: socket.socket | None = None
        self._acceptor: threading.Thread | None = None

    @property
    def name(self) -> str:
        return NAME

    async def start(self) -> None:
        """Raises OSError when the host cannot be bound to."""
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        self._listener = socket.create_server((self._host, 0), family=family, backlog=128)
        self._acceptor = threading.Thread(target=self._accept, args=(self._listener,), name="kv-tcp", daemon=True)
        self._acceptor.start()

    def reachable(self, importer_endpoint: bytes) -> bool:
        return True

    def admit(self, epoch: Epoch) -> bytes:
        assert self._listener is not None, "admit before start"
        token = self._tokens.setdefault((epoch.ticket_id, epoch.attempt), secrets.token_bytes(_TOKEN_BYTES))
        port: int = self._listener.getsockname()[1]
        return _ENDPOINT.pack(token, port) + self._advertise_host.encode()

    def revoke(self, epoch: Epoch) -> None:
        self._tokens.pop((epoch.ticket_id, epoch.attempt), None)

    async def close(self) -> None:
        with self._lock:
            self._closed.set()
            connections = dict(self._connections)
        if self._listener is not None and self._acceptor is not None:
            shut_down(self._listener)
            await asyncio.to_thread(self._acceptor.join)
            self._listener.close()
        for connection in connections:
            shut_down(connection)
        for thread in connections.values():
            await asyncio.to_thread(thread.join)

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                if self._closed.wait(_ACCEPT_PAUSE_S):
                    return
                continue
            with self._lock:
                if self._closed.is_set() or len(self._connections) >= _MAX_CONNECTIONS:
                    connection.close()
                    continue
                thread = threading.Thread(target=self._serve, args=(connection,), name="kv-tcp-serve", daemon=True)
                self._connections[connection] = thread
                thread.start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            tune(connection)
            connection.settimeout(_HELLO_TIMEOUT_S)
            while self._answer(connection):
                connection.settimeout(None)  # an idle importer may come back at any time; keepalive finds dead hosts
        except OSError:
            pass  # the importer is gone or does not read: its own deadline tells it
        finally:
            with self._lock:
                del self._connections[connection]
            connection.close()

    def _answer(self, connection: socket.socket) -> bool:
        """One read. False when the connection is to be closed: its end, or somebody who may not read here."""
        announcement = receive(connection, _ANNOUNCEMENT.size)
        if announcement is None:
            return False
        connection.settimeout(self._send_timeout_s)
        magic, ticket_id, attempt, number, token, num_blocks = _ANNOUNCEMENT.unpack(announcement)
        admitted = hmac.compare_digest(self._tokens.get((ticket_id, attempt), b""), token)
        if magic != _MAGIC or not admitted or num_blocks > self._num_blocks:
            connection.sendall(_ANSWER.pack(_MAGIC, ticket_id, attempt, number, True, 0))
            return False
        packed = receive(connection, 4 * num_blocks)
        if packed is None:
            return False
        block_ids = struct.unpack(f"<{num_blocks}I", packed)
        if any(block_id >= self._num_blocks for block_id in block_ids):
            connection.sendall(_ANSWER.pack(_MAGIC, ticket_id, attempt, number, True, 0))
            return False
        answer = _ANSWER.pack(_MAGIC, ticket_id, attempt, number, False, num_blocks * self._block_bytes)
        send(connection, [memoryview(answer), *self._memory.outgoing(block_ids).views()])
        return True


@dataclass(frozen=True, slots=True)
class _Connection:
    """A socket and the one thread that reads from it."""

    address: tuple[str, int]
    socket: socket.socket
    reader: ThreadPoolExecutor

    def usable(self) -> bool:
        """Nothing is expected on an idle connection: bytes or an end mean that it is over."""
        try:
            self.socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def close(self) -> None:
        """Only when its thread is not reading."""
        self.socket.close()
        self.reader.shutdown(wait=False)


class TcpImporter:
    """Opens channels to exporters. Owns the idle connections; a channel owns the one it uses."""

    def __init__(self, *, memory: PoolMemory) -> None:
        self._memory = HostMemory(memory)
        self._block_bytes = memory.block_bytes
        self._idle: dict[tuple[str, int], list[_Connection]] = {}
        self._channels: set[TcpChannel] = set()
        self._closed = False

    @property
    def name(self) -> str:
        return NAME

    def endpoint(self) -> bytes:
        return b""

    async def open(self, epoch: Epoch, exporter_endpoint: bytes) -> "TcpChannel":
        address, token = _parse_endpoint(exporter_endpoint)
        connection = self._take_idle(address)
        if connection is None:
            connection = await _connected(address)
        channel = TcpChannel(connection, epoch, token, self._memory, self._block_bytes, self._ended)
        self._channels.add(channel)
        return channel

    async def close(self) -> None:
        self._closed = True
        for channel in tuple(self._channels):
            await channel.destroy()
        for connections in self._idle.values():
            for connection in connections:
                connection.close()
        self._idle.clear()

    def _take_idle(self, address: tuple[str, int]) -> _Connection | None:
        connections = self._idle.get(address, [])
        while connections:
            connection = connections.pop()
            if connection.usable():
                return connection
            connection.close()
        self._idle.pop(address, None)
        return None

    def _ended(self, channel: "TcpChannel", reusable: _Connection | None) -> None:
        self._channels.discard(channel)
        if reusable is None:
            return
        if self._closed:
            reusable.close()
        else:
            self._idle.setdefault(reusable.address, []).append(reusable)


class TcpChannel:
    """See Channel in base.py."""

    def __init__(
        self,
        connection: _Connection,
        epoch: Epoch,
        token: bytes,
        memory: HostMemory,
        block_bytes: int,
        ended: "Callable[[TcpChannel, _Connection | None], None]",  # with the connection if it may be used again
    ) -> None:
        self._connection: _Connection | None = connection
        self._epoch, self._token = epoch, token
        self._memory, self._block_bytes = memory, block_bytes
        self._ended = ended
        self._number = 0
        self._read: Future[None] | None = None  # in flight, or ended by anything but success

    async def read(self, remote_block_ids: Sequence[int], local_block_ids: Sequence[int]) -> None:
        assert len(remote_block_ids) == len(local_block_ids)
        if self._connection is None or self._read is not None:
            raise TransportError("the channel is closed or poisoned")
        self._number += 1
        announcement = _ANNOUNCEMENT.pack(
            _MAGIC, self._epoch.ticket_id, self._epoch.attempt, self._number, self._token, len(remote_block_ids)
        ) + struct.pack(f"<{len(remote_block_ids)}I", *remote_block_ids)
        self._read = self._connection.reader.submit(
            self._receive_blocks, self._connection.socket, announcement, self._number, tuple(local_block_ids)
        )
        try:
            await asyncio.wrap_future(self._read)
        except OSError as error:
            raise TransportError(f"reading from {self._connection.address}: {error}") from error
        self._read = None

    async def destroy(self) -> None:
        connection = self._connection
        if connection is None:
            return
        shut_down(connection.socket)
        if self._read is not None:
            await joined(self._read)
        if self._connection is not None:  # not by another call meanwhile
            self._connection = None
            connection.close()
            self._ended(self, None)

    async def release(self) -> None:
        if self._read is not None:
            await self.destroy()
        elif self._connection is not None:
            connection, self._connection = self._connection, None
            self._ended(self, connection)

    def _receive_blocks(
        self, connection: socket.socket, announcement: bytes, number: int, local_block_ids: tuple[int, ...]
    ) -> None:
        connection.sendall(announcement)
        answer = receive(connection, _ANSWER.size)
        if answer is None:
            raise TransportError("the exporter closed the connection")
        magic, ticket_id, attempt, answered, refused, num_bytes = _ANSWER.unpack(answer)
        if (magic, ticket_id, attempt, answered) != (_MAGIC, self._epoch.ticket_id, self._epoch.attempt, number):
            raise TransportError("an answer to another read")
        if refused:
            raise TransportError("the exporter does not know this epoch, or has no such blocks")
        if num_bytes != len(local_block_ids) * self._block_bytes:
            raise TransportError(f"{num_bytes} bytes for {len(local_block_ids)} blocks of {self._block_bytes}")
        rows = self._memory.incoming(local_block_ids)
        receive_into(connection, rows.views())
        self._memory.arrived(rows, local_block_ids)


async def _connected(address: tuple[str, int]) -> _Connection:
    try:
        return _Connection(address, await connect(address), ThreadPoolExecutor(1, "kv-tcp-read"))
    except OSError as error:
        raise TransportError(f"connecting to {address}: {error}") from error


def _parse_endpoint(endpoint: bytes) -> tuple[tuple[str, int], bytes]:
    try:
        token, port = _ENDPOINT.unpack_from(endpoint)
        return (endpoint[_ENDPOINT.size :].decode(), port), token
    except (struct.error, UnicodeDecodeError) as error:
        raise TransportError("not an endpoint of this transport") from error
