"""The HTTP server beside the gRPC server, in the same event loop. Owns the socket; signals belong to the process."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from functools import partial

import uvicorn
from starlette.types import ASGIApp

from cluster.errors import ConfigError
from cluster.tls import ClusterTls
from router.http_connection import HttpConnection
from router.http_edge import Counts


class HttpServer:
    """Made and bound at once, so that a taken port is refused before anything else starts."""

    def __init__(self, *, host: str, port: int, tls: ClusterTls | None = None) -> None:
        """Raises ConfigError. `port` 0: a free one. `tls`: HTTPS with its certificate; clients need none."""
        self._tls = tls
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
        connection = partial(
            HttpConnection,
            max_connections=max_connections,
            on_refused=lambda: telemetry.count("tandem_http_connections_refused_total"),
        )
        config = uvicorn.Config(
            app,
            http=connection,  # type: ignore[arg-type]  # whatever makes a protocol
            log_config=None,
            access_log=False,
            lifespan="off",
            server_header=False,
            timeout_graceful_shutdown=max(1, round(grace_s)),
            ssl_certfile=self._tls.cert_file if self._tls is not None else None,
            ssl_keyfile=self._tls.key_file if self._tls is not None else None,
        )
        server = _Server(config)
        stopping = asyncio.create_task(self._stop(server, stop), name="stop HTTP")
        try:
            await server.serve(sockets=[self._socket])
        finally:
            stopping.cancel()

    def close(self) -> None:
        self._socket.close()

    async def _stop(self, server: uvicorn.Server, stop: asyncio.Event) -> None:
        await stop.wait()
        server.should_exit = True


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """The process has its own handlers."""
        yield
