"""Blocking sockets, plain or TLS, for threads: whole messages, shutdown that wakes a waiting thread, and a listener.

`ConnectionThreads` listens and serves each connection on its own thread. Its accepting thread survives every failure to
serve one connection: if no thread can be started or memory is short, it closes that connection, so that the importer
retries at once. (An importer whose connection stays open without a thread would wait for its read timeout.)
"""

import asyncio
import contextlib
import logging
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

_MAX_VIEWS = 1024  # per system call: the kernel's limit
_CONNECT_TIMEOUT_S = 5.0
# Between two processes of one host, data in flight should stay in a cache: with the buffers that the kernel would
# choose a read is half as fast. A real link needs the kernel's. Set once: changes between reads make them slower.
_LOCAL_BUFFER_BYTES = 256 << 10
_LOG = logging.getLogger(__name__)
_BACKLOG = 128
_PAUSE_S = 0.1  # without descriptors or memory: accepting again at once would only spin


async def connect(address: tuple[str, int], tls: ssl.SSLContext | None = None) -> socket.socket:
    """Return a connected, blocking TCP socket, with TLS if a context is given. Raises OSError (ssl.SSLError is one)."""
    loop = asyncio.get_running_loop()
    family, kind, protocol, _, resolved = (await loop.getaddrinfo(*address, type=socket.SOCK_STREAM))[0]
    connection = socket.socket(family, kind, protocol)
    try:
        connection.setblocking(False)
        async with asyncio.timeout(_CONNECT_TIMEOUT_S):
            await loop.sock_connect(connection, resolved)
        tune(connection)
        connection.settimeout(_CONNECT_TIMEOUT_S)
        if tls is not None:
            connection = await asyncio.to_thread(tls.wrap_socket, connection, server_hostname=address[0])
        connection.settimeout(None)
    except BaseException:
        connection.close()
        raise
    return connection


def tune(connection: socket.socket) -> None:
    """Send small messages at once, and detect a vanished host within two minutes."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    if connection.getsockname()[0] == connection.getpeername()[0]:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LOCAL_BUFFER_BYTES)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _LOCAL_BUFFER_BYTES)


def limit_stalls(connection: socket.socket, timeout_s: float) -> None:
    """Make blocking calls raise OSError after `timeout_s` without progress."""
    if isinstance(connection, ssl.SSLSocket):
        connection.settimeout(timeout_s)  # it is read by records: each is progress
        return
    # The kernel's own timeouts: with Python's, the socket would no longer block, and a call would return early.
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connection.setsockopt(socket.SOL_SOCKET, option, _packed_time(timeout_s))


def shut_down(connection: socket.socket) -> None:
    """End both directions, which wakes a waiting thread. The descriptor stays open until that thread is joined."""
    with contextlib.suppress(OSError):  # not connected any more
        # Not SSLSocket's own: that would leave the thread reading what is still encrypted.
        socket.socket.shutdown(connection, socket.SHUT_RDWR)


def receive(connection: socket.socket, num_bytes: int) -> bytes | None:
    """Return exactly `num_bytes`, or None if the peer ended the connection before the first. Raises OSError."""
    flags = 0 if isinstance(connection, ssl.SSLSocket) else socket.MSG_WAITALL
    data = connection.recv(num_bytes, flags)
    if not data:
        return None
    while len(data) < num_bytes:
        more = connection.recv(num_bytes - len(data), flags)
        if not more:
            raise ConnectionResetError("the peer ended the connection in the middle of a message")
        data += more
    return data


def receive_into(connection: socket.socket, views: Sequence[memoryview]) -> None:
    """Fill every view. Raises OSError; ConnectionError if the peer ends the connection before that."""
    for first in range(0, len(views), _MAX_VIEWS):
        left = list(views[first : first + _MAX_VIEWS])
        while left:
            if isinstance(connection, ssl.SSLSocket):
                num_bytes = connection.recv_into(left[0])  # what one record holds
            else:
                num_bytes = connection.recvmsg_into(left, 0, socket.MSG_WAITALL)[0]
            if num_bytes == 0:
                raise ConnectionResetError("the peer ended the connection")
            left = advanced(left, num_bytes)


def send(connection: socket.socket, views: Sequence[memoryview], timeout_s: float) -> None:
    """Send every view. Raises OSError, also if the peer accepts nothing for `timeout_s`."""
    if isinstance(connection, ssl.SSLSocket):
        connection.settimeout(timeout_s)
        for view in views:
            connection.sendall(view)
        connection.settimeout(None)
        return
    # The kernel's own timeout, not Python's: with that one, a call would return whenever the buffer is full.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _packed_time(timeout_s))
    for first in range(0, len(views), _MAX_VIEWS):
        left = list(views[first : first + _MAX_VIEWS])
        while left:
            left = advanced(left, connection.sendmsg(left))


def _packed_time(seconds: float) -> bytes:
    """Return the time as `struct timeval`."""
    microseconds = max(1, round(seconds * 1e6))  # zero would mean no timeout
    return struct.pack("ll", *divmod(microseconds, 1_000_000))


def advanced(views: list[memoryview], num_bytes: int) -> list[memoryview]:
    """Return the views without their first `num_bytes` bytes."""
    for index, view in enumerate(views):
        if num_bytes < len(view):
            return [view[num_bytes:], *views[index + 1 :]]
        num_bytes -= len(view)
    return []


async def joined(future: "Future[Any]") -> None:
    """Wait until the work has ended, successfully or not. Its error was raised to the caller that started it."""
    waiter = asyncio.wrap_future(future)
    await asyncio.wait([waiter])
    if not waiter.cancelled():
        waiter.exception()


class ConnectionThreads:
    """Serves each connection on a thread.

    `serve` runs on the connection's thread and may raise OSError; the connection is closed when it returns."""

    def __init__(
        self,
        name: str,
        *,
        serve: Callable[[socket.socket], None],
        max_connections: int,
        wrap: Callable[[socket.socket], socket.socket] = lambda connection: connection,
    ) -> None:
        """`name` is the name of the threads. Connections beyond `max_connections` are closed at once.

        `wrap` converts an accepted socket into the one that is served; it must not wait."""
        self._name, self._serve, self._max_connections, self._wrap = name, serve, max_connections, wrap
        self._lock = threading.Lock()  # guards _connections, and makes _closed final
        self._connections: dict[socket.socket, threading.Thread] = {}
        self._closed = threading.Event()
        self._listener: socket.socket | None = None
        self._acceptor: threading.Thread | None = None

    @property
    def port(self) -> int:
        assert self._listener is not None, "no port before start"
        port: int = self._listener.getsockname()[1]
        return port

    def start(self, host: str) -> None:
        """Listen on a free port of `host`. Raises OSError."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=_BACKLOG)
        self._acceptor = threading.Thread(target=self._accept, args=(self._listener,), name=self._name, daemon=True)
        self._acceptor.start()

    async def stop_accepting(self) -> None:
        """Refuse new connections. Open ones continue."""
        with self._lock:
            self._closed.set()
        if self._listener is not None and self._acceptor is not None:
            shut_down(self._listener)
            await asyncio.to_thread(self._acceptor.join)
            self._listener.close()

    async def end_connections(self, within_s: float | None = None) -> None:
        """Shut every connection down and wait for the threads, for at most `within_s` in all."""
        with self._lock:
            connections = dict(self._connections)
        for connection in connections:
            shut_down(connection)
        deadline_s = None if within_s is None else time.monotonic() + within_s
        for thread in connections.values():
            left_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
            await asyncio.to_thread(thread.join, left_s)

    def _accept(self, listener: socket.socket) -> None:
        while True:
            connection = None
            try:
                connection, _ = listener.accept()
                connection = self._wrap(connection)
                self._begin(connection)
            except (OSError, RuntimeError, MemoryError) as error:  # RuntimeError: no thread can be started
                if connection is not None:
                    connection.close()
                if self._closed.wait(_PAUSE_S):
                    return
                _warn(self._name, error)

    def _begin(self, connection: socket.socket) -> None:
        with self._lock:
            if self._closed.is_set() or len(self._connections) >= self._max_connections:
                connection.close()
                return
            thread = threading.Thread(target=self._run, args=(connection,), name=f"{self._name}-serve", daemon=True)
            self._connections[connection] = thread
            try:
                thread.start()
            except BaseException:
                del self._connections[connection]
                raise

    def _run(self, connection: socket.socket) -> None:
        try:
            self._serve(connection)
        except (OSError, MemoryError) as error:  # the importer is gone or does not read, or memory is short
            _LOG.debug("%s: a connection ended: %s", self._name, error)
        finally:
            with self._lock:
                del self._connections[connection]
            connection.close()


def _warn(name: str, error: Exception) -> None:
    try:
        _LOG.warning("%s: a connection could not be served: %s", name, error)
    except MemoryError:
        return  # the importer reports its failed read
