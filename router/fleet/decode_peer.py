"""A decode worker, as this router speaks with it: sequences start by calls of their own, and speak on its one stream.

Owns the stream, which is a check of its own. Never decides what becomes of a sequence.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager

import grpc

from cluster.errors import DeadlineExceeded, WorkerLost
from cluster.member import Member
from cluster.messages import DecodeJob, MemberId
from cluster.observe.telemetry import Telemetry
from cluster.protocol import wire
from cluster.protocol.received import checked
from router.fleet.decode_events import Sequences
from router.fleet.decode_stream import DecodeStream
from router.fleet.patience import Patience
from router.fleet.peer import OWN_CALL_S, Answer, Peer
from router.policies.course import Course
from tandem.v1 import worker_pb2, worker_pb2_grpc

MOVES_AT_ONCE = 4  # from one worker: a frozen sequence's client waits for its own transfer, not for everybody's


class DecodePeer(Peer):
    def __init__(
        self,
        member: Member,
        channel: grpc.aio.Channel,
        stream: DecodeStream,
        *,
        patience: Patience,
        on_change: Callable[[], None],
        telemetry: Telemetry,
    ) -> None:
        super().__init__(member, channel, patience=patience, on_change=on_change, telemetry=telemetry)
        self._stub = worker_pb2_grpc.DecodeWorkerStub(channel)
        self.stream = stream
        self.moves = asyncio.Semaphore(MOVES_AT_ONCE)  # held by each sequence that this router moves away from here

    @property
    def heard_s(self) -> float:
        return max(super().heard_s, self.stream.heard_s)

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
    def open(self, courses: Sequence[Course]) -> Iterator[Sequences]:
        """Handles on the stream for one attempt, one per course; what has not ended on leaving is cancelled."""
        with self.assign(len(courses)), self.stream.open(courses) as sequences:
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
        frozen: worker_pb2.FreezeResponse = await self._in_time(self._calls.Freeze(request, timeout=OWN_CALL_S))
        return checked(frozen)

    async def thaw(self, handle: int, new_handle: int, *, router: MemberId) -> None:
        """Raises TandemError."""
        request = worker_pb2.ThawRequest(router=str(router), handle=handle, new_handle=new_handle)
        await self._in_time(self._calls.Thaw(request, timeout=OWN_CALL_S))

    async def _in_time(self, answer: Awaitable[Answer]) -> Answer:
        """The deadline of such a call is this router's patience, never the request's end."""
        try:
            return await self._unless_lost(answer)
        except DeadlineExceeded as error:
            raise WorkerLost(f"decode worker {self.member.id} did not answer within {OWN_CALL_S:g} s") from error

    async def start(self, job: DecodeJob) -> None:
        """Raises TandemError. Nothing is computed within this call: one that takes longer than silence is borne has met
        a worker that will not do."""
        limit_s = self._patience.call_s
        try:
            await self._unless_lost(
                self._calls.Start(wire.decode_job_to_wire(job), timeout=min(job.timeout_s, limit_s))
            )
        except DeadlineExceeded as error:
            if job.timeout_s <= limit_s:
                raise
            self.doubt()
            raise WorkerLost(f"decode worker {self.member.id} did not take a start within {limit_s:g} s") from error

    @property
    def _calls(self) -> worker_pb2_grpc.DecodeWorkerStub:
        """Raises WorkerLost: whoever still holds this peer must not use its closed channel."""
        if self._lost.is_set():
            raise self._worker_lost()
        return self._stub
