"""The worker's side of the one multiplexed stream per router.

This module owns the messages that wait to be sent. A stream outlives a broken connection by the grace time, so that a
router which reconnects finds its sequences running; it detects lost tokens by their indices. The messages of a stream
are bounded: the stream of a router that does not read is dropped.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable

from cluster.messages import MemberId
from tandem.internal.v1 import worker_pb2

_MAX_WAITING_BYTES = 32 << 20
_MESSAGE_BYTES = 512  # memory of one message besides its content


class RouterStream:
    """The messages for one incarnation of one router, in order. At most one connection drains them."""

    def __init__(self, router: MemberId) -> None:
        self.router = router
        self._waiting: deque[worker_pb2.WorkerMessage] = deque()
        self._waiting_bytes = 0
        self._heartbeat: worker_pb2.WorkerMessage | None = None  # the latest one, until it is sent
        self._changed = asyncio.Event()
        self.has_said_all = asyncio.Event()  # no message waits or is being sent
        self.has_said_all.set()
        self._connection: object | None = None

    @property
    def is_overfull(self) -> bool:
        """The waiting messages exceed 32 MiB, so the router counts as lost."""
        return self._waiting_bytes > _MAX_WAITING_BYTES

    @property
    def waiting_bytes(self) -> int:
        return self._waiting_bytes

    @property
    def is_connected(self) -> bool:
        return self._connection is not None

    def send(self, message: worker_pb2.WorkerMessage) -> None:
        self._waiting.append(message)
        self._waiting_bytes += _size(message)
        self.has_said_all.clear()
        self._changed.set()

    def beat(self, message: worker_pb2.WorkerMessage) -> None:
        """Send a heartbeat. It replaces an earlier one that still waits."""
        self._heartbeat = message
        self.has_said_all.clear()
        self._changed.set()

    def attach(self, connection: object | None) -> None:
        """Let only `connection` drain from now on. The previous connection's `drain` returns."""
        self._connection = connection
        self._changed.set()

    def is_drained_by(self, connection: object) -> bool:
        return self._connection is connection

    async def drain(self, connection: object) -> AsyncGenerator[worker_pb2.WorkerMessage, None]:
        """Yield the messages that `connection` must send, until another connection is attached."""
        while self._connection is connection:
            if self._heartbeat is not None:
                heartbeat, self._heartbeat = self._heartbeat, None
                yield heartbeat
            elif self._waiting:
                message = self._waiting.popleft()
                self._waiting_bytes -= _size(message)
                yield message
            else:
                self.has_said_all.set()
                self._changed.clear()
                await self._changed.wait()


class RouterStreams:
    """All streams of this worker. `on_gone` is called for a router that did not reconnect in time or does not read."""

    def __init__(self, *, grace_s: float, on_gone: Callable[[MemberId], None]) -> None:
        self._grace_s = grace_s
        self._on_gone = on_gone
        self._streams: dict[MemberId, RouterStream] = {}
        self._graces: dict[MemberId, asyncio.TimerHandle] = {}

    def get(self, router: MemberId) -> RouterStream | None:
        return self._streams.get(router)

    def connect(self, router: MemberId, connection: object) -> RouterStream:
        """Attach a new connection of a router. An older connection of the same incarnation ends."""
        self._end_grace(router)
        stream = self._streams.setdefault(router, RouterStream(router))
        stream.attach(connection)
        return stream

    def disconnect(self, router: MemberId, connection: object) -> None:
        """Detach a broken connection. Its stream is dropped after the grace time unless a newer connection is
        attached."""
        stream = self._streams.get(router)
        if stream is not None and stream.is_drained_by(connection):
            stream.attach(None)
            self._graces[router] = asyncio.get_running_loop().call_later(self._grace_s, self._drop, router)

    def send(self, router: MemberId, message: worker_pb2.WorkerMessage) -> None:
        """Send to the router; drop the message if it has gone, because its sequences are being cancelled."""
        stream = self._streams.get(router)
        if stream is None:
            return
        stream.send(message)
        if stream.is_overfull:
            self._drop(router)

    def beat(self, message: worker_pb2.WorkerMessage) -> None:
        """Send a heartbeat to every connected router."""
        for stream in self._streams.values():
            if stream.is_connected:
                stream.beat(message)

    @property
    def waiting_bytes(self) -> int:
        """The size of all messages that are not sent yet."""
        return sum(stream.waiting_bytes for stream in self._streams.values())

    def broadcast(self, message: worker_pb2.WorkerMessage) -> None:
        """Send a message to every connected router."""
        for stream in self._streams.values():
            if stream.is_connected:
                stream.send(message)

    async def said(self) -> None:
        """Wait until every message is sent or its router is lost."""
        for stream in tuple(self._streams.values()):
            await stream.has_said_all.wait()

    def close(self) -> None:
        for router in tuple(self._streams):
            self._drop(router)

    def _drop(self, router: MemberId) -> None:
        self._end_grace(router)
        stream = self._streams.pop(router, None)
        if stream is not None:
            stream.attach(None)
            stream.has_said_all.set()
            self._on_gone(router)

    def _end_grace(self, router: MemberId) -> None:
        grace = self._graces.pop(router, None)
        if grace is not None:
            grace.cancel()


def _size(message: worker_pb2.WorkerMessage) -> int:
    return _MESSAGE_BYTES + message.ByteSize()
