"""Watches members' calls that travel as frames, and counts what the frame layer does.

Wraps production code at both ends of a call, as coverage.py does, without changing what it does. A watched message may
be replaced, because a member may be faulty.
"""

import functools
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import grpc

from cluster.auth import gate, member_channel
from cluster.errors import Unavailable
from cluster.serving import frame_channel, frame_server, frames
from cluster.serving.frames import FrameConnection, Kind
from tests.chaos.simulated.machine.calls import parsed
from tests.chaos.simulated.machine.loop import current
from tests.chaos.simulated.machine.served_calls import Watch

Count = Callable[[str], None]
_ENDS = {frame_channel._LOST: "lost", frame_channel._LATE: "late", frame_channel._CANCELLED: "cancelled"}
KNOWN = (
    *("frames: connected", "frames: connected again", "frames: not connected"),
    *(f"frames: connection lost, {side}" for side in ("caller", "callee")),
    *("frames: frame in pieces", "frames: ping", "frames: ping not answered"),
    *("frames: writing paused", "frames: too much unsent", "frames: too much unread"),
    *(f"frames: call {end}" for end in ("ok", *_ENDS.values())),
    *(f"frames: {what} for an ended call" for what in ("answer", "status", "request", "cancellation")),
    *("frames: call refused by a leaving callee", "frames: call cancelled at its callee"),
    *("connections: torn", "connections: silent", "connections: deaf"),
    *("frames: request too large", "frames: session opened again", "frames: stream ended with its secret"),
)
_LATE_FRAMES = {Kind.MESSAGE: "answer", Kind.STATUS: "status"}
_LATE_REQUESTS = {Kind.MESSAGE: "request", Kind.DONE: "request", Kind.CANCEL: "cancellation"}


def sockets(listen: Callable[..., Any]) -> SimpleNamespace:
    """Return what frame_server.py uses of the module `socket`. `listen` returns a listening socket."""
    names = ("AF_INET", "AF_INET6", "IPPROTO_TCP", "TCP_NODELAY")
    return SimpleNamespace(create_server=listen, **{name: getattr(socket, name) for name in names})


@contextmanager
def watched(watch: Watch) -> Iterator[None]:
    """Let every message of a call in frames pass through `watch`."""
    begin, answer = frame_channel.CallerConnection.begin, frame_server._Served._answer

    def begin_watched(
        connection: Any, method: str, request: Any, timeout_s: Any, metadata: Any, read: Any, pack: Any = bytes
    ) -> Any:
        def seen(message: Any) -> Any:
            return watch(method, sender, receiver, message)

        sender, receiver = current(), connection.transport.peer.process
        if request is not None:
            request = seen(parsed(method, request)).SerializeToString()
        return begin(connection, method, request, timeout_s, metadata, read, lambda message: pack(seen(message)))

    async def answer_watched(served: Any, handler: Any, begun: Any, context: Any) -> None:
        sender, receiver = current(), served._connection.transport.peer.process
        write = handler.response_serializer or bytes
        seen = handler._replace(
            response_serializer=lambda message: write(watch(begun.method, sender, receiver, message))
        )
        await answer(served, seen, begun, context)

    with (
        mock.patch.object(frame_channel.CallerConnection, "begin", begin_watched),
        mock.patch.object(frame_server._Served, "_answer", answer_watched),
    ):
        yield


@contextmanager
def bounds(max_unsent_bytes: int, max_unread_bytes: int, max_request_bytes: int) -> Iterator[None]:
    """Set the bounds of the frame layer, so that short answers reach them."""
    with (
        mock.patch.object(frames, "MAX_UNSENT_BYTES", max_unsent_bytes),
        mock.patch.object(frames, "MAX_UNREAD_BYTES", max_unread_bytes),
        mock.patch.object(member_channel, "MAX_REQUEST_BYTES", max_request_bytes),
    ):
        yield


def wrappers(count: Count) -> Iterator[tuple[Any, str, Callable[[Any], Any]]]:
    """Return owner, name and wrapper of each method that counts."""
    yield frame_channel.FrameChannel, "_connect", functools.partial(_counting_attempts, count)
    yield FrameConnection, "connection_lost", functools.partial(_counting_losses, count)
    yield FrameConnection, "data_received", functools.partial(_counting_pieces, count)
    yield FrameConnection, "_look", functools.partial(_counting_pings, count)
    yield FrameConnection, "pause_writing", lambda paused: _before(paused, lambda _: count("frames: writing paused"))
    for owner in (FrameConnection, frame_server._Connection):
        yield owner, "on_unsent", lambda met: _before(met, lambda _: count("frames: too much unsent"))
    yield frames.Unread, "append", functools.partial(_counting_errors, count, ValueError, "too much unread")
    yield frame_channel.FrameCall, "end", lambda end: _before(end, functools.partial(_count_end, count))
    yield (
        frame_channel.CallerConnection,
        "on_frame",
        lambda on_frame: _before(on_frame, functools.partial(_count_late_frame, count)),
    )
    yield (
        frame_server._Connection,
        "_on_call_frame",
        lambda on_frame: _before(on_frame, functools.partial(_count_late_request, count)),
    )
    yield (
        frame_server._Served,
        "cancel",
        lambda cancel: _before(cancel, lambda _: count("frames: call cancelled at its callee")),
    )
    yield member_channel._Sessions, "forget_if_refused", functools.partial(_counting_refusals, count)
    yield gate, "abort", lambda abort: _before(abort, functools.partial(_count_abort, count))
    yield member_channel.MemberChannel, "_one_request", functools.partial(_counting_large_requests, count)


def _before(function: Any, before: Callable[..., object]) -> Any:
    @functools.wraps(function)
    def counting(*arguments: Any, **keywords: Any) -> Any:
        before(*arguments, **keywords)
        return function(*arguments, **keywords)

    return counting


def _counting_attempts(count: Count, connect: Any) -> Any:
    @functools.wraps(connect)
    async def counting(channel: Any, port: int, callee: str) -> Any:
        was_connected = getattr(channel, "was_connected", "") == callee
        try:
            connection = await connect(channel, port, callee)
        except BaseException:
            count("frames: not connected")
            raise
        count("frames: connected again" if was_connected else "frames: connected")
        setattr(channel, "was_connected", callee)  # noqa: B010 -- production code has no such attribute
        return connection

    return counting


def _counting_losses(count: Count, lost: Any) -> Any:
    @functools.wraps(lost)
    def counting(connection: FrameConnection, error: Exception | None) -> None:
        if connection.is_proven:
            side = "caller" if isinstance(connection, frame_channel.CallerConnection) else "callee"
            count(f"frames: connection lost, {side}")
        lost(connection, error)

    return counting


def _counting_pieces(count: Count, received: Any) -> Any:
    @functools.wraps(received)
    def counting(connection: FrameConnection, data: bytes) -> None:
        received(connection, data)
        if connection._received:
            count("frames: frame in pieces")

    return counting


def _counting_pings(count: Count, look: Any) -> Any:
    @functools.wraps(look)
    def counting(connection: FrameConnection) -> None:
        before_s = connection._pinged_s
        look(connection)
        if connection._pinged_s != before_s:
            count("frames: ping")
        elif before_s is not None and connection.transport is not None and connection.transport.is_closing():
            count("frames: ping not answered")

    return counting


def _counting_errors(count: Count, kind: type[Exception], name: str, function: Any) -> Any:
    @functools.wraps(function)
    def counting(*arguments: Any) -> Any:
        try:
            return function(*arguments)
        except kind:
            count(f"frames: {name}")
            raise

    return counting


def _count_end(count: Count, call: Any, status: frames.Status) -> None:
    if call._status is None:
        count(f"frames: call {_ENDS.get(status, status.code.name.lower())}")


def _count_late_frame(count: Count, connection: Any, kind: int, number: int, _: bytes) -> None:
    if kind in _LATE_FRAMES and number not in connection._calls:
        count(f"frames: {_LATE_FRAMES[Kind(kind)]} for an ended call")


def _count_late_request(count: Count, connection: Any, kind: int, number: int, _: bytes) -> None:
    if kind == Kind.BEGIN:
        if not connection._takes_calls:
            count("frames: call refused by a leaving callee")
    elif kind in _LATE_REQUESTS and number not in connection._calls:
        count(f"frames: {_LATE_REQUESTS[Kind(kind)]} for an ended call")


def _counting_refusals(count: Count, forget: Any) -> Any:
    @functools.wraps(forget)
    def counting(sessions: Any, session: Any, error: grpc.aio.AioRpcError) -> bool:
        is_refused: bool = forget(sessions, session, error)
        if is_refused:
            count("frames: session opened again")
        return is_refused

    return counting


def _count_abort(count: Count, _: Any, error: Exception, __: str) -> None:
    if isinstance(error, Unavailable) and "secret" in str(error):
        count("frames: stream ended with its secret")


def _counting_large_requests(count: Count, one_request: Any) -> Any:
    @functools.wraps(one_request)
    def counting(channel: Any, method: str, over_grpc: Any, read: Any) -> Any:
        call = one_request(channel, method, over_grpc, read)

        def begin(body: bytes, **options: Any) -> Any:
            if channel._connection is not None and len(body) > vars(member_channel)["MAX_REQUEST_BYTES"]:
                count("frames: request too large")
            return call(body, **options)

        return begin

    return counting
