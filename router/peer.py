"""One incarnation of one worker, as this router speaks with it.

Owns how much of this router's work is there, and whether the worker is trusted: a failed call makes it suspect at once,
a direct check clears or loses it. Every call carries a deadline and ends early when the worker is lost.
"""

import asyncio
import logging
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import grpc

from cluster import wire
from cluster.errors import Cancelled, DeadlineExceeded, TandemError, Unavailable, WorkerLost
from cluster.member import Member
from cluster.messages import DecodeJob, MemberId, PrefillJob, SampledToken
from cluster.rpc_errors import error_from_rpc
from router.decode_events import Sequences
from router.decode_stream import DecodeStream
from router.probe import answers, nobody_listens
from tandem.v1 import worker_pb2, worker_pb2_grpc

_LOG = logging.getLogger("tandem.router.peer")
_CHECK_PAUSE_S = 0.2
_LAPSED_CHECK_S = 1.0
_OWN_CALL_S = 5.0  # for calls of the router's own, which belong to no request

Answer = TypeVar("Answer")


class Peer:
    """What prefill and decode workers have in common."""

    def __init__(
        self, member: Member, channel: grpc.aio.Channel, *, grace_s: float, on_change: Callable[[], None]
    ) -> None:
        self.member = member
        self.pairing = sys.intern(repr(member.fingerprint))
        self.trusted = True
        self.assigned = 0  # sequences that this router has there
        self.leaves_at_s: float | None = None  # by the event loop's clock; None: it stays
        self._channel = channel
        self._grace_s = grace_s
        self._on_change = on_change
        self._registered = True
        self._worker = worker_pb2_grpc.WorkerStub(channel)
        self._doubt = asyncio.Event()
        self._lost = asyncio.Event()
        self._lost_detail = ""
        self._last_seen_s = asyncio.get_running_loop().time()

    @property
    def silent_s(self) -> float:
        """Since its last answer to a call."""
        return asyncio.get_running_loop().time() - self._last_seen_s

    def doubt(self) -> None:
        """Something failed directly: no new work until a check has passed."""
        self.trusted = False
        self._doubt.set()

    def leave(self, grace_s: float) -> None:
        """It said that it takes no new work, and for how long it still has what it was given."""
        self.leaves_at_s = max(self.leaves_at_s or 0.0, asyncio.get_running_loop().time() + grace_s)
        self._on_change()

    def set_registered(self, registered: bool) -> None:
        """Its lease may have lapsed: then it is looked at again and again, until it is back or lost."""
        self._registered = registered
        if not registered:
            self.doubt()

    def lose(self, detail: str) -> None:
        """Every call in progress ends with WorkerLost."""
        self._lost_detail = detail
        self._lost.set()

    async def run(self) -> str:
        """Until the worker is lost, or has left and nothing of this router is there any more; returns why."""
        while True:
            await self._doubt.wait()
            self._doubt.clear()
            problem = await self._check_until_sure()
            if problem is not None:
                return problem
            if self._registered:
                self.trusted = True
                self._on_change()
            elif self.assigned == 0:
                return "it left"
            else:
                asyncio.get_running_loop().call_later(_LAPSED_CHECK_S, self._doubt.set)

    async def inspect(self) -> worker_pb2.InspectResponse:
        """Raises TandemError."""
        return await self._unless_lost(self._worker.Inspect(worker_pb2.InspectRequest(), timeout=_OWN_CALL_S))

    async def drain(self) -> None:
        """Raises TandemError."""
        await self._unless_lost(self._worker.DrainWorker(worker_pb2.DrainWorkerRequest(), timeout=_OWN_CALL_S))

    async def _check_until_sure(self) -> str | None:
        """None: it answers. Else why it is lost."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + self._grace_s
        while not await answers(self._channel):
            if await nobody_listens(self.member.address):
                return "nobody listens at its address any more"
            if loop.time() >= until_s:
                return f"it did not answer for {self._grace_s} s"
            await asyncio.sleep(_CHECK_PAUSE_S)
        return None

    @contextmanager
    def assign(self, num_sequences: int) -> Iterator[None]:
        self.assigned += num_sequences
        try:
            yield
        finally:
            self.assigned -= num_sequences

    async def _unless_lost(self, answer: Awaitable[Answer]) -> Answer:
        """Raises WorkerLost, and what the call's status says."""
        work = asyncio.ensure_future(answer)
        lost = asyncio.ensure_future(self._lost.wait())
        try:
            await asyncio.wait((work, lost), return_when=asyncio.FIRST_COMPLETED)
            if not work.done() or (work.cancelled() and self._lost.is_set()):  # the channel closes with the peer
                raise self._worker_lost()
            result = work.result()
            self._last_seen_s = asyncio.get_running_loop().time()
            return result
        except grpc.aio.AioRpcError as rpc_error:
            raise self._judged(error_from_rpc(rpc_error)) from rpc_error
        finally:
            work.cancel()
            lost.cancel()

    def _worker_lost(self) -> WorkerLost:
        return WorkerLost(f"{self.member.role} worker {self.member.id} is lost: {self._lost_detail}")

    def _judged(self, error: TandemError) -> TandemError:
        """A call that did not get through, or that the worker cut off, makes it suspect; a refusal does not."""
        if isinstance(error, Cancelled) or type(error) is Unavailable:
            self.doubt()
            return WorkerLost(f"{self.member.role} worker {self.member.id} does not answer: {error.message}")
        return error


@dataclass(frozen=True, slots=True)
class FirstTokens:
    tokens: tuple[SampledToken, ...]  # one per choice
    prefill_s: float
    num_cached: int  # tokens of the prompt that were not computed


_RpcCall: TypeAlias = "grpc.aio.UnaryStreamCall[worker_pb2.PrefillRequest, worker_pb2.PrefillEvent]"


class PrefillCall:
    """One attempt at one prefill, in progress."""

    def __init__(self, peer: "PrefillPeer", call: "_RpcCall") -> None:
        self._peer = peer
        self._call = call

    async def ticket(self) -> bytes:
        """The job is queued; its signed ticket, empty without an importer. Raises TandemError."""
        return (await self._next("accepted")).accepted.ticket

    async def first_tokens(self) -> FirstTokens:
        """After `ticket`. Raises TandemError."""
        message = (await self._next("first_tokens")).first_tokens
        return FirstTokens(
            tokens=tuple(map(wire.sampled_token_from_wire, message.tokens)),
            prefill_s=message.prefill_s,
            num_cached=message.num_cached + message.num_pulled,
        )

    async def _next(self, expected: str) -> worker_pb2.PrefillEvent:
        event = await self._peer.read(self._call)
        if event is None or event.WhichOneof("event") != expected:
            raise WorkerLost(f"prefill worker {self._peer.member.id} ended a call without {expected}")
        return event


class PrefillPeer(Peer):
    def __init__(
        self, member: Member, channel: grpc.aio.Channel, *, grace_s: float, on_change: Callable[[], None]
    ) -> None:
        super().__init__(member, channel, grace_s=grace_s, on_change=on_change)
        self._stub = worker_pb2_grpc.PrefillWorkerStub(channel)
        self._abandoning: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def prefill(self, job: PrefillJob) -> AsyncIterator[PrefillCall]:
        """Leaving it early cancels the attempt."""
        with self.assign(len(job.seeds)):
            call = self._stub.Prefill(wire.prefill_job_to_wire(job), timeout=job.timeout_s)
            try:
                yield PrefillCall(self, call)
            finally:
                call.cancel()

    @contextmanager
    def abandoned_unless_taken(self, ticket: bytes) -> Iterator[Callable[[], None]]:
        """What it gives is called when a decode worker has taken the ticket; else, on leaving, the prefill worker hears
        that nobody will come, and need not keep the blocks until the ticket's own deadline."""
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

    async def _abandon(self, ticket: bytes) -> None:
        try:
            await self._stub.Abandon(worker_pb2.AbandonRequest(ticket=ticket), timeout=_OWN_CALL_S)
        except grpc.aio.AioRpcError as error:
            _LOG.info(
                "a ticket stays until its deadline", extra={"worker": str(self.member.id), "error": error.details()}
            )

    async def read(self, call: "_RpcCall") -> worker_pb2.PrefillEvent | None:
        """The call's next event; None at its end. Raises TandemError."""
        event = await self._unless_lost(call.read())
        return event if isinstance(event, worker_pb2.PrefillEvent) else None


class DecodePeer(Peer):
    def __init__(
        self,
        member: Member,
        channel: grpc.aio.Channel,
        stream: DecodeStream,
        *,
        grace_s: float,
        on_change: Callable[[], None],
    ) -> None:
        super().__init__(member, channel, grace_s=grace_s, on_change=on_change)
        self._stub = worker_pb2_grpc.DecodeWorkerStub(channel)
        self.stream = stream

    async def run(self) -> str:
        """The stream is a check of its own: it breaks when the worker does."""
        stream = asyncio.create_task(self.stream.run())
        checks = asyncio.create_task(super().run())
        try:
            done, _ = await asyncio.wait((stream, checks), return_when=asyncio.FIRST_COMPLETED)
            return done.pop().result()
        finally:
            stream.cancel()
            checks.cancel()
            await asyncio.gather(stream, checks, return_exceptions=True)

    @contextmanager
    def open(self, num_sequences: int) -> Iterator[Sequences]:
        """Handles on the stream for one attempt; what has not ended on leaving is cancelled."""
        with self.assign(num_sequences), self.stream.open(num_sequences) as sequences:
            yield sequences

    @contextmanager
    def part(self, sequences: Sequences, handle: int) -> Iterator[Sequences]:
        """One of an attempt's sequences by itself."""
        with self.assign(1), self.stream.part(sequences, handle) as parted:
            yield parted

    async def freeze(
        self, handle: int, *, router: MemberId, importer: MemberId, attempt: int
    ) -> worker_pb2.FreezeResponse:
        """Raises TandemError; NotFound: it does not decode there, and nothing has happened."""
        request = worker_pb2.FreezeRequest(router=str(router), handle=handle, importer=str(importer), attempt=attempt)
        return await self._in_time(self._calls.Freeze(request, timeout=_OWN_CALL_S))

    async def thaw(self, handle: int, new_handle: int, *, router: MemberId) -> None:
        """Raises TandemError."""
        request = worker_pb2.ThawRequest(router=str(router), handle=handle, new_handle=new_handle)
        await self._in_time(self._calls.Thaw(request, timeout=_OWN_CALL_S))

    async def _in_time(self, answer: Awaitable[Answer]) -> Answer:
        """The deadline of such a call is this router's patience, never the request's end."""
        try:
            return await self._unless_lost(answer)
        except DeadlineExceeded as error:
            raise WorkerLost(f"decode worker {self.member.id} did not answer within {_OWN_CALL_S:g} s") from error

    async def start(self, job: DecodeJob) -> None:
        """Raises TandemError."""
        await self._unless_lost(self._calls.Start(wire.decode_job_to_wire(job), timeout=job.timeout_s))

    @property
    def _calls(self) -> worker_pb2_grpc.DecodeWorkerStub:
        """Raises WorkerLost: whoever still holds this peer must not use its closed channel."""
        if self._lost.is_set():
            raise self._worker_lost()
        return self._stub
