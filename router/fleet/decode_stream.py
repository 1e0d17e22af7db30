"""The one multiplexed stream between this router and one incarnation of one decode worker.

Owns the connection and which handle belongs to which attempt. Reads without pause; an attempt's messages wait in its
own queue. Messages for a handle that nobody holds any more are dropped: that attempt is not current. A connection that
broke may come back within the grace time; what was lost meanwhile shows as a gap in the tokens' indices, or as silence.
"""

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

import grpc

from cluster.errors import Draining, MalformedMessage, Unhealthy
from cluster.member import Member
from cluster.messages import MemberId, PairFigure
from cluster.observe.telemetry import Telemetry
from cluster.protocol import wire
from cluster.protocol.pair_wire import figures_from_wire
from cluster.protocol.received import checked
from cluster.request_size import RequestSize
from cluster.serving.rpc_errors import error_from_rpc
from router.fleet.decode_events import Failed, Lost, Move, MoveOutcome, Sequences, Started, tokens_of
from router.fleet.direct_check import nobody_listens
from router.fleet.patience import Patience
from router.policies.course import Course
from tandem.silence import Silence
from tandem.v1 import worker_pb2, worker_pb2_grpc
from tandem.watch import waiting

_LOG = logging.getLogger("tandem.router.decode_stream")
_RECONNECT_PAUSE_S = 0.05
_RETELL_S = 0.2
_MAX_TOLD = 4096
_Call: TypeAlias = "grpc.aio.StreamStreamCall[worker_pb2.RouterMessage, worker_pb2.WorkerMessage]"
_REPLACED = "another incarnation answers at its address"


class DecodeStream:
    """`run` connects and reads until the worker is lost; it is then of no more use."""

    def __init__(
        self,
        *,
        router: MemberId,
        member: Member,
        stub: worker_pb2_grpc.DecodeWorkerStub,
        patience: Patience,
        handles: Iterator[int],
        on_change: Callable[[], None],
        on_leaving: Callable[[float], None],
        telemetry: Telemetry,
    ) -> None:
        """`handles`: numbers that this router never gave this worker before. `on_change`: it connected or broke.
        `on_leaving`: it takes no more, and has what it has for so many seconds."""
        self._router = router
        self._worker = member.id
        self._address = member.address
        self._stub = stub
        self._patience = patience
        self._handles = handles
        self._on_change = on_change
        self._on_leaving = on_leaving
        self._telemetry = telemetry
        self._owners: dict[int, Sequences] = {}
        self._moves: dict[int, Move] = {}  # that were asked for and have no outcome yet
        self._doubtful: set[int] = set()  # silent since the last connection broke
        self._told_at_s: dict[int, float] = {}  # when the worker was last told to cancel, the latest last
        self._cancels: asyncio.Queue[tuple[int, ...] | None] = asyncio.Queue()
        self.connected = asyncio.Event()
        self.heard_s = asyncio.get_running_loop().time()  # when it last said something here
        self.heartbeat = worker_pb2.Heartbeat()
        self.pairs: tuple[PairFigure, ...] = ()  # how fast its hand-offs are, from the same heartbeat

    @property
    def num_sequences(self) -> int:
        return len(self._owners)

    @contextmanager
    def open(self, courses: Sequence[Course]) -> Iterator[Sequences]:
        """Handles for one attempt, one per course. Those that have not ended on leaving are cancelled at the worker."""
        sequences = Sequences({next(self._handles): course for course in courses})
        self._owners.update(dict.fromkeys(sequences.handles, sequences))
        try:
            yield sequences
        finally:
            self.cancel(sequences, tuple(sequences.live))

    @contextmanager
    def part(self, sequences: Sequences, handle: int) -> Iterator[Sequences]:
        """One of an attempt's handles by itself; cancelled on leaving, if it has not ended."""
        parted = self._owners[handle] = sequences.part(handle)
        try:
            yield parted
        finally:
            self.cancel(parted, tuple(parted.live))

    def movable(self) -> list[int]:
        """Sequences that run at the worker and are not being moved, the oldest first."""
        return [h for h, owner in self._owners.items() if h in owner.started and h not in self._moves]

    def courses(self) -> dict[int, Course]:
        """Of those sequences, by handle."""
        return {handle: self._owners[handle].courses[handle] for handle in self.movable()}

    def size(self, handle: int) -> RequestSize | None:
        """What another worker must hold to run this sequence to its end; None: not known."""
        return self._owners[handle].courses[handle].size

    def unstarted(self) -> list[int]:
        """Sequences that were asked for, and have not joined the worker's batch."""
        return [handle for handle, owner in self._owners.items() if handle not in owner.started]

    def preempted(self) -> list[int]:
        """Sequences that were to move, had no KV in the worker's batch, and have not drawn a token since."""
        return [handle for handle, course in self.courses().items() if course.is_waiting]

    def give_up(self, handle: int) -> None:
        """Of a worker that leaves: its attempt need not wait for this one any longer."""
        self._owners[handle].events.put_nowait(Failed(Draining.reason, "the worker leaves, and does not run it"))

    def ask_to_move(self, handle: int, target: MemberId | None, patience_s: float) -> Move | None:
        """Tells the attempt that has it. None: it has ended, or is being moved already."""
        owner = self._owners.get(handle)
        if owner is None or handle in self._moves:
            return None
        move = self._moves[handle] = Move(handle, target, patience_s, asyncio.get_running_loop().create_future())
        move.outcome.add_done_callback(lambda _: self._moves.pop(handle))
        owner.events.put_nowait(move)
        return move

    def cancel(self, sequences: Sequences, handles: tuple[int, ...]) -> None:
        """The worker need not go on with these; what it still says about them is dropped."""
        for handle in handles:
            self.release(sequences, handle)
        if handles:
            self._tell(handles)

    def release(self, sequences: Sequences, handle: int) -> None:
        """The worker has ended this one."""
        sequences.live.discard(handle)
        self._owners.pop(handle, None)
        self._doubtful.discard(handle)
        if handle in self._moves:
            self._moves[handle].settle(MoveOutcome.ENDED)

    async def run(self) -> str:
        """Returns why the worker is lost. However it ends, every attempt on it has heard of it then."""
        detail = "this router gave it up"
        try:
            detail = await self._converse_until_lost()
        finally:
            self.connected.clear()
            for sequences in dict.fromkeys(self._owners.values()):
                sequences.events.put_nowait(Lost(detail))
        return detail

    async def _converse_until_lost(self) -> str:
        loop = asyncio.get_running_loop()
        disconnected_at_s = loop.time()
        while True:
            try:
                problem = await self._converse(disconnected_at_s + self._patience.grace_s)
            except grpc.aio.AioRpcError as error:
                problem = f"{error.code().name}: {error.details()}"
                if isinstance(error_from_rpc(error), Unhealthy):
                    return f"it is unhealthy: {error.details()}"
            except TimeoutError:
                problem = f"no sign of life for {self._patience.silence_s} s"
            if self.connected.is_set():
                self.connected.clear()
                self._on_change()
                disconnected_at_s = loop.time()
                _LOG.warning("decode stream broke", extra={"worker": str(self._worker), "problem": problem})
            if problem is _REPLACED:
                return problem
            if await nobody_listens(self._address):
                return f"nobody listens at its address any more ({problem})"
            if loop.time() >= disconnected_at_s + self._patience.grace_s:
                return f"its stream broke and did not come back within {self._patience.grace_s} s ({problem})"
            await asyncio.sleep(_RECONNECT_PAUSE_S)

    async def _converse(self, hello_deadline_s: float) -> str:
        """One connection, from hello to its end. Raises AioRpcError, TimeoutError."""
        loop = asyncio.get_running_loop()
        cancels = self._fresh_cancels()
        call = self._stub.Connect(self._outgoing(cancels))
        silence = Silence(max(0.0, hello_deadline_s - loop.time()))
        try:
            async with asyncio.timeout(None) as patience:
                with waiting(silence, lambda: patience.reschedule(loop.time())):
                    return await self._listen(call, silence)
        finally:
            call.cancel()
            cancels.put_nowait(None)  # a call that ended by itself would read on for ever

    async def _listen(self, call: _Call, silence: Silence) -> str:
        async for message in call:
            self.heard_s = asyncio.get_running_loop().time()
            silence.limit_s = self._patience.silence_s
            silence.begin(self.heard_s)
            is_hello = message.WhichOneof("message") == "hello"
            try:
                checked(message)
            except MalformedMessage as error:
                self._on_malformed(message, error)
                if is_hello:
                    return error.message  # it says hello once: only a new connection brings another
                continue
            if is_hello:
                if message.hello.worker != str(self._worker):
                    return _REPLACED
                self._on_connected()
            else:
                self._on_message(message)
        return "the worker ended the stream"

    def _fresh_cancels(self) -> asyncio.Queue[tuple[int, ...] | None]:
        """A queue for the next connection, with everything that the worker was told: what was on its way when the last
        one broke did not arrive, and a frozen sequence says nothing that would bring it up again."""
        self._cancels = asyncio.Queue()
        if self._told_at_s:
            self._cancels.put_nowait(tuple(self._told_at_s))
        return self._cancels

    def _tell(self, handles: tuple[int, ...]) -> None:
        for handle in handles:
            self._told_at_s.pop(handle, None)
            self._told_at_s[handle] = asyncio.get_running_loop().time()
        while len(self._told_at_s) > _MAX_TOLD:
            del self._told_at_s[next(iter(self._told_at_s))]
        self._cancels.put_nowait(handles)

    async def _outgoing(
        self, cancels: asyncio.Queue[tuple[int, ...] | None]
    ) -> AsyncIterator[worker_pb2.RouterMessage]:
        yield worker_pb2.RouterMessage(hello=worker_pb2.RouterHello(router=str(self._router)))
        while (handles := await cancels.get()) is not None:
            yield worker_pb2.RouterMessage(cancel=worker_pb2.CancelSequences(handles=wire.pack_ids(handles)))

    def _on_connected(self) -> None:
        """What was said while nobody listened may be lost: who stays silent from here on is tried again."""
        self._doubtful = set(self._owners)
        if self._doubtful:
            asyncio.get_running_loop().call_later(self._patience.grace_s, self._give_up_doubtful)
        self.connected.set()
        self._on_change()

    def _give_up_doubtful(self) -> None:
        for sequences in dict.fromkeys(self._owners[handle] for handle in sorted(self._doubtful)):
            sequences.events.put_nowait(Lost("its stream broke, and what it said since did not arrive"))
        self._doubtful.clear()

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
                self.pairs = figures_from_wire(message.heartbeat.pairs)
            case "leaving":
                self._on_leaving(message.leaving.grace_s)

    def _on_malformed(self, message: worker_pb2.WorkerMessage, error: MalformedMessage) -> None:
        """Ends the attempts of the sequences that the message names; all of them if it names none that it should.
        Figures and a drain are ignored: they come again."""
        kind = message.WhichOneof("message") or ""
        self._telemetry.count("tandem_malformed_messages_total", message=kind)
        _LOG.warning("malformed message", extra={"worker": str(self._worker), "problem": error.message})
        if kind not in ("step", "started", "failed"):
            return
        handles = _handles(message)
        for owner in self._owners_of(handles) if handles else list(dict.fromkeys(self._owners.values())):
            owner.events.put_nowait(Failed(error.reason, error.message))

    def _on_step(self, step: worker_pb2.StepOutput) -> None:
        now_s = asyncio.get_running_loop().time()
        for token in tokens_of(step):
            owner = self._owner(token.handle)
            if owner is not None:
                owner.courses[token.handle].drew(now_s)
                owner.events.put_nowait(token)

    def _on_started(self, started: worker_pb2.SequenceStarted) -> None:
        event = Started(
            handles=tuple(started.handles),
            first_tokens=wire.unpack_ids(started.first_token_ids),
            queue_s=started.queue_s,
            kv_bytes=started.kv_bytes,
            transport=started.transport,
            num_cached=started.num_cached,
        )
        for owner in self._owners_of(started.handles):
            owner.events.put_nowait(event)

    def _on_failed(self, failed: worker_pb2.SequenceFailed) -> None:
        for owner in self._owners_of(failed.handles):
            owner.events.put_nowait(Failed(failed.reason, failed.detail))

    def _owners_of(self, handles: Iterable[int]) -> list[Sequences]:
        """Each once, in the order of its first handle."""
        return list(dict.fromkeys(owner for owner in map(self._owner, handles) if owner is not None))

    def _owner(self, handle: int) -> Sequences | None:
        """None: the attempt is no longer current. The worker is told, and again if it goes on (its Start may have come
        after the cancel)."""
        owner = self._owners.get(handle)
        if owner is None:
            self._telemetry.count("tandem_stale_messages_total")
            if asyncio.get_running_loop().time() > self._told_at_s.get(handle, -math.inf) + _RETELL_S:
                self._tell((handle,))
        else:
            self._doubtful.discard(handle)
        return owner


def _handles(message: worker_pb2.WorkerMessage) -> tuple[int, ...]:
    """Those that a malformed message names; none where they cannot be read."""
    match message.WhichOneof("message"):
        case "step" if len(message.step.handles) % wire.ID_BYTES == 0:
            return wire.unpack_ids(message.step.handles)
        case "started":
            return tuple(message.started.handles)
        case "failed":
            return tuple(message.failed.handles)
    return ()
