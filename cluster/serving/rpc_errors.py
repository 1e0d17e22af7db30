"""Convert a TandemError to a gRPC status and back. Every exception that leaves a server passes through this module.

The status code gives the kind and the details give the message; trailing metadata carries the exact reason and the
retry delay. Any other exception is a bug in Tandem: it is logged here once, with its stack trace, and the caller gets
INTERNAL without the stack trace.

The status of a client's call has google.rpc's rich error details too (google/rpc/error_details.proto): `ErrorInfo` has
the reason, in capitals as its specification demands, and the domain `tandem`; `BadRequest` the field that must change;
`RetryInfo` the time after which a retry may succeed.
"""

import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from cluster.errors import (
    Cancelled,
    DeadlineExceeded,
    DuplicateRequest,
    Fenced,
    HandOffFailed,
    HandOffReason,
    InternalError,
    InvalidRequest,
    LimitReached,
    MalformedMessage,
    Overloaded,
    PermissionDenied,
    TandemError,
    Unauthenticated,
    Unavailable,
    UnknownModel,
    grpc_status,
)
from cluster.observe.telemetry import Telemetry
from tandem.channel import explained
from tandem.errors import DETAILS_KEY, DOMAIN, LIMIT_KEY

REASON = "tandem-reason"
HANDOFF_REASON = "tandem-handoff-reason"
RETRY_AFTER_S = "tandem-retry-after-s"

_LONGEST_RETRY_S = 86_400.0
_CLIENT_SERVICES = ("/tandem.v1.Inference/", "/tandem.v1.Admin/")
# A client drops a status with more than 8 KiB of metadata and reports RESOURCE_EXHAUSTED. The message is in it three
# times, once with three characters for each byte that is not ASCII.
_MAX_MESSAGE_BYTES = 1200

_LOG = logging.getLogger("tandem.rpc")
_Context = grpc.aio.ServicerContext[Any, Any]
_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"  # generic in its stubs only

# For a status without a reason: the call never reached a Tandem process, or gRPC itself ended it.
_BY_STATUS: dict[grpc.StatusCode, type[TandemError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.NOT_FOUND: UnknownModel,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDenied,
    grpc.StatusCode.ALREADY_EXISTS: DuplicateRequest,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Overloaded,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.CANCELLED: Cancelled,
    grpc.StatusCode.FAILED_PRECONDITION: Fenced,
}


async def abort(context: _Context, error: TandemError, method: str) -> None:
    """End the call with the error's status. Never returns: gRPC raises AbortError from here.

    A malformed message gives INVALID_ARGUMENT between members, whose caller sent it, and INTERNAL in a client's call,
    where a worker sent it.
    """
    status = grpc.StatusCode[grpc_status(error)]
    if method.startswith(_CLIENT_SERVICES):
        message = shortened(error.message)
        await context.abort(status, message, (*_trailing(error), rich_status(error, status, message)))
    if isinstance(error, MalformedMessage):
        status = grpc.StatusCode.INVALID_ARGUMENT
    await context.abort(status, error.message, _trailing(error))


def error_from_rpc(error: grpc.aio.AioRpcError) -> TandemError:
    """Return the error that the server raised. A status without a reason gives the nearest kind."""
    trailing = {key: value for key, value in error.trailing_metadata() or () if isinstance(value, str)}
    message = explained(error.details() or error.code().name)
    reason = trailing.get(REASON)
    if reason == HandOffFailed.reason:
        named = trailing.get(HANDOFF_REASON, "")
        known = named in HandOffReason.__members__.values()  # otherwise the server is a newer version
        return HandOffFailed(
            HandOffReason(named) if known else HandOffReason.PROTOCOL, message.removeprefix(f"{named}: ")
        )
    kind = _BY_REASON.get(reason) if reason is not None else None
    if kind is None and "larger than max" in message:
        kind = InvalidRequest  # gRPC's own status, RESOURCE_EXHAUSTED, would make a client retry
    retry_after_s = _retry_after_s(trailing.get(RETRY_AFTER_S, ""))
    return (kind or _BY_STATUS.get(error.code(), InternalError))(message, retry_after_s=retry_after_s)


def _retry_after_s(text: str) -> float | None:
    """Return None unless the text is a duration from 0 s to one day."""
    try:
        seconds = float(text)
    except ValueError:
        return None
    return seconds if 0 <= seconds <= _LONGEST_RETRY_S else None


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Wraps every method of a server and ends failed calls with the status of their error."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable["_Handler | None"]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "_Handler | None":
        method = handler_call_details.method
        try:
            handler = await continuation(handler_call_details)
        except TandemError as error:  # an inner interceptor refused the call
            return self._refusal(error, method)
        return self._wrapped(handler, method) if handler is not None else None

    def _wrapped(self, handler: Any, method: str) -> _Handler:
        read = _tolerant(handler.request_deserializer)
        write = handler.response_serializer
        if handler.unary_unary:
            return grpc.unary_unary_rpc_method_handler(self._single(handler.unary_unary, method), read, write)
        if handler.unary_stream:
            return grpc.unary_stream_rpc_method_handler(self._streaming(handler.unary_stream, method), read, write)
        if handler.stream_unary:
            return grpc.stream_unary_rpc_method_handler(self._single(handler.stream_unary, method), read, write)
        return grpc.stream_stream_rpc_method_handler(self._streaming(handler.stream_stream, method), read, write)

    def _single(self, behaviour: Callable[..., Any], method: str) -> Callable[..., Any]:
        async def answer(request: Any, context: _Context) -> Any:
            try:
                return await behaviour(_checked(request), context)
            except Exception as error:  # noqa: BLE001 -- the edge of the process; _end logs unknown ones
                await self._end(context, error, method, request)

        return answer

    def _streaming(self, behaviour: Callable[..., Any], method: str) -> Callable[..., Any]:
        if not inspect.isasyncgenfunction(behaviour):  # it writes its responses to the context
            return self._single(behaviour, method)

        async def answers(request: Any, context: _Context) -> AsyncIterator[Any]:
            try:
                # Closed here, so that a cancelled call releases its resources now, not at a later garbage collection.
                async with aclosing(behaviour(_checked(request), context)) as answering:
                    async for answer in answering:
                        yield answer
            except Exception as error:  # noqa: BLE001 -- as above
                await self._end(context, error, method, request)

        return answers

    def _refusal(self, error: TandemError, method: str) -> _Handler:
        async def refuse(_request: Any, context: _Context) -> None:
            await self._end(context, error, method, None)

        return grpc.stream_stream_rpc_method_handler(refuse)  # fits every kind of call: it reads no request

    async def _end(self, context: _Context, error: Exception, method: str, request: Any) -> None:
        if isinstance(error, grpc.aio.AbortError):
            raise error
        known = (
            error if isinstance(error, TandemError) else InternalError("internal error; see the log of this process")
        )
        fields = {"method": method, "reason": known.reason, "request_id": getattr(request, "request_id", None) or "-"}
        if known is error:
            _LOG.info("the call ended: %s", known.message, extra=fields)
        else:
            _LOG.error("the call crashed", extra=fields, exc_info=error)
        self._telemetry.count("tandem_rpc_errors_total", reason=known.reason)
        await abort(context, known, method)


class _Malformed:
    """Marks a message that cannot be parsed."""


def _tolerant(read: Callable[[bytes], Any] | None) -> Callable[[bytes], Any] | None:
    """Wrap a deserializer, so that a message that cannot be parsed is refused as an InvalidRequest. gRPC itself would
    end the call with INTERNAL and log a stack trace."""
    if read is None:
        return None

    def read_or_mark(serialized: bytes) -> Any:
        try:
            return read(serialized)
        except Exception:  # noqa: BLE001 -- protobuf's implementations do not agree on the kind
            return _Malformed()

    return read_or_mark


def _checked(request: Any) -> Any:
    """Return the request, or the stream of requests with each message checked as it arrives. Raises InvalidRequest."""
    if isinstance(request, _Malformed):
        raise InvalidRequest("malformed message: it cannot be parsed as this method's request")
    return _checked_each(request) if hasattr(request, "__aiter__") else request


async def _checked_each(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for request in requests:
        yield _checked(request)


def _trailing(error: TandemError) -> tuple[tuple[str, str], ...]:
    trailing = [(REASON, error.reason)]
    if isinstance(error, HandOffFailed):
        trailing.append((HANDOFF_REASON, str(error.handoff_reason)))
    if error.retry_after_s is not None:
        trailing.append((RETRY_AFTER_S, f"{error.retry_after_s:.3f}"))
    return tuple(trailing)


def _by_reason(base: type[TandemError]) -> dict[str, type[TandemError]]:
    """Map reasons to the classes of cluster/errors.py. A class that another package derives is sent as its base
    class."""
    kinds = {base.reason: base}
    for kind in base.__subclasses__():
        if kind.__module__ == TandemError.__module__:
            kinds.update(_by_reason(kind))
    return kinds


_BY_REASON = _by_reason(TandemError)


def shortened(message: str) -> str:
    """Return the message, cut to the size that the metadata of a call can carry."""
    encoded = message.encode(errors="replace")
    if len(encoded) <= _MAX_MESSAGE_BYTES:
        return message
    return encoded[:_MAX_MESSAGE_BYTES].decode(errors="ignore") + " ..."


def rich_status(error: TandemError, code: grpc.StatusCode, message: str) -> tuple[str, bytes]:
    """Return the trailing metadata that carries an error as google.rpc.Status. `message`: the one of the call."""
    status = status_pb2.Status(code=code.value[0], message=message)
    for detail in _details(error, message):
        status.details.add().Pack(detail)
    return (DETAILS_KEY, status.SerializeToString())


def _details(error: TandemError, message: str) -> list[Message]:
    reason = error.reason.upper()
    info = error_details_pb2.ErrorInfo(reason=reason, domain=DOMAIN)
    if isinstance(error, LimitReached):
        info.metadata[LIMIT_KEY] = error.param
    details: list[Message] = [info]
    if isinstance(error, InvalidRequest) and error.param:
        bad = error_details_pb2.BadRequest()
        bad.field_violations.add(field=error.param, description=message, reason=reason)
        details.append(bad)
    if error.retry_after_s is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromMilliseconds(round(error.retry_after_s * 1000))
        details.append(retry)
    return details
