"""The limit of `tcp`: the best loop over plain blocking sockets, with the same messages between the same pools.

A request is a header and block ids, an answer a header and blocks. Views, packed ids and connections are made before
the clock starts.
"""

import random
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.kv.shapes import Shape
from engine.kv.pool import KvPool
from kvtransfer.memory import Rows

_REQUEST = struct.Struct("<48xI")  # as many bytes as the transport's announcement
_ANSWER = struct.Struct("<37x")
_MAX_VIEWS = 1024


@dataclass(frozen=True, slots=True)
class Loop:
    """One variant of the receiving loop."""

    name: str
    buffer_bytes: int  # of both sockets; 0: the system's choice
    is_waiting_for_all: bool


LOOPS = tuple(
    Loop(f"{buffers}, {calls}", size, waits)
    for buffers, size in (("system's buffers", 0), ("256 KB buffers", 256 << 10), ("1 MB buffers", 1 << 20))
    for calls, waits in (("recvmsg_into", False), ("MSG_WAITALL", True))
)
TLS_LOOPS = (Loop("SSL recv_into", 0, False), Loop("SSL recv_into, 1 MB buffers", 1 << 20, False))


class PlainServer:
    """Runs in the exporter's process: a thread per connection that sends the requested blocks."""

    def __init__(self, pool: KvPool, context: ssl.SSLContext | None) -> None:
        self._pool, self._context = pool, context
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, name="plain-accept", daemon=True).start()

    def _accept(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            threading.Thread(target=self._serve, args=(connection,), name="plain-serve", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        """Serve one connection. Its first four bytes give the size of the socket buffer."""
        array = self._pool.raw.numpy()
        with connection:
            (buffer_bytes,) = struct.unpack("<I", _exactly(connection, 4))
            _tune(connection, buffer_bytes)
            if self._context is not None:
                connection = self._context.wrap_socket(connection, server_side=True)
            while request := _exactly(connection, _REQUEST.size):
                (num_blocks,) = _REQUEST.unpack(request)
                ids = struct.unpack(f"<{num_blocks}I", _exactly(connection, 4 * num_blocks))
                views = Rows(array, ids).views()
                if self._context is not None:
                    connection.sendall(_ANSWER.pack())
                    for view in views:
                        connection.sendall(view)
                else:
                    _send(connection, [memoryview(_ANSWER.pack()), *views])


class PlainClient:
    """Runs in the importer's process, on the measuring thread."""

    def __init__(self, loop: Loop, port: int, pool: KvPool, context: ssl.SSLContext | None) -> None:
        self._loop, self._pool, self._is_tls = loop, pool, context is not None
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.sendall(struct.pack("<I", loop.buffer_bytes))
        _tune(self._socket, loop.buffer_bytes)
        if context is not None:
            self._socket = context.wrap_socket(self._socket, server_hostname="127.0.0.1")

    def prepare(self, shape: Shape, dice: random.Random) -> Callable[[], None]:
        remote, local = (shape.pick(self._pool.num_blocks, dice) for _ in range(2))
        request = _REQUEST.pack(len(remote)) + struct.pack(f"<{len(remote)}I", *remote)
        views = Rows(self._pool.raw.numpy(), local).views()

        def move() -> None:
            self._socket.sendall(request)
            _exactly(self._socket, _ANSWER.size)
            if self._is_tls:
                self._receive_tls(views)
            elif self._loop.is_waiting_for_all:
                self._receive_whole(views)
            else:
                self._receive(views)

        return move

    def close(self) -> None:
        self._socket.close()

    def _receive(self, views: Sequence[memoryview]) -> None:
        left = list(views)
        while left:
            left = _without(left, self._socket.recvmsg_into(left[:_MAX_VIEWS])[0])

    def _receive_whole(self, views: Sequence[memoryview]) -> None:
        if len(views) == 1:
            done = self._socket.recv_into(views[0], len(views[0]), socket.MSG_WAITALL)
            assert done == len(views[0])
            return
        left = list(views)
        while left:
            left = _without(left, self._socket.recvmsg_into(left[:_MAX_VIEWS], 0, socket.MSG_WAITALL)[0])

    def _receive_tls(self, views: Sequence[memoryview]) -> None:
        for view in views:
            start = 0
            while start < len(view):
                start += self._socket.recv_into(view[start:])


def _tune(connection: socket.socket, buffer_bytes: int) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if buffer_bytes:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)


def _send(connection: socket.socket, views: list[memoryview]) -> None:
    while views:
        views = _without(views, connection.sendmsg(views[:_MAX_VIEWS]))


def _without(views: list[memoryview], num_bytes: int) -> list[memoryview]:
    for index, view in enumerate(views):
        if num_bytes < len(view):
            return [view[num_bytes:], *views[index + 1 :]]
        num_bytes -= len(view)
    return []


def _exactly(connection: socket.socket, num_bytes: int) -> bytes:
    """Return exactly the given number of bytes, or none at the end of the connection."""
    data = b""
    while len(data) < num_bytes:
        piece = connection.recv(num_bytes - len(data))
        if not piece:
            return b""
        data += piece
    return data
