"""The worker's side of the one multiplexed stream per router: its messages and their delivery.

This module owns the messages that wait to be sent. A stream outlives a broken connection by the grace time, so that a
router which reconnects finds its sequences running; it detects lost tokens by their indices. The messages of a stream
are bounded: the stream of a router that does not read is dropped.

`WorkReports` sends every router the work of the other routers at this worker (cluster/outstanding_work.py).
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence

from cluster.errors import HandOffFailed, TandemError
from cluster.messages import MemberId
from cluster.outstanding_work import OutstandingWork
from cluster.protocol import report_wire, wire
from decode_worker.live_handles import Arrival
from engine.scheduling.commands import SequenceToken, Started
from tandem.enum_words import FINISH_REASONS
from tandem.internal.v1 import worker_pb2
from tandem.v1 import inference_pb2

_MAX_WAITING_BYTES = 32 << 20
_MESSAGE_BYTES = 512  # memory of one message besides its content
_LOCAL = "local"  # the transport of a prompt that this worker prefilled itself


class RouterStream:
    """The messages for one incarnation of one router, in order. At most one connection drains them."""

    def __init__(self, router: MemberId) -> None:
        self.router = router
        self._waiting: deque[worker_pb2.WorkerMessage] = deque()
        self._waiting_bytes = 0
        self._latest: dict[str, worker_pb2.WorkerMessage] = {}  # by kind: the latest one, until it is sent
        self._changed = asyncio.Event()
        self.all_sent = asyncio.Event()  # no message waits or is being sent
        self.all_sent.set()
        self._connection: object | None = None

    @property
    def is_overfull(self) -> bool:
        """Return whether the waiting messages exceed 32 MiB, so that the router counts as lost."""
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
        self.all_sent.clear()
        self._changed.set()

    def send_latest(self, message: worker_pb2.WorkerMessage) -> None:
        """Send a message that replaces an earlier one of its kind if that still waits."""
        self._latest[str(message.WhichOneof("message"))] = message
        self.all_sent.clear()
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
            if self._latest:
                yield self._latest.pop(next(iter(self._latest)))
            elif self._waiting:
                message = self._waiting.popleft()
                self._waiting_bytes -= _size(message)
                yield message
            else:
                self.all_sent.set()
                self._changed.clear()
                await self._changed.wait()


class RouterStreams:
    """All streams of this worker. `on_gone` is called for a router that did not reconnect in time or does not read."""

    def __init__(self, *, grace_s: float, on_gone: Callable[[MemberId], None]) -> None:
        self._grace_s = grace_s
        self._on_gone = on_gone
        self._streams: dict[MemberId, RouterStream] = {}
        self._graces: dict[MemberId, asyncio.TimerHandle] = {}
        self._heartbeat: worker_pb2.WorkerMessage | None = None  # the latest one

    def get(self, router: MemberId) -> RouterStream | None:
        return self._streams.get(router)

    def connect(self, router: MemberId, connection: object) -> RouterStream:
        """Attach a new connection of a router. An older connection of the same incarnation ends."""
        self._end_grace(router)
        stream = self._streams.setdefault(router, RouterStream(router))
        stream.attach(connection)
        if self._heartbeat is not None:
            stream.send_latest(self._heartbeat)
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

    def connected(self) -> list[MemberId]:
        """Return the routers that are connected."""
        return [router for router, stream in self._streams.items() if stream.is_connected]

    def send_latest(self, router: MemberId, message: worker_pb2.WorkerMessage) -> None:
        """Send the router, if it is connected, a message that replaces an earlier one of its kind."""
        stream = self._streams.get(router)
        if stream is not None and stream.is_connected:
            stream.send_latest(message)

    def beat(self, message: worker_pb2.WorkerMessage) -> None:
        """Send a heartbeat to every connected router. One that connects later gets it at once."""
        self._heartbeat = message
        for router in self.connected():
            self.send_latest(router, message)

    @property
    def waiting_bytes(self) -> int:
        """Return the size of all messages that are not sent yet."""
        return sum(stream.waiting_bytes for stream in self._streams.values())

    def broadcast(self, message: worker_pb2.WorkerMessage) -> None:
        """Send a message to every connected router."""
        for stream in self._streams.values():
            if stream.is_connected:
                stream.send(message)

    async def until_all_sent(self) -> None:
        """Wait until every message is sent or its router is lost."""
        for stream in tuple(self._streams.values()):
            await stream.all_sent.wait()

    def close(self) -> None:
        for router in tuple(self._streams):
            self._drop(router)

    def _drop(self, router: MemberId) -> None:
        self._end_grace(router)
        stream = self._streams.pop(router, None)
        if stream is not None:
            stream.attach(None)
            stream.all_sent.set()
            self._on_gone(router)

    def _end_grace(self, router: MemberId) -> None:
        grace = self._graces.pop(router, None)
        if grace is not None:
            grace.cancel()


def leaving_message(grace_s: float) -> worker_pb2.WorkerMessage:
    """Return the message that this worker drains and leaves after `grace_s` seconds."""
    return worker_pb2.WorkerMessage(leaving=worker_pb2.WorkerLeaving(grace_s=grace_s))


def started_message(event: Started, begun: Mapping[int, Arrival | None]) -> worker_pb2.WorkerMessage:
    """Return the message about sequences that were in a step for the first time.

    `begun` has the import of each sequence that is still live; None if it was prefilled here."""
    message = worker_pb2.SequenceStarted(
        handles=begun, queue_s=event.queue_s, transport=_LOCAL, num_cached=event.num_cached
    )
    arrivals = [arrival for arrival in begun.values() if arrival is not None]
    if arrivals:
        message.first_token_ids = wire.pack_ids([arrival.first_token_id for arrival in arrivals])
        message.queue_s += arrivals[0].queue_s
        message.transfer_s = arrivals[0].transfer_s
        message.kv_bytes = arrivals[0].kv_bytes
        message.transport = arrivals[0].transport
    return worker_pb2.WorkerMessage(started=message)


def step_message(step: int, tokens: Sequence[SequenceToken]) -> worker_pb2.WorkerMessage:
    """Return the message with the tokens that one step drew for the sequences of one router."""
    output = worker_pb2.StepOutput(
        step=step,
        handles=wire.pack_ids([t.handle for t in tokens]),
        token_ids=wire.pack_ids([t.token.token_id for t in tokens]),
        indices=wire.pack_ids([t.index for t in tokens]),
    )
    if any(t.token.logprobs is not None for t in tokens):
        for t in tokens:
            logprobs = t.token.logprobs
            output.logprobs.append(wire.logprobs_to_wire(logprobs) if logprobs else inference_pb2.PositionLogprobs())
    for t in tokens:
        if t.token.finish_reason is not None:
            finish_reason = FINISH_REASONS.number(t.token.finish_reason)
            output.ends.append(worker_pb2.SequenceEnd(handle=t.handle, finish_reason=finish_reason))
    return worker_pb2.WorkerMessage(step=output)


def failed_message(handles: Sequence[int], error: TandemError) -> worker_pb2.WorkerMessage:
    reason = str(error.handoff_reason) if isinstance(error, HandOffFailed) else error.reason
    return worker_pb2.WorkerMessage(failed=worker_pb2.SequenceFailed(handles=handles, reason=reason, detail=str(error)))


def _size(message: worker_pb2.WorkerMessage) -> int:
    return _MESSAGE_BYTES + message.ByteSize()


MIN_INTERVAL_S = 0.05
_MOST_SHARE = 0.01  # of the event loop's time


class WorkReports:
    """Sends each router the work of the others. Belongs to the event loop. `outstanding`: the account from which
    reports are made.
    """

    def __init__(self, streams: RouterStreams) -> None:
        self.outstanding = OutstandingWork(self._on_change)
        self._streams = streams
        self._due: dict[MemberId, None] = {}  # in the order in which they connected: a simulated run repeats
        self._timer: asyncio.TimerHandle | None = None
        self._next_s = float("-inf")  # when the next report after a change may be sent

    def send_to(self, routers: Iterable[MemberId]) -> None:
        """Send a report to each of these routers now."""
        reports = self.outstanding.reports(routers, asyncio.get_running_loop().time())
        for router, work in reports.items():
            self._due.pop(router, None)
            self._streams.send_latest(router, worker_pb2.WorkerMessage(others=report_wire.others_work_to_wire(work)))

    def send_to_all(self) -> None:
        """Send a report to every connected router now."""
        self.send_to(self._streams.connected())

    def close(self) -> None:
        """Send nothing more."""
        if self._timer is not None:
            self._timer.cancel()

    def _on_change(self, changed: MemberId) -> None:
        self._due.update((router, None) for router in self._streams.connected() if router != changed)
        if self._due and self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(max(loop.time(), self._next_s), self._send_due)

    def _send_due(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer, began_s = None, loop.time()
        self.send_to(tuple(self._due))
        self._next_s = began_s + max(MIN_INTERVAL_S, (loop.time() - began_s) / _MOST_SHARE)
