"""A worker's server whose members' calls come as frames, and a channel to it: both ends are real."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from cluster.accounts.audit import Audit
from cluster.auth.gate import MemberGate
from cluster.auth.keys import ClusterKeys
from cluster.auth.member_channel import MemberChannel, open_member_channel
from cluster.errors import QueueFull
from cluster.messages import MemberId
from cluster.observe.telemetry import Telemetry
from cluster.serving.serving import GrpcServer
from tandem.internal.v1 import kv_pb2, kv_pb2_grpc, worker_pb2, worker_pb2_grpc
from tests.polling import until

KEYS = ClusterKeys(b"k" * 32)
CALLEE = MemberId("decode-0", "1")
TIMEOUT_S = 20.0


class Callee(worker_pb2_grpc.WorkerServicer, worker_pb2_grpc.PrefillWorkerServicer, kv_pb2_grpc.KvTransferServicer):
    """Records how each call came, and whether it was cancelled and has ended."""

    def __init__(self) -> None:
        self.telemetry = Telemetry()
        self.contexts: list[object] = []
        self.num_cancelled = self.num_released = 0  # calls of Inspect
        self.num_sent = self.num_ended = 0  # events of SubscribeCacheEvents, and its calls
        self.num_handoffs = 0  # in progress
        self.event = worker_pb2.CacheEvents(member="m" * 10_000)
        self.answer = worker_pb2.InspectResponse(member="a@1")
        self.is_open = asyncio.Event()
        self.may_release = asyncio.Event()
        self.may_release.set()

    async def Inspect(self, request: worker_pb2.InspectRequest, context: Any) -> worker_pb2.InspectResponse:
        self.contexts.append(context)
        try:
            await self.is_open.wait()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            await self.may_release.wait()
            self.num_released += 1
            raise
        return self.answer

    async def Abandon(self, request: worker_pb2.AbandonRequest, context: Any) -> worker_pb2.AbandonResponse:
        self.contexts.append(context)
        raise QueueFull("the queue is full: ü", retry_after_s=1.5)

    async def SubscribeCacheEvents(
        self, request: worker_pb2.SubscribeCacheEventsRequest, context: Any
    ) -> AsyncIterator[worker_pb2.CacheEvents]:
        try:
            for number in range(2_000):
                yield worker_pb2.CacheEvents(next_number=number, member=self.event.member)
                self.num_sent += 1
        finally:
            self.num_ended += 1

    async def HandOff(self, request_iterator: Any, context: Any) -> AsyncIterator[kv_pb2.ExporterMessage]:
        self.num_handoffs += 1
        try:
            async for message in request_iterator:
                yield kv_pb2.ExporterMessage(refused=kv_pb2.Refused(reason=message.settle.reason))
        finally:
            self.num_handoffs -= 1


@asynccontextmanager
async def served(
    port: int = 0, keys: ClusterKeys = KEYS, callers: ClusterKeys | None = None
) -> AsyncIterator[tuple[Callee, GrpcServer, MemberChannel]]:
    """`callers`: the keys of the channel, if they are not the callee's."""
    callee = Callee()
    gate = MemberGate(keys, CALLEE, callee.telemetry, Audit())
    server = GrpcServer(service_names=[], telemetry=callee.telemetry, gate=gate)
    gate.serve(server)
    worker_pb2_grpc.add_WorkerServicer_to_server(callee, server.grpc)
    worker_pb2_grpc.add_PrefillWorkerServicer_to_server(callee, server.grpc)
    kv_pb2_grpc.add_KvTransferServicer_to_server(callee, server.grpc)
    port = server.bind("127.0.0.1", port)
    await server.start()
    try:
        async with (
            asyncio.timeout(TIMEOUT_S),
            open_member_channel(f"127.0.0.1:{port}", keys=callers or keys, caller="router-0@1") as channel,
        ):
            yield callee, server, channel
    finally:
        callee.may_release.set()
        await server.stop(0)


async def until_true(holds: Callable[[], bool], *, what: str) -> None:
    async def look() -> bool:
        return holds()

    await until(look, what=what)
