"""A simulation of gRPC: channels and servers with the interfaces that generated stubs and servicers need.

Replaces `grpc.aio`: messages are serialized, interceptors run, statuses and deadlines travel. Not simulated are HTTP/2
itself, flow control, and a channel's pause between two attempts to connect.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from types import SimpleNamespace
from typing import Any

import grpc

from tests.chaos.simulated.loop import Process, current
from tests.chaos.simulated.network import Conversation, Network

_OK = (grpc.StatusCode.OK, "", ())
_CANCELLED = (grpc.StatusCode.CANCELLED, "Locally cancelled by application!", ())
_ENDED = (grpc.StatusCode.UNAVAILABLE, "Cancelling all calls", ())  # gRPC's status when a server stops
_BROKEN = (grpc.StatusCode.UNAVAILABLE, "the connection broke", ())
_REFUSED = (grpc.StatusCode.UNAVAILABLE, "failed to connect to all addresses; last error: Connection refused", ())
_LATE = (grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded", ())

Status = tuple[grpc.StatusCode, str, tuple[tuple[str, str], ...]]
Watch = Callable[[str, Process, Process, Any], Any]  # method, sender, receiver, message -> the message to send


class Channel:
    """A channel to an address. Each call goes to the process that listens there at the time of the call."""

    def __init__(self, network: Network, address: str, watch: Watch) -> None:
        self._network, self._address, self._watch = network, address, watch
        self._live: dict[Call, None] = {}
        self._is_closed = False

    def unary_unary(self, method: str, **codec: Any) -> Callable[..., "Call"]:
        return self._kind(method, Single, codec)

    def unary_stream(self, method: str, **codec: Any) -> Callable[..., "Call"]:
        return self._kind(method, Stream, codec)

    def stream_unary(self, method: str, **codec: Any) -> Callable[..., "Call"]:
        raise NotImplementedError(method)

    def stream_stream(self, method: str, **codec: Any) -> Callable[..., "Call"]:
        return self._kind(method, TwoWays, codec)

    async def close(self, grace: float | None = None) -> None:
        self._is_closed = True
        for call in tuple(self._live):
            call.cancel()

    def _kind(self, method: str, kind: "type[Call]", codec: dict[str, Any]) -> Callable[..., "Call"]:
        def begin(request: Any = None, *, timeout: float | None = None, metadata: Any = ()) -> Call:
            if self._is_closed:
                raise grpc.aio.UsageError("Channel is closed.")
            call = kind(method, codec["request_serializer"], codec["response_deserializer"], self._watch)
            self._live[call] = None
            call.begin(self._network, self._address, request, timeout, metadata, lambda: self._live.pop(call, None))
            return call

        return begin


class Call:
    """The client's end of a call."""

    def __init__(self, method: str, serialize: Any, deserialize: Any, watch: Watch) -> None:
        self._method, self._serialize, self._deserialize, self._watch = method, serialize, deserialize, watch
        self._process = current()
        self._inbox: deque[bytes] = deque()
        self._news: asyncio.Future[None] | None = None
        self._status: Status | None = None
        self._conversation: Conversation | None = None
        self._served: Served | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._ended: Callable[[], object] = lambda: None

    def begin(
        self,
        network: Network,
        address: str,
        request: Any,
        timeout_s: float | None,
        metadata: Any,
        ended: Callable[[], object],
    ) -> None:
        self._ended = ended
        loop = network.loop
        if timeout_s is not None:
            self._deadline = loop.call_later(timeout_s, self._cut_short, _LATE)
        conversation = self._conversation = network.open(address)
        if conversation is None:
            loop.call_later(network.refusal_s(address), self._end, _REFUSED)
            return
        conversation.on_broken[conversation.client] = lambda: self._end(_BROKEN)
        listener = network.listeners[address]
        self._served = Served(conversation, self)
        conversation.on_broken[conversation.server] = self._served.cancel
        conversation.say(conversation.server, self._served.begin, listener, self._method, metadata, timeout_s)
        self._ask(request)

    def _ask(self, request: Any) -> None:
        self._send(request)
        self._half_close()

    def done(self) -> bool:
        return self._status is not None

    def cancelled(self) -> bool:
        return self._status is not None and self._status[0] is grpc.StatusCode.CANCELLED

    def cancel(self) -> bool:
        if self._status is not None:
            return False
        self._cut_short(_CANCELLED)
        return True

    def heard(self, message: bytes) -> None:
        if self._status is None:
            self._inbox.append(message)
            self._wake()

    def ended(self, status: Status) -> None:
        """Receive the final status. Messages that arrived before it are still read."""
        self._end(status)

    def _send(self, message: Any) -> None:
        assert self._served is not None and self._conversation is not None
        message = self._watch(self._method, self._process, self._conversation.server, message)
        self._conversation.say(self._conversation.server, self._served.heard, self._serialize(message))

    def _half_close(self) -> None:
        assert self._served is not None and self._conversation is not None
        self._conversation.say(self._conversation.server, self._served.heard, None)

    def _cut_short(self, status: Status) -> None:
        if self._status is None:
            if self._conversation is not None and self._served is not None:
                self._conversation.say(self._conversation.server, self._served.cancel)
            self._inbox.clear()
            self._end(status)

    def _end(self, status: Status) -> None:
        if self._status is None:
            self._status = status
            if self._deadline is not None:
                self._deadline.cancel()
            if self._conversation is not None:
                self._conversation.end(self._process)
            self._ended()
            self._wake()

    def _wake(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    async def _next(self) -> bytes | None:
        """Return the next response, or None at a successful end. Raises AioRpcError, CancelledError."""
        while not self._inbox:
            if self._status is not None:
                self._raise_unless_ok()
                return None
            self._news = asyncio.get_running_loop().create_future()
            try:
                await self._news
            except asyncio.CancelledError:
                self.cancel()
                raise
        return self._inbox.popleft()

    def _raise_unless_ok(self) -> None:
        assert self._status is not None
        code, details, trailing = self._status
        if self._status is _CANCELLED:
            raise asyncio.CancelledError
        if code is not grpc.StatusCode.OK:
            raise grpc.aio.AioRpcError(
                code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailing), details=details, debug_error_string=details
            )


class Single(Call):
    """A call with one response, which is awaited."""

    def __await__(self) -> Any:
        return self._answer().__await__()

    async def _answer(self) -> Any:
        message = await self._next()
        if message is not None and self._status is None:
            await self._next()  # its status
        return self._deserialize(message)


class Stream(Call):
    """A call with a stream of responses."""

    async def read(self) -> Any:
        message = await self._next()
        return grpc.aio.EOF if message is None else self._deserialize(message)

    async def __aiter__(self) -> AsyncIterator[Any]:
        while (message := await self._next()) is not None:
            yield self._deserialize(message)


class TwoWays(Stream):
    """A call in which both sides stream. The client's messages come from an iterator or from `write`."""

    def _ask(self, request: Any) -> None:
        if request is not None:
            asyncio.get_running_loop().create_task(self._say_all(request), name=f"requests of {self._method}")

    async def write(self, message: Any) -> None:
        if self._status is not None:
            raise asyncio.InvalidStateError("RPC already finished.")
        if self._conversation is not None:
            self._send(message)

    async def done_writing(self) -> None:
        if self._status is None and self._conversation is not None:
            self._half_close()

    async def _say_all(self, requests: AsyncIterator[Any]) -> None:
        async for request in requests:
            if self._status is not None:
                return
            if self._conversation is not None:
                self._send(request)
        await self.done_writing()


class Served:
    """The server's end of a call. Its methods run in the server's process, in the order in which messages arrive."""

    def __init__(self, conversation: Conversation, call: Call) -> None:
        self._conversation, self._call = conversation, call
        self._inbox: deque[bytes | None] = deque()
        self._news: asyncio.Future[None] | None = None
        self._task: asyncio.Task[None] | None = None
        self._is_over = False
        self._deadline: asyncio.TimerHandle | None = None
        self._deadline_s: float | None = None

    def begin(self, listener: "Server", method: str, metadata: Any, timeout_s: float | None) -> None:
        loop = asyncio.get_running_loop()
        self.method = method
        if not listener.is_open:
            self._finish(_REFUSED)
            return
        if timeout_s is not None:
            self._deadline_s = loop.time() + timeout_s
            self._deadline = loop.call_later(timeout_s, self.cancel)
        self._task = loop.create_task(self._serve(listener, method, metadata), name=f"serve {method}")
        listener.serving[self._task] = None
        self._task.add_done_callback(lambda task: listener.serving.pop(task, None))

    def heard(self, message: bytes | None) -> None:
        self._inbox.append(message)
        self._wake()

    def cancel(self) -> None:
        """End the call because the client has left or the deadline has passed."""
        self._is_over = True
        self._wake()
        if self._task is not None:
            self._task.cancel()
        else:
            self._finish(_ENDED)

    def time_remaining(self) -> float | None:
        return None if self._deadline_s is None else self._deadline_s - asyncio.get_running_loop().time()

    async def _serve(self, listener: "Server", method: str, metadata: Any) -> None:
        context = Context(metadata, self.time_remaining)
        status: Status = _ENDED
        try:
            handler = await listener.handler(method, metadata)
            if handler is None:
                status = (grpc.StatusCode.UNIMPLEMENTED, method, ())
                return
            request = self._requests(handler.request_deserializer)
            if not handler.request_streaming:
                request = await anext(request)
            if handler.response_streaming:
                behaviour = handler.stream_stream if handler.request_streaming else handler.unary_stream
                async for response in behaviour(request, context):
                    self._answer(handler, response)
            else:
                behaviour = handler.stream_unary if handler.request_streaming else handler.unary_unary
                self._answer(handler, await behaviour(request, context))
            status = _OK
        except grpc.aio.AbortError:
            assert context.status is not None
            status = context.status
        except asyncio.CancelledError:
            raise
        except Exception as error:  # noqa: BLE001 -- as gRPC does
            status = (grpc.StatusCode.UNKNOWN, f"{type(error).__name__}: {error}", ())
        finally:
            self._finish(status)

    def _answer(self, handler: Any, response: Any) -> None:
        server, client = self._conversation.server, self._conversation.client
        response = self._call._watch(self._call._method, server, client, response)
        self._conversation.say(client, self._call.heard, handler.response_serializer(response))

    def _finish(self, status: Status) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._is_over = True
        self._wake()
        self._conversation.say(self._conversation.client, self._call.ended, status)
        self._conversation.end(self._conversation.server)

    def _wake(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    async def _requests(self, deserialize: Callable[[bytes], Any]) -> AsyncIterator[Any]:
        while True:
            while not self._inbox:
                if self._is_over:
                    return
                self._news = asyncio.get_running_loop().create_future()
                await self._news
            message = self._inbox.popleft()
            if message is None:
                return
            yield deserialize(message)


class Context:
    """The context of a call, as a servicer receives it."""

    def __init__(self, metadata: Any, time_remaining: Callable[[], float | None]) -> None:
        self._metadata, self.time_remaining = metadata, time_remaining
        self.status: Status | None = None

    def invocation_metadata(self) -> Any:
        return self._metadata

    async def send_initial_metadata(self, metadata: Any) -> None:
        """Do nothing: only the client library reads initial metadata, and no simulated client uses it."""

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()) -> None:
        self.status = (code, details, tuple(trailing_metadata))
        raise grpc.aio.AbortError


class Server:
    """The server that `grpc.aio.server` returns."""

    def __init__(self, network: Network, interceptors: Sequence[Any]) -> None:
        self.process = current()
        self.is_open = False
        self.serving: dict[asyncio.Task[None], None] = {}
        self._network, self._interceptors = network, interceptors
        self._handlers: list[Any] = []
        self._wrapped: dict[str, Any] = {}

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        self._handlers += handlers

    def add_registered_method_handlers(self, service: str, handlers: Any) -> None:
        """Do nothing: `add_generic_rpc_handlers` receives the same methods."""

    def add_insecure_port(self, address: str) -> int:
        host, _, port = address.rpartition(":")
        return self._network.listen(host, int(port), self)

    async def start(self) -> None:
        self.is_open = True

    async def stop(self, grace: float | None) -> None:
        self.is_open = False
        self._network.close(self)
        if self.serving and grace:
            await asyncio.wait(tuple(self.serving), timeout=grace)
        for task in tuple(self.serving):
            task.cancel()
        if self.serving:
            await asyncio.wait(tuple(self.serving))

    async def handler(self, method: str, metadata: Any) -> Any:
        if method not in self._wrapped:
            details = SimpleNamespace(method=method, invocation_metadata=metadata)

            async def find(details: Any) -> Any:
                found = (handlers.service(details) for handlers in self._handlers)
                return next((handler for handler in found if handler is not None), None)

            continuation: Any = find
            for interceptor in reversed(self._interceptors):
                continuation = self._around(interceptor, continuation)
            self._wrapped[method] = await continuation(details)
        return self._wrapped[method]

    @staticmethod
    def _around(interceptor: Any, inner: Any) -> Any:
        async def outer(details: Any) -> Any:
            return await interceptor.intercept_service(inner, details)

        return outer
