"""Serves the calls that members make as frames (frames.py), with the handlers and interceptors of the gRPC server.

Owns the listening socket, the connections and the tasks of their calls. A call is served as gRPC serves it: the same
interceptors, the same handlers, the same status. A connection carries no call before both ends have proved that they
are members. Connections that are not proven are bounded in number and in time.
"""

import asyncio
import logging
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, NamedTuple, NoReturn

import grpc

from cluster.auth.connections import AcceptingConnection
from cluster.auth.sessions import Refusal, refused
from cluster.errors import MemberRefused
from cluster.serving import frames
from cluster.serving.frames import Begin, FrameConnection, Kind, Metadata, Status, Unread, packed_status, too_large

_LOG = logging.getLogger("tandem.frames")
_BACKLOG = 128
_PROVE_S = 10.0  # from the connection to the caller's proof
_MAX_UNPROVEN = 64
_OK = Status(grpc.StatusCode.OK)
_ENDED = Status(grpc.StatusCode.UNAVAILABLE, "the server stops")

Find = Callable[[Any], Awaitable[Any]]  # the handler of a call's details; None: there is none


class CallDetails(NamedTuple):
    """A call as interceptors see it."""

    method: str
    invocation_metadata: Metadata


class FrameServer:
    def __init__(
        self,
        interceptors: Sequence[grpc.aio.ServerInterceptor],
        accept: Callable[[], AcceptingConnection],
        on_refused: Callable[[MemberRefused, str], None],
        on_closed: Callable[[str], None],
    ) -> None:
        """`interceptors`: of the gRPC server, the outermost first. `accept` begins the proofs of a connection.
        `on_refused` is called with the reason and the address of a peer that does not prove to be a member,
        `on_closed` with the reason when the connection of a member is closed because of a fault of the member."""
        self._handlers: list[grpc.GenericRpcHandler] = []
        find: Find = self._handler
        for interceptor in reversed(interceptors):
            find = partial(interceptor.intercept_service, find)
        self.find = find
        self.accept, self.on_refused, self.on_closed = accept, on_refused, on_closed
        self.connections: dict[_Connection, None] = {}  # the oldest first
        self._listener: socket.socket | None = None
        self._server: asyncio.Server | None = None

    def add_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        self._handlers += handlers

    def bind(self, host: str) -> None:
        """Listen on a free port of `host`. Raises OSError."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=_BACKLOG)
        # Connections inherit it. asyncio sets it only on sockets that name their protocol, which these do not; without
        # it a frame waits up to 40 ms until the peer has acknowledged the one before.
        self._listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @property
    def port(self) -> int:
        """Return the port; 0: there is none."""
        return int(self._listener.getsockname()[1]) if self._listener is not None else 0

    async def start(self) -> None:
        if self._listener is not None:
            self._server = await asyncio.get_running_loop().create_server(
                partial(_Connection, self), sock=self._listener
            )

    async def stop(self, grace_s: float) -> None:
        """Refuse new connections and calls, and cancel the present calls after `grace_s`."""
        server, listener, self._server, self._listener = self._server, self._listener, None, None
        if server is not None:
            server.close()
        elif listener is not None:
            listener.close()
        tasks = [task for connection in self.connections for task in connection.refuse_new()]
        if tasks and grace_s:
            await asyncio.wait(tasks, timeout=grace_s)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for connection in tuple(self.connections):
            connection.close()

    async def _handler(self, details: Any) -> Any:
        found = (handlers.service(details) for handlers in reversed(self._handlers))  # the last one counts, as in gRPC
        return next((handler for handler in found if handler is not None), None)


class _Connection(FrameConnection):
    """The connection of one caller."""

    def __init__(self, server: FrameServer) -> None:
        super().__init__()
        self._server = server
        self._proof = server.accept()
        self._calls: dict[int, _Served] = {}
        self._overdue: asyncio.TimerHandle | None = None
        self._takes_calls = True
        self.peer = ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.peer = _named(transport.get_extra_info("peername"))
        self._overdue = self._loop.call_later(_PROVE_S, self.abort)
        unproven = [connection for connection in self._server.connections if not connection.is_proven]
        if len(unproven) >= _MAX_UNPROVEN:
            del self._server.connections[unproven[0]]  # now: many may come before the end of this one is noticed
            unproven[0].abort()
        self._server.connections[self] = None

    def on_frame(self, kind: int, number: int, body: bytes) -> None:
        try:
            if self.is_proven:
                self._on_call_frame(kind, number, body)
            elif kind == Kind.HELLO:
                self.send(Kind.CHALLENGE, 0, self._proof.challenge(body))
            elif kind == Kind.PROOF:
                self._proof.verify(body)
                self.is_proven = True
                if self._overdue is not None:
                    self._overdue.cancel()
                self.send(Kind.PROOF, 0)
            else:
                raise refused(Refusal.NO_PROOF, "the peer does not begin with a proof that it is a member")
        except MemberRefused as refusal:
            self._server.on_refused(refusal, self.peer)
            self.abort()
        except (ValueError, IndexError, struct.error) as error:
            self._close_for("malformed", str(error))

    def on_lost(self) -> None:
        if self._overdue is not None:
            self._overdue.cancel()
        self._server.connections.pop(self, None)
        for call in tuple(self._calls.values()):
            call.cancel()

    def on_too_large(self) -> None:
        if not self.is_proven:
            detail = "the peer sends more than a proof that it is a member"
            self._server.on_refused(refused(Refusal.NO_PROOF, detail), self.peer)

    def on_unsent(self) -> None:
        self._close_for("unread", f"the member leaves more than {frames.MAX_UNSENT_BYTES} bytes of answers unread")

    def refuse_new(self) -> "list[asyncio.Task[None]]":
        """Take no further call, and return the tasks of the present ones."""
        self._takes_calls = False
        return [call.task for call in self._calls.values()]

    def _close_for(self, reason: str, problem: str) -> None:
        _LOG.warning("a connection of a member is closed", extra={"peer": self.peer, "problem": problem})
        self._server.on_closed(reason)
        self.abort()

    def _on_call_frame(self, kind: int, number: int, body: bytes) -> None:
        if kind == Kind.BEGIN:
            if number in self._calls:
                raise ValueError(f"call {number} begins twice")
            if self._takes_calls:
                self._calls[number] = _Served(self, number, Begin.unpacked(body), self._server.find, self._calls)
            else:
                self.send(Kind.STATUS, number, packed_status(_ENDED))
        elif (call := self._calls.get(number)) is None:
            return  # it has ended meanwhile
        elif kind == Kind.MESSAGE:
            call.on_request(body)
        elif kind == Kind.DONE:
            call.on_request(None)
        elif kind == Kind.CANCEL:
            call.cancel()
        else:
            raise ValueError(f"a frame of kind {kind} from a caller")


class _Served:
    """A call while it is served."""

    def __init__(
        self, connection: _Connection, number: int, begin: Begin, find: Find, calls: "dict[int, _Served]"
    ) -> None:
        self._connection, self._number, self._calls = connection, number, calls
        self._requests, self._has_all = Unread(), False
        self._news: asyncio.Future[None] | None = None
        self._is_cancelled = False  # by the caller
        self.task = asyncio.get_running_loop().create_task(self._serve(begin, find), name=begin.method)
        self.task.add_done_callback(self._on_done)

    def on_request(self, body: bytes | None) -> None:
        """Take a request of the call; None: there are no more. Raises ValueError if too many are not read."""
        if body is None:
            self._has_all = True
        else:
            self._requests.append(body)
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    def cancel(self) -> None:
        """Cancel the call for its caller, once: a second cancellation would interrupt its release of resources."""
        if not self._is_cancelled:
            self._is_cancelled = True
            self.task.cancel()

    async def _serve(self, begin: Begin, find: Find) -> None:
        status = _ENDED
        context = FrameContext(begin.metadata, self._connection.peer)
        try:
            handler = await find(CallDetails(begin.method, begin.metadata))
            if handler is None:
                status = Status(grpc.StatusCode.UNIMPLEMENTED, f"there is no method {begin.method}")
                return
            await self._answer(handler, begin, context)
            status = _OK
        except grpc.aio.AbortError:
            status = context.status
        except Exception as error:  # noqa: BLE001 -- as gRPC does; interceptors have converted and logged it
            unknown = Status(grpc.StatusCode.UNKNOWN, f"{type(error).__name__}: {error}")
            status = unknown if context.status is _OK else context.status
        finally:
            self._calls.pop(self._number, None)
            if not self._is_cancelled:
                self._connection.send(Kind.STATUS, self._number, packed_status(status))

    async def _answer(self, handler: Any, begin: Begin, context: "FrameContext") -> None:
        read, write = handler.request_deserializer or _as_is, handler.response_serializer or _as_is
        requests = self._stream(read, begin)
        request = requests if handler.request_streaming else await anext(requests)
        if not handler.response_streaming:
            behaviour = handler.stream_unary if handler.request_streaming else handler.unary_unary
            await self._send(write(await behaviour(request, context)), context)
            return
        responses = (handler.stream_stream if handler.request_streaming else handler.unary_stream)(request, context)
        if asyncio.iscoroutine(responses):  # of an interceptor that refuses the call
            await responses
            return
        async with aclosing(responses):  # now, not at a later garbage collection
            async for response in responses:
                await self._send(write(response), context)
                if self._connection.is_paused:
                    await self._connection.drained()

    async def _send(self, response: bytes, context: "FrameContext") -> None:
        """Send a response. Aborts the call, as gRPC does, if it is too large."""
        if (problem := too_large(response)) is not None:
            await context.abort(problem.code, problem.details)
        self._connection.send(Kind.MESSAGE, self._number, response)

    async def _stream(self, read: Callable[[bytes], Any], begin: Begin) -> AsyncIterator[Any]:
        if begin.request is not None:
            yield read(begin.request)
            return
        while True:
            while not self._requests:
                if self._has_all:
                    return
                self._news = asyncio.get_running_loop().create_future()
                await self._news
            yield read(self._requests.popleft())

    def _on_done(self, task: "asyncio.Task[None]") -> None:
        self._calls.pop(self._number, None)
        if not task.cancelled():
            task.exception()


class FrameContext:
    """The context of a call, with the methods that the services of members use."""

    def __init__(self, metadata: Metadata, peer: str) -> None:
        self._metadata, self._peer = metadata, peer
        self.status = _OK

    def invocation_metadata(self) -> Metadata:
        return self._metadata

    def peer(self) -> str:
        return self._peer

    def set_code(self, code: grpc.StatusCode) -> None:
        """Set the code of a call that fails by an exception without one."""
        self.status = self.status._replace(code=code)

    def set_details(self, details: str) -> None:
        self.status = self.status._replace(details=details)

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()) -> NoReturn:
        self.status = Status(code, details, tuple(trailing_metadata))
        raise grpc.aio.AbortError


def _named(address: Any) -> str:
    """Return the name of a socket's other end in the form of gRPC's contexts."""
    if not isinstance(address, tuple):
        return ""
    host, port = address[:2]
    return f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"


def _as_is(body: bytes) -> bytes:
    return body
