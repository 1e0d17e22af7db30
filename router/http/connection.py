"""An HTTP connection: its requests, read by httptools, and a timeout for every wait for its client.

Owns the timers of the connection, the bound on the bytes of a request's head, and the direct way of a streamed body to
the socket. uvicorn's protocol runs the app; router/http/server.py accepts the connection.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Protocol

import httptools
from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from router.http.errors import status_response

ABORT = "tandem.abort"  # in a request's scope: closes its connection without waiting for the client
_BODY = "tandem.body"  # in a request's scope: the StreamedBody of its response
_MAX_HEAD_BYTES = 16 << 10  # of a request line with all headers and trailers
_MAX_PIPELINED = 8  # requests that wait for the response before them
_INVALID = "this is no valid HTTP/1.1 request"
_LONG_HEAD = f"the request's line and headers have more than {_MAX_HEAD_BYTES} bytes, the maximum"


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """The timeouts of a connection, in seconds."""

    handshake_s: float = 10.0  # from the connection to the end of the TLS handshake
    head_s: float = 15.0  # from then, or a request's first byte, to the last byte of its head
    request_s: float = 60.0  # from then to the last byte of a request; from an answer to the next request's first


class Accepted(Protocol):
    """The place of a connection, to which its protocol reports."""

    def opened(self, transport: asyncio.Transport) -> None: ...

    def request_begun(self) -> None: ...

    def request_complete(self) -> None: ...

    def closed(self) -> None: ...


class StreamedBody:
    """Writes the chunks of a response whose head was sent through ASGI, without a message and a task for each.

    The last chunk goes through ASGI again. Nothing is written once the client has left."""

    def __init__(self, connection: "HttpConnection") -> None:
        self._connection, self._cycle = connection, connection.cycle
        self._transport, self._flow = connection.transport, connection.flow

    def can_write(self) -> bool:
        """Return whether the client has taken most of what was written; if not, await `drained` before the next
        write."""
        return not self._flow.write_paused

    @contextmanager
    def calling_when_left(self, on_left: Callable[[], None]) -> Iterator[None]:
        """Call `on_left` when the client leaves before the `with` block ends. The request has been read."""
        self._flow.resume_reading()  # the end of the connection is read too
        self._connection.on_left = on_left
        if self._cycle.disconnected:
            on_left()
        try:
            yield
        finally:
            self._connection.on_left = None

    async def drained(self) -> None:
        await self._flow.drain()

    def write(self, body: bytes) -> None:
        """Write one chunk, which must not be empty, of a body without content-length."""
        if not self._cycle.disconnected:
            self._transport.write(b"%x\r\n%b\r\n" % (len(body), body) if self._cycle.chunked_encoding else body)


def take_streamed_body(scope: Scope) -> StreamedBody | None:
    """Return the direct way to the socket, once; None where another server runs the app. The scope no longer has it: it
    refers to the scope."""
    body: StreamedBody | None = scope.pop(_BODY, None)
    return body


def _unchunked(cycle: RequestResponseCycle) -> Callable[[Any], Coroutine[Any, Any, None]]:
    """Return the `send` of a response to an HTTP/1.0 client, which must get no chunks (RFC 9112, section 6.1): the end
    of the connection ends a body without content-length."""
    send, has_length = cycle.send, True

    async def unchunked(message: Any) -> None:
        nonlocal has_length
        if message["type"] == "http.response.start":
            has_length = any(name.lower() == b"content-length" for name, _ in message["headers"])
            cycle.chunked_encoding = None if has_length else False
        elif not has_length:
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    return unchunked


class HttpConnection(HttpToolsProtocol):
    def __init__(self, *, accepted: Accepted, limits: HttpLimits, **uvicorns: Any) -> None:
        super().__init__(**uvicorns)
        self._accepted, self._limits = accepted, limits
        self.on_left: Callable[[], None] | None = None  # called when the client leaves
        self._timer: asyncio.TimerHandle | None = None
        self._is_answered = False  # and nothing has come since
        self._num_head_bytes = 0  # of the present request, in whole headers
        self._num_unread_bytes = 0  # received since the parser last found a part of a request

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._accepted.opened(transport)
        self._set_timer(self._limits.head_s)

    def data_received(self, data: bytes) -> None:
        if self._is_answered:
            self._is_answered = False
            self._accepted.request_begun()
            self._set_timer(self._limits.head_s)
        self._unset_keepalive_if_required()
        while data and not self.transport.is_closing():
            data = self._feed(data)

    def _feed(self, data: bytes) -> bytes:
        """Parse data, and return the part that is still to be parsed."""
        self._num_unread_bytes += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            return self._without_upgrade() + data[upgrade.args[0] :]
        except httptools.HttpParserError:
            self.send_400_response(_INVALID)
        if self._num_head_bytes + self._num_unread_bytes > _MAX_HEAD_BYTES:
            self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, _LONG_HEAD)
        if len(self.pipeline) > _MAX_PIPELINED:
            self.send_400_response(f"more than {_MAX_PIPELINED} requests wait on this connection for an answer")
        return b""

    def _without_upgrade(self) -> bytes:
        """Begin again with a parser that has not seen the request, and return its head without the upgrade to another
        protocol that its client offers: a server may ignore the offer (RFC 9110, section 7.8), and the parser would
        ignore the body."""
        method = self.parser.get_method()
        self.parser = httptools.HttpRequestParser(self)
        if method == b"CONNECT":
            self.send_400_response(_INVALID)
        headers = b"".join(b"%b: %b\r\n" % header for header in self.headers if header[0] != b"upgrade")
        return b"%b %b HTTP/1.1\r\n%b\r\n" % (method, self.url, headers)

    def send_400_response(self, msg: str) -> None:
        self._refuse(HTTPStatus.BAD_REQUEST, msg)

    def _refuse(self, status: HTTPStatus, message: str) -> None:
        """Refuse a request that cannot be read, and end the connection. A response in progress is cut off instead."""
        if self.transport.is_closing():
            return
        if self.cycle is None or not self.cycle.response_started or self.cycle.response_complete:
            refusal = status_response(status, message, {"connection": "close"})
            headers = [*self.server_state.default_headers, *refusal.raw_headers]
            lines = b"".join(b"%b: %b\r\n" % header for header in headers)
            head = b"HTTP/1.1 %d %b\r\n%b\r\n" % (status, status.phrase.encode(), lines)
            self.transport.write(head + bytes(refusal.body))
        self.transport.close()

    def on_message_begin(self) -> None:
        self._num_head_bytes = 0
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_unread_bytes = 0
        self._num_head_bytes += len(name) + len(value)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._num_unread_bytes = 0
        if self.parser.should_upgrade():  # it is parsed again without the offer
            return
        super().on_headers_complete()
        scope: dict[str, Any] = self.scope  # type: ignore[assignment]
        if self.on_left is not None:  # uvicorn stopped to read, because this request waits for the answer before it
            self.flow.resume_reading()
        if scope["http_version"] == "1.0":
            self.cycle.send = _unchunked(self.cycle)  # type: ignore[method-assign, assignment]
        scope[ABORT] = self.transport.abort
        scope[_BODY] = StreamedBody(self)
        self._set_timer(self._limits.request_s)

    def on_chunk_header(self) -> None:
        self._num_unread_bytes = 0

    def on_body(self, body: bytes) -> None:
        self._num_unread_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._num_unread_bytes = 0
        if self.parser.should_upgrade():
            return
        super().on_message_complete()
        if self.cycle.response_complete:  # it was answered before it had arrived
            self._wait_for_request()
        else:
            self._accepted.request_complete()
            self._set_timer(None)

    def on_response_complete(self) -> None:
        if not self.pipeline:
            self._wait_for_request()
        elif self.cycle.more_body:
            self._set_timer(self._limits.request_s)
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._set_timer(None)
        self._accepted.closed()
        super().connection_lost(exc)
        if self.on_left is not None:
            self.on_left()

    def _wait_for_request(self) -> None:
        self._is_answered = True
        self._set_timer(self._limits.request_s)  # the client may still be taking what was written

    def _set_timer(self, delay_s: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if delay_s is None else self.loop.call_later(delay_s, self.transport.abort)
