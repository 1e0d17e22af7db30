"""The connection of this router to one incarnation of one worker: its stream, its health, and every call to it.

Counts this router's work there. Unary calls start sequences, whose tokens come on the stream; a prefill for export is
one call. A peer never retries and never decides what happens to a sequence; the pipeline does.
"""

import asyncio
import logging
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import grpc

from cluster.errors import DeadlineExceeded
from cluster.member import Member
from cluster.messages import DecodeJob, MemberId, PrefillJob, PromptLogprobs, SampledToken, TenantShare
from cluster.observe.trace_context import TRACE_PARENT_KEY
from cluster.outstanding_work import OthersWork, PromptWork
from cluster.protocol import wire
from cluster.protocol.received import checked, malformed
from cluster.service_times import ServiceTimes
from router.fleet.decode_events import Sequences
from router.fleet.worker_health import Answer, WorkerHealth
from router.fleet.worker_stream import RouterSide, WorkerStream
from router.policies.prediction.unmodelled import UnmodelledTimes
from router.policies.prediction.work_ahead import SequenceProgress
from tandem.internal.v1 import worker_pb2, worker_pb2_grpc

_LOG = logging.getLogger("tandem.router.peer")
_OWN_CALL_S = 5.0  # for calls of the router itself, which belong to no request
MAX_CONCURRENT_MOVES = 4  # from one worker: a client should wait for its own transfer only


class Peer(WorkerHealth):
    def __init__(
        self, member: Member, channel: grpc.aio.Channel, side: RouterSide, others: "Callable[[], Sequence[Peer]]"
    ) -> None:
        """`others`: as in WorkerHealth."""
        super().__init__(member, channel, side, others)
        self._call_timeout_s = side.timeouts.call_timeout_s
        self.unmodelled = UnmodelledTimes()
        self.kv_format = sys.intern(repr(member.fingerprint))
        self.stream = WorkerStream(
            member,
            channel,
            side,
            on_draining=self.mark_draining,
            is_draining=lambda: self.is_draining,
            on_others=self._on_others,
        )
        self.moves = asyncio.Semaphore(MAX_CONCURRENT_MOVES)  # one permit per sequence being moved away
        self._num_exported = 0  # sequences of this router's prefills there
        self._prefills = worker_pb2_grpc.PrefillWorkerStub(channel)
        self._decodes = worker_pb2_grpc.DecodeWorkerStub(channel)
        self._worker = worker_pb2_grpc.WorkerStub(channel)
        self._abandoning: set[asyncio.Task[None]] = set()  # Abandon calls, which outlive their requests

    @property
    def heard_s(self) -> float:
        return max(super().heard_s, self.stream.heard_s)

    @property
    def assigned(self) -> int:
        return self._num_exported + self.stream.num_sequences

    @property
    def is_reachable(self) -> bool:
        """Return whether the worker is not suspect and its stream is connected."""
        return self.trusted and self.stream.connected.is_set()

    @property
    def service_times(self) -> ServiceTimes | None:
        """Return the worker's speed from its last heartbeat; None before it has measured anything."""
        return self.stream.service_times

    async def run(self) -> str:
        """Run the stream and the health checks until the worker is lost. Returns the reason."""
        stream = asyncio.create_task(self.stream.run())
        checks = asyncio.create_task(super().run())
        try:
            done, _ = await asyncio.wait((stream, checks), return_when=asyncio.FIRST_COMPLETED)
            return done.pop().result()
        finally:
            stream.cancel()
            checks.cancel()
            await asyncio.gather(stream, checks, return_exceptions=True)

    async def inspect(self) -> worker_pb2.InspectResponse:
        """Return the worker's own figures. Raises TandemError."""
        asking = self._worker.Inspect(worker_pb2.InspectRequest(), timeout=_OWN_CALL_S)
        inspected: worker_pb2.InspectResponse = await self._unless_lost(asking)
        return checked(inspected)

    # Prompts that the worker computes for another one

    @contextmanager
    def prefill(self, job: PrefillJob) -> Iterator["PrefillCall"]:
        """Start a prefill. Leaving the block early cancels it."""
        work = PromptWork.of(len(job.token_ids), job.num_expected_cached)
        with self._queued(work, job.tenant, is_batch=job.is_batch) as computed:
            call = self._prefills.Prefill(
                wire.prefill_job_to_wire(job), timeout=job.timeout_s, metadata=_trace_metadata(job.trace_parent)
            )
            self._num_exported += len(job.seeds)
            try:
                yield PrefillCall(self, call, computed, job)
            finally:
                self._num_exported -= len(job.seeds)
                call.cancel()

    @contextmanager
    def abandoned_unless_imported(self, ticket: bytes) -> Iterator[Callable[[], None]]:
        """Yield a function to call once another worker has imported the ticket. Otherwise, on exit, abandon the ticket
        at this worker, so that it frees the blocks before the ticket's deadline.
        """
        is_taken = False

        def taken() -> None:
            nonlocal is_taken
            is_taken = True

        try:
            yield taken
        finally:
            if not is_taken:
                task = asyncio.create_task(self._abandon(ticket))
                self._abandoning.add(task)
                task.add_done_callback(self._abandoning.discard)

    # Sequences that decode at the worker

    @contextmanager
    def open_sequences(
        self,
        all_progress: Sequence[SequenceProgress],
        prompt: PromptWork | None,
        tenant: TenantShare,
        *,
        is_batch: bool,
    ) -> Iterator[Sequences]:
        """Reserve handles on the stream for one attempt, one per sequence. On exit, cancel sequences that have not
        ended. `prompt`: the part that the worker must compute for this tenant before their first token; None: it
        imports the KV. `is_batch`: they are of the batch class.
        """
        with self.stream.open_sequences(all_progress) as sequences:
            if prompt is None:
                yield sequences
                return
            with self._queued(prompt, tenant, is_batch=is_batch) as sequences.on_first_token:
                yield sequences

    @contextmanager
    def split_sequence(self, sequences: Sequences, handle: int) -> Iterator[Sequences]:
        """Separate the lifetime of one of an attempt's sequences from the others."""
        with self.stream.split_sequence(sequences, handle) as parted:
            yield parted

    async def start(self, job: DecodeJob) -> None:
        """Start the sequences of a job. Raises TandemError.

        The worker computes nothing within this call, so a call that exceeds `call_timeout_s` makes the worker suspect.
        """
        limit_s = self._call_timeout_s
        calls = self._decode_calls
        try:
            request, metadata = wire.decode_job_to_wire(job), _trace_metadata(job.trace_parent)
            starting = calls.Start(request, timeout=min(job.timeout_s, limit_s), metadata=metadata)
            await self._unless_lost(starting, job.tenant)
            self.backlog.record_accepted(job.tenant.label)
        except DeadlineExceeded as error:
            if job.timeout_s <= limit_s:
                raise
            self.suspect()
            raise self.loss(f"did not accept a start message within {limit_s:g} s") from error

    async def freeze(
        self, handle: int, *, router: MemberId, importer: MemberId, attempt: int
    ) -> worker_pb2.FreezeResponse:
        """Freeze a running sequence for a move. Raises TandemError; NotFound if the sequence does not decode there, in
        which case nothing has changed."""
        request = worker_pb2.FreezeRequest(router=str(router), handle=handle, importer=str(importer), attempt=attempt)
        asking = self._decode_calls.Freeze(request, timeout=_OWN_CALL_S)
        frozen: worker_pb2.FreezeResponse = await self._in_time(asking)
        return checked(frozen)

    async def thaw(self, handle: int, new_handle: int, *, router: MemberId) -> None:
        """Let a frozen sequence continue under a new handle. Raises TandemError."""
        request = worker_pb2.ThawRequest(router=str(router), handle=handle, new_handle=new_handle)
        await self._in_time(self._decode_calls.Thaw(request, timeout=_OWN_CALL_S))

    @property
    def _decode_calls(self) -> worker_pb2_grpc.DecodeWorkerStub:
        """Return the stub. Raises the error of the worker's loss if the channel is closed."""
        if self._is_lost:
            raise self._gone()
        return self._decodes

    async def _in_time(self, answer: Awaitable[Answer]) -> Answer:
        """Await a call whose deadline is `_OWN_CALL_S`, not the deadline of the request. Raises TandemError."""
        try:
            return await self._unless_lost(answer)
        except DeadlineExceeded as error:
            raise self.loss(f"did not answer within {_OWN_CALL_S:g} s") from error

    @contextmanager
    def _queued(self, work: PromptWork, tenant: TenantShare, *, is_batch: bool) -> Iterator[Callable[[float], None]]:
        """Count a tenant's prompt as queued at the worker. Yields a function to call with the time when it is
        computed.
        """
        number = self.backlog.add_prompt(work, asyncio.get_running_loop().time(), tenant, is_batch=is_batch)
        try:
            yield partial(self.backlog.record_computed, number)
        finally:
            self.backlog.remove_prompt(number, asyncio.get_running_loop().time())

    def _on_others(self, work: OthersWork) -> None:
        self.backlog.record_report(work, asyncio.get_running_loop().time())

    async def _abandon(self, ticket: bytes) -> None:
        try:
            await self._prefills.Abandon(worker_pb2.AbandonRequest(ticket=ticket), timeout=_OWN_CALL_S)
        except grpc.aio.AioRpcError as error:
            _LOG.info(
                "a ticket stays until its deadline", extra={"worker": str(self.member.id), "error": error.details()}
            )

    async def read(self, call: "_RpcCall", tenant: TenantShare) -> worker_pb2.PrefillEvent | None:
        """Return the next event of a prefill call of this tenant, None at its end. Raises TandemError."""
        event = await self._unless_lost(call.read(), tenant)
        return checked(event) if isinstance(event, worker_pb2.PrefillEvent) else None


@dataclass(frozen=True, slots=True)
class FirstTokens:
    """The first token of every choice, and the times that the worker needed for them."""

    tokens: tuple[SampledToken, ...]  # one per choice
    queue_s: float  # by the worker's clock: from acceptance to the first chunk, and from there to these tokens
    prefill_s: float
    num_cached: int  # tokens of the prompt that were not computed
    chunks: tuple[tuple[int, float], ...] = ()  # tokens of each step, and when it ended, since the first was planned
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()  # if the job wants them: all tokens but the first, in order


_RpcCall: TypeAlias = "grpc.aio.UnaryStreamCall[worker_pb2.PrefillRequest, worker_pb2.PrefillEvent]"


class PrefillCall:
    """A prefill attempt in progress."""

    def __init__(self, peer: "Peer", call: "_RpcCall", computed: Callable[[float], None], job: PrefillJob) -> None:
        """`computed` is called with the time of the first tokens."""
        self._peer = peer
        self._job = job
        self._call = call
        self._computed = computed

    async def ticket(self) -> bytes:
        """Wait until the job is queued and return its signed ticket, empty without an importer.

        Raises TandemError; MalformedMessage for an answer that is out of bounds.
        """
        accepted = (await self._next("accepted")).accepted
        self._peer.backlog.record_accepted(self._job.tenant.label)
        return accepted.ticket

    async def first_tokens(self) -> FirstTokens:
        """Wait for the first tokens, after `ticket`. Raises TandemError."""
        prompt_logprobs = await self._prompt_logprobs()
        message = (await self._next("first_tokens")).first_tokens
        if len(message.tokens) != len(self._job.seeds):
            raise malformed(message, f"tokens must be one for each of {len(self._job.seeds)} choices")
        self._computed(asyncio.get_running_loop().time())
        return FirstTokens(
            tokens=tuple(map(wire.sampled_token_from_wire, message.tokens)),
            queue_s=message.queue_s,
            prefill_s=message.prefill_s,
            num_cached=message.num_cached + message.num_pulled,
            chunks=tuple((chunk.num_tokens, chunk.ended_s) for chunk in message.chunks),
            prompt_logprobs=prompt_logprobs,
        )

    async def _prompt_logprobs(self) -> tuple[PromptLogprobs, ...]:
        """Wait for the log-probabilities of the prompt, if the job wants them. Raises TandemError."""
        job, parts, position = self._job, list[PromptLogprobs](), 1
        end = len(job.token_ids) - job.num_committed
        while job.num_prompt_logprobs is not None and position < end:
            message = (await self._next("prompt_logprobs")).prompt_logprobs
            part = wire.prompt_logprobs_from_wire(message)
            if part.first_position != position or part.num_top > job.num_prompt_logprobs:
                raise malformed(message, f"it must go on at token {position}, with at most {job.num_prompt_logprobs}")
            position += part.num_tokens
            if position > end:
                raise malformed(message, f"it must end with the prompt, before token {end}")
            parts.append(part)
        return tuple(parts)

    async def _next(self, expected: str) -> worker_pb2.PrefillEvent:
        event = await self._peer.read(self._call, self._job.tenant)
        while event is not None and event.WhichOneof("event") is None:  # of a kind that only newer versions send
            event = await self._peer.read(self._call, self._job.tenant)
        if event is None or event.WhichOneof("event") != expected:
            raise self._peer.loss(f"ended a call without {expected}")
        return event


def _trace_metadata(trace_parent: str) -> tuple[tuple[str, str], ...]:
    """Return the metadata with which a call carries a trace context; empty: there is none."""
    return ((TRACE_PARENT_KEY, trace_parent),) if trace_parent else ()
