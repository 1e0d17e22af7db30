"""A gRPC channel to a member: it opens a session with the first call, and proves membership with each call.

A callee without the session (it has restarted, or a secret was replaced) refuses the call before it reads it. The
channel then opens another session and makes the call once more, so the caller does not notice. Calls travel as frames
(cluster/serving/frame_channel.py) where the callee takes them, and over gRPC otherwise.

The channel itself uses no session whose secret was dropped, and ends streams under it after the callee's grace: a
callee that has stolen the secret would go on with both.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from types import TracebackType
from typing import Any, Self

import grpc

from cluster.auth.gate import DROPPED, PROOF, OpenStreams
from cluster.auth.keys import ClusterKeys
from cluster.auth.sessions import OpeningSession, Session
from cluster.errors import MalformedMessage, MemberRefused
from cluster.protocol.received import checked
from cluster.serving.frame_channel import FIRST_S, MAX_REQUEST_BYTES, CallerConnection, FrameCall, FrameChannel
from cluster.serving.rpc_errors import REASON
from cluster.serving.serving import open_channel
from cluster.serving.tls import ClusterTls
from tandem.internal.v1 import worker_pb2, worker_pb2_grpc

_SIGNED = "/tandem.internal.v1."
_HANDSHAKE_S = 5.0
_WRITE_FAILED = "Internal error from Core"
_MAX_REPEATED = 16  # messages of a stream that are kept until the callee's first answer

Begin = Callable[[Session | None], Any]  # starts the call with the session's proof


def open_member_channel(
    address: str,
    *,
    keys: ClusterKeys,
    caller: str,
    tls: ClusterTls | None = None,
    frames_wait_s: float = FIRST_S,
) -> "MemberChannel":
    """Return a channel to the member at host:port. `caller`: the name of this process, "id@incarnation". If no
    connection for frames opens within `frames_wait_s`, the first calls go over gRPC."""
    host = address.rpartition(":")[0].strip("[]")
    frames = FrameChannel(host, keys, caller, frames_wait_s) if tls is None else None  # which would be plaintext
    return MemberChannel(open_channel(address, tls), keys, caller, frames)


class MemberChannel(grpc.aio.Channel):
    """Has the interface that generated stubs use. Calls of other services, such as health checks, are not changed."""

    def __init__(
        self, channel: grpc.aio.Channel, keys: ClusterKeys, caller: str, frames: FrameChannel | None = None
    ) -> None:
        """`frames` carries the calls of sessions while it is connected; None: all calls use gRPC."""
        self._channel = channel
        self.frames = frames
        self._sessions = _Sessions(channel, keys, caller, frames)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        self._sessions.close()
        if self.frames is not None:
            self.frames.close()
        await self._channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._channel.channel_ready()

    def unary_unary(
        self, method: str, request_serializer: Any = None, response_deserializer: Any = None, **more: Any
    ) -> Any:
        codec = {"response_deserializer": response_deserializer, **more}
        if not method.startswith(_SIGNED):
            return self._channel.unary_unary(method, request_serializer=request_serializer, **codec)
        over_grpc = self._channel.unary_unary(method, request_serializer=_as_is, **codec)
        call, sessions = self._one_request(method, over_grpc, response_deserializer), self._sessions

        def begin(request: Any, *, timeout: float | None = None, metadata: Any = ()) -> Coroutine[Any, Any, Any]:
            return _single(sessions, method, call, request_serializer(request), timeout, tuple(metadata or ()))

        return begin

    def unary_stream(
        self, method: str, request_serializer: Any = None, response_deserializer: Any = None, **more: Any
    ) -> Any:
        codec = {"response_deserializer": response_deserializer, **more}
        if not method.startswith(_SIGNED):
            return self._channel.unary_stream(method, request_serializer=request_serializer, **codec)
        over_grpc = self._channel.unary_stream(method, request_serializer=_as_is, **codec)
        call, sessions = self._one_request(method, over_grpc, response_deserializer), self._sessions

        def begin(request: Any, *, timeout: float | None = None, metadata: Any = ()) -> SignedStream:
            body, metadata = request_serializer(request), tuple(metadata or ())
            return SignedStream(
                sessions,
                lambda session: call(body, timeout=timeout, metadata=_proved(session, method, body, metadata)),
                repeats=True,
            )

        return begin

    def stream_unary(self, method: str, *args: Any, **codec: Any) -> Any:
        if not method.startswith(_SIGNED):
            return self._channel.stream_unary(method, *args, **codec)
        raise NotImplementedError(f"{method}: no service of a member has such a call")

    def stream_stream(
        self, method: str, request_serializer: Any = None, response_deserializer: Any = None, **more: Any
    ) -> Any:
        codec = {"request_serializer": request_serializer, "response_deserializer": response_deserializer, **more}
        over_grpc, sessions = self._channel.stream_stream(method, **codec), self._sessions
        if not method.startswith(_SIGNED):
            return over_grpc

        def call(requests: Any, *, timeout: float | None, metadata: Any) -> Any:
            if (connection := self._connection) is None:
                return over_grpc(requests, timeout=timeout, metadata=metadata)
            begun = connection.begin(method, None, timeout, metadata, response_deserializer, request_serializer)
            if requests is not None:
                begun.write_all(requests)
            return begun

        def begin(requests: Any = None, *, timeout: float | None = None, metadata: Any = ()) -> SignedStream:
            metadata = tuple(metadata or ())
            return SignedStream(
                sessions,
                lambda session: call(requests, timeout=timeout, metadata=_proved(session, method, b"", metadata)),
                repeats=requests is None,  # an iterator cannot be read again: its caller makes another call
            )

        return begin

    @property
    def _connection(self) -> CallerConnection | None:
        return self.frames.connection if self.frames is not None else None

    def _one_request(self, method: str, over_grpc: Any, read: Any) -> Any:
        """Return a function that begins a call with one request, as frames where that is possible."""

        def call(body: bytes, *, timeout: float | None, metadata: Any) -> Any:
            connection = self._connection
            if connection is None or len(body) > MAX_REQUEST_BYTES:
                return over_grpc(body, timeout=timeout, metadata=metadata)
            return connection.begin(method, body, timeout, metadata, read)

        return call


class SignedStream:
    """A call with a stream of responses. It has the methods of gRPC's calls that Tandem uses."""

    __slots__ = (
        "__weakref__", "_begin", "_call", "_is_cancelled", "_is_half_closed", "_is_over", "_opening", "_session",
        "_sessions", "_written",
    )  # fmt: skip

    def __init__(self, sessions: "_Sessions", begin: Begin, *, repeats: bool) -> None:
        self._sessions, self._begin = sessions, begin
        self._written: list[Any] | None = [] if repeats else None  # None: the call is never made again
        self._is_half_closed = False
        self._is_cancelled = False
        self._is_over = False  # its secret was dropped, and the grace is over
        self._call: Any = None
        self._session = sessions.ready
        self._opening: asyncio.Task[None] | None = None
        if self._session is None:
            self._open_soon()
            return
        sessions.streams.add(self._session.key_id, self)
        try:
            self._call = begin(self._session)
        except grpc.aio.UsageError:
            self._open_soon()  # fails in the same way, and its reader or writer receives the error

    @property
    def is_behind(self) -> bool:
        """Return whether the call goes over gRPC although frames connect now: if it is made again, it uses them."""
        return self._call is not None and not isinstance(self._call, FrameCall) and self._sessions.have_frames

    async def read(self) -> Any:
        """Return the next message, or grpc.aio.EOF at the end. Raises AioRpcError; UNAVAILABLE a grace after the secret
        behind the stream was dropped."""
        while True:
            call = self._call if self._call is not None else await self._started()
            try:
                message = await call.read()
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if not self._is_over or (task is not None and task.cancelling()):
                    raise
                raise _failure(grpc.StatusCode.UNAVAILABLE, DROPPED) from None
            except grpc.aio.AioRpcError as error:
                if not self._sessions.forget_if_refused(self._session, error) or self._written is None:
                    raise
                self._open_soon()
                continue
            self._written = None
            return message

    async def __aiter__(self) -> AsyncIterator[Any]:
        while (message := await self.read()) is not grpc.aio.EOF:
            yield message

    async def write(self, message: Any) -> None:
        """Send a message. Raises AioRpcError; asyncio.InvalidStateError if the call is over."""
        call = self._call if self._call is not None else await self._started()
        if self._written is not None:
            self._written.append(message)
            if len(self._written) > _MAX_REPEATED:
                self._written = None
        with contextlib.suppress(*self._left_to_reader()):
            await call.write(message)

    async def done_writing(self) -> None:
        call = await self._started()
        self._is_half_closed = True
        with contextlib.suppress(*self._left_to_reader()):
            await call.done_writing()

    def cancel(self) -> bool:
        self._is_cancelled = True
        if self._opening is not None:
            self._opening.cancel()
        return bool(self._call.cancel()) if self._call is not None else True

    def end(self, key_id: bytes) -> None:
        """End the call if it rests on this secret: the grace after it was dropped is over."""
        if self._session is not None and self._session.key_id == key_id:
            self._is_over = True
            self.cancel()

    def _left_to_reader(self) -> tuple[type[Exception], ...]:
        """Return the errors of a write that need not be raised: the reader receives them too, and may repeat the call
        with everything that was written.
        """
        return (grpc.aio.AioRpcError, asyncio.InvalidStateError) if self._written is not None else ()

    async def _started(self) -> Any:
        if self._call is None:
            if self._is_cancelled or self._opening is None:
                raise asyncio.CancelledError
            await asyncio.shield(self._opening)
        return self._call

    def _open_soon(self) -> None:
        self._call, self._opening = None, asyncio.create_task(self._open(), name="open a signed stream")
        self._opening.add_done_callback(_retrieve)

    async def _open(self) -> None:
        self._session = await self._sessions.get()
        self._sessions.streams.add(self._session.key_id, self)
        call = _begun(self._begin, self._session)
        try:
            for message in self._written or ():
                await call.write(message)
            if self._is_half_closed:
                await call.done_writing()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            pass  # the reader receives the reason
        except BaseException:
            call.cancel()
            raise
        self._call = call


class _Sessions:
    """The session of one channel. Calls that begin without one wait for the same handshake."""

    def __init__(self, channel: grpc.aio.Channel, keys: ClusterKeys, caller: str, frames: FrameChannel | None) -> None:
        self._ready: Session | None = None
        self.streams = OpenStreams(keys)
        self._frames = frames
        self._stub = worker_pb2_grpc.MemberAuthStub(channel)
        self._keys, self._caller = keys, caller
        self._opening: asyncio.Task[Session] | None = None

    @property
    def ready(self) -> Session | None:
        """Return the open session; None: there is none under a valid secret."""
        if self._ready is not None and self._keys.secret_of(self._ready.key_id) is None:
            self._ready = None
        return self._ready

    @property
    def have_frames(self) -> bool:
        return self._frames is not None and self._frames.connection is not None

    async def get(self) -> Session:
        """Return the session; open it if there is none. Raises AioRpcError."""
        if (ready := self.ready) is not None:
            return ready
        if self._opening is None or self._opening.done():
            self._opening = asyncio.create_task(self._open(), name="open a session")
            self._opening.add_done_callback(_retrieve)
        return await asyncio.shield(self._opening)

    def forget_if_refused(self, session: Session | None, error: grpc.aio.AioRpcError) -> bool:
        """Return whether the callee refused the caller as a member. The session is not used again then.

        gRPC reports INTERNAL if the refusal arrives while it writes a message of the stream."""
        is_refused = (REASON, MemberRefused.reason) in tuple(error.trailing_metadata() or ())
        is_refused |= error.code() is grpc.StatusCode.INTERNAL and error.details() == _WRITE_FAILED
        if is_refused and self._ready is session:
            self._ready = None
        return is_refused and session is not None

    def close(self) -> None:
        if self._opening is not None:
            self._opening.cancel()
        self.streams.close()

    async def _open(self) -> Session:
        handshake = OpeningSession(self._keys, self._caller)
        opening = _begun(self._stub.OpenSession, handshake.request(), timeout=_HANDSHAKE_S)
        answer: worker_pb2.OpenSessionResponse = await opening
        try:
            session = handshake.opened(checked(answer))
        except (MemberRefused, MalformedMessage) as error:
            raise _failure(grpc.StatusCode.UNAUTHENTICATED, error.message, (REASON, error.reason)) from error
        if self._frames is not None:
            await self._frames.offer(answer.frame_port, answer.callee)
        self._ready = session
        return session


async def _single(
    sessions: _Sessions, method: str, call: Any, body: bytes, timeout_s: float | None, metadata: tuple[Any, ...]
) -> Any:
    """Make a call with one request and one response. Raises AioRpcError."""
    ends_s = None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s
    session = sessions.ready or await _within(sessions.get(), ends_s)
    try:
        return await call(body, timeout=timeout_s, metadata=_proved(session, method, body, metadata))
    except grpc.aio.UsageError as error:
        raise _closed() from error
    except grpc.aio.AioRpcError as error:
        if not sessions.forget_if_refused(session, error):
            raise
    session = await _within(sessions.get(), ends_s)
    left_s = None if ends_s is None else max(0.0, ends_s - asyncio.get_running_loop().time())
    return await _begun(call, body, timeout=left_s, metadata=_proved(session, method, body, metadata))


async def _within(opening: Coroutine[Any, Any, Session], ends_s: float | None) -> Session:
    try:
        async with asyncio.timeout_at(ends_s):
            return await opening
    except TimeoutError:
        raise _failure(grpc.StatusCode.DEADLINE_EXCEEDED, "no session was opened in time") from None


def _begun(call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Begin a call. Raises AioRpcError if the channel is closed, as it may be since a session began to open."""
    try:
        return call(*arguments, **options)
    except grpc.aio.UsageError as error:
        raise _closed() from error


def _closed() -> grpc.aio.AioRpcError:
    """Return the error of a call on a closed channel, for which gRPC raises UsageError."""
    return _failure(grpc.StatusCode.UNAVAILABLE, "the channel is closed")


def _failure(code: grpc.StatusCode, details: str, *trailing: tuple[str, str]) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailing), details=details)


def _proved(session: Session | None, method: str, body: bytes, metadata: tuple[Any, ...]) -> tuple[Any, ...]:
    assert session is not None
    return (*metadata, (PROOF, session.prove(method, body)))


def _as_is(body: bytes) -> bytes:
    return body


def _retrieve(task: "asyncio.Task[Any]") -> None:
    if not task.cancelled():
        task.exception()  # each waiting caller raises it; without one there is nothing to report
