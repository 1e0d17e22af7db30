"""The connection of this router to one decode worker: unary calls start sequences, one stream returns their tokens.

Owns the stream, which doubles as a health check. Never decides what happens to a sequence.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import grpc

from cluster.errors import DeadlineExceeded
from cluster.member import Member
from cluster.messages import DecodeJob, MemberId
from cluster.observe.telemetry import Telemetry
from cluster.protocol import wire
from cluster.protocol.received import checked
from cluster.service_times import ServiceTimes
from router.fleet.decode_events import Sequences
from router.fleet.decode_stream import DecodeStream
from router.fleet.peer import OWN_CALL_S, Answer, Peer
from router.fleet.supervision import WorkerTimeouts
from router.policies.sequence_progress import SequenceProgress
from router.policies.work_ahead import PromptWork
from tandem.internal.v1 import worker_pb2, worker_pb2_grpc

MAX_CONCURRENT_MOVES = 4  # from one worker: a client should wait for its own transfer only


class DecodePeer(Peer):
    def __init__(
        self,
        member: Member,
        channel: grpc.aio.Channel,
        stream: DecodeStream,
        *,
        timeouts: WorkerTimeouts,
        others: Callable[[], Sequence[Peer]],
        on_change: Callable[[], None],
        telemetry: Telemetry,
    ) -> None:
        super().__init__(member, channel, timeouts=timeouts, others=others, on_change=on_change, telemetry=telemetry)
        self._stub = worker_pb2_grpc.DecodeWorkerStub(channel)
        self.stream = stream
        self.moves = asyncio.Semaphore(MAX_CONCURRENT_MOVES)  # one permit per sequence being moved away

    @property
    def heard_s(self) -> float:
        return max(super().heard_s, self.stream.heard_s)

    @property
    def service_times(self) -> ServiceTimes | None:
        return self.stream.service_times

    async def run(self) -> str:
        """Run the stream and the health checks. The stream breaks when the worker is lost."""
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
    def open_sequences(
        self, all_progress: Sequence[SequenceProgress], prompt: PromptWork | None = None
    ) -> Iterator[Sequences]:
        """Reserve handles on the stream for one attempt, one per sequence. On exit, cancel sequences that have not
        ended. `prompt`: what the worker has to compute before their first token; None: it imports the KV."""
        with self.assign(len(all_progress)), self.stream.open_sequences(all_progress) as sequences:
            if prompt is None:
                yield sequences
                return
            number = self.backlog.add_prompt(prompt, asyncio.get_running_loop().time())
            sequences.on_first_token = partial(self.backlog.record_computed, number)
            try:
                yield sequences
            finally:
                self.backlog.remove_prompt(number)

    @contextmanager
    def split_sequence(self, sequences: Sequences, handle: int) -> Iterator[Sequences]:
        """Separate the lifetime of one of an attempt's sequences from the others."""
        with self.assign(1), self.stream.split_sequence(sequences, handle) as parted:
            yield parted

    async def freeze(
        self, handle: int, *, router: MemberId, importer: MemberId, attempt: int
    ) -> worker_pb2.FreezeResponse:
        """Freeze a running sequence for a move. Raises TandemError; NotFound if the sequence does not decode there, in
        which case nothing has changed."""
        request = worker_pb2.FreezeRequest(router=str(router), handle=handle, importer=str(importer), attempt=attempt)
        frozen: worker_pb2.FreezeResponse = await self._in_time(self._calls.Freeze(request, timeout=OWN_CALL_S))
        return checked(frozen)

    async def thaw(self, handle: int, new_handle: int, *, router: MemberId) -> None:
        """Let a frozen sequence continue under a new handle. Raises TandemError."""
        request = worker_pb2.ThawRequest(router=str(router), handle=handle, new_handle=new_handle)
        await self._in_time(self._calls.Thaw(request, timeout=OWN_CALL_S))

    async def _in_time(self, answer: Awaitable[Answer]) -> Answer:
        """Await a call whose deadline is `OWN_CALL_S`, not the deadline of the request. Raises TandemError."""
        try:
            return await self._unless_lost(answer)
        except DeadlineExceeded as error:
            raise self.loss(f"did not answer within {OWN_CALL_S:g} s") from error

    async def start(self, job: DecodeJob) -> None:
        """Start the sequences of a job. Raises TandemError.

        The worker computes nothing within this call, so a call that exceeds `call_timeout_s` makes the worker suspect.
        """
        limit_s = self._timeouts.call_timeout_s
        try:
            await self._unless_lost(
                self._calls.Start(wire.decode_job_to_wire(job), timeout=min(job.timeout_s, limit_s))
            )
        except DeadlineExceeded as error:
            if job.timeout_s <= limit_s:
                raise
            self.suspect()
            raise self.loss(f"did not take a start within {limit_s:g} s") from error

    @property
    def _calls(self) -> worker_pb2_grpc.DecodeWorkerStub:
        """The stub. Raises the error of its loss if the channel is closed, for callers that still hold this peer."""
        if self._lost.is_set():
            raise self._gone()
        return self._stub
