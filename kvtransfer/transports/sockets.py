"""Blocking sockets, plain or TLS, for threads: whole messages, shutdown that wakes a waiting thread, and a listener.

`ConnectionThreads` listens and serves each connection on its own thread. Its accepting thread survives every failure to
serve one connection: if no thread can be started or memory is short, it closes that connection, so that the importer
retries at once. (An importer whose connection stays open without a thread would wait for its read timeout.) It also
ends the connections that have not proved in time that their peer is a member; these are few, and take no place of a
member's.
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
from dataclasses import dataclass
from typing import Any

_MAX_VIEWS = 1024  # per system call: the kernel's limit
# Between two processes of one host, data in flight should stay in a cache: with the buffers that the kernel would
# choose a read is half as fast. A real link needs the kernel's. Set once: changes between reads make them slower.
_LOCAL_BUFFER_BYTES = 256 << 10
_LOG = logging.getLogger(__name__)
_BACKLOG = 128
_PAUSE_S = 0.1  # without descriptors or memory: accepting again at once would only spin


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
        # Not SSLSocket's own: that would leave the thread reading encrypted bytes.
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
                num_bytes = connection.recv_into(left[0])  # the content of one record
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


async def receive_on_loop(connection: socket.socket, num_bytes: int) -> bytes:
    """Return exactly `num_bytes` from a socket that does not block. Raises OSError."""
    loop = asyncio.get_running_loop()
    data = b""
    while len(data) < num_bytes:
        piece = await loop.sock_recv(connection, num_bytes - len(data))
        if not piece:
            raise ConnectionResetError("the peer ended the connection")
        data += piece
    return data


async def joined(future: "Future[Any]") -> None:
    """Wait until the work has ended, successfully or not. Its error was raised to the caller that started it."""
    waiter = asyncio.wrap_future(future)
    await asyncio.wait([waiter])
    if not waiter.cancelled():
        waiter.exception()


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    max_connections: int  # of proved peers
    max_unproven: int  # one more ends the oldest of them, so that strangers keep no member out
    prove_s: float  # from accepting a connection to the end of its proofs


class ConnectionThreads:
    """Proves, then serves each connection on a thread.

    `prove` and `serve` run on the connection's thread and may raise OSError; the connection is closed when they end."""

    def __init__(
        self,
        name: str,
        *,
        prove: Callable[[socket.socket], None],
        serve: Callable[[socket.socket], None],
        limits: ConnectionLimits,
        wrap: Callable[[socket.socket], socket.socket] = lambda connection: connection,
    ) -> None:
        """`name` is the name of the threads. `wrap` converts an accepted socket into the one that is served; it must
        not wait."""
        self._name, self._prove, self._serve, self._limits, self._wrap = name, prove, serve, limits, wrap
        self._lock = threading.Lock()  # guards the next two, and makes _closed final
        self._connections: dict[socket.socket, threading.Thread] = {}
        self._unproven: dict[socket.socket, float] = {}  # among them: until when it may be unproven; the oldest first
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
                listener.settimeout(self._end_overdue())
                connection, _ = listener.accept()
                connection = self._wrap(connection)
                self._begin(connection)
            except TimeoutError:
                continue  # a proof is overdue
            except (OSError, RuntimeError, MemoryError) as error:  # RuntimeError: no thread can be started
                if connection is not None:
                    connection.close()
                if self._closed.wait(_PAUSE_S):
                    return
                _warn(self._name, error)

    def _end_overdue(self) -> float | None:
        """End the connections whose proof is overdue. Return the seconds until the next one is."""
        with self._lock:
            for connection, until_s in tuple(self._unproven.items()):
                left_s = until_s - time.monotonic()
                if left_s > 0:
                    return left_s
                self._end_unproven(connection)
        return None

    def _end_unproven(self, connection: socket.socket) -> None:
        del self._unproven[connection]
        shut_down(connection)

    def _begin(self, connection: socket.socket) -> None:
        limits = self._limits
        with self._lock:
            if len(self._unproven) >= limits.max_unproven:
                self._end_unproven(next(iter(self._unproven)))
            if self._closed.is_set() or len(self._connections) >= limits.max_connections + 2 * limits.max_unproven:
                connection.close()  # beyond the two bounds are the threads of connections that were just ended
                return
            thread = threading.Thread(target=self._run, args=(connection,), name=f"{self._name}-serve", daemon=True)
            self._connections[connection] = thread
            self._unproven[connection] = time.monotonic() + limits.prove_s
            try:
                thread.start()
            except BaseException:
                del self._connections[connection], self._unproven[connection]
                raise

    def _run(self, connection: socket.socket) -> None:
        try:
            self._prove(connection)
            if self._is_let_in(connection):
                self._serve(connection)
        except (OSError, MemoryError) as error:  # the importer is gone or does not read, or memory is short
            _LOG.debug("%s: a connection ended: %s", self._name, error)
        finally:
            with self._lock:
                self._unproven.pop(connection, None)
                del self._connections[connection]
            connection.close()

    def _is_let_in(self, connection: socket.socket) -> bool:
        """Count the connection as proved, unless its proof came too late or there are too many."""
        with self._lock:
            is_in_time = self._unproven.pop(connection, None) is not None
            return is_in_time and len(self._connections) - len(self._unproven) <= self._limits.max_connections


def _warn(name: str, error: Exception) -> None:
    try:
        _LOG.warning("%s: a connection could not be served: %s", name, error)
    except MemoryError:
        return  # the importer reports its failed read
