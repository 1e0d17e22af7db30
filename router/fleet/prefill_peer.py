"""The connection of this router to one prefill worker: one call per attempt, heartbeats, and tickets to abandon.

Owns the Abandon calls that outlive their requests. Never retries; the pipeline does.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import TypeAlias

import grpc

from cluster.errors import MalformedMessage
from cluster.member import Member
from cluster.messages import PrefillJob, SampledToken
from cluster.observe.telemetry import Telemetry
from cluster.protocol import wire
from cluster.protocol.received import checked, malformed
from cluster.protocol.wire import service_times_of
from cluster.service_times import ServiceTimes
from router.fleet.peer import OWN_CALL_S, Peer
from router.fleet.supervision import WorkerTimeouts
from router.policies.work_ahead import PromptWork
from router.running import running
from tandem.internal.v1 import worker_pb2, worker_pb2_grpc

_LOG = logging.getLogger("tandem.router.prefill_peer")
_HEARTBEATS_PAUSE_S = 0.5  # before they are asked for again


@dataclass(frozen=True, slots=True)
class FirstTokens:
    """The first token of every choice, and the times that the worker needed for them."""

    tokens: tuple[SampledToken, ...]  # one per choice
    queue_s: float  # by the worker's clock: from acceptance to the first chunk, and from there to these tokens
    prefill_s: float
    num_cached: int  # tokens of the prompt that were not computed


_RpcCall: TypeAlias = "grpc.aio.UnaryStreamCall[worker_pb2.PrefillRequest, worker_pb2.PrefillEvent]"


class PrefillCall:
    """One prefill attempt in progress."""

    def __init__(self, peer: "PrefillPeer", call: "_RpcCall", number: int, num_choices: int) -> None:
        """`number`: of the prompt in the peer's backlog."""
        self._peer = peer
        self._num_choices = num_choices
        self._call = call
        self._number = number

    async def ticket(self) -> bytes:
        """Wait until the job is queued and return its signed ticket, empty without an importer.

        Raises TandemError; MalformedMessage for an answer that is out of bounds.
        """
        return (await self._next("accepted")).accepted.ticket

    async def first_tokens(self) -> FirstTokens:
        """Wait for the first tokens, after `ticket`. Raises TandemError."""
        message = (await self._next("first_tokens")).first_tokens
        if len(message.tokens) != self._num_choices:
            raise malformed(message, f"tokens must be one for each of {self._num_choices} choices")
        self._peer.backlog.record_computed(self._number, asyncio.get_running_loop().time())
        return FirstTokens(
            tokens=tuple(map(wire.sampled_token_from_wire, message.tokens)),
            queue_s=message.queue_s,
            prefill_s=message.prefill_s,
            num_cached=message.num_cached + message.num_pulled,
        )

    async def _next(self, expected: str) -> worker_pb2.PrefillEvent:
        event = await self._peer.read(self._call)
        while event is not None and event.WhichOneof("event") is None:  # of a kind that only newer versions send
            event = await self._peer.read(self._call)
        if event is None or event.WhichOneof("event") != expected:
            raise self._peer.loss(f"ended a call without {expected}")
        return event


class PrefillPeer(Peer):
    def __init__(
        self,
        member: Member,
        channel: grpc.aio.Channel,
        *,
        timeouts: WorkerTimeouts,
        others: Callable[[], Sequence[Peer]],
        on_change: Callable[[], None],
        telemetry: Telemetry,
    ) -> None:
        super().__init__(member, channel, timeouts=timeouts, others=others, on_change=on_change, telemetry=telemetry)
        self.heartbeat = worker_pb2.Heartbeat()
        self._service_times: ServiceTimes | None = None
        self._heartbeat_s = super().heard_s
        self._stub = worker_pb2_grpc.PrefillWorkerStub(channel)
        self._abandoning: set[asyncio.Task[None]] = set()

    @property
    def heard_s(self) -> float:
        return max(super().heard_s, self._heartbeat_s)

    @property
    def service_times(self) -> ServiceTimes | None:
        return self._service_times

    async def run(self) -> str:
        async with running(self._follow_heartbeats()):
            return await super().run()

    @asynccontextmanager
    async def prefill(self, job: PrefillJob, num_cached: int = 0) -> AsyncIterator[PrefillCall]:
        """Start a prefill of which the worker is expected to have `num_cached` tokens cached. Leaving the block early
        cancels it."""
        with self.assign(len(job.seeds)):
            call = self._stub.Prefill(wire.prefill_job_to_wire(job), timeout=job.timeout_s)
            work = PromptWork.of(len(job.token_ids), num_cached)
            number = self.backlog.add_prompt(work, asyncio.get_running_loop().time())
            try:
                yield PrefillCall(self, call, number, len(job.seeds))
            finally:
                call.cancel()
                self.backlog.remove_prompt(number)

    @contextmanager
    def abandoned_unless_imported(self, ticket: bytes) -> Iterator[Callable[[], None]]:
        """Yield a function to call once a decode worker has imported the ticket. Otherwise, on exit, tell the prefill
        worker that no worker will import it, so that it frees the blocks before the ticket's deadline."""
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

    async def _follow_heartbeats(self) -> None:
        """Follow the heartbeats until cancelled. A call that breaks makes the worker suspect; one that ends is
        repeated."""
        while True:
            call = self._stub.Heartbeats(worker_pb2.HeartbeatsRequest())
            try:
                async for heartbeat in call:
                    self._heartbeat_s = asyncio.get_running_loop().time()
                    self._read_heartbeat(heartbeat)
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.UNAVAILABLE:
                    self.suspect()
            finally:
                call.cancel()
            await asyncio.sleep(_HEARTBEATS_PAUSE_S)

    def _read_heartbeat(self, heartbeat: worker_pb2.Heartbeat) -> None:
        """Store the figures of a heartbeat. A malformed heartbeat only shows that the worker lives."""
        try:
            self.heartbeat = checked(heartbeat)
            self._service_times = service_times_of(heartbeat)
            self.backlog.record_heartbeat(heartbeat.waiting + heartbeat.running)
        except MalformedMessage as error:
            self._telemetry.count("tandem_malformed_messages_total", message="heartbeat")
            _LOG.warning("malformed message", extra={"worker": str(self.member.id), "problem": error.message})

    async def _abandon(self, ticket: bytes) -> None:
        try:
            await self._stub.Abandon(worker_pb2.AbandonRequest(ticket=ticket), timeout=OWN_CALL_S)
        except grpc.aio.AioRpcError as error:
            _LOG.info(
                "a ticket stays until its deadline", extra={"worker": str(self.member.id), "error": error.details()}
            )
        except grpc.aio.UsageError:  # the channel is closed: the worker is gone, or this router ends
            _LOG.info("a ticket stays until its deadline", extra={"worker": str(self.member.id), "error": "closed"})

    async def read(self, call: "_RpcCall") -> worker_pb2.PrefillEvent | None:
        """Return the next event of the call, None at its end. Raises TandemError."""
        event = await self._unless_lost(call.read())
        return checked(event) if isinstance(event, worker_pb2.PrefillEvent) else None
