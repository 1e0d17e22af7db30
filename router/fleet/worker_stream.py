"""The one multiplexed stream between this router and one incarnation of one worker: tokens, heartbeats, drain messages.

Owns the connection and the table of which attempt owns which handle. It reads without pause; each attempt has its own
queue of events. Messages about a handle without an owner are dropped, because their attempt is no longer current. A
broken connection may be restored within `recovery_timeout_s`; messages that were lost meanwhile show as a gap in the
token indices, or as silence.
"""

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

import grpc

from cluster.auth.member_channel import SignedStream
from cluster.clock import Clock
from cluster.errors import Draining, MalformedMessage, Unhealthy
from cluster.member import Member
from cluster.messages import LinkSpeed, MemberId
from cluster.observe.telemetry import Telemetry
from cluster.outstanding_work import OthersWork, SequenceWork
from cluster.protocol import wire
from cluster.protocol.received import checked
from cluster.protocol.report_wire import link_speeds_from_wire, others_work_from_wire, service_times_of
from cluster.request_size import RequestSize
from cluster.service_times import ServiceTimes
from cluster.serving.rpc_errors import error_from_rpc
from router.fleet.decode_events import (
    MoveOutcome,
    MoveRequest,
    Sequences,
    SequencesFailed,
    SequencesStarted,
    StreamLost,
    tokens_of,
)
from router.fleet.supervision import WorkerTimeouts, refuses_connections
from router.policies.prediction.work_ahead import SequenceBatch, SequenceProgress, work_of
from tandem.internal.v1 import worker_pb2, worker_pb2_grpc
from tandem.keepalive import KeepAliveTimer
from tandem.keepalive_watch import waiting

_LOG = logging.getLogger("tandem.router.worker_stream")
_RECONNECT_PAUSE_S = 0.05
_RESEND_CANCEL_S = 0.2
_WORK_AGE_S = 0.05
_MAX_CANCELS_KEPT = 4096
_Cancels: TypeAlias = asyncio.Queue[tuple[int, ...] | None]
_Call: TypeAlias = "grpc.aio.StreamStreamCall[worker_pb2.RouterMessage, worker_pb2.WorkerMessage]"
_REPLACED = "another incarnation answers at its address"


@dataclass(frozen=True, slots=True)
class RouterSide:
    """The part of a router that all its connections to workers share. `handles` yields numbers that this router has
    never given to any worker. `on_change` is called when a worker becomes usable or stops being usable."""

    router: MemberId
    timeouts: WorkerTimeouts
    handles: Iterator[int]
    on_change: Callable[[], None]
    telemetry: Telemetry
    clock: Clock  # of the accounts of requests


class WorkerStream:
    """The stream of one router to one worker. `run` connects and reads until the worker is lost; the stream
    cannot be used after that."""

    def __init__(
        self,
        member: Member,
        channel: grpc.aio.Channel,
        side: RouterSide,
        *,
        on_draining: Callable[[float], None],
        is_draining: Callable[[], bool],
        on_others: Callable[[OthersWork], None],
    ) -> None:
        """`on_draining` is called with the worker's remaining grace in seconds when it drains, `on_others` with its
        reports about the work of other routers. `is_draining`: whether its drain was announced, on any way."""
        self._worker, self._address = member.id, member.address
        self._stub = worker_pb2_grpc.DecodeWorkerStub(channel)
        self._router, self._timeouts = side.router, side.timeouts
        self._handles, self._on_change = side.handles, side.on_change
        self._telemetry, self._clock = side.telemetry, side.clock
        self._on_draining, self._is_draining = on_draining, is_draining
        self._on_others = on_others
        self._owners: dict[int, Sequences] = {}
        self._work: SequenceWork | None = None  # in all, as of `_work_s`; None: sequences have come or gone
        self._work_s = 0.0
        self._moves: dict[int, MoveRequest] = {}  # moves in progress
        self._unheard_since_loss: dict[int, int] = {}  # handle -> number of the latest loss, if no message came since
        self._num_losses = 0
        self._cancel_sent_s: dict[int, float] = {}  # handle -> when its last cancel was sent, the latest last
        self._cancels: _Cancels = asyncio.Queue()
        self._has_connected = False
        self.connected = asyncio.Event()
        self.heard_s = asyncio.get_running_loop().time()  # when the last message arrived
        self.heartbeat = worker_pb2.Heartbeat()
        self.free_blocks: int | None = None  # of the worker, from the same heartbeat; None: it has sent none yet
        self.links: tuple[LinkSpeed, ...] = ()  # the speed of its hand-offs, from the same heartbeat
        self.service_times: ServiceTimes | None = None  # of the worker, from the same heartbeat

    @property
    def num_sequences(self) -> int:
        return len(self._owners)

    @contextmanager
    def open_sequences(self, all_progress: Sequence[SequenceProgress]) -> Iterator[Sequences]:
        """Reserve one handle per sequence. On exit, cancel at the worker the sequences that have not ended."""
        sequences = Sequences({next(self._handles): progress for progress in all_progress})
        self._owners.update(dict.fromkeys(sequences.handles, sequences))
        self._work = None
        try:
            yield sequences
        finally:
            self.cancel_sequences(sequences, tuple(sequences.live))

    @contextmanager
    def split_sequence(self, sequences: Sequences, handle: int) -> Iterator[Sequences]:
        """Separate the lifetime of one of an attempt's sequences from the others. On exit, cancel it if it has not
        ended."""
        parted = self._owners[handle] = sequences.split(handle)
        try:
            yield parted
        finally:
            self.cancel_sequences(parted, tuple(parted.live))

    def movable(self) -> list[int]:
        """Return the handles that run at the worker and are not being moved, the oldest first."""
        return [h for h, owner in self._owners.items() if h in owner.started and h not in self._moves]

    def running_progress(self) -> dict[int, SequenceProgress]:
        """Return handle -> progress of the movable sequences."""
        return {handle: self._owners[handle].all_progress[handle] for handle in self.movable()}

    def size(self, handle: int) -> RequestSize | None:
        """Return the size of this sequence for another worker that would run it to its end; None if it is not known."""
        return self._owners[handle].all_progress[handle].size

    def batch(self, others: SequenceWork, now_s: float) -> SequenceBatch:
        """Return the sequences at the worker, those of other routers too. This router's are summed at most every
        `_WORK_AGE_S`, because a sum for each placement would look at every sequence of the cluster."""
        if self._work is None or now_s > self._work_s + _WORK_AGE_S:
            self._work = work_of([owner.all_progress[handle] for handle, owner in self._owners.items()])
            self._work_s = now_s
        return SequenceBatch.of(self._work + others)

    def unstarted(self) -> list[int]:
        """Return the handles of sequences that have not joined the worker's batch."""
        return [handle for handle, owner in self._owners.items() if handle not in owner.started]

    def preempted(self) -> list[int]:
        """Return the handles of sequences that could not be moved because they have no KV in the batch."""
        return [handle for handle, progress in self.running_progress().items() if progress.is_waiting]

    def fail_sequence(self, handle: int) -> None:
        """Fail one sequence of a draining worker, so that its attempt ends and another one starts elsewhere."""
        self._owners[handle].put(SequencesFailed(Draining.reason, "the worker is draining and does not run it"))

    def ask_to_move(self, handle: int, target: MemberId | None, timeout_s: float) -> MoveRequest | None:
        """Ask the attempt that owns the sequence to move it. Returns None if it has ended or is being moved already."""
        owner = self._owners.get(handle)
        if owner is None or handle in self._moves:
            return None
        move = self._moves[handle] = MoveRequest(handle, target, timeout_s, asyncio.get_running_loop().create_future())
        move.outcome.add_done_callback(lambda _: self._moves.pop(handle))
        owner.put(move)
        return move

    def cancel_sequences(self, sequences: Sequences, handles: tuple[int, ...]) -> None:
        """Cancel these sequences at the worker. Later messages about them are dropped."""
        for handle in handles:
            self.end_sequence(sequences, handle)
        if handles:
            self._send_cancel(handles)

    def end_sequence(self, sequences: Sequences, handle: int) -> None:
        """Remove a sequence that the worker has ended."""
        sequences.live.discard(handle)
        self._owners.pop(handle, None)
        self._work = None
        self._unheard_since_loss.pop(handle, None)
        if handle in self._moves:
            self._moves[handle].settle(MoveOutcome.ENDED)

    async def run(self) -> str:
        """Return why the worker is lost. Every attempt on it has received StreamLost by then."""
        detail = "this router gave it up"
        try:
            detail = await self._converse_until_lost()
        finally:
            self.connected.clear()
            for sequences in dict.fromkeys(self._owners.values()):
                sequences.put(StreamLost(detail))
        return detail

    async def _converse_until_lost(self) -> str:
        loop = asyncio.get_running_loop()
        disconnected_at_s = loop.time()
        while True:
            try:
                problem = await self._converse(disconnected_at_s + self._timeouts.recovery_timeout_s)
            except grpc.aio.AioRpcError as error:
                problem = f"{error.code().name}: {error.details()}"
                if isinstance(error_from_rpc(error), Unhealthy):
                    return f"it is unhealthy: {error.details()}"
            except TimeoutError:
                problem = f"no sign of life for {self._timeouts.heartbeat_timeout_s} s"
            if self.connected.is_set():
                self.connected.clear()
                self._on_change()
                disconnected_at_s = loop.time()
                self._log_disconnection(problem)
            if problem is _REPLACED:
                return problem
            if await refuses_connections(self._address):
                return f"its address refuses connections ({problem})"
            if loop.time() >= disconnected_at_s + self._timeouts.recovery_timeout_s:
                within = f"within {self._timeouts.recovery_timeout_s} s"
                return f"its stream broke and did not come back {within} ({problem})"
            await asyncio.sleep(_RECONNECT_PAUSE_S)

    def _log_disconnection(self, problem: str) -> None:
        what = "the stream from a draining worker ended" if self._is_draining() else "the stream from a worker broke"
        _LOG.info(what, extra={"worker": str(self._worker), "problem": problem})

    async def _converse(self, hello_deadline_s: float) -> str:
        """Run one connection from its hello to its end. Raises AioRpcError, TimeoutError."""
        loop = asyncio.get_running_loop()
        cancels = self._fresh_cancels()
        call = self._stub.Connect(self._outgoing(cancels))
        keepalive = KeepAliveTimer(max(0.0, hello_deadline_s - loop.time()))
        try:
            async with asyncio.timeout(None) as deadline:
                with waiting(keepalive, lambda: deadline.reschedule(loop.time())):
                    return await self._listen(call, keepalive)
        finally:
            call.cancel()
            cancels.put_nowait(None)  # otherwise a call that ended by itself would wait forever

    async def _listen(self, call: _Call, keepalive: KeepAliveTimer) -> str:
        async for message in call:
            self.heard_s = asyncio.get_running_loop().time()
            keepalive.timeout_s = self._timeouts.heartbeat_timeout_s
            keepalive.begin(self.heard_s)
            is_hello = message.WhichOneof("message") == "hello"
            try:
                checked(message)
            except MalformedMessage as error:
                self._on_malformed(message, error)
                if is_hello:
                    return error.message  # the hello comes once: only a new connection repeats it
                continue
            if is_hello:
                if message.hello.worker != str(self._worker):
                    return _REPLACED
                self._on_connected()
            else:
                self._on_message(message)
            if not self._owners and isinstance(call, SignedStream) and call.is_behind:
                return "no sequence runs there, so the stream changes from gRPC to frames"
        return "the worker ended the stream"

    def _fresh_cancels(self) -> _Cancels:
        """Return a queue for the next connection that repeats all recent cancels. Cancels in flight when the last
        connection broke did not arrive, and a frozen sequence sends nothing that would cause another one."""
        self._cancels = asyncio.Queue()
        if self._cancel_sent_s:
            self._cancels.put_nowait(tuple(self._cancel_sent_s))
        return self._cancels

    def _send_cancel(self, handles: tuple[int, ...]) -> None:
        for handle in handles:
            self._cancel_sent_s.pop(handle, None)
            self._cancel_sent_s[handle] = asyncio.get_running_loop().time()
        while len(self._cancel_sent_s) > _MAX_CANCELS_KEPT:
            del self._cancel_sent_s[next(iter(self._cancel_sent_s))]
        self._cancels.put_nowait(handles)

    async def _outgoing(self, cancels: _Cancels) -> AsyncIterator[worker_pb2.RouterMessage]:
        hello = worker_pb2.RouterHello(router=str(self._router), has_no_sequences=not self._has_connected)
        yield worker_pb2.RouterMessage(hello=hello)
        while (handles := await cancels.get()) is not None:
            yield worker_pb2.RouterMessage(cancel=worker_pb2.CancelSequences(handles=wire.pack_ids(handles)))

    def _on_connected(self) -> None:
        """Handle a restored connection. Messages that were sent while it was broken may be lost."""
        self._unheard_since_loss.clear()
        self._watch_silent()
        self._has_connected = True
        self.connected.set()
        self._on_change()

    def _watch_silent(self) -> None:
        """End every attempt that receives no message within `recovery_timeout_s`: any message may be lost, also the
        last token of a sequence that the worker has removed."""
        self._num_losses += 1
        for handle in self._owners:
            self._unheard_since_loss.setdefault(handle, self._num_losses)
        asyncio.get_running_loop().call_later(self._timeouts.recovery_timeout_s, self._end_silent, self._num_losses)

    def _end_silent(self, loss: int) -> None:
        silent = sorted(handle for handle, number in self._unheard_since_loss.items() if number == loss)
        for sequences in dict.fromkeys(self._owners[handle] for handle in silent):
            sequences.put(StreamLost("a message of its stream was lost, and none came since"))
        for handle in silent:
            del self._unheard_since_loss[handle]

    def _on_message(self, message: worker_pb2.WorkerMessage) -> None:
        match message.WhichOneof("message"):
            case "step":
                self._on_step(message.step)
            case "started":
                self._on_started(message.started)
            case "failed":
                self._on_failed(message.failed)
            case "heartbeat":
                self.heartbeat = message.heartbeat
                self.links = link_speeds_from_wire(message.heartbeat.links)
                self.service_times = service_times_of(message.heartbeat)
                self.free_blocks = message.heartbeat.free_blocks
            case "others":
                self._on_others(others_work_from_wire(message.others))
            case "leaving":
                self._on_draining(message.leaving.grace_s)

    def _on_malformed(self, message: worker_pb2.WorkerMessage, error: MalformedMessage) -> None:
        """End the attempts of the sequences that the message names, or all attempts if it names none although it
        should. The names may be wrong as well, so other attempts end if they receive no message. Malformed heartbeats
        and drain messages are ignored, because they are repeated."""
        kind = message.WhichOneof("message") or ""
        self._telemetry.count("tandem_malformed_messages_total", message=kind)
        _LOG.warning("a worker sent a malformed message", extra={"worker": str(self._worker), "problem": error.message})
        if kind not in ("step", "started", "failed"):
            return
        handles = _handles(message)
        for owner in self._owners_of(handles) if handles else list(dict.fromkeys(self._owners.values())):
            owner.put(SequencesFailed(error.reason, error.message))
        self._watch_silent()

    def _on_step(self, step: worker_pb2.StepOutput) -> None:
        now_s = asyncio.get_running_loop().time()
        for token in tokens_of(step, self._clock.now_s()):
            if (owner := self._owner(token.handle)) is not None:
                owner.all_progress[token.handle].record_token(now_s)
                if owner.on_first_token is not None:
                    on_first_token, owner.on_first_token = owner.on_first_token, None
                    on_first_token(now_s)
                owner.put(token)

    def _on_started(self, started: worker_pb2.SequenceStarted) -> None:
        event = SequencesStarted(
            handles=tuple(started.handles),
            first_tokens=wire.unpack_ids(started.first_token_ids),
            queue_s=started.queue_s,
            kv_bytes=started.kv_bytes,
            transport=started.transport,
            num_cached=started.num_cached,
            exposed_s=started.transfer_s,
        )
        for owner in self._owners_of(started.handles):
            owner.put(event)

    def _on_failed(self, failed: worker_pb2.SequenceFailed) -> None:
        for owner in self._owners_of(failed.handles):
            owner.put(SequencesFailed(failed.reason, failed.detail))

    def _owners_of(self, handles: Iterable[int]) -> list[Sequences]:
        """Return each owner once, in the order of its first handle."""
        return list(dict.fromkeys(owner for owner in map(self._owner, handles) if owner is not None))

    def _owner(self, handle: int) -> Sequences | None:
        """Return the owner of a handle, or None if its attempt is no longer current. In that case the worker is sent a
        cancel, and another one if it continues (its Start may have arrived after the cancel)."""
        owner = self._owners.get(handle)
        if owner is None:
            self._telemetry.count("tandem_stale_messages_total")
            if asyncio.get_running_loop().time() > self._cancel_sent_s.get(handle, -math.inf) + _RESEND_CANCEL_S:
                self._send_cancel((handle,))
        elif self._unheard_since_loss:
            self._unheard_since_loss.pop(handle, None)
        return owner


def _handles(message: worker_pb2.WorkerMessage) -> tuple[int, ...]:
    """Return the handles that a malformed message names; none where they cannot be read."""
    match message.WhichOneof("message"):
        case "step" if len(message.step.handles) % wire.ID_BYTES == 0:
            return wire.unpack_ids(message.step.handles)
        case "started":
            return tuple(message.started.handles)
        case "failed":
            return tuple(message.failed.handles)
    return ()
