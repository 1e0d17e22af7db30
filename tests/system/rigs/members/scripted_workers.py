"""Workers without a model that speak the real protocol: each token is a function of prompt, seed and index.

A worker that takes over continues exactly where another stopped, so a test detects at once whether a token was lost,
repeated or changed. Gates hold a worker at a named point; `die` ends it as a killed process ends: its port closes and
its calls break. The scripted decode worker is in scripted_decode.py.
"""

import asyncio
import itertools
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self, TypeVar

import grpc

from cluster.accounts.audit import Audit
from cluster.auth.gate import MemberGate
from cluster.auth.keys import ClusterKeys
from cluster.auth.member_channel import MemberChannel, open_member_channel
from cluster.errors import TandemError, Unavailable
from cluster.member import Capacity, Member, MemberState
from cluster.messages import (
    DecodeJob,
    FinishReason,
    LayoutFingerprint,
    LinkSpeed,
    MemberId,
    PrefillJob,
    PromptLogprobs,
    Role,
    SampledToken,
    TokenLogprobs,
    TokenStops,
)
from cluster.observe.telemetry import Telemetry
from cluster.observe.trace_context import TRACE_PARENT_KEY
from cluster.protocol import wire
from cluster.protocol.report_wire import link_speeds_to_wire, service_times_to_wire
from cluster.service_times import ServiceTimes
from cluster.serving.serving import GrpcServer
from tandem.enum_words import MEMBER_ROLES
from tandem.internal.v1 import worker_pb2, worker_pb2_grpc

Context = Any
Job = TypeVar("Job", PrefillJob, DecodeJob)


FINGERPRINT = LayoutFingerprint("weights", "config", "float32", "table")


KV_BYTES_PER_TOKEN = 100


HEARTBEAT_S = 0.05


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


def traced_job(job: Job, context: Context) -> Job:
    """Return the job with the trace context that came with its call."""
    return replace(job, trace_parent=dict(context.invocation_metadata() or ()).get(TRACE_PARENT_KEY, ""))


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


@dataclass(slots=True)
class Store:
    """Replaces the data of a real hand-off: which first tokens belong to which ticket."""

    finished: dict[bytes, asyncio.Future[tuple[SampledToken, ...]]] = field(default_factory=dict)


SECRET = b"k" * 32
KEYS = ClusterKeys(SECRET)  # of every scripted worker, and of routers that use it


def connect(address: str) -> MemberChannel:
    """Return a channel to a scripted worker."""
    return open_member_channel(address, keys=KEYS, caller="router-in-test@0")


class ScriptedWorker:
    """A gRPC server with one incarnation. `restart` gives the same address to the next incarnation."""

    def __init__(self, name: str, role: Role, incarnation: int = 1) -> None:
        self.id = MemberId(name, f"{name}-{incarnation}")
        self.role = role
        self.state = MemberState.READY
        self.fingerprint = FINGERPRINT
        self.capacity: Capacity | None = None
        self.grammar_engine = ""
        self.links: tuple[LinkSpeed, ...] = ()  # sent in its heartbeats, as the service times
        self.service_times: ServiceTimes | None = None
        self.drained = asyncio.Event()
        self.door = Gate()  # of every new call, health checks too
        self.voice = Gate()  # closed: sends nothing on its streams, not even heartbeats, as a stopped process
        self.is_deaf = False  # what routers say on its streams is lost
        self.streams: dict[str, asyncio.Queue[worker_pb2.WorkerMessage | None]] = {}
        self.open_streams: list[object] = []  # the contexts of the streams of routers
        self.beats: asyncio.Queue[int] = asyncio.Queue()  # heartbeats that routers have been sent
        telemetry = Telemetry()
        members_only = MemberGate(KEYS, self.id, telemetry, Audit())
        self.server = GrpcServer(
            service_names=["tandem.internal.v1.Worker"],
            telemetry=telemetry,
            interceptors=[_Door(self.door)],
            gate=members_only,
        )
        members_only.serve(self.server)
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
            grammar_engine=self.grammar_engine,
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


class StreamService(worker_pb2_grpc.DecodeWorkerServicer):
    """The streams of a scripted worker: what waits to be sent, and heartbeats in between."""

    def __init__(self, worker: ScriptedWorker) -> None:
        self._worker = worker

    async def Connect(self, request_iterator: AsyncIterator[Any], context: Context) -> AsyncIterator[Any]:
        worker = self._worker
        hello = (await anext(aiter(request_iterator))).hello
        outgoing = worker.streams.setdefault(hello.router, asyncio.Queue())
        reader = asyncio.create_task(self._read(request_iterator))
        worker.open_streams.append(context)
        try:
            await worker.voice.passed()
            if hello.has_no_sequences:
                self.on_router_began(hello.router)
            yield worker_pb2.WorkerMessage(hello=worker_pb2.WorkerHello(worker=str(worker.id)))
            for step in itertools.count():
                await worker.voice.passed()
                message = await self._or_heartbeat(outgoing, step)
                if message is None:
                    raise Unavailable("the connection is told to break")
                yield message
        finally:
            worker.open_streams.remove(context)
            reader.cancel()

    def on_cancelled(self, handles: tuple[int, ...]) -> None:
        """Handle a router's cancellation of these sequences."""

    def on_router_began(self, router: str) -> None:
        """Handle the connection of a router that has no sequences here, because it has lost this worker in the
        meantime.
        """

    async def _or_heartbeat(
        self, outgoing: "asyncio.Queue[worker_pb2.WorkerMessage | None]", step: int
    ) -> worker_pb2.WorkerMessage | None:
        try:
            async with asyncio.timeout(HEARTBEAT_S):
                return await outgoing.get()
        except TimeoutError:
            self._worker.beats.put_nowait(step)
            return worker_pb2.WorkerMessage(heartbeat=self._worker.heartbeat(step))

    async def _read(self, messages: AsyncIterator[Any]) -> None:
        async for message in messages:
            if not self._worker.is_deaf:
                self.on_cancelled(wire.unpack_ids(message.cancel.handles))


class ScriptedPrefill(ScriptedWorker):
    def __init__(self, name: str, store: Store, incarnation: int = 1) -> None:
        super().__init__(name, Role.PREFILL, incarnation)
        self.store = store
        self.jobs: list[PrefillJob] = []
        self.refusals: list[TandemError] = []  # raised one by one instead of accepting
        self.before_accepting = Gate()
        self.before_first_tokens = Gate()
        self.after_scores = Gate()  # of a prompt
        self.voice = self.door
        self.cancelled = asyncio.Event()
        self.abandoned: asyncio.Queue[bytes] = asyncio.Queue()
        self.prefill_s = 0.0
        self.num_cached = 0
        self.num_wrong_scores = 0  # of tokens that the next prompt does not have
        worker_pb2_grpc.add_PrefillWorkerServicer_to_server(_Prefill(self), self.server.grpc)
        worker_pb2_grpc.add_DecodeWorkerServicer_to_server(StreamService(self), self.server.grpc)


class _Prefill(worker_pb2_grpc.PrefillWorkerServicer):
    def __init__(self, worker: ScriptedPrefill) -> None:
        self._worker = worker

    async def Prefill(self, request: worker_pb2.PrefillRequest, context: Context) -> AsyncIterator[Any]:
        worker, job = self._worker, traced_job(wire.prefill_job_from_wire(request), context)
        worker.jobs.append(job)
        if worker.refusals:
            raise worker.refusals.pop(0)
        try:
            await worker.before_accepting.passed()
            ticket = f"{worker.id} {job.request_id} {job.attempt}".encode() if job.importer is not None else b""
            finished = worker.store.finished[ticket] = asyncio.get_running_loop().create_future()
            yield worker_pb2.PrefillEvent(accepted=worker_pb2.PrefillAccepted(ticket=ticket))
            await worker.before_first_tokens.passed()
            if job.num_prompt_logprobs is not None:
                scores, worker.num_wrong_scores = scripted_scores(job, worker.num_wrong_scores), 0
                yield worker_pb2.PrefillEvent(prompt_logprobs=wire.prompt_logprobs_to_wire(scores))
                await worker.after_scores.passed()
            tokens = _first_tokens(job)
            finished.set_result(tokens)
            first_tokens = wire.first_tokens_to_wire(
                tokens, queue_s=0.0, prefill_s=worker.prefill_s, num_cached=worker.num_cached
            )
            yield worker_pb2.PrefillEvent(first_tokens=first_tokens)
        except asyncio.CancelledError:
            worker.cancelled.set()
            raise

    async def Abandon(self, request: worker_pb2.AbandonRequest, context: Context) -> worker_pb2.AbandonResponse:
        self._worker.abandoned.put_nowait(request.ticket)
        return worker_pb2.AbandonResponse()


def scripted_scores(job: PrefillJob, num_wrong: int = 0) -> PromptLogprobs:
    """Return the log-probabilities that every scripted worker has for a prompt: those of its tokens, of the most likely
    tokens that the job asks for, and of `num_wrong` tokens that the prompt does not have."""
    num_tokens, num_top = len(job.token_ids) - job.num_committed - 1 + num_wrong, job.num_prompt_logprobs or 0
    values = [-float(place) for place in range(1, num_tokens + 1)]
    top = [float(-rank) for rank in range(1, num_top + 1)] * num_tokens
    return PromptLogprobs(
        first_position=1,
        num_top=num_top,
        logprobs=struct.pack(f"<{num_tokens}f", *values),
        ranks=wire.pack_ids(range(1, num_tokens + 1)),
        top_token_ids=wire.pack_ids(list(range(num_top)) * num_tokens),
        top_logprobs=struct.pack(f"<{len(top)}f", *top),
    )


def _first_tokens(job: PrefillJob) -> tuple[SampledToken, ...]:
    prompt = job.token_ids[: len(job.token_ids) - job.num_committed]
    return tuple(sampled(prompt, seed, job.num_committed, job.stops, job.sampling.num_logprobs) for seed in job.seeds)


class _About(worker_pb2_grpc.WorkerServicer):
    def __init__(self, worker: ScriptedWorker) -> None:
        self._worker = worker

    async def Inspect(self, request: worker_pb2.InspectRequest, context: Context) -> worker_pb2.InspectResponse:
        return worker_pb2.InspectResponse(member=str(self._worker.id), blocks={"free": 10}, figures={"running": 2.0})

    async def DrainWorker(
        self, request: worker_pb2.DrainWorkerRequest, context: Context
    ) -> worker_pb2.DrainWorkerResponse:
        self._worker.state = replace(self._worker.member, state=MemberState.DRAINING).state
        self._worker.drained.set()
        return worker_pb2.DrainWorkerResponse()

    async def SetRole(self, request: worker_pb2.SetRoleRequest, context: Context) -> worker_pb2.SetRoleResponse:
        """Change the role. The test registers it."""
        former, self._worker.role = self._worker.role, Role(MEMBER_ROLES.word(request.role))
        return worker_pb2.SetRoleResponse(former_role=MEMBER_ROLES.number(former))
