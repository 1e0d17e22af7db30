"""Makes calls to a member as frames (frames.py), with the interface of gRPC's calls.

Owns the connection to one member, which it restores after a loss. While `connection` is None, the caller uses
gRPC, so frames are never needed for a call to succeed.
"""

import asyncio
import itertools
import logging
import struct
from collections.abc import AsyncIterator, Callable, Generator
from typing import Any

import grpc

from cluster.auth.connections import OpeningConnection
from cluster.auth.keys import ClusterKeys
from cluster.auth.sessions import Refusal, refused
from cluster.errors import MemberRefused
from cluster.serving.frames import (
    CALLS,
    Begin,
    FrameConnection,
    Kind,
    Metadata,
    Status,
    Unread,
    too_large,
    unpacked_status,
)

_LOG = logging.getLogger("tandem.frames")
MAX_REQUEST_BYTES = 64 << 10  # a larger request goes over gRPC, so that it delays no other call's frames
_CONNECT_S = 2.0  # with the proofs
_PAUSE_S = 1.0  # doubled with each attempt that gives no lasting connection
_MAX_PAUSE_S = 8.0
_LAST_NUMBER = (1 << 32) - 1
FIRST_S = 1.0  # calls wait for the first attempt to connect
_LOST = Status(grpc.StatusCode.UNAVAILABLE, "the connection broke")
_LATE = Status(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
_CANCELLED = Status(grpc.StatusCode.CANCELLED, "Locally cancelled by application!")


class FrameChannel:
    """The connection to the member at a host."""

    def __init__(self, host: str, keys: ClusterKeys, caller: str, first_s: float = FIRST_S) -> None:
        """`caller`: the name of this process, "id@incarnation". `first_s`: how long an offer waits at most."""
        self._host, self._keys, self._caller, self._first_s = host, keys, caller, first_s
        self._offered = (0, "")  # the port, and who offered it
        self._connecting: asyncio.Task[None] | None = None
        self._connection: CallerConnection | None = None

    @property
    def connection(self) -> "CallerConnection | None":
        """Return the connection, proven by both sides; None: there is none now."""
        return None if self._connection is None or self._connection.lost.done() else self._connection

    async def offer(self, port: int, callee: str) -> None:
        """Keep a connection to this port of `callee` ("id@incarnation") from now on; port 0: keep none. Returns when
        the first attempt to connect is over, after at most `first_s`."""
        if (port, callee) == self._offered:
            return
        self.close()
        self._offered = port, callee
        if port:
            first = asyncio.get_running_loop().create_future()
            self._connecting = asyncio.create_task(self._keep(port, callee, first), name=f"calls to {callee}")
            await asyncio.wait({first}, timeout=self._first_s)

    def close(self) -> None:
        """Close the connection and make no other one before the next offer."""
        self._offered = (0, "")
        if self._connecting is not None:
            self._connecting.cancel()
        if self._connection is not None:
            self._connection.abort()
            self._connection = None

    async def _keep(self, port: int, callee: str, first: "asyncio.Future[None]") -> None:
        """Connect again and again: at once after a connection that has lasted, because a stream that begins meanwhile
        goes over gRPC. `first` is set when the first attempt is over."""
        loop, logged, pause_s = asyncio.get_running_loop(), "", _PAUSE_S
        while True:
            problem, began_s = "the connection broke", loop.time()
            try:
                async with asyncio.timeout(_CONNECT_S):
                    self._connection = await self._connect(port, callee)
            except (OSError, TimeoutError, ValueError, MemberRefused) as error:  # ValueError: the host has no name
                problem = f"{type(error).__name__}: {error}"
            if not first.done():
                first.set_result(None)
            if self._connection is not None:
                await asyncio.shield(self._connection.lost)
                self._connection = None
                if loop.time() - began_s > _MAX_PAUSE_S:
                    pause_s = 0.0
            if problem != logged:
                _LOG.info("calls go over gRPC until frames connect", extra={"callee": callee, "problem": problem})
                logged = problem
            await asyncio.sleep(pause_s)
            pause_s = min(max(_PAUSE_S, 2 * pause_s), _MAX_PAUSE_S)

    async def _connect(self, port: int, callee: str) -> "CallerConnection":
        opening = OpeningConnection(self._keys, transport=CALLS, importer=self._caller, exporter=callee)
        connection = CallerConnection(opening)
        try:
            await asyncio.get_running_loop().create_connection(lambda: connection, self._host, port)
            await connection.proven
        except BaseException:
            connection.abort()
            raise
        return connection


class CallerConnection(FrameConnection):
    """The caller's end of a connection, with its calls."""

    def __init__(self, opening: OpeningConnection) -> None:
        super().__init__()
        self._opening = opening
        self._is_callee_verified = False
        self._numbers = map(_LAST_NUMBER.__and__, itertools.count(1))
        self._calls: dict[int, FrameCall] = {}
        self.proven: asyncio.Future[None] = self._loop.create_future()

    def begin(
        self,
        method: str,
        request: bytes | None,
        timeout_s: float | None,
        metadata: Metadata,
        read: Callable[[bytes], Any],
        pack: Callable[[Any], bytes] = bytes,
    ) -> "FrameCall":
        """Begin a call. `request` None: the call's requests are written later. `read`, `pack`: the deserializer of
        responses, and the serializer of requests that are written."""
        number = next(number for number in self._numbers if number not in self._calls)
        call = self._calls[number] = FrameCall(self, number, timeout_s, read, pack)
        self.send(Kind.BEGIN, number, Begin(method, metadata, request).packed())
        if self.lost.done():
            call.end(_LOST)
        return call

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.send(Kind.HELLO, 0, self._opening.hello)

    def on_frame(self, kind: int, number: int, body: bytes) -> None:
        try:
            if kind == Kind.MESSAGE:
                if (call := self._calls.get(number)) is not None:
                    call.on_message(body)
            elif kind == Kind.STATUS:
                if (call := self._calls.get(number)) is not None:
                    call.end(unpacked_status(body))
            elif kind == Kind.CHALLENGE:
                self.send(Kind.PROOF, 0, self._opening.prove(body))
                self._is_callee_verified = True
            elif kind == Kind.PROOF:
                if not self._is_callee_verified:
                    raise refused(Refusal.NO_PROOF, "the peer accepts calls without a proof that it is a member")
                self.is_proven = True
                if not self.proven.done():
                    self.proven.set_result(None)
            else:
                raise ValueError(f"a frame of kind {kind} from a callee")
        except (ValueError, IndexError, struct.error, MemberRefused) as error:
            if not self.proven.done():
                self.proven.set_exception(error if isinstance(error, MemberRefused) else OSError(str(error)))
            self.abort()

    def on_lost(self) -> None:
        if not self.proven.done():
            self.proven.set_exception(ConnectionError("the member closed the connection"))
            self.proven.exception()  # retrieved: the waiter may have left
        for call in tuple(self._calls.values()):
            call.end(_LOST)

    def forget(self, number: int) -> None:
        self._calls.pop(number, None)


class FrameCall:
    """A call in progress, with the methods of gRPC's calls that Tandem uses. A call with one response is awaited, and
    the responses of others are read. Messages that are not read wait here: callers read without pauses."""

    def __init__(
        self,
        connection: CallerConnection,
        number: int,
        timeout_s: float | None,
        read: Callable[[bytes], Any],
        pack: Callable[[Any], bytes],
    ) -> None:
        self._connection, self._number, self._read, self._pack = connection, number, read, pack
        self._writing: asyncio.Task[None] | None = None
        self._messages = Unread()
        self._status: Status | None = None
        self._news: asyncio.Future[None] | None = None
        self._deadline: asyncio.TimerHandle | None = None
        if timeout_s is not None:
            self._deadline = asyncio.get_running_loop().call_later(max(0.0, timeout_s), self._cut_short, _LATE)

    def on_message(self, body: bytes) -> None:
        self._messages.append(body)
        self._wake()

    def end(self, status: Status) -> None:
        if self._status is None:
            self._status = status
            if self._deadline is not None:
                self._deadline.cancel()
            if self._writing is not None:
                self._writing.cancel()
            self._connection.forget(self._number)
            self._wake()

    def cancel(self) -> bool:
        """End the call here and at the callee. Returns whether it was in progress."""
        return self._cut_short(_CANCELLED)

    def write_all(self, requests: AsyncIterator[Any]) -> None:
        """Write the requests as they come, until the call ends."""
        self._writing = asyncio.create_task(self._write_all(requests), name="write the requests of a call")

    def __await__(self) -> Generator[Any, None, Any]:
        return self._answer().__await__()

    async def read(self) -> Any:
        """Return the next message, or grpc.aio.EOF at the end. Raises AioRpcError.

        Other tasks run before each message, so that many that came together do not keep those who wait for them."""
        try:
            if self._messages:
                await asyncio.sleep(0)
            while not self._messages and self._status is None:
                self._news = asyncio.get_running_loop().create_future()
                await self._news
        except asyncio.CancelledError:
            self.cancel()
            raise
        if self._messages:
            return self._read(self._messages.popleft())
        assert self._status is not None
        self._raise_unless_ok(self._status)
        return grpc.aio.EOF

    async def write(self, message: Any) -> None:
        """Send a request; one that is too large ends the call. Raises asyncio.InvalidStateError if the call is over."""
        request = self._pack(message)
        if (problem := too_large(request)) is not None:
            self._cut_short(problem)
        if self._status is not None:
            raise asyncio.InvalidStateError("the call is over")
        self._connection.send(Kind.MESSAGE, self._number, request)
        if self._connection.is_paused:
            await self._connection.drained()

    async def done_writing(self) -> None:
        self._connection.send(Kind.DONE, self._number)

    async def _write_all(self, requests: AsyncIterator[Any]) -> None:
        async for message in requests:
            await self.write(message)
        await self.done_writing()

    async def _answer(self) -> Any:
        message = await self.read()
        if message is grpc.aio.EOF:
            raise _error(Status(grpc.StatusCode.INTERNAL, "the call ended without an answer"))
        if self._status is None:
            await self.read()
        else:
            self._raise_unless_ok(self._status)
        return message

    def _cut_short(self, status: Status) -> bool:
        if self._status is not None:
            return False
        self._messages.clear()
        self._connection.send(Kind.CANCEL, self._number)
        self.end(status)
        return True

    def _raise_unless_ok(self, status: Status) -> None:
        if status is _CANCELLED:
            raise asyncio.CancelledError
        if status.code is not grpc.StatusCode.OK:
            raise _error(status)

    def _wake(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)


def _error(status: Status) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(
        status.code, grpc.aio.Metadata(), grpc.aio.Metadata(*status.trailing), details=status.details
    )
