"""Accepts the connections of the HTTP server: they are counted before any handshake, and the TLS handshake has a limit.

Owns the accepting task, the handshakes in progress and the places of all connections. What speaks HTTP on a connection
is a protocol that it is given; it knows nothing of HTTP.
"""

import asyncio
import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from router.http.connection_places import ConnectionPlaces, Place

_BACKLOG = 2048
_PAUSE_S = 0.1  # without descriptors: accepting again at once would only spin


class Counts(Protocol):
    """What this module needs of cluster.observe.telemetry.Telemetry."""

    def count(self, name: str, value: float = 1, **labels: str) -> None: ...


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """How long each wait for a client may take, in seconds."""

    handshake_s: float = 10.0  # from the connection to the end of the TLS handshake
    head_s: float = 15.0  # from then, or a request's first byte, to the last byte of its head
    request_s: float = 60.0  # from then to the last byte of a request; from an answer to the next request's first


@dataclass(frozen=True, slots=True)
class Encryption:
    context: ssl.SSLContext
    handshake_s: float


class HttpAcceptor:
    """Runs until its task is cancelled."""

    def __init__(
        self,
        listener: socket.socket,
        *,
        make_protocol: Callable[["AcceptedConnection"], asyncio.Protocol],
        encryption: Encryption | None,
        max_connections: int,
        telemetry: Counts,
    ) -> None:
        """A protocol must tell its connection when it is opened, works, waits and is lost."""
        self._listener, self._make_protocol, self._encryption = listener, make_protocol, encryption
        self._places = ConnectionPlaces(max_connections)
        self._telemetry = telemetry
        self._handshakes: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        self._listener.setblocking(False)
        self._listener.listen(_BACKLOG)
        loop = asyncio.get_running_loop()
        try:
            while True:
                try:
                    connection, _ = await loop.sock_accept(self._listener)
                    self._begin(connection)
                except (OSError, MemoryError):
                    await asyncio.sleep(_PAUSE_S)
        finally:
            for handshake in self._handshakes:
                handshake.cancel()
            await asyncio.gather(*self._handshakes, return_exceptions=True)

    def _begin(self, connection: socket.socket) -> None:
        accepted = AcceptedConnection(self._places)
        place, replaced = self._places.take(accepted.abort, time.monotonic())
        if place is None:
            connection.close()
            self._telemetry.count("tandem_http_connections_refused_total")
            return
        accepted.place = place
        if replaced is not None:
            replaced.end()
            self._telemetry.count("tandem_http_connections_closed_total", reason="replaced")
        task = accepted.handshake = asyncio.create_task(self._hand_over(connection, accepted))
        self._handshakes.add(task)
        task.add_done_callback(self._handshakes.discard)

    async def _hand_over(self, connection: socket.socket, accepted: "AcceptedConnection") -> None:
        """The place is the protocol's to give back once it is made, and ours before."""
        loop = asyncio.get_running_loop()
        try:
            await loop.connect_accepted_socket(
                lambda: self._make_protocol(accepted),
                connection,
                ssl=self._encryption.context if self._encryption is not None else None,
                ssl_handshake_timeout=self._encryption.handshake_s if self._encryption is not None else None,
            )
        except OSError:  # ssl.SSLError and the handshake's timeout among them
            self._telemetry.count("tandem_http_connections_closed_total", reason="handshake")
            accepted.lost()
        except BaseException:
            accepted.lost()
            raise


class AcceptedConnection:
    """One connection's place, for the protocol that speaks on it."""

    def __init__(self, places: ConnectionPlaces) -> None:
        self._places = places
        self.place: Place | None = None
        self.handshake: asyncio.Task[None] | None = None
        self.transport: asyncio.Transport | None = None  # once the handshake is done

    def opened(self, transport: asyncio.Transport) -> None:
        self.transport = transport

    def works(self) -> None:
        """A whole request has come."""
        if self.place is not None:
            self.place.works()

    def waits(self) -> None:
        """A request has begun to come, and is not whole."""
        if self.place is not None:
            self.place.waits(time.monotonic())

    def lost(self) -> None:
        if self.place is not None:
            self._places.leave(self.place)

    def abort(self) -> None:
        """Ends it at once, whatever it is doing."""
        if self.transport is not None:
            self.transport.abort()
        elif self.handshake is not None:
            self.handshake.cancel()
