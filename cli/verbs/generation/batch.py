"""`tandem batch`: answer a file of requests, with the capacity that no other request needs.

The files are in OpenAI's batch format, with one JSON object per line:

{"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"model": "m", "prompt": "a"}}
{"id": "...", "custom_id": "1", "response": {"status_code": 200, "request_id": "...", "body": {...}}, "error": null}

`BatchSender` sends requests to a router's HTTP API, several at once, and retries requests whose failure may be
temporary.
"""

import argparse
import http.client
import json
import socket
import ssl
import sys
import threading
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from cli.argument_types import seconds, whole_number
from cli.connection import add_credentials, client_key, find_http_address, tls_ca, tls_server_name
from cli.terminal import restored_at_end
from cli.text_input import is_text
from cluster.errors import ConfigError
from cluster.process import ExitStatus

URLS = ("/v1/chat/completions", "/v1/completions")
_BATCH_CLASS = "flex"  # the service tier of requests that only use capacity that no other request needs
_OK = 200
_MOST = 10_000  # threads, or attempts
_KEY_REFUSED = (401, 403)
_ID_PREFIX = "batch_req_"
_BEGIN = f'{{"id": "{_ID_PREFIX}'  # of every line of answers
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
HELP = "answer a file of requests in OpenAI's batch format; a restarted command sends only the rest"


@dataclass(frozen=True, slots=True)
class BatchRequest:
    custom_id: str
    url: str
    body: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class BatchAnswer:
    """The response to one request. `status_code` 0: no router answered; `problem` is the reason."""

    custom_id: str
    status_code: int
    request_id: str = ""
    body: Any = None
    problem: str = ""

    @property
    def is_ok(self) -> bool:
        return self.status_code == _OK

    @property
    def why(self) -> str:
        """Return why it is not ok: the router's message, if there is one."""
        error = self.body.get("error") if isinstance(self.body, Mapping) else None
        message = error.get("message") if isinstance(error, Mapping) else None
        return self.problem or f"HTTP status {self.status_code}" + (f": {message}" if message else "")

    def to_line(self) -> str:
        response = {"status_code": self.status_code, "request_id": self.request_id, "body": self.body}
        line = {
            "id": _ID_PREFIX + self.custom_id,
            "custom_id": self.custom_id,
            "response": response if self.status_code else None,
            "error": None if self.status_code else {"code": "unavailable", "message": self.problem},
        }
        return json.dumps(line, ensure_ascii=False) + "\n"


def read_requests(lines: Iterable[str], name: str) -> list[BatchRequest]:
    """Return the requests. Those without a service tier get the batch class. Raises ConfigError, which names the line
    of the file `name`."""
    found: dict[str, BatchRequest] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            request = _request(line)
        except ValueError as error:
            raise ConfigError(f"{name}, line {number}: {error}") from None
        if request.custom_id in found:
            raise ConfigError(
                f"{name}, line {number}: custom_id {request.custom_id!r} is used twice; give every request its own"
            )
        found[request.custom_id] = request
    return list(found.values())


def kept_lines(lines: Sequence[str], name: str, asked: Collection[str]) -> dict[str, str]:
    """Return the lines of an earlier run that stay, by custom_id: all but those of requests in `asked` that another run
    may answer differently, and a last line that an interruption cut off.

    Raises ConfigError if the file `name` holds anything else, because its lines would be lost."""
    kept: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        if number == len(lines) and _is_torn(line):
            continue
        try:
            answer = json.loads(line)
            custom_id, response = answer["custom_id"], answer["response"]
            if is_of_request(response["status_code"] if response else 0) or custom_id not in asked:
                kept[custom_id] = line
        except (ValueError, KeyError, TypeError, RecursionError):
            raise ConfigError(
                f"{name}, line {number} is not an answer of a batch; choose another file for the answers"
            ) from None
    return kept


def _is_torn(line: str) -> bool:
    """Return whether this is the beginning of an answer of ours that was not written to its end."""
    return not line.endswith("\n") and (line.startswith(_BEGIN) or _BEGIN.startswith(line))


def is_final(status_code: int) -> bool:
    """Return whether another attempt would get the same status: not where the cluster is overloaded or failing."""
    return status_code != 429 and 0 < status_code < 500


def is_of_request(status_code: int) -> bool:
    """Return whether another run would get the same status: also not if the router refused the API key."""
    return is_final(status_code) and status_code not in _KEY_REFUSED


def _request(line: str) -> BatchRequest:
    """Parse one line of the input file. Raises ValueError."""
    try:
        request = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(request, dict):
        raise ValueError("a request must be an object")
    custom_id, url, body = request.get("custom_id"), request.get("url"), request.get("body")
    if not isinstance(custom_id, str) or not custom_id:
        raise ValueError("custom_id must be a string that identifies the request")
    if not is_text(custom_id):
        raise ValueError(f"custom_id {custom_id!r} is not text: it has half of a surrogate pair")
    if request.get("method", "POST") != "POST" or url not in URLS:
        raise ValueError(f"method must be POST and url one of {', '.join(URLS)}")
    if not isinstance(body, dict):
        raise ValueError("body must be an object with the fields of the request")
    if body.get("stream"):
        raise ValueError("body.stream must be false: an answer is one line of the output")
    return BatchRequest(custom_id, url, {"service_tier": _BATCH_CLASS, **body})


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A router's HTTP API. `tls`: None for plain HTTP."""

    address: str  # host:port
    api_key: str = ""
    tls: ssl.SSLContext | None = None
    tls_server_name: str = ""  # that the router's certificate must have; empty: the host of the address
    timeout_s: float = 600.0  # of one attempt

    def connect(self) -> http.client.HTTPConnection:
        if self.tls is not None:
            return _NamedConnection(self.address, self.tls, self.tls_server_name, timeout_s=self.timeout_s)
        return http.client.HTTPConnection(self.address, timeout=self.timeout_s)


class _NamedConnection(http.client.HTTPConnection):
    """A connection over HTTPS to a router whose certificate has a name of its own."""

    default_port = http.client.HTTPS_PORT

    def __init__(self, address: str, tls: ssl.SSLContext, name: str, *, timeout_s: float) -> None:
        super().__init__(address, timeout=timeout_s)
        self._tls, self._name = tls, name or self.host

    def connect(self) -> None:
        super().connect()
        self.sock = self._tls.wrap_socket(self.sock, server_hostname=self._name)


class BatchSender:
    """Sends the requests of one batch to a router, several at a time, and repeats those that may be repeated."""

    def __init__(self, server: Server, *, concurrency: int, max_attempts: int) -> None:
        self._server = server
        self._concurrency = concurrency
        self._max_attempts = max_attempts
        self._pool = ThreadPoolExecutor(concurrency, "batch")
        self._stopped = threading.Event()
        self._own = threading.local()  # one connection per thread
        self._connections: list[http.client.HTTPConnection] = []  # of all threads

    def answers(self, requests: Iterable[BatchRequest]) -> Generator[BatchAnswer, None, None]:
        """Yield each answer when it arrives. At most `concurrency` requests are in flight at once. If the reader ends
        early, they are cancelled.
        """
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
        """Return when no request is in flight any more."""
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
        """Return the answer, and the router's Retry-After in seconds; 0: the response has none."""
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("input", type=Path, metavar="IN.jsonl", help="the requests, one JSON object per line")
    parser.add_argument("output", type=Path, metavar="OUT.jsonl", help="the answers, one per line as they come")
    parser.add_argument(
        "--http-address",
        metavar="HOST:PORT",
        help="HTTP address of a router (default: TANDEM_HTTP_ADDRESS or the last local cluster)",
    )
    add_credentials(parser)
    parser.add_argument(
        "--concurrency",
        type=whole_number(1, _MOST),
        metavar="N",
        default=32,
        help="maximum requests at once (default: 32)",
    )
    parser.add_argument(
        "--max-attempts",
        type=whole_number(1, _MOST),
        metavar="N",
        default=8,
        help="maximum attempts of a request (default: 8)",
    )
    parser.add_argument(
        "--timeout-s", type=seconds, metavar="X", default=600.0, help="timeout of one attempt in seconds (default: 600)"
    )


def run(arguments: argparse.Namespace) -> int:
    requests = _requests(arguments.input)
    sender = BatchSender(_server(arguments), concurrency=arguments.concurrency, max_attempts=arguments.max_attempts)
    kept = _kept(arguments.output, requests)
    left = [request for request in requests if request.custom_id not in kept]
    if len(left) < len(requests):
        sys.stderr.write(f"{len(requests) - len(left)} of {len(requests)} requests have an answer from before\n")
    with _appending(arguments.output, kept.values()) as output:
        failed = _ask(sender, left, output)
    print(f"{len(left)} asked: {len(left) - len(failed)} ok, {len(failed)} failed; answers in {arguments.output}")
    for answer in failed[:3]:
        sys.stderr.write(f"tandem: {answer.custom_id}: {answer.why}\n")
    return ExitStatus.CRASHED if failed else ExitStatus.OK


def _ask(sender: BatchSender, requests: Sequence[BatchRequest], output: TextIO) -> list[BatchAnswer]:
    """Write each answer as it comes. Return those that are not ok."""
    failed = []
    for answer in _shown(sender.answers(requests), len(requests)):
        output.write(answer.to_line())
        output.flush()
        if not answer.is_ok:
            failed.append(answer)
    return failed


def _shown(answers: Iterator[BatchAnswer], total: int) -> Iterator[BatchAnswer]:
    """Show the progress of the batch, if stderr is a terminal."""
    if not sys.stderr.isatty():
        yield from answers
        return
    from rich.console import Console  # imported here: a tenth of a second
    from rich.progress import track

    with restored_at_end():
        yield from track(answers, "batch", total=total, console=Console(stderr=True))


def _kept(path: Path, requests: Sequence[BatchRequest]) -> dict[str, str]:
    """Return the lines of an earlier run that stay in the output. Raises ConfigError."""
    try:
        with path.open(encoding="utf-8", newline="\n") as file:  # a line may have other line separators in its texts
            lines = file.readlines()
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    return kept_lines(lines, str(path), {request.custom_id for request in requests})


def _requests(path: Path) -> list[BatchRequest]:
    try:
        with path.open(encoding="utf-8-sig") as lines:
            return read_requests(lines, str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error


@contextmanager
def _appending(path: Path, kept: Iterable[str]) -> Iterator[TextIO]:
    """Open the output for further answers. It holds the `kept` lines and no other."""
    draft = path.with_name(f".{path.name}.draft")
    try:
        draft.write_text("".join(kept), encoding="utf-8")
        draft.replace(path)
        output = path.open("a", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
    try:
        with output:
            yield output
    except OSError as error:
        error.filename = error.filename or str(path)  # a write to an open file does not name it
        raise
    except KeyboardInterrupt:
        sys.stderr.write(f"tandem: interrupted; the same command asks for what {path} does not have yet\n")
        raise


def _server(arguments: argparse.Namespace) -> Server:
    address = find_http_address(arguments.http_address)
    authorities = tls_ca(arguments, address)
    try:
        tls = ssl.create_default_context(cafile=authorities) if authorities else None
    except OSError as error:
        raise ConfigError(f"--tls-ca {authorities} holds no certificate") from error
    return Server(
        address=address,
        api_key=client_key(arguments, address),
        tls=tls,
        tls_server_name=tls_server_name(arguments) or "",
        timeout_s=arguments.timeout_s,
    )
