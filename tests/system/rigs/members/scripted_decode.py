"""A decode worker without a model that speaks the real protocol; its tokens are those of scripted_workers.py."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace

from cluster.errors import HandOffReason, NotFound, TandemError
from cluster.messages import (
    DecodeJob,
    MemberId,
    Role,
    SampledToken,
    SequenceStart,
)
from cluster.protocol import wire
from tandem.enum_words import FINISH_REASONS
from tandem.internal.v1 import worker_pb2, worker_pb2_grpc
from tests.system.rigs.members.scripted_workers import (
    KV_BYTES_PER_TOKEN,
    Context,
    Gate,
    ScriptedWorker,
    Store,
    StreamService,
    sampled,
    traced_job,
)


@dataclass(frozen=True, slots=True)
class Progress:
    """A sequence and the index of its next token."""

    job: DecodeJob
    start: SequenceStart
    index: int


class ScriptedDecode(ScriptedWorker):
    """A worker that decodes, whatever its registered role. Its `tamper` may replace the tokens that it sends: (index,
    token) -> token.
    """

    def __init__(self, name: str, store: Store, incarnation: int = 1, role: Role = Role.DECODE) -> None:
        super().__init__(name, role, incarnation)
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
        self.forgets_with_hello = True  # what it has of a router that connects and has no sequences here
        self.freeze_refusals: list[TandemError] = []
        self.most_frozen = 0
        self.cancelled_handles: set[int] = set()
        self.cancelled = asyncio.Event()
        self.index_changes: list[tuple[int, int]] = []  # (index, index sent instead), once each
        self.running: dict[int, asyncio.Task[None]] = {}
        self.progress: dict[int, Progress] = {}  # of each sequence that makes tokens, by handle
        self.frozen: dict[int, Progress] = {}
        self.before_freezing, self.after_freezing, self.before_thawing = Gate(), Gate(), Gate()
        self.thaw_refusals: list[TandemError] = []
        self._changed = asyncio.Event()
        worker_pb2_grpc.add_DecodeWorkerServicer_to_server(_Decode(self), self.server.grpc)

    async def die(self) -> None:
        for task in self.running.values():
            task.cancel()
        await super().die()

    def lose_messages(self) -> None:
        """Discard the messages that wait to be sent."""
        for stream in self.streams.values():
            while not stream.empty():
                stream.get_nowait()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition. It is checked whenever a job arrives or a sequence advances, freezes, thaws or is
        cancelled."""
        try:
            async with asyncio.timeout(10):
                while not condition():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            at = {handle: progress.index for handle, progress in self.progress.items()}
            frozen, cancelled = sorted(self.frozen), sorted(self.cancelled_handles)
            state = f"{len(self.jobs)} jobs, tokens {at}, runs {sorted(self.running)}, {frozen=}, {cancelled=}"
            raise AssertionError(f"{self.id} did not come to it within 10 s: {state}") from None

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


class _Decode(StreamService):
    def __init__(self, worker: ScriptedDecode) -> None:
        super().__init__(worker)
        self._worker: ScriptedDecode = worker

    async def Start(self, request: worker_pb2.StartRequest, context: Context) -> worker_pb2.StartResponse:
        worker, job = self._worker, traced_job(wire.decode_job_from_wire(request), context)
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

    async def Freeze(self, request: worker_pb2.FreezeRequest, context: Context) -> worker_pb2.FreezeResponse:
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

    async def Thaw(self, request: worker_pb2.ThawRequest, context: Context) -> worker_pb2.ThawResponse:
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

    def on_cancelled(self, handles: tuple[int, ...]) -> None:
        worker = self._worker
        worker.cancelled_handles.update(handles)
        for handle in handles:
            worker.progress.pop(handle, None)
            worker.frozen.pop(handle, None)
            if task := worker.running.pop(handle, None):
                task.cancel()
        worker.cancelled.set()
        worker.changed()

    def on_router_began(self, router: str) -> None:
        worker = self._worker
        had = {start.handle for job in worker.jobs if str(job.router) == router for start in job.sequences}
        for handles in (worker.progress, worker.frozen):
            had |= {handle for handle, progress in handles.items() if str(progress.job.router) == router}
        left = had & (worker.running.keys() | worker.frozen.keys())
        if left and worker.forgets_with_hello:
            self.on_cancelled(tuple(left))

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
