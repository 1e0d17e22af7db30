"""The middleware of every HTTP request: it assigns a request id, checks the API key and size limits, and handles all
errors.

This is plain ASGI, so that streams are not buffered and a client's disconnect is noticed at once. Owns the count of
body bytes that are being received, and the timeout for clients that read nothing of their response.
"""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import TypeVar

from starlette.datastructures import Headers, MutableHeaders, QueryParams
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.accounts.audit import Audit
from cluster.accounts.keys import Access, Caller, Gate
from cluster.accounts.usage import TenantLimits
from cluster.errors import InvalidRequest, Overloaded, PermissionDenied, TandemError, Unauthenticated
from cluster.observe.telemetry import Telemetry
from cluster.observe.trace_context import TRACE_PARENT_KEY, RequestTrace
from router.http.bodies.openapi import GENERATION_PATHS, HEALTH_PATHS, INFERENCE_PREFIXES
from router.http.connection import ABORT, StreamedBody, take_streamed_body
from router.http.errors import error_response, internal_error, is_anthropic, status_response
from router.request.validation import MAX_REQUEST_ID_CHARACTERS
from router.requests import ANY_CLIENT
from router.running import end

_REQUEST_ID_HEADER = "x-request-id"
_ANTHROPIC_ID_HEADER = "request-id"  # the name that Anthropic's clients read
# Brackets and colons, in strings too: parsing a body of nothing else would block the event loop. A text of 4 MB that
# has this many is longer than any context.
_MAX_STRUCTURE = 250_000
_STRUCTURE = (b"[", b"{", b":")
_MAX_SHOWN = 64  # characters of a wrong header
_MAX_BODIES = 32  # of the largest size, that may be coming in at once
_BODIES_RETRY_S = 1.0
_PAGE = "/ui"  # files that tell nothing; the page asks for the key of its data itself
_OPERATORS, _POLLED = "/admin/", "/admin/overview"
_ACCESS = {"/metrics": Access.METRICS}  # other paths beside the API need any key
_CHUNKS = "tandem.chunks"  # in a request's scope: the DirectChunks of its response
T = TypeVar("T")


class ClientGone(Exception):
    """The client has disconnected, so no response can be sent."""


class ClientStalled(ClientGone):
    """The client has read nothing of its response for `client_stall_s`."""


class Edge:
    """ASGI middleware. Puts the request id into the response's x-request-id, the request's place in traces into its
    traceparent, and both with the Caller into the request's state: `scope["state"]["request_id"]`, `["trace"]` (None:
    this router makes no spans) and `["caller"]`."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        gate: Gate,
        audit: Audit,
        limits: TenantLimits,
        max_message_bytes: int,
        client_stall_s: float,
        telemetry: Telemetry,
        begin_trace: Callable[[str], RequestTrace | None] = lambda trace_parent: None,
    ) -> None:
        """`begin_trace`: as LiveRequests.begin_trace."""
        self._app = app
        self._begin_trace = begin_trace
        self._client_stall_s = client_stall_s
        self._bodies = _Bodies(max_message_bytes, _MAX_BODIES * max_message_bytes)
        self._gate, self._audit = gate, audit
        self._limits = limits
        self._telemetry = telemetry

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id = headers.get(_REQUEST_ID_HEADER) or uuid.uuid4().hex
        is_generation = scope["method"] == "POST" and scope["path"] in GENERATION_PATHS
        trace = self._begin_trace(headers.get(TRACE_PARENT_KEY, "")) if is_generation else None
        scope.setdefault("state", {}).update(request_id=request_id, trace=trace)
        id_headers = (_REQUEST_ID_HEADER, *([_ANTHROPIC_ID_HEADER] if is_anthropic(scope["path"]) else []))
        answer = _Answer(send, request_id, id_headers, trace, self._client_stall_s)
        if (body := take_streamed_body(scope)) is not None:
            scope[_CHUNKS] = DirectChunks(body, self._client_stall_s)
            answer.can_write = body.can_write
        try:
            self._check(scope, headers, request_id)
            with self._held(scope) as hold, self._bodies.body(headers, receive, hold) as limited:
                await self._app(scope, limited, answer)
        except ClientStalled:
            self._telemetry.count("tandem_stalled_clients_total", surface="http")
            scope.get(ABORT, lambda: None)()
        except HTTPException as refusal:
            await status_response(refusal.status_code, str(refusal.detail), path=scope["path"])(scope, receive, answer)
        except ClientGone:
            answer.status = answer.status or 499  # nginx's status for it, used by the counter only
        except TandemError as error:
            if answer.status is None:
                await error_response(error, scope["path"])(scope, receive, answer)
        except Exception as error:  # noqa: BLE001  # logged there; the last one who can answer
            failure = internal_error(error, request_id)
            if answer.status is None:
                await error_response(failure, scope["path"])(scope, receive, answer)
        finally:
            scope.pop(_CHUNKS, None)  # they refer to the scope
            route = getattr(scope.get("route"), "path", "other")
            status = str(answer.status or 499)
            self._telemetry.count("tandem_http_responses_total", route=route, status=status)
            if scope["path"].startswith(_OPERATORS):
                self._record(scope, answer.status)

    def _record(self, scope: Scope, status: int | None) -> None:
        """Write an operator's call to the audit log. Of calls that tools make every second, only refusals are
        written.
        """
        outcome = _outcome(status)
        if outcome == "ok" and scope["path"] == _POLLED:
            return
        caller: Caller = scope["state"].get("caller", ANY_CLIENT)
        host, port = scope.get("client") or ("", 0)
        what, origin = f"{scope['method']} {scope['path']}", f"{host}:{port}"
        request = dict(QueryParams(scope.get("query_string", b"")))
        if caller.key_id or outcome == "ok":
            who = caller if caller.key_id else None
            self._audit.record(who=who, what=what, origin=origin, outcome=outcome, request=request)
        else:
            self._audit.record_refusal(what=what, origin=origin, outcome=outcome, request=request)

    @contextmanager
    def _held(self, scope: Scope) -> Iterator[Callable[[int], None]]:
        """Yield a function that counts the bytes of a body; they count for the caller until the `with` block ends."""
        caller: Caller = scope["state"].get("caller", ANY_CLIENT)
        if not caller.is_counted:
            yield lambda _number: None
            return
        num_bytes = 0

        def hold(number: int) -> None:
            nonlocal num_bytes
            self._limits.hold_bytes(caller, number, time.monotonic())
            num_bytes += number

        try:
            yield hold
        finally:
            self._limits.hold_bytes(caller, -num_bytes, time.monotonic())

    def _check(self, scope: Scope, headers: Headers, request_id: str) -> None:
        """Check the headers before the body is read. Raises InvalidRequest, Unauthenticated, PermissionDenied."""
        if len(request_id) > MAX_REQUEST_ID_CHARACTERS or not (request_id.isascii() and request_id.isprintable()):
            raise InvalidRequest(f"x-request-id must be at most {MAX_REQUEST_ID_CHARACTERS} printable ASCII characters")
        path = scope["path"]
        if path in HEALTH_PATHS or path == _PAGE or path.startswith(f"{_PAGE}/"):
            return
        if (encoding := headers.get("content-encoding", "identity").lower()) != "identity":
            raise InvalidRequest(f"the body has content-encoding {encoding[:_MAX_SHOWN]}: send it uncompressed")
        authorization = headers.get("authorization", "")
        if not authorization and "x-api-key" in headers:  # clients of Anthropic
            authorization = "Bearer " + headers["x-api-key"]
        if not authorization.isascii():  # keys are compared as the bytes that came
            authorization = authorization.encode("latin-1").decode("utf-8", "surrogateescape")
        try:
            scope["state"]["caller"] = self._gate.admit(authorization, _access(path))
        except TandemError:
            scope["state"]["caller"] = self._gate.caller(authorization)  # for the audit log
            raise


def _outcome(status: int | None) -> str:
    """Return the outcome of a response with this status for the audit log; None: the client left before its head."""
    reasons = {None: "cancelled", 401: Unauthenticated.reason, 403: PermissionDenied.reason}
    return "ok" if status is not None and status < 400 else reasons.get(status, f"status_{status}")


def _access(path: str) -> Access | None:
    if path.startswith(INFERENCE_PREFIXES):
        return Access.INFERENCE
    return Access.ADMIN if path.startswith(_OPERATORS) else _ACCESS.get(path)


class _Answer:
    """Wraps `send`: adds the request id and the place in traces to the headers, and a timeout to every write. Remembers
    the status."""

    def __init__(
        self, send: Send, request_id: str, id_headers: Sequence[str], trace: RequestTrace | None, stall_s: float
    ) -> None:
        self._send = send
        self._request_id, self._id_headers = request_id, id_headers
        self._trace = trace
        self._stall_s = stall_s
        self.status: int | None = None
        self.can_write: Callable[[], bool] = lambda: False  # whether a write need not wait for the client

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = MutableHeaders(scope=message)
            if self._request_id.isascii() and self._request_id.isprintable():
                for name in self._id_headers:
                    headers[name] = self._request_id[:MAX_REQUEST_ID_CHARACTERS]
            if self._trace is not None:
                headers[TRACE_PARENT_KEY] = str(self._trace.root)
        if self.can_write():
            await self._send(message)
            return
        try:
            async with asyncio.timeout(self._stall_s):
                await self._send(message)
        except TimeoutError:
            raise ClientStalled from None


class DirectChunks:
    """Writes chunks of a response to its connection, past the middleware. The head and the end go through `send`."""

    def __init__(self, body: StreamedBody, stall_s: float) -> None:
        self._body, self._stall_s = body, stall_s
        self.can_write = body.can_write  # whether the client has taken most of what was written
        self.write_now = body.write  # without a wait, where `can_write`
        self.calling_when_left = body.calling_when_left

    async def write(self, chunk: bytes) -> None:
        """Wait until the client has taken most of what was written, and write. Raises ClientStalled."""
        if not self._body.can_write():
            try:
                async with asyncio.timeout(self._stall_s):
                    await self._body.drained()
            except TimeoutError:
                raise ClientStalled from None
        self._body.write(chunk)


class SentChunks:
    """Sends chunks of a response as ASGI messages."""

    def __init__(self, send: Send) -> None:
        self._send = send

    async def write(self, chunk: bytes) -> None:
        await self._send({"type": "http.response.body", "body": chunk, "more_body": True})


def chunks_of(scope: Scope, send: Send) -> DirectChunks | SentChunks:
    """Return the fastest way for the chunks of a response, after its head was sent."""
    direct: DirectChunks | None = scope.get(_CHUNKS)
    return direct if direct is not None else SentChunks(send)


class _Bodies:
    """The request bodies that are being received. Each of them and all of them together are bounded."""

    def __init__(self, max_bytes: int, max_bytes_of_all: int) -> None:
        self._max_bytes = max_bytes
        self._max_bytes_of_all = max_bytes_of_all
        self._num_bytes_of_all = 0

    @contextmanager
    def body(self, headers: Headers, receive: Receive, hold: Callable[[int], None]) -> Iterator[Receive]:
        """Yield a `receive` that refuses a body as soon as it is too large, whatever its headers declare. `hold` counts
        its bytes for the caller, and may refuse them."""
        declared = headers.get("content-length", "")
        if declared.isdecimal():
            self._check(int(declared))
        num_bytes = num_structure = num_counted = 0

        async def limited() -> Message:
            nonlocal num_bytes, num_structure, num_counted
            message = await receive()
            body = message.get("body", b"")
            num_bytes += len(body)
            num_structure += sum(map(body.count, _STRUCTURE))
            self._num_bytes_of_all += len(body)
            num_counted += len(body)
            self._check(num_bytes, num_structure)
            hold(len(body))
            if not message.get("more_body", False):  # the body is complete; from here on admission limits the request
                self._num_bytes_of_all -= num_counted
                num_counted = 0
            return message

        try:
            yield limited
        finally:
            self._num_bytes_of_all -= num_counted

    def _check(self, num_bytes: int, num_structure: int = 0) -> None:
        """Check the size of a body so far. Raises HTTPException, InvalidRequest, Overloaded."""
        if num_bytes > self._max_bytes:
            raise HTTPException(413, f"the body is larger than {self._max_bytes} bytes, the most this router takes")
        if num_structure > _MAX_STRUCTURE:
            raise InvalidRequest(f"the body has more than {_MAX_STRUCTURE} brackets and colons, the maximum")
        if self._num_bytes_of_all > self._max_bytes_of_all:
            raise Overloaded(
                f"{self._num_bytes_of_all} bytes of requests are being received already; try again",
                retry_after_s=_BODIES_RETRY_S,
            )


async def while_connected(scope: Scope, receive: Receive, work: Coroutine[None, None, T]) -> T:
    """Return the result of `work`. A disconnect of the client cancels it and raises ClientGone. The body has
    been read."""
    task = asyncio.current_task()
    assert task is not None
    num_cancels, is_gone = task.cancelling(), False

    def on_left() -> None:
        nonlocal is_gone
        is_gone = True
        task.cancel()

    chunks: DirectChunks | None = scope.get(_CHUNKS)
    try:
        if chunks is not None:
            with chunks.calling_when_left(on_left):
                return await work
        async with _calling_when_left(receive, on_left):
            return await work
    except asyncio.CancelledError:
        if is_gone and task.uncancel() <= num_cancels:
            raise ClientGone from None
        raise


@asynccontextmanager
async def _calling_when_left(receive: Receive, on_left: Callable[[], None]) -> AsyncIterator[None]:
    """Call `on_left` when the client of another server leaves before the block ends."""

    def on_end(watching: "asyncio.Task[None]") -> None:
        if not watching.cancelled():
            on_left()

    watching = asyncio.create_task(_left(receive))
    watching.add_done_callback(on_end)
    try:
        yield
    finally:
        watching.remove_done_callback(on_end)
        await end(watching)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
