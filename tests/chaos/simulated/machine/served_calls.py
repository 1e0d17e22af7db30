"""The server's side of simulated gRPC: a call as it is served, its context, and a server that finds the handler."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from types import SimpleNamespace
from typing import Any, Protocol

import grpc

from tests.chaos.simulated.machine.loop import Process, current
from tests.chaos.simulated.machine.network import Conversation, Network

OK = (grpc.StatusCode.OK, "", ())
ENDED = (grpc.StatusCode.UNAVAILABLE, "Cancelling all calls", ())  # gRPC's status when a server stops
REFUSED = (grpc.StatusCode.UNAVAILABLE, "failed to connect to all addresses; last error: Connection refused", ())

Status = tuple[grpc.StatusCode, str, tuple[tuple[str, str], ...]]
Watch = Callable[[str, Process, Process, Any], Any]  # method, sender, receiver, message -> the message to send


class Caller(Protocol):
    """The client's end of a call, as the server uses it."""

    method: str
    watch: Watch

    def heard(self, message: bytes) -> None: ...

    def ended(self, status: Status) -> None: ...


class Served:
    """The server's end of a call. Its methods run in the server's process, in the order in which messages arrive."""

    def __init__(self, conversation: Conversation, call: Caller) -> None:
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
            self._finish(REFUSED)
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
            self._finish(ENDED)

    def time_remaining(self) -> float | None:
        return None if self._deadline_s is None else self._deadline_s - asyncio.get_running_loop().time()

    async def _serve(self, listener: "Server", method: str, metadata: Any) -> None:
        context = Context(metadata, self.time_remaining)
        status: Status = ENDED
        try:
            handler = await listener.handler(method, metadata)
            if handler is None:
                status = (grpc.StatusCode.UNIMPLEMENTED, method, ())
                return
            request = self._requests(handler.request_deserializer or _as_is)
            if not handler.request_streaming:
                request = await anext(request)
            if handler.response_streaming:
                behaviour = handler.stream_stream if handler.request_streaming else handler.unary_stream
                responses = behaviour(request, context)
                if asyncio.iscoroutine(responses):  # as of an interceptor that refuses the call
                    await responses
                    return
                async for response in responses:
                    self._answer(handler, response)
            else:
                behaviour = handler.stream_unary if handler.request_streaming else handler.unary_unary
                self._answer(handler, await behaviour(request, context))
            status = OK
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
        response = self._call.watch(self._call.method, server, client, response)
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


def _as_is(message: bytes) -> bytes:
    return message


class Context:
    """The context of a call, as a servicer receives it."""

    def __init__(self, metadata: Any, time_remaining: Callable[[], float | None]) -> None:
        self._metadata, self.time_remaining = metadata, time_remaining
        self.status: Status | None = None

    def invocation_metadata(self) -> Any:
        return self._metadata

    def peer(self) -> str:
        return "simulated"

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
        details = SimpleNamespace(method=method, invocation_metadata=metadata)

        async def find(details: Any) -> Any:
            found = (handlers.service(details) for handlers in self._handlers)
            return next((handler for handler in found if handler is not None), None)

        continuation: Any = find
        for interceptor in reversed(self._interceptors):
            continuation = self._around(interceptor, continuation)
        return await continuation(details)

    @staticmethod
    def _around(interceptor: Any, inner: Any) -> Any:
        async def outer(details: Any) -> Any:
            return await interceptor.intercept_service(inner, details)

        return outer
