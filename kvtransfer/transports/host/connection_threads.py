"""A listening socket whose connections are served by one thread each.

Owns the socket, the thread that accepts and the connections. The accepting thread outlives every failure to serve one
connection: where no thread can be started or memory is short, that connection is closed, so that its importer retries
at once. An importer whose connection stays open without a thread would wait for its read timeout.
"""

import asyncio
import logging
import socket
import threading
import time
from collections.abc import Callable

from kvtransfer.transports.host.sockets import shut_down

_LOG = logging.getLogger(__name__)
_BACKLOG = 128
_PAUSE_S = 0.1  # without descriptors or memory: accepting again at once would only spin


class ConnectionThreads:
    """`serve` runs on the connection's thread; it may raise OSError, and the connection is closed when it returns."""

    def __init__(
        self,
        name: str,
        *,
        serve: Callable[[socket.socket], None],
        max_connections: int,
        wrap: Callable[[socket.socket], socket.socket] = lambda connection: connection,
    ) -> None:
        """`name`: of the threads. A connection past `max_connections` is closed at once. `wrap` makes what is served of
        what was accepted; it must not wait."""
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
        """Listens on a free port of `host`. Raises OSError."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=_BACKLOG)
        self._acceptor = threading.Thread(target=self._accept, args=(self._listener,), name=self._name, daemon=True)
        self._acceptor.start()

    async def stop_accepting(self) -> None:
        """New connections are refused; open ones go on."""
        with self._lock:
            self._closed.set()
        if self._listener is not None and self._acceptor is not None:
            shut_down(self._listener)
            await asyncio.to_thread(self._acceptor.join)
            self._listener.close()

    async def end_connections(self, within_s: float | None = None) -> None:
        """Shuts every connection down and waits for its thread; for all of them together at most `within_s`."""
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
