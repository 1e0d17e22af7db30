"""A simulation of gRPC: channels and calls with the interfaces that generated stubs need. The server's side is in
served_calls.py.

Replaces `grpc.aio`: messages are serialized, interceptors run, and statuses and deadlines are passed on. Not simulated
are HTTP/2 itself, flow control, and a channel's pause between two attempts to connect.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from functools import lru_cache
from typing import Any, Self

import grpc
from google.protobuf.descriptor_pool import Default
from google.protobuf.message_factory import GetMessageClass

from cluster.auth.keys import ClusterKeys
from cluster.auth.member_channel import MemberChannel
from tests.chaos.simulated.machine.loop import current
from tests.chaos.simulated.machine.network import Conversation, Network
from tests.chaos.simulated.machine.served_calls import REFUSED, Served, Status, Watch

_CANCELLED = (grpc.StatusCode.CANCELLED, "Locally cancelled by application!", ())
_BROKEN = (grpc.StatusCode.UNAVAILABLE, "the connection broke", ())
_LATE = (grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded", ())


@lru_cache
def _request_class(method: str) -> type[Any]:
    _, service, name = method.split("/")
    described: type[Any] = GetMessageClass(Default().FindServiceByName(service).methods_by_name[name].input_type)
    return described


def parsed(method: str, request: bytes) -> Any:
    """Return the request message of a method."""
    return _request_class(method).FromString(request)


def member_channel(network: Network, address: str, watch: Watch, keys: ClusterKeys) -> MemberChannel:
    """Return a member channel for a client outside of the cluster that has the cluster's keys."""
    channel: Any = Channel(network, address, watch)
    return MemberChannel(channel, keys, "world@0")


class Channel:
    """A channel to an address. Each call goes to the process that listens there at the time of the call."""

    def __init__(self, network: Network, address: str, watch: Watch) -> None:
        self._network, self._address, self.watch = network, address, watch
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

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        self._is_closed = True
        for call in tuple(self._live):
            call.cancel()

    def _kind(self, method: str, kind: "type[Call]", codec: dict[str, Any]) -> Callable[..., "Call"]:
        def begin(request: Any = None, *, timeout: float | None = None, metadata: Any = ()) -> Call:
            if self._is_closed:
                raise grpc.aio.UsageError("Channel is closed.")
            call = kind(method, codec["request_serializer"], codec["response_deserializer"], self.watch)
            self._live[call] = None
            call.begin(self._network, self._address, request, timeout, metadata, lambda: self._live.pop(call, None))
            return call

        return begin


class Call:
    """The client's end of a call."""

    def __init__(self, method: str, serialize: Any, deserialize: Any, watch: Watch) -> None:
        self.method, self._serialize, self._deserialize, self.watch = method, serialize, deserialize, watch
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
            loop.call_later(network.refusal_s(address), self._end, REFUSED)
            return
        conversation.on_broken[conversation.client] = lambda: self._end(_BROKEN)
        listener = network.listeners[address]
        self._served = Served(conversation, self)
        conversation.on_broken[conversation.server] = self._served.cancel
        conversation.say(conversation.server, self._served.begin, listener, self.method, metadata, timeout_s)
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
        if isinstance(message, bytes):  # serialized before, for the digest in the proof of its sender
            watched = self.watch(self.method, self._process, self._conversation.server, parsed(self.method, message))
            self._conversation.say(self._conversation.server, self._served.heard, watched.SerializeToString())
            return
        message = self.watch(self.method, self._process, self._conversation.server, message)
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
            asyncio.get_running_loop().create_task(self._say_all(request), name=f"requests of {self.method}")

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
