"""The HTTP port at which Prometheus reads the metrics of a process: `GET /metrics`.

Threads of its own answer, so neither a busy event loop nor a long step delays a scrape. Like the health port it has no
TLS. It requires the same keys as the process; metrics contain no prompt, token or key.
"""

import socket
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from cluster.accounts.keys import Access, Gate
from cluster.errors import ConfigError, PermissionDenied, Unauthenticated, http_status
from cluster.observe.telemetry import CONTENT_TYPE, Telemetry

_MAX_CONNECTIONS = 16  # further ones are closed at once
_TIMEOUT_S = 5.0  # of each read and write


class MetricsPort:
    """The metrics port. It is bound when created and answers from `start` to `stop`."""

    def __init__(self, telemetry: Telemetry, gate: Gate, *, host: str, port: int) -> None:
        """`gate`: admits callers that may read metrics. `port` 0: a free port. Adds the process's metrics to
        `telemetry`. Raises ConfigError if the port cannot be bound."""
        telemetry.add_process_metrics()
        handler = type("MetricsHandler", (_Handler,), {"telemetry": telemetry, "gate": gate})
        try:
            self._server = _Server((host, port), handler)
        except OSError as error:
            reason = error.strerror or str(error)
            raise ConfigError(f"cannot listen on {host}:{port}: {reason}; choose another --metrics-port") from error
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self.port: int = self._server.server_address[1]

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop answering; does not wait."""
        threading.Thread(target=self._stop, name="stop metrics", daemon=True).start()

    def _stop(self) -> None:
        if self._thread.is_alive():
            self._server.shutdown()  # waits for the serving thread, which looks twice a second
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    telemetry: Telemetry
    gate: Gate
    timeout = _TIMEOUT_S

    def do_GET(self) -> None:
        if self.path.partition("?")[0] != "/metrics":
            self.send_error(HTTPStatus.NOT_FOUND, "only /metrics is served here")
            return
        try:
            self.gate.admit(self.headers.get("Authorization", ""), Access.METRICS)
        except (Unauthenticated, PermissionDenied) as refusal:
            self.send_error(http_status(refusal), refusal.message)
            return
        metrics = self.telemetry.render()
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", CONTENT_TYPE)
        self.send_header("Content-Length", str(len(metrics)))
        self.end_headers()
        self.wfile.write(metrics)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: scrapes are frequent."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False  # a client that reads nothing does not delay the end of the process
    allow_reuse_address = True

    def __init__(self, address: tuple[str, int], handler: type[_Handler]) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._places = threading.BoundedSemaphore(_MAX_CONNECTIONS)
        super().__init__(address, handler)

    def process_request(self, request: socket.socket | tuple[bytes, socket.socket], client_address: object) -> None:
        if self._places.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(
        self, request: socket.socket | tuple[bytes, socket.socket], client_address: object
    ) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore the error: a client that disconnects is no error of this process."""
