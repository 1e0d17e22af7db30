"""The gate of a member's port: a call between members is served only after its caller has proved to be a member.

Health checks stay open. Everything else, gRPC reflection included, is refused with UNAUTHENTICATED before any handler
sees a message of it. A stream that is open when the secret behind its proof is dropped ends after a grace.
"""

import asyncio
import inspect
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from functools import partial
from typing import Any, Protocol, TypeAlias

import grpc

from cluster.accounts.audit import Audit
from cluster.auth.connections import AcceptingConnection
from cluster.auth.keys import ClusterKeys
from cluster.auth.sessions import SessionTable
from cluster.errors import MemberRefused, Unavailable
from cluster.messages import MemberId
from cluster.observe.telemetry import Telemetry
from cluster.protocol.received import checked
from cluster.serving.frames import CALLS
from cluster.serving.rpc_errors import abort
from cluster.serving.serving import GrpcServer
from tandem.internal.v1 import worker_pb2, worker_pb2_grpc

PROOF = "tandem-proof-bin"  # metadata
_CONNECTION = "a connection for frames"  # in the audit log
DROPPED_GRACE_S = 10.0  # for streams to end by themselves after their secret was dropped
DROPPED = "the secret behind this stream was dropped; open the stream again"
_LOOK_S = 1.0
_OPEN = ("/grpc.health.v1.Health/", "/tandem.internal.v1.MemberAuth/")

_Context = grpc.aio.ServicerContext[Any, Any]
_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"  # generic in its stubs only


class MemberGate(grpc.aio.ServerInterceptor, worker_pb2_grpc.MemberAuthServicer):
    """The outermost interceptor of a member's server, and the service that opens sessions."""

    def __init__(self, keys: ClusterKeys, member: MemberId, telemetry: Telemetry, audit: Audit) -> None:
        self._keys, self._member = keys, member
        self._sessions, self._streams = SessionTable(keys, member), OpenStreams(keys)
        self._server: GrpcServer | None = None
        self._telemetry, self._audit = telemetry, audit

    def serve(self, server: GrpcServer) -> None:
        """Add the service that opens sessions, and take members' calls as frames too."""
        self._server = server
        worker_pb2_grpc.add_MemberAuthServicer_to_server(self, server.grpc)
        server.serve_frames(
            partial(AcceptingConnection, self._keys, transport=CALLS, exporter=str(self._member)),
            on_refused=partial(self._record, method=_CONNECTION),
            on_closed=lambda reason: self._telemetry.count("tandem_closed_member_connections_total", reason=reason),
        )

    async def OpenSession(
        self, request: worker_pb2.OpenSessionRequest, context: _Context
    ) -> worker_pb2.OpenSessionResponse:
        try:
            opened = self._sessions.open(checked(request))
        except MemberRefused as refusal:
            self._record(refusal, context.peer(), "OpenSession")
            raise
        opened.frame_port = self._server.frame_port if self._server is not None else 0
        return opened

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable["_Handler | None"]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "_Handler | None":
        method = handler_call_details.method
        handler = await continuation(handler_call_details)
        if handler is None or method.startswith(_OPEN):
            return handler
        try:
            self._sessions.find(_proof(handler_call_details.invocation_metadata))
        except MemberRefused as refusal:
            return grpc.stream_stream_rpc_method_handler(self._refusing(refusal, method))  # it reads no request
        return self._gated(handler, method)

    def _gated(self, handler: Any, method: str) -> _Handler:
        read, write = handler.request_deserializer, handler.response_serializer
        if handler.unary_unary:
            return grpc.unary_unary_rpc_method_handler(self._single(handler.unary_unary, method, read), None, write)
        if handler.unary_stream:
            return grpc.unary_stream_rpc_method_handler(
                self._streaming(handler.unary_stream, method, read), None, write
            )
        behaviour = handler.stream_stream
        assert behaviour is not None, "no service of a member has a call with a stream of requests and one response"
        return grpc.stream_stream_rpc_method_handler(self._streaming(behaviour, method, None), read, write)

    def _single(
        self, behaviour: Callable[..., Any], method: str, read: Callable[[bytes], Any] | None
    ) -> Callable[..., Any]:
        """`read`: the deserializer of a single request, which runs after its digest was verified."""

        async def answer(request: Any, context: _Context) -> Any:
            await self._admit(context, method, request if read is not None else b"")
            return await behaviour(read(request) if read is not None else request, context)

        return answer

    def _streaming(
        self, behaviour: Callable[..., Any], method: str, read: Callable[[bytes], Any] | None
    ) -> Callable[..., Any]:
        if not inspect.isasyncgenfunction(behaviour):  # it writes its responses to the context
            return self._single(behaviour, method, read)

        async def answers(request: Any, context: _Context) -> AsyncIterator[Any]:
            key_id = await self._admit(context, method, request if read is not None else b"")
            answering = behaviour(read(request) if read is not None else request, context)
            try:
                async with self._streams.ended_with(key_id), aclosing(answering):
                    async for answer in answering:
                        yield answer
            except Unavailable as error:
                await abort(context, error, method)

        return answers

    async def _admit(self, context: _Context, method: str, body: bytes) -> bytes:
        """Return the id of the secret that the call's proof rests on."""
        try:
            return self._sessions.admit(_proof(context.invocation_metadata()), method, body)
        except MemberRefused as refusal:
            await self._refuse(refusal, method, context)
            raise

    def _refusing(self, refusal: MemberRefused, method: str) -> Callable[..., Any]:
        async def refuse(_requests: Any, context: _Context) -> None:
            await self._refuse(refusal, method, context)

        return refuse

    async def _refuse(self, refusal: MemberRefused, method: str, context: _Context) -> None:
        self._record(refusal, context.peer(), method)
        await abort(context, refusal, method)

    def _record(self, refusal: MemberRefused, peer: str, method: str) -> None:
        self._audit.record_refusal(what=method, origin=peer, why=refusal.refusal)
        self._telemetry.count("tandem_refused_members_total", reason=refusal.refusal)


class OpenStream(Protocol):
    def end(self, key_id: bytes) -> None:
        """End the stream, if it still rests on this secret."""
        ...


class OpenStreams:
    """The streams in progress at one side by the secret that they rest on: a call with one answer ends by itself, and a
    later call needs a proof of its own."""

    def __init__(self, keys: ClusterKeys) -> None:
        self._keys = keys
        # Of each secret, in the order of their beginning: a simulation replays it, and a set has none.
        self._streams: dict[bytes, weakref.WeakKeyDictionary[OpenStream, None]] = {}
        self._end_s: dict[bytes, float] = {}  # by dropped secret: when its streams end
        self._timer: asyncio.TimerHandle | None = None

    def add(self, key_id: bytes, stream: OpenStream) -> None:
        """Call the stream's `end` `DROPPED_GRACE_S` after its secret was dropped, unless it is gone by then."""
        self._streams.setdefault(key_id, weakref.WeakKeyDictionary())[stream] = None
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_LOOK_S, self._look)

    @asynccontextmanager
    async def ended_with(self, key_id: bytes) -> AsyncIterator[None]:
        """Cancel the block, `DROPPED_GRACE_S` after its secret was dropped, and raise Unavailable then."""
        limit = _Limit()
        try:
            async with limit.timeout:
                self.add(key_id, limit)
                yield
        except TimeoutError:
            if not limit.timeout.expired():
                raise
            raise Unavailable(DROPPED) from None

    def close(self) -> None:
        """Look at no stream any more."""
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        """End the streams of dropped secrets at their time, and look again while there are streams."""
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        for key_id, streams in tuple(self._streams.items()):
            if not streams:
                del self._streams[key_id]
            if not streams or self._keys.secret_of(key_id) is not None:
                self._end_s.pop(key_id, None)  # a secret that is dropped again leaves its whole time again
            elif now_s >= self._end_s.setdefault(key_id, now_s + DROPPED_GRACE_S):
                for stream in tuple(streams):
                    stream.end(key_id)
        self._timer = loop.call_later(_LOOK_S, self._look) if self._streams else None


class _Limit:
    """The limit of a stream at its callee."""

    def __init__(self) -> None:
        self.timeout = asyncio.timeout(None)

    def end(self, key_id: bytes) -> None:
        with suppress(RuntimeError):  # it has ended already
            self.timeout.reschedule(asyncio.get_running_loop().time())


def _proof(metadata: Any) -> bytes | None:
    for key, value in metadata or ():
        if key == PROOF:
            return value if isinstance(value, bytes) else None
    return None
