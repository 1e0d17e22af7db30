"""The HTTP server beside the gRPC server, in the same event loop.

It counts connections before any handshake, limits the time of the TLS handshake, and ends every wait for a client: for
the head of a request, for its body, and for the client to read the response. Owns the listening socket and the places
of connections; connection.py serves each of them, and the process handles signals.
"""

import asyncio
import contextlib
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import uvicorn
from starlette.types import ASGIApp

from cluster.observe.telemetry import Telemetry
from cluster.serving.listening import cannot_listen
from cluster.serving.tls import ClusterTls
from router.http.connection import HttpConnection, HttpLimits
from router.http.connection_places import ConnectionPlaces, Place
from router.running import running

_BACKLOG = 2048
_PAUSE_S = 0.1  # without descriptors: accepting again at once would only spin


@dataclass(frozen=True, slots=True)
class Encryption:
    context: Callable[[], ssl.SSLContext]  # of the next handshake
    handshake_s: float


class HttpAcceptor:
    """Accepts connections until its task is cancelled."""

    def __init__(
        self,
        listener: socket.socket,
        *,
        make_protocol: Callable[["AcceptedConnection"], asyncio.Protocol],
        encryption: Encryption | None,
        max_connections: int,
        telemetry: Telemetry,
        leaves_port: asyncio.Event,
    ) -> None:
        """The protocol that `make_protocol` returns must report to its AcceptedConnection when it is opened, when a
        request begins and is complete, and when it is closed. Once `leaves_port` is set, no connection is accepted."""
        self._listener, self._make_protocol, self._encryption = listener, make_protocol, encryption
        self._places = ConnectionPlaces(max_connections)
        self._telemetry = telemetry
        self._leaves_port = leaves_port
        self._handshakes: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        self._listener.setblocking(False)
        self._listener.listen(_BACKLOG)
        loop = asyncio.get_running_loop()
        try:
            async with running(self._accept_all()) as accepting, running(self._leaves_port.wait()) as leaving:
                await asyncio.wait({accepting, leaving}, return_when=asyncio.FIRST_COMPLETED)
                if accepting.done():
                    accepting.result()  # it ends by an error only
            self._close_listener()
            await loop.create_future()  # the present handshakes end by themselves
        finally:
            for handshake in self._handshakes:
                handshake.cancel()
            await asyncio.gather(*self._handshakes, return_exceptions=True)

    async def _accept_all(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(self._listener)
                self._begin(connection)
            except (OSError, MemoryError):
                await asyncio.sleep(_PAUSE_S)

    def _close_listener(self) -> None:
        """Accept the connections that the kernel has completed for this listener, because closing it would reset
        them.
        """
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                connection.setblocking(False)
                self._begin(connection)
        self._listener.close()

    def _begin(self, connection: socket.socket) -> None:
        accepted = AcceptedConnection(self._places)
        place, replaced = self._places.occupy(accepted.abort, time.monotonic())
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
        """Hand the connection to its protocol, which frees the place from then on."""
        loop = asyncio.get_running_loop()
        try:
            await loop.connect_accepted_socket(
                lambda: self._make_protocol(accepted),
                connection,
                ssl=self._encryption.context() if self._encryption is not None else None,
                ssl_handshake_timeout=self._encryption.handshake_s if self._encryption is not None else None,
            )
        except OSError:  # ssl.SSLError and the handshake's timeout among them
            self._telemetry.count("tandem_http_connections_closed_total", reason="handshake")
            accepted.closed()
        except BaseException:
            accepted.closed()
            raise


class AcceptedConnection:
    """The place of one connection, for the protocol that serves it."""

    def __init__(self, places: ConnectionPlaces) -> None:
        self._places = places
        self.place: Place | None = None
        self.handshake: asyncio.Task[None] | None = None
        self.transport: asyncio.Transport | None = None  # once the handshake is done

    def opened(self, transport: asyncio.Transport) -> None:
        self.transport = transport

    def request_complete(self) -> None:
        """Record that a whole request has arrived."""
        if self.place is not None:
            self.place.request_complete()

    def request_begun(self) -> None:
        """Record that the first byte of a request has arrived."""
        if self.place is not None:
            self.place.request_begun(time.monotonic())

    def closed(self) -> None:
        if self.place is not None:
            self._places.free(self.place)
            self.place = None  # it refers to this connection

    def abort(self) -> None:
        """Close the connection at once, whatever it is doing."""
        if self.transport is not None:
            self.transport.abort()
        elif self.handshake is not None:
            self.handshake.cancel()


class HttpServer:
    """The server of one router. The constructor binds the port, so that a port in use is reported before anything
    starts."""

    def __init__(
        self,
        *,
        host: str,
        port: int,
        tls: ClusterTls | None = None,
        limits: HttpLimits | None = None,
        shares_port: bool = False,
    ) -> None:
        """`port` 0 chooses a free port. With `tls` the server speaks HTTPS. `shares_port`: the kernel distributes new
        connections over all servers on the port that share it. Raises ConfigError."""
        self._tls, self._limits = tls, limits or HttpLimits()
        self._leaves_port = asyncio.Event()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shares_port:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            self._socket.bind((host, port))
        except OSError as error:
            self._socket.close()
            raise cannot_listen(error, host, port, "--port") from error
        self.port: int = self._socket.getsockname()[1]

    async def serve(
        self, app: ASGIApp, *, max_connections: int, telemetry: Telemetry, stop: asyncio.Event, grace_s: float
    ) -> None:
        """Serve until `stop`; responses in progress then have `grace_s` to end."""
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            server_header=False,
            ws="none",
            timeout_graceful_shutdown=max(1, round(grace_s)),
        )
        server = _Server(config)

        def make_protocol(accepted: AcceptedConnection) -> HttpConnection:
            return HttpConnection(
                accepted=accepted, limits=self._limits, config=config, server_state=server.server_state, app_state={}
            )

        acceptor = HttpAcceptor(
            self._socket,
            make_protocol=make_protocol,
            encryption=self._encryption(),
            max_connections=max_connections,
            telemetry=telemetry,
            leaves_port=self._leaves_port,
        )
        serving = asyncio.create_task(server.serve(sockets=[]), name="serve HTTP")
        try:
            async with running(acceptor.run()) as accepting:
                stopping = asyncio.create_task(stop.wait())
                await asyncio.wait({stopping, accepting, serving}, return_when=asyncio.FIRST_COMPLETED)
                stopping.cancel()
                if accepting.done():
                    accepting.result()  # it ends by an error only
        finally:
            self._socket.close()
            server.should_exit = True
            await serving

    def leave_port(self) -> None:
        """Accept no more connections: on a shared port the other servers get them. Present connections stay."""
        self._leaves_port.set()

    def close(self) -> None:
        self._socket.close()

    def _encryption(self) -> Encryption | None:
        """Return the TLS context of the server. Clients need no certificate."""
        if self._tls is None:
            return None
        return Encryption(self._tls.public_context, self._limits.handshake_s)


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no signal handlers: the process has its own."""
        yield
