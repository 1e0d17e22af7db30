"""Workers without a model that speak the real protocol: each token is a function of prompt, seed and index.

A worker that takes over continues exactly where another stopped, so a test sees at once whether a token was lost,
repeated or changed. Gates hold a worker at a named point; `die` ends it as a killed process ends: its port closed, its
calls broken.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import grpc

from cluster.errors import HandOffReason, NotFound, TandemError, Unavailable
from cluster.member import Capacity, Member, MemberState
from cluster.messages import (
    DecodeJob,
    FinishReason,
    LayoutFingerprint,
    LinkSpeed,
    MemberId,
    PrefillJob,
    Role,
    SampledToken,
    SequenceStart,
    TokenLogprobs,
    TokenStops,
)
from cluster.observe.telemetry import Telemetry
from cluster.protocol import wire
from cluster.protocol.wire import link_speeds_to_wire, service_times_to_wire
from cluster.service_times import ServiceTimes
from cluster.serving.serving import GrpcServer
from tandem.enum_words import FINISH_REASONS
from tandem.internal.v1 import worker_pb2, worker_pb2_grpc

_Context = Any
FINGERPRINT = LayoutFingerprint("weights", "config", "float32", "table")
KV_BYTES_PER_TOKEN = 100
_HEARTBEAT_S = 0.05


def scripted_token(prompt: Sequence[int], seed: int, index: int) -> int:
    """Return any token except 0, the demo model's EOS."""
    return 1 + (sum(prompt) * 7 + seed % 9973 + index * 31) % 1000


def sampled(prompt: Sequence[int], seed: int, index: int, stops: TokenStops, num_logprobs: int | None) -> SampledToken:
    token_id = scripted_token(prompt, seed, index)
    finish_reason = None
    if token_id in stops.stop_token_ids and index + 1 > stops.min_tokens:
        finish_reason = FinishReason.STOP
    elif index + 1 >= stops.max_tokens:
        finish_reason = FinishReason.LENGTH
    logprobs = None if num_logprobs is None else TokenLogprobs(token_id, -0.5, ((token_id, -0.5),) * num_logprobs)
    return SampledToken(token_id, logprobs, finish_reason)


class Gate:
    """A gate that is open until it is closed. It counts the tasks that wait."""

    def __init__(self) -> None:
        self._open = asyncio.Event()
        self._open.set()
        self.reached = asyncio.Event()

    def close(self) -> None:
        self._open.clear()
        self.reached.clear()

    def open(self) -> None:
        self._open.set()

    async def passed(self) -> None:
        self.reached.set()
        await self._open.wait()


@dataclass(frozen=True, slots=True)
class Progress:
    """A sequence and the index of its next token."""

    job: DecodeJob
    start: SequenceStart
    index: int


@dataclass(slots=True)
class Store:
    """Replaces the data of a real hand-off: which first tokens belong to which ticket."""

    finished: dict[bytes, asyncio.Future[tuple[SampledToken, ...]]] = field(default_factory=dict)


class ScriptedWorker:
    """A gRPC server with one incarnation. `restart` gives the same address to the next incarnation."""

    def __init__(self, name: str, role: Role, incarnation: int = 1) -> None:
        self.id = MemberId(name, f"{name}-{incarnation}")
        self.role = role
        self.state = MemberState.READY
        self.fingerprint = FINGERPRINT
        self.capacity: Capacity | None = None
        self.links: tuple[LinkSpeed, ...] = ()  # sent in its heartbeats, as the service times
        self.service_times: ServiceTimes | None = None
        self.drained = asyncio.Event()
        self.door = Gate()  # of every new call, health checks too
        self.server = GrpcServer(
            service_names=["tandem.internal.v1.Worker"], telemetry=Telemetry(), interceptors=[_Door(self.door)]
        )
        self.address = ""
        worker_pb2_grpc.add_WorkerServicer_to_server(_About(self), self.server.grpc)

    @property
    def member(self) -> Member:
        return Member(
            id=self.id,
            role=self.role,
            address=self.address,
            model="demo_model",
            state=self.state,
            fingerprint=self.fingerprint,
            transports=("tcp",),
            capacity=self.capacity,
        )

    async def start(self, port: int = 0) -> None:
        self.address = f"127.0.0.1:{self.server.bind('127.0.0.1', port)}"
        await self.server.start()
        await self.server.set_ready(True)

    def heartbeat(self, step: int) -> worker_pb2.Heartbeat:
        times = self.service_times
        return worker_pb2.Heartbeat(
            step=step,
            free_blocks=10,
            links=link_speeds_to_wire(self.links),
            service_times=service_times_to_wire(times) if times is not None else None,
        )

    async def die(self) -> None:
        await self.server.stop(0)

    def freeze(self) -> None:
        """Behave as a stopped process, which listens and sends nothing. Calls in progress wait at its gates."""
        self.door.close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.die()


class _Door(grpc.aio.ServerInterceptor):
    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        await self._gate.passed()
        return await continuation(handler_call_details)


class ScriptedPrefill(ScriptedWorker):
    def __init__(self, name: str, store: Store, incarnation: int = 1) -> None:
        super().__init__(name, Role.PREFILL, incarnation)
        self.store = store
        self.jobs: list[PrefillJob] = []
        self.refusals: list[TandemError] = []  # raised one by one instead of accepting
        self.before_accepting = Gate()
        self.before_first_tokens = Gate()
        self.beats: asyncio.Queue[int] = asyncio.Queue()  # heartbeats that routers have been sent
        self.cancelled = asyncio.Event()
        self.abandoned: asyncio.Queue[bytes] = asyncio.Queue()
        self.prefill_s = 0.0
        self.num_cached = 0
        worker_pb2_grpc.add_PrefillWorkerServicer_to_server(_Prefill(self), self.server.grpc)


class _Prefill(worker_pb2_grpc.PrefillWorkerServicer):
    def __init__(self, worker: ScriptedPrefill) -> None:
        self._worker = worker

    async def Heartbeats(self, request: worker_pb2.HeartbeatsRequest, context: _Context) -> AsyncIterator[Any]:
        for step in itertools.count():
            await self._worker.door.passed()
            yield self._worker.heartbeat(step)
            self._worker.beats.put_nowait(step)
            await asyncio.sleep(_HEARTBEAT_S)

    async def Prefill(self, request: worker_pb2.PrefillRequest, context: _Context) -> AsyncIterator[Any]:
        worker, job = self._worker, wire.prefill_job_from_wire(request)
        worker.jobs.append(job)
        if worker.refusals:
            raise worker.refusals.pop(0)
        try:
            await worker.before_accepting.passed()
            ticket = f"{worker.id} {job.request_id} {job.attempt}".encode() if job.importer is not None else b""
            finished = worker.store.finished[ticket] = asyncio.get_running_loop().create_future()
            yield worker_pb2.PrefillEvent(accepted=worker_pb2.PrefillAccepted(ticket=ticket))
            await worker.before_first_tokens.passed()
            tokens = _first_tokens(job)
            finished.set_result(tokens)
            first_tokens = wire.first_tokens_to_wire(
                tokens, queue_s=0.0, prefill_s=worker.prefill_s, num_cached=worker.num_cached
            )
            yield worker_pb2.PrefillEvent(first_tokens=first_tokens)
        except asyncio.CancelledError:
            worker.cancelled.set()
            raise

    async def Abandon(self, request: worker_pb2.AbandonRequest, context: _Context) -> worker_pb2.AbandonResponse:
        self._worker.abandoned.put_nowait(request.ticket)
        return worker_pb2.AbandonResponse()


def _first_tokens(job: PrefillJob) -> tuple[SampledToken, ...]:
    prompt = job.token_ids[: len(job.token_ids) - job.num_committed]
    return tuple(sampled(prompt, seed, job.num_committed, job.stops, job.sampling.num_logprobs) for seed in job.seeds)


class ScriptedDecode(ScriptedWorker):
    """A decode worker whose `tamper` may replace the tokens that it sends: (index, token) -> token."""

    def __init__(self, name: str, store: Store, incarnation: int = 1) -> None:
        super().__init__(name, Role.DECODE, incarnation)
        self.store = store
        self.jobs: list[DecodeJob] = []
        self.refusals: list[TandemError] = []
        self.handoff_failures: list[str] = []  # reasons, one per attempt with a ticket
        self.broken_with: set[str] = set()  # prefill workers whose KV never comes here
        self.started = asyncio.Event()  # a job came
        self.before_taking = Gate()  # a job that came, by its Start
        self.transfer = Gate()
        self.pause_at: int | None = None  # no token from this index on, until resumed
        self.paused = asyncio.Event()
        self.resumed = asyncio.Event()
        self.first_token_offset = 0
        self.num_first_tokens_kept_back = 0
        self.num_starts_lost = 0  # messages that sequences have begun, which do not arrive
        self.freeze_refusals: list[TandemError] = []
        self.most_frozen = 0
        self.cancelled_handles: set[int] = set()
        self.cancelled = asyncio.Event()
        self.index_changes: list[tuple[int, int]] = []  # (index, index sent instead), once each
        self.voice = Gate()  # closed: says nothing, no heartbeat either, as a stopped process
        self.streams: dict[str, asyncio.Queue[worker_pb2.WorkerMessage | None]] = {}
        self.running: dict[int, asyncio.Task[None]] = {}
        self.progress: dict[int, Progress] = {}  # of each sequence that makes tokens, by handle
        self.frozen: dict[int, Progress] = {}
        self.before_freezing, self.after_freezing, self.before_thawing = Gate(), Gate(), Gate()
        self.thaw_refusals: list[TandemError] = []
        self.is_deaf = False  # what routers say on its streams is lost
        self._changed = asyncio.Event()
        worker_pb2_grpc.add_DecodeWorkerServicer_to_server(_Decode(self), self.server.grpc)

    async def die(self) -> None:
        for task in self.running.values():
            task.cancel()
        await super().die()

    def freeze(self) -> None:
        super().freeze()
        self.voice.close()

    def leave(self, grace_s: float) -> None:
        """Announce the drain to every router. Present work continues."""
        leaving = worker_pb2.WorkerMessage(leaving=worker_pb2.WorkerLeaving(grace_s=grace_s))
        for stream in self.streams.values():
            stream.put_nowait(leaving)

    def break_streams(self) -> None:
        """End every connection. The sequences continue."""
        for stream in self.streams.values():
            stream.put_nowait(None)

    def lose_messages(self) -> None:
        """Discard the messages that wait to be sent."""
        for stream in self.streams.values():
            while not stream.empty():
                stream.get_nowait()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition. It is checked whenever a job arrives or a sequence advances, freezes, thaws or is
        cancelled."""
        async with asyncio.timeout(10):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    def changed(self) -> None:
        self._changed.set()

    def send(self, router: MemberId, message: worker_pb2.WorkerMessage) -> None:
        self.streams[str(router)].put_nowait(message)

    async def sequence(self, job: DecodeJob, start: SequenceStart, first: SampledToken | None) -> None:
        """Run one sequence, one token at a time."""
        await self.go_on(Progress(job, start, len(start.committed_token_ids) + (first is not None)))

    async def go_on(self, progress: Progress) -> None:
        job, start, index = progress.job, progress.start, progress.index
        self.progress[start.handle] = progress
        while True:
            if self.pause_at is not None and index >= self.pause_at:
                self.paused.set()
                await self.resumed.wait()
            token = sampled(job.prompt_token_ids, start.seed, index, job.stops, job.sampling.num_logprobs)
            self.send(job.router, worker_pb2.WorkerMessage(step=self._step(start.handle, index, token)))
            if token.finish_reason is not None:
                del self.progress[start.handle]
                self.changed()
                return
            index += 1
            self.progress[start.handle] = Progress(job, start, index)
            self.changed()
            await asyncio.sleep(0)  # gives the loop to the others, as a step would

    def _step(self, handle: int, index: int, token: SampledToken) -> worker_pb2.StepOutput:
        change = next((change for change in self.index_changes if change[0] == index), None)
        if change is not None:
            self.index_changes.remove(change)
        step = worker_pb2.StepOutput(
            step=index,
            handles=wire.pack_ids([handle]),
            token_ids=wire.pack_ids([token.token_id]),
            indices=wire.pack_ids([index if change is None else change[1]]),
        )
        if token.logprobs is not None:
            step.logprobs.append(wire.logprobs_to_wire(token.logprobs))
        if token.finish_reason is not None:
            finish_reason = FINISH_REASONS.number(token.finish_reason)
            step.ends.append(worker_pb2.SequenceEnd(handle=handle, finish_reason=finish_reason))
        return step


class _Decode(worker_pb2_grpc.DecodeWorkerServicer):
    def __init__(self, worker: ScriptedDecode) -> None:
        self._worker = worker

    async def Start(self, request: worker_pb2.StartRequest, context: _Context) -> worker_pb2.StartResponse:
        worker, job = self._worker, wire.decode_job_from_wire(request)
        worker.jobs.append(job)
        worker.started.set()
        worker.changed()
        if worker.refusals:
            raise worker.refusals.pop(0)
        await worker.before_taking.passed()
        task = asyncio.create_task(self._serve(job))
        for sequence in job.sequences:
            worker.running[sequence.handle] = task
        return worker_pb2.StartResponse()

    async def Connect(self, request_iterator: AsyncIterator[Any], context: _Context) -> AsyncIterator[Any]:
        worker = self._worker
        hello = (await anext(aiter(request_iterator))).hello
        outgoing = worker.streams.setdefault(hello.router, asyncio.Queue())
        reader = asyncio.create_task(self._read(request_iterator))
        try:
            await worker.voice.passed()
            yield worker_pb2.WorkerMessage(hello=worker_pb2.WorkerHello(worker=str(worker.id)))
            while True:
                await worker.voice.passed()
                message = await _or_heartbeat(outgoing, worker)
                if message is None:
                    raise Unavailable("the connection is told to break")
                yield message
        finally:
            reader.cancel()

    async def Freeze(self, request: worker_pb2.FreezeRequest, context: _Context) -> worker_pb2.FreezeResponse:
        worker = self._worker
        await worker.before_freezing.passed()
        if worker.freeze_refusals:
            raise worker.freeze_refusals.pop(0)
        progress = worker.progress.pop(request.handle, None)
        if progress is None:
            raise NotFound("it does not decode here")
        worker.running.pop(request.handle).cancel()
        worker.frozen[request.handle] = progress
        worker.most_frozen = max(worker.most_frozen, len(worker.frozen))
        worker.changed()
        ticket = f"{worker.id} {request.handle} {request.attempt} for {request.importer}".encode()
        job, start = progress.job, progress.start
        last = sampled(job.prompt_token_ids, start.seed, progress.index - 1, job.stops, None)
        worker.store.finished[ticket] = asyncio.get_running_loop().create_future()
        worker.store.finished[ticket].set_result((last,))
        await worker.after_freezing.passed()
        return worker_pb2.FreezeResponse(ticket=ticket, num_output=progress.index)

    async def Thaw(self, request: worker_pb2.ThawRequest, context: _Context) -> worker_pb2.ThawResponse:
        worker = self._worker
        await worker.before_thawing.passed()
        if worker.thaw_refusals:
            raise worker.thaw_refusals.pop(0)
        progress = worker.frozen.pop(request.handle, None)
        if progress is None:
            raise NotFound("it is not frozen here")
        progress = replace(progress, start=replace(progress.start, handle=request.new_handle))
        worker.running[request.new_handle] = asyncio.create_task(worker.go_on(progress))
        return worker_pb2.ThawResponse()

    async def _read(self, messages: AsyncIterator[Any]) -> None:
        async for message in messages:
            if self._worker.is_deaf:
                continue
            handles = wire.unpack_ids(message.cancel.handles)
            self._worker.cancelled_handles.update(handles)
            for handle in handles:
                self._worker.progress.pop(handle, None)
                self._worker.frozen.pop(handle, None)
                if task := self._worker.running.pop(handle, None):
                    task.cancel()
            self._worker.cancelled.set()
            self._worker.changed()

    async def _serve(self, job: DecodeJob) -> None:
        """Run a job from its ticket to its last token."""
        worker = self._worker
        handles = [sequence.handle for sequence in job.sequences]
        firsts: tuple[SampledToken | None, ...] = (None,) * len(handles)
        if job.signed_ticket is not None:
            firsts = await worker.store.finished[job.signed_ticket]
            await worker.transfer.passed()
            if job.signed_ticket.decode().partition("@")[0] in worker.broken_with:
                worker.handoff_failures.insert(0, HandOffReason.READ_FAILED)
            if worker.handoff_failures:
                reason = worker.handoff_failures.pop(0)
                failed = worker_pb2.SequenceFailed(handles=handles, reason=reason, detail="told to")
                worker.send(job.router, worker_pb2.WorkerMessage(failed=failed))
                return
        pairs = zip(job.sequences, firsts, strict=True)
        live = [(s, first) for s, first in pairs if first is None or first.finish_reason is None]
        if not live:
            return
        started = worker_pb2.SequenceStarted(handles=[s.handle for s, _ in live], transport="local")
        if job.signed_ticket is not None:
            named = [f.token_id + worker.first_token_offset for _, f in live if f]
            started.first_token_ids = wire.pack_ids(named[worker.num_first_tokens_kept_back :])
            started.transport, started.kv_bytes = "tcp", KV_BYTES_PER_TOKEN * len(job.prompt_token_ids)
        worker.first_token_offset = worker.num_first_tokens_kept_back = 0
        if worker.num_starts_lost:
            worker.num_starts_lost -= 1
        else:
            worker.send(job.router, worker_pb2.WorkerMessage(started=started))
        async with asyncio.TaskGroup() as sequences:
            for start, first in live:
                worker.running[start.handle] = sequences.create_task(worker.sequence(job, start, first))


async def _or_heartbeat(
    outgoing: "asyncio.Queue[worker_pb2.WorkerMessage | None]", worker: ScriptedWorker
) -> worker_pb2.WorkerMessage | None:
    try:
        async with asyncio.timeout(_HEARTBEAT_S):
            return await outgoing.get()
    except TimeoutError:
        return worker_pb2.WorkerMessage(heartbeat=worker.heartbeat(step=1))


class _About(worker_pb2_grpc.WorkerServicer):
    def __init__(self, worker: ScriptedWorker) -> None:
        self._worker = worker

    async def Inspect(self, request: worker_pb2.InspectRequest, context: _Context) -> worker_pb2.InspectResponse:
        return worker_pb2.InspectResponse(member=str(self._worker.id), blocks={"free": 10}, figures={"running": 2.0})

    async def DrainWorker(
        self, request: worker_pb2.DrainWorkerRequest, context: _Context
    ) -> worker_pb2.DrainWorkerResponse:
        self._worker.state = replace(self._worker.member, state=MemberState.DRAINING).state
        self._worker.drained.set()
        return worker_pb2.DrainWorkerResponse()
