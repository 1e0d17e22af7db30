"""The HTTP server beside the gRPC server, in the same event loop. Owns the socket; signals belong to the process."""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from cluster.errors import ConfigError
from cluster.serving.tls import ClusterTls
from router.http.accept import AcceptedConnection, Counts, Encryption, HttpAcceptor, HttpLimits
from router.http.connection import HttpConnection
from router.running import running


class HttpServer:
    """Made and bound at once, so that a taken port is refused before anything else starts."""

    def __init__(
        self, *, host: str, port: int, tls: ClusterTls | None = None, limits: HttpLimits | None = None
    ) -> None:
        """Raises ConfigError. `port` 0: a free one. `tls`: HTTPS with its certificate; clients need none."""
        self._tls, self._limits = tls, limits or HttpLimits()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((host, port))
        except OSError as error:
            self._socket.close()
            raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}; choose another --port") from error
        self.port: int = self._socket.getsockname()[1]

    async def serve(
        self, app: ASGIApp, *, max_connections: int, telemetry: Counts, stop: asyncio.Event, grace_s: float
    ) -> None:
        """Until `stop`; then answers in progress have `grace_s` to end."""
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            server_header=False,
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

    def close(self) -> None:
        self._socket.close()

    def _encryption(self) -> Encryption | None:
        """Clients need no certificate."""
        if self._tls is None:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self._tls.cert_file, self._tls.key_file)
        return Encryption(context, self._limits.handshake_s)


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """The process has its own handlers."""
        yield
