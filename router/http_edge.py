"""What every HTTP request meets before its route: an id, the key, the size limit, and a guard that lets no trace out.

Plain ASGI, so that streams pass through without being held and a client's leaving is seen at once.
"""

import asyncio
import hmac
import uuid
from collections.abc import Coroutine
from typing import Protocol, TypeVar

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.errors import InvalidRequest, TandemError, Unauthenticated
from router.openai_errors import error_response, internal_error
from router.validation import MAX_REQUEST_ID_CHARACTERS

_REQUEST_ID_HEADER = "x-request-id"
_GUARDED_PREFIX = "/v1/"
T = TypeVar("T")


class Counts(Protocol):
    """What this module needs of cluster.telemetry.Telemetry."""

    def count(self, name: str, value: float = 1, **labels: str) -> None: ...


class ClientGone(Exception):
    """The client left; there is nobody to answer."""


class Edge:
    """ASGI middleware. The id it gives stands in `scope["state"]["request_id"]` and in the answer's x-request-id."""

    def __init__(self, app: ASGIApp, *, api_key: str, max_message_bytes: int, telemetry: Counts) -> None:
        self._app = app
        self._expected = f"Bearer {api_key}".encode() if api_key else None
        self._max_message_bytes = max_message_bytes
        self._telemetry = telemetry

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id = headers.get(_REQUEST_ID_HEADER) or uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        answer = _Answer(send, request_id)
        try:
            self._check(scope, headers, request_id)
            await self._app(scope, _limited(receive, self._max_message_bytes), answer)
        except ClientGone:
            answer.status = answer.status or 499  # nginx's number for it; nobody reads it but the counter
        except TandemError as error:
            await error_response(error)(scope, receive, answer)
        except Exception as error:  # noqa: BLE001  # logged there; the last one who can answer
            failure = internal_error(error, request_id)
            if answer.status is None:
                await error_response(failure)(scope, receive, answer)
        finally:
            route = getattr(scope.get("route"), "path", "other")
            status = str(answer.status or 499)
            self._telemetry.count("tandem_http_responses_total", route=route, status=status)

    def _check(self, scope: Scope, headers: Headers, request_id: str) -> None:
        """Before the body is read. Raises InvalidRequest, Unauthenticated."""
        if len(request_id) > MAX_REQUEST_ID_CHARACTERS or not (request_id.isascii() and request_id.isprintable()):
            raise InvalidRequest(f"x-request-id must be at most {MAX_REQUEST_ID_CHARACTERS} printable ASCII characters")
        if self._expected is not None and scope["path"].startswith(_GUARDED_PREFIX):
            given = headers.get("authorization", "").encode("latin-1")  # as it came
            if not hmac.compare_digest(given, self._expected):
                raise Unauthenticated("send the API key of this router as: Authorization: Bearer KEY")


class _Answer:
    """`send` with the request's id in the headers; remembers the status."""

    def __init__(self, send: Send, request_id: str) -> None:
        self._send = send
        self._request_id = request_id
        self.status: int | None = None

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = MutableHeaders(scope=message)
            if self._request_id.isascii() and self._request_id.isprintable():
                headers[_REQUEST_ID_HEADER] = self._request_id[:MAX_REQUEST_ID_CHARACTERS]
        await self._send(message)


def _limited(receive: Receive, max_bytes: int) -> Receive:
    """`receive` that refuses a body past `max_bytes` as soon as it is past it, whatever its headers say."""
    num_bytes = 0

    async def limited() -> Message:
        nonlocal num_bytes
        message = await receive()
        num_bytes += len(message.get("body", b""))
        if num_bytes > max_bytes:
            raise HTTPException(413, f"the body is larger than {max_bytes} bytes, the most this router takes")
        return message

    return limited


async def while_connected(receive: Receive, work: Coroutine[None, None, T]) -> T:
    """The work's result. The body has been read. The client's leaving cancels the work and raises ClientGone."""
    working = asyncio.create_task(work)
    watching = asyncio.create_task(_left(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
