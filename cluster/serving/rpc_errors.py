"""A TandemError as a gRPC status and back. The one place where exceptions leave a server.

The status says the kind, its details the message; trailing metadata carries the exact reason and when to come back. An
exception of any other kind is our own fault: it is logged here, once, with its stack, and leaves as INTERNAL without.
"""

import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, TypeAlias

import grpc

from cluster.errors import (
    Cancelled,
    DeadlineExceeded,
    DuplicateRequest,
    Fenced,
    HandOffFailed,
    HandOffReason,
    InternalError,
    InvalidRequest,
    MalformedMessage,
    Overloaded,
    TandemError,
    Unauthenticated,
    Unavailable,
    UnknownModel,
    grpc_status,
)
from cluster.observe.telemetry import Telemetry
from tandem.channel import explained

REASON = "tandem-reason"
HANDOFF_REASON = "tandem-handoff-reason"
RETRY_AFTER_S = "tandem-retry-after-s"

_LONGEST_RETRY_S = 86_400.0
_CLIENT_SERVICES = ("/tandem.v1.Inference/", "/tandem.v1.Admin/")

_LOG = logging.getLogger("tandem.rpc")
_Context = grpc.aio.ServicerContext[Any, Any]
_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"  # generic in its stubs only

# Where no reason came along: the call never reached a process of Tandem, or was ended by gRPC itself.
_BY_STATUS: dict[grpc.StatusCode, type[TandemError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.NOT_FOUND: UnknownModel,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.ALREADY_EXISTS: DuplicateRequest,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Overloaded,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.CANCELLED: Cancelled,
    grpc.StatusCode.FAILED_PRECONDITION: Fenced,
}


async def abort(context: _Context, error: TandemError, method: str) -> None:
    """End the call with the error's status. Never returns: gRPC raises AbortError from here.

    Between members the caller has sent the malformed message. A client has not: the message came from a worker."""
    is_callers_fault = isinstance(error, MalformedMessage) and not method.startswith(_CLIENT_SERVICES)
    status = grpc.StatusCode.INVALID_ARGUMENT if is_callers_fault else grpc.StatusCode[grpc_status(error)]
    await context.abort(status, error.message, _trailing(error))


def error_from_rpc(error: grpc.aio.AioRpcError) -> TandemError:
    """What the other side raised, as it raised it; where it said no reason, the nearest kind."""
    trailing = {key: value for key, value in error.trailing_metadata() or () if isinstance(value, str)}
    message = explained(error.details() or error.code().name)
    reason = trailing.get(REASON)
    if reason == HandOffFailed.reason:
        named = trailing.get(HANDOFF_REASON, "")
        known = named in HandOffReason.__members__.values()  # else of a version that knows more
        return HandOffFailed(
            HandOffReason(named) if known else HandOffReason.PROTOCOL, message.removeprefix(f"{named}: ")
        )
    kind = _BY_REASON.get(reason) if reason is not None else None
    if kind is None and "larger than max" in message:
        kind = InvalidRequest  # gRPC's own status for it, RESOURCE_EXHAUSTED, would tell a client to try again
    retry_after_s = _retry_after_s(trailing.get(RETRY_AFTER_S, ""))
    return (kind or _BY_STATUS.get(error.code(), InternalError))(message, retry_after_s=retry_after_s)


def _retry_after_s(text: str) -> float | None:
    """None for what is no duration that a client could wait."""
    try:
        seconds = float(text)
    except ValueError:
        return None
    return seconds if 0 <= seconds <= _LONGEST_RETRY_S else None


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Stands before every method of a server."""

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
        except TandemError as error:  # an interceptor inside of this one refused
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
            except Exception as error:  # noqa: BLE001 -- the edge of the process; _end logs what is unknown
                await self._end(context, error, method, request)

        return answer

    def _streaming(self, behaviour: Callable[..., Any], method: str) -> Callable[..., Any]:
        if not inspect.isasyncgenfunction(behaviour):  # it writes to the context itself
            return self._single(behaviour, method)

        async def answers(request: Any, context: _Context) -> AsyncIterator[Any]:
            try:
                # closed here: a cancelled call releases what its generator holds now, not at some collection
                async with aclosing(behaviour(_checked(request), context)) as answering:
                    async for answer in answering:
                        yield answer
            except Exception as error:  # noqa: BLE001 -- as above
                await self._end(context, error, method, request)

        return answers

    def _refusal(self, error: TandemError, method: str) -> _Handler:
        async def refuse(_request: Any, context: _Context) -> None:
            await self._end(context, error, method, None)

        return grpc.stream_stream_rpc_method_handler(refuse)  # fits any call: it reads and answers nothing

    async def _end(self, context: _Context, error: Exception, method: str, request: Any) -> None:
        if isinstance(error, grpc.aio.AbortError):
            raise error
        known = (
            error if isinstance(error, TandemError) else InternalError("internal error; see the log of this process")
        )
        fields = {"method": method, "reason": known.reason, "request_id": getattr(request, "request_id", None) or "-"}
        if known is error:
            _LOG.info("call ended: %s", known.message, extra=fields)
        else:
            _LOG.error("call crashed", extra=fields, exc_info=error)
        self._telemetry.count("tandem_rpc_errors_total", reason=known.reason)
        await abort(context, known, method)


class _Malformed:
    """Stands for a message that is none."""


def _tolerant(read: Callable[[bytes], Any] | None) -> Callable[[bytes], Any] | None:
    """gRPC answers a message that it cannot parse with INTERNAL and a stack trace in the log; here it is refused."""
    if read is None:
        return None

    def read_or_mark(serialized: bytes) -> Any:
        try:
            return read(serialized)
        except Exception:  # noqa: BLE001 -- protobuf's implementations do not agree on the kind
            return _Malformed()

    return read_or_mark


def _checked(request: Any) -> Any:
    """The request, or each message of a stream as it comes."""
    if isinstance(request, _Malformed):
        raise InvalidRequest("malformed message: it does not parse as this method's request")
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
    """Of cluster/errors.py only: a kind that a package derives for itself travels as the one it derives from."""
    kinds = {base.reason: base}
    for kind in base.__subclasses__():
        if kind.__module__ == TandemError.__module__:
            kinds.update(_by_reason(kind))
    return kinds


_BY_REASON = _by_reason(TandemError)
