"""The gRPC service of a decode worker. Start adds sequences, Connect streams their tokens, Freeze and Thaw move them.

`on_events` receives the events of the step thread on the event loop and turns them into messages of the routers'
streams. This module also owns the drain of the worker. It never touches a block.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import replace

import grpc

from cluster import holders
from cluster.errors import (
    DrainIncomplete,
    Draining,
    DuplicateRequest,
    HandOffFailed,
    InvalidRequest,
    TandemError,
    Unavailable,
    Unhealthy,
)
from cluster.messages import DecodeJob, MemberId
from cluster.observe.telemetry import Telemetry
from cluster.observe.trace_context import trace_parent_of
from cluster.outstanding_work import PromptWork, SequenceOutlook
from cluster.protocol import wire
from cluster.protocol.hashing import NewChain
from cluster.protocol.received import checked
from decode_worker.handoffs import Exports, FreezeOrder, Imports
from decode_worker.live_handles import Arrival, LiveHandles
from decode_worker.step_spans import StepSpans
from decode_worker.streams import (
    RouterStreams,
    WorkReports,
    failed_message,
    leaving_message,
    started_message,
    step_message,
)
from engine.grammar.compiled_grammars import CompiledGrammars
from engine.scheduling import commands
from engine.scheduling.limits import SchedulerLimits
from engine.steps.step_loop import StepLoop
from kvtransfer.exporter.exporter import Exporter
from kvtransfer.importer.importer import ImportedBlocks, Importer
from tandem.internal.v1 import worker_pb2, worker_pb2_grpc


class DecodeService(worker_pb2_grpc.DecodeWorkerServicer):
    """The service of a decode worker. All methods and callbacks run on the worker's event loop."""

    def __init__(
        self,
        *,
        member: MemberId,
        steps: StepLoop[commands.Command, commands.Event],
        importer: Importer,
        exporter: Exporter,
        vocab_size: int,
        limits: SchedulerLimits,
        handoff_ids: Iterator[int],
        hash_key: bytes,
        new_chain: NewChain,
        wire_dtype: str,
        stream_grace_s: float,
        grammars: CompiledGrammars,
        refuse_if_unhealthy: Callable[[], None],
        telemetry: Telemetry,
        spans: StepSpans | None = None,  # None: this worker sends no spans
    ) -> None:
        self._refuse_if_unhealthy = refuse_if_unhealthy
        self._grammars = grammars
        self._member = member
        self._steps = steps
        self._vocab_size = vocab_size
        self._limits, self._importer = limits, importer
        self._telemetry = telemetry
        self._spans = spans
        self._streams = RouterStreams(grace_s=stream_grace_s, on_gone=self._on_router_gone)
        self._reports = WorkReports(self._streams)
        self.outstanding = self._reports.outstanding
        self.imports = Imports(
            importer=importer,
            hash_key=hash_key,
            new_chain=new_chain,
            wire_dtype=wire_dtype,
            handoff_ids=handoff_ids,
            vocab_size=vocab_size,
            steps=steps,
            on_admitted=self._on_imported,
            on_failed=self._on_import_failed,
        )
        self.exports = Exports(
            exporter=exporter,
            hash_key=hash_key,
            post=steps.post,
            on_forgotten=self._on_forgotten,
            grace_s=stream_grace_s,
        )
        self._handles = LiveHandles(max_waiting_jobs=limits.max_queue + limits.max_num_seqs)
        self._sequence_ended = asyncio.Event()
        self._leaves_at_s: float | None = None  # by the event loop's clock; None: this worker is not draining
        self._num_local_prefills = 0

    async def Start(
        self, request: worker_pb2.StartRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> worker_pb2.StartResponse:
        job = wire.decode_job_from_wire(request)
        if job.grammar is not None:
            await self._grammars.prepare(job.grammar)
        job = self._checked(job)
        if self._spans is not None:
            job = replace(job, trace_parent=trace_parent_of(context.invocation_metadata()))
        self._handles.add_job(job.router, [s.handle for s in job.sequences], job.tenant, _now_s())
        self.outstanding.add_sequences(job.router, _outlooks(job), _prompt_work(job), _now_s())
        self._telemetry.count("tandem_decode_starts_total", source="local" if job.signed_ticket is None else "handoff")
        if job.signed_ticket is None:
            self._num_local_prefills += 1
            self._follow(job, (sequence.handle for sequence in job.sequences))
            self._steps.post(commands.AdmitLocal(job))
        else:
            self.imports.start(job)
        return worker_pb2.StartResponse()

    async def Freeze(
        self, request: worker_pb2.FreezeRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> worker_pb2.FreezeResponse:
        checked(request)
        self._refuse_if_unhealthy()
        importer = wire.member_from_wire(request.importer)
        if importer == self._member:
            raise InvalidRequest("the sequence already runs on the target; name another worker")
        order = FreezeOrder(wire.member_from_wire(request.router), request.handle, request.attempt, importer)
        frozen = await self.exports.freeze(order)
        return worker_pb2.FreezeResponse(ticket=frozen.signed_ticket, num_output=frozen.num_output)

    async def Thaw(
        self, request: worker_pb2.ThawRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> worker_pb2.ThawResponse:
        checked(request)
        self._refuse_if_unhealthy()
        router = wire.member_from_wire(request.router)
        if request.new_handle in self._handles.of(router):
            raise DuplicateRequest(f"handle {request.new_handle} is in use")
        thawing = self.exports.thaw(router, request.handle, request.new_handle)
        self._handles.add_thawed(router, request.new_handle)
        await thawing
        return worker_pb2.ThawResponse()

    async def Connect(
        self,
        request_iterator: AsyncIterator[worker_pb2.RouterMessage],
        context: grpc.aio.ServicerContext[object, object],
    ) -> AsyncIterator[worker_pb2.WorkerMessage]:
        first = await anext(aiter(request_iterator), None)
        if first is None or first.WhichOneof("message") != "hello":
            raise InvalidRequest("the first message of Connect must be RouterHello")
        checked(first)
        self._refuse_if_unhealthy()
        router = wire.member_from_wire(first.hello.router)
        connection = object()
        stream = self._streams.connect(router, connection)
        reader = asyncio.create_task(self._read(router, request_iterator), name=f"read {router}")
        # If the reader ends, the stream ends too: cancels of this router would otherwise be lost.
        reader.add_done_callback(lambda _: self._streams.disconnect(router, connection))
        left = self._handles.of(router)
        if first.hello.has_no_sequences and left:
            self._telemetry.count("tandem_decode_router_gone_total", reason="began_again")
            self._cancel(router, left)
        try:
            yield worker_pb2.WorkerMessage(hello=worker_pb2.WorkerHello(worker=str(self._member)))
            if self._leaves_at_s is not None:
                yield leaving_message(max(0.0, self._leaves_at_s - _now_s()))
            self._reports.send_to([router])
            async for message in stream.drain(connection):
                yield message
            self._refuse_if_unhealthy()
            if reader.done():
                reader.result()  # raises the error with which it ended
        finally:
            reader.cancel()
            self._streams.disconnect(router, connection)

    def on_events(self, events: tuple[commands.Event, ...]) -> None:
        """Apply the events of the step thread, in order. Answers to `StepLoop.ask` are not among them."""
        for event in events:
            match event:
                case commands.Started():
                    self._on_started(event)
                case commands.StepTokens():
                    self._on_step(event)
                case commands.Failed():
                    self._fail(event.router, event.handles, event.error)
                case commands.Frozen():
                    self.exports.on_frozen(event)
                case commands.FreezeRefused():
                    self.exports.on_freeze_refused(event)
                case commands.Thawed():
                    handle = self.exports.on_thawed(event)
                    self.outstanding.rename_sequence(event.router, handle, event.handle)
                    self._forget(event.router, frozenset({handle}))
                case commands.WaitsForExports(handoff_id, wait):
                    self._importer.report_wait(handoff_id, wait)
                case commands.ThawRefused():
                    self._forget(event.router, frozenset({self.exports.on_thawed(event)}))

    def beat(self, heartbeat: worker_pb2.Heartbeat) -> None:
        """Send every connected router a heartbeat and the work of the other routers here."""
        self._streams.beat(worker_pb2.WorkerMessage(heartbeat=heartbeat))
        self._reports.send_to_all()

    def limit_waiting_jobs(self, max_waiting_jobs: int) -> None:
        """Refuse further jobs while this many wait."""
        self._handles.limit_waiting_jobs(max_waiting_jobs)

    async def drain(self, grace_s: float) -> None:
        """Refuse new jobs and notify every router, now or when it connects, so that it moves sequences that will not
        end in time. Return when no sequence is left and the last tokens are sent. Raises DrainIncomplete."""
        self._leaves_at_s = _now_s() + grace_s
        self._streams.broadcast(leaving_message(grace_s))
        try:
            async with asyncio.timeout(grace_s):
                while len(self._handles):
                    self._sequence_ended.clear()
                    await self._sequence_ended.wait()
                await self._streams.until_all_sent()
        except TimeoutError:
            if not len(self._handles):
                raise DrainIncomplete(
                    f"every sequence has ended, but a router did not receive the last messages within {grace_s:g} s,"
                    " and may start its sequences again elsewhere; raise --drain-grace-s"
                ) from None
            raise DrainIncomplete(
                f"{len(self._handles)} sequence(s) were left after {grace_s:g} s, which their routers start again"
                " elsewhere; raise --drain-grace-s, or add a worker to the pool"
            ) from None

    def owners(self) -> Iterator[str]:
        """Return the live sequences, imports and frozen sequences, as holders of blocks."""
        yield from (holders.sequence(router, handle) for router, handle in self._handles.names())
        yield from self.imports.owners()
        yield from self.exports.owners()

    def end_work(self, _: Unhealthy) -> None:
        """End every stream with the error of `refuse_if_unhealthy`, and cancel the sequences of its router."""
        self._streams.close()

    def figures(self) -> dict[str, float]:
        return {
            "waiting_jobs": float(self._handles.num_waiting_jobs),
            "frozen": float(len(self.exports)),
            "stream_bytes": float(self._streams.waiting_bytes),
            "local_prefills": float(self._num_local_prefills),
            "imports": float(len(self.imports)),
            "outstanding_work": float(len(self.outstanding)),
        }

    async def close(self) -> None:
        self._streams.close()
        self._reports.close()
        await self.imports.close()

    def _checked(self, job: DecodeJob) -> DecodeJob:
        self._refuse_if_unhealthy()
        if self._leaves_at_s is not None:
            raise Draining("this decode worker is draining; try another")
        if self._streams.get(job.router) is None:
            raise Unavailable(f"no stream from {job.router} here; call Connect first")
        if in_use := self._handles.of(job.router).intersection(s.handle for s in job.sequences):
            raise DuplicateRequest(f"handle {min(in_use)} is in use")  # the live sequence of that handle continues
        known = job.prompt_token_ids, *(s.committed_token_ids for s in job.sequences), job.sampling.token_ids
        highest = max(max(token_ids, default=0) for token_ids in known)
        if highest >= self._vocab_size:
            raise InvalidRequest(f"token id {highest} is outside the vocabulary of {self._vocab_size}")
        if job.signed_ticket is not None and len({s.committed_token_ids for s in job.sequences}) > 1:
            raise InvalidRequest("the sequences of one ticket must have the same committed tokens")
        refusal = self._limits.job_refusal(job) or self._handles.refusal(job.tenant)
        if refusal is not None:
            raise refusal  # before any KV is transferred
        return job

    async def _read(self, router: MemberId, messages: AsyncIterator[worker_pb2.RouterMessage]) -> None:
        async for message in messages:
            if checked(message).WhichOneof("message") == "cancel":
                self._cancel(router, frozenset(wire.unpack_ids(message.cancel.handles)))

    def _cancel(self, router: MemberId, handles: frozenset[int]) -> None:
        self.imports.cancel(router, handles)
        self._steps.post(commands.CancelSequences(router, handles))
        self._forget(router, handles)

    def _on_forgotten(self, router: MemberId, handle: int) -> None:
        self._steps.post(commands.CancelSequences(router, frozenset({handle})))
        self._fail(router, (handle,), Unavailable(f"sequence {handle} was frozen, and its router did not thaw it"))

    def _on_router_gone(self, router: MemberId) -> None:
        handles = self._handles.of(router)
        self._telemetry.count("tandem_decode_router_gone_total", reason="stream_ended")
        if handles:
            self._cancel(router, handles)

    def _on_imported(self, job: DecodeJob, imported: ImportedBlocks, cancelled: frozenset[int]) -> None:
        """Store the result of an import whose AdmitImported was just posted. Started will follow."""
        live = [
            (s.handle, first) for s, first in zip(job.sequences, imported.first_tokens, strict=True) if not first.ended
        ]
        for handle, first in live:
            if handle not in cancelled:
                self._follow(job, (handle,))
                arrival = Arrival(
                    first_token_id=first.token_id,
                    queue_s=imported.queue_s,
                    transfer_s=imported.exposed_transfer_s,
                    kv_bytes=imported.kv_bytes,
                    transport=imported.transport,
                )
                self._handles.arrive(job.router, handle, arrival)
        if cancelled:
            self._steps.post(commands.CancelSequences(job.router, cancelled))
        self._forget(job.router, frozenset(s.handle for s in job.sequences) - {handle for handle, _ in live})

    def _on_import_failed(self, job: DecodeJob, error: TandemError) -> None:
        reason = error.handoff_reason if isinstance(error, HandOffFailed) else error.reason
        self._telemetry.count("tandem_decode_import_failed_total", reason=reason)
        self._fail(job.router, tuple(s.handle for s in job.sequences), error)

    def _on_started(self, event: commands.Started) -> None:
        begun = self._handles.begin(event.router, event.handles, _now_s())
        self._telemetry.count("tandem_prefix_cached_tokens_total", event.num_cached)
        if begun:  # else all were cancelled during their first step
            message = started_message(event, begun)
            self._telemetry.observe("tandem_decode_queue_seconds", message.started.queue_s)
            self._streams.send(event.router, message)

    def _on_step(self, event: commands.StepTokens) -> None:
        by_router: dict[MemberId, list[commands.SequenceToken]] = {}
        now_s = _now_s()
        if self._spans is not None:
            self._spans.record(event)
        for token in event.tokens:
            by_router.setdefault(token.router, []).append(token)
            self.outstanding.record_output(token.router, token.handle, token.index + 1, now_s)
        for router, tokens in by_router.items():
            self._streams.send(router, step_message(event.step, tokens))
            self._forget(router, frozenset(t.handle for t in tokens if t.token.finish_reason is not None))
        self._telemetry.count("tandem_decode_tokens_total", len(event.tokens))

    def _follow(self, job: DecodeJob, handles: Iterable[int]) -> None:
        """Send spans of the steps of these sequences, which join the batch now, if their request is sampled."""
        if self._spans is not None:
            self._spans.follow(job.trace_parent, job.router, handles)

    def _fail(self, router: MemberId, handles: tuple[int, ...], error: TandemError) -> None:
        self._streams.send(router, failed_message(handles, error))
        self._forget(router, frozenset(handles))

    def _forget(self, router: MemberId, handles: frozenset[int]) -> None:
        self.exports.forget(router, handles)
        if self._spans is not None:
            self._spans.end(router, handles)
        self._handles.remove(router, handles, _now_s())
        self.outstanding.remove_sequences(router, handles, _now_s())
        self._sequence_ended.set()


def _outlooks(job: DecodeJob) -> dict[int, SequenceOutlook]:
    max_tokens = job.stops.max_tokens
    return {
        sequence.handle: SequenceOutlook(
            num_prompt=len(job.prompt_token_ids),
            max_tokens=max_tokens,
            num_expected=job.num_expected_output or max_tokens,
            num_output=len(sequence.committed_token_ids),
        )
        for sequence in job.sequences
    }


def _prompt_work(job: DecodeJob) -> PromptWork | None:
    """Return the work of this worker before the first token of the job; None: it imports the KV."""
    if job.signed_ticket is not None:
        return None
    num_tokens = len(job.prompt_token_ids) + len(job.sequences[0].committed_token_ids)
    return PromptWork.of(num_tokens, job.num_expected_cached)


def _now_s() -> float:
    """Return the time of the event loop's clock."""
    return asyncio.get_running_loop().time()
