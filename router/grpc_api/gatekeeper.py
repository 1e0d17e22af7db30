"""The interceptor that checks the API key of every call over gRPC, and writes operators' calls to the audit log.

Health checks are open. Reflection needs any key, `Inference` one that allows inference, `Admin` one that allows
everything; a router without keys accepts every call (cluster/accounts/keys.py).
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, TypeAlias

import grpc
from google.protobuf.json_format import MessageToDict

from cluster.accounts.audit import Audit
from cluster.accounts.keys import Access, Caller, Gate
from cluster.errors import TandemError

_OPEN_PREFIX = "/grpc.health."
_ACCESS = {"tandem.v1.Inference": Access.INFERENCE, "tandem.v1.Admin": Access.ADMIN}
_POLLED = frozenset({"Overview"})  # asked every second by each tool that watches: only refusals are written
_AUTHORIZATION = "authorization"
_CANCELLED = "cancelled"
_Context = grpc.aio.ServicerContext[Any, Any]
_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


class KeyInterceptor(grpc.aio.ServerInterceptor):
    def __init__(self, gate: Gate, audit: Audit) -> None:
        self._gate, self._audit = gate, audit

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable["_Handler | None"]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "_Handler | None":
        method = handler_call_details.method
        if method.startswith(_OPEN_PREFIX):
            return await continuation(handler_call_details)
        service = method.rpartition("/")[0].removeprefix("/")
        access = _ACCESS.get(service)
        shown = str(dict(handler_call_details.invocation_metadata or ()).get(_AUTHORIZATION, ""))
        if access is not Access.ADMIN:
            self._gate.admit(shown, access)
            return await continuation(handler_call_details)
        name = method.rpartition("/")[2]
        try:
            caller = self._gate.admit(shown, access)
        except TandemError as error:
            return self._refusal(error, self._gate.caller(shown), name)
        handler = await continuation(handler_call_details)
        return handler if handler is None or name in _POLLED else self._audited(handler, caller, name)

    def _refusal(self, error: TandemError, caller: Caller, method: str) -> _Handler:
        async def refuse(_request: Any, context: _Context) -> None:
            if caller.key_id:
                self._audit.record(who=caller, what=method, origin=context.peer(), outcome=error.reason)
            else:
                self._audit.record_refusal(what=method, origin=context.peer(), outcome=error.reason)
            raise error

        return grpc.stream_stream_rpc_method_handler(refuse)  # fits every kind of call: it reads no request

    def _audited(self, handler: Any, caller: Caller, method: str) -> _Handler:
        """Write one line per call: at its end, or at the beginning of a call that follows changes."""

        async def answer(request: Any, context: _Context) -> Any:
            outcome = _CANCELLED
            try:
                response = await handler.unary_unary(request, context)
                outcome = "ok"
                return response
            except Exception as error:
                outcome = error.reason if isinstance(error, TandemError) else "internal"
                raise
            finally:
                self._write(request, context, caller, method, outcome)

        async def answers(request: Any, context: _Context) -> AsyncIterator[Any]:
            self._write(request, context, caller, method, "ok")
            async with aclosing(handler.unary_stream(request, context)) as found:
                async for each in found:
                    yield each

        read, write = handler.request_deserializer, handler.response_serializer
        if handler.unary_unary:
            return grpc.unary_unary_rpc_method_handler(answer, read, write)
        return grpc.unary_stream_rpc_method_handler(answers, read, write)

    def _write(self, request: Any, context: _Context, caller: Caller, method: str, outcome: str) -> None:
        asked = MessageToDict(request, preserving_proto_field_name=True)  # no request of an operator has a secret
        self._audit.record(who=caller, what=method, origin=context.peer(), outcome=outcome, request=asked)
