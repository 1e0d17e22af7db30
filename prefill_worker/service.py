"""The gRPC service of a prefill worker: one Prefill call is one attempt.

Owns the calls in progress. `on_events` receives the events of the step thread on the event loop; it passes sealed
blocks to the exporter, and first tokens to the call that waits for them. Never touches a block.

`CacheEventPublisher` owns the subscriptions of routers to this worker's cache events. Each has at most one command at a
time at the step thread, which answers with all changes since the last answer. A slow subscriber therefore gets fewer,
larger messages, and no queue grows.
"""

import asyncio
import itertools
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc

from cluster import holders
from cluster.auth.keys import ClusterKeys
from cluster.errors import Draining, HandOffReason, InvalidRequest, Overloaded, QueueFull, Unhealthy
from cluster.fair_queue import has_place
from cluster.messages import CacheEvents, MemberId, PrefillJob
from cluster.observe.telemetry import Telemetry
from cluster.outstanding_work import OutstandingWork, PromptWork
from cluster.protocol import report_wire, tickets, wire
from cluster.protocol.hashing import hash_prompt
from cluster.protocol.received import checked
from cluster.service_times import ServiceRate
from engine.grammar.compiled_grammars import CompiledGrammars
from engine.scheduling import cache_commands, commands
from engine.scheduling.commands import Release
from engine.steps.questions import StepInbox
from engine.steps.step_loop import StepLoop
from kvtransfer.exporter.exporter import Exporter, FirstToken, TailBlock
from prefill_worker.prefixes.prefix_pulls import PrefixPulls
from prefill_worker.prefixes.tiers import PrefixTiers
from tandem.internal.v1 import worker_pb2, worker_pb2_grpc

_Outcome = commands.ExportFinished | commands.ExportFailed
Result = TypeVar("Result")
_MIN_INTERVAL_S = 0.2  # between two messages of one subscription; changes in between are merged into one message
_MAX_SUBSCRIBERS = 64


class CacheEventPublisher:
    def __init__(self, member: MemberId, steps: StepInbox[commands.Command]) -> None:
        self._member = member
        self._steps = steps
        self._ids = itertools.count()
        self._asking: set[asyncio.Task[cache_commands.CacheEventsReady]] = set()  # one for each subscriber that waits
        self._closed = asyncio.Event()
        self._num_subscribers = 0

    async def subscribe(
        self, request: worker_pb2.SubscribeCacheEventsRequest
    ) -> AsyncGenerator[worker_pb2.CacheEvents, None]:
        """Yield messages until the subscriber cancels or the worker leaves. Raises Draining, Overloaded."""
        if self._num_subscribers >= _MAX_SUBSCRIBERS:
            raise Overloaded(f"this worker has {_MAX_SUBSCRIBERS} subscribers to its cache events, the most it allows")
        self._num_subscribers += 1
        try:
            since = request.since if request.member == str(self._member) else None
            while not self._closed.is_set():
                events = await self._next(since)
                for message in report_wire.cache_events_to_wire(events):
                    message.member = str(self._member)
                    yield message
                since = events.next_number
                await self._pause()
            raise Draining("this worker is draining")
        finally:
            self._num_subscribers -= 1

    def close(self) -> None:
        """End every subscription with Draining."""
        self._closed.set()
        for asking in self._asking:
            asking.cancel()

    async def _next(self, since: int | None) -> CacheEvents:
        """Wait for the next events and return them. Raises Draining when the worker leaves first."""
        subscriber_id = next(self._ids)
        asking = asyncio.create_task(self._steps.ask(cache_commands.AwaitCacheEvents(subscriber_id, since)))
        self._asking.add(asking)
        try:
            await asyncio.wait([asking])
            if asking.cancelled():
                raise Draining("this worker is draining")
            return asking.result().events
        finally:
            self._asking.discard(asking)
            if not asking.done() or asking.cancelled():
                asking.cancel()
                self._steps.post(cache_commands.CancelCacheEvents(subscriber_id))

    async def _pause(self) -> None:
        try:
            async with asyncio.timeout(_MIN_INTERVAL_S):
                await self._closed.wait()
        except TimeoutError:
            pass


@dataclass(slots=True)
class _Call:
    """An attempt in progress. It exists for the duration of its Prefill call."""

    job: PrefillJob
    accepted: asyncio.Future[bytes]  # the signed ticket; empty without an importer
    outcome: asyncio.Future[_Outcome]


class PrefillService(worker_pb2_grpc.PrefillWorkerServicer):
    """The service of a prefill worker. All methods and callbacks run on the worker's event loop."""

    def __init__(
        self,
        *,
        steps: StepLoop[commands.Command, commands.Event],
        exporter: Exporter,
        pulls: PrefixPulls | None,  # None: this worker pulls no prefixes
        tiers: PrefixTiers | None,  # None: evicted blocks are lost
        cache_events: CacheEventPublisher,
        outstanding: OutstandingWork,
        vocab_size: int,
        max_calls: int,  # at once, including calls that wait for a pull or a fetch
        keys: ClusterKeys,
        grammars: CompiledGrammars,
        refuse_if_unhealthy: Callable[[], None],
        telemetry: Telemetry,
    ) -> None:
        self._refuse_if_unhealthy = refuse_if_unhealthy
        self._steps = steps
        self._exporter = exporter
        self._pulls = pulls
        self._tiers = tiers
        self._cache_events = cache_events
        self._outstanding = outstanding
        self._vocab_size = vocab_size
        self.max_calls = max_calls
        self._rate = ServiceRate()
        self._keys, self._hash_key = keys, keys.hash_key
        self._grammars = grammars
        self._telemetry = telemetry
        self._calls: dict[bytes, _Call] = {}
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    async def Prefill(
        self, request: worker_pb2.PrefillRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> AsyncIterator[worker_pb2.PrefillEvent]:
        job = wire.prefill_job_from_wire(request)
        if job.grammar is not None:
            await self._grammars.prepare(job.grammar)
        job = self._checked(job)
        ticket_id = secrets.token_bytes(16)
        call = self._open(ticket_id, job)
        try:
            chain = self._tiers.chain(job) if self._tiers is not None else None
            reads_caches = job.num_prompt_logprobs is None
            if self._tiers is not None and chain is not None and reads_caches:
                await _unless_ended(call, self._tiers.fetch(job, chain))
            pulls = self._pulls if reads_caches and job.prefix_sources else None
            num_pulled = 0 if pulls is None else await _unless_ended(call, pulls.pull(job))
            self._steps.post(commands.AdmitExport(ticket_id, job))
            # Shielded: cancelling this wait must not cancel the future, which would look like the attempt's end.
            ticket = await asyncio.shield(call.accepted)
            yield worker_pb2.PrefillEvent(accepted=worker_pb2.PrefillAccepted(ticket=ticket))
            outcome = await asyncio.shield(call.outcome)
            if isinstance(outcome, commands.ExportFailed):
                raise outcome.error
            if self._tiers is not None and chain is not None:
                self._tiers.store(chain)
            for logprobs in outcome.prompt_logprobs:
                yield worker_pb2.PrefillEvent(prompt_logprobs=wire.prompt_logprobs_to_wire(logprobs))
            num_pulled = min(num_pulled, outcome.num_cached)  # pulled blocks may have been evicted since
            first_tokens = wire.first_tokens_to_wire(
                outcome.tokens,
                queue_s=outcome.queue_s,
                prefill_s=outcome.prefill_s,
                num_cached=outcome.num_cached - num_pulled,
                num_pulled=num_pulled,
                chunks=outcome.chunks,
            )
            yield worker_pb2.PrefillEvent(first_tokens=first_tokens)
        finally:
            self._close(ticket_id, call)

    async def Abandon(
        self, request: worker_pb2.AbandonRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> worker_pb2.AbandonResponse:
        ticket = tickets.read(checked(request).ticket, self._keys)
        self._exporter.fail(ticket.ticket_id, reason=HandOffReason.CANCELLED, detail="the router abandoned the ticket")
        return worker_pb2.AbandonResponse()

    def on_events(self, events: tuple[commands.Event, ...]) -> None:
        """Apply the events of the step thread, in order. Answers to `StepLoop.ask` are not among them."""
        for event in events:
            match event:
                case commands.ExportAccepted():
                    self._on_accepted(event)
                case commands.ExportRefused():
                    self._on_refused(event)
                case commands.Sealed():
                    self._exporter.seal(
                        event.ticket_id,
                        first_index=event.first_index,
                        block_ids=event.block_ids,
                        unverified=event.unverified,
                    )
                case commands.ExportFinished():
                    self._on_finished(event)
                case commands.ExportFailed():
                    self._on_failed(event)

    @property
    def num_calls(self) -> int:
        return len(self._calls)

    def owners(self) -> Iterator[str]:
        """Return the names of the calls in progress, as holders of blocks."""
        return map(holders.ticket, self._calls)

    def end_work(self, error: Unhealthy) -> None:
        """End every call with this error, and cancel its job on the step thread."""
        for ticket_id, call in self._calls.items():
            self._steps.post(commands.CancelExport(ticket_id))
            self._exporter.fail(ticket_id, reason=HandOffReason.PREFILL_FAILED, detail=error.message)
            if not call.accepted.done():
                call.accepted.set_exception(error)
                call.accepted.exception()  # retrieved: the outcome carries the error
            if not call.outcome.done():
                call.outcome.set_result(commands.ExportFailed(ticket_id, error))

    async def drain(self) -> None:
        """Refuse new calls, refuse jobs that have not started, and wait until the present calls have ended."""
        self._draining = True
        self._steps.post(commands.DrainExports())
        await self._idle.wait()

    def _checked(self, job: PrefillJob) -> PrefillJob:
        self._refuse_if_unhealthy()
        if self._draining:
            raise Draining("this prefill worker is draining; try another")
        if not has_place(job.tenant, [call.job.tenant for call in self._calls.values()], self.max_calls):
            self._telemetry.count("tandem_prefill_refused_total", reason=QueueFull.reason)
            raise QueueFull(
                f"{len(self._calls)} prefills wait or run here, the maximum for --max-queue and --max-num-seqs: try"
                " later",
                retry_after_s=self._rate.retry_after_s(),
            )
        highest = max(max(job.token_ids), max(job.sampling.token_ids, default=0))
        if highest >= self._vocab_size:
            raise InvalidRequest(f"token id {highest} is outside the vocabulary of {self._vocab_size}")
        return job

    def _open(self, ticket_id: bytes, job: PrefillJob) -> _Call:
        loop = asyncio.get_running_loop()
        call = self._calls[ticket_id] = _Call(job, loop.create_future(), loop.create_future())
        if job.router is not None:
            work = PromptWork.of(len(job.token_ids), job.num_expected_cached)
            self._outstanding.add_export(ticket_id, job.router, work, len(job.seeds), loop.time())
        self._idle.clear()
        return call

    def _waiting(self, ticket_id: bytes) -> _Call | None:
        """Return the call, or None if it has its outcome or has ended."""
        call = self._calls.get(ticket_id)
        return None if call is None or call.outcome.done() else call

    def _close(self, ticket_id: bytes, call: _Call) -> None:
        """Remove a call that has ended. If its attempt is unfinished, cancel the job and fail its ticket."""
        del self._calls[ticket_id]
        self._outstanding.remove_export(ticket_id, asyncio.get_running_loop().time())
        if not self._calls:
            self._idle.set()
        if not call.outcome.done():
            self._steps.post(commands.CancelExport(ticket_id))
            self._exporter.fail(ticket_id, reason=HandOffReason.CANCELLED, detail="the prefill was cancelled")
        else:
            self._exporter.expect_soon(ticket_id)

    def _on_accepted(self, event: commands.ExportAccepted) -> None:
        call = self._waiting(event.ticket_id)
        if call is None:  # cancelled in the meantime: no ticket was issued, so its blocks are released here
            self._steps.post(Release(event.ticket_id))
            return
        job = call.job
        signed = b""
        if job.importer is not None:
            issued = self._exporter.issue(
                ticket_id=event.ticket_id,
                request_id=job.request_id,
                attempt=job.attempt,
                importer=job.importer,
                num_tokens=len(job.token_ids),
                prompt_hash=hash_prompt(self._hash_key, job.token_ids),
                num_choices=len(job.seeds),
            )
            signed = issued.signed
        call.accepted.set_result(signed)

    def _on_refused(self, event: commands.ExportRefused) -> None:
        self._telemetry.count("tandem_prefill_refused_total", reason=event.error.reason)
        call = self._waiting(event.ticket_id)
        if call is not None:
            call.accepted.set_exception(event.error)
            call.outcome.set_result(commands.ExportFailed(event.ticket_id, event.error))

    def _on_finished(self, event: commands.ExportFinished) -> None:
        self._rate.note_end(event.ended_s, event.queue_s + event.prefill_s)
        self._telemetry.observe("tandem_prefill_queue_seconds", event.queue_s)
        self._telemetry.observe("tandem_prefill_seconds", event.prefill_s)
        self._telemetry.count("tandem_prefix_cached_tokens_total", event.num_cached)
        call = self._waiting(event.ticket_id)
        if call is not None:
            call.outcome.set_result(event)  # first of all, so that the client's first token does not wait
            self._outstanding.remove_export(event.ticket_id, asyncio.get_running_loop().time())
        self._exporter.finish(
            event.ticket_id,
            first_tokens=[FirstToken(token.token_id, token.finish_reason is not None) for token in event.tokens],
            tail=None if (tail := event.tail) is None else TailBlock(tail.block_id, tail.num_valid, tail.is_unverified),
            ended_s=event.ended_s,
        )

    def _on_failed(self, event: commands.ExportFailed) -> None:
        self._telemetry.count("tandem_prefill_failed_total", reason=event.error.reason)
        self._exporter.fail(event.ticket_id, reason=HandOffReason.PREFILL_FAILED, detail=str(event.error))
        call = self._waiting(event.ticket_id)
        if call is not None:
            call.outcome.set_result(event)


async def _unless_ended(call: _Call, work: Coroutine[Any, Any, Result]) -> Result:
    """Return the result of `work`, or raise the call's error if the call ends first."""
    working = asyncio.ensure_future(work)
    try:
        await asyncio.wait((working, call.outcome), return_when=asyncio.FIRST_COMPLETED)
        if isinstance(outcome := call.outcome.result() if call.outcome.done() else None, commands.ExportFailed):
            raise outcome.error
        return await working
    finally:
        working.cancel()
