"""Sends the requests of a batch to a router's HTTP API, several at once, and retries what another attempt may mend."""

import http.client
import json
import socket
import ssl
import threading
from collections.abc import Generator, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass

from cli.batch.batch_file import BatchAnswer, BatchRequest, is_final

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A router's HTTP API. `tls`: None for plain HTTP."""

    address: str  # host:port
    api_key: str = ""
    tls: ssl.SSLContext | None = None
    timeout_s: float = 600.0  # of one attempt

    def connect(self) -> http.client.HTTPConnection:
        if self.tls is not None:
            return http.client.HTTPSConnection(self.address, timeout=self.timeout_s, context=self.tls)
        return http.client.HTTPConnection(self.address, timeout=self.timeout_s)


class BatchSender:
    """Sends one batch."""

    def __init__(self, server: Server, *, concurrency: int, max_attempts: int) -> None:
        self._server = server
        self._concurrency = concurrency
        self._max_attempts = max_attempts
        self._pool = ThreadPoolExecutor(concurrency, "batch")
        self._stopped = threading.Event()
        self._own = threading.local()  # one connection per thread
        self._connections: list[http.client.HTTPConnection] = []  # of all threads

    def answers(self, requests: Iterable[BatchRequest]) -> Generator[BatchAnswer, None, None]:
        """Yield each answer when it is there. At most `concurrency` requests are on their way at once. Where the reader
        ends early, these are given up."""
        waiting = iter(requests)
        running: set[Future[BatchAnswer]] = set()
        try:
            while True:
                while len(running) < self._concurrency and (request := next(waiting, None)) is not None:
                    running.add(self._pool.submit(self._answer, request))
                if not running:
                    return
                done, running = wait(running, return_when=FIRST_COMPLETED)
                for answer in done:
                    yield answer.result()
        finally:
            self._stop()

    def join(self) -> None:
        """Return when no request is on its way any more."""
        self._pool.shutdown(wait=True)

    def _stop(self) -> None:
        self._stopped.set()
        self._pool.shutdown(wait=False, cancel_futures=True)
        for connection in tuple(self._connections):
            if connection.sock is not None:
                with suppress(OSError):
                    connection.sock.shutdown(socket.SHUT_RDWR)  # ends the thread that waits for its answer

    def _answer(self, request: BatchRequest) -> BatchAnswer:
        pause_s = _FIRST_PAUSE_S
        answer, retry_after_s = self._attempt(request)
        for _ in range(self._max_attempts - 1):
            if is_final(answer.status_code) or self._stopped.wait(max(pause_s, retry_after_s)):
                break
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            answer, retry_after_s = self._attempt(request)
        return answer

    def _attempt(self, request: BatchRequest) -> tuple[BatchAnswer, float]:
        """Return the answer, and the seconds after which the router wants to be asked again; 0: it does not say."""
        headers = {"content-type": "application/json"}
        if self._server.api_key:
            headers["authorization"] = f"Bearer {self._server.api_key}"
        connection = self._connection()
        try:
            if connection.sock is None:
                connection.connect()
            if self._stopped.is_set():  # else `_stop` is still to come, and finds this socket
                return BatchAnswer(request.custom_id, 0, problem="given up"), 0.0
            connection.request("POST", request.url, json.dumps(request.body), headers)
            response = connection.getresponse()
            body = json.loads(response.read())
        except (OSError, http.client.HTTPException, ValueError, RecursionError) as error:
            connection.close()  # the next request opens it again
            problem = f"{self._server.address}: {error or type(error).__name__}"
            return BatchAnswer(request.custom_id, 0, problem=problem), 0.0
        retry_after_s = 0.0
        with suppress(ValueError):
            retry_after_s = float(response.headers.get("retry-after", 0))
        request_id = response.headers.get("x-request-id", "")
        return BatchAnswer(request.custom_id, response.status, request_id, body), retry_after_s

    def _connection(self) -> http.client.HTTPConnection:
        connection: http.client.HTTPConnection | None = getattr(self._own, "connection", None)
        if connection is None:
            connection = self._own.connection = self._server.connect()
            self._connections.append(connection)
        return connection
